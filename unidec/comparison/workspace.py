"""A comparison, its steps and their folders: derived data is shared by all cells, and each run has
its own folder.

    runs/compare/<name>/
      shared/data-<key>/data/{dataset,tokens,propensity}   one per data set, text and tokenizer
      shared/cache                                         vectors of frozen encoders
      cells/<data>/<cell>/<seed>-<key>/   working folder of one run; result.json is written last
      report.html

A run's key is the hash of its inputs (parameters, data, initial model), so other inputs get
another folder. A result names the code that made it; if the code has changed, it is rebuilt (not
with `keep_results`)."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from unidec.code import code_sha256
from unidec.comparison.chosen import read_chosen
from unidec.comparison.comparison_file import ComparisonFile, read_file
from unidec.comparison.jobs import START, Job, Planner, slug
from unidec.config import Params, fingerprint, keys_deciding
from unidec.data.json_file import read_json_object
from unidec.data.storage import MANIFEST, folder_sha256, text_sha256
from unidec.errors import ConfigError

ROOT = Path("runs/compare")
EXAMPLE = "comparison/fair.yaml is an example"
RESULT = "result.json"
FAILURE = "failure.json"
LOG = "log.txt"
SPEC = "cell.json"
MODEL = "outputs/model"
PREDICTIONS = "labels.npy"
SCORES = "scores.npz"

# results (`code_sha256`) whose code decides the result of a peer or of another run
PEER_CODE = ("peers", "metrics")
RUN_CODE = ("training", "index", "metrics")
# parameters that a peer reads, besides those of its data
_PEERS_TAKE = ["seed", "encoder.name", "encoder.pooling", "optim.epochs", "pool.batch_size"]


@dataclass(frozen=True)
class Step:
    """A data set or a run, made by a child process in its own folder; result.json is written last.

    Attributes:
        name: the job's key, or the data set's. key: sha256 (hex) of its inputs. folder: its working
        folder.
        spec: cell.json, all inputs of the child. needs: names of the steps that it depends on.
    """

    name: str
    key: str
    folder: Path
    spec: Mapping[str, Any]
    needs: tuple[str, ...] = ()

    def is_done(self) -> bool:
        """Whether its result exists and was made by this code, with the model if others need it."""
        result = self.result()
        if result is None or result["code"] != self.spec["code"]:
            return False
        model = self.folder / MODEL / MANIFEST
        return not self.spec["keep"] or model.is_file()

    def result(self) -> dict[str, Any] | None:
        """result.json; None if there is none."""
        return read_json_object(self.folder / RESULT) or None

    def failure(self) -> str:
        """The error of its last attempt; "" if it succeeded or was never run."""
        if self.result():
            return ""
        return str(read_json_object(self.folder / FAILURE).get("what", ""))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A checked comparison file, its jobs by key, and their steps by name; each after the steps
    that it needs.

    `overrides` are the parameters of `--set`, over everything.
    """

    path: Path
    file: ComparisonFile
    overrides: Mapping[str, Any]
    root: Path
    jobs: Mapping[str, Job]
    steps: Mapping[str, Step]


def load_comparison(
    path: str | Path,
    overrides: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    tune: bool = False,
    keep_results: bool = False,
) -> Comparison:
    """Read a comparison file and make its jobs and steps.

    Args:
        path: the file.
        overrides: parameters by key path over everything that the file sets, for all cells
        (`--set`).
        folder: of the results, instead of runs/compare/<name>.
        tune: the jobs are the first trials of the searches of the file's `tuning`.
        keep_results: results that another version of the code made count as done.

    Raises:
        ParamsError: every problem at once, with key path, line, what was expected and the nearest
        name.
        ConfigError: the file has no section `tuning` to run, or has not been tuned yet.
    """
    file, origin = read_file(path)
    if tune and file.tuning is None:
        raise ConfigError("nothing to tune", where=path, expected="a section `tuning`", fix=EXAMPLE)
    choose = None if tune else partial(read_chosen, path, file)
    planner = Planner(file, origin, overrides or {})
    jobs = planner.jobs(path, choose)
    root = Path(folder or ROOT / file.name)
    steps = steps_of(jobs, root)
    if keep_results:
        steps = {name: _with_kept_result(step) for name, step in steps.items()}
    return Comparison(
        path=Path(path),
        file=file,
        overrides=planner.overrides,
        root=root,
        jobs=jobs,
        steps=steps,
    )


def _with_kept_result(step: Step) -> Step:
    """The step with the code version of its result; unchanged if that result is missing or lacks
    its model.
    """
    if result := step.result():
        kept = replace(step, spec={**step.spec, "code": result["code"]})
        return kept if kept.is_done() else step
    return step


