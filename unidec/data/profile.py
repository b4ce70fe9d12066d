"""What a data set, or a window of queries, looks like: figures small enough to travel with a model.

A profile is compared with a later one (`unidec.evaluation.drift`). It holds counts, shares, histograms, the commonest
words, and which words there are (a Bloom filter); no text.

Shape suffixes: N texts, W words of all texts one after the other, L labels.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.dataset import Text, XMCDataset
from unidec.data.propensity import label_counts
from unidec.data.tokens import encode_texts, load_tokenizer

VERSION = 1
SAMPLE = 100_000  # texts that are looked at, evenly spaced over all: enough for every figure here
BUCKETS = 256  # of token ids
LENGTH_EDGES = (0, *sorted({round(1.2**i) for i in range(50)}))  # of bins of characters, each a fifth wider
TOP_WORDS = 200
MAX_WORDS = 100_000  # the commonest; words beyond count as unseen everywhere, in the reference too
BITS_A_WORD, PROBES = 10, 7  # a word that is not there passes for known once in a hundred and twenty

Share = dict[str, float | int]
"""{"share": from 0 to 1, "of": of how many}."""


@dataclass(frozen=True)
class Vocabulary:
    """Which words there are, as a Bloom filter: none is forgotten, about 1% of the others pass for known."""

    bits: np.ndarray
    size: int

    @classmethod
    def of(cls, hash_W: np.ndarray) -> Vocabulary:
        """The `MAX_WORDS` commonest words, by their 64-bit hashes (with repetitions)."""
        words, counts = np.unique(hash_W, return_counts=True)
        kept = words[np.lexsort((words, -counts))[:MAX_WORDS]]
        vocabulary = cls(np.zeros(max(8, -(-len(kept) * BITS_A_WORD // 8)), dtype=np.uint8), len(kept))
        for place in vocabulary._places(kept):
            np.bitwise_or.at(vocabulary.bits, place >> 3, (1 << (place & 7)).astype(np.uint8))
        return vocabulary

    def knows(self, hash_W: np.ndarray) -> np.ndarray:
        """Whether each word is known, bool [W]."""
        known = np.ones(len(hash_W), dtype=bool)
        for place in self._places(hash_W):
            known &= (self.bits[place >> 3] >> (place & 7)) & 1 == 1
        return known

    def to_json(self) -> dict[str, Any]:
        """JSON-able; `from_json` reads it."""
        return {"words": self.size, "bits": base64.b64encode(self.bits.tobytes()).decode()}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Vocabulary:
        return cls(np.frombuffer(base64.b64decode(stored["bits"]), dtype=np.uint8), int(stored["words"]))

    def _places(self, hash_W: np.ndarray) -> list[np.ndarray]:
        """Bits of each word, one array a probe: double hashing (Kirsch and Mitzenmacher, 2006)."""
        first, step = hash_W & np.uint64(0xFFFFFFFF), (hash_W >> np.uint64(32)) | np.uint64(1)
        total = np.uint64(8 * len(self.bits))
        return [((first + np.uint64(i) * step) % total).astype(np.int64) for i in range(PROBES)]


@dataclass(frozen=True)
class Measured:
    """Facts of N texts, one by one.

    Attributes:
        length_N: characters, without white space around. tokens_N, unknown_N: tokens without the special ones, and
            those of them unknown to the tokenizer. cut_N: the text fills all tokens it may have.
        bucket_NB: float32 CSR [N, `BUCKETS`], how often a token of each bucket (a hash of its id) is in each text.
        words_N, unseen_N: words, and those of them that are not in the vocabulary.
        words: the commonest words and how often they occur.
    """

    length_N: np.ndarray
    tokens_N: np.ndarray
    unknown_N: np.ndarray
    cut_N: np.ndarray
    bucket_NB: csr_matrix
    words_N: np.ndarray
    unseen_N: np.ndarray
    words: dict[str, int]

    def __len__(self) -> int:
        return len(self.length_N)

    @property
    def length_bins(self) -> np.ndarray:
        """Bin of each text's length, int64; see `LENGTH_EDGES`."""
        return np.searchsorted(LENGTH_EDGES, self.length_N, side="right") - 1

    def strangeness(self) -> dict[str, Share]:
        """Shares of tokens that the tokenizer does not know, and of words that the vocabulary does not."""
        return {
            "unknown_tokens": share(self.unknown_N.sum(), self.tokens_N.sum()),
            "unseen_words": share(self.unseen_N.sum(), self.words_N.sum()),
        }

    def summary(self) -> dict[str, Any]:
        """The texts as a whole, JSON-able."""
        count = len(self)
        return {
            "count": count,
            "length": {
                "mean": int(self.length_N.sum()) / max(count, 1),
                "histogram": np.bincount(self.length_bins, minlength=len(LENGTH_EDGES)).tolist(),
            },
            "tokens": {
                "mean": int(self.tokens_N.sum()) / max(count, 1),
                "buckets": np.asarray(self.bucket_NB.sum(axis=0)).ravel().astype(np.int64).tolist(),
            },
            "words": {"count": int(self.words_N.sum()), "top": self.words},
            **self.strangeness(),
            "cut": share(self.cut_N.sum(), count),
        }


