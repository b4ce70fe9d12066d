"""Checkpoints of a training run: everything that decides its future, whole or absent.

Layout of a run's folder: `checkpoints/step-0000000120/` with `dense.safetensors`, `rows-00000.safetensors` (a file a
rank: `<table>/<name>`, the ranges of rows in the file's metadata), `state.json`, `manifest.json`; `checkpoints/latest`
(a name, for people); `refresh/epoch-00004/` (clusters and hard negatives of a round; a checkpoint inside the round
names its sha256, and is not whole without it).

A save goes: temporary folder beside, files, fsync, manifest, fsync, rename, fsync of the parent, read back, `latest`,
and then all but the newest two that are whole are removed. Readers take the newest that is whole, whatever `latest`
says: a process killed before it moved `latest` has lost nothing.

Versions: 1 (`epoch-00005/`: model, optimisers, state; at the end of a round only) is still read; 2 is written.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unidec.data.storage import (
    MANIFEST,
    NewerFormatError,
    file_sha256,
    read_manifest,
    remove_folder,
    remove_stale,
    write_bytes_atomic,
    write_folder,
)
from unidec.data.tensor_file import num_bytes, open_tensors, read_tensors, write_tensors
from unidec.errors import ArtifactError
from unidec.machine import available_host
from unidec.training import refresh
from unidec.training.distributed import ALONE, Ranks

KIND, VERSION = "checkpoint", 2
KEPT = 2


@dataclass(frozen=True)
class RowPart:
    """Rows [first_row, first_row + n) of one table, with their optimiser's state.

    Attributes:
        first_row: number of the first.
        num_rows: of the whole table, over all ranks.
        tensors: "weight", and what the optimiser keeps ("first", "second" | "sum" | nothing); each [n, ...].
    """

    first_row: int
    num_rows: int
    tensors: dict[str, Tensor]

    @property
    def held(self) -> int:
        """n: how many rows are here."""
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
        """Of all tensors."""
        return num_bytes(self.dense) + sum(num_bytes(part.tensors) for part in self.rows.values())


class CheckpointWriter:
    """Writes a run's checkpoints, one after the other.

    Alone, `save` takes a copy of the tensors in host memory and a thread writes it, unless the copy would take more
    than half of the memory that is free; then, and with several ranks, `save` writes what it is given itself. An error
    of the thread is raised by the next `save` or `wait`.

    Attributes:
        seconds: how long callers were held up, in all.
        last_seconds: from the beginning of the last save until it was durable.
    """

    def __init__(self, run_dir: Path, ranks: Ranks = ALONE):
        self.root, self.ranks = run_dir / "checkpoints", ranks
        self.run_dir = run_dir
        self.seconds = self.last_seconds = 0.0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last: Path | None = None
        self._begun = 0.0
        self._whole: set[str] = set()  # names known to be whole: written and read back, or checked, by this process

    def save(self, checkpoint: Checkpoint) -> None:
        """Save a checkpoint; when this returns its tensors may change.

        Raises:
            ArtifactError: this one or the one before cannot be written; those on the disk are untouched.
        """
        with self._held_up():
            self._join()
            self._begun = time.perf_counter()
            if self.ranks.world > 1:
                self._write_together(checkpoint)
            elif 2 * checkpoint.num_bytes > available_host():
                self._write(checkpoint)
            else:
                # not a daemon: a process that ends by an error finishes what it had begun to save
                self._thread = threading.Thread(target=self._write_later, args=(_snapshot(checkpoint),))
                self._thread.start()

    def wait(self) -> Path | None:
        """Wait until the last checkpoint is durable.

        Returns:
            its folder; None: none was saved.

        Raises:
            ArtifactError: it could not be written.
        """
        with self._held_up():
            self._join()
        return self._last

    @property
    def busy(self) -> bool:
        """A checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    @contextlib.contextmanager
    def _held_up(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_later(self, checkpoint: Checkpoint) -> None:
        try:
            self._write(checkpoint)
        except BaseException as error:  # carried to the thread that trains
            self._error = error

    # -- one process ---------------------------------------------------------------------------------------------------

    def _write(self, checkpoint: Checkpoint) -> None:
        path = self.root / _name(checkpoint)
        remove_stale(self.root)
        with write_folder(path, KIND, VERSION, num_bytes=checkpoint.num_bytes) as out:
            out.hashes |= _write_dense(out.path, checkpoint) | _write_rows(out.path, checkpoint, 0)
        self._read_back(path, hashes=True)
        self._publish(path)

    def _read_back(self, path: Path, hashes: bool) -> None:
        """The hashes in the manifest are those of the memory: what the disk gives back must have the same."""
        try:
            read_manifest(path, KIND, VERSION, verify=hashes)
        except ArtifactError:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def _publish(self, path: Path) -> None:
        write_bytes_atomic(self.root / "latest", path.name.encode())
        self._last = path
        self.last_seconds = time.perf_counter() - self._begun
        self._whole.add(path.name)
        self._purge(path)

    def _purge(self, newest: Path) -> None:
        """Keep the newest and, of those before it, the first that is whole; later ones belong to a past cut off."""
        kept = 1
        for path in checkpoint_folders(self.run_dir):
            if path == newest:
                continue
            if kept < KEPT and path.name < newest.name and self._is_whole(path):
                kept += 1
            else:
                with contextlib.suppress(OSError):
                    remove_folder(path)

    def _is_whole(self, path: Path) -> bool:
        if path.name not in self._whole:
            try:
                _check(self.run_dir, path)
            except ArtifactError:
                return False
            self._whole.add(path.name)
        return True

    # -- several ranks, on a file system that all of them see ----------------------------------------------------------

    def _write_together(self, checkpoint: Checkpoint) -> None:
        ranks, path = self.ranks, self.root / _name(checkpoint)
        beside = f".{path.name}.ranks.tmp"
        if ranks.is_first:
            remove_stale(self.root)
            for left in self.root.glob(".*.ranks.tmp"):
                shutil.rmtree(left, ignore_errors=True)
            rows = (num_bytes(p.tensors) * p.num_rows // max(1, p.held) for p in checkpoint.rows.values())
            size = num_bytes(checkpoint.dense) + sum(rows)
            with write_folder(path, KIND, VERSION, num_bytes=size, beside=beside) as out:
                ranks.barrier()  # the folder is there
                written = _write_rows(out.path, checkpoint, 0)
                out.hashes |= _write_dense(out.path, checkpoint) | written
                ranks.barrier()  # all files are written
                for note in sorted(out.path.glob("*.sha256")):
                    out.hashes[note.stem] = note.read_text(encoding="ascii")
                    note.unlink()
        else:
            ranks.barrier()
            written = _write_rows(self.root / beside, checkpoint, ranks.rank)
            for name, digest in written.items():
                (self.root / beside / f"{name}.sha256").write_text(digest, encoding="ascii")
            ranks.barrier()
        ranks.barrier()  # it has its name; each rank reads back what it wrote
        for name, digest in written.items():
            if file_sha256(path / name) != digest:
                raise ArtifactError("the disk gives back other bytes than were written", where=str(path / name))
        ranks.barrier()
        if ranks.is_first:
            self._read_back(path, hashes=False)
            self._publish(path)
        self._last = path


def load_checkpoint(
    run_dir: Path,
    row_ranges: Mapping[str, tuple[int, int]] | None = None,
    check: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with newer ones; None where there is none at all.

    Args:
        run_dir: the run's folder.
        row_ranges: {table: (begin, end)}: these rows only, from files of any number of ranks; other tables whole.
        check: called with the state before any tensor is read; what it raises goes on.

    Raises:
        ArtifactError: there are checkpoints, and none is whole, or the newest is of a version not known yet.
    """
    refused: list[str] = []
    for path in checkpoint_folders(run_dir):
        try:
            version, state = _check(run_dir, path)
            if check is not None:
                check(state)
            return (_load_1(path, state, row_ranges) if version == 1 else _load_2(path, state, row_ranges)), refused
        except NewerFormatError:
            raise  # an older one would go on without what was learnt since, and remove it
        except ArtifactError as error:
            refused.append(str(error))
    if refused:
        raise ArtifactError(
            "no checkpoint of this run is whole",
            where=str(run_dir / "checkpoints"),
            got="; ".join(refused),
            fix="delete the run's folder to train from the start",
        )
    return None, refused


def newest_state(run_dir: Path) -> tuple[Path | None, dict[str, Any], list[str]]:
    """Folder and state of the checkpoint that `load_checkpoint` would load, and what was wrong with newer ones; no
    tensor is read. (None, {}, []) where there is none at all.

    Raises:
        ArtifactError: as `load_checkpoint`.
    """
    refused: list[str] = []
    for path in checkpoint_folders(run_dir):
        try:
            return path, read_state(run_dir, path), refused
        except NewerFormatError:
            raise
        except ArtifactError as error:
            refused.append(str(error))
    if refused:
        load_checkpoint(run_dir)  # says that none is whole
    return None, {}, refused


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """Folders of checkpoints, newest first: those of version 2 by step, then those of version 1, which came before."""
    root = run_dir / "checkpoints"
    return [path for pattern in ("step-*", "epoch-*") for path in sorted(root.glob(pattern), reverse=True)]


def read_state(run_dir: Path, path: Path, verify: bool = True) -> dict[str, Any]:
    """The state (`Checkpoint.state`) of one checkpoint; no tensor is read.

    Args:
        run_dir: the run's folder.
        path: the checkpoint's.
        verify: check all hashes, and those of the refresh it needs; else names and sizes only.

    Raises:
        ArtifactError: it is not whole; NewerFormatError: its version is not known yet.
    """
    return _check(run_dir, path, verify)[1]


def find_refresh(run_dir: Path, sha256: str) -> Path:
    """The folder of the refresh whose manifest has this hash.

    Raises:
        ArtifactError: there is none, or it is damaged.
    """
    for path in sorted((run_dir / "refresh").glob("epoch-*"), reverse=True):
        manifest = path / MANIFEST
        if manifest.is_file() and file_sha256(manifest) == sha256:
            read_manifest(path, refresh.KIND, refresh.VERSION)
            return path
    raise ArtifactError(
        "the refresh of its round is missing or damaged", where=str(run_dir / "refresh"), expected=f"sha256 {sha256}"
    )


def random_state(device: torch.device) -> dict[str, Tensor]:
    """States of torch's generators (dropout), as dense tensors of a checkpoint."""
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Continue the sequences that `random_state` saw."""
    torch.set_rng_state(tensors["random.cpu"].cpu())
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"].cpu(), device)


def _name(checkpoint: Checkpoint) -> str:
    return f"step-{checkpoint.state['step']:010d}"


def _snapshot(checkpoint: Checkpoint) -> Checkpoint:
    def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    state = json.loads(json.dumps(checkpoint.state))
    rows = {name: RowPart(p.first_row, p.num_rows, copies(p.tensors)) for name, p in checkpoint.rows.items()}
    return Checkpoint(state, copies(checkpoint.dense), rows)


def _write_dense(folder: Path, checkpoint: Checkpoint) -> dict[str, str]:
    """Write dense tensors and state; gives the tensors' file's hash by name."""
    state = json.dumps(checkpoint.state, sort_keys=True) + "\n"
    (folder / "state.json").write_text(state, encoding="utf-8")
    return {"dense.safetensors": write_tensors(folder / "dense.safetensors", checkpoint.dense)}


def _write_rows(folder: Path, checkpoint: Checkpoint, rank: int) -> dict[str, str]:
    """Write a rank's rows; a table that every rank holds whole is left to the first."""
    # of a table of one row one rank has all: written twice it does no harm
    parts = {t: part for t, part in checkpoint.rows.items() if rank == 0 or part.held < part.num_rows or part.held == 1}
    tensors = {f"{table}/{name}": x for table, part in parts.items() for name, x in part.tensors.items()}
    ranges = {table: [part.first_row, part.held, part.num_rows] for table, part in parts.items()}
    name = f"rows-{rank:05d}.safetensors"
    return {name: write_tensors(folder / name, tensors, {"ranges": json.dumps(ranges, sort_keys=True)})}


def _check(run_dir: Path, path: Path, verify: bool = True) -> tuple[int, dict[str, Any]]:
    """Version and state of a checkpoint that is whole, with the refresh it needs."""
    version = read_manifest(path, KIND, VERSION, verify)["version"]
    try:
        state = json.loads((path / "state.json").read_bytes())
        known = {key: int(state[key]) for key in ("epoch", "step")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError("not the state of a checkpoint", where=str(path / "state.json"), got=repr(error)) from error
    # what version 1 does not know
    state = {"epoch_step": 0, "refresh": None, "identity": {}, "notes": {}} | state
    if verify and state["refresh"] is not None:
        try:
            find_refresh(run_dir, str(state["refresh"]))
        except ArtifactError as error:
            raise ArtifactError("the checkpoint lies within a round", where=str(path), got=str(error)) from error
    return version, state | known


def _load_1(path: Path, state: dict[str, Any], row_ranges: Mapping[str, tuple[int, int]] | None) -> Checkpoint:
    """Version 1: `model.safetensors`, and `optimisers.safetensors` with `row.<table>.first` and `.second`."""
    model, optimisers = (read_tensors(path / f"{name}.safetensors") for name in ("model", "optimisers"))
    tables = [name[4:-6] for name in optimisers if name.startswith("row.") and name.endswith(".first")]
    rows = {}
    try:
        for table in tables:
            begin, end = (row_ranges or {}).get(table, (0, None))
            moments = {key: optimisers.pop(f"row.{table}.{key}") for key in ("first", "second")}
            whole = {"weight": model.pop(f"{table}.weight"), **moments}
            rows[table] = RowPart(begin, len(whole["weight"]), {key: x[begin:end] for key, x in whole.items()})
    except KeyError as error:
        raise ArtifactError("a tensor is missing", where=str(path), got=str(error)) from error
    dense = {f"model.{name}": tensor for name, tensor in model.items()} | optimisers
    return Checkpoint(state, dense, rows)


def _load_2(path: Path, state: dict[str, Any], row_ranges: Mapping[str, tuple[int, int]] | None) -> Checkpoint:
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_tensors(name)) for name in sorted(path.glob("rows-*.safetensors"))]
        held: dict[str, list[tuple[int, int, int, Any]]] = {}  # table -> (first row, rows, rows in all, file)
        for name, file in zip(sorted(path.glob("rows-*.safetensors")), files, strict=True):
            try:
                for table, (first, count, total) in json.loads(file.metadata["ranges"]).items():
                    held.setdefault(table, []).append((int(first), int(count), int(total), file))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ArtifactError("no ranges of rows", where=str(name), got=repr(error)) from error
        rows = {}
        for table, parts in held.items():
            total = parts[0][2]
            begin, end = (row_ranges or {}).get(table, (0, total))
            names = sorted({n.partition("/")[2] for p in parts for n in p[3].names if n.startswith(f"{table}/")})
            tensors = {name: _read_rows(path, f"{table}/{name}", parts, begin, end) for name in names}
            rows[table] = RowPart(begin, total, tensors)
        return Checkpoint(state, read_tensors(path / "dense.safetensors"), rows)


def _read_rows(path: Path, name: str, parts: list[tuple[int, int, int, Any]], begin: int, end: int) -> Tensor:
    """Rows [begin, end) of one tensor from the files that hold them."""
    pieces, at = [], begin
    for first, count, _, file in sorted(parts, key=lambda part: part[:2]):
        if first <= at < min(first + count, end):
            until = min(first + count, end)
            whole = (at, until) == (first, first + count)
            pieces.append(file.read(name) if whole else file.read(name, at - first, until - first))
            at = until
    if begin == end:
        first, _, _, file = parts[0]
        return file.read(name, 0, 0)
    if at != end:
        raise ArtifactError("rows are missing", where=str(path), got=f"{name} up to row {at}", expected=f"row {end}")
    if len(pieces) == 1:
        return pieces[0]
    rows = torch.empty((end - begin, *pieces[0].shape[1:]), dtype=pieces[0].dtype)
    return torch.cat(pieces, out=rows)