def select(comparison: Comparison, only: Sequence[str]) -> list[Step]:
    """The steps that match the patterns, and the steps that they need; without patterns, all.

    Args:
        only: "cell", "data/cell" or "data/cell/seed", as in the file or as folders; `*` and `?`
            match anything.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    chosen = matching(comparison, only) if only else comparison.steps
    return with_needed(comparison.steps, chosen)


def matching(comparison: Comparison, only: Sequence[str]) -> set[str]:
    """Keys of the jobs that match the patterns (see `select`); without patterns, of all.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    jobs = comparison.jobs
    if not only:
        return set(jobs)
    chosen: set[str] = set()
    for pattern in only:
        found = {key for key, job in jobs.items() if _matches(job, pattern)}
        if not found:
            raise ConfigError(
                "no such cell",
                where="--only",
                got=pattern,
                expected=f"data/cell/seed, data/cell, or one of {', '.join(comparison.file.cells)}",
            )
        chosen.update(found)
    return chosen


def with_needed(steps: Mapping[str, Step], names: Iterable[str]) -> list[Step]:
    """The named steps and those that they need, in the order of `steps`."""
    chosen = set(names)
    for step in reversed(list(steps.values())):
        if step.name in chosen:
            chosen.update(step.needs)
    return [step for step in steps.values() if step.name in chosen]


def _matches(job: Job, pattern: str) -> bool:
    of_data = f"{job.data}/{job.cell}"
    names = [job.cell, of_data, f"{of_data}/{job.seed}"]
    names += ["/".join(map(slug, name.split("/"))) for name in names]
    return bool(fnmatch.filter(names, pattern))


def steps_of(jobs: Mapping[str, Job], root: Path) -> dict[str, Step]:
    """The steps of all jobs, each data set before the first job that uses it."""
    steps: dict[str, Step] = {}
    needed = {job.needs for job in jobs.values()}
    for job in jobs.values():
        data = _data_step(job, root)
        steps[data.name] = data
        before = steps.get(job.needs)
        steps[job.key] = _run_step(job, root, data, before, is_needed=job.key in needed)
    return steps


def _run_step(job: Job, root: Path, data: Step, before: Step | None, is_needed: bool) -> Step:
    """The step that makes a job's result.

    Args:
        data: makes its data set. before: makes the model that it builds on.
        is_needed: another job builds on its model.
    """
    # the data set's parameters are in its own key
    decide = keys_deciding("label_graph", "training", "index", "evaluation")
    code: tuple[str, ...] = RUN_CODE
    if job.kind == "peer":
        decide = _PEERS_TAKE
        code = PEER_CODE
    params = fingerprint(job.params, *decide)
    key = _digest([params, job.kind, job.peer, data.key, before and before.key])
    cell = root / "cells" / slug(job.data) / slug(job.cell)
    folder = cell / f"{job.seed}-{key[:8]}"
    links = {"data/cache": root / "shared" / "cache"}
    for name in ("data/dataset", "data/tokens", "data/propensity"):
        links[name] = data.folder / name
    if before is not None:
        place = MODEL if job.kind == "model_of" else START
        links[place] = before.folder / MODEL
    spec = {
        "kind": job.kind,
        "name": job.key,
        "params": _placed(job.params),
        "peer": job.peer,
        "code": code_sha256(*code),
        "keep": is_needed,
        "links": {name: os.path.relpath(to, folder) for name, to in links.items()},
    }
    needs = tuple(filter(None, (data.name, job.needs)))
    return Step(job.key, key, folder, spec, needs)


def _data_step(job: Job, root: Path) -> Step:
    """The step that makes a job's data set, token cache and propensities, in the folder `data`.

    Its key hashes raw files, slice, split, texts and tokenizer. Like a run, it is rebuilt if the
    code has changed.
    """
    entry = job.entry
    params = fingerprint(job.params, *keys_deciding("data", "tokens", "propensity"))
    raw = raw_sha256(str(Path(entry.path).resolve()))
    key = _digest([params, entry.train, entry.test, raw])
    spec = {
        "kind": "data",
        "name": f"data {job.data}",
        "params": _placed(job.params),
        "train": entry.train,
        "test": entry.test,
        "code": code_sha256("data"),
        "keep": False,
        "links": {},
    }
    name = f"data {job.data} ({key[:8]})"
    return Step(name, key, root / "shared" / f"data-{key[:16]}", spec)


def _placed(params: Params) -> dict[str, Any]:
    """The parameters for a process in another working folder: local folders as absolute paths."""
    values = params.model_dump(mode="json")
    for section, key in (("encoder", "name"), ("data", "path")):
        given = values[section][key]
        if given and Path(given).exists():
            values[section][key] = str(Path(given).resolve())
    return values


raw_sha256 = cache(folder_sha256)  # read once per process


def _digest(values: list[Any]) -> str:
    return text_sha256(json.dumps(values))
