"""Whole words as further tokens of a bag, which cannot tell "lib ##ssl" from "lib" and "##ssl" apart.

Each word of several pieces gets one more row of the bag's table, found by a hash of its pieces (the hashing trick:
Weinberger et al. 2009): there is no vocabulary to build or to keep.

Legend: F tokens of all texts, B texts, V tokens of the vocabulary, M words of several pieces.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unidec.errors import ConfigError

PLACES = 1 << 20  # a piece's place in its word is below
_STARTS = ("▁", "Ġ")  # how SentencePiece and byte-level BPE mark the first piece of a word; WordPiece marks the rest
ODD = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment and multipliers
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def continuing_pieces(tokenizer_folder: Path, num_tokens: int) -> NDArray[np.bool_]:
    """Which tokens continue a word, bool [V], by the marks of the tokenizer's model.

    Raises:
        ConfigError: a tokenizer whose pieces do not show where a word begins.
    """
    from tokenizers import Tokenizer

    file = tokenizer_folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    described = json.loads(file.read_text(encoding="utf-8"))
    whole = tokenizer.get_vocab(with_added_tokens=True)
    prefix = described["model"].get("continuing_subword_prefix")
    if prefix:
        found = [number for token, number in whole.items() if token.startswith(prefix)]
    elif any(token.startswith(_STARTS) for token in whole):
        added = {token["content"] for token in described.get("added_tokens", [])}
        found = [number for token, number in whole.items() if not token.startswith(_STARTS) and token not in added]
    else:
        raise ConfigError(
            "this tokenizer's pieces do not show where a word begins", where="encoder.bag_words", got=str(file),
            expected="WordPiece, SentencePiece or byte-level BPE", fix="encoder.bag_words: 0",
        )  # fmt: skip
    continues_V = np.zeros(num_tokens, dtype=bool)
    continues_V[[number for number in found if number < num_tokens]] = True
    return continues_V


def with_words(
    flat_F: NDArray[np.int64], lengths_B: NDArray[np.int64], continues_V: NDArray[np.bool_], num_buckets: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of some texts, each followed by its words of several pieces: ids int64 from V to V + num_buckets.

    Args:
        flat_F, lengths_B: int64 ids below V, text after text, and the tokens of each.
        continues_V: of `continuing_pieces`.

    Returns:
        (ids int64 [F + M], lengths int64 [B]): a word's own id follows its last piece.
    """
    start_W, pieces_W = _cut(flat_F, lengths_B, continues_V)
    several = np.flatnonzero(pieces_W > 1)
    if not len(several):
        return flat_F, lengths_B
    ends_B = np.cumsum(lengths_B)
    key_M = _keys(flat_F, start_W, pieces_W)[several]
    bucket_M = len(continues_V) + (mixed(key_M) % np.uint64(num_buckets)).astype(np.int64)
    after_M = start_W[several] + pieces_W[several]
    text_M = np.searchsorted(ends_B, after_M - 1, side="right")
    return np.insert(flat_F, after_M, bucket_M), lengths_B + np.bincount(text_M, minlength=len(lengths_B))


def word_keys(
    flat_F: NDArray[np.int64],
    lengths_B: NDArray[np.int64],
    continues_V: NDArray[np.bool_],
    skipped_V: NDArray[np.bool_],
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Every word of some texts by a 64-bit hash of its pieces, text after text: (hashes uint64 [W], words of each text
    int64 [B]). `skipped_V` are tokens that are no part of a text (special ones); the others are as in `with_words`."""
    keep_F = ~skipped_V[flat_F]
    text_F = np.repeat(np.arange(len(lengths_B)), lengths_B)[keep_F]
    flat_F, lengths_B = flat_F[keep_F], np.bincount(text_F, minlength=len(lengths_B))
    start_W, pieces_W = _cut(flat_F, lengths_B, continues_V)
    if not len(start_W):
        return np.zeros(0, dtype=np.uint64), lengths_B
    return mixed(_keys(flat_F, start_W, pieces_W)), np.bincount(text_F[start_W], minlength=len(lengths_B))


def _cut(
    flat_F: NDArray[np.int64], lengths_B: NDArray[np.int64], continues_V: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each word begins, and its number of pieces, int64 [W]; no word continues in the next text."""
    begins_F = ~continues_V[flat_F]
    ends_B = np.cumsum(lengths_B)
    begins_F[(ends_B - lengths_B)[lengths_B > 0]] = True
    start_W = np.flatnonzero(begins_F)
    return start_W, np.diff(np.append(start_W, len(flat_F)))


def _keys(flat_F: NDArray[np.int64], start_W: NDArray[np.int64], pieces_W: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A sum of mixed (piece, place in the word) for each word: order matters, and any length takes one pass."""
    place_F = np.arange(len(flat_F)) - np.repeat(start_W, pieces_W)
    key_F = mixed(flat_F.astype(np.uint64) * np.uint64(PLACES) + place_F.astype(np.uint64))
    return np.add.reduceat(key_F, start_W)


def mixed(key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every bit of the key moves every bit of the result. Overflow is meant."""
    key = key + ODD
    key = (key ^ (key >> np.uint64(30))) * MIX[0]
    key = (key ^ (key >> np.uint64(27))) * MIX[1]
    return key ^ (key >> np.uint64(31))
