"""Losses on the logits of a pool: decoupled softmax, SupCon / InfoNCE, binary cross entropy,
triplet, squared hinge, soft top-k; `symmetric_loss` applies any of them in both directions. BCE
over all labels without logits in memory is in `unidec.model.full_bce`.

Legend: B queries (rows), S pool labels (columns), P positive pairs in the pool, F ignored pairs
(filter pairs), M
masked pairs, K the k highest entries of a row.

Common contract of the functions in `LOSSES`:
- `logit_BS`: float [B, S], similarity / temperature; half precision is converted to float32.
- result: 0-d float32 (float64 for float64 logits), `sum_P weight * loss / number of rows with
  positive total weight`. With no such row it is exactly 0, with a graph and finite gradients.

Positives are sparse, and only the logits and their exponentials are dense: there are no P x S
tensors and no B x S
masks. Nothing waits for the device. The softmax family reads the logits once for both directions:
on a CPU each pass over B x S costs a tenth of the matrix product that computed the logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from unidec.config import Loss
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

BLOCK = 1 << 22  # entries of the largest temporary of a triplet loss, 16 MB of float32
# Largest number of Newton steps of soft top-k. On a CPU they end once all rows have converged
# (after 3 to 5); on a GPU the host would have to wait for that.
STEPS = 12
# a direction's share of a loss, whether it is query -> label, and the pairs (of the transposed
# logits if it is not)
Direction = tuple[float, bool, Pairs]


class _PoolTerms(torch.autograd.Function):
    """(s_P, lse_B, lse_S): positive logits, and logsumexp over the unmasked entries of each row and
    of each column.

    For a row (column) without an unmasked entry lse is about -1e30. lse_B is empty without `rows`,
    lse_S without `columns`."""

    @staticmethod
    def forward(
        ctx: Any, logit_BS: Tensor, pairs: Pairs, kind: str, rows: bool, columns: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = loss_dtype(logit_BS)
        row_P = pairs.row_P
        col_P = pairs.col_P
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
            # the last direction may overwrite the copy of the logits
            exp_BS = (x_BS.sub_(top) if dim == wanted[-1] else x_BS - top).exp_()
            total = exp_BS.sum(dim, keepdim=True)
            lses[1 - dim] = (top + total.log()).squeeze(dim)
            exps[1 - dim], sums[1 - dim] = exp_BS, total
        ctx.save_for_backward(row_P, col_P, exps[0], sums[0], exps[1], sums[1])
        ctx.shape = logit_BS.shape
        ctx.dtype = logit_BS.dtype
        return s_P, lses[0], lses[1]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_s_P: Tensor, grad_lse_B: Tensor, grad_lse_S: Tensor
    ) -> tuple[Tensor | None, ...]:
        row_P, col_P, exp_row_BS, sum_B1, exp_col_BS, sum_1S = ctx.saved_tensors
        grad_BS = None
        if exp_row_BS is not None:
            grad_BS = exp_row_BS * (grad_lse_B.unsqueeze(1) / sum_B1)
        if exp_col_BS is not None:
            scale_1S = grad_lse_S.unsqueeze(0) / sum_1S
            grad_BS = (
                exp_col_BS * scale_1S if grad_BS is None else grad_BS.addcmul_(exp_col_BS, scale_1S)
            )
        if grad_BS is None:
            grad_BS = grad_s_P.new_zeros(ctx.shape)
        grad_BS.index_put_((row_P, col_P), grad_s_P, accumulate=True)
        return grad_BS.to(ctx.dtype), None, None, None, None


def _softmax_loss(
    kind: str, logit_BS: Tensor, directions: Sequence[Direction], columns: Columns = ALL_COLUMNS
) -> Tensor:
    """Weighted sum of a softmax loss over directions; the logits are read once for both."""
    _, is_forward, pairs = directions[0]
    wanted = [forward for _, forward, _ in directions]
    own = columns.own(pairs if is_forward else pairs.t())
    s_P, lse_B, lse_S = _PoolTerms.apply(logit_BS, own, kind, True in wanted, False in wanted)
    s_P = columns.of_all_pairs(s_P)
    losses = []
    for share, is_forward, pairs in directions:
        if is_forward:
            num_rows = logit_BS.shape[0]
            lse_P = rows_at(columns.logsumexp(lse_B), pairs.row_P)
        else:
            num_rows = columns.total(logit_BS.shape[1])
            lse_P = columns.of_all_pairs(rows_at(lse_S, own.col_P))
        # ds: -log(e^s / (e^s + sum over negatives)) = softplus(lse - s); logsigmoid is exact at
        # both extremes
        loss_P = -F.logsigmoid(s_P - lse_P) if kind == "ds" else lse_P - s_P
        losses.append(share * mean_over_rows(loss_P, pairs.weight_P, pairs.row_P, num_rows))
    return sum(losses[1:], losses[0])


def decoupled_softmax(logit_BS: Tensor, pairs: Pairs) -> Tensor:
    """Decoupled softmax: `-log( exp(s_ip) / sum_{l in L_B minus the other positives of i} exp(s_il)
    )`.

    Source: UniDEC v2, L_DecoupledSoftmax (section 2.4.2); DEXML, equation of the decoupled softmax.
    The loss of a row
    without negatives (all pool labels are positive) is 0.

    Example:
        >>> one = torch.tensor([0])
        >>> none = torch.empty(0, dtype=torch.int64)
        >>> decoupled_softmax(torch.zeros(1, 2), Pairs(one, one, torch.ones(1), none, none))  # log
        2 tensor(0.6931)
    """
    return _softmax_loss("ds", logit_BS, [(1.0, True, pairs)])


def supcon(logit_BS: Tensor, pairs: Pairs) -> Tensor:
    """SupCon: `-log( exp(s_ip) / sum_{l in L_B} exp(s_il) )`; other positives stay in the
    denominator.

    Source: UniDEC v1, L_{D,q2l}; v2, L_SupCon. With the reduction "pol" it is InfoNCE (DPR, ANCE).
    """
    return _softmax_loss("supcon", logit_BS, [(1.0, True, pairs)])


class _BinaryRows(torch.autograd.Function):
    """Binary cross entropy, 0-d: the sum over rows of `active_B * (sum over unmasked entries of
    softplus(x))`, minus the sum over positive pairs of `target * x`, plus with `extra_P` the sum
    over them of `extra * softplus(-x)`."""

    @staticmethod
    def forward(
        ctx: Any, logit_BS: Tensor, pairs: Pairs, active_B: Tensor, extra_P: Tensor | None
    ) -> Tensor:
        row_P, col_P, target_P, *ignored = pairs
        # softplus and sigmoid of `MASKED` are exactly 0
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
        pull_P = (
            target_P if extra_P is None else target_P + extra_P * torch.sigmoid(-x_BS[row_P, col_P])
        )
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
    """OvA binary cross entropy of each (query, pool label) entry. The targets are `pairs.weight_P`,
    clipped to [0, 1], and 0 for all other entries.

    Source: UniDEC v1, L_OvA, a sum over labels; Renee; as the classifier's auxiliary loss: UniDEC
    v2, section 2.4.2.
    No reduction applies. A query without a positive target in the pool is left out, as in the other
    losses.

    Args:
        normalise: "rows": sum over the pool, mean over the queries with a positive target (the
            equation). "entries": mean over the entries of those queries without ignored ones:
            smaller by a factor of about |pool|, comparable to a softmax loss at the start of
            training.
        importance_P: float [P], factor of each pair's positive term, `target * importance *
            softplus(-x)`; None: 1. With inverse propensities these are the weighted positives of
            Jain et al. 2016 and Qaraei et al. 2021; negatives keep weight 1, and nothing is
            rescaled.
        columns: which of the pool's columns `logit_BS` holds.
    """
    pairs = pairs._replace(weight_P=pairs.weight_P.to(loss_dtype(logit_BS)).clamp(0, 1))
    shape = (logit_BS.shape[0], columns.total(logit_BS.shape[1]))
    active_B, count = entry_count(pairs.weight_P, pairs.row_P, shape, pairs.row_F, normalise)
    extra_P = None
    if importance_P is not None:
        extra_P = columns.own_values((importance_P.to(pairs.weight_P.dtype) - 1) * pairs.weight_P)
    return columns.sum(_BinaryRows.apply(logit_BS, columns.own(pairs), active_B, extra_P)) / count


def _hinges(x_BS: Tensor, s_P: Tensor, row_P: Tensor, weight_P: Tensor, margin: float) -> Tensor:
    """Sum over some pairs of `weight_P * sum_{negatives n of the row} [s_n - s_p +
    margin]_+`, 0-d.
    """
    over_PS = F.relu(rows_at(x_BS, row_P) - (s_P - margin).unsqueeze(1))
    return (over_PS.sum(1) * weight_P).sum()


def triplet(
    logit_BS: Tensor, pairs: Pairs, *, margin: float = 0.3, negatives: str = "all", top: int = 1
) -> Tensor:
    """Triplet loss with margin: `[s_in - s_ip + gamma]_+`, where n is a pool label that is neither
    positive nor ignored for i.

    Source: NGAME; UniDEC v1, L_Triplet (a sum over negatives, not a mean).

    Args:
        logit_BS: similarities, not divided by a temperature, so that `margin` is in cosine units.
        margin: gamma.
        negatives: "all": sum over the negatives; "hardest": mean over the `top` negatives with the
            highest similarity; "softmax": as "hardest", each negative weighted by the softmax of
            their similarities / 0.1, in which negatives without a loss (the margin is kept) have
            similarity 0 (NGAME's published code).
        top: number of hardest negatives; where the pool has fewer, the missing ones count as loss
        0.
    """
    x_BS = logit_BS.to(loss_dtype(logit_BS))
    row_P = pairs.row_P
    weight_P = pairs.weight_P.to(x_BS.dtype)
    if negatives == "all":
        s_P = x_BS[row_P, pairs.col_P]
        other_BS = mask_(x_BS.clone(), *pairs.masked("ds"))
        step = max(1, BLOCK // max(x_BS.shape[1], 1))
        total = s_P.sum() * 0
        # backward computes each block again: its [P, S] is not kept
        for begin in range(0, row_P.shape[0], step):
            part = slice(begin, begin + step)
            total = total + checkpoint(
                _hinges,
                other_BS,
                s_P[part],
                row_P[part],
                weight_P[part],
                margin,
                use_reentrant=False,
                preserve_rng_state=False,
            )
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
    """Squared hinge one-vs-all: `sum_l [margin - y_il s_il]_+^2`, y = 1 for positives, -1 for the
    other pool labels.

    Source: one-vs-all linear classifiers (DiSMEC, Parabel); SiameseXML's alternative to the
    logistic loss. No reduction
    applies. A soft target y weights the positive term by y and the negative one by 1 - y, as in
    `bce`. A query without a positive target in the pool is left out.

    Args:
        logit_BS: scores, not divided by a temperature, so that `margin` is in their units.
        margin: 1 for unbounded scores; below 1 for cosines.
        normalise: "rows" or "entries", as in `bce`.
        importance_P: float [P], factor of each pair's positive term; None: 1.
        columns: which of the pool's columns `logit_BS` holds.
    """
    pairs = pairs._replace(weight_P=pairs.weight_P.to(loss_dtype(logit_BS)).clamp(0, 1))
    up_P = (
        torch.ones_like(pairs.weight_P)
        if importance_P is None
        else importance_P.to(pairs.weight_P.dtype)
    )
    shape = (logit_BS.shape[0], columns.total(logit_BS.shape[1]))
    active_B, count = entry_count(pairs.weight_P, pairs.row_P, shape, pairs.row_F, normalise)
    pairs = columns.own(pairs)
    up_P = columns.own_values(up_P)
    x_BS = mask_(logit_BS.to(pairs.weight_P.dtype, copy=True), pairs.row_F, pairs.col_F)
    x_P = x_BS[pairs.row_P, pairs.col_P]
    # all entries as negatives, masked ones exactly 0; then positives replace their negative term
    negative = ((x_BS + margin).clamp_min(0).square().sum(1) * active_B).sum()
    change_P = up_P * (margin - x_P).clamp_min(0).square() - (x_P + margin).clamp_min(0).square()
    return columns.sum(negative + (pairs.weight_P * change_P).sum()) / count


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
    # T exceeds R at `low`, and R exceeds T at `high`: bounds from the k-th and the next entry alone
    low_B1 = -top_BK[:, k - 1 :] - math.log(2 * num_cols)
    high_B1 = math.log(2 * k) - next_B1
    t_B1 = -(top_BK[:, k - 1 :] + next_B1) / 2
    # the error after a Newton step is about the step's square
    close = 0.5 * math.sqrt(torch.finfo(x_BS.dtype).eps)
    rest_BS = torch.empty_like(x_BS)
    for _ in range(STEPS):
        torch.sigmoid(torch.add(x_BS, t_B1, out=rest_BS), out=rest_BS)
        head_BK = torch.sigmoid(-(top_BK + t_B1))
        above_B1 = columns.sum(rest_BS.sum(1, keepdim=True))
        below_B1 = head_BK.sum(1, keepdim=True)
        low_B1 = torch.where(above_B1 < below_B1, t_B1, low_B1)
        high_B1 = torch.where(above_B1 < below_B1, high_B1, t_B1)
        squares_B1 = columns.sum(torch.linalg.vector_norm(rest_BS, dim=1, keepdim=True).square())
        slope_B1 = 2 - squares_B1 / above_B1 - head_BK.square().sum(1, keepdim=True) / below_B1
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
        # several processes add up their sums in each step, so all must take the same number of
        # steps
        if x_BS.device.type == "cpu" and not columns.partial and bool(solved_B1.all()):
            break
    x_BS.scatter_(1, *removed)
    return torch.where(next_B1 > MASKED / 2, t_B1, torch.full_like(t_B1, -MASKED)).squeeze(1)


class _SoftTopK(torch.autograd.Function):
    """(s_P, t_B): positive logits and thresholds. The gradient of t follows from the implicit
    function theorem: `dt / dx_j = -v_j / sum v`, `v = sigmoid'(x + t)`."""

    @staticmethod
    def forward(
        ctx: Any, logit_BS: Tensor, pairs: Pairs, k: int, columns: Columns
    ) -> tuple[Tensor, Tensor]:
        row_P, col_P, _, *ignored = pairs
        dtype = loss_dtype(logit_BS)
        s_P = logit_BS[row_P, col_P].to(dtype)
        x_BS = mask_(logit_BS.to(dtype, copy=True), *ignored)
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
        total_B1 = ctx.columns.sum(v_BS.sum(1, keepdim=True)).clamp_min(
            torch.finfo(v_BS.dtype).tiny
        )
        grad_BS = v_BS.mul_(-grad_t_B.unsqueeze(1) / total_B1)
        grad_BS.index_put_((row_P, col_P), grad_s_P, accumulate=True)
        return grad_BS.to(ctx.dtype), None, None, None


