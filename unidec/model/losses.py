"""Losses on the logits of a pool: decoupled softmax, SupCon / InfoNCE, binary cross entropy, and how all are applied.

Triplet and squared hinge are in `unidec.model.hinge`, soft top-k in `unidec.model.soft_topk`, BCE over all labels
without the logits in `unidec.model.full_bce`.

Legend: B queries (rows), S pool labels (columns), P positive pairs in the pool, F ignored pairs (filter pairs), M
masked pairs.

Common contract of the functions in `LOSSES`:
- `logit_BS`: float [B, S], similarity / temperature; half precision is computed in float32.
- `pairs`: `unidec.model.pairs.Pairs`.
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
from unidec.model.pairs import MASKED, Pairs, entry_count, loss_dtype, mask_, mean_over_rows
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
        dtype = loss_dtype(logit_BS)
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


def _softmax_loss(kind: str, logit_BS: Tensor, pairs: Pairs) -> Tensor:
    s_P, lse_B, _ = _PoolTerms.apply(logit_BS, pairs.row_P, pairs.col_P, *pairs.masked(kind), True, False)
    loss_P = _pair_loss(kind, s_P, lse_B[pairs.row_P])
    return mean_over_rows(loss_P, pairs.weight_P, pairs.row_P, logit_BS.shape[0])


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
    return _softmax_loss("ds", logit_BS, pairs)


def supcon(logit_BS: Tensor, pairs: Pairs) -> Tensor:
    """SupCon: `-log( exp(s_ip) / sum_{l in L_B} exp(s_il) )`; other positives stay in the denominator.

    Source: UniDEC v1, L_{D,q2l}; v2, L_SupCon. With the reduction "pol" it is InfoNCE (DPR, ANCE).
    """
    return _softmax_loss("supcon", logit_BS, pairs)


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


def bce(logit_BS: Tensor, pairs: Pairs, *, normalise: str = "rows", importance_P: Tensor | None = None) -> Tensor:
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

    Raises:
        ConfigError: another value of `normalise`.
    """
    pairs = pairs._replace(weight_P=pairs.weight_P.to(loss_dtype(logit_BS)).clamp(0, 1))
    active_B, count = entry_count(pairs.weight_P, pairs.row_P, logit_BS.shape, pairs.row_F, normalise)
    extra_P = None if importance_P is None else (importance_P.to(pairs.weight_P.dtype) - 1) * pairs.weight_P
    return _BinaryRows.apply(logit_BS, pairs, active_B, extra_P) / count


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
    """A loss's own options, from section `loss`."""
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

        def on_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        importance_P = None
        if importance_L is not None:
            importance_P = on_device(importance_L[batch.pool_S[batch.positive_col_P]].astype(np.float32))
        return cls(
            on_device(batch.positive_row_P), on_device(batch.positive_col_P), on_device(batch.sampled_P),
            on_device(batch.relevance_P) if soft else None, on_device(batch.num_positives_B),
            on_device(batch.ignored_row_F), on_device(batch.ignored_col_F), importance_P,
        )  # fmt: skip

    @property
    def target_P(self) -> Tensor:  # noqa: N802
        """The soft targets, or 1 each."""
        if self.relevance_P is not None:
            return self.relevance_P
        return torch.ones(self.row_P.shape[0], device=self.row_P.device)

    def pairs(self, weight_P: Tensor) -> Pairs:
        """With some weight each."""
        return Pairs(self.row_P, self.col_P, weight_P, self.ignored_row_F, self.ignored_col_F)


def _important(weight_P: Tensor, importance_P: Tensor) -> Tensor:
    """Weights times importance, rescaled so that all of them together weigh what they did."""
    product_P = weight_P * importance_P.to(weight_P.dtype)
    return product_P * (weight_P.sum() / product_P.sum().clamp_min(torch.finfo(product_P.dtype).tiny))


def _weights(
    targets: PoolTargets, shape: torch.Size, reduction: str, generator: torch.Generator | None, *, forward: bool
) -> Tensor:
    """The reduction's weight of each pair in one direction, float [P]."""
    t = targets
    row_P, num_rows, num_positives = t.row_P, shape[0], t.num_positives_B
    if not forward:
        row_P, num_rows = t.col_P, shape[1]
        num_positives = t.target_P.new_zeros(num_rows).index_add_(0, row_P, t.target_P)
    weight_P = target_weights(
        reduction, row_P=row_P, sampled_P=t.sampled_P, relevance_P=t.relevance_P, num_rows=num_rows,
        num_positives_B=num_positives, generator=generator,
    )  # fmt: skip
    return weight_P if t.importance_P is None or not forward else _important(weight_P, t.importance_P)


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
    if kind in ENTRYWISE:
        return LOSSES[kind](logit_BS, targets.pairs(targets.target_P), importance_P=targets.importance_P, **options)
    if kind == "softtopk" and forward < 1:
        raise ConfigError(
            "soft top-k counts the labels of a query: there is no label to query", where="loss", got=forward, expected=1
        )
    parts = []  # (share of the loss, query -> label, pairs of the logits or of their transpose)
    for share, is_forward in ((forward, True), (1 - forward, False)):
        if share > 0:
            pairs = targets.pairs(_weights(targets, logit_BS.shape, reduction, generator, forward=is_forward))
            parts.append((share, is_forward, pairs if is_forward else pairs.t()))
    if LOSSES[kind] in (decoupled_softmax, supcon):
        if options:
            raise TypeError(f"the loss {kind} has no option {', '.join(options)}")
        softmax = "ds" if kind == "ds" else "supcon"
        every = targets.pairs(targets.target_P)
        s_P, lse_B, lse_S = _PoolTerms.apply(
            logit_BS, every.row_P, every.col_P, *every.masked(softmax), forward > 0, forward < 1
        )
        losses = []
        for share, is_forward, pairs in parts:
            lse = lse_B if is_forward else lse_S
            loss_P = _pair_loss(softmax, s_P, lse[pairs.row_P])
            losses.append(share * mean_over_rows(loss_P, pairs.weight_P, pairs.row_P, len(lse)))
    else:
        losses = [
            share * LOSSES[kind](logit_BS if is_forward else logit_BS.t(), pairs, **options)
            for share, is_forward, pairs in parts
        ]
    return sum(losses[1:], losses[0])
