"""The backward pass of a step over all ranks: which gradients are summed where, and their norm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unidec.model.unidec import UniDEC
from unidec.training.distributed import Ranks
from unidec.training.optim import Optimisers


@dataclass
class Gradients:
    """Gradients of a model's parameters and tables.

    Attributes:
        parallel: the encoder whose gradients are summed during the backward pass, with several
            ranks and a transformer that trains; else None.
    """

    model: UniDEC
    optimisers: Optimisers
    ranks: Ranks
    parallel: torch.nn.Module | None

    @cached_property
    def _summed_after(self) -> list[torch.nn.Parameter]:
        summed = set(self.parallel.parameters()) if self.parallel is not None else set()
        return [p for p in self.optimisers.dense if p not in summed]

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
