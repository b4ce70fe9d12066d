"""Checkpoints of a training run: all state that its further steps depend on, written atomically.

Layout of a run's folder:

- `checkpoints/step-0000000120/`: `dense.safetensors`; `rows-00000.safetensors`, one file for each
  rank with tensors `<table>/<name>` and the ranges of rows in its metadata; `state.json`;
  `manifest.json`;
- `checkpoints/latest`: name of the newest checkpoint, for humans;
- `refresh/epoch-00004/`: clusters and hard negatives of a round. A checkpoint inside the round
  contains the sha256 of its manifest, and is incomplete without it.

Steps of a save: write the files to a temporary folder, fsync, write the manifest, fsync, rename,
fsync the parent, read back, update `latest`, remove all but the newest two complete checkpoints.
Readers take the newest complete checkpoint."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from unidec.data.storage import (
    MANIFEST,
    Folder,
    NewerFormatError,
    file_sha256,
    read_json,
    read_manifest,
    text_sha256,
    write_bytes_atomic,
    write_folder,
)
from unidec.data.temporary import remove_folder, remove_stale
from unidec.data.tensor_file import TensorFile, num_bytes, open_tensors, read_tensors, write_tensors
from unidec.errors import ArtifactError
from unidec.training import round_refresh
from unidec.training.distributed import ALONE, Ranks

KIND = "checkpoint"
VERSION = 2
KEPT = 2  # complete checkpoints of a run
Loaded = TypeVar("Loaded")
RowRanges = Mapping[str, tuple[int, int]]  # table name -> (begin, end)


@dataclass(frozen=True)
class RowPart:
    """Rows [first_row, first_row + n) of a table that has `num_rows` rows over all ranks; tensors:
    "weight" and the optimiser's state (such as "first" and "second"), each [n, ...].
    """

    first_row: int
    num_rows: int
    tensors: dict[str, Tensor]

    @property
    def held(self) -> int:
        """n, the number of rows in the tensors."""
        return next(iter(self.tensors.values())).shape[0]


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint.

    Attributes:
        state: JSON: epoch, epoch_step, step, seconds, work_seconds, refresh (sha256 of a manifest,
            or None), identity.
        dense: "model.<name>" (all but the tables' weights), "adamw.<i>.<key>", "random.cpu",
            "random.cuda".
        rows: table name -> its rows on this rank; a table that every rank holds completely is
            written once.
    """

    state: dict[str, Any]
    dense: dict[str, Tensor]
    rows: dict[str, RowPart]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors of all ranks."""
        total = num_bytes(self.dense)
        for part in self.rows.values():
            total += num_bytes(part.tensors) * part.num_rows // max(1, part.held)
        return total


class CheckpointWriter:
    """Writes a run's checkpoints; several ranks write together to a shared file system.

    Attributes:
        seconds: total time of all saves.
    """

    def __init__(self, run_dir: Path, ranks: Ranks = ALONE):
        self.run_dir = run_dir
        self.root = run_dir / "checkpoints"
        self.ranks = ranks
        self.seconds = 0.0
        self._last: Path | None = None

    def save(self, checkpoint: Checkpoint) -> Path:
        """Save a checkpoint and return its folder. When this returns, the files are durable and
        have been read back.

        Raises:
            ArtifactError: the checkpoint cannot be written; earlier ones are unchanged.
        """
        begin = time.perf_counter()
        ranks = self.ranks
        path = self.root / f"step-{checkpoint.state['step']:010d}"
        with self._folder(path, checkpoint.num_bytes) as out:
            ranks.barrier()  # until the first rank has created the folder
            written = _write_rows(out.path, checkpoint, ranks.rank)
            hashes = ranks.gather_array(np.array(list(written.values())))
            for rank, digest in enumerate(hashes):
                out.hashes[_rows_name(rank)] = str(digest)
            if ranks.is_first:
                written |= write_dense(out.path, checkpoint)
                out.hashes |= written
        ranks.barrier()  # until the first rank has renamed the folder
        self._read_back(path, written)
        ranks.barrier()
        if ranks.is_first:
            self._publish(path)
        self._last = path
        self.seconds += time.perf_counter() - begin
        return path

    def _folder(self, path: Path, size: int) -> contextlib.AbstractContextManager[Folder]:
        """The folder in which all ranks write; the first rank creates and finishes it."""
        beside = None if self.ranks.alone else f".{path.name}.ranks.tmp"
        if not self.ranks.is_first:
            return contextlib.nullcontext(Folder(self.root / str(beside)))
        remove_stale(self.root)
        for interrupted in self.root.glob(".*.ranks.tmp"):
            shutil.rmtree(interrupted, ignore_errors=True)
        return write_folder(path, KIND, VERSION, num_bytes=size, beside=beside)

    def _read_back(self, path: Path, written: Mapping[str, str]) -> None:
        """Check that this rank's files have the hashes, by name, of the data in memory."""
        try:
            for name, digest in written.items():
                if file_sha256(path / name) != digest:
                    raise ArtifactError(
                        "damaged file: the disk does not return the bytes that were written",
                        where=path / name,
                        fix="check the disk",
                    )
            if self.ranks.is_first:
                read_manifest(path, KIND, VERSION, verify=False)
        except ArtifactError:
            if self.ranks.is_first:
                shutil.rmtree(path, ignore_errors=True)
            raise

    def _publish(self, path: Path) -> None:
        """Update `latest`, and remove all checkpoints but this one and the newest complete one
        before it.
        """
        write_bytes_atomic(self.root / "latest", path.name.encode())
        num_kept = 1
        for other in checkpoint_folders(self.run_dir):
            # checkpoints of later steps were discarded by a resume
            if num_kept < KEPT and other.name < path.name and self._is_whole(other):
                num_kept += 1
            elif other != path:
                with contextlib.suppress(OSError):
                    remove_folder(other)

    def _is_whole(self, path: Path) -> bool:
        """Whether a checkpoint is complete; this writer's last one has been read back."""
        if path == self._last:
            return True
        try:
            read_state(self.run_dir, path)
        except ArtifactError:
            return False
        return True


