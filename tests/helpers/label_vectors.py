"""The label side of a searched space as one matrix, from the heads' own arrays."""

from __future__ import annotations

import numpy as np

from unidec.ranking.heads import Heads, Space


def label_vectors(
    de_LD: np.ndarray | None,
    clf_LD: np.ndarray | None,
    bias_L: np.ndarray | None,
    space: Space,
    clf_normalize: bool,
) -> np.ndarray:
    """The label side of `Heads`, float32 [L, D']."""
    given = {"de": de_LD, "clf": clf_LD, "bias": bias_L}
    rows = Heads(
        {name: part for name, part in given.items() if part is not None}, space, clf_normalize
    )
    return rows.take(slice(None))
