"""A comparison file, checked as strictly as params.yaml, and its jobs: one per data set, cell and
seed.

Overrides (`common`, `set`) may be nested as in params.yaml or given by key path: `pool: {beta: 2}`
or `pool.beta: 2`. A cell refers only to cells above it, so the file needs no sorting and has no
cycles."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from unidec.comparison.peers import PEERS
from unidec.comparison.tuning_space import RATES, applied, problems_of, unchanged
from unidec.config import (
    Count,
    Params,
    ParamsError,
    Section,
    Seed,
    build_params,
    nearest,
    problem,
    read_yaml,
    recipe_names,
    short,
    valid_values,
)
from unidec.errors import ConfigError

log = logging.getLogger(__name__)

Kind = Literal["recipe", "model_of", "peer", "trial"]
SOURCES = ("recipe", "like", "model_of", "peer")
# same for every cell: else a table would compare data
ALIKE = ("data", "tokens", "recipe", "seed", "tracking")
EXPERIMENT = "unidec-compare"
START = "data/start"  # in a cell's folder: a link to the model that it starts from
# for faulty values of required keys, so that the rest can be checked
STAND_INS = {"name": "x", "path": "."}
Name = Annotated[
    str, StringConstraints(min_length=1, max_length=60, pattern=r"^[^/*?\[\]\x00-\x1f]+$")
]
Overrides = dict[str, Any]


class DataEntry(Section):
    """A data set with a choice of text: one table of the comparison."""

    path: str = Field(description="folder of raw files, relative to the working folder")
    about: str = Field("", description="one line")
    text: Literal["title", "title+content"] = Field(
        "title", description="short-text or long-text task"
    )
    max_length: Annotated[int, Field(ge=3, le=512)] = Field(
        32, description="maximum tokens per text"
    )
    train: Count | None = Field(
        None, description="use only the first N training queries, and their labels"
    )
    test: Count | None = Field(None, description="use only the first N test queries")
    optional: bool = Field(False, description="skip this data set if its folder does not exist")
    set: Overrides = Field({}, description="parameters for every recipe on this data set")


class CellEntry(Section):
    """A system: a recipe, another cell with changes, another cell's model with another index, or a
    peer.
    """

    recipe: str | None = Field(None, description="a shipped recipe")
    like: str | None = Field(None, description="a cell whose settings this one starts from")
    model_of: str | None = Field(
        None, description="a cell whose trained model this one serves with other index keys"
    )
    peer: str | None = Field(None, description="an external system")
    after: str | None = Field(None, description="a cell from whose model this one starts")
    about: str = Field("", description="one line")
    set: Overrides = Field(
        {}, description="parameters over those of the recipe, `common` and the data set"
    )
    ranges: Overrides | None = Field(
        None, description="ranges of --tune, besides those of all cells"
    )
    seeds: Annotated[list[Seed], Field(min_length=1)] | None = Field(
        None, description="replace the file's seeds"
    )


class TuningEntry(Section):
    """Equal tuning: a search on one data set with as many trials for every recipe cell, of which
    the best is kept.
    """

    data: str = Field(description="an entry of `data` that nothing else uses")
    trials: Count = Field(description="trials of every recipe cell, the first of them as it is")
    ranges: Overrides = Field(
        description="ranges of every recipe cell; `lr` multiplies all learning rates"
    )
    file: str = Field(
        description="YAML file of the chosen settings, relative to the working folder"
    )


class GroupEntry(Section):
    """An ablation: a base cell, and cells that differ from it in one thing."""

    base: str = Field(description="the cell that the others are compared with")
    cells: list[str] = Field(description="the others, in order")
    about: str = Field("", description="the paper's table that this reproduces")


class ComparisonFile(Section):
    """All of a comparison file."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")] = Field(
        description="the folder under runs/compare"
    )
    title: str = Field("", description="heading of the report")
    about: str = Field("", description="one line")
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field([0], description="one run per seed")
    common: Overrides = Field(
        {}, description="parameters for every recipe and, where they apply, every peer"
    )
    data: Annotated[dict[Name, DataEntry], Field(min_length=1)] = Field(
        description="data sets by name"
    )
    cells: Annotated[dict[Name, CellEntry], Field(min_length=1)] = Field(
        description="systems by name"
    )
    groups: dict[str, GroupEntry] = Field({}, description="ablations by title")
    tuning: TuningEntry | None = Field(
        None, description="the same number of trials for every recipe cell"
    )


