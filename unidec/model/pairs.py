"""What the losses on pool logits share: their pairs, the mask, the mean over rows, the number format.

Legend: B rows, S columns, P positive pairs in the pool, F ignored pairs (filter pairs), M masked pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unidec.errors import ConfigError

# Stands for minus infinity: exp of it is exactly 0 beside any real logit, and a row that holds nothing else still has
# a finite logsumexp, so a loss and gradients of exactly 0 where minus infinity gives NaN. Fits float32 and
# float64.
MASKED = -1e30


class Pairs(NamedTuple):
    """The pairs of a pool's logits [B, S] that are not plain negatives.

    Attributes:
        row_P, col_P: int64 [P], positions of all true positives in the pool, each pair once, any order.
        weight_P: float [P], the reduction's weight of each (`unidec.model.reductions`); for `bce` and `hinge` the
            target itself, in [0, 1].
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


def loss_dtype(logit_BS: Tensor) -> torch.dtype:
    """float64 for float64 logits, else float32."""
    return torch.float64 if logit_BS.dtype == torch.float64 else torch.float32


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

    Raises:
        ConfigError: another value of `normalise`.
    """
    if normalise not in ("rows", "entries"):
        raise ConfigError("unknown normalisation", where="loss.bce_normalise", got=normalise, expected="rows, entries")
    active_B = target_P.new_zeros(shape[0]).index_add_(0, row_P, target_P).gt(0).to(target_P.dtype)
    count = active_B.sum()
    if normalise == "entries":
        count = count * shape[1] - active_B[ignored_row_F].sum()
    return active_B, count.clamp_min(1)
