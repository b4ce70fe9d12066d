"""The training lock of a project: only one training runs at a time, and no stage replaces its
inputs meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from unidec.addresses import without_credentials
from unidec.data.file_lock import lock_file
from unidec.data.json_file import json_object
from unidec.errors import TrainingError, UnidecError
from unidec.pipeline import paths
from unidec.surroundings import environment
from unidec.tracking.process_alive import is_alive, this_process

LOCK = ".train.lock"
HOLDER = ".train.holder"
# environment variable of subprocesses: which process holds the lock of which folder
HELD = "UNIDEC_LOCK"


@contextlib.contextmanager
def one_at_a_time(folder: Path | None = None) -> Iterator[None]:
    """Hold the project's training lock, in `folder` or runs/. The system releases it when the
    process dies, so no stale lock is left.

    Raises:
        TrainingError: another process, or thread, holds it: a training, or a stage that replaces
        its inputs.
        ArtifactError: the folder cannot be written.
    """
    from filelock import Timeout

    folder = paths.RUNS if folder is None else folder
    holder = folder / HOLDER
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_file(folder / LOCK, timeout=0))
        except Timeout as error:
            raise TrainingError(
                "another training is under way in this folder, or a stage that replaces its data",
                where=folder,
                got=holder.read_text(encoding="utf-8") if holder.is_file() else None,
                fix="wait for it, or cancel it",
            ) from error
        command = without_credentials(" ".join(sys.orig_argv))[:200]
        holder.write_text(f"process {os.getpid()}: {command}", encoding="utf-8")
        held = this_process() | {"folder": str(folder.resolve())}
        stack.enter_context(environment(HELD, json.dumps(held)))
        yield


@contextlib.contextmanager
def replaces_inputs() -> Iterator[None]:
    """`one_at_a_time` for a stage that replaces inputs of training.

    Unlike `one_at_a_time`, it also succeeds in the process that holds the lock and in stages that
    this process starts through DVC: they run before the training opens its data.

    Raises:
        TrainingError: as `one_at_a_time`.
    """
    held = json_object(os.environ.get(HELD, ""))
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
    except UnidecError:
        return True
