"""The training runs of a project: their progress, and the choice of the run to resume.

A run's folder, `runs/<16 hex digits of its identity>`, holds `checkpoints/`, `refresh/`,
`history.jsonl`, `rounds.jsonl` and `tracking.json`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from unidec.data.storage import read_manifest
from unidec.errors import ArtifactError, ConfigError
from unidec.pipeline import paths
from unidec.tracking.process_alive import is_alive
from unidec.tracking.run import Status, Tracker, tracking_state
from unidec.training.stopping import Stopping


@dataclass(frozen=True)
class RunInfo:
    """The state of a run, read from its folder without hashing files or reading tensors.

    Attributes:
        state: "running" (its process is alive), "finished", "failed", "stopped", or "started" (no
            checkpoint yet).
        epoch, step: finished epochs and steps at the newest checkpoint. epochs: maximum number of
            epochs. All are None without a checkpoint.
        checkpoint: name of the newest checkpoint. checkpoint_age: in seconds. mlflow_run: id.
        unfinished: training can resume, and no process is training it.
        trial: name of the folder in runs/own/, for a training with parameters that differ from
        params.yaml; None: no trial.
    """

    name: str
    state: str
    epoch: int | None
    epochs: int | None
    step: int | None
    checkpoint: str | None
    checkpoint_age: float | None
    mlflow_run: str | None
    unfinished: bool
    trial: str | None = None


def run_folders(root: Path | None = None) -> list[Path]:
    """Folders of runs, the most recently written first."""
    root = paths.RUNS if root is None else root
    found = [
        path
        for path in root.glob("[!.]*")
        if any((path / n).exists() for n in ("checkpoints", "tracking.json"))
    ]
    return sorted(found, key=_written, reverse=True)


def _written(folder: Path) -> float:
    inside = [folder, folder / "checkpoints", folder / "history.jsonl"]
    return max(entry.stat().st_mtime for entry in inside if entry.exists())


def list_runs() -> list[RunInfo]:
    """All runs of the project and of its trials, the most recently written first."""
    found = run_folders()
    for trial in sorted(paths.TRIALS.glob("*")):
        found += run_folders(trial / paths.RUNS)
    return [run_info(folder) for folder in sorted(found, key=_written, reverse=True)]


def run_info(run_dir: Path) -> RunInfo:
    """The state of a run."""
    checkpoint, state = _newest(run_dir)
    tracked = tracking_state(run_dir)
    epochs = None
    if identity := state.get("identity"):
        keys = {
            "optim.epochs": "",
            "pool.refresh": "1",
            "optim.patience": "0",
            "optim.budget_minutes": "0",
        }
        stopping = Stopping(
            *(json.loads(identity.get(key, default)) for key, default in keys.items())
        )
        epochs = stopping.read(run_dir, state["epoch"])[1]
    if tracked.get("status") is None and is_alive(tracked.get("holder")):
        status = "running"
    elif epochs is not None and state["epoch"] >= epochs:
        status = "finished"
    elif tracked.get("status") == "FAILED":
        status = "failed"
    else:
        status = "stopped" if state else "started"
    return RunInfo(
        run_dir.name,
        status,
        state.get("epoch"),
        epochs,
        state.get("step"),
        checkpoint.name if checkpoint else None,
        age(checkpoint) if checkpoint else None,
        tracked.get("run_id"),
        status not in ("running", "finished"),
        run_dir.parts[-3] if run_dir.is_relative_to(paths.TRIALS) else None,
    )


def rows_of(infos: list[RunInfo]) -> list[dict[str, str]]:
    """Rows of the printed table, by column."""
    rows = []
    for info in infos:
        saved = "none yet"
        if info.checkpoint_age is not None:
            saved = f"{duration(info.checkpoint_age)} ago"
        row = {
            "run": f"{info.name} (trial {info.trial})" if info.trial else info.name,
            "state": info.state,
            "epoch": f"{info.epoch or 0} of {info.epochs or '?'}",
            "step": str(info.step or 0),
            "checkpoint": saved,
            "MLflow run": info.mlflow_run or "",
        }
        rows.append(row)
    return rows


def age(path: Path) -> float:
    """Seconds since a file or folder was written."""
    return max(0.0, time.time() - path.stat().st_mtime)


def duration(seconds: float) -> str:
    """40 -> "0:00:40", 200000 -> "2 days, 7:33:20"."""
    return str(timedelta(seconds=int(seconds)))


def choose_run(name: str) -> Path:
    """The folder of the run whose name begins with `name`; "": the newest unfinished run.

    Raises:
        ConfigError: there is no such run, or more than one.
    """
    infos = [run_info(folder) for folder in run_folders()]
    if name:
        what = "no such run"
        found = [info.name for info in infos if info.name.startswith(name)]
    else:
        what = "no unfinished run to resume"
        found = [info.name for info in infos if info.unfinished][:1]
    if len(found) != 1:
        raise ConfigError(
            "several runs begin with this" if found else what,
            where="--resume",
            got=name or None,
            expected=f"one of: {', '.join(info.name for info in infos[:5])}",
            fix="`unidec runs list` lists them; without --resume, the run of these parameters is "
            "started or resumed",
        )
    return paths.RUNS / found[0]


@contextlib.contextmanager
def tracked(run_dir: str | Path) -> Iterator[None]:
    """End the MLflow run after the block: as FINISHED, as FAILED after an error, as KILLED after a
    signal.
    """
    status: Status = "FINISHED"
    try:
        yield
    except BaseException as error:
        status = "FAILED" if isinstance(error, Exception) else "KILLED"
        raise
    finally:
        tracker = Tracker.resume(run_dir)
        if tracker.status is None:
            tracker.finish(status)


def tracker_of_model() -> Tracker:
    """The MLflow run that trained outputs/model."""
    return Tracker.resume(
        paths.RUNS / read_manifest(paths.MODEL, "model", 1, verify=False)["meta"]["run"]
    )


def _newest(run_dir: Path) -> tuple[Path | None, dict[str, Any]]:
    """The newest checkpoint with a readable state, and its state, without checking hashes; (None,
    {}) if there is none.
    """
    from unidec.training.checkpoint import checkpoint_folders, read_state  # imports torch

    for path in checkpoint_folders(run_dir):
        with contextlib.suppress(ArtifactError, OSError):
            return path, read_state(run_dir, path, verify=False)
    return None, {}
