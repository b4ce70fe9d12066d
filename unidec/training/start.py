"""What a new model takes from the data it will train on.

Legend: V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from unidec.data.tokens import Tokens
from unidec.model.unidec import UniDEC

Features = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]  # BagEncoder.features
TEXTS_AT_ONCE = 1 << 16  # of which document frequencies are counted


def start_bag(model: UniDEC, parts: Sequence[tuple[str, Tokens, np.ndarray]]) -> None:
    """Weigh the bag's tokens by how many training texts have them; nothing without a bag, or with another's weights.

    Draws no random numbers and gives the same weights each time, so that also a run that goes on may begin with it.

    Args:
        model: with `encoder.start` its bag keeps the weights that it was given.
        parts: (source, tokens, rows int64) of all training texts.
    """
    bag = model.encoder.bag
    if bag is None or model.encoder_settings.start:
        return
    frequency_V = np.zeros(bag.embedding.num_rows, dtype=np.int64)
    for _, tokens, rows in parts:
        frequency_V += document_frequency(tokens, rows, len(frequency_V), bag.features)
    bag.start_weights(frequency_V, sum(len(rows) for _, _, rows in parts))


def document_frequency(tokens: Tokens, rows: np.ndarray, vocab: int, features: Features | None = None) -> np.ndarray:
    """Texts that have each token, int64 [V]; of `features` of their tokens where that is given."""
    frequency_V = np.zeros(vocab, dtype=np.int64)
    for begin in range(0, len(rows), TEXTS_AT_ONCE):
        flat, offsets = tokens.ragged(rows[begin : begin + TEXTS_AT_ONCE])
        lengths = np.diff(offsets)
        if features is not None:
            flat, lengths = features(flat, lengths)
        text = np.repeat(np.arange(len(lengths)), lengths)
        frequency_V += np.bincount(np.unique(text * vocab + flat) % vocab, minlength=vocab)
    return frequency_V
