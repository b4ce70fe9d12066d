"""Losses with a margin, on similarities as they are: triplet, and the squared hinge one-vs-all.

Legend: B queries (rows), S pool labels (columns), P positive pairs in the pool, F ignored pairs (filter pairs), M
masked pairs. The contract is that of `unidec.model.losses`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from unidec.errors import ConfigError
from unidec.model.pairs import Pairs, entry_count, loss_dtype, mask_, mean_over_rows


class _TripletAll(torch.autograd.Function):
    """sum_P weight_P * sum_{negatives n of the row} [s_n - s_p + margin]_+, in blocks of pairs; the gradient is made
    on the way.
    """

    BLOCK = 1 << 22  # entries of the largest temporary, 16 MB of float32

    @staticmethod
    def forward(ctx: Any, logit_BS: Tensor, pairs: Pairs, margin: float) -> Tensor:
        row_P, col_P, weight_P, *_ = pairs
        x_BS = logit_BS.to(loss_dtype(logit_BS))
        s_P = x_BS[row_P, col_P]
        x_BS = mask_(x_BS.clone(), *pairs.masked("ds"))
        grad_BS = torch.zeros_like(x_BS)
        grad_P = torch.zeros_like(s_P)
        loss = s_P.new_zeros(())
        step = max(1, _TripletAll.BLOCK // max(x_BS.shape[1], 1))
        for begin in range(0, row_P.shape[0], step):
            part = slice(begin, begin + step)
            hinge_PS = (x_BS[row_P[part]] - (s_P[part] - margin).unsqueeze(1)).clamp_min_(0)
            loss += (hinge_PS.sum(1) * weight_P[part]).sum()
            active_PS = (hinge_PS > 0).to(x_BS.dtype).mul_(weight_P[part].unsqueeze(1))
            grad_P[part] = -active_PS.sum(1)
            grad_BS.index_add_(0, row_P[part], active_PS)
        grad_BS.index_put_((row_P, col_P), grad_P, accumulate=True)
        ctx.save_for_backward(grad_BS)
        ctx.dtype = logit_BS.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (grad_BS,) = ctx.saved_tensors
        return (grad_BS * grad).to(ctx.dtype), None, None


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
    row_P, weight_P = pairs.row_P, pairs.weight_P.to(loss_dtype(logit_BS))
    if negatives == "all":
        total = _TripletAll.apply(logit_BS, pairs._replace(weight_P=weight_P), margin)
        total_B = weight_P.new_zeros(logit_BS.shape[0]).index_add_(0, row_P, weight_P)
        return total / (total_B > 0).sum().clamp_min(1)
    if negatives != "hardest":
        raise ConfigError("unknown choice of negatives", where="triplet", got=negatives, expected="all, hardest")
    x_BS = logit_BS.to(loss_dtype(logit_BS))
    if x_BS.shape[1] == 0:
        return x_BS.sum()
    hardest_B = mask_(x_BS.clone(), *pairs.masked("ds")).max(dim=1).values
    return mean_over_rows(F.relu(hardest_B[row_P] - x_BS[row_P, pairs.col_P] + margin), weight_P, row_P, x_BS.shape[0])


class _SquaredHinge(torch.autograd.Function):
    """sum over rows of `active_B * sum over unmasked entries of [margin + x]_+^2`, where over the positive pairs
    `target * up * [margin - x]_+^2 + (1 - target) * [margin + x]_+^2` replaces it.
    """

    @staticmethod
    def forward(ctx: Any, logit_BS: Tensor, pairs: Pairs, up_P: Tensor, active_B: Tensor, margin: float) -> Tensor:
        row_P, col_P, target_P, *ignored = pairs
        x_BS = mask_(logit_BS.to(target_P.dtype, copy=True), *ignored)
        x_P = x_BS[row_P, col_P]
        above_P, below_P = (x_P + margin).clamp_min_(0), (margin - x_P).clamp_min_(0)
        over_BS = x_BS.add_(margin).clamp_min_(0)  # the mask's share is exactly 0
        ctx.save_for_backward(over_BS, row_P, col_P, target_P * (above_P + up_P * below_P), active_B)
        ctx.dtype = logit_BS.dtype
        positive = (target_P * (up_P * below_P.square() - above_P.square())).sum()
        return (torch.linalg.vecdot(over_BS, over_BS) * active_B).sum() + positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        over_BS, row_P, col_P, pull_P, active_B = ctx.saved_tensors
        grad_BS = over_BS * (2 * active_B * grad).unsqueeze(1)
        grad_BS.index_put_((row_P, col_P), -2 * pull_P * grad, accumulate=True)
        return grad_BS.to(ctx.dtype), *(None,) * 4


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
    return _SquaredHinge.apply(logit_BS, pairs, up_P, active_B, margin) / count
