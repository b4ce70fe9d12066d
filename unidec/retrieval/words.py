"""Texts as TF-IDF vectors of whole words and of pairs of words, by which training queries that vote may be compared.

A word is the hash of its pieces, a pair that of two words in a row. Source: the tf-idf weighting and cosine of Salton
and Buckley 1988, with a logarithmic term frequency.

Of long texts the first tokens, a title for instance, may be compared alone too: they are a second part of the vectors.

Legend: V tokens of the vocabulary, F features, B texts, W words of all texts, C = F columns, or 2 F with a second part.
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

MOST_TEXTS = 0.1  # a word that a larger share of the texts has tells nothing of what a text is about
FEWEST_TEXTS = 2  # a pair that fewer texts have can find no other text
_PAIR = np.uint64(0x9FB21C651E98DF25)  # odd: a pair's hash is no sum that another order would give too
_SMALL = 100  # texts below which no word counts as everywhere

Keys = NDArray[np.uint64]


class WordSpace:
    """Weights of words and pairs of words.

    Args:
        tokenizer_folder: of the model; it defines which pieces continue a word (without such marks each token is a
            word), and which tokens are special.
        keys_F: uint64 [F], hashes of the known words and pairs, ascending. Others count for nothing.
        idf_F: float32 [F], their weights, above 0.
        head: first tokens of a text whose words make the second part; 0: there is none.

    Raises:
        ValueError: keys that do not ascend, or weights that are not finite and above 0, or of another number.
    """

    def __init__(self, tokenizer_folder: Path, keys_F: Keys, idf_F: NDArray[np.float32], head: int = 0) -> None:
        if len(keys_F) != len(idf_F) or (keys_F[1:] <= keys_F[:-1]).any():
            raise ValueError("keys_F must ascend, with a weight each")
        if not (np.isfinite(idf_F).all() and (idf_F > 0).all()):
            raise ValueError("idf_F must be finite and above 0")
        self.keys_F, self.idf_F, self.head = keys_F, np.asarray(idf_F, dtype=np.float32), head
        self._continues_V, self._skipped_V = _marks(tokenizer_folder)

    @classmethod
    def fit(
        cls, tokenizer_folder: Path, flat: NDArray[np.int64], offsets: NDArray[np.int64], head: int = 0
    ) -> WordSpace:  # fmt: skip
        """The words and pairs of some texts, weighted by ln((1 + B) / (1 + texts that have it)) + 1.

        Args:
            flat, offsets: token ids of the texts, as `Tokens.ragged` gives them.
        """
        space = cls(tokenizer_folder, np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.float32), head)
        key, text, is_pair = space._features(flat, offsets)
        num_texts = len(offsets) - 1
        found, first, place = np.unique(key, return_index=True, return_inverse=True)
        once = np.unique(place.astype(np.int64) * max(num_texts, 1) + text)
        texts_F = np.bincount(once // max(num_texts, 1), minlength=len(found))
        most = max(MOST_TEXTS * num_texts, _SMALL)
        keep = np.where(is_pair[first], texts_F >= FEWEST_TEXTS, texts_F <= most)
        space.keys_F = found[keep]
        space.idf_F = (np.log((1 + num_texts) / (1 + texts_F[keep])) + 1).astype(np.float32)
        return space

    @property
    def num_features(self) -> int:
        """F."""
        return len(self.keys_F)

    @property
    def num_columns(self) -> int:
        """C."""
        return 2 * self.num_features if self.head else self.num_features

    def vectors(self, flat: NDArray[np.int64], offsets: NDArray[np.int64]) -> csr_matrix:
        """Vectors of some texts, (1 + ln count) x idf, each part of unit length: float32 CSR [B, C] with sorted
        indices; a part is empty where none of its words is known.

        Args:
            flat, offsets: token ids of the texts, as `Tokens.ragged` gives them.
        """
        whole_BF = self._vectors(flat, offsets)
        if not self.head:
            return whole_BF
        length_B = np.diff(offsets)
        first = np.arange(len(flat)) - np.repeat(offsets[:-1], length_B) < self.head
        head_BF = self._vectors(flat[first], np.concatenate([[0], np.cumsum(np.minimum(length_B, self.head))]))
        return csr_matrix(hstack([whole_BF, head_BF], format="csr"))

    def part(self, vectors_BC: csr_matrix, which: int) -> csr_matrix:
        """Vectors with 0 in all columns but those of a part: 0, the whole texts, or 1, their first tokens."""
        kept_N = vectors_BC.indices // max(self.num_features, 1) == which
        ends = np.concatenate([[0], np.cumsum(kept_N)])[vectors_BC.indptr]
        return csr_matrix((vectors_BC.data[kept_N], vectors_BC.indices[kept_N], ends), shape=vectors_BC.shape)

    def _vectors(self, flat: NDArray[np.int64], offsets: NDArray[np.int64]) -> csr_matrix:
        key, text, _ = self._features(flat, offsets)
        at = np.minimum(np.searchsorted(self.keys_F, key), max(self.num_features - 1, 0))
        known = self.keys_F[at] == key if self.num_features else np.zeros(len(key), dtype=bool)
        num_texts = len(offsets) - 1
        place_N, count_N = np.unique(text[known] * self.num_features + at[known], return_counts=True)
        text_N, feature_N = np.divmod(place_N, max(self.num_features, 1))
        weight_N = (1 + np.log(count_N)) * self.idf_F[feature_N]
        norm_B = np.sqrt(np.bincount(text_N, weight_N**2, minlength=num_texts))
        data = (weight_N / norm_B[text_N]).astype(np.float32)
        indptr = np.searchsorted(text_N, np.arange(num_texts + 1))
        return csr_matrix((data, feature_N, indptr), shape=(num_texts, self.num_features))

    def _features(
        self, flat: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> tuple[Keys, NDArray[np.int64], NDArray[np.bool_]]:
        """Hash and text of every word, then of every pair; whether it is a pair."""
        key_W, words_B = word_keys(flat, np.diff(offsets), self._continues_V, self._skipped_V)
        text_W = np.repeat(np.arange(len(words_B)), words_B)
        together = text_W[1:] == text_W[:-1]
        pair = mixed(key_W[:-1] * _PAIR + key_W[1:])[together]
        is_pair = np.zeros(len(key_W) + len(pair), dtype=bool)
        is_pair[len(key_W) :] = True
        return np.concatenate([key_W, pair]), np.concatenate([text_W, text_W[1:][together]]), is_pair


def _marks(tokenizer_folder: Path) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which tokens continue a word, and which are special: bool [V] each."""
    tokenizer = load_tokenizer(tokenizer_folder, 3)
    num_tokens = tokenizer.vocab_size
    try:
        continues_V = continuing_pieces(tokenizer_folder, num_tokens)
    except ConfigError:  # no marks: each token is a word
        continues_V = np.zeros(num_tokens, dtype=bool)
    skipped_V = np.zeros(num_tokens, dtype=bool)
    skipped_V[tokenizer.encode([""])[0]] = True  # what surrounds every text
    described = json.loads((tokenizer_folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = [token["id"] for token in described.get("added_tokens", []) if token.get("special")]
    skipped_V[[number for number in special if number < num_tokens]] = True
    return continues_V, skipped_V
