"""params.yaml as frozen, typed sections: unknown keys are rejected, all errors reported together;
recipes, fingerprint.

The file is YAML 1.2, read by ruamel.yaml as DVC reads it: plain data only, with the line of every
key."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node

from unidec.addresses import secrets_of_environment, without_credentials
from unidec.config.params import Params, leaves, nested, what_decides
from unidec.config.section import Section, packaged
from unidec.errors import ConfigError

_PATTERNS = {  # of the sections, in words
    r"^\S(.*\S)?$": "one line that neither begins nor ends with a blank",
    r"^\w([\w. -]*\w)?$": (
        "letters, digits and _, between them also . - and blanks, as in team-unidec"
    ),
}
MEANT = {("data.format", kind): "tables" for kind in ("csv", "tsv", "jsonl", "parquet")}
"""The value that was probably meant, by key and given value, where names do not resemble each
other.
"""

KeyPath = tuple[str, ...]


class ParamsError(ConfigError):
    """Every problem in the parameters or in another file, reported together; `problems` holds one
    text per problem.
    """

    def __init__(self, problems: list[str], where: str | Path, what: str = "parameters") -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} in the {what}", *problems]), where=where)


def origins(lines: Mapping[KeyPath, int]) -> dict[str, str]:
    """The line of each key, in words, by its dotted path."""
    return {".".join(key): f"line {line}" for key, line in lines.items()}


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Read a YAML file with one mapping. Returns the mapping, and the line (1-based) of each key
    path.

    Raises:
        ConfigError: the file does not exist or is not UTF-8 or YAML, a key is given twice, or the
            top level is not a mapping; with `file:line`.
    """
    where = str(path)
    try:
        value, lines = _read(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}",
            where=where,
            fix="run in the folder that holds params.yaml, name one with --params, or write one: "
            "unidec init DIR",
        ) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(
            "not UTF-8", where=f"{where}:{line}", fix="save the file as UTF-8"
        ) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where += f":{mark.line + 1}" if mark else ""
        raise ConfigError(
            f"invalid YAML: {error.problem or error.context}",
            where=where,
            fix="correct this line or the one before",
        ) from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"invalid YAML: {error}", where=where, expected="key: value") from error
    value = value or {}
    if not isinstance(value, dict):
        raise ConfigError(
            "top level is not a mapping",
            where=where,
            got=type(value).__name__,
            expected="key: value",
        )
    return value, lines


