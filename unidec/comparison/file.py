"""A comparison file: which systems, on which data, with which seeds; checked as strictly as params.yaml.

Overrides (`common`, `set`) may be nested as in params.yaml or given by key path: `pool: {beta: 2}` or `pool.beta: 2`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from unidec.errors import ConfigError
from unidec.problems import nearest, problem, short, valid_values
from unidec.sections import Count, Section, Seed
from unidec.strict_yaml import KeyPath, read_yaml

Name = Annotated[str, StringConstraints(min_length=1, max_length=60, pattern=r"^[^/*?\[\]\x00-\x1f]+$")]
Overrides = dict[str, Any]


class DataEntry(Section):
    """A data set with a choice of text: one table of the comparison."""

    path: str = Field(description="folder of raw files, from where the command is run")
    about: str = Field("", description="one line")
    text: Literal["title", "title+content"] = Field("title", description="short-text or long-text task")
    max_length: Annotated[int, Field(ge=3, le=512)] = Field(32, description="tokens a text")
    train: Count | None = Field(None, description="only the first so many training queries, and labels they know")
    test: Count | None = Field(None, description="only the first so many test queries")
    set: Overrides = Field({}, description="parameters for every recipe on this data set")


class CellEntry(Section):
    """A system: a recipe, another cell with changes, another cell's model served otherwise, or a peer."""

    recipe: str | None = Field(None, description="a shipped recipe")
    like: str | None = Field(None, description="a cell whose settings this one starts from")
    model_of: str | None = Field(None, description="a cell whose trained model this one serves with other index keys")
    peer: str | None = Field(None, description="a system from outside")
    after: str | None = Field(None, description="a cell whose model is this one's start (encoder.start)")
    about: str = Field("", description="one line")
    set: Overrides = Field({}, description="parameters over those of the recipe, `common` and the data set")
    options: Overrides = Field({}, description="a peer's options")
    data: list[str] | None = Field(None, description="only on these data sets")
    seeds: list[Seed] | None = Field(None, description="other seeds than the comparison's")


class GroupEntry(Section):
    """Cells that differ in one thing, beside their base: an ablation."""

    base: str = Field(description="the cell that the others are compared with")
    cells: list[str] = Field(description="the others, in order")
    about: str = Field("", description="which table of which paper this repeats")
    finding: str = Field("", description="what came out")
    metrics: list[str] = Field([], description="columns; empty: the headline")


class ComparisonFile(Section):
    """All of a comparison file."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")] = Field(
        description="the folder under runs/compare"
    )
    title: str = Field("", description="heading of the report")
    about: str = Field("", description="one line")
    notes: list[str] = Field([], description="paragraphs of the report: what was found")
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field([0], description="one run each")
    threads: Annotated[int, Field(ge=0)] = Field(0, description="threads of each cell; 0: the cores over --jobs")
    minutes: Annotated[float, Field(gt=0)] | None = Field(
        None, description="time for each training: epochs are chosen to fill it; none: as many as optim.epochs says"
    )
    keep_models: bool = Field(False, description="keep every model and bundle, not only those that other cells need")
    common: Overrides = Field({}, description="parameters for every recipe and, where they apply, every peer")
    data: Annotated[dict[Name, DataEntry], Field(min_length=1)] = Field(description="data sets by name")
    cells: Annotated[dict[Name, CellEntry], Field(min_length=1)] = Field(description="systems by name")
    groups: dict[str, GroupEntry] = Field({}, description="ablations by title")


class ComparisonError(ConfigError):
    """All that is wrong with a comparison file, found in one go; `problems` holds one text for each."""

    def __init__(self, problems: list[str], where: str) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} in the comparison file", *problems]), where=where)


Origin = dict[str, str]


def read_file(path: str | Path) -> tuple[ComparisonFile | None, Origin, list[tuple[KeyPath, str]]]:
    """Read and check a comparison file's form.

    Returns:
        The file without its wrong keys (None where too little is left), the line of each key path in words, and the
        problems, each with its key path.

    Raises:
        ConfigError: no such file, or not YAML.
    """
    path = Path(path)
    if not path.is_file():
        folder = Path("comparison")
        known = sorted(str(file) for file in folder.glob("*.yaml") if file.name != "dvc.yaml")
        raise ConfigError(
            "no such comparison file", where=str(path), expected=f"one of {', '.join(known)}" if known else None,
            fix="docs/comparing.md shows how to write one",
        )  # fmt: skip
    raw, lines = read_yaml(path)
    origin = {".".join(key): f"line {line}" for key, line in lines.items()}
    values = _no_nulls(raw)
    try:
        return ComparisonFile.model_validate(values), origin, []
    except ValidationError as error:
        details = error.errors(include_url=False)
    by_key: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in details:
        by_key.setdefault(_key_path(detail, raw), []).append(detail)
    problems = [(key, _explain(key, group, origin)) for key, group in by_key.items()]
    try:
        return ComparisonFile.model_validate(_without(values, by_key)), origin, problems
    except ValidationError:
        return None, origin, problems


def flat(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`{"pool": {"beta": 2}, "pool.eta": 1}` -> `{"pool.beta": 2, "pool.eta": 1}`; an empty section is nothing."""
    found: dict[str, Any] = {}
    for key, value in overrides.items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": leaf for name, leaf in flat(value).items()}
        elif value is not None or "." in key:
            found[key] = value
    return found


