"""Losses on the logits of a pool: decoupled softmax, SupCon / InfoNCE, triplet, binary cross entropy.

Legend: B queries (rows), S pool labels (columns), P positive pairs in the pool, F ignored pairs (filter pairs), M
masked pairs.

Common contract of the functions in `LOSSES`:
- `logit_BS`: float [B, S], similarity / temperature; half precision is computed in float32.
- `row_P`, `col_P`: int64 [P], positions of all true positives in the pool, each pair once, any order.
- `weight_P`: float [P], the reduction's weight of each (`unidec.model.reductions`); for `bce` the target itself.
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

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from unidec.errors import ConfigError
from unidec.model.reductions import target_weights

# Stands for minus infinity: exp of it is exactly 0 beside any real logit, and a row that holds nothing else still has
# a finite logsumexp, hence a loss and gradients of exactly 0 where minus infinity gives NaN. Fits float32 and
# float64.
_MASKED = -1e30


def _computable(logit_BS: Tensor) -> Tensor:
    return logit_BS if logit_BS.dtype == torch.float64 else logit_BS.float()


def _mask_(x_BS: Tensor, row_M: Tensor, col_M: Tensor) -> Tensor:
    # The value is filled in on the device: a Python number made into a tensor there would wait for it.
    return x_BS.index_put_((row_M, col_M), torch.full((), _MASKED, dtype=x_BS.dtype, device=x_BS.device))


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
        x_BS = _mask_(logit_BS.to(dtype, copy=True), row_M, col_M)
        sums: list[Tensor | None] = [None, None]
        exps: list[Tensor | None] = [None, None]
        lses = [s_P.new_empty(0), s_P.new_empty(0)]
        wanted = [dim for dim, want in ((1, rows), (0, columns)) if want]
        for dim in wanted:
            size = x_BS.shape[dim]
            if size == 0:
                lses[1 - dim] = s_P.new_full((x_BS.shape[1 - dim],), _MASKED)
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


def _mean_over_rows(loss_P: Tensor, weight_P: Tensor, row_P: Tensor, num_rows: int) -> Tensor:
    """Weighted sum over pairs / number of rows with positive total weight (at least 1)."""
    weight_P = weight_P.to(loss_P.dtype)
    total_B = weight_P.new_zeros(num_rows).index_add_(0, row_P, weight_P)
    return (weight_P * loss_P).sum() / (total_B > 0).sum().clamp_min(1)


def _masked_pairs(
    kind: str, row_P: Tensor, col_P: Tensor, ignored_row_F: Tensor, ignored_col_F: Tensor
) -> tuple[Tensor, Tensor]:
    """Pairs outside the denominators. SupCon keeps the positives in; decoupled softmax takes all of them out."""
    if kind == "ds":
        return torch.cat([row_P, ignored_row_F]), torch.cat([col_P, ignored_col_F])
    return ignored_row_F, ignored_col_F


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
    row_M, col_M = _masked_pairs(kind, row_P, col_P, ignored_row_F, ignored_col_F)
    s_P, lse_B, _ = _PoolTerms.apply(logit_BS, row_P, col_P, row_M, col_M, True, False)
    return _mean_over_rows(_pair_loss(kind, s_P, lse_B[row_P]), weight_P, row_P, logit_BS.shape[0])


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


class _TripletAll(torch.autograd.Function):
    """sum_P weight_P * sum_{negatives n of the row} [s_n - s_p + margin]_+, in blocks of pairs; the gradient is made
    on the way.
    """

    BLOCK = 1 << 22  # entries of the largest temporary, 16 MB of float32

    @staticmethod
    def forward(
        ctx: Any,
        logit_BS: Tensor,
        row_P: Tensor,
        col_P: Tensor,
        weight_P: Tensor,
        row_M: Tensor,
        col_M: Tensor,
        margin: float,
    ) -> Tensor:
        x_BS = _computable(logit_BS)
        s_P = x_BS[row_P, col_P]
        x_BS = _mask_(x_BS.clone(), row_M, col_M)
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
        return (grad_BS * grad).to(ctx.dtype), None, None, None, None, None, None


def triplet(
    logit_BS: Tensor,
    row_P: Tensor,
    col_P: Tensor,
    weight_P: Tensor,
    ignored_row_F: Tensor,
    ignored_col_F: Tensor,
    *,
    margin: float = 0.3,
    negatives: str = "all",
) -> Tensor:
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
    row_M, col_M = _masked_pairs("ds", row_P, col_P, ignored_row_F, ignored_col_F)
    weight_P = weight_P.to(torch.float64 if logit_BS.dtype == torch.float64 else torch.float32)
    if negatives == "all":
        total = _TripletAll.apply(logit_BS, row_P, col_P, weight_P, row_M, col_M, margin)
        total_B = weight_P.new_zeros(logit_BS.shape[0]).index_add_(0, row_P, weight_P)
        return total / (total_B > 0).sum().clamp_min(1)
    if negatives != "hardest":
        raise ConfigError("unknown choice of negatives", where="triplet", got=negatives, expected="all, hardest")
    x_BS = _computable(logit_BS)
    if x_BS.shape[1] == 0:
        return x_BS.sum()
    masked_BS = x_BS.index_put((row_M, col_M), torch.full((), _MASKED, dtype=x_BS.dtype, device=x_BS.device))
    hardest_B = masked_BS.max(dim=1).values
    return _mean_over_rows(F.relu(hardest_B[row_P] - x_BS[row_P, col_P] + margin), weight_P, row_P, x_BS.shape[0])


class _BinaryRows(torch.autograd.Function):
    """sum over rows of `active_B * sum over unmasked entries of softplus(x)` - sum over pairs of `target * x` (active
    rows).
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
    ) -> Tensor:
        x_BS = _mask_(
            logit_BS.to(target_P.dtype, copy=True), row_M, col_M
        )  # softplus and sigmoid of the mask are exactly 0
        positive = (target_P * x_BS[row_P, col_P]).sum()
        ctx.save_for_backward(x_BS, row_P, col_P, target_P, active_B)
        ctx.dtype = logit_BS.dtype
        return (F.softplus(x_BS).sum(1) * active_B).sum() - positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_BS, row_P, col_P, target_P, active_B = ctx.saved_tensors
        grad_BS = torch.sigmoid(x_BS).mul_((active_B * grad).unsqueeze(1))
        grad_BS.index_put_((row_P, col_P), -target_P * grad, accumulate=True)
        return grad_BS.to(ctx.dtype), None, None, None, None, None, None


