"""Divides work on many rows into shards. A shard is a folder that is either complete or absent: a
killed run resumes with the missing shards, and any process with access to the folder can compute
one.

A stage of a training divides its work only inside of `dividing`, which names the function that
writes the missing shards, for example on the machines of a cluster.

    <folder>/plan.json           the work and the bounds of the shards (`Work`)
    <folder>/inputs/             what workers read beside the data
    <folder>/00003-of-00008/     one shard; its manifest (sizes, sha256) contains the plan's key
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import filterfalse
from pathlib import Path
from typing import Any, NamedTuple

from unidec.data.file_lock import lock_file
from unidec.data.storage import (
    Folder,
    folder_sha256,
    read_manifest,
    verify_once,
    write_folder,
    write_json,
)
from unidec.errors import ArtifactError, ConfigError
from unidec.version import __version__

PLAN = "plan.json"
INPUTS = "inputs"
MAX_SHARDS = 99_999
_KNOWN_NAMES = re.compile(r"\..*|plan\.json|inputs|texts\.arrow|\d{5}-of-\d{5}")


class Job(NamedTuple):
    """What the shards of a work are.

    Attributes:
        name: chooses the function that writes a shard (`unidec.pipeline.shard_jobs`).
        title, unit: of its progress bar.
    """

    name: str
    title: str
    unit: str


@dataclass(frozen=True)
class Work:
    """The plan of a computation in shards.

    Attributes:
        folder: absolute path of the folder with the plan and the shards.
        job: what is computed.
        key: sha256 of everything that determines the result, including the bounds; shards with
        another key are not used.
        bounds: shard i has the rows bounds[i] to bounds[i + 1] - 1.
        settings: a worker's input as JSON-serialisable values (absolute paths and plain values).
    """

    folder: Path
    job: Job
    key: str
    bounds: tuple[int, ...]
    settings: dict[str, Any]

    @classmethod
    def begin(
        cls,
        folder: Path,
        job: Job,
        facts: dict[str, Any],
        settings: dict[str, Any],
        bounds: tuple[int, ...],
    ) -> Work:
        """Write the plan. Shards of an earlier plan are reused if its `facts`, bounds and version
        of unidec are the same.

        Args:
            facts: hashes and settings that determine the result, JSON-serialisable and without
            paths.

        Raises:
            ArtifactError: the folder cannot be written.
        """
        text = json.dumps([__version__, job.name, facts, bounds], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        plan = {"job": job, "key": key, "bounds": bounds, "settings": settings}
        write_json(folder / PLAN, plan)
        return cls(folder, job, key, bounds, settings)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Work:
        """Read the plan in a folder. Raises ArtifactError: there is no plan, or it is damaged."""
        path = Path(folder) / PLAN
        try:
            plan = json.loads(path.read_bytes())
            bounds = tuple(plan.pop("bounds"))
            return cls(path.parent, Job(*plan.pop("job")), bounds=bounds, **plan)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                "no readable plan of shards",
                where=path,
                got=error,
                fix="run the command that wrote it again",
            ) from error

    @property
    def num_shards(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_rows(self) -> int:
        return self.bounds[-1]

    def checked_inputs(self) -> Path:
        """Folder of what workers read beside the data; a process checks its hashes once, not for
        each shard. Raises ArtifactError: it is missing or damaged.
        """
        inputs = self.folder / INPUTS
        with verify_once(inputs) as needed:
            read_manifest(inputs, INPUTS, 1, needed)
        return inputs

    def rows(self, number: int) -> tuple[int, ...]:
        """First (from 0) and last row (exclusive) of a shard."""
        return self.bounds[number : number + 2]

    def size(self, number: int) -> int:
        first, end = self.rows(number)
        return end - first

    def name(self, number: int) -> str:
        """Name of a shard in messages: "shard 4 of 8 (rows 3,000 to 3,999)"."""
        first, end = self.rows(number)
        rows = f"rows {first:,} to {end - 1:,}" if end > first else "no rows"
        return f"shard {number + 1} of {self.num_shards} ({rows})"

    def path(self, number: int) -> Path:
        """Folder of a shard."""
        return self.folder / f"{number:05d}-of-{self.num_shards:05d}"

    def is_whole(self, number: int) -> bool:
        """Whether a shard exists, is undamaged (every hash is checked) and belongs to this plan."""
        try:
            meta = read_manifest(self.path(number), "shard", 1)["meta"]
        except (ArtifactError, OSError):
            return False
        return meta == {"key": self.key, "number": number}

    def missing(self) -> list[int]:
        """Numbers of the shards that still have to be written, ascending."""
        return list(filterfalse(self.is_whole, range(self.num_shards)))

    def write(self, number: int) -> contextlib.AbstractContextManager[Folder]:
        """Context in which a shard's folder is written; see `storage.write_folder`."""
        return write_folder(self.path(number), "shard", 1, {"key": self.key, "number": number})

    @contextlib.contextmanager
    def whole(self) -> Iterator[list[Path]]:
        """The folders of all shards, in order: `with work.whole() as shards: ...` merges them. They
        are removed, with the plan, if the block ends without an error.

        Raises:
            ArtifactError: a shard is missing or damaged.
        """
        if missing := self.missing():
            raise ArtifactError(
                f"{len(missing)} of {self.num_shards} shards are missing or damaged",
                where=self.folder,
                got=", ".join(map(self.name, missing[:3])),
                fix="run the same command again; all workers must share this folder",
            )
        yield list(map(self.path, range(self.num_shards)))
        shutil.rmtree(self.folder, ignore_errors=True)


