"""The pairs of a pool of labels: positives, ignored pairs, the weight that a multi-label reduction gives each, and what
the losses on a pool's logits share.

Legend: B rows (queries; pool labels where the loss runs from label to query), S columns, P positive pairs in the pool,
F ignored pairs (filter pairs), M masked pairs.

Nothing here waits for the device: no `.item()`, no boolean indexing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Stands for minus infinity: exp of it is exactly 0 beside any real logit, and a row that holds nothing else still has
# a finite logsumexp, so a loss and gradients of exactly 0 where minus infinity gives NaN. Fits float32 and
# float64.
MASKED = -1e30
REDUCTIONS = ("psl", "psl-sum", "pal-n", "pol")


def to_device(array: np.ndarray | Tensor, device: torch.device | str) -> Tensor:
    """An array on the device. For a GPU through pinned memory: else the host would wait for the copy."""
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(np.require(array, requirements=["C", "W"]))
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Callable[[], np.ndarray]:
    """Begin to copy a tensor to the host; what is returned waits until it is there. From a GPU into pinned memory: else
    the host would wait at once."""
    if not tensor.is_cuda:
        return tensor.cpu().numpy
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    copied = torch.cuda.current_stream(tensor.device).record_event()

    def arrived() -> np.ndarray:
        copied.synchronize()
        return copy.numpy()

    return arrived


def all_to_host(tensors: Iterable[Tensor]) -> Iterator[np.ndarray]:
    """Tensors on the host, in order. One is waited for after the next has been asked for: while the host waits, a GPU
    computes that one."""
    earlier: Callable[[], np.ndarray] | None = None
    for tensor in tensors:
        arrived = to_host(tensor)
        if earlier is not None:
            yield earlier()
        earlier = arrived
    if earlier is not None:
        yield earlier()


class Pairs(NamedTuple):
    """The pairs of a pool's logits [B, S] that are not plain negatives.

    Attributes:
        row_P, col_P: int64 [P], positions of all true positives in the pool, each pair once, any order.
        weight_P: float [P], of `target_weights`; for `bce` and `hinge` the target itself, in [0, 1].
        row_F, col_F: int64 [F], pairs that are neither positive nor negative; they leave every denominator.
    """

    row_P: Tensor
    col_P: Tensor
    weight_P: Tensor
    row_F: Tensor
    col_F: Tensor

    def t(self) -> Pairs:
        """Of the transposed logits."""
        return Pairs(self.col_P, self.row_P, self.weight_P, self.col_F, self.row_F)

    def masked(self, kind: str) -> tuple[Tensor, Tensor]:
        """Pairs outside the denominators: SupCon keeps the positives in, decoupled softmax ("ds") has none there."""
        if kind != "ds":
            return self.row_F, self.col_F
        return torch.cat([self.row_P, self.row_F]), torch.cat([self.col_P, self.col_F])


class Columns:
    """Which columns of a pool's logits [B, S] a loss is given: all of them.

    Of several processes each may have a part (`unidec.training.distributed.OwnColumns`). Targets, and the pairs made of
    them, are those of all columns on every process, and so are a loss and what it is divided by.
    """

    partial = False

    def total(self, num_columns: int) -> int:
        """S, where so many columns are given."""
        return num_columns

    def own(self, pairs: Pairs) -> Pairs:
        """The pairs in the given columns, counted from the first of these."""
        return pairs

    def own_values(self, x_P: Tensor) -> Tensor:
        """Of values of all positive pairs those of the pairs in the given columns."""
        return x_P

    def of_all_pairs(self, x_P: Tensor) -> Tensor:
        """The reverse: values of all positive pairs, from each process those of its own; differentiable."""
        return x_P

    def sum(self, x: Tensor) -> Tensor:
        """What each process has summed over its columns becomes the sum over all columns; differentiable."""
        return x

    def sum_gradient(self, x: Tensor) -> Tensor:
        """x, which all processes have, for the scores of each: its gradient becomes the sum of theirs."""
        return x

    def logsumexp(self, lse_B: Tensor) -> Tensor:
        """The same of a logsumexp over columns."""
        return lse_B

    def remove_top(self, x_BS: Tensor, k: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Set the k highest of S > k entries of each row to `MASKED`, in place.

        Returns:
            these entries [B, k], the next one [B, 1], and (places, values) to scatter along dim 1, which restores them.
        """
        top_BK, place_BK = x_BS.topk(k + 1, dim=1)
        next_B1 = top_BK[:, k:].clone()
        top_BK, place_BK = top_BK[:, :k], place_BK[:, :k]
        x_BS.scatter_(1, place_BK, MASKED)
        return top_BK, next_B1, (place_BK, top_BK)


