"""Classifier rows of labels that nobody trained.

Legend: S new labels, D width of a head.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from unidec.retrieval.bundle import Bundle
from unidec.retrieval.space import unit_rows

Floats = npt.NDArray[np.float32]


def estimated_rows(
    bundle: Bundle, trained: npt.NDArray[np.int64], clf_SD: Floats, de_SD: Floats | None
) -> tuple[Floats, float]:
    """Rows and the bias of new labels."""
    bias = float(np.mean(bundle.vectors["bias"][trained], dtype=np.float64)) if "bias" in bundle.vectors else 0.0
    return unit_rows(clf_SD), bias
