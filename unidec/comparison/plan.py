"""From a comparison file to its jobs: one for each data set, cell and seed, with all its parameters."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from unidec.comparison.file import CellEntry, ComparisonFile, DataEntry, flat, one_of, read_file
from unidec.comparison.peers import PEERS
from unidec.config import Params, ParamsError, build_params, nearest, problem, recipe_names, short
from unidec.errors import ConfigError

Kind = Literal["recipe", "model_of", "peer"]
SOURCES = ("recipe", "like", "model_of", "peer")
ALIKE = ("data", "tokens", "recipe", "seed", "tracking")  # for every cell: else a table would compare data, not systems
EXPERIMENT = "unidec-compare"
START = "data/start"  # in a cell's folder: a link to the model that it starts from


@dataclass(frozen=True)
class Job:
    """One run: a cell on a data set with a seed; data, cell and seed as in the file.

    Attributes:
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

    def job(self, key: str) -> Job:
        """A job by its key."""
        return next(job for job in self.jobs if job.key == key)


def slug(name: str) -> str:
    """A name as a folder: "UniDEC + Gandalf" -> "unidec-gandalf"."""
    return re.sub(r"[^a-z0-9_.=]+", "-", name.lower()).strip("-.") or "x"


def load_comparison(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Comparison:
    """Read a comparison file and make its jobs.

    Args:
        path: the file.
        overrides: parameters by key path over everything that the file sets, for all cells (`--set`).

    Raises:
        ParamsError: everything that is wrong, at once, with key path, line, what was expected and the nearest name.
    """
    file, origin = read_file(path)
    planner = _Planner(file, origin, dict(overrides or {}))
    jobs = planner.jobs()
    if planner.problems:
        raise ParamsError(list(dict.fromkeys(planner.problems)), str(path), "comparison file")
    return Comparison(Path(path), file, tuple(jobs), flat(file.common) | dict(overrides or {}))


def select(comparison: Comparison, only: Sequence[str]) -> list[Job]:
    """The jobs that patterns name, and those that these need; all of them where there is no pattern.

    Args:
        only: "cell", "data/cell" or "data/cell/seed", as in the file or as folders; `*` and `?` match anything.

    Raises:
        ConfigError: a pattern that names nothing.
    """
    chosen = set() if only else {job.key for job in comparison.jobs}
    for pattern in only:
        found = [job for job in comparison.jobs if _matches(job, pattern)]
        if not found:
            near = nearest(pattern.split("/")[min(1, pattern.count("/"))], [job.cell for job in comparison.jobs])
            raise ConfigError(
                "no such cell", where="--only", got=pattern, expected="a cell, data/cell or data/cell/seed",
                fix=f"nearest: {near}" if near else "unidec compare FILE --list shows them",
            )  # fmt: skip
        chosen |= {job.key for job in found}
    for job in reversed(comparison.jobs):  # those that others need stand before them
        if job.key in chosen and job.needs is not None:
            chosen.add(job.needs)
    return [job for job in comparison.jobs if job.key in chosen]


def _matches(job: Job, pattern: str) -> bool:
    parts = pattern.split("/")
    names = [job.cell] if len(parts) == 1 else [job.data, job.cell, str(job.seed)][: max(2, len(parts))]
    return len(parts) == len(names) and all(
        fnmatch.fnmatchcase(name, part) or fnmatch.fnmatchcase(slug(name), part)
        for name, part in zip(names, parts, strict=True)
    )


@dataclass(frozen=True)
class _System:
    """A cell with what it takes over from others; `origin` names where each setting was given."""

    kind: Kind
    recipe: str = ""
    peer: str = ""
    needs: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)


