"""Votes as a plain matrix, to compare with."""

from __future__ import annotations

import numpy as np

from unidec.ranking.candidates import DenseScores, PairScores


def dense_votes(votes: PairScores | DenseScores) -> np.ndarray:
    """All scores, float32 [B, L]."""
    num_queries, num_labels = votes.shape
    return votes.at(np.arange(num_queries * num_labels)).reshape(votes.shape)
