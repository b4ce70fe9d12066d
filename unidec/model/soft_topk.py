"""Soft top-k: a loss that is almost 0 for a positive within the top k of its row, at any rank.

Legend: B queries (rows), S pool labels (columns), P positive pairs in the pool, K the k highest
entries of a row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from unidec.model.pairs import (
    ALL_COLUMNS,
    MASKED,
    Columns,
    Pairs,
    loss_dtype,
    mask_,
    mean_over_rows,
    rows_at,
)

# Largest number of Newton steps. On a CPU they end once all rows have converged (after 3 to 5); on
# a GPU the host would have to wait for that.
STEPS = 12


def thresholds(x_BS: Tensor, k: int, columns: Columns = ALL_COLUMNS) -> Tensor:
    """The t of each row with `sum_j sigmoid(x_j + t) = k`, float [B]; -`MASKED` where at most k
    labels are unmasked.

    Solves the equivalent `log R(t) = log T(t)` by Newton steps inside a bracket, where R is the sum
    of sigmoid(x + t) over all entries but the k highest and T the sum of sigmoid(-x - t) over the k
    highest: it is nearly linear in t and subtracts no large numbers. Both sums also bound the
    solution.

    Args:
        x_BS: float32 or float64 [B, S], `MASKED` for entries that do not count; changed, and
            restored at the end.
        k: at least 1.
        columns: which of the pool's columns `x_BS` holds.
    """
    num_rows = x_BS.shape[0]
    num_cols = columns.total(x_BS.shape[1])
    if num_cols <= k:
        return x_BS.new_full((num_rows,), -MASKED)
    top_BK, next_B1, removed = columns.remove_top(x_BS, k)
    kth_B1 = top_BK[:, k - 1 :]
    # T exceeds R at `low`, and R exceeds T at `high`: bounds from the k-th and the next entry alone
    low_B1 = -kth_B1 - math.log(2 * num_cols)
    high_B1 = math.log(2 * k) - next_B1
    t_B1 = -(kth_B1 + next_B1) / 2
    # the error after a Newton step is about the step's square
    close = 0.5 * math.sqrt(torch.finfo(x_BS.dtype).eps)
    rest_BS = torch.empty_like(x_BS)
    for _ in range(STEPS):
        torch.add(x_BS, t_B1, out=rest_BS)
        torch.sigmoid(rest_BS, out=rest_BS)
        head_BK = torch.sigmoid(-(top_BK + t_B1))
        above_B1 = columns.sum(rest_BS.sum(1, keepdim=True))  # R
        below_B1 = head_BK.sum(1, keepdim=True)  # T
        low_B1 = torch.where(above_B1 < below_B1, t_B1, low_B1)
        high_B1 = torch.where(above_B1 < below_B1, high_B1, t_B1)
        norm_B1 = torch.linalg.vector_norm(rest_BS, dim=1, keepdim=True)
        squares_above_B1 = columns.sum(norm_B1.square())
        squares_below_B1 = head_BK.square().sum(1, keepdim=True)
        slope_B1 = 2 - squares_above_B1 / above_B1 - squares_below_B1 / below_B1
        next_t_B1 = t_B1 - (above_B1 / below_B1).log() / slope_B1
        # false for values that are not finite
        inside_B1 = (low_B1 <= next_t_B1) & (next_t_B1 <= high_B1)
        next_t_B1 = torch.where(inside_B1, next_t_B1, (low_B1 + high_B1) / 2)
        # both sums underflow where the gap between the k-th and the next entry is very wide: its
        # middle is the solution
        solved_B1 = (above_B1 == 0) & (below_B1 == 0)
        next_t_B1 = torch.where(solved_B1, t_B1, next_t_B1)
        solved_B1 |= inside_B1 & ((next_t_B1 - t_B1).abs() <= close)
        t_B1 = next_t_B1
        # several processes add up their sums in each step, so all take the same number of steps
        may_stop = x_BS.device.type == "cpu" and not columns.partial
        if may_stop and bool(solved_B1.all()):
            break
    x_BS.scatter_(1, *removed)
    has_more_B1 = next_B1 > MASKED / 2
    return t_B1.masked_fill(~has_more_B1, -MASKED).squeeze(1)


class _SoftTopK(torch.autograd.Function):
    """(s_P, t_B): positive logits and thresholds. The gradient of t follows from the implicit
    function theorem: `dt / dx_j = -v_j / sum v`, `v = sigmoid'(x + t)`."""

    @staticmethod
    def forward(
        ctx: Any, logit_BS: Tensor, pairs: Pairs, k: int, columns: Columns
    ) -> tuple[Tensor, Tensor]:
        row_P, col_P = pairs[:2]
        dtype = loss_dtype(logit_BS)
        s_P = logit_BS[row_P, col_P].to(dtype)
        x_BS = mask_(logit_BS.to(dtype, copy=True), *pairs.masked("softtopk"))
        t_B = thresholds(x_BS, k, columns)
        ctx.save_for_backward(x_BS, t_B, row_P, col_P)
        ctx.dtype = logit_BS.dtype
        ctx.columns = columns
        return s_P, t_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_s_P: Tensor, grad_t_B: Tensor) -> tuple[Tensor | None, ...]:
        x_BS, t_B, row_P, col_P = ctx.saved_tensors
        e_BS = (x_BS + t_B.unsqueeze(1)).abs_().neg_().exp_()
        v_BS = e_BS.div_((1 + e_BS).square_())  # sigmoid' from exp(-|x + t|), without cancellation
        total_B1 = ctx.columns.sum(v_BS.sum(1, keepdim=True))
        total_B1 = total_B1.clamp_min(torch.finfo(v_BS.dtype).tiny)
        grad_BS = v_BS.mul_(-grad_t_B.unsqueeze(1) / total_B1)
        grad_BS.index_put_((row_P, col_P), grad_s_P, accumulate=True)
        return grad_BS.to(ctx.dtype), None, None, None


def soft_topk(
    logit_BS: Tensor, pairs: Pairs, *, topk: int = 5, columns: Columns = ALL_COLUMNS
) -> Tensor:
    """Soft top-k: `-log sigmoid(s_ip + t_i)`, t_i such that `sum_{l in L_B} sigmoid(s_il + t_i) =
    k`.

    A positive within the top k of its row has almost no loss, at any rank there. Other positives
    stay in the sum. The loss of a row with at most k labels (without ignored ones) is 0.

    Source: DEXML (Gupta et al. 2024), soft top-k operator with a sigmoid, and cross entropy of the
    row's positives on it. Query to label only: k counts labels of a query.

    Args:
        topk: k, at least 1; usually the k of the P@k or R@k to improve.
        columns: which of the pool's columns `logit_BS` holds.
    """
    s_P, t_B = _SoftTopK.apply(logit_BS, columns.own(pairs), topk, columns)
    loss_P = -F.logsigmoid(columns.of_all_pairs(s_P) + rows_at(t_B, pairs.row_P))
    return mean_over_rows(loss_P, pairs, logit_BS.shape[0])
