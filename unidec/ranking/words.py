"""TF-IDF vectors of texts over words and pairs of adjacent words, by which training queries can be compared.

A word's feature is the hash of its pieces, a pair's the hash of its two words. For long texts, the words of the first
tokens (such as the title) can form a second part of the vector, which can be compared separately.

Source: tf-idf weighting and cosine of Salton and Buckley 1988, with a logarithmic term frequency.

Legend: V tokens of the vocabulary, F features, B texts, W words of all texts, C columns: F, or 2 F with a second part.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack

from unidec.data.tokens import load_tokenizer
from unidec.errors import ConfigError
from unidec.model.words import continuing_pieces, mixed, word_keys

MOST_TEXTS = 0.1  # a word in a larger share of the texts says nothing about their topic, and is dropped
FEWEST_TEXTS = 2  # a pair in fewer texts cannot match another text, and is dropped
_PAIR = np.uint64(0x9FB21C651E98DF25)  # odd multiplier of a pair's first word: the hash depends on the order
_SMALL = 100  # a word in at most this number of texts is never dropped as too frequent

Keys = NDArray[np.uint64]


class WordSpace:
    """Known words and pairs of words, with their weights.

    Args:
        tokenizer_folder: tokenizer of the model. It defines the special tokens, and which pieces continue a word; if it
            does not mark them, each token is a word.
        keys_F: uint64 [F], hashes of the known words and pairs, ascending. All others are ignored.
        idf_F: float32 [F], their weights, positive.
        head: number of first tokens whose words form the second part; 0: no second part.

    Raises:
        ValueError: keys do not ascend, the number of weights differs, or weights are not finite and positive.
    """

    def __init__(self, tokenizer_folder: Path, keys_F: Keys, idf_F: NDArray[np.float32], head: int = 0) -> None:
        if len(keys_F) != len(idf_F) or (keys_F[1:] <= keys_F[:-1]).any():
            raise ValueError("keys_F must be strictly ascending, and idf_F must have one weight for each key")
        if not (np.isfinite(idf_F).all() and (idf_F > 0).all()):
            raise ValueError("idf_F must be finite and above 0")
        self.keys_F, self.idf_F, self.head = keys_F, np.asarray(idf_F, dtype=np.float32), head
        self._continues_V, self._skipped_V = _token_kinds(tokenizer_folder)

    @classmethod
    def fit(
        cls, tokenizer_folder: Path, flat: NDArray[np.int64], offsets: NDArray[np.int64], head: int = 0
    ) -> WordSpace:  # fmt: skip
        """The word space of the given texts; a feature has the weight ln((1 + B) / (1 + its number of texts)) + 1.

        Args:
            flat, offsets: token ids of the texts, as returned by `Tokens.ragged`.
        """
        space = cls(tokenizer_folder, np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.float32), head)
        key, text, is_pair = space._features(flat, offsets)
        num_texts = len(offsets) - 1
        keys, first, key_index = np.unique(key, return_index=True, return_inverse=True)
        pairs = np.unique(key_index.astype(np.int64) * max(num_texts, 1) + text)  # of a key and a text
        texts_F = np.bincount(pairs // max(num_texts, 1), minlength=len(keys))
        most = max(MOST_TEXTS * num_texts, _SMALL)
        keep = np.where(is_pair[first], texts_F >= FEWEST_TEXTS, texts_F <= most)
        space.keys_F = keys[keep]
        space.idf_F = (np.log((1 + num_texts) / (1 + texts_F[keep])) + 1).astype(np.float32)
        return space

    @property
    def num_features(self) -> int:
        """Number of features F."""
        return len(self.keys_F)

    @property
    def num_columns(self) -> int:
        """Number of columns C of the vectors."""
        return 2 * self.num_features if self.head else self.num_features

    def vectors(self, flat: NDArray[np.int64], offsets: NDArray[np.int64]) -> csr_matrix:
        """TF-IDF vectors of the given texts, (1 + ln count) * idf: float32 CSR [B, C] with sorted indices. Each part
        has unit length, or is empty if none of its words is known.

        Args:
            flat, offsets: token ids of the texts, as returned by `Tokens.ragged`.
        """
        whole_BF = self._vectors(flat, offsets)
        if not self.head:
            return whole_BF
        length_B = np.diff(offsets)
        in_head = np.arange(len(flat)) - np.repeat(offsets[:-1], length_B) < self.head
        head_BF = self._vectors(flat[in_head], np.concatenate([[0], np.cumsum(np.minimum(length_B, self.head))]))
        return csr_matrix(hstack([whole_BF, head_BF], format="csr"))

    def part(self, vectors_BC: csr_matrix, which: int) -> csr_matrix:
        """A copy that keeps only the columns of one part: 0 for the whole texts, 1 for their first tokens."""
        in_part_N, indptr = self._entries_of_part(vectors_BC, which)
        return csr_matrix((vectors_BC.data[in_part_N], vectors_BC.indices[in_part_N], indptr), shape=vectors_BC.shape)

    def num_words(self, vectors_BC: csr_matrix, which: int) -> NDArray[np.int64]:
        """Number of known words and pairs in one part of each vector, int64 [B]."""
        return np.diff(self._entries_of_part(vectors_BC, which)[1])

    def _entries_of_part(self, vectors_BC: csr_matrix, which: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Mask of the entries in one part, and the row offsets of these entries alone."""
        in_part_N = vectors_BC.indices // max(self.num_features, 1) == which
        return in_part_N, np.concatenate([[0], np.cumsum(in_part_N)])[vectors_BC.indptr]

    def _vectors(self, flat: NDArray[np.int64], offsets: NDArray[np.int64]) -> csr_matrix:
        key, text, _ = self._features(flat, offsets)
        at = np.minimum(np.searchsorted(self.keys_F, key), max(self.num_features - 1, 0))
        known = self.keys_F[at] == key if self.num_features else np.zeros(len(key), dtype=bool)
        num_texts = len(offsets) - 1
        entry_N, count_N = np.unique(text[known] * self.num_features + at[known], return_counts=True)
        text_N, feature_N = np.divmod(entry_N, max(self.num_features, 1))
        weight_N = (1 + np.log(count_N)) * self.idf_F[feature_N]
        norm_B = np.sqrt(np.bincount(text_N, weight_N**2, minlength=num_texts))
        data = (weight_N / norm_B[text_N]).astype(np.float32)
        indptr = np.searchsorted(text_N, np.arange(num_texts + 1))
        return csr_matrix((data, feature_N, indptr), shape=(num_texts, self.num_features))

    def _features(
        self, flat: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> tuple[Keys, NDArray[np.int64], NDArray[np.bool_]]:
        """Hash and text of each word, followed by those of each pair; and whether the feature is a pair."""
        key_W, num_words_B = word_keys(flat, np.diff(offsets), self._continues_V, self._skipped_V)
        text_W = np.repeat(np.arange(len(num_words_B)), num_words_B)
        same_text = text_W[1:] == text_W[:-1]
        pair = mixed(key_W[:-1] * _PAIR + key_W[1:])[same_text]
        is_pair = np.zeros(len(key_W) + len(pair), dtype=bool)
        is_pair[len(key_W) :] = True
        return np.concatenate([key_W, pair]), np.concatenate([text_W, text_W[1:][same_text]]), is_pair


def _token_kinds(tokenizer_folder: Path) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which tokens continue a word, and which are special and skipped: bool [V] each."""
    tokenizer = load_tokenizer(tokenizer_folder, 3)
    num_tokens = tokenizer.vocab_size
    try:
        continues_V = continuing_pieces(tokenizer_folder, num_tokens)
    except ConfigError:  # the tokenizer does not mark continuing pieces: each token is a word
        continues_V = np.zeros(num_tokens, dtype=bool)
    skipped_V = np.zeros(num_tokens, dtype=bool)
    skipped_V[tokenizer.encode([""])[0]] = True  # special tokens around every text
    settings = json.loads((tokenizer_folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = [token["id"] for token in settings.get("added_tokens", []) if token.get("special")]
    skipped_V[[number for number in special if number < num_tokens]] = True
    return continues_V, skipped_V
