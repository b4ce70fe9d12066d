"""MixUp: a step's queries are mixtures of two texts' vectors, and their loss is the mixture of both texts' losses.

Legend: B queries of a step, W width of the encoder.

Source: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", section 2, at the encoder's output (Verma et al.
2019, "Manifold Mixup"); Label-MixUp, a query with the text of one of its labels: thesis, table 1.6.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unidec.model.pairs import to_device
from unidec.sections import Loss
from unidec.training.batches import Prepared

# (share of the loss, whose labels each row has: int64 [B] rows of the batch, or None: its own)
Shares = list[tuple[float, Tensor | None]]
UNMIXED: Shares = [(1.0, None)]


def mix(x_BW: Tensor, batch: Prepared, settings: Loss, seed: int, step: int) -> tuple[Tensor, Shares]:
    """Mix a step's queries, all by one share drawn from Beta(`mixup_alpha`, `mixup_alpha`).

    "queries": each with another one of the batch, drawn at random; its loss is that of its own labels times the share,
    and that of the other's labels times the rest. "labels": each with the text of one of its sampled positives, drawn
    at random, whose label it has already: its loss stays its own. A query without a positive in the pool is not mixed.

    Args:
        x_BW: the encoder's outputs: queries, then pool labels.
        seed, step: name the random numbers.

    Returns:
        the outputs with mixed queries; whose labels count for how much.
    """
    draw, count = np.random.default_rng([seed % 2**63, step, 0x6D6978]), batch.num_own_queries
    share = float(draw.beta(settings.mixup_alpha, settings.mixup_alpha))
    query_BW = x_BW[:count]
    if settings.mixup == "queries":
        partner_B = to_device(draw.permutation(count), x_BW.device)
        mixed_BW = share * query_BW + (1 - share) * query_BW[partner_B]
        return torch.cat([mixed_BW, x_BW[count:]]), [(share, None), (1 - share, partner_B)]
    pool = batch.pool
    sampled = draw.permutation(np.flatnonzero(pool.sampled_P))
    label_B = np.full(count, -1)
    label_B[pool.positive_row_P[sampled]] = pool.positive_col_P[sampled]  # the last one of a row counts
    own_B = to_device(np.where(label_B < 0, 1.0, share).astype(np.float32), x_BW.device).unsqueeze(1)
    label_BW = x_BW[count + to_device(label_B.clip(0), x_BW.device)]
    return torch.cat([own_B * query_BW + (1 - own_B) * label_BW, x_BW[count:]]), UNMIXED
