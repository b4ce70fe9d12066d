"""The jobs of a comparison file: one per data set, cell and seed.

A cell refers only to cells above it, so the file needs no sorting and has no cycles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from unidec.comparison.comparison_file import (
    CellEntry,
    ComparisonFile,
    DataEntry,
    Overrides,
    TuningEntry,
)
from unidec.comparison.peers import PEERS
from unidec.comparison.tuning_space import RATES, applied, problems_of, unchanged
from unidec.config import (
    Params,
    ParamsError,
    build_params,
    by_key_path,
    nearest,
    problem,
    recipe_names,
    short,
)

Kind = Literal["recipe", "model_of", "peer", "trial"]
SOURCES = ("recipe", "like", "model_of", "peer")
# sections that are the same for every cell: otherwise a table would compare data
ALIKE = ("data", "tokens", "recipe", "seed", "tracking")
EXPERIMENT = "unidec-compare"
START = "data/start"  # in a cell's folder: a link to the model that it starts from
AS_IT_IS = "as it is"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: a cell on a data set with a seed; data, cell and seed as in the file.

    Attributes:
        kind: a recipe, another cell's model with another index, a peer, or a trial of a search.
        params: all parameters; a peer uses those that it shares with the recipes (data, texts,
            encoder, epochs).
        settings: settings beyond the recipe and the common ones, and the cell that it builds on;
            for a trial, the settings that it tries.
        needs: key of the job whose model this one starts from or serves; "": none.
        peer: name of the peer.
        trial: the settings that it tries, as text.
        ranges: tuning ranges of the search, if this is its first trial.
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
        name = ", ".join(filter(None, (self.cell, self.trial)))
        return f"{self.data}/{name}/{self.seed}"


def slug(name: str) -> str:
    """A folder name for a name: "UniDEC + Gandalf" -> "unidec-gandalf"."""
    return re.sub(r"[^a-z0-9_.=]+", "-", name.lower()).strip("-.") or "x"


def in_words(trial: Mapping[str, Any]) -> str:
    """{"lr": 2, "pool.beta": 3} -> "lr=2, pool.beta=3"; "" for the cell as it is."""
    words = [
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in trial.items()
        if (key, value) != (RATES, 1)
    ]
    return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class System:
    """A cell with the settings that it inherits.

    Attributes:
        given: each setting and where it was set.
        ranges: tuning ranges. tuned_as: the cell whose chosen settings it uses.
    """

    kind: Kind
    recipe: str = ""
    peer: str = ""
    needs: str = ""
    given: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    seeds: Sequence[int]
    ranges: Overrides = field(default_factory=dict)
    tuned_as: str = ""


class Planner:
    """Collects jobs and problems.

    Attributes:
        origin: line of each key path of the file.
        overrides: parameters of --set.
        problems: error messages.
        wrong_params: error message -> first cell that has it.
        systems: cells read so far; None for an invalid cell.
        chosen: settings of the cells that were tuned.
    """

    def __init__(
        self,
        file: ComparisonFile,
        origin: dict[str, str],
        overrides: Mapping[str, Any],
    ) -> None:
        self.file = file
        self.origin = origin
        self.overrides = overrides
        self.problems: list[str] = []
        self.wrong_params: dict[str, str] = {}
        self.systems: dict[str, System | None] = {}
        self.chosen: Mapping[str, Overrides] = {}
        self.common_ranges = file.tuning.ranges if file.tuning else {}

    def jobs(
        self,
        path: str | Path,
        choose: Callable[[Mapping[str, System]], Mapping[str, Overrides]] | None,
    ) -> dict[str, Job]:
        """Every job by its key, in the order of the file; seeds vary slowest.

        Args:
            path: path of the file.
            choose: returns the chosen settings of tuned cells; None: plan the first trial of each
                search.

        Raises:
            ParamsError: every problem, with key path, line, what was expected and the nearest name.
        """
        self._check_data_and_groups()
        for name, cell in self.file.cells.items():
            self._check_cell(name, cell)
            self.systems[name] = self._system(name, cell)
        tuning = self.file.tuning
        systems = {name: system for name, system in self.systems.items() if system}
        jobs = self._searches(tuning, systems) if tuning else []
        if choose is not None:
            if tuning and not (self.problems or self.wrong_params):
                self.chosen = choose(systems)
            jobs = self._runs(systems)
        self.problems += [f"{text}\n    in: {cell}" for text, cell in self.wrong_params.items()]
        if self.problems:
            raise ParamsError(list(dict.fromkeys(self.problems)), path, "comparison file")
        return {job.key: job for job in jobs}

    def _runs(self, systems: Mapping[str, System]) -> list[Job]:
        """A job for each seed, data set and cell."""
        seeds = dict.fromkeys(self.file.seeds)
        for system in systems.values():
            seeds |= dict.fromkeys(system.seeds)
        tuned_on = self.file.tuning and self.file.tuning.data
        jobs = [
            self._job(data, cell, system, seed)
            for seed in seeds
            for data in self.file.data
            for cell, system in systems.items()
            if data != tuned_on and seed in system.seeds
        ]
        return [job for job in jobs if job]

    def _searches(self, tuning: TuningEntry, systems: Mapping[str, System]) -> list[Job]:
        """The first trial of each recipe cell's search: the unchanged cell. A cell that builds on
        another cell uses that cell untuned.
        """
        self._check_name("tuning.data", "data set", tuning.data, self.file.data)
        if tuning.data not in self.file.data:
            return []
        found = []
        for name, system in systems.items():
            if system.kind != "recipe":
                continue
            if job := self._job(tuning.data, name, system, self.file.seeds[0]):
                self._check_ranges(name, system.ranges, job.params)
                found.append(replace(job, kind="trial", settings={}, ranges=system.ranges))
        return found

    def _check_ranges(self, cell: str, ranges: Overrides, params: Params) -> None:
        places = {}
        origin = {}
        for key in ranges:
            section = "tuning" if key in self.common_ranges else f"cells.{cell}"
            place = places[key] = f"{section}.ranges.{key}"
            if place in self.origin:
                origin[key] = self.origin[place]
        if problems := problems_of(ranges, params, origin, f"cells.{cell}.ranges"):
            self._add_params(problems, cell)
            return
        what = f"excludes the untuned value of {cell}, which is its first trial"
        for key in ranges.keys() - unchanged(ranges, params).keys():
            self._add(places[key], what, ranges[key])

    def _add(
        self, key: str, what: str, got: Any, expected: str | None = None, near: str | None = None
    ) -> None:
        self.problems.append(problem(key, what, short(got), expected, self.origin, near=near))

    def _add_params(self, problems: Sequence[str], cell: str) -> None:
        """Add problems of parameters, which several cells may share."""
        for text in problems:
            self.wrong_params.setdefault(text, cell)

    def _check_name(self, key: str, what: str, name: str | None, known: Iterable[str]) -> None:
        names = list(known)
        if name is not None and name not in names:
            expected = f"one of {', '.join(names)}" if names else "nothing: there is none yet"
            self._add(key, f"no such {what}", name, expected, nearest(name, names))

    def _check_data_and_groups(self) -> None:
        for name, entry in self.file.data.items():
            where = f"data.{name}"
            if not Path(entry.path).is_dir():
                expected = "a folder, relative to the working folder"
                self._add(f"{where}.path", "no such folder", entry.path, expected)
            for key in by_key_path(entry.set):
                section = key.partition(".")[0]
                if key == "data.path" or (section in ALIKE and section != "data"):
                    expected = "path, text and max_length beside `set`"
                    self._add(f"{where}.set.{key}", "cannot be set here", entry.set, expected)
        known = self.file.cells
        for title, group in self.file.groups.items():
            where = f"groups.{title}"
            self._check_name(f"{where}.base", "cell", group.base, known)
            for cell in group.cells:
                self._check_name(f"{where}.cells", "cell", cell, known)

    def _check_cell(self, name: str, cell: CellEntry) -> None:
        where = f"cells.{name}"
        given = [source for source in SOURCES if getattr(cell, source) is not None]
        if len(given) != 1:
            expected = f"exactly one of {', '.join(SOURCES)}"
            self._add(where, "requires one source", ", ".join(given) or "none", expected)
        self._check_name(f"{where}.recipe", "recipe", cell.recipe, recipe_names())
        self._check_name(f"{where}.peer", "peer", cell.peer, PEERS)
        for source in ("like", "model_of", "after"):
            other = getattr(cell, source)
            place = f"{where}.{source}"
            self._check_name(place, "cell above this one", other, self.systems)
            system = self.systems.get(other)
            if source != "like" and system and system.kind != "recipe":
                self._add(place, "has no model of its own", other, "a trained cell")
        if cell.peer is not None and cell.set:
            self._add(where, "a peer takes no parameters", cell.set, "no `set`")
        peer = PEERS.get(cell.peer or "")
        if peer and peer.reads_vectors != (cell.after is not None):
            expected = "no `after`" if cell.after else "after: the cell whose text vectors it reads"
            self._add(where, "wrong `after` for this peer", cell.after, expected)
        if cell.ranges and ("tuning" not in self.origin or cell.peer or cell.model_of):
            expected = "a recipe cell, and a section `tuning`"
            self._add(f"{where}.ranges", "this cell is not tuned", cell.ranges, expected)
        for key in by_key_path(cell.set):
            section = key.partition(".")[0]
            place = f"{where}.set.{key}"
            if section in ALIKE:
                expected = "data and texts are set in `data`"
                self._add(place, "must be the same for all cells", cell.set, expected)
            elif cell.model_of is not None and section != "index":
                expected = "keys of index, or like: instead"
                self._add(place, "would require another training", cell.set, expected)

    def _system(self, name: str, cell: CellEntry) -> System | None:
        """A cell with the settings that it inherits by `like` or `model_of`."""
        name_of_peer = cell.peer or ""
        if peer := PEERS.get(name_of_peer):
            seeds = cell.seeds or self.file.seeds
            if not peer.script:
                seeds = seeds[:1]
            return System(kind="peer", peer=name_of_peer, needs=cell.after or "", seeds=seeds)
        system = self.systems.get(cell.like or cell.model_of or "")
        if cell.recipe in recipe_names():
            system = System(
                kind="recipe",
                recipe=cell.recipe,
                seeds=self.file.seeds,
                ranges=self.common_ranges,
            )
        if system is None or system.kind == "peer":
            return system
        needs = cell.model_of or cell.after or system.needs
        seeds = cell.seeds or list(system.seeds)
        other = self.systems.get(needs)
        if other and not set(seeds) <= set(other.seeds):
            what = "not seeds of the cell that it builds on"
            self._add(f"cells.{name}.seeds", what, seeds, str(list(other.seeds)))
        if cell.model_of:
            system = replace(system, kind="model_of")
        if cell.ranges is not None:
            system = replace(system, ranges=self.common_ranges | cell.ranges)
        own = self._given(f"cells.{name}.set", cell.set)
        return replace(
            system,
            needs=needs,
            seeds=seeds,
            given={**system.given, **own},
            tuned_as=name if system.kind == "recipe" else system.tuned_as,
        )

    def _given(self, section: str, values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Each key of a section with its value and where it was set: "line 3, common"."""
        found = {}
        for key, value in by_key_path(values).items():
            line = self.origin.get(f"{section}.{key}", self.origin.get(section))
            found[key] = (value, f"{line}, {section}" if line else section)
        return found

    def _job(self, data: str, cell: str, system: System, seed: int) -> Job | None:
        """The job with its parameters, including the chosen settings; None if they are invalid."""
        entry = self.file.data[data]
        given = self._given("common", self.file.common)
        given |= self._given(f"data.{data}.set", entry.set)
        given |= system.given
        values = {key: value for key, (value, _) in given.items()}
        origin = {key: place for key, (_, place) in given.items()}
        origin |= dict.fromkeys(self.overrides, "--set")
        if system.needs and system.kind == "recipe":
            values["encoder.start"] = START
        values |= {
            "seed": seed,
            **self.overrides,
            "data.path": entry.path,
            "tokens.text": entry.text,
            "tokens.max_length": entry.max_length,
            "tracking.experiment": EXPERIMENT,
        }
        if system.recipe:
            values["recipe"] = system.recipe
        settings = {key: value for key, (value, _) in system.given.items()}
        tuned = self.chosen.get(system.tuned_as, {})
        if self.chosen and system.tuned_as:
            settings["tuned"] = in_words(tuned) or AS_IT_IS
        needs = ""
        if system.needs:
            settings["model of" if system.kind == "model_of" else "after"] = system.needs
            needs = f"{data}/{system.needs}/{seed}"
        source = f"cells.{cell}"
        try:
            params = build_params(values, origin, source)
            params = applied(params, tuned, self.overrides, origin=origin, source=source)
        except ParamsError as error:
            self._add_params(error.problems, cell)
            return None
        return Job(
            data=data,
            cell=cell,
            seed=seed,
            kind=system.kind,
            params=params,
            entry=entry,
            settings=settings,
            needs=needs,
            peer=system.peer,
        )
