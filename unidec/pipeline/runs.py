"""The training runs of a project: which there are, how far each came, which one resumes, who may hold them.

A run's folder, `runs/<16 hex digits of its identity>`, holds `run.json` (its identity, and what was accepted to
differ), `checkpoints/`, `refresh/`, `history.jsonl`, `rounds.jsonl` and `tracking.json`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidec.data.storage import read_json_lines, write_json
from unidec.errors import ArtifactError, ConfigError
from unidec.pipeline import paths
from unidec.tracking.lock_holder import is_alive
from unidec.tracking.run import Status, Tracker, reconcile_runs, tracking_state
from unidec.training.identity import check_same, differences

RUN = "run.json"
_SHOWN = ("P@1", "nDCG@5", "PSP@5")


@dataclass(frozen=True)
class RunInfo:
    """A run as its folder shows it; nothing is hashed, no tensor read.

    Attributes:
        name, folder: of the run.
        state: "finished", "running" (a living process holds it), "failed", "stopped" or "begun" (no checkpoint yet).
        epoch, epochs, step: finished ones and all, at the newest checkpoint; None where it is not known.
        checkpoint: newest checkpoint's name; checkpoint_age: seconds; checkpoint_bytes: size.
        validation: headline of the newest round, in percent.
        mlflow_run: its id.
        unfinished: training can resume, and no process is at it.
    """

    name: str
    folder: str
    state: str
    epoch: int | None
    epochs: int | None
    step: int | None
    checkpoint: str | None
    checkpoint_age: float | None
    checkpoint_bytes: int | None
    validation: dict[str, float]
    mlflow_run: str | None

    @property
    def unfinished(self) -> bool:
        return self.state in ("failed", "stopped", "begun")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return vars(self) | {"unfinished": self.unfinished}


# -- looking ----------------------------------------------------------------------------------------------------


def run_folders(root: Path = paths.RUNS) -> list[Path]:
    """Folders of runs, the one last written to first."""
    found = [path for path in root.glob("*") if path.is_dir() and path.name[0] != "." and _is_run(path)]
    return sorted(found, key=_last_written, reverse=True)


def list_runs(root: Path = paths.RUNS) -> list[RunInfo]:
    """Every run of the project, the one last written to first."""
    return list(map(run_info, run_folders(root)))


def run_info(run_dir: Path) -> RunInfo:
    """How far a run came."""
    newest, state = next(_states(run_dir), (None, {}))
    tracked = tracking_state(run_dir)
    epochs = run_identity(run_dir).get("optim.epochs", "")
    num_epochs = int(epochs) if epochs.isdigit() else None
    figures: dict[str, float] = {}
    with contextlib.suppress(ArtifactError):
        for line in read_json_lines(run_dir / "rounds.jsonl"):
            figures = line.get("validation") or figures
    return RunInfo(
        name=run_dir.name,
        folder=str(run_dir),
        state=_state_of(state, num_epochs, tracked),
        epoch=state.get("epoch"),
        epochs=num_epochs,
        step=state.get("step"),
        checkpoint=newest.name if newest else None,
        checkpoint_age=time.time() - newest.stat().st_mtime if newest else None,
        checkpoint_bytes=sum(file.stat().st_size for file in newest.iterdir()) if newest else None,
        validation={name: figures[name] for name in _SHOWN if name in figures},
        mlflow_run=tracked.get("run_id"),
    )


def rows_of(infos: list[RunInfo]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table that people read."""
    columns = ["run", "state", "epoch", "step", "checkpoint", "size", "validation", "MLflow run"]
    rows = []
    for info in infos:
        age = f"{in_words(info.checkpoint_age)} ago" if info.checkpoint_age is not None else "none yet"
        size = f"{info.checkpoint_bytes / 1e6:,.1f} MB" if info.checkpoint_bytes is not None else ""
        figures = ", ".join(f"{name} {value:.2f}" for name, value in info.validation.items())
        epoch = f"{info.epoch or 0} of {info.epochs if info.epochs is not None else '?'}"
        rows.append([info.name, info.state, epoch, str(info.step or 0), age, size, figures, info.mlflow_run or ""])
    return columns, rows


def in_words(seconds: float) -> str:
    """40 -> "40 s", 150 -> "2 min", 9000 -> "2.5 h", 200000 -> "2.3 days"."""
    for limit, unit, text in ((120, 1, "{:.0f} s"), (7200, 60, "{:.0f} min"), (172_800, 3600, "{:.1f} h")):
        if seconds < limit:
            return text.format(seconds / unit)
    return f"{seconds / 86_400:.1f} days"


def some_keys(keys: list[str], most: int) -> str:
    """ "a, b and 3 more"."""
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def run_identity(run_dir: Path) -> dict[str, str]:
    """The identity that a run was begun with: from run.json, else from its newest checkpoint."""
    identity = _read(run_dir / RUN).get("identity")
    return dict(identity or next((state["identity"] for _, state in _states(run_dir) if state.get("identity")), {}))


def accepted_keys(run_dir: Path) -> tuple[str, ...]:
    """Keys of the identity that may differ from what this run was begun with: given to `--accept` before."""
    return tuple(dict.fromkeys(entry["key"] for entry in _read(run_dir / RUN).get("accepted", [])))


