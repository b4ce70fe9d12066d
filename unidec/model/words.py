"""Whole words as additional tokens of a bag: without word order, the pieces "lib ##ssl" of a word do not differ from
"lib" and "##ssl" in two words.

Each word of several pieces gets a row of the bag's table by a hash of its pieces (the hashing trick: Weinberger et al.
2009), so that no vocabulary of words has to be built or stored.

Legend: F tokens of all texts, B texts, V tokens of the vocabulary, W words, M words of several pieces.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unidec.errors import ConfigError

PLACES = 1 << 20  # bound on a piece's position in its word
_STARTS = ("▁", "Ġ")  # mark a word's first piece in SentencePiece and byte-level BPE; WordPiece marks the other pieces
ODD = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment and multipliers
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def continuing_pieces(tokenizer_folder: Path, num_tokens: int) -> NDArray[np.bool_]:
    """Whether each token continues a word, bool [V], by the marks that the tokenizer's model uses.

    Raises:
        ConfigError: the tokenizer's pieces do not show where a word begins.
    """
    from tokenizers import Tokenizer

    file = tokenizer_folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    description = json.loads(file.read_text(encoding="utf-8"))
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    prefix = description["model"].get("continuing_subword_prefix")
    if prefix:
        ids = [number for token, number in vocab.items() if token.startswith(prefix)]
    elif any(token.startswith(_STARTS) for token in vocab):
        added = {token["content"] for token in description.get("added_tokens", [])}
        ids = [number for token, number in vocab.items() if not token.startswith(_STARTS) and token not in added]
    else:
        raise ConfigError(
            "the tokenizer's pieces do not show where a word begins", where="encoder.bag_words", got=str(file),
            expected="WordPiece, SentencePiece or byte-level BPE", fix="encoder.bag_words: 0",
        )  # fmt: skip
    continues_V = np.zeros(num_tokens, dtype=bool)
    continues_V[[number for number in ids if number < num_tokens]] = True
    return continues_V


def with_words(
    flat_F: NDArray[np.int64], lengths_B: NDArray[np.int64], continues_V: NDArray[np.bool_], num_buckets: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token ids of some texts, with an id from V to V + num_buckets - 1 inserted for each word of several pieces.

    Args:
        flat_F, lengths_B: int64, ids below V of all texts in order, and the number of tokens of each text.
        continues_V: from `continuing_pieces`.

    Returns:
        (ids int64 [F + M], lengths int64 [B]); a word's id follows its last piece.
    """
    start_W, pieces_W = _words(flat_F, lengths_B, continues_V)
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
    """64-bit hashes of all words of some texts.

    Args:
        skipped_V: bool [V], special tokens, which are not part of a text. The other arguments are those of
            `with_words`.

    Returns:
        (hashes uint64 [W] of all texts in order, number of words of each text int64 [B]).
    """
    keep_F = ~skipped_V[flat_F]
    text_F = np.repeat(np.arange(len(lengths_B)), lengths_B)[keep_F]
    flat_F, lengths_B = flat_F[keep_F], np.bincount(text_F, minlength=len(lengths_B))
    start_W, pieces_W = _words(flat_F, lengths_B, continues_V)
    if not len(start_W):
        return np.zeros(0, dtype=np.uint64), lengths_B
    return mixed(_keys(flat_F, start_W, pieces_W)), np.bincount(text_F[start_W], minlength=len(lengths_B))


def _words(
    flat_F: NDArray[np.int64], lengths_B: NDArray[np.int64], continues_V: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Position of each word's first piece, and its number of pieces, int64 [W]. A text's first piece begins a word."""
    begins_F = ~continues_V[flat_F]
    ends_B = np.cumsum(lengths_B)
    begins_F[(ends_B - lengths_B)[lengths_B > 0]] = True
    start_W = np.flatnonzero(begins_F)
    return start_W, np.diff(np.append(start_W, len(flat_F)))


def _keys(flat_F: NDArray[np.int64], start_W: NDArray[np.int64], pieces_W: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash of each word, uint64 [W]: the sum of hashes of (piece, position in the word), which depends on the order of
    the pieces and takes one pass for words of any length."""
    place_F = np.arange(len(flat_F)) - np.repeat(start_W, pieces_W)
    key_F = mixed(flat_F.astype(np.uint64) * np.uint64(PLACES) + place_F.astype(np.uint64))
    return np.add.reduceat(key_F, start_W)


def mixed(key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser, a hash in which every bit of the key affects every bit of the result. Integer overflow is
    intended."""
    key = key + ODD
    key = (key ^ (key >> np.uint64(30))) * MIX[0]
    key = (key ^ (key >> np.uint64(27))) * MIX[1]
    return key ^ (key >> np.uint64(31))
