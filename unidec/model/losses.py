"""Losses on the logits of a pool: decoupled softmax, SupCon / InfoNCE, binary cross entropy, and how all are applied.

Triplet and squared hinge are in `unidec.model.hinge`, soft top-k in `unidec.model.soft_topk`, BCE over all labels
without the logits in `unidec.model.full_bce`.

Legend: B queries (rows), S pool labels (columns), P positive pairs in the pool, F ignored pairs (filter pairs), M
masked pairs.

Common contract of the functions in `LOSSES`:
- `logit_BS`: float [B, S], similarity / temperature; half precision is computed in float32.
- `row_P`, `col_P`: int64 [P], positions of all true positives in the pool, each pair once, any order.
- `weight_P`: float [P], the reduction's weight of each (`unidec.model.reductions`); for `bce` and `hinge` the target
  itself.
- `ignored_row_F`, `ignored_col_F`: int64 [F], pairs that are neither positive nor negative; they leave every
  denominator.
- result: 0-d float32 (float64 for float64 logits), `sum_P weight * loss / number of rows with positive total weight`.
  With no such row it is exactly 0, with a graph and finite gradients. Rows without weight drop out of the loss (and,
  as rows, out of the count).

Positives are sparse and the only dense things are the logits and their exponentials: no P x S, no B x S mask. Nothing
waits for the device. The softmax family is one autograd function that reads the logits once for both directions,
because on a CPU each pass over B x S costs as much as a tenth of the matrix product that made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from unidec.errors import ConfigError
from unidec.model.hinge import squared_hinge, triplet
from unidec.model.pairs import MASKED, entry_count, mask_, masked_pairs, mean_over_rows
from unidec.model.reductions import target_weights
from unidec.model.soft_topk import soft_topk
from unidec.sections import Loss


class _PoolTerms(torch.autograd.Function):
    """(s_P, lse_B, lse_S): positive logits, and logsumexp over the unmasked entries of each row and of each column.

    A row (column) without an unmasked entry has lse of about -1e30. A direction that is not wanted comes back empty.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logit_BS: Tensor,
        row_P: Tensor,
        col_P: Tensor,
        row_M: Tensor,
        col_M: Tensor,
        rows: bool,
        columns: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.float64 if logit_BS.dtype == torch.float64 else torch.float32
        s_P = logit_BS[row_P, col_P].to(dtype)
        x_BS = mask_(logit_BS.to(dtype, copy=True), row_M, col_M)
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
        return grad_BS.to(ctx.dtype), None, None, None, None, None, None


def _pair_loss(kind: str, s_P: Tensor, lse_P: Tensor) -> Tensor:
    # ds: -log(e^s / (e^s + sum over negatives)) = softplus(lse - s); logsigmoid is exact at both ends.
    return -F.logsigmoid(s_P - lse_P) if kind == "ds" else lse_P - s_P


def _softmax_loss(
    kind: str,
    logit_BS: Tensor,
    row_P: Tensor,
    col_P: Tensor,
    weight_P: Tensor,
    ignored_row_F: Tensor,
    ignored_col_F: Tensor,
) -> Tensor:
    row_M, col_M = masked_pairs(kind, row_P, col_P, ignored_row_F, ignored_col_F)
    s_P, lse_B, _ = _PoolTerms.apply(logit_BS, row_P, col_P, row_M, col_M, True, False)
    return mean_over_rows(_pair_loss(kind, s_P, lse_B[row_P]), weight_P, row_P, logit_BS.shape[0])


def decoupled_softmax(
    logit_BS: Tensor, row_P: Tensor, col_P: Tensor, weight_P: Tensor, ignored_row_F: Tensor, ignored_col_F: Tensor
) -> Tensor:
    """Decoupled softmax: `-log( exp(s_ip) / sum_{l in L_B minus the other positives of i} exp(s_il) )`.

    Source: UniDEC v2, L_DecoupledSoftmax (section 2.4.2); DEXML, equation of the decoupled softmax. A row whose whole
    pool is positive has no negatives: its loss is 0.

    Example:
        >>> one = torch.tensor([0])
        >>> none = torch.empty(0, dtype=torch.int64)
        >>> decoupled_softmax(torch.zeros(1, 2), one, one, torch.ones(1), none, none)  # log 2
        tensor(0.6931)
    """
    return _softmax_loss("ds", logit_BS, row_P, col_P, weight_P, ignored_row_F, ignored_col_F)


def supcon(
    logit_BS: Tensor, row_P: Tensor, col_P: Tensor, weight_P: Tensor, ignored_row_F: Tensor, ignored_col_F: Tensor
) -> Tensor:
    """SupCon: `-log( exp(s_ip) / sum_{l in L_B} exp(s_il) )`; other positives stay in the denominator.

    Source: UniDEC v1, L_{D,q2l}; v2, L_SupCon. With the reduction "pol" it is InfoNCE (DPR, ANCE).
    """
    return _softmax_loss("supcon", logit_BS, row_P, col_P, weight_P, ignored_row_F, ignored_col_F)


