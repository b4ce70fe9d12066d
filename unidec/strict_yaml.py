"""YAML 1.2 for parameters, by ruamel.yaml as DVC reads the same file: plain data only, every key's line known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from unidec.errors import ConfigError

KeyPath = tuple[str, ...]
_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")}
_MAX_DEPTH = 8


def parse_scalar(text: str) -> Any:
    """The value that `text` would have behind a key in a parameter file (`--set key=text`).

    Raises:
        ConfigError: `text` is not YAML.
    """
    try:
        return YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError) as error:
        raise ConfigError("not a YAML value", got=text, expected="a number, a word, true or false") from error


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Read a file that holds one mapping: the mapping, and the 1-based line of each key path in it.

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
    lines: dict[KeyPath, int] = {}
    yaml = YAML(typ="safe", pure=True)
    try:
        node = yaml.compose(text)
        if node is not None:
            _note_lines(node, (), lines, path)
        value = {} if node is None else yaml.constructor.construct_document(node)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        if isinstance(error, DuplicateKeyError):
            raise ConfigError(
                "a key is given twice", where=where, got=error.problem, fix="keep one of the two"
            ) from error
        raise ConfigError(f"not YAML: {error.problem or error.context}", where=where) from error
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"not YAML: {error}", where=str(path)) from error
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError("no mapping at the top", where=str(path), got=type(value).__name__, expected="key: value")
    return value, lines


def _note_lines(node: Node, prefix: KeyPath, lines: dict[KeyPath, int], path: Path, depth: int = 0) -> None:
    """The line of every key; tags and nesting that parameters never have are refused."""
    where = f"{path}:{node.start_mark.line + 1}"
    if depth > _MAX_DEPTH:
        raise ConfigError("nested too deeply for parameters", where=where)
    if str(node.tag) not in _PLAIN:
        fix = "leave the tag out; put a date in quotes"
        raise ConfigError("tags are not allowed", where=where, got=node.tag, expected="plain values", fix=fix)
    if isinstance(node, SequenceNode):
        for child in node.value:
            _note_lines(child, prefix, {}, path, depth + 1)
    for key_node, value_node in node.value if isinstance(node, MappingNode) else ():
        key = (*prefix, str(key_node.value))
        lines[key] = key_node.start_mark.line + 1
        _note_lines(key_node, key, {}, path, depth + 1)
        _note_lines(value_node, key, lines, path, depth + 1)