def _read(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """What a YAML text says, and its lines."""
    yaml = YAML(typ="safe", pure=True)
    node = yaml.compose(text)
    value = node and yaml.constructor.construct_document(node)
    return value, dict(_lines(node, ()))


def _lines(node: Node | None, prefix: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    for key_node, value_node in node.value if isinstance(node, MappingNode) else ():
        key = (*prefix, str(key_node.value))
        yield key, key_node.start_mark.line + 1
        yield from _lines(value_node, key)


def valid_values(detail: ErrorDetails) -> str:
    """Description of valid values, taken from pydantic's message."""
    words = detail["msg"].removeprefix("Input should be ")
    if detail["type"] == "string_pattern_mismatch":
        return _PATTERNS.get(detail["ctx"]["pattern"], words.removeprefix("String should "))
    return words


def problem(
    key: str,
    what: str,
    got: str,
    expected: str | None,
    origin: Mapping[str, str],
    near: str | None = None,
    fix: str | None = None,
) -> str:
    """A problem as text: key and origin, what is wrong, got, expected, the nearest valid name and
    the fix.
    """
    where = f" ({origin[key]})" if key in origin else ""
    facts = {"expected": expected, "nearest": near, "fix": fix}
    lines = [f"- {key}{where}: {what}", f"    got: {got}"]
    lines += [f"    {name}: {fact}" for name, fact in facts.items() if fact]
    return "\n".join(lines)


def short(value: Any) -> str:
    """A value as Python writes it, without credentials, cut to 80 characters."""
    text = without_credentials(repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(name: str, names: list[str]) -> str | None:
    """The most similar of `names`; None if none is similar."""
    by_lower = {known.lower(): known for known in names}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def known_keys() -> list[str]:
    """All key paths that a parameter file may contain."""
    return list(what_decides())


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    files = [entry.name for entry in (resources.files("unidec") / "recipes").iterdir()]
    return sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))


def load_params(
    path: str | Path | None = "params.yaml", overrides: Mapping[str, Any] | None = None
) -> Params:
    """Read a parameter file. `overrides` take precedence over the file, and the file over its
    recipe.

    Args:
        path: YAML file with the sections of `Params`; a key that is missing or has no value takes
            the value of the recipe, or else the default. None: no file, only `overrides`, as from
            Python.
        overrides: values by key path, such as `{"pool.beta": 2}`.

    Raises:
        ConfigError: reports all problems together, each with key path, value, expected values and
        the nearest name.
    """
    overrides = overrides or {}
    if path is None:
        return build_params(overrides, {}, "")
    raw, lines = read_yaml(Path(path))
    origin = origins(lines) | dict.fromkeys(overrides, "--set")
    return build_params({**by_key_path(raw), **overrides}, origin, path)


def build_params(values: Mapping[str, Any], origin: Mapping[str, str], where: str | Path) -> Params:
    """Parameters from values by key path, which take precedence over their recipe.

    Args:
        origin: place where each value was set, by key path.
        where: the file, for error messages; "": none.

    Raises:
        ConfigError: see `load_params`.
    """
    problems = []
    known = known_keys()
    recipe = values.get("recipe")
    names = recipe_names()
    if recipe in names:
        values = {**by_key_path(packaged(f"recipes/{recipe}.yaml")), **values}
    elif isinstance(recipe, str):
        problems.append(
            problem(
                "recipe",
                "no such recipe",
                short(recipe),
                f"one of {', '.join(names)}",
                origin,
                near=nearest(recipe, names),
            )
        )
    secrets = secrets_of_environment()
    for key, value in values.items():
        if any(without_credentials(text, secrets) != text for text in _texts(value)):
            problems.append(
                problem(
                    key,
                    "a password or token in a parameter",
                    short(value),
                    "an address without credentials",
                    origin,
                    fix="set it in the environment; source.secrets names Prefect secrets for DVC's "
                    "processes",
                )
            )
        if key not in known:
            problems.append(_no_such_key(key, value, origin))
    valid = {key: value for key, value in values.items() if key in known}
    wrong: dict[str, str] = {}
    try:
        params = Params.model_validate(nested(valid))
    except ValidationError as error:
        wrong = _wrong_values(error, origin)
        # with the defaults in place of wrong values, the other values can be checked for conflicts
        valid = {key: value for key, value in valid.items() if key not in wrong}
        params = Params.model_validate(nested(valid))
    problems += wrong.values()
    found = dict(leaves(params))
    for conflict in params.conflicts():
        keys = conflict.keys.split()
        if wrong.keys().isdisjoint(keys):
            got = ", ".join(f"{key} = {found[key]!r}" for key in keys)
            # a key that the file sets has a line
            key = next((key for key in keys if key in origin), keys[0])
            problems.append(problem(key, conflict.what, got, None, origin, fix=conflict.fix))
    if problems:
        raise ParamsError(problems, where)
    return params


def _texts(value: Any) -> list[str]:
    """The texts in a value, without the keys of a mapping: those of `source.secrets` are names of
    variables.
    """
    if isinstance(value, dict):
        value = list(value.values())
    return list(map(str, value)) if isinstance(value, list) else [str(value)]


def parse_overrides(assignments: list[str]) -> dict[str, Any]:
    """`["pool.beta=2"]` -> `{"pool.beta": 2}`; values are parsed as YAML.

    Raises:
        ConfigError: an assignment without `=`, a key given twice, or a value that is not YAML.
    """
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        key = name.strip()
        if not equals or not key:
            raise ConfigError(
                "not an assignment", where="--set", got=assignment, expected="section.key=value"
            )
        if key in overrides:
            raise ConfigError(
                f"{key} is set twice", where="--set", got=assignment, fix="keep one of the two"
            )
        try:
            overrides[key] = YAML(typ="safe", pure=True).load(text)
        except (YAMLError, ValueError) as error:
            raise ConfigError(
                "not a YAML value", got=text, expected="a number, a word, true or false"
            ) from error
    return overrides


def with_settings(params: Params, settings: Mapping[str, Any]) -> Params | None:
    """The parameters with `settings` (values by key path) applied; None if they conflict."""
    changed = Params.model_validate(nested({**dict(leaves(params)), **settings}))
    return None if any(changed.conflicts()) else changed


def flatten(params: Params) -> dict[str, str | int | float]:
    """All parameters by key path, for a tracking server: booleans, lists and dicts as JSON, None as
    an empty string.
    """

    def plain(value: Any) -> str | int | float:
        if isinstance(value, bool | dict | list):
            return json.dumps(value)
        return "" if value is None else value

    return {key: plain(value) for key, value in leaves(params)}


def fingerprint(params: Params, *keys: str) -> str:
    """sha256 (hex) over the canonical JSON of the parameters at these key paths.

    The default is all parameters without the recipe's name, but with the values that it sets.
    """
    values = dict(leaves(params))
    del values["recipe"]
    text = json.dumps(
        {key: values[key] for key in keys or values},
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _section(name: str) -> type[Section] | None:
    """Class of the section with this name; None for a parameter outside sections or an unknown
    name.
    """
    field = Params.model_fields.get(name)
    default = field and field.default
    return type(default) if isinstance(default, Section) else None


def by_key_path(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key path, which may be nested as in params.yaml: `{"pool": {"beta": 2}}`. Keys and
    sections without a value are left out, unknown keys are kept.

    params.yaml lists keys without a value so that `dvc exp run --set-param` finds them.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        section = _section(name)
        if section is None:
            found[str(name)] = value
        elif isinstance(value, dict):
            for key, leaf in value.items():
                if leaf is not None or key not in section.model_fields:
                    found[f"{name}.{key}"] = leaf
        elif value is not None:
            found[name] = value
    return found


def _wrong_values(error: ValidationError, origin: Mapping[str, str]) -> dict[str, str]:
    """All problems with the values of known keys as text, by key."""
    wrong: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        # further parts are added by pydantic (the member of a union)
        names = list(map(str, detail["loc"]))
        depth = 2 if _section(names[0]) else 1
        wrong.setdefault(".".join(names[:depth]), []).append(detail)
    problems = {}
    for key, details in wrong.items():
        got = details[0]["input"]
        expected = " or ".join(dict.fromkeys(map(valid_values, details)))
        near = None
        if isinstance(got, str):
            quoted = "".join(detail.get("ctx", {}).get("expected", "") for detail in details)
            near = MEANT.get((key, got)) or nearest(got, quoted.split("'")[1::2])
        problems[key] = problem(key, "wrong value", short(got), expected, origin, near=near)
    return problems


def _no_such_key(key: str, value: Any, origin: Mapping[str, str]) -> str:
    """Text about an unknown key, with the valid key that was probably meant."""
    got = short(value)
    known = known_keys()
    first, _, name = key.rpartition(".")
    section = _section(first or name)
    listed = ", ".join((section or Params).model_fields)
    if section is not None and not first:
        return problem(key, "not a section", got, f"keys under it: {listed}", origin)
    near = nearest(key, [*Params.model_fields, *known])
    for other in known:
        if other.rpartition(".")[2] == name:
            near = other
    return problem(key, "unknown key", got, f"one of {listed}", origin, near=near)


def to_yaml(params: Params) -> str:
    """All parameters as YAML that loads to the same values."""
    import yaml

    return yaml.safe_dump(
        params.model_dump(exclude={"recipe"}), sort_keys=False, allow_unicode=True
    )


def describe() -> Iterator[tuple[str, str, str, str]]:
    """Each parameter as (key path, default, valid values, description)."""
    schema = Params.model_json_schema()
    for key, default in leaves(Params()):
        section, _, name = key.rpartition(".")
        kind = _section(section)
        group = schema["$defs"][kind.__name__] if kind else schema
        entry = group["properties"][name]
        yield key, json.dumps(default), _takes(entry), " ".join(entry["description"].split())


def _takes(entry: dict[str, Any]) -> str:
    """The valid values of a JSON schema, as text."""
    if "anyOf" in entry:
        return " or ".join(_takes(option) for option in entry["anyOf"])
    if values := entry.get("enum", [entry["const"]] if "const" in entry else []):
        return ", ".join(map(str, values))
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    words = [entry.get("type", "value")]
    for name, sign in signs.items():
        if name in entry:
            words.append(f"{sign} {entry[name]:g}")
    return " ".join(words)