class _Planner:
    """Collects jobs and problems."""

    def __init__(self, file: ComparisonFile, origin: dict[str, str], overrides: dict[str, Any]) -> None:
        self.file, self.origin, self.overrides = file, origin, overrides
        self.problems: list[str] = []
        self.systems: dict[str, _System | None] = {}  # those that others need first; None: something is wrong
        self.wrong_params: dict[str, str] = {}  # text of a problem -> first cell that has it

    def jobs(self) -> list[Job]:
        self._check_data_and_groups()
        for name, cell in self.file.cells.items():
            self._check_cell(name, cell)
            self._system(name, ())
        jobs = [
            job
            for seed in dict.fromkeys(self.file.seeds)
            for data, entry in self.file.data.items()
            for cell, system in self.systems.items()
            if system and (seed == self.file.seeds[0] or system.kind != "peer" or PEERS[system.peer].script)
            if (job := self._job(data, entry, cell, system, seed)) is not None
        ]
        self.problems += [f"{text}\n    in: {cell}" for text, cell in self.wrong_params.items()]
        return jobs

    # -- checks -------------------------------------------------------------------------------------------------------

    def _add(self, key: str, what: str, got: Any, expected: str | None = None, near: str | None = None) -> None:
        self.problems.append(problem(key, what, short(got), expected, self.origin, near))

    def _check_name(self, key: str, what: str, name: str | None, known: Iterable[str]) -> None:
        names = list(known)
        if name is not None and name not in names:
            self._add(key, f"no such {what}", name, one_of(names), nearest(name, names))

    def _check_data_and_groups(self) -> None:
        for name, entry in self.file.data.items():
            if not Path(entry.path).is_dir():
                self._add(f"data.{name}.path", "no such folder", entry.path, "a folder of raw files, from here")
            for key in flat(entry.set):
                if key == "data.path" or key.partition(".")[0] in set(ALIKE) - {"data"}:
                    expected = "path, text and max_length beside `set`"
                    self._add(f"data.{name}.set.{key}", "cannot be set here", entry.set, expected)
        for title, group in self.file.groups.items():
            for place, cells in (("base", [group.base]), ("cells", group.cells)):
                for cell in cells:
                    self._check_name(f"groups.{title}.{place}", "cell", cell, self.file.cells)

    def _check_cell(self, name: str, cell: CellEntry) -> None:
        where = f"cells.{name}"
        given = [source for source in SOURCES if getattr(cell, source) is not None]
        if len(given) != 1:
            self._add(where, "must be one thing", ", ".join(given) or "none", f"exactly one of {', '.join(SOURCES)}")
        self._check_name(f"{where}.recipe", "recipe", cell.recipe, recipe_names())
        self._check_name(f"{where}.peer", "peer", cell.peer, PEERS)
        for place in ("like", "model_of", "after"):
            self._check_name(f"{where}.{place}", "cell", getattr(cell, place), self.file.cells)
        if cell.peer is not None and (cell.set or cell.after):
            self._add(where, "a peer has no parameters of ours", cell.set or cell.after, "nothing beside `peer`")
        for key in flat(cell.set):
            section, place = key.partition(".")[0], f"{where}.set.{key}"
            if section in ALIKE:
                self._add(place, "is the same for all cells", cell.set, "data and texts are set in `data`")
            elif cell.model_of is not None and section != "index":
                self._add(place, "would need another training", cell.set, "keys of index, or like: instead")

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _system(self, name: str | None, above: tuple[str, ...]) -> _System | None:
        """A cell over the one that it is like, or whose model it serves; `above`: the cells that need it."""
        cell = self.file.cells.get(name or "")
        if name is None or cell is None or name in self.systems:
            return self.systems.get(name or "")
        if name in above:
            self._add(f"cells.{name}", "goes in a circle", " -> ".join([*above, name]))
            return None
        like, model_of, after = (
            self._system(other, (*above, name)) for other in (cell.like, cell.model_of, cell.after)
        )
        for place, other in (("model_of", model_of), ("after", after)):
            if other is not None and other.kind != "recipe":
                self._add(f"cells.{name}.{place}", "has no model of its own", getattr(cell, place), "a trained cell")
        system = like or model_of
        if cell.peer in PEERS:
            system = _System("peer", peer=cell.peer)
        elif cell.recipe in recipe_names():
            system = _System("recipe", cell.recipe)
        if system is not None and system.kind != "peer":
            settings, section = flat(cell.set), f"cells.{name}.set"
            system = replace(
                system,
                kind="model_of" if cell.model_of else system.kind,
                needs=cell.model_of or cell.after or system.needs,
                settings={**system.settings, **settings},
                origin={**system.origin, **self._origins(section, settings)},
            )
        self.systems[name] = system
        return system

    def _origins(self, section: str, keys: Iterable[str]) -> dict[str, str]:
        """Where each key of a section was given: "line 3, common"."""
        places = {key: self.origin.get(f"{section}.{key}", self.origin.get(section, "")) for key in keys}
        return {key: f"{place}, {section}" if place else section for key, place in places.items()}

    def _job(self, data: str, entry: DataEntry, cell: str, system: _System, seed: int) -> Job | None:
        """The job with its parameters; None where these are wrong."""
        settings = dict(system.settings)
        if system.kind == "recipe" and system.needs is not None:
            settings["encoder.start"] = START
        common, of_data = flat(self.file.common), flat(entry.set)
        origin = self._origins("common", common) | self._origins(f"data.{data}.set", of_data)
        origin |= dict(system.origin) | dict.fromkeys(self.overrides, "--set")
        values = common | of_data | settings | {"seed": seed} | self.overrides
        values |= {"data.path": entry.path, "tokens.text": entry.text, "tokens.max_length": entry.max_length}
        values |= {"tracking.experiment": EXPERIMENT} | ({"recipe": system.recipe} if system.recipe else {})
        try:
            params = build_params(values, origin, f"cells.{cell}")
        except ParamsError as error:
            for text in error.problems:
                self.wrong_params.setdefault(text, cell)
            return None
        needs = f"{data}/{system.needs}/{seed}" if system.needs else None
        return Job(data, cell, seed, system.kind, params, entry, settings, needs, system.peer)
