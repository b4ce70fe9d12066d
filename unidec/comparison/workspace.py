"""Where a comparison lies on disk: derived data once for all cells, and a folder for each cell's inputs.

    runs/compare/<name>/
      shared/data-<key>/data/{dataset,tokens,propensity}   one for each data set, text and tokenizer
      shared/cache                                         vectors of frozen encoders
      cells/<data>/<cell>/<seed>-<key>/                    working folder of one run; result.json comes last
      report.html

A cell's key is the hash of its inputs (parameters, data, what it starts from), so other inputs get another folder.
A result names the code that made it; by other code it is rebuilt, unless that is accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from unidec.comparison.plan import START, Comparison, Job, slug
from unidec.config import Params, fingerprint
from unidec.data.storage import MANIFEST, folder_sha256
from unidec.version import PACKAGE

ROOT = Path("runs/compare")
RESULT, FAILURE, LOG, SPEC = "result.json", "failure.json", "log.txt", "cell.json"
MODEL = "outputs/model"

# which code decides what; pages and command lines decide nothing
READERS = ("data/**/*.py",)
TRAINING = ("model/**/*.py", "training/**/*.py", "retrieval/**/*.py", "pipeline/*.py", "evaluation/metrics.py")
PEER_CODE = ("comparison/peers/*.py", "evaluation/metrics.py", "evaluation/tfidf.py")
_DECIDE_NOTHING = {"run", "tracking", "device", "data", "recipe"}  # the data set has a key of its own
_PEERS_TAKE = ("seed", "encoder", "optim.epochs", "pool.batch_size")


@dataclass(frozen=True)
class Step:
    """Something that a child process makes in a folder of its own; result.json comes last.

    Attributes:
        name: "data/cell/seed", or the data set's. folder: its working folder. spec: cell.json, all that the child is
            given. needs: names of the steps before it.
    """

    name: str
    folder: Path
    spec: Mapping[str, Any]
    needs: tuple[str, ...] = ()

    def is_done(self, accept_code: bool = False) -> bool:
        """Whether its result is there, made by this code (or by any), with the model where others need it."""
        result = self.result()
        if result is None or not (accept_code or result["code"] == self.spec["code"]):
            return False
        return not self.spec["keep"] or (self.folder / MODEL / MANIFEST).is_file()

    def result(self) -> dict[str, Any] | None:
        """result.json, None where there is none."""
        return _read_json(self.folder / RESULT)

    def failure(self) -> str:
        """What its last attempt ended with; "" where it ended well or was never made."""
        return "" if self.result() else (_read_json(self.folder / FAILURE) or {}).get("what", "")


@dataclass(frozen=True)
class Workspace:
    """The folder of a comparison, and the steps in it."""

    comparison: Comparison
    root: Path

    @classmethod
    def of(cls, comparison: Comparison, root: Path | None = None) -> Workspace:
        """The workspace of a comparison, by default `runs/compare/<name>`."""
        return cls(comparison, root or ROOT / comparison.file.name)

    def steps(self, jobs: Iterable[Job], accept_code: bool = False) -> list[Step]:
        """The steps of some of the jobs, each data set before the first job that uses it."""
        found: dict[str, Step] = {}
        for job in jobs:
            data = self.data_step(job)
            found |= {data.name: data, job.key: self.step(job, accept_code)}
        return list(found.values())

    def step(self, job: Job, accept_code: bool = False) -> Step:
        """The step of one job."""
        folder, data = self.folder(job), self.data_step(job)
        links = {f"data/{name}": data.folder / "data" / name for name in ("dataset", "tokens", "propensity")}
        links["data/cache"] = self.root / "shared" / "cache"
        if job.needs is not None:
            links[MODEL if job.kind == "model_of" else START] = self.folder(self.comparison.job(job.needs)) / MODEL
        spec = {
            "kind": job.kind, "name": job.key, "params": _placed(job.params), "peer": job.peer,
            "code": code_sha256(PEER_CODE if job.kind == "peer" else TRAINING), "accept_code": accept_code,
            "keep": job.kind == "recipe" and any(other.needs == job.key for other in self.comparison.jobs),
            "links": {name: os.path.relpath(to, folder) for name, to in links.items()},
        }  # fmt: skip
        return Step(job.key, folder, spec, (data.name, *filter(None, [job.needs])))

    def data_step(self, job: Job) -> Step:
        """The step that makes data set, token cache and propensities of a job, in the folder `data`."""
        key = _data_key(job)
        spec = {
            "kind": "data", "name": f"data {job.data}", "params": _placed(job.params), "train": job.entry.train,
            "test": job.entry.test, "code": code_sha256(READERS), "accept_code": False, "keep": False, "links": {},
        }  # fmt: skip
        return Step(f"data {job.data} ({key[:8]})", self.root / "shared" / f"data-{key[:16]}", spec)

    def folder(self, job: Job) -> Path:
        """The working folder of a job."""
        return self.root / "cells" / slug(job.data) / slug(job.cell) / f"{job.seed}-{self._key(job)[:8]}"

    def _key(self, job: Job) -> str:
        """sha256 (hex) of a job's inputs: parameters, data, and the inputs of the job that it needs."""
        unused = _DECIDE_NOTHING if job.params.pool.gandalf else {*_DECIDE_NOTHING, "label_graph"}
        sections = _PEERS_TAKE if job.kind == "peer" else [name for name in Params.model_fields if name not in unused]
        values = [fingerprint(job.params, *sections), job.kind, job.peer, _data_key(job)]
        return _digest([*values, self._key(self.comparison.job(job.needs))] if job.needs is not None else values)


def _placed(params: Params) -> dict[str, Any]:
    """The parameters for a process that works in another folder: local folders by their whole paths."""
    values = params.model_dump(mode="json")
    for section, key in (("encoder", "name"), ("data", "path")):
        if values[section][key] and Path(values[section][key]).exists():
            values[section][key] = str(Path(values[section][key]).resolve())
    return values


def _read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, None where there is none that can be read."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


raw_sha256 = cache(folder_sha256)  # read once a process


@cache
def code_sha256(patterns: tuple[str, ...]) -> str:
    """Hash of modules of unidec, as they are on disk when first asked for."""
    files = sorted(file for pattern in patterns for file in PACKAGE.glob(pattern))
    return _digest([[file.relative_to(PACKAGE).as_posix(), file.read_text(encoding="utf-8")] for file in files])


def _data_key(job: Job) -> str:
    """sha256 (hex) of what derived data depends on: raw files, slice, split, texts, tokenizer, readers."""
    section = job.params.data.model_copy(update={"path": ""})
    params = fingerprint(job.params.model_copy(update={"data": section}), "data", "tokens", "encoder.name")
    raw = raw_sha256(str(Path(job.entry.path).resolve()))
    return _digest([params, job.entry.train, job.entry.test, raw, code_sha256(READERS)])


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
