"""Whole words of padded texts by standard operators alone: what `unidec.model.words.with_words` finds, for a graph.

Legend: B texts, T tokens of the longest, V tokens of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unidec.model.words import MIX, ODD, PLACES


def padded_words(
    ids_BT: Tensor, mask_BT: Tensor, continues_V: Tensor, num_buckets: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Words of several pieces, each at its last piece.

    Args:
        ids_BT, mask_BT: int64, padded on the right. continues_V: bool, which tokens continue a word.

    Returns:
        the row of the word that ends at a token, int64 [B, T], from V on; whether one does, bool [B, T]; the token's
        place in its text, words before it counted, int64 [B, T].
    """
    place_T, real_BT = torch.arange(ids_BT.shape[1]), mask_BT > 0
    begins_BT = ~continues_V[ids_BT] | (place_T == 0) | ~real_BT
    word_BT = begins_BT.long().cumsum(1)
    inside_BT = ((word_BT[:, :, None] == word_BT[:, None]) & (place_T < place_T[:, None])).long().sum(-1)
    key_BT = _mixed(ids_BT * PLACES + inside_BT)
    before_BT = key_BT.cumsum(1) - key_BT  # sums overflow, and their differences are right all the same
    sum_BT = before_BT + key_BT - before_BT.gather(1, place_T - inside_BT)
    row_BT = len(continues_V) + _remainder(_mixed(sum_BT), num_buckets)
    ends_BT = (inside_BT > 0) & torch.cat([begins_BT[:, 1:], torch.ones_like(begins_BT[:, :1])], 1)
    return row_BT, ends_BT, place_T + ends_BT.long().cumsum(1) - ends_BT.long()


def _mixed(key: Tensor) -> Tensor:
    """`unidec.model.words.mixed`, in signed integers."""
    first, second = (int(factor.astype("int64")) for factor in MIX)
    key = key + int(ODD.astype("int64"))
    key = _xor(key, _shifted(key, 30)) * first
    key = _xor(key, _shifted(key, 27)) * second
    return _xor(key, _shifted(key, 31))


def _xor(one: Tensor, other: Tensor) -> Tensor:
    """Torch's exporter knows it of booleans alone."""
    return one + other - 2 * (one & other)


def _shifted(key: Tensor, bits: int) -> Tensor:
    """To the right as if it had no sign."""
    return torch.div(key, 1 << bits, rounding_mode="floor") & ((1 << (64 - bits)) - 1)


def _remainder(key: Tensor, divisor: int) -> Tensor:
    """As if `key` had no sign."""
    return (_shifted(key, 1) % divisor * 2 + (key & 1)) % divisor
