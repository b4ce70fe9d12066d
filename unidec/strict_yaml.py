"""YAML 1.2 for parameters, by ruamel.yaml as DVC reads the same file: plain data only, every key's line known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node

from unidec.errors import ConfigError

KeyPath = tuple[str, ...]


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
    yaml, where = YAML(typ="safe", pure=True), str(path)
    try:
        node = yaml.compose(path.read_bytes().decode("utf-8"))
        lines = dict(_lines(node, ()))
        value = {} if node is None else yaml.constructor.construct_document(node)
    except FileNotFoundError as error:
        fix = "run in the folder that holds params.yaml, name one with --params, or write one: unidec init DIR"
        raise ConfigError("no such parameter file", where=where, fix=fix) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=where) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError("not UTF-8", where=f"{where}:{line}", fix="save the file as UTF-8") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where += f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"not YAML for parameters: {error.problem or error.context}", where=where) from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"not YAML for parameters: {error}", where=where) from error
    if not isinstance(value or {}, dict):
        raise ConfigError("no mapping at the top", where=where, got=type(value).__name__, expected="key: value")
    return value or {}, lines


def _lines(node: Node | None, prefix: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    for key_node, value_node in node.value if isinstance(node, MappingNode) else ():
        key = (*prefix, str(key_node.value))
        yield key, key_node.start_mark.line + 1
        yield from _lines(value_node, key)
