"""What the losses on pool logits share: the mask, the mean over rows, the number format.

Legend: B rows, S columns, P positive pairs in the pool, F ignored pairs (filter pairs), M masked pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unidec.errors import ConfigError

# Stands for minus infinity: exp of it is exactly 0 beside any real logit, and a row that holds nothing else still has
# a finite logsumexp, hence a loss and gradients of exactly 0 where minus infinity gives NaN. Fits float32 and
# float64.
MASKED = -1e30


def computable(logit_BS: Tensor) -> Tensor:
    return logit_BS if logit_BS.dtype == torch.float64 else logit_BS.float()


def mask_(x_BS: Tensor, row_M: Tensor, col_M: Tensor) -> Tensor:
    # The value is filled in on the device: a Python number made into a tensor there would wait for it.
    return x_BS.index_put_((row_M, col_M), torch.full((), MASKED, dtype=x_BS.dtype, device=x_BS.device))


def mean_over_rows(loss_P: Tensor, weight_P: Tensor, row_P: Tensor, num_rows: int) -> Tensor:
    """Weighted sum over pairs / number of rows with positive total weight (at least 1)."""
    weight_P = weight_P.to(loss_P.dtype)
    total_B = weight_P.new_zeros(num_rows).index_add_(0, row_P, weight_P)
    return (weight_P * loss_P).sum() / (total_B > 0).sum().clamp_min(1)


def masked_pairs(
    kind: str, row_P: Tensor, col_P: Tensor, ignored_row_F: Tensor, ignored_col_F: Tensor
) -> tuple[Tensor, Tensor]:
    """Pairs outside the denominators. SupCon keeps the positives in; decoupled softmax takes all of them out."""
    if kind == "ds":
        return torch.cat([row_P, ignored_row_F]), torch.cat([col_P, ignored_col_F])
    return ignored_row_F, ignored_col_F


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
