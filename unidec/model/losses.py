"""Losses on the logits of a pool, and how all are applied: decoupled softmax, SupCon / InfoNCE, binary cross entropy,
triplet, squared hinge, soft top-k. BCE over all labels without the logits is in `unidec.model.full_bce`.

Legend: B queries (rows), S pool labels (columns), P positive pairs in the pool, F ignored pairs (filter pairs), M
masked pairs, K the k highest entries of a row.

Common contract of the functions in `LOSSES`:
- `logit_BS`: float [B, S], similarity / temperature; half precision is computed in float32.
- result: 0-d float32 (float64 for float64 logits), `sum_P weight * loss / number of rows with positive total weight`.
  With no such row it is exactly 0, with a graph and finite gradients.

Positives are sparse and the only dense things are the logits and their exponentials: no P x S, no B x S mask. Nothing
waits for the device. The softmax family reads the logits once for both directions: on a CPU each pass over B x S costs
as much as a tenth of the matrix product that made it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from unidec.model.pairs import (
    ALL_COLUMNS,
    MASKED,
    Columns,
    Pairs,
    PoolTargets,
    entry_count,
    loss_dtype,
    mask_,
    mean_over_rows,
    rows_at,
    target_weights,
)
from unidec.sections import Loss

BLOCK = 1 << 22  # entries of the largest temporary of a triplet loss, 16 MB of float32
# Newton's steps of soft top-k at most; a CPU sees when all rows have converged (3 to 5), a GPU's host would wait
STEPS = 12
# of a loss: its share, whether it is query -> label, and the pairs of the logits (else of their transpose)
Direction = tuple[float, bool, Pairs]


class _PoolTerms(torch.autograd.Function):
    """(s_P, lse_B, lse_S): positive logits, and logsumexp over the unmasked entries of each row and of each column.

    A row (column) without an unmasked entry has lse of about -1e30. A direction that is not wanted comes back empty.
    """

    @staticmethod
    def forward(
        ctx: Any, logit_BS: Tensor, pairs: Pairs, kind: str, rows: bool, columns: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, row_P, col_P = loss_dtype(logit_BS), pairs.row_P, pairs.col_P
        s_P = logit_BS[row_P, col_P].to(dtype)
        x_BS = mask_(logit_BS.to(dtype, copy=True), *pairs.masked(kind))
        sums: list[Tensor | None] = [None, None]
        exps: list[Tensor | None] = [None, None]
        lses = [s_P.new_empty(0), s_P.new_empty(0)]
        wanted = [dim for dim, want in ((1, rows), (0, columns)) if want]
        for dim in wanted:
            size = x_BS.shape[dim]
            if size == 0:
                lses[1 - dim] = s_P.new_full((x_BS.shape[1 - dim],), MASKED)
                continue
            top = x_BS.amax(dim, keepdim=True)
            # The last direction may overwrite the copy.
            exp_BS = (x_BS.sub_(top) if dim == wanted[-1] else x_BS - top).exp_()
            total = exp_BS.sum(dim, keepdim=True)
            lses[1 - dim] = (top + total.log()).squeeze(dim)
            exps[1 - dim], sums[1 - dim] = exp_BS, total
        ctx.save_for_backward(row_P, col_P, exps[0], sums[0], exps[1], sums[1])
        ctx.shape, ctx.dtype = logit_BS.shape, logit_BS.dtype
        return s_P, lses[0], lses[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_s_P: Tensor, grad_lse_B: Tensor, grad_lse_S: Tensor) -> tuple[Tensor | None, ...]:
        row_P, col_P, exp_row_BS, sum_B1, exp_col_BS, sum_1S = ctx.saved_tensors
        grad_BS = None
        if exp_row_BS is not None:
            grad_BS = exp_row_BS * (grad_lse_B.unsqueeze(1) / sum_B1)
        if exp_col_BS is not None:
            scale_1S = grad_lse_S.unsqueeze(0) / sum_1S
            grad_BS = exp_col_BS * scale_1S if grad_BS is None else grad_BS.addcmul_(exp_col_BS, scale_1S)
        if grad_BS is None:
            grad_BS = grad_s_P.new_zeros(ctx.shape)
        grad_BS.index_put_((row_P, col_P), grad_s_P, accumulate=True)
        return grad_BS.to(ctx.dtype), None, None, None, None


def _softmax_loss(
    kind: str, logit_BS: Tensor, directions: Sequence[Direction], columns: Columns = ALL_COLUMNS
) -> Tensor:
    """Sum over directions; the logits are read once for both."""
    _, is_forward, pairs = directions[0]
    wanted = [each[1] for each in directions]
    own = columns.own(pairs if is_forward else pairs.t())
    s_P, lse_B, lse_S = _PoolTerms.apply(logit_BS, own, kind, True in wanted, False in wanted)
    s_P = columns.of_all_pairs(s_P)
    losses = []
    for share, is_forward, pairs in directions:
        if is_forward:
            num_rows, lse_P = logit_BS.shape[0], rows_at(columns.logsumexp(lse_B), pairs.row_P)
        else:
            num_rows, lse_P = columns.total(logit_BS.shape[1]), columns.of_all_pairs(rows_at(lse_S, own.col_P))
        # ds: -log(e^s / (e^s + sum over negatives)) = softplus(lse - s); logsigmoid is exact at both ends.
        loss_P = -F.logsigmoid(s_P - lse_P) if kind == "ds" else lse_P - s_P
        losses.append(share * mean_over_rows(loss_P, pairs.weight_P, pairs.row_P, num_rows))
    return sum(losses[1:], losses[0])


def decoupled_softmax(logit_BS: Tensor, pairs: Pairs) -> Tensor:
    """Decoupled softmax: `-log( exp(s_ip) / sum_{l in L_B minus the other positives of i} exp(s_il) )`.

    Source: UniDEC v2, L_DecoupledSoftmax (section 2.4.2); DEXML, equation of the decoupled softmax. A row whose whole
    pool is positive has no negatives: its loss is 0.

    Example:
        >>> one = torch.tensor([0])
        >>> none = torch.empty(0, dtype=torch.int64)
        >>> decoupled_softmax(torch.zeros(1, 2), Pairs(one, one, torch.ones(1), none, none))  # log 2
        tensor(0.6931)
    """
    return _softmax_loss("ds", logit_BS, [(1.0, True, pairs)])


def supcon(logit_BS: Tensor, pairs: Pairs) -> Tensor:
    """SupCon: `-log( exp(s_ip) / sum_{l in L_B} exp(s_il) )`; other positives stay in the denominator.

    Source: UniDEC v1, L_{D,q2l}; v2, L_SupCon. With the reduction "pol" it is InfoNCE (DPR, ANCE).
    """
    return _softmax_loss("supcon", logit_BS, [(1.0, True, pairs)])


class _BinaryRows(torch.autograd.Function):
    """sum over rows of `active_B * sum over unmasked entries of softplus(x)` - sum over pairs of `target * x` (active
    rows), + sum over pairs of `extra * softplus(-x)` where there is an extra.
    """

    @staticmethod
    def forward(ctx: Any, logit_BS: Tensor, pairs: Pairs, active_B: Tensor, extra_P: Tensor | None) -> Tensor:
        row_P, col_P, target_P, *ignored = pairs
        # softplus and sigmoid of the mask are exactly 0
        x_BS = mask_(logit_BS.to(target_P.dtype, copy=True), *ignored)
        x_P = x_BS[row_P, col_P]
        positive = (target_P * x_P).sum()
        if extra_P is not None:
            positive = positive - (extra_P * F.softplus(-x_P)).sum()
        ctx.save_for_backward(x_BS, row_P, col_P, target_P, active_B, extra_P)
        ctx.dtype = logit_BS.dtype
        return (F.softplus(x_BS).sum(1) * active_B).sum() - positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_BS, row_P, col_P, target_P, active_B, extra_P = ctx.saved_tensors
        grad_BS = torch.sigmoid(x_BS).mul_((active_B * grad).unsqueeze(1))
        pull_P = target_P if extra_P is None else target_P + extra_P * torch.sigmoid(-x_BS[row_P, col_P])
        grad_BS.index_put_((row_P, col_P), -pull_P * grad, accumulate=True)
        return grad_BS.to(ctx.dtype), None, None, None


def bce(
    logit_BS: Tensor,
    pairs: Pairs,
    *,
    normalise: str = "rows",
    importance_P: Tensor | None = None,
    columns: Columns = ALL_COLUMNS,
) -> Tensor:
    """OvA binary cross entropy on each (query, pool label) entry; `pairs.weight_P` are the targets in [0, 1]
    (clipped), 0 elsewhere.

    Source: UniDEC v1, L_OvA, a sum over labels; Renee; as the classifier's auxiliary loss: UniDEC v2, section 2.4.2.
    No reduction applies. A query without a positive target in the pool drops out, as it does from the other losses.

    Args:
        normalise: "rows": sum over the pool, mean over the queries that take part (the equation). "entries": mean
            over the entries of those queries, ignored ones not counted: some |pool| times smaller, comparable to a
            softmax loss at the start of training.
        importance_P: float [P], factor of each pair's positive side, `target * importance * softplus(-x)`; None: 1.
            With inverse propensities these are the weighted positives of Jain et al. 2016 and Qaraei et al. 2021; what
            is not relevant keeps weight 1, so nothing is rescaled.
        columns: which of the pool's columns the logits are.
    """
    pairs = pairs._replace(weight_P=pairs.weight_P.to(loss_dtype(logit_BS)).clamp(0, 1))
    shape = (logit_BS.shape[0], columns.total(logit_BS.shape[1]))
    active_B, count = entry_count(pairs.weight_P, pairs.row_P, shape, pairs.row_F, normalise)
    extra_P = None
    if importance_P is not None:
        extra_P = columns.own_values((importance_P.to(pairs.weight_P.dtype) - 1) * pairs.weight_P)
    return columns.sum(_BinaryRows.apply(logit_BS, columns.own(pairs), active_B, extra_P)) / count


def _hinges(x_BS: Tensor, s_P: Tensor, row_P: Tensor, weight_P: Tensor, margin: float) -> Tensor:
    """sum_P weight_P * sum_{negatives n of the row} [s_n - s_p + margin]_+ of some pairs."""
    over_PS = F.relu(rows_at(x_BS, row_P) - (s_P - margin).unsqueeze(1))
    return (over_PS.sum(1) * weight_P).sum()


def triplet(logit_BS: Tensor, pairs: Pairs, *, margin: float = 0.3, negatives: str = "all", top: int = 1) -> Tensor:
    """Triplet with margin: `[s_in - s_ip + gamma]_+`, n among the pool labels that are neither positive nor ignored
    for i.

    Source: NGAME; UniDEC v1, L_Triplet (a sum over negatives, not a mean).

    Args:
        logit_BS: the similarities themselves, not divided by a temperature, so that `margin` is in cosine units.
        margin: gamma.
        negatives: "all": sum over the negatives; "hardest": mean over the `top` negatives with the highest similarity;
            "softmax": the same, each weighted by a softmax over them of their similarities / 0.1, where one that keeps
            the margin counts as similarity 0 (NGAME's published code).
        top: how many are the hardest; where a pool has fewer negatives, the missing ones count 0.
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
    if x_BS.shape[1] == 0:
        return x_BS.sum()
    other_BS = mask_(x_BS.clone(), *pairs.masked("ds"))
    other_PK = rows_at(other_BS.topk(min(top, x_BS.shape[1]), dim=1).values, row_P)
    hinge_PK = F.relu(other_PK - x_BS[row_P, pairs.col_P].unsqueeze(1) + margin)
    if negatives == "softmax":
        hinge_PK = hinge_PK * (other_PK / NGAME_TAU * (hinge_PK > 0)).softmax(dim=1)
    loss_P = hinge_PK.sum(dim=1) / top
    return mean_over_rows(loss_P, weight_P, row_P, x_BS.shape[0])


def squared_hinge(
    logit_BS: Tensor,
    pairs: Pairs,
    *,
    margin: float = 1.0,
    normalise: str = "rows",
    importance_P: Tensor | None = None,
    columns: Columns = ALL_COLUMNS,
) -> Tensor:
    """Squared hinge one-vs-all: `sum_l [margin - y_il s_il]_+^2`, y = 1 for positives, -1 for the other pool labels.

    Source: one-vs-all linear classifiers (DiSMEC, Parabel); SiameseXML's alternative to the logistic loss. No reduction
    applies. A soft target weighs the two sides, as in `bce`, which also explains the
    arguments. A query without a positive target in the pool drops out.

    Args:
        logit_BS: the scores themselves, not divided by a temperature, so that `margin` is in their units.
        margin: 1 for free scores; below 1 for cosines.
        normalise: "rows" or "entries", as in `bce`.
        importance_P: float [P], factor of each pair's positive side; None: 1.
        columns: which of the pool's columns the logits are.
    """
    pairs = pairs._replace(weight_P=pairs.weight_P.to(loss_dtype(logit_BS)).clamp(0, 1))
    up_P = torch.ones_like(pairs.weight_P) if importance_P is None else importance_P.to(pairs.weight_P.dtype)
    shape = (logit_BS.shape[0], columns.total(logit_BS.shape[1]))
    active_B, count = entry_count(pairs.weight_P, pairs.row_P, shape, pairs.row_F, normalise)
    pairs, up_P = columns.own(pairs), columns.own_values(up_P)
    x_BS = mask_(logit_BS.to(pairs.weight_P.dtype, copy=True), pairs.row_F, pairs.col_F)
    x_P = x_BS[pairs.row_P, pairs.col_P]
    every = ((x_BS + margin).clamp_min(0).square().sum(1) * active_B).sum()  # the mask's share is exactly 0
    instead_P = up_P * (margin - x_P).clamp_min(0).square() - (x_P + margin).clamp_min(0).square()
    return columns.sum(every + (pairs.weight_P * instead_P).sum()) / count


def thresholds(x_BS: Tensor, k: int, columns: Columns = ALL_COLUMNS) -> Tensor:
    """t of each row with `sum_j sigmoid(x_j + t) = k`, float [B]; -`MASKED` where k labels or fewer are unmasked.

    Solved as `log R(t) = log T(t)`, R the sum of sigmoid(x + t) over all but the k highest entries, T the sum of
    sigmoid(-x - t) over those: the same equation without the difference of large numbers, nearly linear in t, by
    Newton's steps inside a bracket that both sums give.

    Args:
        x_BS: float32 or float64 [B, S], `MASKED` where an entry takes no part; changed and restored.
        k: at least 1.
        columns: which columns these are.
    """
    num_rows, num_cols = x_BS.shape[0], columns.total(x_BS.shape[1])
    if num_cols <= k:
        return x_BS.new_full((num_rows,), -MASKED)
    top_BK, next_B1, removed = columns.remove_top(x_BS, k)
    # at `low` T exceeds R, at `high` R exceeds T: bounds by the k-th and the next entry alone
    low_B1, high_B1 = -top_BK[:, k - 1 :] - math.log(2 * num_cols), math.log(2 * k) - next_B1
    t_B1 = -(top_BK[:, k - 1 :] + next_B1) / 2
    close = 0.5 * math.sqrt(torch.finfo(x_BS.dtype).eps)  # a Newton's step of this length leaves its square to go
    rest_BS = torch.empty_like(x_BS)
    for _ in range(STEPS):
        torch.sigmoid(torch.add(x_BS, t_B1, out=rest_BS), out=rest_BS)
        head_BK = torch.sigmoid(-(top_BK + t_B1))
        above_B1, below_B1 = columns.sum(rest_BS.sum(1, keepdim=True)), head_BK.sum(1, keepdim=True)
        low_B1, high_B1 = (
            torch.where(above_B1 < below_B1, t_B1, low_B1),
            torch.where(above_B1 < below_B1, high_B1, t_B1),
        )
        squares_B1 = columns.sum(torch.linalg.vector_norm(rest_BS, dim=1, keepdim=True).square())
        slope_B1 = 2 - squares_B1 / above_B1 - head_BK.square().sum(1, keepdim=True) / below_B1
        next_t_B1 = t_B1 - (above_B1 / below_B1).log() / slope_B1
        inside_B1 = (low_B1 <= next_t_B1) & (next_t_B1 <= high_B1)  # false for what is not finite
        next_t_B1 = torch.where(inside_B1, next_t_B1, (low_B1 + high_B1) / 2)
        # both sums underflow where the gap is wider than the exponent's range: its middle is the solution
        solved_B1 = (above_B1 == 0) & (below_B1 == 0)
        next_t_B1 = torch.where(solved_B1, t_B1, next_t_B1)
        solved_B1 |= inside_B1 & ((next_t_B1 - t_B1).abs() <= close)
        t_B1 = next_t_B1
        # processes that add up together take the same number of steps
        if x_BS.device.type == "cpu" and not columns.partial and bool(solved_B1.all()):
            break
    x_BS.scatter_(1, *removed)
    return torch.where(next_B1 > MASKED / 2, t_B1, torch.full_like(t_B1, -MASKED)).squeeze(1)


class _SoftTopK(torch.autograd.Function):
    """(s_P, t_B): positive logits, and the thresholds. The gradient of t is that of the implicit function:
    `dt / dx_j = -v_j / sum v`, `v = sigmoid'(x + t)`.
    """

    @staticmethod
    def forward(ctx: Any, logit_BS: Tensor, pairs: Pairs, k: int, columns: Columns) -> tuple[Tensor, Tensor]:
        row_P, col_P, _, *ignored = pairs
        dtype = loss_dtype(logit_BS)
        s_P = logit_BS[row_P, col_P].to(dtype)
        x_BS = mask_(logit_BS.to(dtype, copy=True), *ignored)
        t_B = thresholds(x_BS, k, columns)
        ctx.save_for_backward(x_BS, t_B, row_P, col_P)
        ctx.dtype, ctx.columns = logit_BS.dtype, columns
        return s_P, t_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_s_P: Tensor, grad_t_B: Tensor) -> tuple[Tensor | None, ...]:
        x_BS, t_B, row_P, col_P = ctx.saved_tensors
        e_BS = (x_BS + t_B.unsqueeze(1)).abs_().neg_().exp_()
        v_BS = e_BS.div_((1 + e_BS).square_())  # sigmoid' from its small side: nothing cancels
        total_B1 = ctx.columns.sum(v_BS.sum(1, keepdim=True)).clamp_min(torch.finfo(v_BS.dtype).tiny)
        grad_BS = v_BS.mul_(-grad_t_B.unsqueeze(1) / total_B1)
        grad_BS.index_put_((row_P, col_P), grad_s_P, accumulate=True)
        return grad_BS.to(ctx.dtype), None, None, None


