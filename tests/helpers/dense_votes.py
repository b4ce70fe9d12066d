"""Votes as a plain matrix, to compare with."""

from __future__ import annotations

import numpy as np

from unidec.ranking.heads import PairScores
from unidec.ranking.word_scores import WordCosines


def dense_votes(votes: PairScores | WordCosines) -> np.ndarray:
    """All scores, float32 [B, L]."""
    num_queries, num_labels = votes.shape
    keys = np.arange(num_queries * num_labels)
    found = votes.at(keys) if isinstance(votes, PairScores) else votes.search(keys)[0]
    return found.reshape(votes.shape)