class _BinaryRows(torch.autograd.Function):
    """sum over rows of `active_B * sum over unmasked entries of softplus(x)` - sum over pairs of `target * x` (active
    rows), + sum over pairs of `extra * softplus(-x)` where there is an extra.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logit_BS: Tensor,
        row_P: Tensor,
        col_P: Tensor,
        target_P: Tensor,
        row_M: Tensor,
        col_M: Tensor,
        active_B: Tensor,
        extra_P: Tensor | None,
    ) -> Tensor:
        x_BS = mask_(
            logit_BS.to(target_P.dtype, copy=True), row_M, col_M
        )  # softplus and sigmoid of the mask are exactly 0
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
        return grad_BS.to(ctx.dtype), *(None,) * 7


def bce(
    logit_BS: Tensor,
    row_P: Tensor,
    col_P: Tensor,
    weight_P: Tensor,
    ignored_row_F: Tensor,
    ignored_col_F: Tensor,
    *,
    normalise: str = "rows",
    importance_P: Tensor | None = None,
) -> Tensor:
    """OvA binary cross entropy on each (query, pool label) entry; `weight_P` are the targets in [0, 1] (clipped), 0
    elsewhere.

    Source: UniDEC v1, L_OvA, a sum over labels; Renee; as the classifier's auxiliary loss: UniDEC v2, section 2.4.2.
    No reduction applies. A query without a positive target in the pool drops out, as it does from the other losses.

    Args:
        normalise: "rows": sum over the pool, mean over the queries that take part (the equation). "entries": mean
            over the entries of those queries, ignored ones not counted: some |pool| times smaller, comparable to a
            softmax loss at the start of training.
        importance_P: float [P], factor of each pair's positive side, `target * importance * softplus(-x)`; None: 1.
            With inverse propensities these are the weighted positives of Jain et al. 2016 and Qaraei et al. 2021; what
            is not relevant keeps weight 1, so nothing is rescaled.

    Raises:
        ConfigError: another value of `normalise`.
    """
    target_P = weight_P.to(torch.float64 if logit_BS.dtype == torch.float64 else torch.float32).clamp(0, 1)
    active_B, count = entry_count(target_P, row_P, logit_BS.shape, ignored_row_F, normalise)
    extra_P = None if importance_P is None else (importance_P.to(target_P.dtype) - 1) * target_P
    total = _BinaryRows.apply(logit_BS, row_P, col_P, target_P, ignored_row_F, ignored_col_F, active_B, extra_P)
    return total / count


LOSSES: dict[str, Callable[..., Tensor]] = {
    "ds": decoupled_softmax,
    "supcon": supcon,
    "infonce": supcon,
    "triplet": triplet,
    "bce": bce,
    "hinge": squared_hinge,
    "softtopk": soft_topk,
}
ENTRYWISE = frozenset({"bce", "hinge"})  # a term for each entry: no direction, no reduction
UNSCALED = frozenset({"triplet", "hinge"})  # a margin in units of the similarities: not divided by a temperature


def loss_options(kind: str, settings: Loss) -> dict[str, Any]:
    """What section `loss` says of a loss's own options."""
    of = settings
    every: dict[str, dict[str, Any]] = {
        "triplet": {"margin": of.margin, "negatives": of.triplet_negatives},
        "hinge": {"margin": of.margin, "normalise": of.bce_normalise},
        "bce": {"normalise": of.bce_normalise},
        "softtopk": {"topk": of.topk},
    }
    return every.get(kind, {})


@dataclass(frozen=True)
class PoolTargets:
    """The pairs of a pool as tensors on the device of the logits; see `unidec.training.sampler.PoolBatch` for the
    fields.

    Attributes:
        importance_P: float [P], inverse propensity of each pair's label, or None: 1 each.
    """

    row_P: Tensor
    col_P: Tensor
    sampled_P: Tensor
    relevance_P: Tensor | None
    num_positives_B: Tensor
    ignored_row_F: Tensor
    ignored_col_F: Tensor
    importance_P: Tensor | None = None

    @classmethod
    def from_batch(
        cls,
        batch: Any,
        device: torch.device | str = "cpu",
        *,
        soft: bool = False,
        importance_L: np.ndarray | None = None,
    ) -> PoolTargets:
        """Copies a `PoolBatch` to the device.

        Args:
            soft: keep the stored relevances as soft targets; else every positive counts 1.
            importance_L: float [L], inverse propensities of all labels, for propensity-weighted losses.
        """

        def on_device(array: Any) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        return cls(
            row_P=on_device(batch.positive_row_P),
            col_P=on_device(batch.positive_col_P),
            sampled_P=on_device(batch.sampled_P),
            relevance_P=on_device(batch.relevance_P) if soft else None,
            num_positives_B=on_device(batch.num_positives_B),
            ignored_row_F=on_device(batch.ignored_row_F),
            ignored_col_F=on_device(batch.ignored_col_F),
            importance_P=None
            if importance_L is None
            else on_device(importance_L[batch.pool_S[batch.positive_col_P]].astype(np.float32)),
        )


