"""A table with few rows used in each step: token embeddings, or the classifier.

Legend: R rows of the whole table, n rows held here, U rows used in a step (each once), D width.

The table itself is not part of the autograd graph: a step gathers its rows as a leaf, whose dense
gradient [U, D] is all that the row-sparse optimiser (`unidec.training.optim`) reads. So a step
touches nothing of size R x D and coalesces no sparse tensor.

A table may hold a contiguous part of the rows (several processes), as float32 or bfloat16. It may
live on the model's device, in host memory, or in files that are mapped into memory; in the latter
two cases a step copies its rows to the device and back. The host does not wait for the copy back:
new values are put into the table before rows are read the next time (in a step after the encoder's
work has been queued). Row ids are always global, and gathered rows are always float32 on the
model's device."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from unidec.data.chunks import blocks
from unidec.errors import ArtifactError
from unidec.model.pairs import to_device


@dataclass(frozen=True)
class Placement:
    """Where a table's rows and their optimiser's state live, and which rows they are.

    Attributes:
        place: "device": on the model's device; "host": in host memory, a step copies its rows to
            the device (on a CPU the same as "device"); "disk": as "host", in files that are mapped
            into memory.
        folder: folder of the files; their names are removed at once, so that the end of the process
            frees their space.
        first_row, num_rows: the rows held here; None: all rows from `first_row` on.
        device: the model's device, on which a large table is then created; `.to(...)` moves it like
            any parameter.
    """

    place: Literal["device", "host", "disk"] = "device"
    folder: Path | None = None
    first_row: int = 0
    num_rows: int | None = None
    device: torch.device | str = "cpu"


HERE = Placement()
_ROWS_AT_ONCE = 1 << 16  # copied at a time


class RowTable(nn.Module):
    """A weight [R, D] whose rows are gathered, trained and written back.

    Attributes:
        num_rows: R; first_row, own_rows: the table holds n = own_rows rows, from first_row on.
        weight: [n, D], not trained by autograd; call `flush` before reading it outside a step.
        state: the optimiser's state of each row, tensors [n, ...] by name, in the same place as
            `weight`; call `flush` before reading it, too.
        used: (row ids int64 [U] or None for all rows, leaf [U, D]) of the step in progress, or
            None.
    """

    weight: nn.Parameter
    _here: Tensor

    def __init__(
        self,
        num_rows: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        placement: Placement = HERE,
    ):
        super().__init__()
        self.num_rows = num_rows
        self.placement = placement
        self.first_row = placement.first_row
        self.own_rows = num_rows - self.first_row
        if placement.num_rows is not None:
            self.own_rows = placement.num_rows
        # follows the model's device; the weight may be elsewhere
        self.register_buffer("_here", torch.empty(0, device=placement.device), persistent=False)
        self.weight = nn.Parameter(self._zeros((width,), dtype), requires_grad=False)
        self.state: dict[str, Tensor] = {}
        self.used: tuple[Tensor | None, Tensor] | None = None
        self._in_parts = False
        # the rows are not on the device
        self.is_remote = placement.place != "device" and self.device.type != "cpu"
        # rows of the step in progress: their local numbers, on the host; their weight and state, on
        # the device
        self._fetched: tuple[Tensor, dict[str, Tensor]] | None = None
        # rows of the last step while they are copied to the host: local numbers, weight and state,
        # and the event after the copies (None: no GPU)
        self._pending: tuple[Tensor, dict[str, Tensor], torch.Event | None] | None = None
        self.register_state_dict_pre_hook(lambda table, *_: table.flush())

    @property
    def device(self) -> torch.device:
        """The model's device, where gathered rows are."""
        return self._here.device

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        shape = (self.own_rows, *shape)
        if self.placement.place == "disk":
            assert self.placement.folder is not None, "a table on disk needs a folder"
            return zeros_on_disk(self.placement.folder, shape, dtype)
        device = self.device if self.placement.place == "device" else "cpu"
        return torch.zeros(shape, dtype=dtype, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowTable:
        if self.placement.place == "device":
            self.state = {name: fn(tensor) for name, tensor in self.state.items()}
            return super()._apply(fn, recurse)
        self._here = fn(self._here)
        self.is_remote = self.device.type != "cpu"
        return self

    def add_state(self, name: str, *shape: int) -> Tensor:
        """Add state of zeros [n, *shape] where the weight is, at least float32, and return it."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        self.state[name] = self._zeros(shape, dtype)
        return self.state[name]

    def rows(self) -> dict[str, Tensor]:
        """Weight (as "weight") and state of the rows held here: the tensors, up to date."""
        self.flush()
        return {"weight": self.weight.data, **self.state}

    def flush(self) -> None:
        """Wait for the last step's copies to the host, and put them into `weight` and `state`."""
        pending = self._pending
        if pending is None:
            return
        self._pending = None
        local_U, values, copied = pending
        if copied is not None:
            copied.synchronize()
        for name, column in self.rows().items():
            column.index_copy_(0, local_U, values[name])

    def gather(self, rows_U: Tensor | None) -> Tensor:
        """Rows as float32 (float64 if the weight is) [U, D] on the model's device; in training a
        leaf that collects their gradient.

        Args:
            rows_U: int64 [U], each once, among the rows held here; None: all of them. They should
                be on the host if the table is not on the device; otherwise the host waits for them.

        Raises:
            RuntimeError: in training, on a second call in a step (rows of both would be updated
                twice; see `parts`), or for all rows of a table that is not on the device.
        """
        if not (self.training and torch.is_grad_enabled()):
            self.flush()
            return _at_least_float(self._select(self.weight, rows_U).to(self.device))
        if self._in_parts:
            return self._gather_part(rows_U)
        if self.used is not None:
            raise RuntimeError("the rows of this table were already gathered in this training step")
        if not self.is_remote:
            rows = self._select(self.weight, rows_U)
        elif rows_U is None:
            raise RuntimeError("all rows can be trained in a step only if they are on the device")
        else:
            rows = self._fetch(rows_U.cpu())
            rows_U = to_device(rows_U, self.device)
        leaf = _at_least_float(rows).requires_grad_()
        self.used = (rows_U, leaf)
        return leaf

    def _select(self, values: Tensor, rows_U: Tensor | None) -> Tensor:
        """Some rows of the weight or of a state, where they are; None: all of them."""
        if rows_U is None:
            return values.detach()
        return values.detach()[self._local(rows_U).to(values.device)]

    def _local(self, rows_U: Tensor) -> Tensor:
        """Numbers of rows among those held here."""
        return rows_U - self.first_row if self.first_row else rows_U

    def _fetch(self, rows_U: Tensor) -> Tensor:
        """Copy rows and their state to the device; returns the rows."""
        local_U = self._local(rows_U)
        fetched = {
            name: to_device(values.index_select(0, local_U), self.device)
            for name, values in self.rows().items()
        }
        self._fetched = (local_U, fetched)
        return fetched["weight"]

    @contextlib.contextmanager
    def parts(self, rows_U: Tensor) -> Iterator[None]:
        """Gather the rows of a step whose texts are encoded in chunks. Inside the context `gather`
        may be called any number of times, each time for some of these rows; the gradients add up in
        the one leaf that the optimiser reads.

        Each such call returns a separate leaf, so that a chunk's backward pass touches its rows
        only, not all U.

        Args:
            rows_U: int64 [U], ascending, each once: all rows of the step.
        """
        self.gather(rows_U)
        self._in_parts = True
        try:
            yield
        finally:
            self._in_parts = False

    def _gather_part(self, rows_C: Tensor | None) -> Tensor:
        assert self.used is not None and rows_C is not None
        rows_U, leaf_UD = self.used
        assert rows_U is not None
        place_C = torch.searchsorted(rows_U, rows_C)
        part_CD = leaf_UD.detach()[place_C].requires_grad_()

        def add(part: Tensor) -> None:
            assert part.grad is not None
            if leaf_UD.grad is None:
                leaf_UD.grad = torch.zeros_like(leaf_UD)
            leaf_UD.grad.index_add_(0, place_C, part.grad)
            part.grad = None

        part_CD.register_post_accumulate_grad_hook(add)
        return part_CD

    def used_state(self) -> dict[str, Tensor]:
        """State [U, ...] of the step's rows: copies, or the state itself if all rows are used."""
        assert self.used is not None
        if self._fetched is not None:
            _, fetched = self._fetched
            return {name: fetched[name] for name in self.state}
        rows_U, _ = self.used
        return {name: self._select(values, rows_U) for name, values in self.state.items()}

    @torch.no_grad()
    def write_back(self, weight_UD: Tensor, state: dict[str, Tensor]) -> None:
        """Write new values of the used rows, of the weight's dtype, and their state: the tensors of
        `used_state`, changed in place. Ends the step's use of the rows (`forget`).
        """
        assert self.used is not None
        rows_U, _ = self.used
        fetched = self._fetched
        self.forget()
        if fetched is not None:
            on_gpu = self.device.type == "cuda"
            copies = {}
            for name, values in {"weight": weight_UD, **state}.items():
                copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_gpu)
                copies[name] = copy.copy_(values, non_blocking=True)
            copied = torch.cuda.current_stream(self.device).record_event() if on_gpu else None
            self._pending = (fetched[0], copies, copied)
        elif rows_U is not None:
            local_U = self._local(rows_U)
            for name, values in state.items():
                self.state[name][local_U] = values
            self.weight[local_U] = weight_UD
        # a float32 leaf of all rows is the weight itself
        elif weight_UD.data_ptr() != self.weight.data_ptr():
            self.weight.copy_(weight_UD)

    def forget(self) -> None:
        """Drop the rows that the step gathered."""
        self.used = self._fetched = None

    def numpy(self, into: np.ndarray | None = None) -> np.ndarray:
        """The rows held here, float32 [n, D]; a view if they are float32 and not on a GPU.

        Args:
            into: an array that is filled, some rows at a time, and returned instead of a copy.
        """
        self.flush()
        weight = self.weight.detach()
        is_view = weight.dtype == torch.float32 and not weight.is_cuda
        if into is None or is_view:
            return weight.float().cpu().numpy()
        for some in blocks(len(weight), _ROWS_AT_ONCE):
            into[some] = weight[some].float().cpu().numpy()
        return into


def _at_least_float(rows: Tensor) -> Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def zeros_on_disk(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in a file that is mapped into memory.

    The file's space is reserved, since a disk that fills up later would kill the process without a
    message (SIGBUS). Its name is removed, so that the space is freed when the process ends for any
    reason.

    Raises:
        ArtifactError: not enough space.
    """
    size = prod(shape)
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.NamedTemporaryFile(prefix="rows-", dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
    except OSError as error:
        raise ArtifactError(
            "not enough disk space for a table or for vectors",
            where=folder,
            got=str(error.strerror),
            expected=f"{size * dtype.itemsize} bytes",
            fix="free some space and run the command again, which resumes; or a run folder on a "
            "larger disk, model.clf_dtype: bf16, or optim.clf_state: adagrad",
        ) from error
