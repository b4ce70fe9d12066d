"""A table of which each step uses few rows: token embeddings, the classifier.

Legend: R rows in all, n rows held here, U rows used in a step (each once), D width.

The table itself takes no part in autograd: a step gathers the rows it uses as a leaf, whose dense gradient [U, D] is
all that the row-sparse optimiser (`unidec.training.optim`) reads. So nothing of size R x D is touched and no sparse
tensor is coalesced.

A table may hold a contiguous part of the rows (several processes), as float32 or bfloat16, on the model's device, in
host memory, or in files that are mapped into memory: the rows of a step then go to the device and back. The way back
is not waited for: new values are put into the table before rows are read next, in a step once the encoder's work is
queued. Row ids are global everywhere, and gathered rows are float32 on the model's device everywhere.
"""

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

from unidec.errors import ArtifactError
from unidec.model.pairs import to_device


@dataclass(frozen=True)
class Placement:
    """Where a table's rows and their optimiser's state live, and which rows they are.

    Attributes:
        place: "device"; "host": host memory, rows come to the device when a step needs them (on a CPU the same as
            "device"); "disk": the same from files mapped into memory.
        folder: of the files; they have no name, so that whatever ends the process frees their space.
        first_row, num_rows: the rows held here; None: all from the first on.
        device: the model's, so that a large table is made there at once; `.to(...)` moves it like any parameter.
    """

    place: Literal["device", "host", "disk"] = "device"
    folder: Path | None = None
    first_row: int = 0
    num_rows: int | None = None
    device: torch.device | str = "cpu"


HERE = Placement()


