"""Matryoshka representation learning: the first dimensions of a head's vectors can be used alone,
so that the served width can be chosen after training.

Source: Kusupati et al. 2022, equation 1: the losses of all widths are added up. Each width has the
whole loss of a head, on the first dimensions of its queries and of its labels' vectors or rows.

Legend: B queries, S labels that a head scores, D width of a head, W a smaller width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from unidec.model.additions import View, whole


def first_dimensions(
    width: int, query_BD: Tensor, label_SD: Tensor, is_unit: bool
) -> tuple[Tensor, Tensor]:
    """The first dimensions of queries [B, W] and labels [S, W], scaled to unit length if the whole
    vectors are.
    """
    query_BW = query_BD[:, :width]
    label_SW = label_SD[:, :width]
    if is_unit:
        return F.normalize(query_BW, dim=-1), F.normalize(label_SW, dim=-1)
    return query_BW, label_SW


def views(widths: Sequence[int]) -> list[View]:
    """The whole vectors, and a view of each width."""
    return [whole, *(partial(first_dimensions, width) for width in widths)]
