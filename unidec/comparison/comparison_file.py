"""A comparison file, checked as strictly as params.yaml.

Overrides (`common`, `set`) may be nested as in params.yaml or given by key path: `pool: {beta: 2}`
or `pool.beta: 2`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from unidec.config import (
    Count,
    ParamsError,
    Section,
    Seed,
    nearest,
    origins,
    problem,
    read_yaml,
    short,
    valid_values,
)
from unidec.errors import ConfigError

log = logging.getLogger(__name__)

Name = Annotated[
    str, StringConstraints(min_length=1, max_length=60, pattern=r"^[^/*?\[\]\x00-\x1f]+$")
]
Overrides = dict[str, Any]


class DataEntry(Section):
    """A data set with a choice of text: one table of the comparison."""

    path: str
    """folder of raw files, relative to the working folder"""
    about: str = ""
    """one line"""
    text: Literal["title", "title+content"] = "title"
    """short-text or long-text task"""
    max_length: Annotated[int, Field(ge=3, le=8192)] = 32
    """maximum tokens per text"""
    train: Count | None = None
    """use only the first N training queries, and their labels"""
    test: Count | None = None
    """use only the first N test queries"""
    optional: bool = False
    """skip this data set if its folder does not exist"""
    set: Overrides = {}
    """parameters for every recipe on this data set"""


class CellEntry(Section):
    """A system: a recipe, another cell with changes, another cell's model with another index, or a
    peer.
    """

    recipe: str | None = None
    """a shipped recipe"""
    like: str | None = None
    """a cell whose settings this one starts from"""
    model_of: str | None = None
    """a cell whose trained model this one serves with other index keys"""
    peer: str | None = None
    """an external system"""
    after: str | None = None
    """a cell from whose model this one starts"""
    about: str = ""
    """one line"""
    set: Overrides = {}
    """parameters over those of the recipe, `common` and the data set"""
    ranges: Overrides | None = None
    """ranges of --tune, besides those of all cells"""
    seeds: Annotated[list[Seed], Field(min_length=1)] | None = None
    """replace the file's seeds"""


class TuningEntry(Section):
    """Equal tuning: a search on one data set with as many trials for every recipe cell, of which
    the best is kept.
    """

    data: str
    """an entry of `data` that nothing else uses"""
    trials: Count
    """trials of every recipe cell, the first of them as it is"""
    ranges: Overrides
    """ranges of every recipe cell; `lr` multiplies all learning rates"""
    file: str
    """YAML file of the chosen settings, relative to the working folder"""


class GroupEntry(Section):
    """An ablation: a base cell, and cells that differ from it in one thing."""

    base: str
    """the cell that the others are compared with"""
    cells: list[str]
    """the others, in order"""
    about: str = ""
    """the paper's table that this reproduces"""


class ComparisonFile(Section):
    """All of a comparison file."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")]
    """the folder under runs/compare"""
    title: str = ""
    """heading of the report"""
    about: str = ""
    """one line"""
    seeds: Annotated[list[Seed], Field(min_length=1)] = [0]
    """one run per seed"""
    common: Overrides = {}
    """parameters for every recipe and, where they apply, every peer"""
    data: Annotated[dict[Name, DataEntry], Field(min_length=1)]
    """data sets by name"""
    cells: Annotated[dict[Name, CellEntry], Field(min_length=1)]
    """systems by name"""
    groups: dict[str, GroupEntry] = {}
    """ablations by title"""
    tuning: TuningEntry | None = None
    """the same number of trials for every recipe cell"""


ENTRIES: dict[str, type[Section]] = {
    "data": DataEntry,
    "cells": CellEntry,
    "groups": GroupEntry,
    "tuning": TuningEntry,
}


def read_file(path: str | Path) -> tuple[ComparisonFile, dict[str, str]]:
    """Read a comparison file and check its form.

    Returns:
        The file without optional data sets whose folder does not exist, and the line of each key
        path ("line 3").

    Raises:
        ConfigError: no such file, or not YAML. ParamsError: every unknown key and wrong value.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            "no such comparison file", where=path, fix="docs/comparing.md shows how to write one"
        )
    raw, lines = read_yaml(path)
    origin = origins(lines)
    try:
        file = ComparisonFile.model_validate(raw)
    except ValidationError as error:
        problems = [_explain(detail, origin) for detail in error.errors(include_url=False)]
        raise ParamsError(problems, path, "comparison file") from None
    left = {}
    for name, entry in file.data.items():
        if entry.optional and not Path(entry.path).is_dir():
            log.warning("%s: data set %s is skipped: no folder %s", path, name, entry.path)
        else:
            left[name] = entry
    if not left:
        raise ConfigError(
            "no data set of this comparison exists",
            where=path,
            got=", ".join(file.data),
            fix="add the folder of one of them, or another entry in `data`",
        )
    return file.model_copy(update={"data": left}), origin


def _explain(detail: ErrorDetails, origin: dict[str, str]) -> str:
    """One of pydantic's errors as the text of a problem."""
    path = [str(part) for part in detail["loc"] if part != "[key]"]
    key = ".".join(path)
    got = short(detail["input"])
    kind = detail["type"]
    if kind == "extra_forbidden":
        section = ENTRIES[path[0]] if len(path) > 1 else ComparisonFile
        known = list(section.model_fields)
        expected = f"one of {', '.join(known)}"
        return problem(key, "unknown key", got, expected, origin, near=nearest(path[-1], known))
    what = "missing" if kind == "missing" else "wrong value"
    # a key that is missing has the line of its section
    place = key
    while place and place not in origin:
        place = place.rpartition(".")[0]
    where = {key: origin[place]} if place else {}
    return problem(key, what, got, valid_values(detail), where)
