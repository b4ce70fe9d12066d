"""From a comparison file to its jobs: one for each data set, cell and seed, with all its parameters."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unidec.comparison import peers
from unidec.comparison.file import (
    CellEntry,
    ComparisonError,
    ComparisonFile,
    DataEntry,
    Origin,
    flat,
    one_of,
    read_file,
)
from unidec.config import Params, build_params, recipe_names
from unidec.errors import ConfigError
from unidec.problems import ParamsError, nearest, problem, short
from unidec.strict_yaml import KeyPath

Kind = Literal["recipe", "model_of", "peer"]
SOURCES = ("recipe", "like", "model_of", "peer")
OF_THE_DATA = ("data", "tokens")  # alike for every cell: else a table would compare data, not systems
OURS = ("recipe", "seed", "tracking")
EXPERIMENT = "unidec-compare"


@dataclass(frozen=True)
class Job:
    """One run: a cell on a data set with a seed.

    Attributes:
        data, cell, seed: names as in the file.
        kind: trained by us, another cell's model served otherwise, or a peer.
        params: all of them; of a peer those that it shares with the recipes (data, texts, encoder, epochs).
        settings: what is set beyond the recipe and the common settings.
        needs: key of the job whose model this one starts from or serves.
        peer, options: of a peer.
    """

    data: str
    cell: str
    seed: int
    kind: Kind
    params: Params
    entry: DataEntry
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None
    peer: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its name: "data/cell/seed"."""
        return f"{self.data}/{self.cell}/{self.seed}"

    @property
    def folder(self) -> Path:
        """Its folder below the workspace's cells."""
        return Path(slug(self.data)) / slug(self.cell) / str(self.seed)


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


def load_comparison(path: str | Path, extra: Mapping[str, Any] | None = None) -> Comparison:
    """Read a comparison file and make its jobs.

    Args:
        path: the file.
        extra: parameters by key path over everything that the file sets, for all cells (`--set`).

    Raises:
        ComparisonError: everything that is wrong, at once, with key path, line, what was expected and the nearest name.
    """
    file, origin, formal = read_file(path)
    if file is None:
        raise ComparisonError([text for _, text in formal], str(path))
    plan = _Plan(file, origin, dict(extra or {}), {part for key, _ in formal for part in (key, key[:2])})
    jobs = plan.jobs()
    problems = [text for _, text in formal] + plan.problems
    if problems:
        raise ComparisonError(problems, str(path))
    return Comparison(Path(path), file, tuple(jobs), flat(file.common) | dict(extra or {}))


def select(comparison: Comparison, only: Sequence[str]) -> list[Job]:
    """The jobs that patterns name, and those that these need; all of them where there is no pattern.

    Args:
        only: "cell", "data/cell" or "data/cell/seed", as in the file or as folders; `*` and `?` stand for anything.

    Raises:
        ConfigError: a pattern that names nothing.
    """
    if not only:
        return list(comparison.jobs)
    by_key, chosen = comparison.by_key(), set()
    for pattern in only:
        found = [job for job in comparison.jobs if _matches(job, pattern)]
        if not found:
            names = list(dict.fromkeys(job.cell for job in comparison.jobs))
            near = nearest(pattern.split("/")[min(1, pattern.count("/"))], names)
            raise ConfigError(
                "no such cell", where="--only", got=pattern, expected="a cell, data/cell or data/cell/seed",
                fix=f"nearest: {near}" if near else "unidec compare FILE --list shows them",
            )  # fmt: skip
        for job in found:
            step: Job | None = job
            while step is not None and step.key not in chosen:
                chosen.add(step.key)
                step = by_key.get(step.needs or "")
    return [job for job in comparison.jobs if job.key in chosen]


def _matches(job: Job, pattern: str) -> bool:
    named = (job.cell, f"{job.data}/{job.cell}", job.key)
    folders = (slug(job.cell), f"{slug(job.data)}/{slug(job.cell)}", job.folder.as_posix())
    return any(fnmatch.fnmatchcase(name, pattern) for name in (*named, *folders))


@dataclass
class _Resolved:
    """A cell with what it takes over from others."""

    kind: Kind
    recipe: str
    peer: str
    settings: dict[str, Any]
    origin: Origin
    options: dict[str, Any]
    needs: str | None
    is_start: bool  # what it needs is its start, else its model