def load_checkpoint(
    run_dir: Path,
    row_ranges: RowRanges | None = None,
    check: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint (None if the run has no checkpoints), and why newer ones were
    rejected.

    Args:
        row_ranges: rows to read of each table, from files of any number of ranks; other tables are
            read completely.
        check: called with the state before any tensor is read; raises an error to reject it.

    Raises:
        ArtifactError: there are checkpoints but none is complete, or the newest has a newer format
            version.
    """

    def load(path: Path) -> Checkpoint:
        state = read_state(run_dir, path)
        if check is not None:
            check(state)
        return _load(path, state, row_ranges or {})

    return _newest(run_dir, load)


def newest_state(run_dir: Path) -> tuple[Path | None, dict[str, Any], list[str]]:
    """Folder and state of the checkpoint that `load_checkpoint` would load, and why newer ones were
    rejected, without reading tensors; (None, {}, []) if the run has no checkpoints. Raises the same
    errors.
    """
    newest, rejected = _newest(run_dir, lambda path: (path, read_state(run_dir, path)))
    return (*(newest or (None, {})), rejected)


def _newest(run_dir: Path, read: Callable[[Path], Loaded]) -> tuple[Loaded | None, list[str]]:
    """The result of `read` for the newest checkpoint for which it raises no ArtifactError, and the
    errors of newer ones.
    """
    rejected: list[str] = []
    for path in checkpoint_folders(run_dir):
        try:
            return read(path), rejected
        except NewerFormatError:
            raise  # resuming from an older checkpoint would remove this one
        except ArtifactError as error:
            rejected.append(str(error))
    if rejected:
        raise ArtifactError(
            "no checkpoint of this run is complete",
            where=run_dir / "checkpoints",
            got="; ".join(rejected),
            fix="delete the run's folder to train from the start",
        )
    return None, rejected


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """Folders of checkpoints, newest first."""
    return sorted((run_dir / "checkpoints").glob("step-*"), reverse=True)


def read_state(run_dir: Path, path: Path, verify: bool = True) -> dict[str, Any]:
    """`Checkpoint.state` of a checkpoint's folder.

    Args:
        verify: check all hashes, including those of the refresh that the checkpoint needs;
            otherwise only names and sizes.

    Raises:
        ArtifactError: the checkpoint is incomplete or damaged.
        NewerFormatError: it was written by a newer version.
    """
    read_manifest(path, KIND, VERSION, verify)
    try:
        state = read_json(path / "state.json")
        counters = {key: int(state[key]) for key in ("epoch", "step")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(
            "invalid state of a checkpoint",
            where=path / "state.json",
            got=repr(error),
            fix="delete the checkpoint: the one before it is used",
        ) from error
    refresh_sha256 = state.get("refresh")
    if verify and refresh_sha256 is not None and not _has_refresh(run_dir, refresh_sha256):
        raise ArtifactError(
            "the refresh of the checkpoint's round is missing or damaged",
            where=path,
            expected=f"{run_dir / 'refresh'} with sha256 {refresh_sha256}",
        )
    return state | counters


def _has_refresh(run_dir: Path, sha256: str) -> bool:
    for manifest in (run_dir / "refresh").glob(f"epoch-*/{MANIFEST}"):
        with contextlib.suppress(ArtifactError):
            if file_sha256(manifest) == sha256:
                read_manifest(manifest.parent, round_refresh.KIND, round_refresh.VERSION)
                return True
    return False


def _rows_name(rank: int) -> str:
    return f"rows-{rank:05d}.safetensors"


def write_dense(folder: Path, checkpoint: Checkpoint) -> dict[str, str]:
    """Write the dense tensors and the state, and return the files' hashes by name."""
    state = json.dumps(checkpoint.state, sort_keys=True) + "\n"
    (folder / "state.json").write_text(state, encoding="utf-8")
    return {
        "dense.safetensors": write_tensors(folder / "dense.safetensors", checkpoint.dense),
        "state.json": text_sha256(state),
    }


def _write_rows(folder: Path, checkpoint: Checkpoint, rank: int) -> dict[str, str]:
    """Write a rank's rows, and return the file's hash by name. A table that every rank holds
    completely is written by the first rank only.
    """
    tensors = {}
    ranges = {}
    for table, part in checkpoint.rows.items():
        # a table of one row cannot be distinguished from a complete one; writing it twice does no
        # harm
        if rank == 0 or part.held < part.num_rows or part.held == 1:
            ranges[table] = [part.first_row, part.held, part.num_rows]
            for name, tensor in part.tensors.items():
                tensors[f"{table}/{name}"] = tensor
    file = _rows_name(rank)
    metadata = {"ranges": json.dumps(ranges, sort_keys=True)}
    return {file: write_tensors(folder / file, tensors, metadata)}


class _Held(NamedTuple):
    """Rows [first, first + num) of a table of `total` rows, and the file that holds them."""

    first: int
    num: int
    total: int
    file: TensorFile


def _load(path: Path, state: dict[str, Any], row_ranges: RowRanges) -> Checkpoint:
    with contextlib.ExitStack() as stack:
        held: dict[str, list[_Held]] = {}
        for rows_file in sorted(path.glob("rows-*.safetensors")):
            file = stack.enter_context(open_tensors(rows_file))
            ranges = json.loads(file.metadata["ranges"])
            for table, (first, num, total) in ranges.items():
                held.setdefault(table, []).append(_Held(first, num, total, file))
        rows = {}
        for table, parts in held.items():
            parts.sort(key=itemgetter(0, 1))
            total = parts[0].total
            begin, end = row_ranges.get(table, (0, total))
            prefix = f"{table}/"
            tensors = {}
            for name in parts[0].file.names:
                if name.startswith(prefix):
                    tensor = _read_rows(path, name, parts, begin, end)
                    tensors[name.removeprefix(prefix)] = tensor
            rows[table] = RowPart(begin, total, tensors)
        return Checkpoint(state, read_tensors(path / "dense.safetensors"), rows)


def _read_rows(path: Path, name: str, parts: list[_Held], begin: int, end: int) -> Tensor:
    """Rows [begin, end) of one tensor from the files that hold them."""
    if begin == end:
        return parts[0].file.read(name, 0, 0)
    pieces = []
    position = begin
    for part in parts:
        until = min(part.first + part.num, end)
        if part.first <= position < until:
            pieces.append(part.file.read(name, position - part.first, until - part.first))
            position = until
    if position != end:
        raise ArtifactError(
            "rows are missing",
            where=path,
            got=f"{name} up to row {position}",
            expected=f"up to row {end}",
        )
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
