"""A label graph in memory, as training reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, vstack

from unidec.data.label_graph import target_blocks


def soft_targets(relevance: csr_matrix, threshold: float, **options: Any) -> csr_matrix:
    """All of `target_blocks` in one float32 CSR [L, L]."""
    none = csr_matrix((0, relevance.shape[1]), dtype=np.float32)
    return csr_matrix(vstack([none, *target_blocks(relevance, threshold, **options)], format="csr"))