ALL_COLUMNS = Columns()


@dataclass(frozen=True)
class PoolTargets:
    """The pairs of a pool as tensors on the device of the logits; see `unidec.training.sampler.PoolBatch` for the
    fields.

    Attributes:
        relevance_P: float [P], soft targets, or 1 each.
        num_positives_B: number [B], |P_i|, in the pool or not (soft targets: the row's sum).
        importance_P: float [P], inverse propensity of each pair's label, or None: 1 each.
        columns: which of the pool's columns the logits are.
    """

    row_P: Tensor
    col_P: Tensor
    sampled_P: Tensor
    relevance_P: Tensor
    num_positives_B: Tensor
    ignored_row_F: Tensor
    ignored_col_F: Tensor
    importance_P: Tensor | None = None
    columns: Columns = field(default=ALL_COLUMNS, kw_only=True)

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
        relevance_P = batch.relevance_P if soft else np.ones_like(batch.relevance_P)
        arrays = [batch.positive_row_P, batch.positive_col_P, batch.sampled_P, relevance_P, batch.num_positives_B,
                  batch.ignored_row_F, batch.ignored_col_F]  # fmt: skip
        if importance_L is not None:
            arrays.append(importance_L[batch.pool_S[batch.positive_col_P]].astype(np.float32))
        return cls(*(to_device(array, device) for array in arrays))

    def t(self, num_columns: int) -> PoolTargets:
        """Of the transposed logits: a row's positives are the batch's queries that have the label, and all weigh alike
        (they share one propensity: their mean is unbiased as it is)."""
        count_S = self.relevance_P.new_zeros(num_columns).index_add_(0, self.col_P, self.relevance_P)
        return replace(
            self, row_P=self.col_P, col_P=self.row_P, ignored_row_F=self.ignored_col_F,
            ignored_col_F=self.ignored_row_F, num_positives_B=count_S, importance_P=None,
        )  # fmt: skip

    def of_rows(self, row_B: Tensor) -> PoolTargets:
        """Of the queries in another order: row i has the labels of row `row_B[i]`, int64 [B], each once."""
        place_B = torch.empty_like(row_B).scatter_(0, row_B, torch.arange(len(row_B), device=row_B.device))
        return replace(
            self, row_P=place_B[self.row_P], ignored_row_F=place_B[self.ignored_row_F],
            num_positives_B=self.num_positives_B[row_B],
        )  # fmt: skip

    def pairs(self, weight_P: Tensor) -> Pairs:
        """With some weight each."""
        return Pairs(self.row_P, self.col_P, weight_P, self.ignored_row_F, self.ignored_col_F)