def _important(weight_P: Tensor, importance_P: Tensor) -> Tensor:
    """Weights times importance, rescaled so that all of them together weigh what they did."""
    product_P = weight_P * importance_P.to(weight_P.dtype)
    return product_P * (weight_P.sum() / product_P.sum().clamp_min(torch.finfo(product_P.dtype).tiny))


def _directions(
    t: PoolTargets, shape: tuple[int, int], reduction: str, forward: float, generator: torch.Generator | None
) -> list[tuple[float, Tensor, Tensor]]:
    """(weight of the direction, row of each pair, weight of each pair), for the directions that count."""
    each_P = t.relevance_P if t.relevance_P is not None else torch.ones(t.col_P.shape[0], device=t.col_P.device)
    in_batch_S = each_P.new_zeros(shape[1]).index_add_(0, t.col_P, each_P)
    parts = []
    for share, index_P, num_rows, num_positives in (
        (forward, t.row_P, shape[0], t.num_positives_B),
        (1 - forward, t.col_P, shape[1], in_batch_S),
    ):
        if share > 0:
            weight_P = target_weights(
                reduction,
                row_P=index_P,
                sampled_P=t.sampled_P,
                relevance_P=t.relevance_P,
                num_rows=num_rows,
                num_positives_B=num_positives,
                generator=generator,
            )
            if t.importance_P is not None and index_P is t.row_P:
                weight_P = _important(weight_P, t.importance_P)
            parts.append((share, index_P, weight_P))
    return parts


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
    so that a batch's positives together weigh what the reduction gave them: learning rates and the balance of the heads
    keep their meaning. Label -> query needs none: a row's pairs share one propensity, their mean is unbiased as it is.

    Args:
        kind: a key of `LOSSES`.
        logit_BS: float [B, S], as in `LOSSES`.
        targets: pairs of this pool.
        reduction: a key of `REDUCTIONS`.
        forward: weight of query -> label, 0 to 1.
        generator: passed to the reduction ("pol").
        options: passed to the loss: `loss_options`.

    Raises:
        TypeError: an option that the loss does not have.
        ConfigError: an unknown loss, reduction or option value; softtopk with `forward` below 1.
    """
    if kind not in LOSSES:
        raise ConfigError("unknown loss", where="loss", got=kind, expected=", ".join(LOSSES))
    num_queries, num_labels = logit_BS.shape
    t = targets
    if kind in ENTRYWISE:
        target_P = t.relevance_P if t.relevance_P is not None else torch.ones(t.row_P.shape[0], device=t.row_P.device)
        options["importance_P"] = t.importance_P
        return LOSSES[kind](logit_BS, t.row_P, t.col_P, target_P, t.ignored_row_F, t.ignored_col_F, **options)
    if kind == "softtopk" and forward < 1:
        raise ConfigError(
            "soft top-k counts the labels of a query: there is no label to query", where="loss", got=forward, expected=1
        )

    parts = _directions(t, (num_queries, num_labels), reduction, forward, generator)
    if LOSSES[kind] in (decoupled_softmax, supcon):
        if options:
            raise TypeError(f"the loss {kind} has no option {', '.join(options)}")
        softmax = "ds" if kind == "ds" else "supcon"
        row_M, col_M = masked_pairs(softmax, t.row_P, t.col_P, t.ignored_row_F, t.ignored_col_F)
        s_P, lse_B, lse_S = _PoolTerms.apply(logit_BS, t.row_P, t.col_P, row_M, col_M, forward > 0, forward < 1)
        losses = []
        for share, index_P, weight_P in parts:
            lse, num_rows = (lse_B, num_queries) if index_P is t.row_P else (lse_S, num_labels)
            losses.append(share * mean_over_rows(_pair_loss(softmax, s_P, lse[index_P]), weight_P, index_P, num_rows))
        return sum(losses[1:], losses[0])
    losses = []
    for share, index_P, weight_P in parts:
        if index_P is t.row_P:
            one = LOSSES[kind](logit_BS, t.row_P, t.col_P, weight_P, t.ignored_row_F, t.ignored_col_F, **options)
        else:
            one = LOSSES[kind](logit_BS.t(), t.col_P, t.row_P, weight_P, t.ignored_col_F, t.ignored_row_F, **options)
        losses.append(share * one)
    return sum(losses[1:], losses[0])
