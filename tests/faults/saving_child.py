"""Fault 2's program: saves checkpoints in children that kill themselves at every point inside the
save.

    python saving_child.py FOLDER EVERY SCENARIO...

A point is a call from Python into the system's functions or a file's methods that may change what
is on the disk (open, write, fsync, rename, unlink, ...), before and after it. Each child kills
itself by SIGKILL at the next point (of every EVERY), until one lives. After each the newest
checkpoint has to load whole, and the next save has to leave nothing of the killed one. Prints JSON,
a line for each scenario."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from unidec.data import tensor_file
from unidec.errors import ArtifactError
from unidec.training.checkpoint import Checkpoint, CheckpointWriter, RowPart, load_checkpoint

MODULES = {"posix", "io", "_io"}
LOOKS = {
    "fspath",
    "stat",
    "lstat",
    "fstat",
    "scandir",
    "listdir",
    "getpid",
    "kill",
    "urandom",
    "uname",
    "is_dir",
    "is_symlink",
    "read",
    "readinto",
    "tell",
    "fileno",
    "encode",
    "decode",
    "get_blocking",
    "isatty",
}


def make(step: int) -> Checkpoint:
    """A checkpoint of that step, always the same one."""
    generator = torch.Generator().manual_seed(step)
    dense = {
        "model.head": torch.randn(20, 8, generator=generator),
        "adamw.0.step": torch.tensor(float(step)),
    }
    table = {
        name: torch.randn(40, 8, generator=generator) for name in ("weight", "first", "second")
    }
    state = {
        "epoch": 1,
        "epoch_step": 0,
        "step": step,
        "seconds": 1.0,
        "refresh": None,
        "identity": {},
        "notes": {},
    }
    return Checkpoint(state, dense, {"table": RowPart(0, 40, table)})


def equal(ours: Checkpoint, theirs: Checkpoint) -> bool:
    pairs = [(ours.dense, theirs.dense), (ours.rows["table"].tensors, theirs.rows["table"].tensors)]
    return ours.state == theirs.state and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs
    )


def save(run_dir: Path, step: int) -> None:
    CheckpointWriter(run_dir).save(make(step))


def kill_at(point: int) -> None:
    """From now on this process kills itself at its n-th point."""
    left = [point]

    def look(_frame: FrameType, event: str, called: Any) -> None:
        if event in ("c_call", "c_return") and _is_system(called):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    sys.setprofile(look)


def _is_system(called: Any) -> bool:
    if getattr(called, "__name__", "") in LOOKS:
        return False
    owner = getattr(called, "__self__", None)
    module = getattr(called, "__module__", None) or type(owner).__module__
    return module in MODULES or type(owner).__module__ in MODULES


def attempt(run_dir: Path, step: int, point: int) -> bool:
    """Save in a child that dies at a point; whether it lived."""
    child = os.fork()
    if child == 0:
        kill_at(point)
        save(run_dir, step)
        sys.setprofile(None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL), status
    return os.WIFEXITED(status)


def check(run_dir: Path, before: int | None, saved: int) -> int | None:
    """Which checkpoint is used after the kill; it is whole, whatever lies beside it."""
    loaded, refused = load_checkpoint(run_dir)
    assert refused == [], refused
    if loaded is None:
        assert before is None
        return None
    step = int(loaded.state["step"])
    assert step in (before, saved)
    assert equal(loaded, make(step))
    return step


def check_next(run_dir: Path) -> None:
    """The next save needs no manual step and leaves nothing of the killed one."""
    save(run_dir, 99)
    loaded, refused = load_checkpoint(run_dir)
    assert loaded is not None
    assert equal(loaded, make(99))
    assert refused == []
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names[0] == "latest", names
    assert names[-1] == "step-0000000099", names
    assert len(names) <= 3, names
    assert all(not name.startswith(".") for name in names), names


def main(folder: Path, scenario: str, every: int) -> None:
    before, step = {"first": ([], 5), "third": ([5, 10], 15), "again": ([5, 10], 10)}[scenario]
    base = folder / scenario / "base"
    run_dir = folder / scenario / "run"
    for number in before:
        save(base, number)
    base.mkdir(exist_ok=True, parents=True)
    outcomes: dict[str, int] = {}
    point = 0
    lived = False
    while not lived:
        shutil.copytree(base, run_dir)
        lived = attempt(run_dir, step, point)
        try:
            used = check(run_dir, before[-1] if before else None, step)
            check_next(run_dir)
        except (AssertionError, ArtifactError) as error:
            raise SystemExit(f"{scenario}, killed at point {point}: {error!r}") from error
        outcomes[str(used)] = outcomes.get(str(used), 0) + 1
        shutil.rmtree(run_dir)
        point += every
    print(json.dumps({"points": point - every, "used": outcomes}))


if __name__ == "__main__":
    tensor_file.CHUNK_BYTES = 512  # several writes a file
    for scenario in sys.argv[3:]:
        main(Path(sys.argv[1]), scenario, int(sys.argv[2]))
