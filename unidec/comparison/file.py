"""A comparison file: which systems, on which data, with which seeds; checked as strictly as params.yaml.

Overrides (`common`, `set`) may be nested as in params.yaml or given by key path: `pool: {beta: 2}` or `pool.beta: 2`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from unidec.config import ParamsError, nearest, problem, read_yaml, short, valid_values
from unidec.errors import ConfigError
from unidec.sections import Count, Section, Seed

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
    after: str | None = Field(None, description="a cell whose model is this one's start")
    about: str = Field("", description="one line")
    set: Overrides = Field({}, description="parameters over those of the recipe, `common` and the data set")


class GroupEntry(Section):
    """Cells that differ in one thing, beside their base: an ablation."""

    base: str = Field(description="the cell that the others are compared with")
    cells: list[str] = Field(description="the others, in order")
    about: str = Field("", description="which table of which paper this repeats")


class ComparisonFile(Section):
    """All of a comparison file."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")] = Field(
        description="the folder under runs/compare"
    )
    title: str = Field("", description="heading of the report")
    about: str = Field("", description="one line")
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field([0], description="one run each")
    common: Overrides = Field({}, description="parameters for every recipe and, where they apply, every peer")
    data: Annotated[dict[Name, DataEntry], Field(min_length=1)] = Field(description="data sets by name")
    cells: Annotated[dict[Name, CellEntry], Field(min_length=1)] = Field(description="systems by name")
    groups: dict[str, GroupEntry] = Field({}, description="ablations by title")


def read_file(path: str | Path) -> tuple[ComparisonFile, dict[str, str]]:
    """Read a comparison file and check its form.

    Returns:
        The file, and the line of each key path, in words.

    Raises:
        ConfigError: no such file, or not YAML. ParamsError: unknown keys and wrong values, all of them.
    """
    path = Path(path)
    if not path.is_file():
        fix = "docs/comparing.md shows how to write one"
        raise ConfigError("no such comparison file", where=str(path), fix=fix)
    raw, lines = read_yaml(path)
    origin = {".".join(key): f"line {line}" for key, line in lines.items()}
    try:
        return ComparisonFile.model_validate(raw), origin
    except ValidationError as error:
        problems = [_explain(detail, origin) for detail in error.errors(include_url=False)]
        raise ParamsError(problems, str(path), "comparison file") from None


def _explain(detail: ErrorDetails, origin: dict[str, str]) -> str:
    """What pydantic reports about one key, as a problem."""
    path = [str(part) for part in detail["loc"] if part != "[key]"]
    sections: dict[str, type[Section]] = {"data": DataEntry, "cells": CellEntry, "groups": GroupEntry}
    known = list((sections.get(path[0], ComparisonFile) if len(path) > 2 else ComparisonFile).model_fields)
    key, got = ".".join(path), short(detail["input"])
    if detail["type"] == "extra_forbidden":
        return problem(key, "unknown key", got, one_of(known), origin, nearest(path[-1], known))
    where = next((origin[name] for n in range(len(path), 0, -1) if (name := ".".join(path[:n])) in origin), None)
    what = "missing" if detail["type"] == "missing" else "wrong value"
    return problem(key, what, got, valid_values(detail), {key: where} if where else {})


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
    """The values that are allowed, in words."""
    listed = list(names)
    return f"one of {', '.join(listed)}" if listed else "nothing: there is none"
