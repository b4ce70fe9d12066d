"""Long work over many rows, cut into shards: each is a folder that is whole or not there, so that a run that was
killed goes on with those that are missing, and any process of any machine that sees the folder may write one.

    <folder>/plan.json           what is to be made, of which input, and where it is cut (`Work`)
    <folder>/00003-of-00008/     one shard: sealed, with a manifest that names the plan's key

The key is a hash of the input and of all settings: a shard of another key is no shard of this work. Merged shards give
the bytes that the work gives in one piece, because the cuts lie where its batches end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from unidec import __version__
from unidec.data.storage import Folder, load_array, read_manifest, write_folder, write_json
from unidec.errors import ArtifactError, ConfigError

PLAN = "plan.json"
VERSION = 1  # of plans and shards
MAX_PLAN_BYTES = 64 << 20
MAX_SHARDS = 99_999
_OURS = re.compile(r"\..*|plan\.json|texts|\d{5}-of-\d{5}")
_COPY_BYTES = 16 << 20
_ANY_VERSION = 1 << 30  # the key tells shards of other versions apart


@dataclass(frozen=True)
class Work:
    """What is to be made, and where it is cut.

    Attributes:
        folder: of the plan and the shards, absolute.
        kind: "tokens", "vectors" or "predictions"; `shard_kind` is that of the shards' folders.
        key: sha256 over the input's hash and all settings.
        bounds: rows; shard i is of rows bounds[i] to bounds[i + 1].
        settings: what a worker needs, JSON: paths (absolute) and numbers.
    """

    folder: Path
    kind: str
    key: str
    bounds: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        folder: str | os.PathLike[str],
        kind: str,
        facts: Mapping[str, Any],
        settings: Mapping[str, Any],
        num_rows: int,
        *,
        shards: int | None = None,
        rows_a_shard: int = 1 << 16,
        multiple: int = 1,
    ) -> Work:
        """Writes the plan; one of the same key that is there already keeps its cuts and shards, others are removed.

        Args:
            facts: what decides the result: hashes and settings, JSON, no paths. They make the key.
            settings: what workers are told.
            shards: how many; None: those of a plan that was begun, else as `rows_a_shard` gives.
            multiple: shards begin at multiples of it: where the work in one piece begins a batch.

        Raises:
            ConfigError: `shards` out of range.
            ArtifactError: the folder holds something else, or cannot be written.
        """
        root = Path(os.path.abspath(folder))
        if shards is not None and not 1 <= shards <= MAX_SHARDS:
            raise ConfigError("out of range", where="shards", got=shards, expected=f"1 to {MAX_SHARDS}")
        text = json.dumps([kind, VERSION, __version__, facts, num_rows], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        before = None
        if root.exists():
            foreign = sorted(path.name for path in root.iterdir() if not _OURS.fullmatch(path.name))
            if foreign:
                raise ArtifactError("a folder of something else", where=str(root), got=foreign[0], fix="move it away")
            with contextlib.suppress(ArtifactError):
                before = cls.open(root)
        count = shards or -(-num_rows // rows_a_shard)
        bounds = cuts(num_rows, min(max(count, 1), MAX_SHARDS), multiple)
        if before is not None and before.key == key and (shards is None or before.bounds == bounds):
            bounds = before.bounds
        else:
            for left in root.glob("*-of-*"):
                shutil.rmtree(left, ignore_errors=True)
        work = cls(root, kind, key, bounds, dict(settings))
        plan = {"kind": kind, "version": VERSION, "key": key, "bounds": list(bounds), "settings": dict(settings)}
        write_json(root / PLAN, plan)
        return work

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Work:
        """The work whose plan lies in a folder.

        Raises:
            ArtifactError: no plan, a damaged one, or one of a newer version.
        """
        root = Path(os.path.abspath(folder))
        where = str(root / PLAN)
        try:
            if (root / PLAN).stat().st_size > MAX_PLAN_BYTES:
                raise ValueError("a plan of impossible size")
            plan = json.loads((root / PLAN).read_bytes())
            bounds = tuple(plan["bounds"])
            sound = (
                plan["version"] == VERSION
                and isinstance(plan["kind"], str)
                and isinstance(plan["key"], str)
                and isinstance(plan["settings"], dict)
                and len(bounds) >= 2
                and all(type(bound) is int for bound in bounds)
                and bounds[0] == 0
                and all(first <= last for first, last in pairwise(bounds))
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError("no plan of shards that can be read", where=where, got=str(error)[:200]) from error
        if not sound:
            raise ArtifactError("a damaged plan of shards", where=where, fix="delete the folder and start again")
        return cls(root, plan["kind"], plan["key"], bounds, plan["settings"])

    @property
    def num_shards(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_rows(self) -> int:
        return self.bounds[-1]

    @property
    def shard_kind(self) -> str:
        """Kind of a shard's folder; a shard of tokens is a token cache."""
        return "tokens" if self.kind == "tokens" else f"{self.kind}-shard"

    def rows(self, number: int) -> tuple[int, int]:
        """First row of a shard (from 0), and the first behind it."""
        return self.bounds[number], self.bounds[number + 1]

    def name(self, number: int) -> str:
        """A shard as people see it: "shard 4 of 8 (rows 3,000 to 3,999)"."""
        first, last = self.rows(number)
        rows = f"rows {first:,} to {last - 1:,}" if last > first else "no rows"
        return f"shard {number + 1} of {self.num_shards} ({rows})"

    def path(self, number: int) -> Path:
        """Where a shard lies."""
        return self.folder / f"{number:05d}-of-{self.num_shards:05d}"

    def stamp(self, number: int) -> dict[str, Any]:
        """What a shard's manifest carries as `meta["work"]`."""
        return {"key": self.key, "rows": list(self.rows(number))}

    def is_whole(self, number: int, verify: bool = True) -> bool:
        """Whether a shard is there, undamaged, and of this work."""
        try:
            meta = read_manifest(self.path(number), self.shard_kind, _ANY_VERSION, verify)["meta"]
        except (ArtifactError, OSError):
            return False
        return meta.get("work") == self.stamp(number)

    def missing(self, verify: bool = True) -> list[int]:
        """Shards that are still to be written, in order."""
        return [number for number in range(self.num_shards) if not self.is_whole(number, verify)]

    @contextlib.contextmanager
    def write(self, number: int) -> Iterator[Folder]:
        """Writes a shard as a whole; see `storage.write_folder`."""
        with write_folder(self.path(number), self.shard_kind, VERSION, {"work": self.stamp(number)}) as out:
            yield out

    def check_whole(self) -> None:
        """Before shards are merged.

        Raises:
            ArtifactError: naming those that are missing or damaged.
        """
        missing = self.missing()
        if missing:
            named = ", ".join(self.name(number) for number in missing[:3])
            raise ArtifactError(
                f"{len(missing)} of {self.num_shards} shards are missing or damaged",
                where=str(self.folder),
                got=named,
                fix="run the same command again: it writes those only",
            )

    def remove(self) -> None:
        """Removes plan and shards: their result is written."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def alone(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Holds the lock of a work's folder, from before its plan is written until its shards are merged.

    The system lets go of it when its holder dies: there is nothing to remove.

    Raises:
        ArtifactError: another process is at this work, or the folder cannot be made.
    """
    from filelock import FileLock, Timeout

    root = Path(os.path.abspath(folder))
    lock = FileLock(root / ".lock")
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        fix = "wait for it, or end it"
        raise ArtifactError("another process is at this work", where=str(root), fix=fix) from error
    except OSError as error:
        raise ArtifactError("it cannot be written", where=str(root), got=error.strerror) from error
    try:
        yield
    finally:
        lock.release()
        if not (root / PLAN).exists():  # nothing was begun, or all is done
            with contextlib.suppress(OSError):
                (root / ".lock").unlink(missing_ok=True)
                root.rmdir()