def soft_topk(
    logit_BS: Tensor, pairs: Pairs, *, topk: int = 5, columns: Columns = ALL_COLUMNS
) -> Tensor:
    """Soft top-k: `-log sigmoid(s_ip + t_i)`, t_i such that `sum_{l in L_B} sigmoid(s_il + t_i) =
    k`.

    A positive within the top k of its row has almost no loss, at whatever rank. Other positives
    stay in the sum. The loss of a row with at most k labels (without ignored ones) is 0.

    Source: DEXML (Gupta et al. 2024), soft top-k operator with a sigmoid, and cross entropy of the
    row's positives on
    it. Query to label only: k counts labels of a query.

    Args:
        topk: k, at least 1; usually the k of the P@k or R@k to improve.
        columns: which of the pool's columns `logit_BS` holds.
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
# computed for both directions in one pass over the logits
SOFTMAX = frozenset({"ds", "supcon", "infonce"})
ENTRYWISE = frozenset({"bce", "hinge"})  # sums over entries: no direction, no reduction
NGAME_TAU = 0.1  # temperature of the softmax over a triplet's negatives, in NGAME's published code
# can be computed by several processes with some columns each
BY_COLUMNS = SOFTMAX | ENTRYWISE | {"softtopk"}
# the margin is in units of the similarities: no temperature
UNSCALED = frozenset({"triplet", "hinge"})


def loss_options(kind: str, settings: Loss) -> dict[str, Any]:
    """Keyword arguments of the loss `kind`, from section `loss`."""
    options: dict[str, dict[str, Any]] = {
        "triplet": {
            "margin": settings.margin,
            "negatives": settings.triplet_negatives,
            "top": settings.triplet_top,
        },
        "hinge": {"margin": settings.margin, "normalise": settings.bce_normalise},
        "bce": {"normalise": settings.bce_normalise},
        "softtopk": {"topk": settings.topk},
    }
    return options.get(kind, {})


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
    """`forward * loss(query -> label) + (1 - forward) * loss(label -> query)` (UniDEC, L_D and L_C
    with lambda_D, lambda_C).

    Label -> query runs on the transposed logits: rows are pool labels, and P^l are the batch's
    queries that have l. There "pal-n" divides by |P^l|, as "psl" does: a label's queries outside
    the batch are not counted. A direction of weight 0 is not computed.

    `bce` and `hinge` are sums over entries and have no direction: they are computed once, whatever
    `forward`, with the
    relevances as targets. `softtopk` counts a query's labels and runs query -> label only.

    With `targets.importance_P` the losses are propensity-weighted (Jain et al. 2016). In `bce` and
    `hinge` the inverse propensity of a pair's label multiplies the pair's positive term. In the
    other losses it multiplies the pair's weight, query -> label, and the weights are rescaled
    (`target_weights`), so that learning rates and the balance of the heads keep their meaning.

    Args:
        kind: a key of `LOSSES`; options: its keyword arguments, from `loss_options`.
        reduction: one of `unidec.model.pairs.REDUCTIONS`; generator: for "pol".
        forward: weight of query -> label, 0 to 1.
    """
    shape = (logit_BS.shape[0], targets.columns.total(logit_BS.shape[1]))
    if kind in BY_COLUMNS:
        options["columns"] = targets.columns
    if kind in ENTRYWISE:
        return LOSSES[kind](
            logit_BS,
            targets.pairs(targets.relevance_P),
            importance_P=targets.importance_P,
            **options,
        )
    directions: list[Direction] = []
    for share, is_forward in ((forward, True), (1 - forward, False)):
        if share > 0:
            directed, num_rows = (
                (targets, shape[0]) if is_forward else (targets.t(shape[1]), shape[1])
            )
            pairs = directed.pairs(target_weights(reduction, directed, num_rows, generator))
            directions.append((share, is_forward, pairs))
    if kind in SOFTMAX:
        return _softmax_loss(kind, logit_BS, directions, **options)
    losses = [
        share * LOSSES[kind](logit_BS if is_forward else logit_BS.t(), pairs, **options)
        for share, is_forward, pairs in directions
    ]
    return sum(losses[1:], losses[0])
