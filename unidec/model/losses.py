"""Losses on the logits of a pool: decoupled softmax, SupCon / InfoNCE, binary cross entropy,
triplet, squared hinge; `symmetric_loss` applies any of `LOSSES` in both directions. Soft top-k is
in `unidec.model.soft_topk`, BCE over all labels without logits in memory in
`unidec.model.full_bce`.

Legend: B queries (rows), S pool labels (columns), P positive pairs in the pool, F ignored pairs
(filter pairs), M masked pairs, K the k highest entries of a row.

Common contract of the functions in `LOSSES`:
- `logit_BS`: float [B, S], similarity / temperature; half precision is converted to float32.
- result: 0-d float32 (float64 for float64 logits), `sum_P weight * loss / number of rows with
  positive total weight`. With no such row it is exactly 0, with a graph and finite gradients.

Positives are sparse, and only the logits and their exponentials are dense: there are no P x S
tensors and no B x S masks. Nothing waits for the device. The softmax family reads the logits once
for both directions: on a CPU each pass over B x S costs a tenth of the matrix product that computed
the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from unidec.config import Loss
from unidec.data.chunks import blocks
from unidec.model.pairs import (
    ALL_COLUMNS,
    MASKED,
    Columns,
    Pairs,
    PoolTargets,
    active_rows,
    entry_targets,
    loss_dtype,
    mask_,
    mean_over_rows,
    one_positive,
    row_weights,
    rows_at,
)
from unidec.model.soft_topk import soft_topk

BLOCK = 1 << 22  # entries of the largest temporary of a triplet loss, 16 MB of float32
NGAME_TAU = 0.1  # temperature of the softmax over a triplet's negatives, in NGAME's published code
# a direction's share of a loss, whether it is query -> label, and the pairs (of the transposed
# logits if it is not)
Direction = tuple[float, bool, Pairs]


def _logsumexp(x_BS: Tensor, dim: int, *, overwrite: bool) -> tuple[Any, ...]:
    """logsumexp along `dim`, and for its gradient the exponentials and their sums (or None)."""
    if x_BS.shape[dim] == 0:
        return x_BS.new_full((x_BS.shape[1 - dim],), MASKED), None, None
    top = x_BS.amax(dim, keepdim=True)
    below_top_BS = x_BS.sub_(top) if overwrite else x_BS - top
    exp_BS = below_top_BS.exp_()
    total = exp_BS.sum(dim, keepdim=True)
    lse = top + total.log()
    return lse.squeeze(dim), exp_BS, total


class _PoolTerms(torch.autograd.Function):
    """(s_P, lse_B, lse_S): positive logits, and logsumexp over the unmasked entries of each row and
    of each column.

    For a row (column) without an unmasked entry lse is about -1e30. lse_B is empty without `rows`,
    lse_S without `columns`."""

    @staticmethod
    def forward(
        ctx: Any, logit_BS: Tensor, pairs: Pairs, kind: str, rows: bool, columns: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        row_P = pairs.row_P
        col_P = pairs.col_P
        dtype = loss_dtype(logit_BS)
        s_P = logit_BS[row_P, col_P].to(dtype)
        x_BS = mask_(logit_BS.to(dtype, copy=True), *pairs.masked(kind))
        lse_B = lse_S = s_P.new_empty(0)
        of_rows = of_columns = [None, None]
        if rows:
            lse_B, *of_rows = _logsumexp(x_BS, 1, overwrite=not columns)
        if columns:
            lse_S, *of_columns = _logsumexp(x_BS, 0, overwrite=True)
        ctx.save_for_backward(row_P, col_P, *of_rows, *of_columns)
        ctx.shape = logit_BS.shape
        ctx.dtype = logit_BS.dtype
        return s_P, lse_B, lse_S

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
            if grad_BS is None:
                grad_BS = exp_col_BS * scale_1S
            else:
                grad_BS.addcmul_(exp_col_BS, scale_1S)
        if grad_BS is None:  # no entries
            grad_BS = grad_s_P.new_zeros(ctx.shape)
        grad_BS.index_put_((row_P, col_P), grad_s_P, accumulate=True)
        return grad_BS.to(ctx.dtype), None, None, None, None


def _softmax_loss(
    kind: str, logit_BS: Tensor, directions: Sequence[Direction], columns: Columns = ALL_COLUMNS
) -> Tensor:
    """Weighted sum of a softmax loss over directions; the logits are read once for both."""
    _, is_forward, pairs = directions[0]
    own = columns.own(pairs if is_forward else pairs.t())
    wanted = [is_forward for _, is_forward, _ in directions]
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
        losses.append(share * mean_over_rows(loss_P, pairs, num_rows))
    return torch.stack(losses).sum()


def decoupled_softmax(logit_BS: Tensor, pairs: Pairs) -> Tensor:
    """Decoupled softmax: `-log( exp(s_ip) / sum_{l in L_B minus the other positives of i} exp(s_il)
    )`.

    Source: UniDEC v2, L_DecoupledSoftmax (section 2.4.2); DEXML, equation of the decoupled softmax.
    The loss of a row without negatives (all pool labels are positive) is 0.

    Example:
        >>> one = torch.tensor([0])
        >>> none = torch.empty(0, dtype=torch.int64)
        >>> decoupled_softmax(torch.zeros(1, 2), Pairs(one, one, torch.ones(1), none, none))
        tensor(0.6931)
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
        row_P, col_P, target_P = pairs[:3]
        # softplus and sigmoid of `MASKED` are exactly 0
        x_BS = mask_(logit_BS.to(target_P.dtype, copy=True), *pairs.masked("bce"))
        x_P = x_BS[row_P, col_P]
        positive = (target_P * x_P).sum()
        if extra_P is not None:
            positive = positive - (extra_P * F.softplus(-x_P)).sum()
        ctx.save_for_backward(x_BS, *pairs[:3], active_B, extra_P)
        ctx.dtype = logit_BS.dtype
        softplus_B = F.softplus(x_BS).sum(1)
        return (softplus_B * active_B).sum() - positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_BS, row_P, col_P, pull_P, active_B, extra_P = ctx.saved_tensors
        grad_B = active_B * grad
        grad_BS = torch.sigmoid(x_BS).mul_(grad_B.unsqueeze(1))
        if extra_P is not None:
            pull_P = pull_P + extra_P * torch.sigmoid(-x_BS[row_P, col_P])
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
    v2, section 2.4.2. No reduction applies. A query without a positive target in the pool is left
    out, as in the other losses.

    Args:
        normalise: "rows": sum over the pool, mean over the queries with a positive target (the
            equation). "entries": mean over the entries of those queries without ignored ones:
            smaller by a factor of about |pool|, comparable to a softmax loss at the start of
            training. "sum": sum over the entries of those queries (Renee's published code).
        importance_P: float [P], factor of each pair's positive term, `target * importance *
            softplus(-x)`; None: 1. With inverse propensities these are the weighted positives of
            Jain et al. 2016 and Qaraei et al. 2021; negatives keep weight 1, and nothing is
            rescaled.
        columns: which of the pool's columns `logit_BS` holds.
    """
    num_columns = columns.total(logit_BS.shape[1])
    pairs, active_B, count = entry_targets(pairs, logit_BS, num_columns, normalise)
    extra_P = None
    if importance_P is not None:
        importance_P = importance_P.to(pairs.weight_P.dtype)
        extra_P = columns.own_values((importance_P - 1) * pairs.weight_P)
    total = _BinaryRows.apply(logit_BS, columns.own(pairs), active_B, extra_P)
    return columns.sum(total) / count


def _hinges(x_BS: Tensor, s_P: Tensor, row_P: Tensor, weight_P: Tensor, margin: float) -> Tensor:
    """Sum over some pairs of `weight_P * sum_{negatives n of the row} [s_n - s_p + margin]_+`."""
    over_PS = F.relu(rows_at(x_BS, row_P) - (s_P - margin).unsqueeze(1))
    return (over_PS.sum(1) * weight_P).sum()


def _all_hinges(x_BS: Tensor, other_BS: Tensor, pairs: Pairs, margin: float) -> Tensor:
    """`_hinges` of all pairs, in blocks; backward recomputes each, so that no [P, S] is kept."""
    s_P = x_BS[pairs.row_P, pairs.col_P]
    size = max(1, BLOCK // max(x_BS.shape[1], 1))
    total = s_P.sum() * 0
    for part in blocks(len(s_P), size):
        hinges = checkpoint(
            _hinges,
            other_BS,
            s_P[part],
            pairs.row_P[part],
            pairs.weight_P[part],
            margin=margin,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        total = total + hinges
    return total


def triplet(
    logit_BS: Tensor,
    pairs: Pairs,
    *,
    margin: float = 0.3,
    negatives: str = "all",
    top: int = 1,
    positives: int = 0,
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
        positives: number of hardest positives, which are paired with the `top` hardest negatives
            (`_hardest_pairs`); 0: each positive counts by its weight.
    """
    x_BS = logit_BS.to(loss_dtype(logit_BS))
    num_rows, num_columns = x_BS.shape
    pairs = pairs._replace(weight_P=pairs.weight_P.to(x_BS.dtype))
    other_BS = mask_(x_BS.clone(), *pairs.masked("ds"))
    if positives and num_columns:
        return _hardest_pairs(x_BS, other_BS, pairs, margin, (positives, top))
    if negatives == "all":
        return _all_hinges(x_BS, other_BS, pairs, margin) / active_rows(pairs, num_rows)
    if num_columns == 0:
        return x_BS.sum()
    hardest_BK = other_BS.topk(min(top, num_columns), dim=1).values
    other_PK = rows_at(hardest_BK, pairs.row_P)
    s_P = x_BS[pairs.row_P, pairs.col_P]
    hinge_PK = F.relu(other_PK - s_P.unsqueeze(1) + margin)
    if negatives == "softmax":
        similarity_PK = other_PK / NGAME_TAU * (hinge_PK > 0)
        hinge_PK = hinge_PK * similarity_PK.softmax(dim=1)
    return mean_over_rows(hinge_PK.sum(dim=1) / top, pairs, num_rows)


def _hardest_pairs(
    x_BS: Tensor, other_BS: Tensor, pairs: Pairs, margin: float, hardest: tuple[int, int]
) -> Tensor:
    """Mean hinge over queries and over the pairs of their hardest positives (lowest similarity) and
    hardest negatives; each hinge is weighted by its softmax over the positive's negatives with a
    loss. If the pool has fewer, the missing pairs count as loss 0.

    Source: NGAME's published code for its classifier.

    Args:
        hardest: numbers of positives and of negatives.
    """
    num_positives, num_negatives = hardest
    num_rows, num_columns = x_BS.shape
    # masked as the least similar negative, so that a missing positive has no loss
    minus_BS = torch.full_like(x_BS, MASKED)
    minus_BS = minus_BS.index_put((pairs.row_P, pairs.col_P), -x_BS[pairs.row_P, pairs.col_P])
    positive_BM = -minus_BS.topk(min(num_positives, num_columns), dim=1).values
    negative_BK = other_BS.topk(min(num_negatives, num_columns), dim=1).values
    hinge_BMK = F.relu(negative_BK.unsqueeze(1) - positive_BM.unsqueeze(2) + margin)
    masked = hinge_BMK.new_full((), MASKED)
    share_BMK = torch.where(hinge_BMK > 0, hinge_BMK, masked).softmax(dim=2)
    mean_B = (share_BMK * hinge_BMK).sum(dim=(1, 2)) / (num_positives * num_negatives)
    counts_B = row_weights(pairs.weight_P, pairs.row_P, num_rows) > 0
    return (mean_B * counts_B).sum() / active_rows(pairs, num_rows)


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
    logistic loss. No reduction applies. A soft target y weights the positive term by y and the
    negative one by 1 - y, as in `bce`. A query without a positive target in the pool is left out.

    Args:
        logit_BS: scores, not divided by a temperature, so that `margin` is in their units.
        margin: 1 for unbounded scores; below 1 for cosines.
        normalise: as in `bce`.
        importance_P: float [P], factor of each pair's positive term; None: 1.
        columns: which of the pool's columns `logit_BS` holds.
    """
    num_columns = columns.total(logit_BS.shape[1])
    pairs, active_B, count = entry_targets(pairs, logit_BS, num_columns, normalise)
    pairs = columns.own(pairs)
    target_P = pairs.weight_P
    x_BS = mask_(logit_BS.to(target_P.dtype, copy=True), pairs.row_F, pairs.col_F)
    # all entries as negatives, masked ones exactly 0; then positives replace their negative term
    negative_B = (x_BS + margin).clamp_min(0).square().sum(1)
    x_P = x_BS[pairs.row_P, pairs.col_P]
    positive_P = (margin - x_P).clamp_min(0).square()
    if importance_P is not None:
        positive_P = columns.own_values(importance_P.to(target_P.dtype)) * positive_P
    change_P = positive_P - (x_P + margin).clamp_min(0).square()
    total = (negative_B * active_B).sum() + (target_P * change_P).sum()
    return columns.sum(total) / count


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
            "positives": settings.triplet_positives,
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
    `forward`, with the relevances as targets; with "pol" one positive of each query counts
    (`one_positive`). `softtopk` counts a query's labels and runs query ->
    label only.

    With `targets.importance_P` the losses are propensity-weighted (Jain et al. 2016). In `bce` and
    `hinge` the inverse propensity of a pair's label multiplies the pair's positive term. In the
    other losses it multiplies the pair's weight, query -> label, and the weights are rescaled
    (`target_weights`), so that learning rates and the balance of the heads keep their meaning.

    Args:
        kind: a key of `LOSSES`; options: its keyword arguments, from `loss_options`.
        reduction: of `target_weights`; generator: for "pol".
        forward: weight of query -> label, 0 to 1.
    """
    loss = LOSSES[kind]
    if kind in BY_COLUMNS:
        options["columns"] = targets.columns
    num_rows = logit_BS.shape[0]
    if kind in ENTRYWISE:
        if reduction == "pol":
            targets = one_positive(targets, num_rows, generator)
        pairs = targets.pairs(targets.relevance_P)
        return loss(logit_BS, pairs, importance_P=targets.importance_P, **options)
    num_columns = targets.columns.total(logit_BS.shape[1])
    directions: list[Direction] = []
    for share, is_forward, rows in ((forward, True, num_rows), (1 - forward, False, num_columns)):
        if share > 0:
            pairs = targets.weighted(reduction, rows, generator, forward=is_forward)
            directions.append((share, is_forward, pairs))
    if kind in SOFTMAX:
        return _softmax_loss(kind, logit_BS, directions, **options)
    losses = []
    for share, is_forward, pairs in directions:
        directed = logit_BS if is_forward else logit_BS.t()
        losses.append(share * loss(directed, pairs, **options))
    return torch.stack(losses).sum()
