"""Where a comparison lies on disk: derived data once for all, a folder for each cell, and what decides its result.

    runs/compare/<name>/
      shared/data-<key>/data/{dataset,tokens,propensity}   one for each data set, text and tokenizer
      shared/graph-<key>/data/label_graph                  one for each way to make the label graph
      shared/cache                                         vectors of frozen encoders
      cells/<data>/<cell>/<seed>/                          working folder of one run; result.json comes last
      report.html, summary.json, tracking/

A result carries the identity it was made under: parameters, data, code. One whose identity is still the same is taken
as it is; any other is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import unidec
from unidec.comparison.plan import Comparison, Job
from unidec.config import Params, leaves
from unidec.data.storage import MANIFEST, files_sha256, folder_sha256

ROOT = Path("runs/compare")
RESULT, FAILURE, LOG, SPEC = "result.json", "failure.json", "log.txt", "job.json"
MODEL = "outputs/model"

# which code decides what; pages, plots and command lines decide nothing
READERS = ("data/dataset.py", "data/formats", "data/raw.py", "data/tokens.py", "data/propensity.py")
GRAPHS = ("data/label_graph.py",)
TRAINING = (
    "model", "training", "retrieval", "evaluation/metrics.py",
    "stages/training.py", "stages/indexing.py", "stages/ranking.py", "stages/evaluation.py",
)  # fmt: skip
PEERS = ("comparison/peers", "evaluation/metrics.py")
# where a training runs and how it is shown; propensities are in the data's key
_DECIDE_NOTHING = ("run", "tracking", "device", "data", "recipe")


@dataclass(frozen=True)
class Task:
    """Something that a child process makes in a folder of its own.

    Attributes:
        key: what people see. folder: its working folder. spec: job.json, all that the child is told.
        needs: keys of the tasks before it. makes: a file that is there, last of all, when it is done.
    """

    key: str
    folder: Path
    spec: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    makes: str = RESULT
    job: Job | None = None

    def is_done(self, accepted: Iterable[str] = ()) -> bool:
        """Whether what it makes is there, of the same identity but for what is accepted to differ."""
        if self.job is None:
            return (self.folder / self.makes).is_file()
        result = read_json(self.folder / RESULT)
        if result is None or not same_identity(result.get("identity", {}), self.spec["identity"], accepted):
            return False
        return not self.spec["keep"] or (self.folder / MODEL / MANIFEST).is_file() or self.job.kind != "recipe"

    def failure(self) -> dict[str, Any] | None:
        """What its last attempt ended with, None where it ended well or was never made."""
        return None if (self.folder / RESULT).is_file() else read_json(self.folder / FAILURE)


@dataclass
class Workspace:
    """The folder of a comparison, and its tasks."""

    comparison: Comparison
    root: Path
    tasks: dict[str, Task] = field(default_factory=dict)

    @classmethod
    def of(cls, comparison: Comparison, jobs: Iterable[Job], root: Path | None = None) -> Workspace:
        """The tasks of some of a comparison's jobs: their data first.

        Args:
            root: folder of the workspace; by default below `ROOT`, by the comparison's name.
        """
        workspace = cls(comparison, root or ROOT / comparison.file.name)
        for job in jobs:
            workspace._add(job)
        return workspace

    def cells(self) -> list[Task]:
        """The tasks that are runs, not data."""
        return [task for task in self.tasks.values() if task.job is not None]

    # -- tasks --------------------------------------------------------------------------------------------------------

    def _add(self, job: Job) -> None:
        data = self._data(job)
        needs = [data.key]
        links = {f"data/{name}": data.folder / "data" / name for name in ("dataset", "tokens", "propensity")}
        links["data/cache"] = self.root / "shared" / "cache"
        if job.params.pool.gandalf and job.kind != "peer":
            graph = self._graph(job, data)
            needs.append(graph.key)
            links["data/label_graph"] = graph.folder / "data" / "label_graph"
        if job.needs is not None:
            needs.append(job.needs)
        folder = self.root / "cells" / job.folder
        spec = {
            "kind": job.kind, "name": job.key, "params": placed(job.params), "identity": self._identity(job, data),
            "links": {name: _relative(target, folder) for name, target in links.items()},
            "keep": self.comparison.file.keep_models or any(other.needs == job.key for other in self.comparison.jobs),
        }  # fmt: skip
        if job.kind == "recipe" and self.comparison.file.minutes is not None:
            spec["minutes"] = self.comparison.file.minutes
        if job.kind == "peer":
            spec |= {"peer": job.peer, "options": dict(job.options), "seed": job.seed, "shared": "../../../../shared"}
        if job.kind == "model_of":
            spec["model"] = _relative(self.root / "cells" / self._by_key()[job.needs or ""].folder / MODEL, folder)
        self.tasks[job.key] = Task(job.key, folder, spec, tuple(needs), RESULT, job)

    def _data(self, job: Job) -> Task:
        key = self.data_key(job)
        name = f"data {job.data} ({key[:8]})"
        folder = self.root / "shared" / f"data-{key}"
        spec = {"kind": "data", "name": name, "params": placed(job.params), "train": job.entry.train,
                "test": job.entry.test, "links": {}}  # fmt: skip
        makes = f"data/propensity/{MANIFEST}"
        return self.tasks.setdefault(name, Task(name, folder, spec, (), makes))

    def _graph(self, job: Job, data: Task) -> Task:
        key = _digest({**_leaves(job.params, ("label_graph",)), "data": data.folder.name,
                       "code": code_sha256(GRAPHS)})[:16]  # fmt: skip
        name = f"label graph {job.data} ({key[:8]})"
        folder = self.root / "shared" / f"graph-{key}"
        links = {"data/dataset": _relative(data.folder / "data" / "dataset", folder)}
        spec = {"kind": "graph", "name": name, "params": placed(job.params), "links": links}
        return self.tasks.setdefault(name, Task(name, folder, spec, (data.key,), f"data/label_graph/{MANIFEST}"))

    def _by_key(self) -> dict[str, Job]:
        return self.comparison.by_key()

    # -- identities ---------------------------------------------------------------------------------------------------

    def data_key(self, job: Job) -> str:
        """16 hex digits that name the derived data of a job: raw files, slice, split, texts, tokenizer, readers."""
        values = _leaves(job.params, ("data", "tokens"))
        values.pop("data.path")
        values |= {"encoder.name": job.params.encoder.name, "train": job.entry.train, "test": job.entry.test}
        values |= {"raw": raw_sha256(str(Path(job.entry.path).resolve())), "code": code_sha256(READERS)}
        return _digest(values)[:16]

    def _identity(self, job: Job, data: Task) -> dict[str, str]:
        """What decides a job's result, as flat texts."""
        if job.kind == "peer":
            wanted = ("seed", "encoder", "model.dim", "optim.epochs", "pool.batch_size")
            values: dict[str, Any] = {f"options.{key}": value for key, value in job.options.items()}
            values |= _leaves(job.params, wanted) | {"peer": job.peer, "code": code_sha256(PEERS)}
        else:
            values = {key: value for key, value in leaves(job.params) if key.partition(".")[0] not in _DECIDE_NOTHING}
            if not job.params.pool.gandalf:
                values = {key: value for key, value in values.items() if not key.startswith("label_graph.")}
            else:
                values["graphs"] = code_sha256(GRAPHS)
            values["code"] = code_sha256(TRAINING)
            if self.comparison.file.minutes is not None:  # what it says of epochs is not what is trained
                values["minutes"] = self.comparison.file.minutes
                del values["optim.epochs"]
        values |= {"kind": job.kind, "data": data.folder.name.removeprefix("data-")}
        if job.needs is not None:
            needed = self._by_key()[job.needs]
            values["needs"] = _digest(self._identity(needed, data))
        return {key: json.dumps(value) for key, value in values.items()}


