"""Matryoshka representation learning: the first dimensions of a head's vectors are vectors of their
own, so that the width which is served can be chosen after training.

Source: Kusupati et al. 2022, equation 1: the losses of all widths are added up. Each width has the
whole loss of a head, on the first dimensions of its queries and of its labels' vectors or rows.

Legend: N texts or rows, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from unidec.model.additions import View


def first_dimensions(width: int, vectors_ND: Tensor) -> Tensor:
    """The first dimensions of vectors, [N, width]."""
    return vectors_ND[:, :width]


def views(widths: Sequence[int]) -> list[View]:
    """A view of each width."""
    return [partial(first_dimensions, width) for width in widths]
