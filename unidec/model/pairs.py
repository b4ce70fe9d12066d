"""The (query, label) pairs of a pool: positives with the weights of a multi-label reduction, and
ignored pairs; and helpers that the losses share.

Legend: B rows (queries; pool labels where the loss runs from label to query), S columns, P positive
pairs in the pool, F ignored pairs (filter pairs), M masked pairs.

Nothing in the computation of losses waits for the device: no `.item()`, no boolean indexing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unidec.model.pool import PoolBatch

# Used in place of minus infinity: relative to any real logit its exp is exactly 0, and a row of
# masked entries alone still has a finite logsumexp, which gives a loss and gradients of 0 instead
# of NaN. Fits float32 and float64.
MASKED = -1e30


def to_device(array: np.ndarray | Tensor, device: torch.device | str) -> Tensor:
    """An array as a tensor on the device; to a GPU through pinned memory, without waiting."""
    if not isinstance(array, Tensor):
        array = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    if torch.device(device).type != "cuda":
        return array.to(device)
    return array.pin_memory().to(device, non_blocking=True)


class Pairs(NamedTuple):
    """The pairs of a pool's logits [B, S] that are not negatives.

    Attributes:
        row_P, col_P: int64 [P], positions of all true positives in the pool, each pair once, in any
            order.
        weight_P: float [P], from `target_weights`; for `bce` and `hinge` the target itself, in
            [0, 1].
        row_F, col_F: int64 [F], ignored pairs: neither positive nor negative, not in any
            denominator.
        active: the number of `active_rows`, where it is known.
    """

    row_P: Tensor
    col_P: Tensor
    weight_P: Tensor
    row_F: Tensor
    col_F: Tensor
    active: Tensor | None = None

    def t(self) -> Pairs:
        """The pairs of the transposed logits."""
        return Pairs(self.col_P, self.row_P, self.weight_P, self.col_F, self.row_F)

    def masked(self, kind: str) -> tuple[Tensor, Tensor]:
        """Rows and columns of the pairs to leave out of the denominators: ignored pairs, and for
        decoupled softmax ("ds") also the positives, which SupCon keeps in.
        """
        if kind != "ds":
            return self.row_F, self.col_F
        return torch.cat([self.row_P, self.row_F]), torch.cat([self.col_P, self.col_F])


class Columns:
    """The columns of a pool's logits [B, S] that this process computes; in this base class all.

    With several processes each may compute a part (`unidec.training.own_columns.OwnColumns`). Even
    then targets and pairs are those of all columns on every process, and so are the loss and its
    divisor."""

    partial = False

    def total(self, num_columns: int) -> int:
        """S, given the number of this process's columns."""
        return num_columns

    def own(self, pairs: Pairs) -> Pairs:
        """The pairs in this process's columns, with columns numbered from the first of these."""
        return pairs

    def own_values(self, x_P: Tensor) -> Tensor:
        """From values of all positive pairs, those of the pairs in this process's columns."""
        return x_P

    def of_all_pairs(self, x_P: Tensor) -> Tensor:
        """The reverse of `own_values`: the values of all positive pairs; differentiable."""
        return x_P

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all columns, from each process's sum over its own; differentiable."""
        return x

    def sum_gradient(self, x: Tensor) -> Tensor:
        """x, the same on all processes; backward adds up the processes' gradients of it."""
        return x

    def logsumexp(self, lse_B: Tensor) -> Tensor:
        """The logsumexp over all columns, from each process's over its own; differentiable."""
        return lse_B

    def remove_top(self, x_BS: Tensor, k: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Set the k highest of S > k entries of each row to `MASKED`, in place.

        Returns:
            these entries [B, k], the next highest [B, 1], and (indices, values), whose scatter
            along dim 1 restores the entries.
        """
        value_BK, place_BK = x_BS.topk(k + 1, dim=1)
        top_BK, next_B1 = value_BK.split([k, 1], dim=1)
        removed_BK = place_BK[:, :k]
        x_BS.scatter_(1, removed_BK, MASKED)
        return top_BK, next_B1, (removed_BK, top_BK)


ALL_COLUMNS = Columns()


@dataclass(frozen=True)
class PoolTargets:
    """The pairs of a pool as tensors on the device of the logits. Fields not listed here are
    described in `unidec.model.pool.PoolBatch`.

    Attributes:
        relevance_P: float [P], soft targets, or 1 for each pair.
        num_positives_B: [B], |P_i|, in the pool or not (for soft targets the sum of the row's
            targets).
        importance_P: float [P], inverse propensity of each pair's label; None: 1 for each pair.
        columns: which of the pool's columns the logits hold.
        mixture: weighted targets whose losses are added up instead of the loss of these targets;
            empty: no mixture.
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
    mixture: tuple[tuple[float, PoolTargets], ...] = field(default=(), kw_only=True)
    _weighted: dict[tuple[str, bool], Pairs] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def from_batch(
        cls,
        batch: PoolBatch,
        device: torch.device | str = "cpu",
        *,
        soft: bool = False,
        importance_L: np.ndarray | None = None,
    ) -> PoolTargets:
        """Targets from a `PoolBatch`, copied to the device.

        Args:
            soft: use the stored relevances as soft targets; otherwise every positive has relevance
                1.
            importance_L: float [L], inverse propensities of all labels, for propensity-weighted
                losses.
        """
        arrays = [
            batch.positive_row_P,
            batch.positive_col_P,
            batch.sampled_P,
            batch.relevance_P if soft else np.ones_like(batch.relevance_P),
            batch.num_positives_B,
            batch.ignored_row_F,
            batch.ignored_col_F,
        ]
        if importance_L is not None:
            label_P = batch.pool_S[batch.positive_col_P]
            arrays.append(importance_L[label_P].astype(np.float32))
        return cls(*(to_device(array, device) for array in arrays))

    def t(self, num_columns: int) -> PoolTargets:
        """Targets of the transposed logits, [S, B] for `num_columns` S: a row's positives are the
        batch's queries that have the label. They have no importance: they share one propensity, so
        their plain mean is unbiased.
        """
        return replace(
            self,
            row_P=self.col_P,
            col_P=self.row_P,
            ignored_row_F=self.ignored_col_F,
            ignored_col_F=self.ignored_row_F,
            num_positives_B=row_weights(self.relevance_P, self.col_P, num_columns),
            importance_P=None,
        )

    def of_rows(self, row_B: Tensor) -> PoolTargets:
        """Targets whose row i has the labels of row `row_B[i]`, a permutation int64 [B]."""
        place_B = row_B.argsort()
        return replace(
            self,
            row_P=place_B[self.row_P],
            ignored_row_F=place_B[self.ignored_row_F],
            num_positives_B=self.num_positives_B[row_B],
        )

    def pairs(self, weight_P: Tensor) -> Pairs:
        """The pairs, with these weights of the positives."""
        return Pairs(self.row_P, self.col_P, weight_P, self.ignored_row_F, self.ignored_col_F)

    def weighted(
        self, reduction: str, num_rows: int, generator: torch.Generator | None, *, forward: bool
    ) -> Pairs:
        """The pairs of query -> label (`forward`) or of the transposed logits, with the weights of
        `target_weights`. Weights that are not random are computed once for both heads.
        """
        key = (reduction, forward)
        if generator is not None or key not in self._weighted:
            targets = self if forward else self.t(num_rows)
            pairs = targets.pairs(target_weights(reduction, targets, num_rows, generator))
            self._weighted[key] = pairs._replace(active=active_rows(pairs, num_rows))
        return self._weighted[key]


def target_weights(
    reduction: str, targets: PoolTargets, num_rows: int, generator: torch.Generator | None = None
) -> Tensor:
    """Weights of the positive pairs (i, p) under a reduction, float [P].

    A multi-class loss is `sum_ip weight_ip * loss(i, p)` divided by the number of rows with any
    weight. With soft targets, relevances replace the 1 and sums of relevances the counts. The OvA
    reduction has no weights: it is the loss `bce`, on every entry.

    - "psl", pick some labels: 1 / |P_i^B| each, P_i^B = all true positives of the row in the pool
      (UniDEC v2, L_PSL).
    - "psl-sum": PSL without the factor, weight 1 each ("-PAL" rows of the UniDEC v1 ablation).
    - "pal-n", pick all labels, normalised: 1 / |P_i| each, where P_i includes positives outside the
      pool (UniDEC v1, L_PAL-N). Exact only when the pool holds every label.
    - "pol", pick one label: one sampled positive of each row has weight 1, whatever its relevance,
      the others 0 (DPR, NGAME, DEXML).

    Importances multiply the weights, which are then rescaled to the sum that they had before.

    Args:
        reduction: one of these names (`loss.reduction`).
        num_rows: B, the number of rows, including those without a pair.
        generator: for "pol": picks one of the sampled positives at random. Without it the first one
            of each row is taken, which favours low label ids where beta > 1, since pairs are
            ordered by label.
    """
    row_P = targets.row_P
    weight_P = targets.relevance_P
    tiny = torch.finfo(weight_P.dtype).tiny  # a sum of 0 has weights of 0 instead of 0 / 0
    if reduction == "pol":
        weight_P = _pick_one(row_P, targets.sampled_P, num_rows, generator).to(weight_P.dtype)
    elif reduction != "psl-sum":
        if reduction == "psl":
            total_B = row_weights(weight_P, row_P, num_rows)
        else:
            total_B = targets.num_positives_B.to(weight_P.dtype)
        weight_P = weight_P / total_B.clamp_min(tiny)[row_P]
    if targets.importance_P is None:
        return weight_P
    product_P = weight_P * targets.importance_P.to(weight_P.dtype)
    return product_P * (weight_P.sum() / product_P.sum().clamp_min(tiny))


def one_positive(
    targets: PoolTargets, num_rows: int, generator: torch.Generator | None
) -> PoolTargets:
    """Targets of a one-vs-all loss under the reduction "pol": of each row's positives only the one
    that `target_weights` picks has a positive term; the others are not negatives either.

    A pair whose target is 1 has no negative term, so its importance decides alone.
    """
    picked_P = _pick_one(targets.row_P, targets.sampled_P, num_rows, generator)
    importance_P = picked_P.to(targets.relevance_P.dtype)
    if targets.importance_P is not None:
        importance_P = importance_P * targets.importance_P
    return replace(targets, importance_P=importance_P)


def _pick_one(
    row_P: Tensor, sampled_P: Tensor, num_rows: int, generator: torch.Generator | None
) -> Tensor:
    """Mask of one sampled pair of each row, bool [P]."""
    num_pairs = len(row_P)
    if generator is None:
        rank_P = torch.arange(num_pairs, device=row_P.device)
    else:
        drawn_P = torch.randperm(num_pairs, generator=generator, device=generator.device)
        rank_P = to_device(drawn_P, row_P.device)
    rank_P = torch.where(sampled_P, rank_P, num_pairs)
    first_B = rank_P.new_full((num_rows,), num_pairs)
    first_B = first_B.scatter_reduce(0, row_P, rank_P, reduce="amin")
    return (rank_P == first_B[row_P]) & sampled_P


def loss_dtype(logit_BS: Tensor) -> torch.dtype:
    """float64 for float64 logits, else float32."""
    return torch.float64 if logit_BS.dtype == torch.float64 else torch.float32


def rows_at(x: Tensor, at_N: Tensor) -> Tensor:
    """`x[at_N]` along the first dimension, with a backward pass that adds up gradients in a
    deterministic order.

    On a CPU with several threads the backward pass of `x[at_N]` adds by atomic operations, in any
    order; on a GPU that of `index_select` does.
    """
    return x.index_select(0, at_N) if x.device.type == "cpu" else x[at_N]


def mask_(x_BS: Tensor, row_M: Tensor, col_M: Tensor) -> Tensor:
    """Set some entries to `MASKED`, in place."""
    # created on the device: the host would wait for the copy of a Python number
    masked = x_BS.new_full((), MASKED)
    return x_BS.index_put_((row_M, col_M), masked)


def log_shares(logit_BS: Tensor, targets: PoolTargets) -> Tensor:
    """The log softmax of each row without ignored pairs; overwrites the logits."""
    masked_BS = mask_(
        logit_BS.to(loss_dtype(logit_BS)), targets.ignored_row_F, targets.ignored_col_F
    )
    return masked_BS.log_softmax(1)


def row_weights(weight_P: Tensor, row_P: Tensor, num_rows: int) -> Tensor:
    """Total weight of each row's positives, [B]."""
    return weight_P.new_zeros(num_rows).index_add_(0, row_P, weight_P)


def active_rows(pairs: Pairs, num_rows: int) -> Tensor:
    """The number of rows with positive total weight, but at least 1, 0-d."""
    if pairs.active is not None:
        return pairs.active
    total_B = row_weights(pairs.weight_P, pairs.row_P, num_rows)
    return (total_B > 0).sum().clamp_min(1)


def mean_over_rows(loss_P: Tensor, pairs: Pairs, num_rows: int) -> Tensor:
    """Weighted sum over pairs, divided by the number of `active_rows`."""
    weight_P = pairs.weight_P.to(loss_P.dtype)
    return (weight_P * loss_P).sum() / active_rows(pairs, num_rows)


def entry_targets(
    pairs: Pairs, x_B: Tensor, num_columns: int, normalise: str
) -> tuple[Pairs, Tensor, Tensor]:
    """For a one-vs-all loss: the pairs with targets in [0, 1]; active_B, 1 for each row with a
    positive target, else 0; and the divisor of the loss's sum, 0-d, at least 1.

    Args:
        x_B: logits, or any tensor with their number of rows and dtype.
        normalise: "rows": count the active rows; "entries": count their entries without ignored
            ones; "sum": 1.
    """
    target_P = pairs.weight_P.to(loss_dtype(x_B)).clamp(0, 1)
    total_B = row_weights(target_P, pairs.row_P, len(x_B))
    active_B = total_B.gt(0).to(target_P.dtype)
    if normalise == "sum":
        return pairs._replace(weight_P=target_P), active_B, target_P.new_ones(())
    count = active_B.sum()
    if normalise == "entries":
        num_ignored = active_B[pairs.row_F].sum()
        count = count * num_columns - num_ignored
    return pairs._replace(weight_P=target_P), active_B, count.clamp_min(1)