def others_unfinished(run_dir: Path, identity: Mapping[str, str], root: Path = paths.RUNS) -> str | None:
    """One line on the newest unfinished run of other parameters or code, None where there is none."""
    others = [info for info in list_runs(root) if info.unfinished and info.checkpoint and info.name != run_dir.name]
    if not others:
        return None
    info = others[0]
    keys = some_keys([line.partition(":")[0] for line in differences(run_identity(Path(info.folder)), identity)], 6)
    return (
        f"run {info.name} is unfinished (epoch {info.epoch} of {info.epochs}, step {info.step}) and differs in "
        f"{keys}; to resume it put these back, or: unidec train --resume {info.name} --accept KEY ..."
    )


# -- choosing ----------------------------------------------------------------------------------------------------


def choose_run(name: str, root: Path = paths.RUNS) -> Path:
    """The run of a name, the beginning of one, or a path; "": the newest that is unfinished.

    Raises:
        ConfigError: there is none, or several.
    """
    folders = run_folders(root)
    known = ", ".join(path.name for path in folders[:5]) or "none"
    if not name:
        unfinished = next((path for path in folders if run_info(path).unfinished), None)
        if unfinished is not None:
            return unfinished
        fix = "name one (unidec train --resume RUN), or train without --resume"
        raise ConfigError("no unfinished run to resume", where=str(root), got=f"runs: {known}", fix=fix)
    if Path(name).is_dir() and _is_run(Path(name)):
        return Path(name)
    found = [path for path in folders if path.name == name] or [p for p in folders if p.name.startswith(name)]
    if len(found) != 1:
        what = "several runs begin with this" if found else "no such run"
        fix = "`unidec runs list` lists them"
        raise ConfigError(what, where="--resume", got=name, expected=f"one of: {known}", fix=fix)
    return found[0]


def claim(run_dir: Path, identity: Mapping[str, str], accept: Collection[str]) -> list[str]:
    """Begin a run, or check that it may resume under this identity and note what was accepted to differ.

    Returns:
        lines on what differs and is accepted.

    Raises:
        ConfigError: a key differs that is not accepted; or an accepted key does not exist.
    """
    unknown = sorted(set(accept) - identity.keys())
    if unknown:
        raise ConfigError(
            "not a key of a run's identity", where="--accept", got=", ".join(unknown),
            expected="a key that the refusal lists, such as optim.lr_clf, data, tokenizer or code",
        )  # fmt: skip
    old = run_identity(run_dir)
    check_same(old, identity, accept, str(run_dir))
    lines = differences(old, identity) if old else []
    note = _read(run_dir / RUN)
    entries = [*note.get("accepted", []), *({"key": line.partition(":")[0], "what": line} for line in lines)]
    if note.get("identity") != dict(identity) or lines:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_json(run_dir / RUN, {"identity": dict(identity), "accepted": entries})
    return lines


# -- holding ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tracked(run_dir: str | Path) -> Iterator[None]:
    """The MLflow run ends as what happens inside: FINISHED, FAILED, or KILLED by a signal."""
    try:
        yield
    except BaseException as error:
        close_tracking(run_dir, "FAILED" if isinstance(error, Exception) else "KILLED")
        raise
    close_tracking(run_dir, "FINISHED")


def close_tracking(run_dir: str | Path, status: Status) -> None:
    """Ends the MLflow run of a training folder, unless it has ended."""
    tracker = Tracker.resume(run_dir)
    if tracker.status is None:
        tracker.finish(status)


def reconcile_crashed_runs(besides: Path | None = None, root: Path = paths.RUNS) -> list[str]:
    """End, as KILLED, the MLflow runs of trainings whose process is gone; returns their names.

    What other ended runs logged while the tracking store was away is sent, too.

    Args:
        besides: a run that is about to resume.
        root: of the runs.
    """
    return reconcile_runs(path for path in run_folders(root) if besides is None or path.resolve() != besides.resolve())


# -- reading ----------------------------------------------------------------------------------------------------


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in (RUN, "checkpoints", "tracking.json"))


def _last_written(path: Path) -> float:
    inside = [path, path / "checkpoints", path / "history.jsonl"]
    return max(entry.stat().st_mtime for entry in inside if entry.exists())


def _states(run_dir: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Checkpoints that have a state to read, newest first; their hashes are not looked at."""
    from unidec.training.checkpoint import checkpoint_folders, read_state  # imports torch

    for path in checkpoint_folders(run_dir):
        with contextlib.suppress(ArtifactError, OSError):
            yield path, read_state(run_dir, path, verify=False)


def _state_of(state: Mapping[str, Any], epochs: int | None, tracked: Mapping[str, Any]) -> str:
    if tracked.get("status") is None and is_alive(tracked.get("holder")):
        return "running"
    if epochs is not None and state.get("epoch", -1) >= epochs:
        return "finished"
    if tracked.get("status") == "FAILED":
        return "failed"
    return "stopped" if state else "begun"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ArtifactError("a damaged note of the run", where=str(path), got=str(error), fix="delete it") from error
    return found if isinstance(found, dict) else {}