def read_file(path: str | Path) -> tuple[ComparisonFile, dict[str, str], list[str]]:
    """Read a comparison file and check its form.

    Returns:
        The file without faulty parts and without optional data sets whose folder does not exist;
        the line of each key path ("line 3"); and the problems, the unknown keys and wrong values.

    Raises:
        ConfigError: no such file, or not YAML. ParamsError: the problems, if they leave nothing
        that can be checked.
    """
    path = Path(path)
    if not path.is_file():
        fix = "docs/comparing.md shows how to write one"
        raise ConfigError("no such comparison file", where=str(path), fix=fix)
    raw, lines = read_yaml(path)
    origin = {".".join(key): f"line {line}" for key, line in lines.items()}
    problems: list[str] = []
    try:
        file = ComparisonFile.model_validate(raw)
    except ValidationError as error:
        problems = [_explain(detail, origin) for detail in error.errors(include_url=False)]
        checkable = _checkable(raw, error)
        if checkable is None:
            raise ParamsError(problems, str(path), "comparison file") from None
        file = checkable
    skipped = [
        name
        for name, entry in file.data.items()
        if entry.optional and not Path(entry.path).is_dir()
    ]
    for name in skipped:
        log.warning("%s: data set %s is skipped: no folder %s", path, name, file.data[name].path)
    if len(skipped) == len(file.data):
        fix = "add the folder of one of them, or another entry in `data`"
        raise ConfigError(
            "no data set of this comparison exists",
            where=str(path),
            got=", ".join(skipped),
            fix=fix,
        )
    left = {name: entry for name, entry in file.data.items() if name not in skipped}
    return file.model_copy(update={"data": left}), origin, problems


def _checkable(raw: Mapping[str, Any], error: ValidationError) -> ComparisonFile | None:
    """The file without its faulty parts; None if too little is left to check the rest."""
    left = copy.deepcopy(dict(raw))
    for _ in range(2):  # a wrong value that is removed may be one that its section requires
        for detail in error.errors(include_url=False):
            _remove(left, [part for part in detail["loc"] if part != "[key]"])
        try:
            return ComparisonFile.model_validate(left)
        except ValidationError as remaining:
            error = remaining
    return None


def _remove(content: dict[Any, Any], place: Sequence[str | int]) -> None:
    """Remove a key, or what lacks the key; a stand-in replaces it where there is one. Of a list,
    all is removed.
    """
    section = content
    key = place[0]
    for part in place[1:]:
        inner = section.get(key)
        if not isinstance(inner, dict) or (part not in inner and part not in STAND_INS):
            break
        section = inner
        key = part
    section.pop(key, None)
    if key in STAND_INS:
        section[key] = STAND_INS[str(key)]


def _explain(detail: ErrorDetails, origin: dict[str, str]) -> str:
    """One of pydantic's errors as the text of a problem."""
    path = [str(part) for part in detail["loc"] if part != "[key]"]
    sections: dict[str, type[Section]] = {
        "data": DataEntry,
        "cells": CellEntry,
        "groups": GroupEntry,
    }
    section = sections.get(path[0], ComparisonFile) if len(path) > 2 else ComparisonFile
    known = list((TuningEntry if path[0] == "tuning" and len(path) > 1 else section).model_fields)
    key = ".".join(path)
    got = short(detail["input"])
    if detail["type"] == "extra_forbidden":
        return problem(
            key, "unknown key", got, f"one of {', '.join(known)}", origin, nearest(path[-1], known)
        )
    where = next(
        (origin[name] for n in range(len(path), 0, -1) if (name := ".".join(path[:n])) in origin),
        None,
    )
    what = "missing" if detail["type"] == "missing" else "wrong value"
    return problem(key, what, got, valid_values(detail), {key: where} if where else {})


