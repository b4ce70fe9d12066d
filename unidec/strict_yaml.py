"""YAML for parameters: plain data only, duplicate keys refused, every key's line known.

Scalars follow YAML 1.2's core schema, as DVC reads the same file: `1e-3` is a number, `no` and `on` are words.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from unidec.errors import ConfigError

KeyPath = tuple[str, ...]

PLAIN = ("str", "int", "float", "bool", "null", "map", "seq")


class _Loader(yaml.SafeLoader):
    """SafeLoader with 1.2's scalars; keeps the line of every key and refuses a key given twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own class attribute: start from none)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    # int before float: PyYAML takes the first pattern that matches
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text[2:], base) if base != 10 else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse_scalar(text: str) -> Any:
    """The value that `text` would have behind a key in a parameter file (`--set key=text`).

    Raises:
        ConfigError: `text` is not YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  (a SafeLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError("not a YAML value", got=text, expected="a number, a word, true or false") from error


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Read a file that holds one mapping.

    Returns:
        The mapping, and the 1-based line of each key path in it.

    Raises:
        ConfigError: no such file, not UTF-8, not YAML, a key given twice, or no mapping; with `file:line`.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ConfigError("not UTF-8", where=f"{path}:{line}", fix="save the file as UTF-8") from error
    except FileNotFoundError as error:
        fix = "run in the folder that holds params.yaml, name one with --params, or write one: unidec init DIR"
        raise ConfigError("no such parameter file", where=str(path), fix=fix) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from error
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        if node is not None:
            _walk(node, (), lines, path, depth=0)
        value = {} if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"not YAML: {error.problem or error.context}", where=where) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"not YAML: {error}", where=str(path)) from error
    finally:
        loader.dispose()
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError("no mapping at the top", where=str(path), got=type(value).__name__, expected="key: value")
    return value, lines


def _walk(node: yaml.Node, prefix: KeyPath, lines: dict[KeyPath, int], path: Path, depth: int) -> None:
    """Note the line of every key; refuse a key given twice, tags and nesting that parameters never have."""
    line = node.start_mark.line + 1
    if depth > 8:
        raise ConfigError("nested too deeply for parameters", where=f"{path}:{line}")
    if node.tag.removeprefix("tag:yaml.org,2002:") not in PLAIN:
        raise ConfigError("tags are not allowed", where=f"{path}:{line}", got=node.tag, expected="plain values")
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _walk(child, prefix, {}, path, depth + 1)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[Hashable, int] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:
            name = ".".join((*prefix, key))
            raise ConfigError(
                f"key {name!r} is given twice",
                where=f"{path}:{line}",
                got=f"first on line {seen[key]}",
                fix="keep one of the two",
            )
        seen[key] = lines[(*prefix, key)] = line
        _walk(value_node, (*prefix, key), lines, path, depth + 1)
