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

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from unidec.conflicts import find_conflicts
from unidec.errors import ConfigError, without_credentials
from unidec.problems import ParamsError, nearest, problem, short, valid_values
from unidec.sections import Params, Section
from unidec.strict_yaml import KeyPath, parse_scalar, read_yaml

OPERATIONS = ("device", "raw", "validation", "source", "retrain", "gate", "drift", "serve", "tracking")
"""Sections that do not decide a model: a bundle does not keep them."""

# a recipe says how to train, not on what, where, or what becomes of it
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
        path: YAML file with the sections of `Params`; a key that is missing or has no value has its recipe's value,
            else the default. None: no file, only `overrides`.
        overrides: `{"pool.beta": 2}`: values by key path.

    Raises:
        ConfigError: everything that is wrong, at once, with key path, value, what was expected and the nearest name.
    """
    raw, lines = ({}, {}) if path is None else read_yaml(Path(path))
    origin = {".".join(key): f"line {line}" for key, line in lines.items()}
    values = _given(raw)
    for key, value in (overrides or {}).items():
        _put(values, tuple(key.split(".")), value)
        origin[key] = "--set"
    return build_params(values, origin, "parameters" if path is None else str(path))


def build_params(values: dict[str, Any], origin: dict[str, str], where: str) -> Params:
    """Nested values over those of their recipe; `origin` says where a key path was given. Errors: `load_params`."""
    recipe = values.get("recipe")
    problems: list[str] = []
    if isinstance(recipe, str):
        if recipe in recipe_names():
            values = _merge(_read_recipe(recipe), values)
        else:
            names = recipe_names()
            expected, near = f"one of {', '.join(names)}", nearest(recipe, names)
            problems.append(problem("recipe", "no such recipe", short(recipe), expected, origin, near))
    problems += [
        problem(key, "a password or token in a parameter", short(value), "an address without credentials", origin,
                fix="set it in the environment; source.secrets names Prefect secrets for DVC's processes")
        for name, section in values.items()
        for key, value in ([(name, section)] if not isinstance(section, dict) else
                           [(f"{name}.{key}", value) for key, value in section.items()])
        if without_credentials(str(value)) != str(value)
    ]  # fmt: skip
    params, found = _validate(values, origin)
    if found or problems or params is None:
        raise ParamsError(problems + found, where)
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

    The recipe's name is never part of all: the values that it stands for are.
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
    """A shipped recipe's values. It says how to train, not on what or where: it has no data, seed or device."""
    with resources.as_file(resources.files("unidec") / "recipes" / f"{name}.yaml") as path:
        values = _given(read_yaml(path)[0])
    unfit = sorted(_NOT_OF_A_RECIPE & values.keys())
    if unfit:
        raise ConfigError(f"a recipe cannot set {', '.join(unfit)}", where=f"recipe {name}")
    return values


def _given(raw: dict[str, Any]) -> dict[str, Any]:
    """Without keys that have no value: params.yaml may list them, `dvc exp run --set-param` finds them by that.

    An unknown key stays, to be refused; a section that reads as null (its keys are commented out) is empty.
    """
    sections = {
        key: type(field.default) for key, field in Params.model_fields.items() if isinstance(field.default, Section)
    }
    given = dict(raw)
    for name in sections.keys() & raw.keys():
        if raw[name] is None:
            given[name] = {}
        elif isinstance(raw[name], dict):
            known = sections[name].model_fields
            given[name] = {key: value for key, value in raw[name].items() if value is not None or key not in known}
    return given


def _put(values: dict[str, Any], key: KeyPath, value: Any) -> None:
    for name in key[:-1]:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    values[key[-1]] = value


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _validate(values: dict[str, Any], origin: dict[str, str]) -> tuple[Params | None, list[str]]:
    """Validated parameters, or every problem: the wrong keys, and the conflicts among those that are right."""
    try:
        return Params.model_validate(values), []
    except ValidationError as error:
        details = [detail for detail in error.errors(include_url=False) if detail["type"] != "conflict"]
    by_key: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in details:
        by_key.setdefault(_key_path(detail), []).append(detail)
    problems = [_field_problem(key, group, origin) for key, group in by_key.items()]
    # with the wrong keys at their defaults the rest can be checked for conflicts
    rest = Params.model_construct(**_sections_without(values, set(by_key)))
    for conflict in find_conflicts(rest):
        paths = [tuple(key.split(".")) for key in conflict.keys]
        if not any(bad == path[: len(bad)] for bad in by_key for path in paths):
            got = ", ".join(f"{key} = {_value(rest, key)!r}" for key in conflict.keys)
            problems.append(problem(conflict.keys[0], conflict.what, got, None, origin, None, conflict.fix))
    return None, problems