def cuts(num_rows: int, shards: int, multiple: int = 1) -> tuple[int, ...]:
    """Bounds of nearly equal contiguous shards that begin at multiples of a batch; never more shards than batches."""
    batches = -(-num_rows // multiple)
    shards = max(1, min(shards, batches))
    return tuple(min(num_rows, batches * number // shards * multiple) for number in range(shards + 1))


def join_arrays(parts: Sequence[Path], out: Path, *, ndim: int, shifted: bool = False) -> int:
    """Arrays of shards one after the other in one `.npy`, streamed: the bytes that `numpy.save` writes of the whole.

    Args:
        parts: `.npy` files of one dtype, [n, ...].
        ndim: their number of dimensions.
        shifted: they are offsets [n + 1], each part's from 0: joined to offsets of the whole.

    Returns:
        rows of the result (its length on the first axis).

    Raises:
        ArtifactError: a part of another dtype or shape.
    """
    arrays = [load_array(part, ndim=ndim) for part in parts]
    kinds = {(array.dtype, array.shape[1:]) for array in arrays}
    if len(kinds) != 1:
        raise ArtifactError("shards that do not fit together", where=str(parts[0].parent.parent), got=str(kinds)[:200])
    (dtype, width) = kinds.pop()
    num_rows = sum(len(array) for array in arrays) - (len(arrays) - 1 if shifted else 0)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (num_rows, *width)}
    step = max(1, _COPY_BYTES // max(1, dtype.itemsize * int(np.prod(width, dtype=np.int64))))
    base = dtype.type(0)
    with open(out, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for place, array in enumerate(arrays):
            for start in range(1 if shifted and place else 0, len(array), step):
                block = array[start : start + step]
                file.write((block + base if shifted else block).tobytes())
            if shifted:
                base = base + array[-1]
    return num_rows