def soft_topk(logit_BS: Tensor, pairs: Pairs, *, topk: int = 5, columns: Columns = ALL_COLUMNS) -> Tensor:
    """Soft top-k: `-log sigmoid(s_ip + t_i)`, t_i such that `sum_{l in L_B} sigmoid(s_il + t_i) = k`.

    A positive costs nothing once it is among the k labels that the row lets through, however they are ordered. Other
    positives stay in the sum. A row with k labels or fewer (ignored ones not counted) lets all of them through: its
    loss is 0.

    Source: DEXML (Gupta et al. 2024), soft top-k operator with a sigmoid, and cross entropy of the row's positives on
    it. Query to label only: k counts labels of a query.

    Args:
        topk: k, at least 1; the k of the P@k or R@k that matters.
        columns: which of the pool's columns the logits are.
    """
    s_P, t_B = _SoftTopK.apply(logit_BS, columns.own(pairs), topk, columns)
    loss_P = -F.logsigmoid(columns.of_all_pairs(s_P) + rows_at(t_B, pairs.row_P))
    return mean_over_rows(loss_P, pairs.weight_P, pairs.row_P, logit_BS.shape[0])


LOSSES: dict[str, Callable[..., Tensor]] = {
    "ds": decoupled_softmax,
    "supcon": supcon,
    "infonce": supcon,
    "triplet": triplet,
    "bce": bce,
    "hinge": squared_hinge,
    "softtopk": soft_topk,
}
SOFTMAX = frozenset({"ds", "supcon", "infonce"})  # read the logits once for both directions
ENTRYWISE = frozenset({"bce", "hinge"})  # a term for each entry: no direction, no reduction
NGAME_TAU = 0.1  # temperature of the softmax over a triplet's negatives, in NGAME's published code
BY_COLUMNS = SOFTMAX | ENTRYWISE | {"softtopk"}  # several processes may have a part of the columns each
UNSCALED = frozenset({"triplet", "hinge"})  # a margin in units of the similarities: not divided by a temperature