def same_identity(old: Mapping[str, str], new: Mapping[str, str], accepted: Iterable[str] = ()) -> bool:
    """Whether two identities differ in nothing but what is accepted.

    Accepted code may know parameters that the older one did not: at their defaults they change nothing.
    """
    accepted = set(accepted)
    if "code" in accepted:
        accepted |= {"needs", "graphs"}
        known = _defaults()
        accepted |= {key for key in new.keys() - old.keys() if known.get(key) == new[key]}
    return all(old.get(key) == new.get(key) for key in {*old, *new} - accepted)


@cache
def _defaults() -> dict[str, str]:
    return {key: json.dumps(value) for key, value in leaves(Params())}


def placed(params: Params) -> dict[str, Any]:
    """The parameters for a process that works in another folder: a local encoder by its whole path."""
    values = params.model_dump(mode="json")
    for section, key in (("encoder", "name"), ("data", "path")):
        if values[section][key] and Path(values[section][key]).exists():
            values[section][key] = str(Path(values[section][key]).resolve())
    return values


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, None where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@cache
def raw_sha256(path: str) -> str:
    """Of a folder of raw files, by its whole path; read once a process."""
    return folder_sha256(path)


@cache
def code_sha256(parts: tuple[str, ...]) -> str:
    """Of modules and packages of unidec, as they are on disk when first asked."""
    root = Path(unidec.__file__).parent
    files = [
        file for part in parts for file in ([root / part] if part.endswith(".py") else (root / part).rglob("*.py"))
    ]
    return files_sha256(
        {file.relative_to(root).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    )


def _leaves(params: Params, wanted: tuple[str, ...]) -> dict[str, Any]:
    return {
        key: value for key, value in leaves(params) if any(key == name or key.startswith(f"{name}.") for name in wanted)
    }


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _relative(target: Path, folder: Path) -> str:
    return os.path.relpath(target, folder)