def one_of(names: Iterable[str]) -> str:
    """What may stand in a place, in words."""
    listed = list(names)
    return f"one of {', '.join(listed)}" if listed else "nothing: there is none"


def _no_nulls(raw: dict[str, Any]) -> dict[str, Any]:
    """A cell or section whose keys are all commented out reads as null: that is an empty one."""
    values = copy.deepcopy(raw)
    for key in ("common", "groups"):
        if key in values and values[key] is None:
            values[key] = {}
    return values


def _key_path(detail: ErrorDetails, raw: dict[str, Any]) -> KeyPath:
    """The key path of an error, as far as the file has it, and one key further."""
    path: list[str] = []
    node: Any = raw
    for part in detail["loc"]:
        if part == "[key]":
            break
        path.append(str(part))
        if not isinstance(node, dict) or part not in node:
            break
        node = node[part]
        if not isinstance(node, dict):
            break
    return tuple(path)


def _explain(key: KeyPath, group: list[ErrorDetails], origin: Origin) -> str:
    """One problem from all that pydantic says about one key."""
    name, got = ".".join(key), short(group[0]["input"])
    kinds = {detail["type"] for detail in group}
    if "extra_forbidden" in kinds:
        known = list(_model_of(key).model_fields)
        return problem(name, "unknown key", got, one_of(known), origin, nearest(key[-1], known))
    if "missing" in kinds:
        parent = ".".join(key[:-1])
        where = {name: origin[parent]} if parent in origin else {}
        return problem(name, "missing", "nothing", _model_of(key).model_fields[key[-1]].description, where)
    if kinds & {"model_type", "model_attributes_type", "dict_type"}:
        return problem(name, "not a section", got, "keys under it", origin)
    expected = " or ".join(dict.fromkeys(_valid(detail) for detail in group))
    options = [str(option) for detail in group for option in detail.get("ctx", {}).get("expected", "").split("'")[1::2]]
    near = nearest(group[0]["input"], options) if isinstance(group[0]["input"], str) else None
    return problem(name, "wrong value", got, expected, origin, near)


def _valid(detail: ErrorDetails) -> str:
    if detail["type"] == "string_pattern_mismatch":
        return f"a name that matches {detail['ctx']['pattern']}"
    return {"list_type": "a list", "too_short": "at least one"}.get(detail["type"], valid_values(detail))


def _model_of(key: KeyPath) -> type[Section]:
    """The section that holds this key."""
    kinds: dict[str, type[Section]] = {"data": DataEntry, "cells": CellEntry, "groups": GroupEntry}
    return kinds.get(key[0], ComparisonFile) if len(key) > 2 else ComparisonFile


def _without(values: dict[str, Any], bad: Iterable[KeyPath]) -> dict[str, Any]:
    """The values without the wrong keys."""
    kept = copy.deepcopy(values)
    for path in bad:
        node: Any = kept
        for part in path[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(path[-1], None)
    return kept
