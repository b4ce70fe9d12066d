"""MixUp: a step's queries are mixtures of two texts' vectors, and their loss is a mixture of both texts' losses.

Legend: B queries of a step, W width of the encoder.

Source: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", section 2, at the encoder's output (Verma et al.
2019, "Manifold Mixup"); Label-MixUp, a query with the text of one of its labels: thesis, table 1.6.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unidec.model.pairs import PoolTargets, rows_at, to_device
from unidec.sections import Loss
from unidec.training.sampler import PoolBatch


@dataclass(frozen=True)
class Mix:
    """How a step's queries are mixed.

    Attributes:
        share: weight of a query's own labels in its loss; the remaining weight is on the labels of the query
            `partner_B`, int64 [B]. Without `partner_B` only its own labels count.
        other_B: int64 [B], the text that each query is mixed with, by position in the outputs: queries, then labels.
        own_B1: float32 [B, 1], weight of the query's own vector in its mixture.
    """

    share: float
    partner_B: Tensor | None
    other_B: Tensor
    own_B1: Tensor

    def vectors(self, x_BW: Tensor) -> Tensor:
        """The encoder's outputs x_BW, with queries replaced by mixtures."""
        count = len(self.other_B)
        mixed_BW = self.own_B1 * x_BW[:count] + (1 - self.own_B1) * rows_at(x_BW, self.other_B)
        return torch.cat([mixed_BW, x_BW[count:]])

    def targets(self, targets: PoolTargets) -> list[tuple[float, PoolTargets]]:
        """(weight, targets) of the losses whose weighted sum is the loss of mixed queries."""
        if self.partner_B is None:
            return [(1.0, targets)]
        return [(self.share, targets), (1 - self.share, targets.of_rows(self.partner_B))]


def draw_mix(settings: Loss, pool: PoolBatch, seed: tuple[int, ...], device: torch.device) -> Mix:
    """Draw the mixtures of a step's queries. One share for all is drawn from Beta(`mixup_alpha`, `mixup_alpha`).

    "queries": each query is mixed with a random query of the batch; its loss is the loss on its own labels times the
    share, plus the loss on the other query's labels times the rest. "labels": each query is mixed with the text of a
    random one of its sampled positives; its loss is unchanged, since it has that label. A query without a positive in
    the pool is not mixed.

    Args:
        seed: decides the random numbers.
    """
    draw, count = np.random.default_rng(seed), len(pool.rows_B)
    share, partner_B = float(draw.beta(settings.mixup_alpha, settings.mixup_alpha)), None
    if settings.mixup == "queries":
        other_B = draw.permutation(count)
        partner_B, own_B = to_device(other_B, device), np.full(count, share)
    else:
        sampled, other_B = draw.permutation(np.flatnonzero(pool.sampled_P)), np.arange(count)
        other_B[pool.positive_row_P[sampled]] = count + pool.positive_col_P[sampled]  # the last one of a row counts
        own_B = np.where(other_B < count, 1.0, share)
    return Mix(share, partner_B, to_device(other_B, device), to_device(own_B.astype(np.float32)[:, None], device))
