"""Losses with a margin, on similarities as they are: triplet, and the squared hinge one-vs-all.

Legend: B queries (rows), S pool labels (columns), P positive pairs in the pool, F ignored pairs (filter pairs), M
masked pairs. The contract is that of `unidec.model.losses`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unidec.errors import ConfigError
from unidec.model.pairs import Pairs, entry_count, loss_dtype, mask_, mean_over_rows

BLOCK = 1 << 22  # entries of the largest temporary, 16 MB of float32


def _hinges(x_BS: Tensor, s_P: Tensor, row_P: Tensor, weight_P: Tensor, margin: float) -> Tensor:
    """sum_P weight_P * sum_{negatives n of the row} [s_n - s_p + margin]_+ of some pairs."""
    over_PS = F.relu(x_BS.index_select(0, row_P) - (s_P - margin).unsqueeze(1))
    return (over_PS.sum(1) * weight_P).sum()


def triplet(logit_BS: Tensor, pairs: Pairs, *, margin: float = 0.3, negatives: str = "all") -> Tensor:
    """Triplet with margin: `[s_in - s_ip + gamma]_+`, n among the pool labels that are neither positive nor ignored
    for i.

    Source: NGAME; UniDEC v1, L_Triplet (a sum over negatives, not a mean).

    Args:
        logit_BS: the similarities themselves, not divided by a temperature, so that `margin` is in cosine units.
        margin: gamma.
        negatives: "all": sum over the negatives; "hardest": the negative with the highest similarity only.

    Raises:
        ConfigError: another value of `negatives`.
    """
    x_BS = logit_BS.to(loss_dtype(logit_BS))
    row_P, weight_P = pairs.row_P, pairs.weight_P.to(x_BS.dtype)
    if negatives == "all":
        s_P = x_BS[row_P, pairs.col_P]
        other_BS = mask_(x_BS.clone(), *pairs.masked("ds"))
        step = max(1, BLOCK // max(x_BS.shape[1], 1))
        total = s_P.sum() * 0
        for begin in range(0, row_P.shape[0], step):  # what a block compares is computed again for its gradient
            part = slice(begin, begin + step)
            total = total + checkpoint(
                _hinges, other_BS, s_P[part], row_P[part], weight_P[part], margin, use_reentrant=False,
                preserve_rng_state=False,
            )  # fmt: skip
        total_B = weight_P.new_zeros(logit_BS.shape[0]).index_add_(0, row_P, weight_P)
        return total / (total_B > 0).sum().clamp_min(1)
    if negatives != "hardest":
        raise ConfigError("unknown choice of negatives", where="triplet", got=negatives, expected="all, hardest")
    if x_BS.shape[1] == 0:
        return x_BS.sum()
    hardest_B = mask_(x_BS.clone(), *pairs.masked("ds")).max(dim=1).values
    return mean_over_rows(F.relu(hardest_B[row_P] - x_BS[row_P, pairs.col_P] + margin), weight_P, row_P, x_BS.shape[0])


def squared_hinge(
    logit_BS: Tensor, pairs: Pairs, *, margin: float = 1.0, normalise: str = "rows", importance_P: Tensor | None = None
) -> Tensor:
    """Squared hinge one-vs-all: `sum_l [margin - y_il s_il]_+^2`, y = 1 for positives, -1 for the other pool labels.

    Source: one-vs-all linear classifiers (DiSMEC, Parabel); SiameseXML's alternative to the logistic loss. No reduction
    applies. A soft target weighs the two sides, as in `unidec.model.losses.bce`, which also explains the
    arguments. A query without a positive target in the pool drops out.

    Args:
        logit_BS: the scores themselves, not divided by a temperature, so that `margin` is in their units.
        margin: 1 for free scores; below 1 for cosines.
        normalise: "rows" or "entries", as in `bce`.
        importance_P: float [P], factor of each pair's positive side; None: 1.

    Raises:
        ConfigError: another value of `normalise`.
    """
    pairs = pairs._replace(weight_P=pairs.weight_P.to(loss_dtype(logit_BS)).clamp(0, 1))
    up_P = torch.ones_like(pairs.weight_P) if importance_P is None else importance_P.to(pairs.weight_P.dtype)
    active_B, count = entry_count(pairs.weight_P, pairs.row_P, logit_BS.shape, pairs.row_F, normalise)
    x_BS = mask_(logit_BS.to(pairs.weight_P.dtype, copy=True), pairs.row_F, pairs.col_F)
    x_P = x_BS[pairs.row_P, pairs.col_P]
    every = ((x_BS + margin).clamp_min(0).square().sum(1) * active_B).sum()  # the mask's share is exactly 0
    instead_P = up_P * (margin - x_P).clamp_min(0).square() - (x_P + margin).clamp_min(0).square()
    return (every + (pairs.weight_P * instead_P).sum()) / count
