"""Rows of a table that are not on the model's device: in host memory, or in files mapped into it.

Legend: n rows held, U rows of a step (each once).

While the device works on one batch, the rows of the next are copied to it on a stream of their own, and the rows that
the last step changed are copied back, likewise. Rows of the next batch that the current step changes are patched on
the device, so that every step sees what it would see with the whole table there, bit for bit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from tempfile import mkstemp
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unidec.errors import ArtifactError

WRITES_AHEAD = 2  # at most so many steps' rows wait to be written: what bounds the memory of both sides


@dataclass
class Fetched:
    """Rows on the device.

    Attributes:
        rows_U: int64 [U] places in the columns, on the host.
        on_device_U: the ids as the step knows them.
        version: how many writes were in the columns when they were read.
        values: [U, ...] by column.
        ready: when the copy is done; None: at once.
    """

    rows_U: Tensor
    on_device_U: Tensor
    version: int
    values: dict[str, Tensor] = field(default_factory=dict)
    ready: Any = None


@dataclass(frozen=True)
class _Update:
    """What one step wrote, still on the device, for batches that were fetched before it reached the columns."""

    number: int
    rows_U: Tensor
    values: dict[str, Tensor]


class FetchedRows:
    """Moves rows between columns in host memory (or files) and a device.

    Steps `take` and `put` in one thread; `fetch` may be called from another. A write is done by a thread of its own;
    what was fetched before a write landed is patched from the values on the device, whatever the order was.

    Args:
        columns: gives the tensors [n, ...] by name.
        device: the model's. (On a CPU there is no need for this, but it works, and is tested there.)
    """

    def __init__(self, columns: Callable[[], dict[str, Tensor]], device: torch.device):
        self.columns, self.device = columns, device
        on_gpu = device.type == "cuda"
        self._in = torch.cuda.Stream(device) if on_gpu else None  # two: a write waits for the step, a read must not
        self._out = torch.cuda.Stream(device) if on_gpu else None
        self._lock = threading.Lock()  # of the columns' rows, and of all below
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._pending: deque[Future[None]] = deque()
        self._put = self._written = 0
        self._fetched: list[Fetched] = []  # and not yet taken, oldest first
        self._updates: list[_Update] = []

    def fetch(self, rows_U: Tensor, on_device_U: Tensor) -> Fetched:
        """Read rows now and begin their copy to the device.

        Args:
            rows_U: int64 [U] on the host.
            on_device_U: the tensor that `take` will be given.
        """
        with self._lock:
            fetched = Fetched(rows_U, on_device_U, self._written)
            self._fetched.append(fetched)
            host = {name: self._pinned(len(rows_U), column) for name, column in self.columns().items()}
            for name, column in self.columns().items():
                torch.index_select(column, 0, rows_U, out=host[name])
        with _on(self._in):
            fetched.values = {name: rows.to(self.device, non_blocking=True) for name, rows in host.items()}
            fetched.ready = None if self._in is None else self._in.record_event()
        return fetched

    def take(self, on_device_U: Tensor, first_row: int) -> Fetched:
        """What was fetched for a step, as of now; what was not is fetched at once (and the host waits for its ids)."""
        with self._lock:
            fetched = next((f for f in self._fetched if f.on_device_U is on_device_U), None)
        if fetched is None:
            fetched = self.fetch(on_device_U.cpu() - first_row, on_device_U)
        with self._lock:
            # steps take what was fetched in order: what is older was given up (a round that was stopped)
            del self._fetched[: next(i for i, f in enumerate(self._fetched) if f is fetched) + 1]
            missed = [update for update in self._updates if update.number > fetched.version]
        if fetched.ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(fetched.ready)
            for rows in fetched.values.values():
                rows.record_stream(stream)
        for update in missed:  # oldest first
            self._patch(fetched, update)
        return fetched

    def _patch(self, fetched: Fetched, update: _Update) -> None:
        _, to, of = np.intersect1d(
            fetched.rows_U.numpy(), update.rows_U.numpy(), assume_unique=True, return_indices=True
        )
        if not len(to):
            return
        places = torch.from_numpy(np.stack([to, of]))
        if self._in is not None:
            places = places.pin_memory().to(self.device, non_blocking=True)
        for name, rows in fetched.values.items():
            rows.index_copy_(0, places[0], update.values[name].index_select(0, places[1]))

    def put(self, fetched: Fetched, values: dict[str, Tensor]) -> None:
        """Begin to write new values of fetched rows.

        Args:
            fetched: of `take`.
            values: [U, ...] by column, on the device; they belong to the store from now on.
        """
        ready = None
        host = values
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self.device))
            with _on(self._out):
                host = {name: self._pinned(len(rows), rows) for name, rows in values.items()}
                for name, rows in values.items():
                    host[name].copy_(rows, non_blocking=True)
                    rows.record_stream(self._out)
                ready = self._out.record_event()
        with self._lock:
            self._put += 1
            self._updates.append(_Update(self._put, fetched.rows_U, values))
            # what has landed is needed only by those who read before
            oldest = min([self._written, *(f.version for f in self._fetched)])
            self._updates = [update for update in self._updates if update.number > oldest]
        self._pending.append(self._writer.submit(self._write, fetched.rows_U, host, ready))
        while len(self._pending) > WRITES_AHEAD:
            self._pending.popleft().result()

    def _write(self, rows_U: Tensor, host: dict[str, Tensor], ready: Any) -> None:
        if ready is not None:
            ready.synchronize()
        with self._lock, torch.no_grad():
            for name, column in self.columns().items():
                column.index_copy_(0, rows_U, host[name])
            self._written += 1

    def flush(self) -> None:
        """Wait until all that was put is in the columns; raises what its writing raised."""
        while self._pending:
            self._pending.popleft().result()

    def _pinned(self, num_rows: int, like: Tensor) -> Tensor:
        """Empty rows on the host, pinned for a GPU (from torch's cache: freed only once their copy is done)."""
        return torch.empty((num_rows, *like.shape[1:]), dtype=like.dtype, pin_memory=self._in is not None)


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def zeros_on_disk(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in a file of their size, mapped into memory.

    The file's space is reserved, since a disk that fills up later would end the process without a word (SIGBUS), and
    its name is removed, so that its space is free again once the process has ended, in whatever way.

    Raises:
        ArtifactError: not enough space.
    """
    size = prod(shape)
    num_bytes = size * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = mkstemp(prefix="rows-", suffix=".bin", dir=folder)
    try:
        if shutil.disk_usage(folder).free < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.truncate(descriptor, num_bytes)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except (AttributeError, OSError) as error:
            # not every system and file system can reserve: the file is sparse then
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise
        return torch.from_file(name, shared=True, size=size, dtype=dtype).view(shape)
    except OSError as error:
        raise ArtifactError(
            "no room for a table on disk", where=str(folder),
            got=f"{shutil.disk_usage(folder).free} bytes free ({error.strerror})", expected=f"{num_bytes} bytes",
            fix="a run folder on a larger disk, model.clf_dtype: bf16, or optim.clf_state: adagrad",
        ) from error  # fmt: skip
    finally:
        os.close(descriptor)
        os.unlink(name)
