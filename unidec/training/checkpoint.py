"""Checkpoints of a training run: everything that decides its future, whole or absent.

Layout of a run's folder: `checkpoints/step-0000000120/` with `dense.safetensors`, `rows-00000.safetensors` (a file a
rank: `<table>/<name>`, the ranges of rows in the file's metadata), `state.json`, `manifest.json`; `checkpoints/latest`
(a name, for people); `refresh/epoch-00004/` (clusters and hard negatives of a round; a checkpoint inside the round
names its sha256, and is not whole without it).

A save goes: temporary folder beside, files, fsync, manifest, fsync, rename, fsync of the parent, read back, `latest`,
and then all but the newest two that are whole are removed. Readers take the newest that is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from unidec.data.storage import (
    MANIFEST,
    Folder,
    NewerFormatError,
    file_sha256,
    read_manifest,
    remove_folder,
    remove_stale,
    write_bytes_atomic,
    write_folder,
)
from unidec.data.tensor_file import TensorFile, num_bytes, open_tensors, read_tensors, write_tensors
from unidec.errors import ArtifactError
from unidec.training import refresh
from unidec.training.distributed import ALONE, Ranks

KIND, VERSION = "checkpoint", 2
KEPT = 2
Found = TypeVar("Found")
RowRanges = Mapping[str, tuple[int, int]]  # of a table: begin, end


@dataclass(frozen=True)
class RowPart:
    """Rows [first_row, first_row + n) of a table that has `num_rows` over all ranks: "weight" and what the optimiser
    keeps ("first", "second" | "sum" | nothing), each [n, ...]."""

    first_row: int
    num_rows: int
    tensors: dict[str, Tensor]

    @property
    def held(self) -> int:
        """n."""
        return next(iter(self.tensors.values())).shape[0]


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        state: JSON: epoch, epoch_step, step, seconds, refresh (sha256 of a manifest, or None), identity, notes.
        dense: "model.<name>" (all but the tables' weights), "adamw.<i>.<key>", "random.cpu", "random.cuda".
        rows: a table's name -> its rows on this rank; a table that all ranks hold whole is written once.
    """

    state: dict[str, Any]
    dense: dict[str, Tensor]
    rows: dict[str, RowPart]

    @property
    def num_bytes(self) -> int:
        """Of the tensors of all ranks."""
        rows = (num_bytes(part.tensors) * part.num_rows // max(1, part.held) for part in self.rows.values())
        return num_bytes(self.dense) + sum(rows)


class CheckpointWriter:
    """Writes a run's checkpoints; several ranks do it together, on a file system that all of them see.

    Attributes:
        seconds: how long callers were held up, in all.
    """

    def __init__(self, run_dir: Path, ranks: Ranks = ALONE):
        self.run_dir, self.root, self.ranks = run_dir, run_dir / "checkpoints", ranks
        self.seconds = 0.0
        self._last: Path | None = None

    def save(self, checkpoint: Checkpoint) -> Path:
        """Save a checkpoint: its folder, durable and read back when this returns.

        Raises:
            ArtifactError: it cannot be written; those on the disk are untouched.
        """
        begun, ranks = time.perf_counter(), self.ranks
        path = self.root / f"step-{checkpoint.state['step']:010d}"
        beside = None if ranks.alone else f".{path.name}.ranks.tmp"
        folder: contextlib.AbstractContextManager[Folder] = contextlib.nullcontext(Folder(self.root / str(beside)))
        if ranks.is_first:
            remove_stale(self.root)
            for left in self.root.glob(".*.ranks.tmp"):
                shutil.rmtree(left, ignore_errors=True)
            folder = write_folder(path, KIND, VERSION, num_bytes=checkpoint.num_bytes, beside=beside)
        with folder as out:
            ranks.barrier()  # the folder is there
            written = _write_rows(out.path, checkpoint, ranks.rank)
            hashes = ranks.gather_array(np.array(list(written.values())))
            out.hashes |= {_rows_name(rank): str(digest) for rank, digest in enumerate(hashes)}
            if ranks.is_first:
                written |= _write_dense(out.path, checkpoint)
                out.hashes |= written
        ranks.barrier()  # it has its name; each rank reads back what it wrote
        self._read_back(path, written)
        ranks.barrier()
        if ranks.is_first:
            self._publish(path)
        self._last = path
        self.seconds += time.perf_counter() - begun
        return path

    def _read_back(self, path: Path, written: Mapping[str, str]) -> None:
        try:  # the hashes are those of the memory: what the disk gives back must have the same
            for name, digest in written.items():
                if file_sha256(path / name) != digest:
                    what = "a damaged file: the disk gives back other bytes than were written"
                    raise ArtifactError(what, where=str(path / name))
            if self.ranks.is_first:
                read_manifest(path, KIND, VERSION, verify=False)
        except ArtifactError:
            if self.ranks.is_first:
                shutil.rmtree(path, ignore_errors=True)
            raise

    def _publish(self, path: Path) -> None:
        """Move `latest`, and of the checkpoints before keep the first that is whole."""
        write_bytes_atomic(self.root / "latest", path.name.encode())
        kept = 1
        for other in checkpoint_folders(self.run_dir):
            # later ones belong to a past cut off
            if kept < KEPT and other.name < path.name and (other == self._last or _is_whole(self.run_dir, other)):
                kept += 1
            elif other != path:
                with contextlib.suppress(OSError):
                    remove_folder(other)


def load_checkpoint(
    run_dir: Path, row_ranges: RowRanges | None = None, check: Callable[[dict[str, Any]], None] | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with newer ones; None where there is none at all.

    Args:
        row_ranges: these rows only, from files of any number of ranks; other tables whole.
        check: called with the state before any tensor is read, to refuse it by an error.

    Raises:
        ArtifactError: there are checkpoints and none is whole, or the newest is of a version not known yet.
    """

    def load(path: Path) -> Checkpoint:
        state = read_state(run_dir, path)
        if check is not None:
            check(state)
        return _load(path, state, row_ranges or {})

    return _newest(run_dir, load)


def newest_state(run_dir: Path) -> tuple[Path | None, dict[str, Any], list[str]]:
    """Folder and state of the checkpoint that `load_checkpoint` would load, and what was wrong with newer ones; raises
    as it does, and reads no tensor. (None, {}, []) where there is none at all."""
    found, refused = _newest(run_dir, lambda path: (path, read_state(run_dir, path)))
    return (*(found or (None, {})), refused)


def _newest(run_dir: Path, read: Callable[[Path], Found]) -> tuple[Found | None, list[str]]:
    refused: list[str] = []
    for path in checkpoint_folders(run_dir):
        try:
            return read(path), refused
        except NewerFormatError:
            raise  # an older one would lose what was learnt since, and remove it
        except ArtifactError as error:
            refused.append(str(error))
    if refused:
        raise ArtifactError(
            "no checkpoint of this run is whole", where=str(run_dir / "checkpoints"), got="; ".join(refused),
            fix="delete the run's folder to train from the start",
        )  # fmt: skip
    return None, refused


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """Folders of checkpoints, newest first."""
    return sorted((run_dir / "checkpoints").glob("step-*"), reverse=True)


def read_state(run_dir: Path, path: Path, verify: bool = True) -> dict[str, Any]:
    """`Checkpoint.state` of one checkpoint; `verify` checks all hashes, and those of the refresh it needs, else names
    and sizes only. Raises ArtifactError: it is not whole; NewerFormatError: its version is not known yet."""
    read_manifest(path, KIND, VERSION, verify)
    try:
        state = json.loads((path / "state.json").read_bytes())
        known = {key: int(state[key]) for key in ("epoch", "step")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError("not the state of a checkpoint", where=str(path / "state.json"), got=repr(error)) from error
    made = state.get("refresh")
    if verify and made is not None and not _has_refresh(run_dir, made):
        what = "the checkpoint lies within a round whose refresh is missing or damaged"
        raise ArtifactError(what, where=str(path), expected=f"{run_dir / 'refresh'} with sha256 {made}")
    return state | known


def _has_refresh(run_dir: Path, sha256: str) -> bool:
    for manifest in (run_dir / "refresh").glob(f"epoch-*/{MANIFEST}"):
        with contextlib.suppress(ArtifactError):
            if file_sha256(manifest) == sha256 and read_manifest(manifest.parent, refresh.KIND, refresh.VERSION):
                return True
    return False


def _is_whole(run_dir: Path, path: Path) -> bool:
    try:
        read_state(run_dir, path)
    except ArtifactError:
        return False
    return True


def _rows_name(rank: int) -> str:
    return f"rows-{rank:05d}.safetensors"


def _write_dense(folder: Path, checkpoint: Checkpoint) -> dict[str, str]:
    """The files' hashes by name."""
    state = (json.dumps(checkpoint.state, sort_keys=True) + "\n").encode()
    (folder / "state.json").write_bytes(state)
    return {
        "dense.safetensors": write_tensors(folder / "dense.safetensors", checkpoint.dense),
        "state.json": hashlib.sha256(state).hexdigest(),
    }


def _write_rows(folder: Path, checkpoint: Checkpoint, rank: int) -> dict[str, str]:
    """Write a rank's rows; a table that every rank holds whole is left to the first."""
    # of a table of one row one rank has all: written twice it does no harm
    parts = {t: part for t, part in checkpoint.rows.items() if rank == 0 or part.held < part.num_rows or part.held == 1}
    tensors = {f"{table}/{name}": x for table, part in parts.items() for name, x in part.tensors.items()}
    ranges = {table: [part.first_row, part.held, part.num_rows] for table, part in parts.items()}
    name = _rows_name(rank)
    return {name: write_tensors(folder / name, tensors, {"ranges": json.dumps(ranges, sort_keys=True)})}


def _load(path: Path, state: dict[str, Any], row_ranges: RowRanges) -> Checkpoint:
    with contextlib.ExitStack() as stack:
        held: dict[str, list[tuple[int, int, int, TensorFile]]] = {}  # table -> (first row, rows, rows in all, file)
        for name in sorted(path.glob("rows-*.safetensors")):
            file = stack.enter_context(open_tensors(name))
            for table, (first, count, total) in json.loads(file.metadata["ranges"]).items():
                held.setdefault(table, []).append((first, count, total, file))
        rows = {}
        for table, parts in held.items():
            total = parts[0][2]
            begin, end = row_ranges.get(table, (0, total))
            names = sorted({n.partition("/")[2] for p in parts for n in p[3].names if n.startswith(f"{table}/")})
            tensors = {name: _read_rows(path, f"{table}/{name}", parts, begin, end) for name in names}
            rows[table] = RowPart(begin, total, tensors)
        return Checkpoint(state, read_tensors(path / "dense.safetensors"), rows)


def _read_rows(path: Path, name: str, parts: list[tuple[int, int, int, TensorFile]], begin: int, end: int) -> Tensor:
    """Rows [begin, end) of one tensor from the files that hold them."""
    pieces, at = [], begin
    for first, count, _, file in sorted(parts, key=lambda part: part[:2]):
        if first <= at < min(first + count, end):
            until = min(first + count, end)
            whole = (at, until) == (first, first + count)
            pieces.append(file.read(name) if whole else file.read(name, at - first, until - first))
            at = until
    if begin == end:
        return parts[0][3].read(name, 0, 0)
    if at != end:
        raise ArtifactError("rows are missing", where=str(path), got=f"{name} up to row {at}", expected=f"row {end}")
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
