"""params.yaml as frozen, typed sections: unknown keys refused, all errors at once, recipes, fingerprint.

`load_params` is called by the command line and the flows only; everything else takes one section or plain arguments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from unidec.errors import ConfigError, without_credentials
from unidec.params import Params
from unidec.problems import ParamsError, nearest, problem, short, valid_values
from unidec.sections import Section
from unidec.strict_yaml import KeyPath, parse_scalar, read_yaml

OPERATIONS = ("device", "raw", "validation", "source", "retrain", "gate", "drift", "serve", "tracking")
"""Sections that do not decide a model: a bundle does not keep them."""

# a recipe sets how to train, not on what, where, or what becomes of it
_NOT_OF_A_RECIPE = {
    "recipe", "data", "raw", "validation", "seed", "device", "run", "source", "warm", "retrain", "gate", "drift",
    "serve", "tracking",
}  # fmt: skip


def leaves(params: Section) -> Iterator[tuple[str, Any]]:
    """Each parameter as (`section.key`, value), in the order of the file."""
    for name in type(params).model_fields:
        value = getattr(params, name)
        if isinstance(value, Section):
            yield from ((f"{name}.{key}", leaf) for key, leaf in leaves(value))
        else:
            yield name, value


def known_keys() -> list[str]:
    """Every key path that a parameter file may hold."""
    return [key for key, _ in leaves(Params())]


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    folder = resources.files("unidec") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_params(path: str | Path | None = "params.yaml", overrides: Mapping[str, Any] | None = None) -> Params:
    """Read a parameter file: its recipe's values, then its own, then `overrides`.

    Args:
        path: YAML file with the sections of `Params`; a key that is missing or has no value takes its recipe's value,
            else the default. None: no file, only `overrides`.
        overrides: `{"pool.beta": 2}`: values by key path.

    Raises:
        ConfigError: everything that is wrong, at once, with key path, value, what was expected and the nearest name.
    """
    raw, lines = ({}, {}) if path is None else read_yaml(Path(path))
    origin = {".".join(key): f"line {line}" for key, line in lines.items()}
    values = _given(raw)
    for key, value in (overrides or {}).items():
        *above, name = key.split(".")
        section = values
        for part in above:
            if not isinstance(section.get(part), dict):
                section[part] = {}
            section = section[part]
        section[name] = value
        origin[key] = "--set"
    return build_params(values, origin, "parameters" if path is None else str(path))


def build_params(values: dict[str, Any], origin: dict[str, str], where: str) -> Params:
    """Nested values over those of their recipe; `origin` is where a key path was given. Errors: `load_params`."""
    problems = []
    recipe, names = values.get("recipe"), recipe_names()
    if recipe in names:
        values = _merge(_read_recipe(recipe), values)
    elif isinstance(recipe, str):
        expected, near = f"one of {', '.join(names)}", nearest(recipe, names)
        problems.append(problem("recipe", "no such recipe", short(recipe), expected, origin, near))
    for name, section in values.items():
        for key, value in section.items() if isinstance(section, dict) else [("", section)]:
            if without_credentials(str(value)) != str(value):
                what, expected = "a password or token in a parameter", "an address without credentials"
                fix = "set it in the environment; source.secrets names Prefect secrets for DVC's processes"
                path = f"{name}.{key}".rstrip(".")
                problems.append(problem(path, what, short(value), expected, origin, fix=fix))
    try:
        params = Params.model_validate(values)
    except ValidationError as error:
        raise ParamsError(problems + _explain(values, error, origin), where) from None
    if problems:
        raise ParamsError(problems, where)
    return params


def parse_overrides(assignments: list[str]) -> dict[str, Any]:
    """`["pool.beta=2"]` -> `{"pool.beta": 2}`; values are read as YAML would read them.

    Raises:
        ConfigError: an assignment without `=`, or a key given twice.
    """
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError("not an assignment", where="--set", got=assignment, expected="section.key=value")
        if key.strip() in overrides:
            raise ConfigError(f"{key.strip()} is set twice", where="--set", got=assignment, fix="keep one of the two")
        overrides[key.strip()] = parse_scalar(text)
    return overrides


def with_settings(params: Params, settings: Mapping[str, Any]) -> Params | None:
    """The parameters with other values by key path; None if they are in conflict."""
    values = params.model_dump()
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        (values[section] if section else values)[name] = value
    try:
        return Params.model_validate(values)
    except ValidationError:
        return None


def flatten(params: Params) -> dict[str, str | int | float]:
    """Every parameter by its key path, as a tracking server takes it: true/false in words, none as an empty word."""
    words = {True: "true", False: "false", None: ""}

    def shown(value: Any) -> str | int | float:
        if isinstance(value, dict | list):
            return json.dumps(value)
        return words[value] if value is None or isinstance(value, bool) else value

    return {key: shown(value) for key, value in leaves(params)}


def fingerprint(params: Params, *sections: str) -> str:
    """sha256 (hex) over the canonical JSON of the named sections or key paths; when none is named, of all.

    The recipe's name is never part of all: its values are.
    """
    wanted = {
        key: value
        for key, value in leaves(params)
        if (not sections and key != "recipe") or any(key == name or key.startswith(f"{name}.") for name in sections)
    }
    missing = [name for name in sections if not any(key == name or key.startswith(f"{name}.") for key in wanted)]
    if missing:
        raise KeyError(f"no such parameters: {', '.join(missing)}")
    text = json.dumps(wanted, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_recipe(name: str) -> dict[str, Any]:
    with resources.as_file(resources.files("unidec") / "recipes" / f"{name}.yaml") as path:
        values = _given(read_yaml(path)[0])
    unfit = sorted(_NOT_OF_A_RECIPE & values.keys())
    if unfit:
        raise ConfigError(f"a recipe cannot set {', '.join(unfit)}", where=f"recipe {name}")
    return values


def _section(name: str) -> type[Section] | None:
    """The section of this name; None: a plain parameter, or an unknown name."""
    field = Params.model_fields.get(name)
    return type(field.default) if field is not None and isinstance(field.default, Section) else None


def _given(raw: dict[str, Any]) -> dict[str, Any]:
    """Without keys that have no value: params.yaml may list them, `dvc exp run --set-param` finds them by that.

    An unknown key stays, to be refused; a section that reads as null (its keys are commented out) is empty.
    """
    given = dict(raw)
    for name, value in raw.items():
        section = _section(name)
        if section is not None and value is None:
            given[name] = {}
        elif section is not None and isinstance(value, dict):
            known = section.model_fields
            given[name] = {key: leaf for key, leaf in value.items() if leaf is not None or key not in known}
    return given


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _explain(values: dict[str, Any], error: ValidationError, origin: dict[str, str]) -> list[str]:
    """Every problem as text: the wrong keys, and the conflicts among those that are right."""
    by_key: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] != "conflict":
            names = tuple(str(part) for part in detail["loc"])  # deeper: what pydantic adds, the member of a union
            by_key.setdefault(names[: 2 if _section(names[0]) else 1], []).append(detail)
    problems = [_field_problem(key, group, origin) for key, group in by_key.items()]
    # with the wrong keys at their defaults the rest can be checked for conflicts
    kept: dict[str, Any] = {}
    for name, value in values.items():
        section = _section(name)
        if name in Params.model_fields and (name,) not in by_key:
            if section is not None:
                value = section(**{key: leaf for key, leaf in value.items() if (name, key) not in by_key})
            kept[name] = value
    rest = Params.model_construct(**kept)
    found = dict(leaves(rest))
    for conflict in rest.conflicts():
        keys = conflict.keys.split()
        if not any(bad == tuple(key.split("."))[: len(bad)] for bad in by_key for key in keys):
            got = ", ".join(f"{key} = {found[key]!r}" for key in keys)
            problems.append(problem(keys[0], conflict.what, got, None, origin, fix=conflict.fix))
    return problems


def _field_problem(key: KeyPath, group: list[ErrorDetails], origin: dict[str, str]) -> str:
    """One problem from all that pydantic reports about one key."""
    name, got = ".".join(key), short(group[0]["input"])
    kinds = {detail["type"] for detail in group}
    listed = ", ".join((_section(key[0]) or Params).model_fields)
    if "extra_forbidden" in kinds:
        return problem(name, "unknown key", got, f"one of {listed}", origin, _nearest_key(key))
    if kinds & {"model_type", "model_attributes_type"}:
        return problem(name, "not a section", got, f"keys under it: {listed}", origin)
    expected = " or ".join(dict.fromkeys(valid_values(detail) for detail in group))
    options = [str(option) for detail in group for option in detail.get("ctx", {}).get("expected", "").split("'")[1::2]]
    near = nearest(group[0]["input"], options) if isinstance(group[0]["input"], str) else None
    return problem(name, "wrong value", got, expected, origin, near)


def _nearest_key(key: KeyPath) -> str | None:
    """The valid key that was probably meant: of the same name, else like it in the same section, else like it."""
    by_name = {name.rpartition(".")[2]: name for name in known_keys()}
    if key[-1] in by_name:
        return by_name[key[-1]]
    section = _section(key[0]) if len(key) > 1 else None
    if section is not None and (near := nearest(key[-1], list(section.model_fields))):
        return f"{key[0]}.{near}"
    near = nearest(key[-1], [*Params.model_fields, *by_name])
    return by_name.get(near, near) if near else None


def to_yaml(params: Params) -> str:
    """Every parameter as a file that loads to the same values."""
    import yaml

    return yaml.safe_dump(params.model_dump(exclude={"recipe"}), sort_keys=False, allow_unicode=True)


def describe() -> Iterator[tuple[str, str, str, str]]:
    """Each parameter as (key path, default, what it takes, what it does)."""
    schema = Params.model_json_schema()
    for key, default in leaves(Params()):
        section, _, name = key.rpartition(".")
        group = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]] if section else schema
        entry = group["properties"][name or key]
        yield key, json.dumps(default), _takes(entry), entry.get("description", "")


_KINDS = {
    "integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": "none",
    "array": "list", "object": "names and values",
}  # fmt: skip
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _takes(entry: dict[str, Any]) -> str:
    """A JSON schema of one value, in words."""
    if "anyOf" in entry:
        return " or ".join(_takes(option) for option in entry["anyOf"])
    if "enum" in entry or "const" in entry:
        return ", ".join(str(value) for value in entry.get("enum", [entry.get("const")]))
    bounds = [f"{sign} {entry[name]:g}" for name, sign in _BOUNDS.items() if name in entry]
    return " ".join([_KINDS.get(entry.get("type", ""), "value"), *bounds])