def measure_texts(
    texts: Sequence[str], tokenizer_folder: str | os.PathLike[str], max_length: int,
    vocabulary: Vocabulary | None = None,
) -> Measured:  # fmt: skip
    """Facts of each text, as a model reads it.

    Args:
        tokenizer_folder: holds tokenizer.json.
        max_length: tokens a text at most, special ones included.
        vocabulary: the words that count as seen; None: words are not judged.

    Raises:
        DataError: something that is not a text.
    """
    num_texts, tokens = len(texts), encode_texts(texts, tokenizer_folder, max_length)
    special_ids = encode_texts([""], tokenizer_folder, max_length).ids  # an empty text is those
    real_F = ~np.isin(tokens.ids, special_ids)
    row, ids = np.repeat(np.arange(num_texts), tokens.lengths())[real_F], tokens.ids[real_F].astype(np.int64)
    unknown = ids == load_tokenizer(tokenizer_folder, max_length).unknown_id
    array = pa.array(texts, pa.large_string())
    hash_W, words_N, top = split_words(array)
    unseen_W = np.zeros(len(hash_W)) if vocabulary is None else ~vocabulary.knows(hash_W)
    word_row_W = np.repeat(np.arange(num_texts), words_N)
    return Measured(
        length_N=pc.utf8_length(pc.utf8_trim_whitespace(array)).to_numpy(zero_copy_only=False).astype(np.int64),
        tokens_N=np.bincount(row, minlength=num_texts),
        unknown_N=np.bincount(row[unknown], minlength=num_texts),
        cut_N=tokens.lengths() >= max_length,
        bucket_NB=csr_matrix((np.ones(len(ids), np.float32), (row, _bucket(ids))), shape=(num_texts, BUCKETS)),
        words_N=words_N,
        unseen_N=np.bincount(word_row_W, weights=unseen_W, minlength=num_texts).astype(np.int64),
        words=top,
    )


def split_words(array: pa.Array) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """Hashes of all words uint64 [W], the number of words of each text int64 [N], and the commonest words.

    A word is a run of letters, digits and "_", in lower case.
    """
    parts = pc.split_pattern_regex(pc.utf8_lower(array), r"[^\p{L}\p{N}_]+")
    flat = pc.list_flatten(parts)
    row_W = np.repeat(np.arange(len(array)), pc.list_value_length(parts).to_numpy(zero_copy_only=False))
    real_W = pc.not_equal(flat, "")
    encoded = flat.filter(real_W).dictionary_encode()
    index_W, named = encoded.indices.to_numpy(zero_copy_only=False), encoded.dictionary.to_pylist()
    counts = np.bincount(index_W, minlength=len(named))
    order = sorted(range(len(named)), key=lambda i: (-counts[i], named[i]))[:TOP_WORDS]
    hashes = text_hashes(encoded.dictionary)[index_W]
    words_N = np.bincount(row_W[real_W.to_numpy(zero_copy_only=False)], minlength=len(array))
    return hashes, words_N, {named[i]: int(counts[i]) for i in order}


def text_hashes(array: pa.Array) -> np.ndarray:
    """A 64-bit hash of each text, uint64 [N]: the same in every process."""
    return pd.util.hash_array(array.to_numpy(zero_copy_only=False).astype(object), categorize=False)


def share(part: Any, whole: Any) -> Share:
    """A share and what it is of; nothing of nothing is 0."""
    return {"share": int(part) / int(whole) if whole else 0.0, "of": int(whole)}


