"""The training lock of a project: only one training runs at a time, and no stage replaces its inputs meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from unidec.errors import TrainingError
from unidec.pipeline import paths
from unidec.tracking.run import is_alive, this_process

LOCK, HOLDER = ".train.lock", ".train.holder"
HELD = "UNIDEC_LOCK"  # environment variable of subprocesses: which process holds the lock of which folder


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextlib.contextmanager
def one_at_a_time(folder: Path = paths.RUNS) -> Iterator[None]:
    """Hold the project's training lock. The system releases it when the process dies, so no stale lock is left.

    Raises:
        TrainingError: another process holds it: a training, or a stage that replaces the inputs of training.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock, holder = FileLock(folder / LOCK), folder / HOLDER
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise TrainingError(
            "another training is under way in this folder, or a stage that replaces its data", where=str(folder),
            got=holder.read_text(encoding="utf-8") if holder.is_file() else None, fix="wait for it, or cancel it",
        ) from error  # fmt: skip
    try:
        holder.write_text(f"process {os.getpid()}: {' '.join(sys.orig_argv)[:200]}", encoding="utf-8")
        with environment(HELD, json.dumps(this_process() | {"folder": str(folder.resolve())})):
            yield
    finally:
        lock.release()


@contextlib.contextmanager
def replaces_inputs() -> Iterator[None]:
    """`one_at_a_time` for a stage that replaces inputs of training.

    It is also allowed in the process that holds the lock and in stages which that process starts through DVC: they run
    before the training opens its data.

    Raises:
        TrainingError: as `one_at_a_time`.
    """
    held = json.loads(os.environ.get(HELD, "{}"))
    inside = held.get("folder") == str(paths.RUNS.resolve()) and is_alive(held)
    with contextlib.nullcontext() if inside else one_at_a_time():
        yield


def is_held() -> bool:
    """Whether a process holds the project's training lock."""
    if not paths.RUNS.is_dir():
        return False
    try:
        with one_at_a_time():
            return False
    except (TrainingError, OSError):
        return True
