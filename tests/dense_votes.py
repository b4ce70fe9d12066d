"""Votes as a plain matrix, to compare with."""

from __future__ import annotations

import numpy as np

from unidec.ranking.sparse import PairScores


def dense_votes(votes: PairScores) -> np.ndarray:
    """All scores, float32 [B, L]."""
    out = np.zeros(votes.shape, dtype=np.float32)
    out.ravel()[votes.key_N] = votes.score_N
    return out