def flat(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`{"pool": {"beta": 2}, "pool.eta": 1}` -> `{"pool.beta": 2, "pool.eta": 1}`; empty sections
    are dropped.
    """
    found: dict[str, Any] = {}
    for key, value in overrides.items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": leaf for name, leaf in flat(value).items()}
        elif value is not None or "." in key:
            found[key] = value
    return found


@dataclass(frozen=True)
class Job:
    """One run: a cell on a data set with a seed; data, cell and seed as in the file.

    Attributes:
        kind: a recipe, another cell's model with another index, a peer, or a trial of a search.
        params: all parameters; a peer uses those that it shares with the recipes (data, texts,
        encoder, epochs).
        settings: settings beyond the recipe and the common ones, and the cell that it builds on;
            for a trial, the settings that it tries.
        needs: key of the job whose model this one starts from or serves; "": none.
        peer: name of the peer. trial: the settings that it tries, as text. ranges: of the search
            that it is the first trial of.
    """

    data: str
    cell: str
    seed: int
    kind: Kind
    params: Params
    entry: DataEntry
    settings: Mapping[str, Any]
    needs: str = ""
    peer: str = ""
    trial: str = ""
    ranges: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its name: "data/cell/seed"; a trial's: "data/cell, pool.beta=2/seed"."""
        return f"{self.data}/{', '.join(filter(None, [self.cell, self.trial]))}/{self.seed}"


def slug(name: str) -> str:
    """A name as a folder: "UniDEC + Gandalf" -> "unidec-gandalf"."""
    return re.sub(r"[^a-z0-9_.=]+", "-", name.lower()).strip("-.") or "x"


def in_words(trial: Mapping[str, Any]) -> str:
    """{"lr": 2, "pool.beta": 3} -> "lr=2, pool.beta=3"; "" for the cell as it is."""
    settings = [(key, value) for key, value in flat(trial).items() if (key, value) != (RATES, 1)]
    return ", ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in settings
    )


@dataclass(frozen=True)
class System:
    """A cell with the settings that it inherits; `given` holds each setting and where it was set.

    `ranges`: of its tuning. `tuned_as`: the cell whose chosen settings it uses."""

    kind: Kind
    recipe: str = ""
    peer: str = ""
    needs: str = ""
    given: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    seeds: Sequence[int] = ()
    ranges: Overrides = field(default_factory=dict)
    tuned_as: str = ""


