"""From a comparison file to its jobs: one for each data set, cell and seed, with all its parameters."""

from __future__ import annotations

import fnmatch
import graphlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from unidec.comparison.file import (
    CellEntry,
    ComparisonError,
    ComparisonFile,
    DataEntry,
    flat,
    nested,
    one_of,
    read_file,
)
from unidec.comparison.peers import PEERS
from unidec.config import Params, build_params, recipe_names
from unidec.errors import ConfigError
from unidec.problems import ParamsError, nearest, problem, short

Kind = Literal["recipe", "model_of", "peer"]
SOURCES = ("recipe", "like", "model_of", "peer")
ALIKE = ("data", "tokens", "recipe", "seed", "tracking")  # for every cell: else a table would compare data, not systems
EXPERIMENT = "unidec-compare"
START = "data/start"  # in a cell's folder: a link to the model that it starts from


@dataclass(frozen=True)
class Job:
    """One run: a cell on a data set with a seed.

    Attributes:
        data, cell, seed: names as in the file.
        kind: trained by us, another cell's model served otherwise, or a peer.
        params: all of them; of a peer those that it shares with the recipes (data, texts, encoder, epochs).
        settings: what is set beyond the recipe and the common settings.
        needs: key of the job whose model this one starts from or serves.
        peer: its name.
    """

    data: str
    cell: str
    seed: int
    kind: Kind
    params: Params
    entry: DataEntry
    settings: Mapping[str, Any]
    needs: str | None = None
    peer: str = ""

    @property
    def key(self) -> str:
        """Its name: "data/cell/seed"."""
        return f"{self.data}/{self.cell}/{self.seed}"


@dataclass(frozen=True)
class Comparison:
    """A checked comparison file and its jobs, those that others need before them."""

    path: Path
    file: ComparisonFile
    jobs: tuple[Job, ...]
    common: Mapping[str, Any]

    def by_key(self) -> dict[str, Job]:
        """The jobs by their keys."""
        return {job.key: job for job in self.jobs}


def slug(name: str) -> str:
    """A name as a folder: "UniDEC + Gandalf" -> "unidec-gandalf"."""
    return re.sub(r"[^a-z0-9_.=]+", "-", name.lower()).strip("-.") or "x"