def loss_options(kind: str, settings: Loss) -> dict[str, Any]:
    """A loss's own options, from section `loss`."""
    of = settings
    every: dict[str, dict[str, Any]] = {
        "triplet": {"margin": of.margin, "negatives": of.triplet_negatives, "top": of.triplet_top},
        "hinge": {"margin": of.margin, "normalise": of.bce_normalise},
        "bce": {"normalise": of.bce_normalise},
        "softtopk": {"topk": of.topk},
    }
    return every.get(kind, {})


def symmetric_loss(
    kind: str,
    logit_BS: Tensor,
    targets: PoolTargets,
    *,
    reduction: str,
    forward: float,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Tensor:
    """`forward * loss(query -> label) + (1 - forward) * loss(label -> query)` (UniDEC, L_D and L_C with lambda_D,
    lambda_C).

    The second runs on the transpose: rows are pool labels, P^l = the batch's queries that have l; "pal-n" has no
    |P_l| to divide by beyond the batch and counts P^l, like "psl". A direction of weight 0 is not computed.

    `bce` and `hinge` are sums over entries and have no direction: they are computed once, whatever `forward`, their
    targets the relevances. `softtopk` counts a query's labels and has query -> label only.

    With `targets.importance_P` the losses are propensity-weighted (Jain et al. 2016). Entry by entry (bce, hinge) the
    positive side of a pair counts its label's inverse propensity. Else the pair's weight does, query -> label, rescaled
    (`target_weights`): learning rates and the balance of the heads keep their meaning.

    Args:
        kind: a key of `LOSSES`; options: its own, of `loss_options`.
        reduction: one of `unidec.model.pairs.REDUCTIONS`; generator: for "pol".
        forward: weight of query -> label, 0 to 1.
    """
    shape = (logit_BS.shape[0], targets.columns.total(logit_BS.shape[1]))
    if kind in BY_COLUMNS:
        options["columns"] = targets.columns
    if kind in ENTRYWISE:
        return LOSSES[kind](logit_BS, targets.pairs(targets.relevance_P), importance_P=targets.importance_P, **options)
    directions: list[Direction] = []
    for share, is_forward in ((forward, True), (1 - forward, False)):
        if share > 0:
            given, rows = (targets, 0) if is_forward else (targets.t(shape[1]), 1)
            pairs = given.pairs(target_weights(reduction, given, shape[rows], generator))
            directions.append((share, is_forward, pairs))
    if kind in SOFTMAX:
        return _softmax_loss(kind, logit_BS, directions, **options)
    losses = [
        share * LOSSES[kind](logit_BS if is_forward else logit_BS.t(), pairs, **options)
        for share, is_forward, pairs in directions
    ]
    return sum(losses[1:], losses[0])
