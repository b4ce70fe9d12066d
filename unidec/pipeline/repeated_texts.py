"""Texts of given lengths without content, for a training whose memory is measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from unidec.data.tokens import TokenCache

_TEXTS = 4093  # different texts; a prime, so that texts at any distance are different ones


class RepeatedTexts(TokenCache):
    """As many texts as are asked for, the same few again and again: some of the greatest length, as
    many as the mean allows, the others of one token.
    """

    def __init__(self, count: int, tokens: tuple[float, int], most: int, vocab_size: int) -> None:
        longest = min(tokens[1], most)
        share = (min(tokens[0], most) - 1) / max(longest - 1, 1)
        shuffled = np.random.default_rng(0).permutation(_TEXTS)
        lengths = np.where(shuffled < share * _TEXTS, longest, 1)
        offsets = np.cumsum([0, *lengths])
        ids = np.arange(offsets[-1]) % vocab_size
        super().__init__(ids, offsets, vocab_size, 0, longest)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def lengths(self, rows: Any = None) -> Any:
        return super().lengths(rows % _TEXTS)

    def starts(self, rows_B: Any) -> Any:
        return super().starts(rows_B % _TEXTS)
