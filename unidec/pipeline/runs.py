"""The training runs of a project: which there are, how far each came, which one resumes.

A run's folder, `runs/<16 hex digits of its identity>`, holds `checkpoints/`, `refresh/`, `history.jsonl`,
`rounds.jsonl` and `tracking.json`.
"""

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
from unidec.tracking.run import Status, Tracker, is_alive, tracking_state
from unidec.training.stopping import Stopping


@dataclass(frozen=True)
class RunInfo:
    """A run as its folder shows it; nothing is hashed, no tensor read.

    Attributes:
        state: "running" (a living process holds it), "finished", "failed", "stopped" or "begun" (no checkpoint yet).
        epoch, epochs, step: finished ones and (at most) all, at the newest checkpoint; None without one.
        checkpoint: the newest one's name; checkpoint_age: in seconds. mlflow_run: its id.
        unfinished: training can resume, and no process is at it.
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


def run_folders(root: Path = paths.RUNS) -> list[Path]:
    """Folders of runs, the one last written to first."""

    def written(path: Path) -> float:
        inside = [path, path / "checkpoints", path / "history.jsonl"]
        return max(entry.stat().st_mtime for entry in inside if entry.exists())

    found = [path for path in root.glob("[!.]*") if any((path / n).exists() for n in ("checkpoints", "tracking.json"))]
    return sorted(found, key=written, reverse=True)


def list_runs() -> list[RunInfo]:
    """Every run of the project, the one last written to first."""
    return list(map(run_info, run_folders()))


def run_info(run_dir: Path) -> RunInfo:
    """How far a run came."""
    path, state = _newest(run_dir)
    tracked = tracking_state(run_dir)
    epochs, identity = None, state.get("identity")
    if identity:
        keys = {"optim.epochs": "", "pool.refresh": "1", "optim.patience": "0", "optim.budget_minutes": "0"}
        stopping = Stopping(*(json.loads(identity.get(key, default)) for key, default in keys.items()))
        epochs = stopping.read(run_dir, state["epoch"])[1]
    if tracked.get("status") is None and is_alive(tracked.get("holder")):
        how = "running"
    elif epochs is not None and state["epoch"] >= epochs:
        how = "finished"
    else:
        how = "failed" if tracked.get("status") == "FAILED" else "stopped" if state else "begun"
    return RunInfo(
        run_dir.name, how, state.get("epoch"), epochs, state.get("step"), path.name if path else None,
        age(path) if path else None, tracked.get("run_id"), how not in ("running", "finished"),
    )  # fmt: skip


def rows_of(infos: list[RunInfo]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table that people read."""
    rows = []
    for info in infos:
        saved = f"{in_words(info.checkpoint_age)} ago" if info.checkpoint_age is not None else "none yet"
        epoch = f"{info.epoch or 0} of {info.epochs or '?'}"
        rows.append([info.name, info.state, epoch, str(info.step or 0), saved, info.mlflow_run or ""])
    return ["run", "state", "epoch", "step", "checkpoint", "MLflow run"], rows


def age(path: Path) -> float:
    """Seconds since a file or folder was written."""
    return max(0.0, time.time() - path.stat().st_mtime)


def in_words(seconds: float) -> str:
    """40 -> "0:00:40", 200000 -> "2 days, 7:33:20"."""
    return str(timedelta(seconds=int(seconds)))


def some_keys(keys: list[str], most: int) -> str:
    """ "a, b and 3 more"."""
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def choose_run(name: str) -> Path:
    """The run of a name, or of the beginning of one; "": the newest that is unfinished.

    Raises:
        ConfigError: there is none, or several.
    """
    infos = list_runs()
    found = [info for info in infos if info.name.startswith(name)] if name else [i for i in infos if i.unfinished][:1]
    if len(found) != 1:
        what = "several runs begin with this" if found else "no such run" if name else "no unfinished run to resume"
        known = ", ".join(info.name for info in infos[:5]) or "none"
        fix = "`unidec runs list` lists them; without --resume a run of these parameters begins"
        raise ConfigError(what, where="--resume", got=name or None, expected=f"one of: {known}", fix=fix)
    return paths.RUNS / found[0].name


@contextlib.contextmanager
def tracked(run_dir: str | Path) -> Iterator[None]:
    """The MLflow run ends as what happens inside: FINISHED, FAILED, or KILLED by a signal."""
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
    return Tracker.resume(paths.RUNS / read_manifest(paths.MODEL, "model", 1, verify=False)["meta"]["run"])


def _newest(run_dir: Path) -> tuple[Path | None, dict[str, Any]]:
    """The newest checkpoint that has a state to read, and its state; its hashes are not looked at."""
    from unidec.training.checkpoint import checkpoint_folders, read_state  # imports torch

    for path in checkpoint_folders(run_dir):
        with contextlib.suppress(ArtifactError, OSError):
            return path, read_state(run_dir, path, verify=False)
    return None, {}