_write: ContextVar[Callable[[Work], None] | None] = ContextVar("write", default=None)


@contextlib.contextmanager
def dividing(write: Callable[[Work], None] | None) -> Iterator[None]:
    """Inside the block, stages divide large work into shards.

    Args:
        write: writes the missing shards of a work; None: stages work in one piece.
    """
    token = _write.set(write)
    try:
        yield
    finally:
        _write.reset(token)


def is_dividing() -> bool:
    """Whether stages divide large work, as inside of `dividing`."""
    return _write.get() is not None


@contextlib.contextmanager
def divided(
    output: Path,
    job: Job,
    settings: dict[str, Any],
    size: tuple[int, int],
    write_inputs: Callable[[Path], object] = lambda folder: None,
) -> Iterator[list[Path]]:
    """All shards of a stage's work, written by the function given to `dividing`:
    `with divided(...) as shards: ...` merges them.

    Args:
        output: the shards are beside it (`shards_folder`).
        settings: of the work; with the inputs they determine the result. Workers unpack their
            values in this order.
        size: number of rows, and of rows in a shard.
        write_inputs: writes files for the workers into a folder.

    Raises:
        UnidecError: a shard's error; what `alone` and `Work.whole` raise.
    """
    write: Any = _write.get()
    folder = shards_folder(output)
    inputs = folder / INPUTS
    num_rows, rows_a_shard = size
    with alone(folder):
        with write_folder(inputs, INPUTS, 1) as out:
            write_inputs(out.path)
        facts = settings | {INPUTS: folder_sha256(inputs)}
        bounds = (*range(0, num_rows, rows_a_shard), num_rows)
        work = Work.begin(folder, job, facts, settings, bounds)
        write(work)
        with work.whole() as shards:
            yield shards


def shards_folder(output: str | os.PathLike[str]) -> Path:
    """Folder of the plan and shards of an output until they are merged: `<output>.shards`."""
    path = Path(os.path.abspath(output))
    return path.with_name(f"{path.name}.shards")


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of shards: from before the plan is written until the shards are
    merged. The operating system releases the lock if the process dies.

    Raises:
        ArtifactError: another process holds the lock, or the folder has other files or cannot be
        created.
    """
    from filelock import Timeout

    for path in folder.glob("*"):
        if not _KNOWN_NAMES.fullmatch(path.name):
            raise ArtifactError(
                "the folder for shards contains other files",
                where=folder,
                got=path.name,
                fix="move the folder away",
            )
    try:
        with lock_file(folder / ".lock", timeout=0):
            try:
                yield
            finally:
                if not (folder / PLAN).exists():  # the work has not begun, or is finished
                    shutil.rmtree(folder, ignore_errors=True)
    except Timeout as error:
        raise ArtifactError(
            "another process is working in this folder",
            where=folder,
            fix="wait until it has finished, or end it",
        ) from error


def cuts(num_rows: int, shards: int, batch_size: int) -> tuple[int, ...]:
    """Bounds of contiguous shards of nearly equal size that begin at multiples of `batch_size`; at
    most one shard per batch.

    Raises:
        ConfigError: `shards` is out of range.
    """
    if not 1 <= shards <= MAX_SHARDS:
        raise ConfigError("out of range", where="shards", got=shards, expected=f"1 to {MAX_SHARDS}")
    batches = -(-num_rows // batch_size)
    shards = max(1, min(shards, batches))
    starts = [batches * number // shards * batch_size for number in range(shards + 1)]
    return tuple(min(start, num_rows) for start in starts)