class Planner:
    """Collects jobs and problems; `origin` is the line of each key path of the file, `overrides`
    come from --set, `problems` are those of the file's form.
    """

    def __init__(
        self,
        file: ComparisonFile,
        origin: dict[str, str],
        overrides: Mapping[str, Any],
        problems: Sequence[str] = (),
    ) -> None:
        self.file = file
        self.origin = origin
        self.overrides = overrides
        self.chosen: Mapping[str, Overrides] = {}  # of the cells that were tuned
        self.problems = list(problems)
        # of the cells read so far; None: something is wrong
        self.systems: dict[str, System | None] = {}
        self.wrong_params: dict[str, str] = {}  # text of a problem -> first cell that has it

    def jobs(
        self,
        path: str | Path,
        choose: Callable[[Mapping[str, System]], Mapping[str, Overrides]] | None = None,
    ) -> dict[str, Job]:
        """Every job by its key, in the order of the file; seeds vary slowest.

        Args:
            path: path of the file. choose: returns the chosen settings of tuned cells; None: plan
                the first trial of each search.

        Raises:
            ParamsError: every problem, with key path, line, what was expected and the nearest name.
        """
        self._check_data_and_groups()
        for name, cell in self.file.cells.items():
            self._check_cell(name, cell)
            self.systems[name] = self._system(name, cell)
        tuning = self.file.tuning
        systems = {name: system for name, system in self.systems.items() if system}
        searches = self._searches(tuning, systems) if tuning else []
        own = [seed for system in systems.values() for seed in system.seeds]
        seeds = dict.fromkeys([*self.file.seeds, *own])
        if tuning and choose and not (self.problems or self.wrong_params):
            self.chosen = choose(systems)
        jobs = (
            searches
            if choose is None
            else [
                job
                for seed in seeds
                for data in self.file.data
                if tuning is None or data != tuning.data
                for cell, system in systems.items()
                if seed in system.seeds
                if (job := self._job(data, cell, system, seed)) is not None
            ]
        )
        self.problems += [f"{text}\n    in: {cell}" for text, cell in self.wrong_params.items()]
        if self.problems:
            raise ParamsError(list(dict.fromkeys(self.problems)), str(path), "comparison file")
        return {job.key: job for job in jobs}

    def _searches(self, tuning: TuningEntry, systems: Mapping[str, System]) -> list[Job]:
        """The first trial of the search of each recipe cell: the cell as it is. One that builds on
        another uses it untuned.
        """
        self._check_name("tuning.data", "data set", tuning.data, self.file.data)
        found = []
        for name, system in systems.items() if tuning.data in self.file.data else ():
            job = (
                self._job(tuning.data, name, system, self.file.seeds[0])
                if system.kind == "recipe"
                else None
            )
            if job is not None:
                self._check_ranges(name, system.ranges, job.params)
                found.append(replace(job, kind="trial", settings={}, ranges=system.ranges))
        return found

    def _check_ranges(self, cell: str, ranges: Overrides, params: Params) -> None:
        shared = self.file.tuning.ranges if self.file.tuning else {}
        places = {
            key: f"{'tuning' if key in shared else f'cells.{cell}'}.ranges.{key}" for key in ranges
        }
        origin = {key: self.origin[place] for key, place in places.items() if place in self.origin}
        problems = problems_of(ranges, params, origin, f"cells.{cell}.ranges")
        for text in problems:
            self.wrong_params.setdefault(text, cell)
        if not problems:
            for key in ranges.keys() - unchanged(ranges, params).keys():
                self._add(places[key], f"leaves out {cell} as it is, its first trial", ranges[key])

    def _add(
        self, key: str, what: str, got: Any, expected: str | None = None, near: str | None = None
    ) -> None:
        self.problems.append(problem(key, what, short(got), expected, self.origin, near))

    def _check_name(self, key: str, what: str, name: str | None, known: Iterable[str]) -> None:
        names = list(known)
        if name is not None and name not in names:
            expected = f"one of {', '.join(names)}" if names else "nothing: there is none yet"
            self._add(key, f"no such {what}", name, expected, nearest(name, names))

    def _check_data_and_groups(self) -> None:
        for name, entry in self.file.data.items():
            if not Path(entry.path).is_dir():
                self._add(
                    f"data.{name}.path",
                    "no such folder",
                    entry.path,
                    "a folder, relative to the working folder",
                )
            for key in flat(entry.set):
                if key == "data.path" or key.partition(".")[0] in set(ALIKE) - {"data"}:
                    expected = "path, text and max_length beside `set`"
                    self._add(f"data.{name}.set.{key}", "cannot be set here", entry.set, expected)
        for title, group in self.file.groups.items():
            self._check_name(f"groups.{title}.base", "cell", group.base, self.file.cells)
            for cell in group.cells:
                self._check_name(f"groups.{title}.cells", "cell", cell, self.file.cells)

    def _check_cell(self, name: str, cell: CellEntry) -> None:
        where = f"cells.{name}"
        given = [source for source in SOURCES if getattr(cell, source) is not None]
        if len(given) != 1:
            self._add(
                where,
                "requires one source",
                ", ".join(given) or "none",
                f"exactly one of {', '.join(SOURCES)}",
            )
        self._check_name(f"{where}.recipe", "recipe", cell.recipe, recipe_names())
        self._check_name(f"{where}.peer", "peer", cell.peer, PEERS)
        for place in ("like", "model_of", "after"):
            self._check_name(
                f"{where}.{place}", "cell above this one", getattr(cell, place), self.systems
            )
        if cell.peer is not None and cell.set:
            self._add(where, "a peer takes no parameters", cell.set, "no `set`")
        if cell.peer in PEERS and (cell.after is not None) != PEERS[cell.peer].reads_vectors:
            expected = (
                "after: the cell whose text vectors it reads"
                if cell.after is None
                else "no `after`"
            )
            self._add(where, "wrong `after` for this peer", cell.after, expected)
        if cell.ranges and ("tuning" not in self.origin or cell.peer or cell.model_of):
            self._add(
                f"{where}.ranges",
                "this cell is not tuned",
                cell.ranges,
                "a recipe cell, and a section `tuning`",
            )
        for key in flat(cell.set):
            section = key.partition(".")[0]
            place = f"{where}.set.{key}"
            if section in ALIKE:
                self._add(
                    place,
                    "must be the same for all cells",
                    cell.set,
                    "data and texts are set in `data`",
                )
            elif cell.model_of is not None and section != "index":
                self._add(
                    place,
                    "would require another training",
                    cell.set,
                    "keys of index, or like: instead",
                )

    def _system(self, name: str, cell: CellEntry) -> System | None:
        """A cell with the settings of the one that it is like, or whose model it serves."""
        for place in ("model_of", "after"):
            other = self.systems.get(getattr(cell, place) or "")
            if other is not None and other.kind != "recipe":
                self._add(
                    f"cells.{name}.{place}",
                    "has no model of its own",
                    getattr(cell, place),
                    "a trained cell",
                )
        if cell.peer in PEERS:
            own = cell.seeds or self.file.seeds
            own = own if PEERS[cell.peer].script else own[:1]
            return System("peer", peer=cell.peer, needs=cell.after or "", seeds=own)
        system = self.systems.get(cell.like or cell.model_of or "")
        if cell.recipe in recipe_names():
            ranges = self.file.tuning.ranges if self.file.tuning else {}
            system = System("recipe", cell.recipe, seeds=self.file.seeds, ranges=ranges)
        if system is None or system.kind == "peer":
            return system
        needs = cell.model_of or cell.after or system.needs
        seeds = cell.seeds or system.seeds
        if (other := self.systems.get(needs)) and not set(seeds) <= set(other.seeds):
            self._add(
                f"cells.{name}.seeds",
                "not seeds of the cell that it builds on",
                seeds,
                str(list(other.seeds)),
            )
        kind: Kind = "model_of" if cell.model_of else system.kind
        return replace(
            system,
            kind=kind,
            needs=needs,
            seeds=seeds,
            given={**system.given, **self._given(f"cells.{name}.set", cell.set)},
            ranges=system.ranges if cell.ranges is None else self._ranges(cell.ranges),
            tuned_as=name if kind == "recipe" else system.tuned_as,
        )

    def _ranges(self, own: Overrides) -> Overrides:
        return {**self.file.tuning.ranges, **own} if self.file.tuning else own

    def _given(self, section: str, values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Each key of a section with its value and its place: "line 3, common"."""
        found = {}
        for key, value in flat(values).items():
            line = self.origin.get(f"{section}.{key}") or self.origin.get(section)
            found[key] = (value, f"{line}, {section}" if line else section)
        return found

    def _job(self, data: str, cell: str, system: System, seed: int) -> Job | None:
        """The job with its parameters, including the chosen settings; None if they are invalid."""
        entry = self.file.data[data]
        given = self._given("common", self.file.common) | self._given(f"data.{data}.set", entry.set)
        given |= system.given
        tuned = self.chosen.get(system.tuned_as, {})
        values = {key: value for key, (value, _) in given.items()}
        origin = {key: place for key, (_, place) in given.items()} | dict.fromkeys(
            self.overrides, "--set"
        )
        settings = {key: value for key, (value, _) in system.given.items()}
        if self.chosen and system.tuned_as:
            settings["tuned"] = in_words(tuned) or "as it is"
        if system.needs:
            settings["model of" if system.kind == "model_of" else "after"] = system.needs
            values |= {"encoder.start": START} if system.kind == "recipe" else {}
        values |= {"seed": seed, **self.overrides}
        values |= {
            "data.path": entry.path,
            "tokens.text": entry.text,
            "tokens.max_length": entry.max_length,
        }
        values |= {"tracking.experiment": EXPERIMENT} | (
            {"recipe": system.recipe} if system.recipe else {}
        )
        try:
            params = build_params(values, origin, f"cells.{cell}")
            params = applied(
                params, tuned, list(self.overrides), origin=origin, source=f"cells.{cell}"
            )
        except ParamsError as error:
            for text in error.problems:
                self.wrong_params.setdefault(text, cell)
            return None
        needs = f"{data}/{system.needs}/{seed}" if system.needs else ""
        return Job(data, cell, seed, system.kind, params, entry, settings, needs, system.peer)