def bce(
    logit_BS: Tensor,
    row_P: Tensor,
    col_P: Tensor,
    weight_P: Tensor,
    ignored_row_F: Tensor,
    ignored_col_F: Tensor,
    *,
    normalise: str = "rows",
) -> Tensor:
    """OvA binary cross entropy on each (query, pool label) entry; `weight_P` are the targets in [0, 1] (clipped), 0
    elsewhere.

    Source: UniDEC v1, L_OvA, a sum over labels; Renee; as the classifier's auxiliary loss: UniDEC v2, section 2.4.2.
    No reduction applies. A query without a positive target in the pool drops out, as it does from the other losses.

    Args:
        normalise: "rows": sum over the pool, mean over the queries that take part (the equation). "entries": mean
            over the entries of those queries, ignored ones not counted: some |pool| times smaller, comparable to a
            softmax loss at the start of training.

    Raises:
        ConfigError: another value of `normalise`.
    """
    if normalise not in ("rows", "entries"):
        raise ConfigError("unknown normalisation", where="bce", got=normalise, expected="rows, entries")
    target_P = weight_P.to(torch.float64 if logit_BS.dtype == torch.float64 else torch.float32).clamp(0, 1)
    num_rows, num_cols = logit_BS.shape
    active_B = target_P.new_zeros(num_rows).index_add_(0, row_P, target_P).gt(0).to(target_P.dtype)
    total = _BinaryRows.apply(logit_BS, row_P, col_P, target_P, ignored_row_F, ignored_col_F, active_B)
    count = active_B.sum()
    if normalise == "entries":
        count = count * num_cols - active_B[ignored_row_F].sum()
    return total / count.clamp_min(1)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "ds": decoupled_softmax,
    "supcon": supcon,
    "infonce": supcon,
    "triplet": triplet,
    "bce": bce,
}


@dataclass(frozen=True)
class PoolTargets:
    """The pairs of a pool as tensors on the device of the logits; see `unidec.training.sampler.PoolBatch` for the
    fields.
    """

    row_P: Tensor
    col_P: Tensor
    sampled_P: Tensor
    relevance_P: Tensor | None
    num_positives_B: Tensor
    ignored_row_F: Tensor
    ignored_col_F: Tensor

    @classmethod
    def from_batch(cls, batch: Any, device: torch.device | str = "cpu", *, soft: bool = False) -> PoolTargets:
        """Copies a `PoolBatch` to the device; `soft`: keep the stored relevances as soft targets, else every positive
        counts 1.
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
        )


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

    `bce` is a sum over entries and has no direction: it is computed once, whatever `forward`, its targets the
    relevances.

    Args:
        kind: a key of `LOSSES`.
        logit_BS: float [B, S], as in `LOSSES`.
        targets: pairs of this pool.
        reduction: a key of `REDUCTIONS`.
        forward: weight of query -> label, 0 to 1.
        generator: passed to the reduction ("pol").
        options: passed to the loss: `margin`, `negatives` of triplet, `normalise` of bce.

    Raises:
        TypeError: an option that the loss does not have.
        ConfigError: an unknown loss, reduction or option value.
    """
    if kind not in LOSSES:
        raise ConfigError("unknown loss", where="loss", got=kind, expected=", ".join(LOSSES))
    num_queries, num_labels = logit_BS.shape
    t = targets
    if kind == "bce":
        target_P = t.relevance_P if t.relevance_P is not None else torch.ones(t.row_P.shape[0], device=t.row_P.device)
        return bce(logit_BS, t.row_P, t.col_P, target_P, t.ignored_row_F, t.ignored_col_F, **options)

    parts = _directions(t, (num_queries, num_labels), reduction, forward, generator)
    if LOSSES[kind] in (decoupled_softmax, supcon):
        if options:
            raise TypeError(f"the loss {kind} has no option {', '.join(options)}")
        softmax = "ds" if kind == "ds" else "supcon"
        row_M, col_M = _masked_pairs(softmax, t.row_P, t.col_P, t.ignored_row_F, t.ignored_col_F)
        s_P, lse_B, lse_S = _PoolTerms.apply(logit_BS, t.row_P, t.col_P, row_M, col_M, forward > 0, forward < 1)
        losses = []
        for share, index_P, weight_P in parts:
            lse, num_rows = (lse_B, num_queries) if index_P is t.row_P else (lse_S, num_labels)
            losses.append(share * _mean_over_rows(_pair_loss(softmax, s_P, lse[index_P]), weight_P, index_P, num_rows))
        return sum(losses[1:], losses[0])
    losses = []
    for share, index_P, weight_P in parts:
        if index_P is t.row_P:
            one = LOSSES[kind](logit_BS, t.row_P, t.col_P, weight_P, t.ignored_row_F, t.ignored_col_F, **options)
        else:
            one = LOSSES[kind](logit_BS.t(), t.col_P, t.row_P, weight_P, t.ignored_col_F, t.ignored_row_F, **options)
        losses.append(share * one)
    return sum(losses[1:], losses[0])