class RowTable(nn.Module):
    """A weight [R, D] whose rows are gathered, trained and written back.

    Attributes:
        num_rows: R; first_row, own_rows: the rows held here are first_row to first_row + own_rows.
        weight: [n, D], not trained by autograd; whoever reads it outside a step calls `flush` first.
        state: what an optimiser keeps for each row, in the same place: tensors [n, ...] by name; read like `weight`.
        used: (row ids int64 [U] or None for all rows, leaf [U, D]) of the step in progress, or None.
    """

    weight: nn.Parameter
    _here: Tensor

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype = torch.float32, placement: Placement = HERE):
        super().__init__()
        self.num_rows, self.first_row, self.placement = num_rows, placement.first_row, placement
        self.own_rows = num_rows - self.first_row if placement.num_rows is None else placement.num_rows
        # shows where the model is; the weight may be elsewhere
        self.register_buffer("_here", torch.empty(0, device=placement.device), persistent=False)
        self.weight = nn.Parameter(self._zeros((width,), dtype), requires_grad=False)
        self.state: dict[str, Tensor] = {}
        self.used: tuple[Tensor | None, Tensor] | None = None
        self._in_parts = False
        self._is_away = placement.place != "device" and self.device.type != "cpu"  # the rows are not where the model is
        # of the step in progress: places of its rows, on the host, and their columns on the device
        self._fetched: tuple[Tensor, dict[str, Tensor]] | None = None
        # of the last step: the same on its way to the host, and the event that ends the copies (None: no GPU)
        self._landing: tuple[Tensor, dict[str, Tensor], torch.Event | None] | None = None
        self.register_state_dict_pre_hook(lambda table, *_: table.flush())

    @property
    def device(self) -> torch.device:
        """Where gathered rows are."""
        return self._here.device

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        shape = (self.own_rows, *shape)
        if self.placement.place == "disk":
            assert self.placement.folder is not None, "a table on disk needs a folder"
            return zeros_on_disk(self.placement.folder, shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device if self.placement.place == "device" else "cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowTable:
        if self.placement.place == "device":
            self.state = {name: fn(tensor) for name, tensor in self.state.items()}
            return super()._apply(fn, recurse)
        self._here = fn(self._here)
        self._is_away = self.device.type != "cpu"
        return self

    def add_state(self, name: str, *shape: int) -> Tensor:
        """Zeros [n, *shape] where the weight is, float32 (float64 beside such a weight)."""
        dtype = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        self.state[name] = self._zeros(shape, dtype)
        return self.state[name]

    def rows(self) -> dict[str, Tensor]:
        """ "weight" and the state by name, of the rows held here: the tensors themselves, up to date."""
        self.flush()
        return {"weight": self.weight.data, **self.state}

    def flush(self) -> None:
        """Put what the last step wrote back into `weight` and `state`, once it has arrived on the host."""
        if self._landing is None:
            return
        (local_U, values, arrived), self._landing = self._landing, None
        if arrived is not None:
            arrived.synchronize()
        for name, column in self.rows().items():
            column.index_copy_(0, local_U, values[name])

    def gather(self, rows_U: Tensor | None) -> Tensor:
        """Rows as float [U, D] on the model's device; in training a leaf that collects their gradient.

        Args:
            rows_U: int64 [U], each once, of the rows held here; None: all of them. On the host where the table is not
                on the device: else the host waits for them.

        Raises:
            RuntimeError: gathered twice in one training step (rows in both would be updated twice; see `parts`); all
                rows of a table that is not on the device.
        """
        if not (self.training and torch.is_grad_enabled()):
            self.flush()
            local = None if rows_U is None else self._local(rows_U).to(self.weight.device)
            rows = self.weight if local is None else self.weight[local]
            return _at_least_float(rows.detach().to(self.device))
        if self._in_parts:
            return self._gather_part(rows_U)
        if self.used is not None:
            raise RuntimeError("a table's rows are gathered once a training step")
        if not self._is_away:
            rows = self.weight if rows_U is None else self.weight[self._local(rows_U)]
        elif rows_U is None:
            raise RuntimeError("all rows train only in a table on the device")
        else:
            rows_U = rows_U.cpu()
            local_U = self._local(rows_U)
            fetched = {name: to_device(x.index_select(0, local_U), self.device) for name, x in self.rows().items()}
            rows, self._fetched = fetched["weight"], (local_U, fetched)
            rows_U = to_device(rows_U, self.device)
        leaf = _at_least_float(rows.detach()).requires_grad_()
        self.used = (rows_U, leaf)
        return leaf

    @contextlib.contextmanager
    def parts(self, rows_U: Tensor) -> Iterator[None]:
        """Gathers rows for a step whose texts come in chunks: within, each `gather` takes some of them, any number of
        times, and all its gradients add up in the one leaf that the optimiser reads.

        A part has a leaf of its own, so that a chunk's backward pass touches its rows only, not all U.

        Args:
            rows_U: int64 [U], ascending, each once: all rows that the parts take.
        """
        self.gather(rows_U)
        self._in_parts = True
        try:
            yield
        finally:
            self._in_parts = False

    def _gather_part(self, rows_C: Tensor | None) -> Tensor:
        assert self.used is not None and self.used[0] is not None and rows_C is not None
        leaf_UD, place_C = self.used[1], torch.searchsorted(self.used[0], rows_C)
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
        """The used rows' state [U, ...]: copies, or the state itself where all rows are used."""
        assert self.used is not None
        rows_U = self.used[0]
        if self._fetched is not None:
            return {name: self._fetched[1][name] for name in self.state}
        if rows_U is None:
            return dict(self.state)
        local = self._local(rows_U)
        return {name: tensor[local] for name, tensor in self.state.items()}

    @torch.no_grad()
    def write_back(self, weight_UD: Tensor, state: dict[str, Tensor]) -> None:
        """New values of the used rows, of the weight's dtype, and their state, as `used_state` gave it and changed in
        place; the rows are then forgotten."""
        assert self.used is not None
        rows_U, fetched = self.used[0], self._fetched
        self.forget()
        if fetched is not None:
            on_gpu, written = self.device.type == "cuda", {"weight": weight_UD, **state}
            landing = {name: torch.empty(x.shape, dtype=x.dtype, pin_memory=on_gpu) for name, x in written.items()}
            for name, values in written.items():
                landing[name].copy_(values, non_blocking=True)
            arrived = torch.cuda.current_stream(self.device).record_event() if on_gpu else None
            self._landing = (fetched[0], landing, arrived)
        elif rows_U is not None:
            local = self._local(rows_U)
            for name, values in state.items():
                self.state[name][local] = values
            self.weight[local] = weight_UD
        elif weight_UD.data_ptr() != self.weight.data_ptr():  # a leaf of all rows in float32 is the weight itself
            self.weight.copy_(weight_UD)

    def forget(self) -> None:
        """Drop what the step gathered."""
        self.used = self._fetched = None

    def _local(self, rows_U: Tensor) -> Tensor:
        return rows_U - self.first_row if self.first_row else rows_U

    def numpy(self) -> np.ndarray:
        """The rows held here, float32 [n, D]; a view where they are float32 in host memory or a file."""
        self.flush()
        return self.weight.detach().float().cpu().numpy()


def _at_least_float(rows: Tensor) -> Tensor:
    return rows.float() if rows.dtype == torch.bfloat16 else rows


def zeros_on_disk(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in a file of their size, mapped into memory.

    The file's space is reserved, since a disk that fills up later would end the process without a word (SIGBUS), and
    its name is removed, so that its space is free again once the process has ended, in whatever way.

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
            "no room for a table on disk", where=str(folder), got=str(error.strerror),
            expected=f"{size * dtype.itemsize} bytes",
            fix="a run folder on a larger disk, model.clf_dtype: bf16, or optim.clf_state: adagrad",
        ) from error  # fmt: skip