def spaced(rows: np.ndarray, most: int = SAMPLE) -> np.ndarray:
    """At most so many of the rows, evenly spaced."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]


@dataclass(frozen=True)
class DatasetProfile:
    """A data set's figures, with what they were counted from.

    Attributes:
        figures: JSON-able, what travels with a model.
        queries: the training queries. held_out: the validation queries, else the test queries, else the training ones.
    """

    figures: dict[str, Any]
    queries: Measured
    held_out: Measured


def profile_dataset(
    dataset: XMCDataset, tokenizer_folder: str | os.PathLike[str], max_length: int, text: Text = "title"
) -> DatasetProfile:
    """Count what `DatasetProfile` holds; of many texts `SAMPLE` are looked at. The same data gives the same figures."""
    rows = {split: dataset.rows(split) for split in ("train", "validation", "test")}
    texts = dataset.query_texts(spaced(rows["train"]), text)
    label_texts = dataset.label_texts(spaced(np.arange(dataset.num_labels)), text)
    words_W = [split_words(pa.array(some, pa.large_string()))[0] for some in (texts, label_texts)]
    vocabulary = Vocabulary.of(np.concatenate(words_W))
    held_texts = [dataset.query_texts(spaced(rows[split]), text) for split in ("validation", "test")]
    queries, labels, *others = (
        measure_texts(some, tokenizer_folder, max_length, vocabulary) for some in (texts, label_texts, *held_texts)
    )
    held_out = next((some for some in others if len(some)), None)
    unseen, words = (sum(getattr(other, name).sum() for other in others) for name in ("unseen_N", "words_N"))
    figures = {
        "version": VERSION,
        "name": dataset.name,
        "sha256": dataset.sha256,
        "text": text,
        "max_length": max_length,
        "rows": {split: len(own) for split, own in rows.items()}
        | {"labels": dataset.num_labels, "pairs": int(dataset.relevance.nnz)},
        "positives": dataset.relevance.nnz / max(dataset.num_queries, 1),
        "shares": _shares(dataset, rows, text) | {"unseen_words": share(unseen, words)},
        "queries": queries.summary(),
        "labels": labels.summary(),
        "held_out": None if held_out is None else held_out.strangeness(),
        "vocabulary": vocabulary.to_json(),
    }
    return DatasetProfile(figures, queries, queries if held_out is None else held_out)


def _shares(dataset: XMCDataset, rows: dict[str, np.ndarray], text: Text) -> dict[str, Share]:
    """Shares that are counted over the whole data set."""
    hash_N, length_N = text_facts(dataset, "queries", text)
    hash_L, length_L = text_facts(dataset, "labels", text)
    train, test = hash_N[rows["train"]], rows["test"][length_N[rows["test"]] > 0]
    points_L = label_counts(dataset.relevance, rows["train"])
    asked_L = label_counts(dataset.relevance, np.concatenate([rows["validation"], rows["test"]])) > 0
    flags = {
        "empty_queries": length_N == 0,
        "empty_labels": length_L == 0,
        "repeated_queries": pd.Series(train).duplicated(),
        "repeated_labels": pd.Series(hash_L).duplicated(),
        "test_texts_in_train": np.isin(hash_N[test], train),
        "queries_without_positives": np.diff(dataset.relevance.indptr) == 0,
        "labels_without_training_points": points_L == 0,
        "unseen_labels": points_L[asked_L] == 0,
    }
    return {name: share(own.sum(), len(own)) for name, own in flags.items()}


def text_facts(dataset: XMCDataset, which: Literal["queries", "labels"], text: Text) -> tuple[np.ndarray, np.ndarray]:
    """Hash of each text uint64, and its characters int64, both without white space around it."""
    hashes, lengths = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for batch in dataset.text_batches(which, text, 65_536):
        array = pc.utf8_trim_whitespace(pa.array(batch, pa.large_string()))
        hashes.append(text_hashes(array))
        lengths.append(pc.utf8_length(array).to_numpy(zero_copy_only=False).astype(np.int64))
    return np.concatenate(hashes), np.concatenate(lengths)


def _bucket(ids: np.ndarray) -> np.ndarray:
    """Bucket of each token id: Fibonacci hashing, so that neighbouring ids part."""
    return ((ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - 8)).astype(np.int64)
