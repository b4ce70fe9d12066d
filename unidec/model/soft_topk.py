"""The soft top-k loss: cross entropy on an operator that lets through k labels of each row, softly.

Legend: B queries (rows), S pool labels (columns), P positive pairs in the pool, F ignored pairs (filter pairs), K the
k highest entries of a row. The contract is that of `unidec.model.losses`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from unidec.model.pairs import MASKED, Pairs, loss_dtype, mask_, mean_over_rows

# Newton's steps at most; a processor's host sees when all rows have converged (3 to 5), a GPU's would have to wait
STEPS = 12


def thresholds(x_BS: Tensor, k: int) -> Tensor:
    """t of each row with `sum_j sigmoid(x_j + t) = k`, float [B]; -`MASKED` where k labels or fewer are unmasked.

    Solved as `log R(t) = log T(t)`, R the sum of sigmoid(x + t) over all but the k highest entries, T the sum of
    sigmoid(-x - t) over those: the same equation without the difference of large numbers, nearly linear in t, by
    Newton's steps inside a bracket that both sums give.

    Args:
        x_BS: float32 or float64 [B, S], `MASKED` where an entry takes no part; changed and restored.
        k: at least 1.
    """
    num_rows, num_cols = x_BS.shape
    if num_cols <= k:
        return x_BS.new_full((num_rows,), -MASKED)
    top_BK, index_BK = x_BS.topk(k + 1, dim=1)
    next_B1 = top_BK[:, k:].clone()
    top_BK, index_BK = top_BK[:, :k], index_BK[:, :k]
    x_BS.scatter_(1, index_BK, MASKED)
    # at `low` T exceeds R, at `high` R exceeds T: bounds by the k-th and the next entry alone
    low_B1, high_B1 = -top_BK[:, k - 1 :] - math.log(2 * num_cols), math.log(2 * k) - next_B1
    t_B1 = -(top_BK[:, k - 1 :] + next_B1) / 2
    close = 0.5 * math.sqrt(torch.finfo(x_BS.dtype).eps)  # a Newton's step of this length leaves its square to go
    rest_BS = torch.empty_like(x_BS)
    for _ in range(STEPS):
        torch.sigmoid(torch.add(x_BS, t_B1, out=rest_BS), out=rest_BS)
        head_BK = torch.sigmoid(-(top_BK + t_B1))
        above_B1, below_B1 = rest_BS.sum(1, keepdim=True), head_BK.sum(1, keepdim=True)
        low_B1, high_B1 = (
            torch.where(above_B1 < below_B1, t_B1, low_B1),
            torch.where(above_B1 < below_B1, high_B1, t_B1),
        )
        squares_B1 = torch.linalg.vector_norm(rest_BS, dim=1, keepdim=True).square()
        slope_B1 = 2 - squares_B1 / above_B1 - head_BK.square().sum(1, keepdim=True) / below_B1
        next_t_B1 = t_B1 - (above_B1 / below_B1).log() / slope_B1
        inside_B1 = (low_B1 <= next_t_B1) & (next_t_B1 <= high_B1)  # false for what is not finite
        next_t_B1 = torch.where(inside_B1, next_t_B1, (low_B1 + high_B1) / 2)
        # both sums underflow where the gap is wider than the exponent's range: its middle is the solution
        solved_B1 = (above_B1 == 0) & (below_B1 == 0)
        next_t_B1 = torch.where(solved_B1, t_B1, next_t_B1)
        solved_B1 |= inside_B1 & ((next_t_B1 - t_B1).abs() <= close)
        t_B1 = next_t_B1
        if x_BS.device.type == "cpu" and bool(solved_B1.all()):
            break
    x_BS.scatter_(1, index_BK, top_BK)
    return torch.where(next_B1 > MASKED / 2, t_B1, torch.full_like(t_B1, -MASKED)).squeeze(1)


class _SoftTopK(torch.autograd.Function):
    """(s_P, t_B): positive logits, and the thresholds. The gradient of t is that of the implicit function:
    `dt / dx_j = -v_j / sum v`, `v = sigmoid'(x + t)`.
    """

    @staticmethod
    def forward(ctx: Any, logit_BS: Tensor, pairs: Pairs, k: int) -> tuple[Tensor, Tensor]:
        row_P, col_P, _, *ignored = pairs
        dtype = loss_dtype(logit_BS)
        s_P = logit_BS[row_P, col_P].to(dtype)
        x_BS = mask_(logit_BS.to(dtype, copy=True), *ignored)
        t_B = thresholds(x_BS, k)
        ctx.save_for_backward(x_BS, t_B, row_P, col_P)
        ctx.dtype = logit_BS.dtype
        return s_P, t_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_s_P: Tensor, grad_t_B: Tensor) -> tuple[Tensor | None, ...]:
        x_BS, t_B, row_P, col_P = ctx.saved_tensors
        e_BS = (x_BS + t_B.unsqueeze(1)).abs_().neg_().exp_()
        v_BS = e_BS.div_((1 + e_BS).square_())  # sigmoid' from its small side: nothing cancels
        total_B1 = v_BS.sum(1, keepdim=True).clamp_min(torch.finfo(v_BS.dtype).tiny)
        grad_BS = v_BS.mul_(-grad_t_B.unsqueeze(1) / total_B1)
        grad_BS.index_put_((row_P, col_P), grad_s_P, accumulate=True)
        return grad_BS.to(ctx.dtype), None, None


def soft_topk(logit_BS: Tensor, pairs: Pairs, *, topk: int = 5) -> Tensor:
    """Soft top-k: `-log sigmoid(s_ip + t_i)`, t_i such that `sum_{l in L_B} sigmoid(s_il + t_i) = k`.

    A positive costs nothing once it is among the k labels that the row lets through, however they are ordered. Other
    positives stay in the sum. A row with k labels or fewer (ignored ones not counted) lets all of them through: its
    loss is 0.

    Source: DEXML (Gupta et al. 2024), soft top-k operator with a sigmoid, and cross entropy of the row's positives on
    it. Query to label only: k counts labels of a query.

    Args:
        topk: k, at least 1; the k of the P@k or R@k that matters.
    """
    s_P, t_B = _SoftTopK.apply(logit_BS, pairs, topk)
    loss_P = -F.logsigmoid(s_P + t_B[pairs.row_P])
    return mean_over_rows(loss_P, pairs.weight_P, pairs.row_P, logit_BS.shape[0])