def load_comparison(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Comparison:
    """Read a comparison file and make its jobs.

    Args:
        path: the file.
        overrides: parameters by key path over everything that the file sets, for all cells (`--set`).

    Raises:
        ComparisonError: everything that is wrong, at once, with key path, line, what was expected and the nearest name.
    """
    file, origin = read_file(path)
    planner = _Planner(file, origin, dict(overrides or {}))
    jobs = planner.jobs()
    if planner.problems:
        raise ComparisonError(list(dict.fromkeys(planner.problems)), str(path))
    return Comparison(Path(path), file, tuple(jobs), flat(file.common) | dict(overrides or {}))


def select(comparison: Comparison, only: Sequence[str]) -> list[Job]:
    """The jobs that patterns name, and those that these need; all of them where there is no pattern.

    Args:
        only: "cell", "data/cell" or "data/cell/seed", as in the file or as folders; `*` and `?` match anything.

    Raises:
        ConfigError: a pattern that names nothing.
    """
    by_key = comparison.by_key()
    chosen = set() if only else set(by_key)
    for pattern in only:
        found = [job for job in comparison.jobs if _matches(job, pattern)]
        if not found:
            near = nearest(pattern.split("/")[min(1, pattern.count("/"))], [job.cell for job in comparison.jobs])
            raise ConfigError(
                "no such cell", where="--only", got=pattern, expected="a cell, data/cell or data/cell/seed",
                fix=f"nearest: {near}" if near else "unidec compare FILE --list shows them",
            )  # fmt: skip
        for job in found:
            step: Job | None = job
            while step is not None:
                chosen.add(step.key)
                step = by_key.get(step.needs or "")
    return [job for job in comparison.jobs if job.key in chosen]


def _matches(job: Job, pattern: str) -> bool:
    names = (job.data, job.cell, str(job.seed)), (slug(job.data), slug(job.cell), str(job.seed))
    return any(
        fnmatch.fnmatchcase(name, pattern)
        for data, cell, seed in names
        for name in (cell, f"{data}/{cell}", f"{data}/{cell}/{seed}")
    )


@dataclass(frozen=True)
class _System:
    """A cell with what it takes over from others; `origin` names where each setting was given."""

    kind: Kind
    recipe: str = ""
    peer: str = ""
    model_of: str | None = None
    after: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs(self) -> str | None:
        return self.model_of or self.after

    @property
    def is_unseeded(self) -> bool:
        return self.kind == "peer" and not PEERS[self.peer].script


class _Planner:
    """Collects jobs and problems."""

    def __init__(self, file: ComparisonFile, origin: dict[str, str], overrides: dict[str, Any]) -> None:
        self.file, self.origin, self.overrides = file, origin, overrides
        self.problems: list[str] = []
        self.wrong_params: dict[str, list[str]] = {}  # text of a problem -> cells that have it

    def jobs(self) -> list[Job]:
        self._check_file()
        for name, cell in self.file.cells.items():
            self._check_cell(name, cell)
        systems = {name: found for name in self.file.cells if (found := self._system(name)) is not None}
        jobs = [
            job
            for number, seed in enumerate(self.file.seeds)
            for data, entry in self.file.data.items()
            for cell in self._in_order(systems)
            if not (number and systems[cell].is_unseeded)
            and (job := self._job(data, entry, cell, systems[cell], seed)) is not None
        ]
        for text, cells in self.wrong_params.items():
            more = f" and {len(cells) - 4} more" if len(cells) > 4 else ""
            self.problems.append(f"{text}\n    in: {', '.join(cells[:4])}{more}")
        return jobs

    # -- checks -------------------------------------------------------------------------------------------------------

    def _add(self, key: str, what: str, got: Any, expected: str | None = None, near: str | None = None) -> None:
        self.problems.append(problem(key, what, short(got), expected, self.origin, near))

    def _check_name(self, key: str, what: str, name: str, known: Iterable[str]) -> None:
        names = list(known)
        if name not in names:
            self._add(key, f"no such {what}", name, one_of(names), nearest(name, names))

    def _check_file(self) -> None:
        """Folders, names and seeds; two names must not share a folder."""
        for section in ("data", "cells"):
            taken: dict[str, str] = {}
            for name in getattr(self.file, section):
                other = taken.setdefault(slug(name), name)
                if other != name:
                    self._add(f"{section}.{name}", f"has the same folder as {other!r}", slug(name), "another name")
        if len(set(self.file.seeds)) < len(self.file.seeds):
            self._add("seeds", "a seed given twice", self.file.seeds)
        for name, entry in self.file.data.items():
            if not Path(entry.path).is_dir():
                self._add(f"data.{name}.path", "no such folder", entry.path, "a folder of raw files, from here")
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
            self._add(where, "must be one thing", ", ".join(given) or "none", f"exactly one of {', '.join(SOURCES)}")
        if cell.recipe is not None:
            self._check_name(f"{where}.recipe", "recipe", cell.recipe, recipe_names())
        if cell.peer is not None:
            self._check_name(f"{where}.peer", "peer", cell.peer, PEERS)
            if cell.set or cell.after:
                self._add(where, "a peer has no parameters of ours", cell.set or cell.after, "nothing beside `peer`")
        for place in ("like", "model_of", "after"):
            other = getattr(cell, place)
            if other is not None:
                self._check_name(f"{where}.{place}", "cell", other, self.file.cells)
        for key in flat(cell.set):
            section = key.partition(".")[0]
            if section in ALIKE:
                self._add(
                    f"{where}.set.{key}", "is the same for all cells", cell.set, "data and texts are set in `data`"
                )
            elif cell.model_of is not None and section != "index":
                self._add(
                    f"{where}.set.{key}", "would need another training", cell.set, "keys of index, or like: instead"
                )

    # -- systems ------------------------------------------------------------------------------------------------------

    def _system(self, name: str, asking: tuple[str, ...] = ()) -> _System | None:
        """A cell over the one that it is like, or whose model it serves; None where that is not possible."""
        cell = self.file.cells.get(name)
        if name in asking:
            circle = (*asking[asking.index(name) :], name)
            self._add(f"cells.{min(circle)}", "goes in a circle", " -> ".join(circle))
        if cell is None or name in asking:
            return None
        section = f"cells.{name}.set"
        settings = flat(cell.set)
        origin = {key: self._origin(section, key) for key in settings}
        other = cell.like or cell.model_of
        if other is None:
            if cell.peer is not None:
                return _System("peer", peer=cell.peer) if cell.peer in PEERS else None
            if cell.recipe not in recipe_names():
                return None
            return _System("recipe", cell.recipe or "", after=cell.after, settings=settings, origin=origin)
        below = self._system(other, (*asking, name))
        if below is None:
            return None
        if cell.model_of is not None and below.kind != "recipe":
            self._add(f"cells.{name}.model_of", "has no model of its own", cell.model_of, "a trained cell")
        return replace(
            below,
            kind="model_of" if cell.model_of is not None else below.kind,
            model_of=cell.model_of or below.model_of,
            after=cell.after or below.after,
            settings={**below.settings, **settings},
            origin={**below.origin, **origin},
        )

    def _origin(self, section: str, key: str) -> str:
        place = self.origin.get(f"{section}.{key}", self.origin.get(section, ""))
        return f"{place}, {section}" if place else section

    def _in_order(self, systems: Mapping[str, _System]) -> list[str]:
        """Cells behind those that they need, else as in the file."""
        needs = {name: [one.needs] if one.needs else [] for name, one in systems.items()}
        for name, one in systems.items():
            if one.after is not None and one.after in systems and systems[one.after].kind != "recipe":
                self._add(f"cells.{name}.after", "has no model of its own", one.after, "a trained cell")
        try:
            return [name for name in graphlib.TopologicalSorter(needs).static_order() if name in systems]
        except graphlib.CycleError as error:
            circle = error.args[1]
            self._add(f"cells.{circle[0]}", "needs itself", " -> ".join(circle))
            return []

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _job(self, data: str, entry: DataEntry, cell: str, system: _System, seed: int) -> Job | None:
        settings = {} if system.kind == "peer" else dict(system.settings)
        if system.kind == "recipe" and system.after is not None:
            settings["encoder.start"] = START
        params = self._params(data, entry, cell, system, settings | {"seed": seed})
        if params is None:
            return None
        needs = f"{data}/{system.needs}/{seed}" if system.needs is not None else None
        return Job(data, cell, seed, system.kind, params, entry, settings, needs, system.peer)

    def _params(
        self, data: str, entry: DataEntry, cell: str, system: _System, settings: dict[str, Any]
    ) -> Params | None:
        origin = {key: self._origin("common", key) for key in flat(self.file.common)}
        origin |= {key: self._origin(f"data.{data}.set", key) for key in flat(entry.set)}
        origin |= dict(system.origin) | dict.fromkeys(self.overrides, "--set")
        values = flat(self.file.common) | flat(entry.set) | settings | self.overrides
        values |= {"data.path": entry.path, "tokens.text": entry.text, "tokens.max_length": entry.max_length}
        values |= {"tracking.experiment": EXPERIMENT} | ({"recipe": system.recipe} if system.recipe else {})
        try:
            return build_params(nested(values), origin, f"cells.{cell}")
        except ParamsError as error:
            for text in error.problems:
                cells = self.wrong_params.setdefault(text, [])
                if cell not in cells:
                    cells.append(cell)
        return None
