"""Work on many rows, cut into shards: each is a folder that is complete or absent, so that a killed run resumes with
the missing ones, and any process that sees the folder can write one.

    <folder>/plan.json           what is computed, from which input, and where it is cut (`Work`)
    <folder>/00003-of-00008/     one shard, with a manifest (sizes, sha256) that has the plan's key

The key is a hash of the input and all settings: a shard with another key is not used. Merged shards have the bytes of
the same work in one piece, because shards begin where its batches begin.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unidec.data.storage import Folder, read_manifest, write_folder, write_json
from unidec.errors import ArtifactError, ConfigError
from unidec.version import __version__

PLAN = "plan.json"
VERSION = 1  # of plans and shards
MAX_PLAN_BYTES = 64 << 20
MAX_SHARDS = 99_999
_OURS = re.compile(r"\..*|plan\.json|texts|\d{5}-of-\d{5}")
_ANY_VERSION = 1 << 30  # shards of other versions have another key


@dataclass(frozen=True)
class Work:
    """A plan: what is computed, and where it is cut.

    Attributes:
        folder: of the plan and the shards, absolute.
        kind: "predictions" or "vectors".
        key: sha256 over the input's hash and all settings.
        bounds: shard i has the rows bounds[i] to bounds[i + 1] - 1.
        settings: what a worker needs, JSON: absolute paths and plain values.
    """

    folder: Path
    kind: str
    key: str
    bounds: tuple[int, ...]
    settings: Mapping[str, Any]

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
        """Write the plan; a plan with the same key keeps its cuts and shards, shards of any other are removed.

        Args:
            facts: what decides the result: hashes and settings, JSON, no paths. They make the key.
            shards: how many; None: those of a plan with the same key, else one for each `rows_a_shard`.
            multiple: shards begin at multiples of it: where the work in one piece begins a batch.

        Raises:
            ConfigError: `shards` out of range.
            ArtifactError: the folder has other files, or cannot be written.
        """
        root = Path(os.path.abspath(folder))
        if shards is not None and not 1 <= shards <= MAX_SHARDS:
            raise ConfigError("out of range", where="shards", got=shards, expected=f"1 to {MAX_SHARDS}")
        foreign = sorted(path.name for path in root.glob("*") if not _OURS.fullmatch(path.name))
        if foreign:
            raise ArtifactError("a folder of something else", where=str(root), got=foreign[0], fix="move it away")
        text = json.dumps([kind, VERSION, __version__, facts, num_rows], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        count = shards or -(-num_rows // rows_a_shard)
        work = cls(root, kind, key, cuts(num_rows, min(max(count, 1), MAX_SHARDS), multiple), dict(settings))
        before = None
        with contextlib.suppress(ArtifactError):
            before = cls.open(root)
        if before is not None and before.key == key and (shards is None or before.bounds == work.bounds):
            work = cls(root, kind, key, before.bounds, work.settings)
        else:
            for old in root.glob("*-of-*"):
                shutil.rmtree(old, ignore_errors=True)
        plan = asdict(work) | {"version": VERSION}
        del plan["folder"]
        write_json(root / PLAN, plan)
        return work

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Work:
        """The work whose plan is in a folder.

        Raises:
            ArtifactError: no plan, a damaged one, or one of another version.
        """
        root = Path(os.path.abspath(folder))
        try:
            if (root / PLAN).stat().st_size > MAX_PLAN_BYTES:
                raise ValueError("a plan of impossible size")
            plan = json.loads((root / PLAN).read_bytes())
            work = cls(root, plan["kind"], plan["key"], tuple(plan["bounds"]), dict(plan["settings"]))
            bounds = work.bounds
            if plan["version"] != VERSION or len(bounds) < 2 or bounds[0] != 0 or list(bounds) != sorted(bounds):
                raise ValueError(f"version {plan['version']}, bounds {bounds[:3]}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            fix = "run the command that wrote it again"
            raise ArtifactError(
                "no readable plan of shards", where=str(root / PLAN), got=str(error)[:200], fix=fix
            ) from error
        return work

    @property
    def num_shards(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_rows(self) -> int:
        return self.bounds[-1]

    def rows(self, number: int) -> tuple[int, int]:
        """First row of a shard (from 0), and the first behind it."""
        return self.bounds[number], self.bounds[number + 1]

    def size(self, number: int) -> int:
        return self.bounds[number + 1] - self.bounds[number]

    def name(self, number: int) -> str:
        """A shard as people see it: "shard 4 of 8 (rows 3,000 to 3,999)"."""
        first, last = self.rows(number)
        rows = f"rows {first:,} to {last - 1:,}" if last > first else "no rows"
        return f"shard {number + 1} of {self.num_shards} ({rows})"

    def path(self, number: int) -> Path:
        """A shard's folder."""
        return self.folder / f"{number:05d}-of-{self.num_shards:05d}"

    def _stamp(self, number: int) -> dict[str, Any]:
        return {"key": self.key, "rows": list(self.rows(number))}

    def is_whole(self, number: int) -> bool:
        """Whether a shard is there, undamaged (every hash is checked), and of this work."""
        try:
            meta = read_manifest(self.path(number), f"{self.kind}-shard", _ANY_VERSION)["meta"]
        except (ArtifactError, OSError):
            return False
        return meta.get("work") == self._stamp(number)

    def missing(self) -> list[int]:
        """Shards that are still to be written, in order."""
        return [number for number in range(self.num_shards) if not self.is_whole(number)]

    @contextlib.contextmanager
    def write(self, number: int) -> Iterator[Folder]:
        """Write a shard as a whole; see `storage.write_folder`."""
        with write_folder(self.path(number), f"{self.kind}-shard", VERSION, {"work": self._stamp(number)}) as out:
            yield out

    def whole_shards(self) -> list[Path]:
        """All shards' folders, to be merged.

        Raises:
            ArtifactError: naming those that are missing or damaged.
        """
        missing = self.missing()
        if missing:
            raise ArtifactError(
                f"{len(missing)} of {self.num_shards} shards are missing or damaged", where=str(self.folder),
                got=", ".join(self.name(number) for number in missing[:3]),
                fix="run the same command again: it writes only those",
            )  # fmt: skip
        return [self.path(number) for number in range(self.num_shards)]

    def remove(self) -> None:
        """Remove plan and shards: their result is written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def shards_folder(output: str | os.PathLike[str]) -> Path:
    """The folder of an output's plan and shards until they are merged: `<output>.shards`."""
    path = Path(os.path.abspath(output))
    return path.with_name(f"{path.name}.shards")


@contextlib.contextmanager
def alone(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of a work's folder, from before its plan is written until its shards are merged; the system
    releases it when its holder dies.

    Raises:
        ArtifactError: another process holds it, or the folder cannot be made.
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
