"""Whole words as additional tokens of a bag: without word order, the pieces "lib ##ssl" of a word
do not differ from "lib" and "##ssl" in two words.

Each word of several pieces gets a row of the bag's table by a hash of its pieces (the hashing
trick: Weinberger et al. 2009), so that no vocabulary of words has to be built or stored.

The same words, and pairs of adjacent ones, are the features of TF-IDF vectors (`WordSpace`), by
which training queries can be compared. A word's feature is the hash of its pieces, a pair's the
hash of its two words. For long texts, the words of the first tokens (such as the title) can form a
second part of the vector, which can be compared separately. Source: tf-idf weighting and cosine of
Salton and Buckley 1988, with a logarithmic term frequency.

Legend: F tokens of all texts or features of a word space, B texts, V tokens of the vocabulary, W
words, M words of several pieces, N entries of vectors, C columns: F, or 2 F with a second part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack, vstack

from unidec.data.chunks import blocks, offsets_of
from unidec.data.tokens import (
    Bools,
    Ints,
    Tokens,
    load_tokenizer,
    places,
    word_bounds,
    words_of_texts,
)
from unidec.errors import ConfigError
from unidec.model.word_pieces import (
    Keys,
    spelt_words,
    vocabulary,
    written_pieces,
)

PLACES = 1 << 20  # bound on a piece's position in its word
# mark a word's first piece in SentencePiece and byte-level BPE
_STARTS = ("▁", "Ġ")
ODD = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment and multipliers
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
# a word in a larger share of the texts says nothing about their topic, and is dropped
MOST_TEXTS = 0.1
FEWEST_TEXTS = 2  # a pair in fewer texts cannot match another text, and is dropped
# odd multiplier of a pair's first word: the hash depends on the order
_PAIR = np.uint64(0x9FB21C651E98DF25)
_SMALL = 100  # a word in at most this number of texts is never dropped as too frequent

TEXTS_AT_ONCE = 1 << 18  # in a block: some 300 MB of short texts while their words are counted

Texts = tuple[Ints, Ints]  # token ids and offsets, as returned by `Tokens.ragged`


def text_blocks(tokens: Tokens, rows: Ints) -> Iterator[Texts]:
    """The texts at some rows, at most `TEXTS_AT_ONCE` at a time; at least one block."""
    for block in blocks(max(len(rows), 1), TEXTS_AT_ONCE):
        yield tokens.ragged(rows[block])


def continuing_pieces(tokenizer_folder: Path, num_tokens: int) -> Bools:
    """Whether each token continues a word, bool [V], by the marks that the tokenizer's model uses.

    Raises:
        ConfigError: the tokenizer's pieces do not show where a word begins.
    """
    vocab, settings = vocabulary(tokenizer_folder / "tokenizer.json")
    if prefix := settings["model"].get("continuing_subword_prefix"):
        continuing = [number for token, number in vocab.items() if token.startswith(prefix)]
        return _is_among(continuing, num_tokens)
    pieces = written_pieces(tokenizer_folder)
    if pieces is None:
        raise ConfigError(
            "the tokenizer's pieces do not show where a word begins",
            where="encoder.bag_words",
            got=str(tokenizer_folder / "tokenizer.json"),
            expected="WordPiece, SentencePiece or byte-level BPE",
            fix="encoder.bag_words: 0",
        )
    return _is_among(np.flatnonzero(~pieces.begins_V), num_tokens)


def _is_among(tokens: Sequence[int] | Ints, num_tokens: int) -> Bools:
    """Whether each number below V is one of these, bool [V]; larger ones are ignored."""
    return np.isin(np.arange(num_tokens), tokens)


def with_words(
    flat_F: Ints, lengths_B: Ints, continues_V: Bools, num_buckets: int
) -> tuple[Ints, Ints]:
    """Token ids of some texts, with an id from V to V + num_buckets - 1 inserted for each word of
    several pieces.

    Args:
        flat_F, lengths_B: int64, ids below V of all texts in order, and the number of tokens of
            each text.
        continues_V: from `continuing_pieces`.

    Returns:
        (ids int64 [F + M], lengths int64 [B]); a word's id follows its last piece.
    """
    start_W, pieces_W = word_bounds(~continues_V[flat_F], lengths_B)
    several_M = np.flatnonzero(pieces_W > 1)
    if not len(several_M):
        return flat_F, lengths_B
    key_M = _keys(flat_F, start_W, pieces_W)[several_M]
    hash_M = mixed(key_M) % np.uint64(num_buckets)
    bucket_M = len(continues_V) + hash_M.astype(np.int64)
    after_M = (start_W + pieces_W)[several_M]
    num_words_B = words_of_texts(start_W[several_M], lengths_B)
    return np.insert(flat_F, after_M, bucket_M), lengths_B + num_words_B


def word_keys(
    flat_F: Ints, lengths_B: Ints, continues_V: Bools, skipped_V: Bools
) -> tuple[Keys, Ints]:
    """64-bit hashes of all words of some texts.

    Args:
        skipped_V: bool [V], special tokens, which are not part of a text. Other arguments: as for
            `with_words`.

    Returns:
        (hashes uint64 [W] of all texts in order, number of words of each text int64 [B]).
    """
    keep_F = ~skipped_V[flat_F]
    lengths_B = words_of_texts(np.flatnonzero(keep_F), lengths_B)
    flat_F = flat_F[keep_F]
    start_W, pieces_W = word_bounds(~continues_V[flat_F], lengths_B)
    return mixed(_keys(flat_F, start_W, pieces_W)), words_of_texts(start_W, lengths_B)


def _keys(flat_F: Ints, start_W: Ints, pieces_W: Ints) -> Keys:
    """Hash of each word, uint64 [W]: the sum of hashes of (piece, position in the word), which
    depends on the order of the pieces and takes one pass for words of any length.
    """
    place_F = places(pieces_W).astype(np.uint64)
    key_F = mixed(flat_F.astype(np.uint64) * np.uint64(PLACES) + place_F)
    return np.add.reduceat(key_F, start_W) if len(start_W) else key_F


def mixed(key: Keys) -> Keys:
    """splitmix64's finaliser, a hash in which every bit of the key affects every bit of the result.
    Integer overflow is intended.
    """
    key = key + ODD
    key = (key ^ (key >> np.uint64(30))) * MIX[0]
    key = (key ^ (key >> np.uint64(27))) * MIX[1]
    return key ^ (key >> np.uint64(31))


class WordSpace:
    """Known words and pairs of words, with their weights.

    Args:
        tokenizer_folder: tokenizer of the model. It defines the special tokens, and which pieces
            continue a word; if it does not mark them, each token is a word.
        keys_F: uint64 [F], hashes of the known words and pairs, ascending. All others are ignored.
        idf_F: float32 [F], their weights, positive.
        head: number of first tokens whose words form the second part; 0: no second part.
        spelt: words are compared by their spelling, not by their pieces; None: if the tokenizer
            marks blanks (`unidec.model.word_pieces`).

    Raises:
        ValueError: keys do not ascend, the number of weights differs, or weights are not finite and
            positive; or words cannot be compared by their spelling.
    """

    def __init__(
        self,
        tokenizer_folder: Path,
        keys_F: Keys,
        idf_F: NDArray[np.float32],
        head: int = 0,
        spelt: bool | None = None,
    ) -> None:
        ascend = (keys_F[1:] > keys_F[:-1]).all()
        if len(keys_F) != len(idf_F) or not ascend:
            raise ValueError(
                "keys_F must be strictly ascending, and idf_F must have one weight for each key"
            )
        if not (np.isfinite(idf_F).all() and (idf_F > 0).all()):
            raise ValueError("idf_F must be finite and above 0")
        self.keys_F = keys_F
        self.idf_F = np.asarray(idf_F, dtype=np.float32)
        self.head = head
        self._written = None if spelt is False else written_pieces(tokenizer_folder)
        if spelt and self._written is None:
            raise ValueError("the tokenizer does not show what its pieces write")
        if self._written is None:
            self._continues_V, self._skipped_V = _token_kinds(tokenizer_folder)

    @classmethod
    def fit(cls, tokenizer_folder: Path, blocks: Iterable[Texts], head: int = 0) -> WordSpace:
        """The word space of the given texts; a feature has the weight ln((1 + B) / (1 + its number
        of texts)) + 1.

        Memory: 17 bytes for each feature found so far, twice that while a block's features are
        added, and some 100 bytes for each word of a block.

        Args:
            blocks: the texts, some at a time (`text_blocks`).
        """
        no_keys = np.zeros(0, dtype=np.uint64)
        space = cls(tokenizer_folder, no_keys, np.zeros(0, dtype=np.float32), head)
        counted = _Counted(no_keys, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))
        num_texts = 0
        for flat, offsets in blocks:
            counted = counted.joined(_Counted.of(*space._features(flat, offsets)))
            num_texts += len(offsets) - 1
        most = max(MOST_TEXTS * num_texts, _SMALL)
        texts_F = counted.texts_F
        keep_F = np.where(counted.is_pair_F, texts_F >= FEWEST_TEXTS, texts_F <= most)
        rarity_F = (1 + num_texts) / (1 + texts_F[keep_F])
        space.keys_F = counted.keys_F[keep_F]
        space.idf_F = (np.log(rarity_F) + 1).astype(np.float32)
        return space

    @property
    def num_features(self) -> int:
        """Number of features F."""
        return len(self.keys_F)

    @property
    def spelt(self) -> bool:
        """Whether words are compared by their spelling."""
        return self._written is not None

    @property
    def num_columns(self) -> int:
        """Number of columns C of the vectors."""
        return 2 * self.num_features if self.head else self.num_features

    def vectors(self, flat: Ints, offsets: Ints) -> csr_matrix:
        """TF-IDF vectors of the given texts, (1 + ln count) * idf: float32 CSR [B, C] with sorted
        indices. Each part has unit length, or is empty if none of its words is known.

        Args:
            flat, offsets: token ids of the texts, as returned by `Tokens.ragged`.
        """
        whole_BF = self._vectors(flat, offsets)
        if not self.head:
            return whole_BF
        length_B = np.diff(offsets)
        head_offsets = offsets_of(np.minimum(length_B, self.head))
        head_BF = self._vectors(flat[places(length_B) < self.head], head_offsets)
        return csr_matrix(hstack([whole_BF, head_BF], format="csr"))

    def stacked(self, blocks: Iterable[Texts]) -> csr_matrix:
        """`vectors` of all texts of these blocks."""
        vectors = [self.vectors(flat, offsets) for flat, offsets in blocks]
        return vectors[0] if len(vectors) == 1 else csr_matrix(vstack(vectors, format="csr"))

    def part(self, vectors_BC: csr_matrix, which: int) -> csr_matrix:
        """One part's columns: 0, the whole texts, or 1, their first tokens. A copy if there are
        two.
        """
        if not self.head:
            return vectors_BC
        part_BC = vectors_BC.copy()
        part_of_entry = part_BC.indices // max(self.num_features, 1)
        part_BC.data[part_of_entry != which] = 0
        part_BC.eliminate_zeros()
        return part_BC

    def num_words(self, vectors_BC: csr_matrix, which: int) -> Ints:
        """Number of known words and pairs in one part of each vector, int64 [B]."""
        return np.diff(self.part(vectors_BC, which).indptr)

    def _vectors(self, flat: Ints, offsets: Ints) -> csr_matrix:
        key, text, _ = self._features(flat, offsets)
        feature = np.searchsorted(self.keys_F, key)
        known = np.searchsorted(self.keys_F, key, side="right") > feature
        num_texts = len(offsets) - 1
        num_features = max(self.num_features, 1)
        entry = text[known] * num_features + feature[known]
        entry_N, count_N = np.unique(entry, return_counts=True)
        text_N, feature_N = np.divmod(entry_N, num_features)
        weight_N = (1 + np.log(count_N)) * self.idf_F[feature_N]
        norm_B = np.sqrt(np.bincount(text_N, weight_N**2, minlength=num_texts))
        data = (weight_N / norm_B[text_N]).astype(np.float32)
        indptr = np.searchsorted(text_N, np.arange(num_texts + 1))
        return csr_matrix((data, feature_N, indptr), shape=(num_texts, self.num_features))

    def _features(self, flat: Ints, offsets: Ints) -> tuple[Keys, Ints, Bools]:
        """Hash and text of each word, then of each pair; and whether the feature is a pair."""
        length_B = np.diff(offsets)
        if self._written is None:
            key_W, num_words_B = word_keys(flat, length_B, self._continues_V, self._skipped_V)
        else:
            key_W, num_words_B = spelt_words(flat, length_B, self._written)
        text_W = np.repeat(np.arange(len(num_words_B)), num_words_B)
        in_one_text = text_W[1:] == text_W[:-1]
        pair_key = mixed(key_W[:-1] * _PAIR + key_W[1:])[in_one_text]
        pair_text = text_W[1:][in_one_text]
        is_pair = np.repeat([False, True], [len(key_W), len(pair_key)])
        return np.concatenate([key_W, pair_key]), np.concatenate([text_W, pair_text]), is_pair


class _Counted(NamedTuple):
    """Words and pairs of some texts: their hashes uint64 [F], ascending; the number of texts with
    them, int64 [F]; and whether none of them is a word, bool [F].
    """

    keys_F: Keys
    texts_F: Ints
    is_pair_F: Bools

    @classmethod
    def of(cls, key: Keys, text: Ints, is_pair: Bools) -> _Counted:
        """From the result of `WordSpace._features`."""
        keys_F, first_F, feature = np.unique(key, return_index=True, return_inverse=True)
        num_texts = int(text.max(initial=0)) + 1
        feature_text = np.unique(feature.astype(np.int64) * num_texts + text)
        texts_F = np.bincount(feature_text // num_texts, minlength=len(keys_F))
        return cls(keys_F, texts_F, is_pair[first_F])

    def joined(self, more: _Counted) -> _Counted:
        """Merge with the counts of other texts; this object must not be used afterwards."""
        place_G = np.searchsorted(self.keys_F, more.keys_F)
        is_known_G = np.searchsorted(self.keys_F, more.keys_F, side="right") > place_G
        known = place_G[is_known_G]
        self.texts_F[known] += more.texts_F[is_known_G]
        self.is_pair_F[known] &= more.is_pair_F[is_known_G]
        place = place_G[~is_known_G]
        old_and_new = zip(self, more, strict=True)
        return _Counted(*(np.insert(old, place, new[~is_known_G]) for old, new in old_and_new))


def _token_kinds(tokenizer_folder: Path) -> tuple[Bools, Bools]:
    """Which tokens continue a word, and which are special and skipped: bool [V] each."""
    tokenizer = load_tokenizer(tokenizer_folder, 3)
    vocab, settings = vocabulary(tokenizer_folder / "tokenizer.json")
    added = settings.get("added_tokens", [])
    prefix = settings["model"].get("continuing_subword_prefix")
    continuing: set[str] = set()  # the tokenizer does not mark continuing pieces: all are words
    if prefix:
        continuing = {token for token in vocab if token.startswith(prefix)}
    elif any(token.startswith(_STARTS) for token in vocab):  # in bundles of former versions
        continuing = {token for token in vocab if not token.startswith(_STARTS)}
        continuing -= {token["content"] for token in added}
    special = [token["id"] for token in added if token.get("special")]
    around_text, *_ = tokenizer.encode([""])
    num_tokens = tokenizer.vocab_size
    continues_V = _is_among([vocab[token] for token in continuing], num_tokens)
    return continues_V, _is_among([*special, *around_text], num_tokens)
