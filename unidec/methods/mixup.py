"""MixUp: a step's queries are mixtures of two texts' vectors, and their loss is a mixture of both
texts' losses.

Legend: B queries of a step, W width of the encoder.

Source: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", section 2, at the encoder's
output (Verma et al. 2019, "Manifold Mixup"); Label-MixUp, a query with the text of one of its
labels: thesis, table 1.6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unidec.config import Loss
from unidec.model.additions import Drawn
from unidec.model.batch import Prepared
from unidec.model.pairs import PoolTargets, rows_at, to_device
from unidec.model.pool import PoolBatch

_STREAM = 0x6D6978  # separates these random numbers from others of a step


@dataclass(frozen=True, kw_only=True)
class Mix:
    """How a step's queries are mixed.

    Attributes:
        share: weight of a query's own labels in its loss; the remaining weight is on the labels of
            the query `partner_B`, int64 [B]. Without `partner_B` only its own labels count.
        other_B: int64 [B], the text that each query is mixed with, by position in the outputs:
            queries, then labels.
        own_B1: float32 [B, 1], weight of the query's own vector in its mixture.
    """

    share: float
    partner_B: Tensor | None
    other_B: Tensor
    own_B1: Tensor

    def vectors(self, x_BW: Tensor) -> Tensor:
        """The encoder's outputs x_BW, with queries replaced by mixtures."""
        count = len(self.other_B)
        other_BW = rows_at(x_BW, self.other_B)
        own_BW = self.own_B1 * x_BW[:count]
        mixed_BW = own_BW + (1 - self.own_B1) * other_BW
        return torch.cat([mixed_BW, x_BW[count:]])

    def targets(self, targets: PoolTargets) -> PoolTargets:
        """Targets with the mixture whose weighted sum of losses is the loss of mixed queries."""
        if self.partner_B is None:
            return targets
        of_partner = targets.of_rows(self.partner_B)
        mixture = ((self.share, targets), (1 - self.share, of_partner))
        return replace(targets, mixture=mixture)


class MixUp:
    """Mixes the queries of each step in training."""

    name = "mixup"

    def __init__(self, settings: Loss):
        self.settings = settings

    def draw(self, drawn: Drawn) -> Mix:
        return draw_mix(self.settings, drawn.pool, drawn.rng(_STREAM), drawn.device)

    def apply(self, x_BW: Tensor, batch: Prepared) -> tuple[Tensor, Prepared]:
        mix: Mix = batch.added[self.name]
        clf = replace(batch.clf, targets=mix.targets(batch.clf.targets))
        mixed = replace(batch, targets=mix.targets(batch.targets), clf=clf)
        return mix.vectors(x_BW), mixed


def draw_mix(
    settings: Loss, pool: PoolBatch, rng: np.random.Generator, device: torch.device
) -> Mix:
    """Draw the mixtures of a step's queries. One share for all is drawn from Beta(`mixup_alpha`,
    `mixup_alpha`).

    "queries": each query is mixed with a random query of the batch; its loss is the loss on its own
    labels times the share, plus the loss on the other query's labels times the rest. "labels": each
    query is mixed with the text of a random one of its sampled positives; its loss is unchanged,
    since it has that label. A query without a positive in the pool is not mixed."""
    count = len(pool.rows_B)
    share = float(rng.beta(settings.mixup_alpha, settings.mixup_alpha))
    partner_B: Tensor | None = None
    if settings.mixup == "queries":
        other_B = rng.permutation(count)
        partner_B = to_device(other_B, device)
        own_B = np.full(count, share)
    else:
        sampled = rng.permutation(np.flatnonzero(pool.sampled_P))
        other_B = np.arange(count)
        text_P = count + pool.positive_col_P
        # the last one of a row counts
        other_B[pool.positive_row_P[sampled]] = text_P[sampled]
        own_B = np.where(other_B < count, 1.0, share)
    return Mix(
        share=share,
        partner_B=partner_B,
        other_B=to_device(other_B, device),
        own_B1=to_device(own_B.astype(np.float32), device).unsqueeze(1),
    )