def target_weights(
    reduction: str, targets: PoolTargets, num_rows: int, generator: torch.Generator | None = None
) -> Tensor:
    """Weight of each positive pair (i, p), float [P]: which positives of a query carry its loss, and how much of it.

    A multi-class loss is `sum_ip weight_ip * loss(i, p)` divided by the number of rows that carry any weight. Soft
    targets replace the 1 and the counts by relevances. OvA has no weights: it is the loss `bce`, on every entry.

    - "psl", pick some labels: 1 / |P_i^B| each, P_i^B = all true positives of the row in the pool (UniDEC v2, L_PSL).
    - "psl-sum": PSL without the factor, each counts in full ("-PAL" rows of the UniDEC v1 ablation).
    - "pal-n", pick all labels, normalised: 1 / |P_i| each, positives outside the pool counted (UniDEC v1, L_PAL-N).
      Exact only when the pool holds every label.
    - "pol", pick one label: one sampled positive of each row has weight 1, whatever its relevance, all else 0 (DPR,
      NGAME, DEXML).

    Importances multiply the weights, rescaled so that all of them together weigh what they did.

    Args:
        reduction: one of `REDUCTIONS`.
        num_rows: B, the number of rows, those without a pair included.
        generator: for "pol", picks one of the sampled positives at random. Without it the row's first one counts, which
            favours low label ids where beta > 1: pairs come ordered by label.
    """
    row_P, weight_P = targets.row_P, targets.relevance_P
    if reduction == "pol":
        weight_P = _picked(row_P, targets.sampled_P, num_rows, generator).to(weight_P.dtype)
    elif reduction != "psl-sum":
        total_B = targets.num_positives_B.to(weight_P.dtype)
        if reduction == "psl":
            total_B = weight_P.new_zeros(num_rows).index_add_(0, row_P, weight_P)
        # A row's total is 0 only where all its relevances are; its weights are then 0, not 0 / 0.
        weight_P = weight_P / total_B.clamp_min(torch.finfo(total_B.dtype).tiny)[row_P]
    if targets.importance_P is None:
        return weight_P
    product_P = weight_P * targets.importance_P.to(weight_P.dtype)
    return product_P * (weight_P.sum() / product_P.sum().clamp_min(torch.finfo(product_P.dtype).tiny))


def _picked(row_P: Tensor, sampled_P: Tensor, num_rows: int, generator: torch.Generator | None) -> Tensor:
    """One sampled pair of each row, bool [P]."""
    num_pairs = row_P.shape[0]
    if generator is None:
        rank_P = torch.arange(num_pairs, device=row_P.device)
    else:
        rank_P = to_device(torch.randperm(num_pairs, generator=generator, device=generator.device), row_P.device)
    rank_P = torch.where(sampled_P, rank_P, num_pairs)
    first_B = torch.full((num_rows,), num_pairs, dtype=rank_P.dtype, device=row_P.device)
    first_B = first_B.scatter_reduce(0, row_P, rank_P, reduce="amin")
    return (rank_P == first_B[row_P]) & sampled_P


def loss_dtype(logit_BS: Tensor) -> torch.dtype:
    """float64 for float64 logits, else float32."""
    return torch.float64 if logit_BS.dtype == torch.float64 else torch.float32


def rows_at(x: Tensor, at_N: Tensor) -> Tensor:
    """`x[at_N]` along the first dimension, whose gradients are added in the same order each time.

    With several threads a CPU adds those of `x[at_N]` by atomic operations, in any order; a GPU does so for
    `index_select`."""
    return x.index_select(0, at_N) if x.device.type == "cpu" else x[at_N]


def mask_(x_BS: Tensor, row_M: Tensor, col_M: Tensor) -> Tensor:
    # The value is filled in on the device: a Python number made into a tensor there would wait for it.
    return x_BS.index_put_((row_M, col_M), torch.full((), MASKED, dtype=x_BS.dtype, device=x_BS.device))


def mean_over_rows(loss_P: Tensor, weight_P: Tensor, row_P: Tensor, num_rows: int) -> Tensor:
    """Weighted sum over pairs / number of rows with positive total weight (at least 1)."""
    weight_P = weight_P.to(loss_P.dtype)
    total_B = weight_P.new_zeros(num_rows).index_add_(0, row_P, weight_P)
    return (weight_P * loss_P).sum() / (total_B > 0).sum().clamp_min(1)


def entry_count(
    target_P: Tensor, row_P: Tensor, shape: tuple[int, ...], ignored_row_F: Tensor, normalise: str
) -> tuple[Tensor, Tensor]:
    """Of a one-vs-all loss: (1 for each row with a positive target, else 0, [B]; what its sum is divided by, 0-d).

    Args:
        normalise: "rows": the rows that take part; "entries": their entries, ignored ones not counted.
    """
    active_B = target_P.new_zeros(shape[0]).index_add_(0, row_P, target_P).gt(0).to(target_P.dtype)
    count = active_B.sum()
    if normalise == "entries":
        count = count * shape[1] - active_B[ignored_row_F].sum()
    return active_B, count.clamp_min(1)
