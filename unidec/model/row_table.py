"""A table of which each step uses few rows: token embeddings, the classifier.

Legend: R rows in all, U rows used in a step (each once), D width.

The table itself takes no part in autograd: a step gathers the rows it uses as a leaf, whose dense gradient [U, D] is
all that the row-sparse optimiser (`unidec.training.optim.RowAdam`) reads. So nothing of size R x D is touched, no
sparse tensor is coalesced, and the host never waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RowTable(nn.Module):
    """A weight [R, D] whose rows are gathered, trained and written back.

    Attributes:
        weight: float32 [R, D]; not trained by autograd.
        used: (row ids int64 [U] or None for all rows, leaf [U, D]) of the step in progress, or None.
    """

    weight: nn.Parameter

    def __init__(self, num_rows: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_rows, width), requires_grad=False)
        self.used: tuple[Tensor | None, Tensor] | None = None

    @property
    def num_rows(self) -> int:
        return self.weight.shape[0]

    def gather(self, rows_U: Tensor | None) -> Tensor:
        """Rows as float [U, D]; in training a leaf that collects their gradient.

        Args:
            rows_U: int64 [U], each once; None: all rows.

        Raises:
            RuntimeError: gathered twice in one training step (rows in both would be updated twice).
        """
        rows = self.weight if rows_U is None else self.weight[rows_U]
        if not (self.training and torch.is_grad_enabled()):
            return rows.detach()
        if self.used is not None:
            raise RuntimeError("a table's rows are gathered once a training step")
        leaf = rows.detach().requires_grad_()
        self.used = (rows_U, leaf)
        return leaf

    def forget(self) -> None:
        """Drop what the step gathered."""
        self.used = None