def _sections_without(values: dict[str, Any], bad: set[KeyPath]) -> dict[str, Any]:
    """The sections and plain keys of `values`, validated, those in `bad` at their defaults."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        field = Params.model_fields.get(name)
        if field is None or (name,) in bad:
            continue
        if isinstance(field.default, Section):
            value = type(field.default)(**{key: leaf for key, leaf in value.items() if (name, key) not in bad})
        kept[name] = value
    return kept


def _value(params: Params, key: str) -> Any:
    return dict(leaves(params))[key]


def _key_path(detail: ErrorDetails) -> KeyPath:
    """The key path of an error, without what pydantic adds behind it (the member of a union)."""
    names = tuple(str(part) for part in detail["loc"])
    field = Params.model_fields.get(names[0]) if names else None
    depth = 2 if field is not None and isinstance(field.default, Section) else 1
    return names[:depth]


def _field_problem(key: KeyPath, group: list[ErrorDetails], origin: dict[str, str]) -> str:
    """One problem from all that pydantic says about one key."""
    name, got = ".".join(key), short(group[0]["input"])
    kinds = {detail["type"] for detail in group}
    if "extra_forbidden" in kinds:
        section = Params.model_fields[key[0]].default if len(key) > 1 else Params()
        known = f"one of {', '.join(type(section).model_fields)}"
        return problem(name, "unknown key", got, known, origin, _nearest_key(key))
    if kinds & {"model_type", "model_attributes_type"}:
        section = Params.model_fields[key[0]].default
        return problem(name, "not a section", got, f"keys under it: {', '.join(type(section).model_fields)}", origin)
    expected = " or ".join(dict.fromkeys(valid_values(detail) for detail in group))
    near = None
    options = [str(option) for detail in group for option in detail.get("ctx", {}).get("expected", "").split("'")[1::2]]
    if isinstance(group[0]["input"], str):
        near = nearest(group[0]["input"], options)
    return problem(name, "wrong value", got, expected, origin, near)


def _nearest_key(key: KeyPath) -> str | None:
    """The valid key that was probably meant: of the same name, else like it in the same section, else like it."""
    by_name = {name.rpartition(".")[2]: name for name in known_keys()}
    if key[-1] in by_name:
        return by_name[key[-1]]
    if len(key) > 1:
        siblings = list(type(Params.model_fields[key[0]].default).model_fields)
        near = nearest(key[-1], siblings)
        if near:
            return f"{key[0]}.{near}"
    near = nearest(key[-1], [*Params.model_fields, *by_name])
    return by_name.get(near, near) if near else None


def to_yaml(params: Params) -> str:
    """Every parameter as a file that loads to the same values."""
    return yaml.safe_dump(params.model_dump(exclude={"recipe"}), sort_keys=False, allow_unicode=True)


def describe() -> Iterator[tuple[str, str, str, str]]:
    """Each parameter as (key path, default, what it takes, what it does)."""
    schema = Params.model_json_schema()
    for key, default in leaves(Params()):
        section, _, name = key.rpartition(".")
        group = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]] if section else schema
        entry = group["properties"][name or key]
        yield key, json.dumps(default), _takes(entry), entry.get("description", "")


def _takes(entry: dict[str, Any]) -> str:
    """A JSON schema of one value, in words."""
    if "anyOf" in entry:
        return " or ".join(_takes(option) for option in entry["anyOf"])
    if "enum" in entry or "const" in entry:
        return ", ".join(str(value) for value in entry.get("enum", [entry.get("const")]))
    kinds = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "true or false",
        "null": "none",
        "array": "list",
        "object": "names and values",
    }
    words = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {entry[name]:g}" for name, sign in words.items() if name in entry]
    return " ".join([kinds.get(entry.get("type", ""), "value"), *bounds])
