"""MixUp: a step's queries are mixtures of two texts' vectors, and their loss is the mixture of both texts' losses.

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
        share: of its own labels in a query's loss; the rest is that of the labels of row `partner_B`, int64 [B], where
            that is given.
        other_B: int64 [B], what each is mixed with, by place among the outputs: queries, then pool labels.
        own_B1: float32 [B, 1], share of its own vector in each mixture.
    """

    share: float
    partner_B: Tensor | None
    other_B: Tensor
    own_B1: Tensor

    def vectors(self, x_BW: Tensor) -> Tensor:
        """The encoder's outputs with mixed queries."""
        count = len(self.other_B)
        mixed_BW = self.own_B1 * x_BW[:count] + (1 - self.own_B1) * rows_at(x_BW, self.other_B)
        return torch.cat([mixed_BW, x_BW[count:]])

    def targets(self, targets: PoolTargets) -> list[tuple[float, PoolTargets]]:
        """Whose labels count for how much."""
        if self.partner_B is None:
            return [(1.0, targets)]
        return [(self.share, targets), (1 - self.share, targets.of_rows(self.partner_B))]


def draw_mix(settings: Loss, pool: PoolBatch, seed: tuple[int, ...], device: torch.device) -> Mix:
    """Mixtures of a step's queries, all by one share drawn from Beta(`mixup_alpha`, `mixup_alpha`).

    "queries": each with another one of the batch, drawn at random; its loss is that of its own labels times the share,
    and that of the other's labels times the rest. "labels": each with the text of one of its sampled positives, drawn
    at random, whose label it has already: its loss stays its own. A query without a positive in the pool is not mixed.

    Args:
        seed: names the random numbers.
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
