"""A loss over all labels on several ranks: each compares the queries with its own labels only.

Legend: B queries, S labels of a loss, P positive pairs, F ignored pairs.

Only the queries are gathered. Sums over labels are added up over the ranks, so that every rank has
the full loss, and full gradients of the parameters that all ranks use. The gradient of a label's
row stays on the rank that holds the row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unidec.model.pairs import MASKED, Columns, Pairs
from unidec.training.distributed import Ranks


@dataclass(frozen=True)
class OwnColumns(Columns):
    """This rank's columns of logits [B, S], which the ranks compute in contiguous parts.

    Attributes:
        first: number of this rank's first column; num_columns: S.
        own_P, own_F: int64, numbers of the positive pairs and of the ignored pairs in this rank's
        columns.
        num_pairs: P.
    """

    ranks: Ranks
    first: int
    num_columns: int
    own_P: Tensor
    own_F: Tensor
    num_pairs: int

    partial = True

    def total(self, num_columns: int) -> int:
        return self.num_columns

    def own(self, pairs: Pairs) -> Pairs:
        row_P, col_P, weight_P = (x_P[self.own_P] for x_P in pairs[:3])
        row_F, col_F = (x_F[self.own_F] for x_F in pairs[3:5])
        return Pairs(row_P, col_P - self.first, weight_P, row_F, col_F - self.first)

    def own_values(self, x_P: Tensor) -> Tensor:
        return x_P[self.own_P]

    def of_all_pairs(self, x_P: Tensor) -> Tensor:
        return self.sum(x_P.new_zeros(self.num_pairs).index_copy(0, self.own_P, x_P))

    def sum(self, x: Tensor) -> Tensor:
        return _Sum.apply(x, self.ranks)

    def sum_gradient(self, x: Tensor) -> Tensor:
        same = x.view_as(x)
        if same.requires_grad:
            same.register_hook(functools.partial(_total, self.ranks))
        return same

    def logsumexp(self, lse_B: Tensor) -> Tensor:
        top_B = lse_B.detach().clone()
        self.ranks.all_reduce(top_B, op=dist.ReduceOp.MAX)
        return top_B + self.sum((lse_B - top_B).exp()).log()

    def remove_top(self, x_BS: Tensor, k: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        # J: this rank's k + 1 highest entries, or fewer; G: those of every rank. Each rank gathers
        # all of them, and finds its own among the k highest
        ranks = self.ranks
        num_rows = len(x_BS)
        wanted = k + 1
        value_BJ, place_BJ = x_BS.topk(min(wanted, x_BS.shape[1]), dim=1)
        num_own = value_BJ.shape[1]
        best_BK = x_BS.new_full((num_rows, wanted), -torch.inf)
        best_BK[:, :num_own] = value_BJ
        gathered = ranks.gather(best_BK, [num_rows] * ranks.world)
        best_BG = gathered.view(ranks.world, num_rows, wanted).transpose(0, 1).flatten(1)
        top_BK, top_place_BK = best_BG.topk(wanted, dim=1)
        highest_BK, next_B1 = top_BK.split([k, 1], dim=1)
        is_top_BG = torch.zeros_like(best_BG, dtype=torch.bool)
        is_top_BG.scatter_(1, top_place_BK[:, :k], True)
        is_top_BJ = is_top_BG.narrow(1, ranks.rank * wanted, num_own)
        x_BS.scatter_(1, place_BJ, value_BJ.masked_fill(is_top_BJ, MASKED))
        return highest_BK, next_B1, (place_BJ, value_BJ)


class _Sum(torch.autograd.Function):
    """The sum over the ranks; backward passes the gradient, which is the same on all ranks,
    unchanged.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return _total(ranks, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _total(ranks: Ranks, x: Tensor) -> Tensor:
    """The sum over the ranks, without a gradient."""
    result = x.clone(memory_format=torch.contiguous_format)
    ranks.all_reduce(result)
    return result
