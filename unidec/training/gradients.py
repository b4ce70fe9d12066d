"""The backward pass of a step over all ranks: which gradients are summed where, and their norm."""

from __future__ import annotations

import torch
from torch import Tensor

from unidec.model.unidec import UniDEC
from unidec.training.distributed import Ranks
from unidec.training.optim import Optimisers


class Gradients:
    """Gradients of a model's parameters and tables.

    Args:
        parallel: the encoder whose gradients are summed during the backward pass, with several
            ranks and a transformer that trains; else None.
    """

    def __init__(
        self, model: UniDEC, optimisers: Optimisers, ranks: Ranks, parallel: torch.nn.Module | None
    ):
        self.model = model
        self.optimisers = optimisers
        self.ranks = ranks
        self.parallel = parallel
        summed = set(parallel.parameters()) if parallel is not None else set()
        self._summed_after = [p for p in optimisers.dense if p not in summed]

    def complete(self) -> Tensor:
        """Add up gradients over the ranks, and return the norm of all gradients, 0-d."""
        self.ranks.sum_gradients(self._summed_after, complete=[self.model.log_scale])
        bag_tables = []
        sharded = []
        for name, row in self.optimisers.row.items():
            table = row.table
            if name.startswith("encoder."):
                bag_tables.append(table)
            elif table.used is not None and table.used[1].grad is not None:
                sharded.append(table.used[1].grad)
        self.ranks.sum_rows(bag_tables)
        return self.ranks.norm(self.optimisers.gradients(), sharded)