class _Plan:
    """Collects jobs and problems; an entry whose form is wrong is not looked at again."""

    def __init__(self, file: ComparisonFile, origin: Origin, extra: dict[str, Any], skip: set[KeyPath]) -> None:
        self.file, self.origin, self.extra, self.skip = file, origin, extra, skip
        self.problems: list[str] = []
        self.wrong_params: dict[str, list[str]] = {}  # text of a problem -> cells that have it

    def jobs(self) -> list[Job]:
        self._check_names()
        self._check_data()
        resolved = self._resolve()
        self._check_groups()
        jobs = [
            job
            for seed in self._all_seeds()
            for data, entry in self.file.data.items()
            for cell in self._in_order(resolved)
            if (job := self._job(data, entry, cell, resolved[cell], seed)) is not None
        ]
        for text, cells in self.wrong_params.items():
            more = f" and {len(cells) - 4} more" if len(cells) > 4 else ""
            self.problems.append(f"{text}\n    in: {', '.join(cells[:4])}{more}")
        self._check_needs(jobs)
        return jobs

    # -- names --------------------------------------------------------------------------------------------------------

    def _say(self, key: str, what: str, got: Any, expected: str | None = None, near: str | None = None,
             fix: str | None = None) -> None:  # fmt: skip
        self.problems.append(problem(key, what, short(got), expected, self.origin, near, fix))

    def _check_names(self) -> None:
        """Two names must not share a folder."""
        for section in ("data", "cells"):
            taken: dict[str, str] = {}
            for name in getattr(self.file, section):
                other = taken.setdefault(slug(name), name)
                if other != name:
                    self._say(f"{section}.{name}", f"has the same folder as {other!r}", slug(name), fix="rename one")
        if len(set(self.file.seeds)) < len(self.file.seeds):
            self._say("seeds", "a seed given twice", self.file.seeds)

    def _check_data(self) -> None:
        for name, entry in self.file.data.items():
            if not Path(entry.path).is_dir() and ("data", name, "path") not in self.skip:
                self._say(f"data.{name}.path", "no such folder", entry.path, "a folder of raw files, from here",
                          fix="run in the project's folder, or correct the path")  # fmt: skip
            for key in flat(entry.set):
                if key.partition(".")[0] in (*OURS, "tokens") or key == "data.path":
                    self._say(f"data.{name}.set.{key}", "cannot be set here", entry.set, "path, text and max_length "
                              "beside `set`, or other parameters")  # fmt: skip

    def _check_groups(self) -> None:
        names = list(self.file.cells)
        for title, group in self.file.groups.items():
            for place, cells in (("base", [group.base]), ("cells", group.cells)):
                for cell in cells:
                    if cell not in names:
                        self._say(f"groups.{title}.{place}", "no such cell", cell, one_of(names), nearest(cell, names))

    def _all_seeds(self) -> list[int]:
        own = [seed for cell in self.file.cells.values() for seed in cell.seeds or ()]
        return list(dict.fromkeys([*self.file.seeds, *own]))

    # -- what a cell is -----------------------------------------------------------------------------------------------

    def _resolve(self) -> dict[str, _Resolved]:
        found: dict[str, _Resolved] = {}
        for name, cell in self.file.cells.items():
            if ("cells", name) in self.skip:
                continue
            self._check_cell(name, cell)
            chain = self._chain(name)
            if chain is not None:
                found[name] = self._merged(name, chain)
        return found

    def _check_cell(self, name: str, cell: CellEntry) -> None:
        where, names = f"cells.{name}", list(self.file.cells)
        given = [source for source in SOURCES if getattr(cell, source) is not None]
        if len(given) != 1:
            self._say(where, "says not what it is" if not given else "says twice what it is",
                      ", ".join(given) or "none", f"exactly one of {', '.join(SOURCES)}")  # fmt: skip
        if cell.recipe is not None and cell.recipe not in recipe_names():
            known = recipe_names()
            self._say(f"{where}.recipe", "no such recipe", cell.recipe, one_of(known), nearest(cell.recipe, known))
        if cell.peer is not None:
            self._check_peer(where, cell, cell.peer)
        for place in ("like", "model_of", "after"):
            other = getattr(cell, place)
            if other is not None and other not in names:
                self._say(f"{where}.{place}", "no such cell", other, one_of(names), nearest(other, names))
        for data in cell.data or ():
            if data not in self.file.data:
                known = list(self.file.data)
                self._say(f"{where}.data", "no such data set", data, one_of(known), nearest(data, known))
        for key in flat(cell.set):
            section = key.partition(".")[0]
            if section in (*OURS, *OF_THE_DATA):
                fix = "set it in `data`: what is compared, not who" if section in OF_THE_DATA else "leave it out"
                self._say(f"{where}.set.{key}", "is alike for all cells", cell.set, fix=fix)
            elif cell.model_of is not None and section != "index":
                self._say(f"{where}.set.{key}", "would need another training", cell.set, "keys of index",
                          fix="like: instead of model_of:")  # fmt: skip

    def _check_peer(self, where: str, cell: CellEntry, peer: str) -> None:
        if peer not in peers.NAMES:
            self._say(f"{where}.peer", "no such peer", peer, one_of(peers.NAMES), nearest(peer, list(peers.NAMES)))
        else:
            for text in peers.check_options(peer, cell.options):
                self._say(f"{where}.options", text, cell.options)
        if cell.set or cell.after:
            self._say(where, "a peer has no parameters of ours", cell.set or cell.after, "options")

    def _chain(self, name: str) -> list[str] | None:
        """The cell behind those that it is like, the first of them in front; None where one is missing or a circle."""
        chain = [name]
        while (other := self.file.cells[chain[0]].like) is not None:
            if other in chain:
                self._say(f"cells.{name}.like", "goes in a circle", " -> ".join([other, *chain]))
                return None
            if other not in self.file.cells or ("cells", other) in self.skip:
                return None
            chain.insert(0, other)
        return chain

    def _merged(self, name: str, chain: list[str]) -> _Resolved:
        cells = [self.file.cells[link] for link in chain]
        settings: dict[str, Any] = {}
        origin: Origin = {}
        options: dict[str, Any] = {}
        for link, cell in zip(chain, cells, strict=True):
            for key, value in flat(cell.set).items():
                settings[key] = value
                origin[key] = self._origin(f"cells.{link}.set", key)
            options |= cell.options
        first = cells[0]
        after = next((cell.after for cell in reversed(cells) if cell.after is not None), None)
        kind: Kind = "peer" if first.peer is not None else "model_of" if first.model_of is not None else "recipe"
        recipe = first.recipe or ""
        if first.model_of is not None:
            chain_of = self._chain(first.model_of) if first.model_of in self.file.cells else None
            if chain_of is not None:
                served = self._merged(first.model_of, chain_of)
                recipe, settings, origin = served.recipe, served.settings | settings, served.origin | origin
                if served.kind != "recipe":
                    self._say(f"cells.{name}.model_of", "has no model of its own", first.model_of, "a trained cell")
        if after is not None and after in self.file.cells and self._kind(after) != "recipe":
            self._say(f"cells.{name}.after", "has no model of its own", after, "a trained cell")
        return _Resolved(kind, recipe, first.peer or "", settings, origin, options, first.model_of or after,
                         first.model_of is None)  # fmt: skip

    def _kind(self, name: str) -> str:
        chain = self._chain(name)
        first = self.file.cells[chain[0]] if chain else None
        return "peer" if first and first.peer else "model_of" if first and first.model_of else "recipe"

    def _origin(self, section: str, key: str) -> str:
        place = self.origin.get(f"{section}.{key}", self.origin.get(section, ""))
        return f"{place}, {section}" if place else section

    def _in_order(self, resolved: Mapping[str, _Resolved]) -> list[str]:
        """Cells as in the file, but behind those that they need."""
        order: list[str] = []

        def add(name: str, asking: tuple[str, ...]) -> None:
            if name in order or name not in resolved:
                return
            needs = resolved[name].needs
            if needs in (*asking, name):
                self._say(f"cells.{name}", "needs itself", " -> ".join([*asking, name, str(needs)]))
            elif needs is not None:
                add(needs, (*asking, name))
            order.append(name)

        for name in resolved:
            add(name, ())
        return order

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _job(self, data: str, entry: DataEntry, cell: str, what: _Resolved, seed: int) -> Job | None:
        chain = [self.file.cells[link] for link in self._chain(cell) or [cell]]
        on = next((link.data for link in reversed(chain) if link.data is not None), None)
        seeds = next((link.seeds for link in reversed(chain) if link.seeds is not None), self.file.seeds)
        if what.kind == "peer" and what.peer in peers.NAMES and not peers.info(what.peer).seeded:
            seeds = seeds[:1]
        if seed not in seeds or (on is not None and data not in on):
            return None
        needs = f"{data}/{what.needs}/{seed}" if what.needs is not None else None
        settings = {} if what.kind == "peer" else dict(what.settings)
        if what.is_start and what.needs is not None:
            settings["encoder.start"] = f"../../{slug(what.needs)}/{seed}/outputs/model"
        params = self._params(data, entry, cell, what, settings, seed)
        if params is None:
            return None
        return Job(data, cell, seed, what.kind, params, entry, settings, needs, what.peer, what.options)

    def _params(self, data: str, entry: DataEntry, cell: str, what: _Resolved, settings: dict[str, Any], seed: int
                ) -> Params | None:  # fmt: skip
        origin = {key: self._origin("common", key) for key in flat(self.file.common)}
        origin |= {key: self._origin(f"data.{data}.set", key) for key in flat(entry.set)}
        origin |= what.origin | dict.fromkeys(self.extra, "--set")
        values = flat(self.file.common) | flat(entry.set) | settings | self.extra
        values |= {"data.path": entry.path, "tokens.text": entry.text, "tokens.max_length": entry.max_length}
        values |= {"seed": seed, "tracking.experiment": EXPERIMENT}
        if what.kind != "peer":
            values["recipe"] = what.recipe
            if what.recipe not in recipe_names():
                return None  # said already
        try:
            return build_params(nested(values), origin, f"cells.{cell}")
        except ParamsError as error:
            for text in error.problems:
                cells = self.wrong_params.setdefault(text, [])
                if cell not in cells:
                    cells.append(cell)
        except ConfigError as error:
            self.problems.append(f"- cells.{cell}: {error}")
        return None

    def _check_needs(self, jobs: Iterable[Job]) -> None:
        keys = {job.key for job in jobs}
        for job in jobs:
            if job.needs is not None and job.needs not in keys and not self.problems:
                self._say(f"cells.{job.cell}", "needs a cell that does not run on this data set with this seed",
                          job.needs, "the same `data` and `seeds` for both")  # fmt: skip


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"pool.beta": 2, "seed": 0}` -> `{"pool": {"beta": 2}, "seed": 0}`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (found.setdefault(section, {}) if section else found)[name] = value
    return found
