"""The profile of a data set or of a window of queries: statistics that are small enough to be
stored with a model.

`unidec.evaluation.drift` compares a profile with a later one. A profile holds counts, shares,
histograms, the most frequent words and a Bloom filter of the vocabulary, but no texts.

Shape suffixes: N texts, W words of all texts in sequence, L labels.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unidec.data.dataset import Text, XMCDataset
from unidec.data.propensity import label_counts, training_counts
from unidec.data.raw import SPLITS, are_blank
from unidec.data.tokens import encode_texts, load_tokenizer

VERSION = 1
PROFILE_KEY = "profile"
"""Key of the training profile in the model card in bundle.json."""
SAMPLE = 100_000  # evenly spaced texts that are measured; enough for all statistics here
BUCKETS = 256  # hash buckets of token ids
# edges of length bins in characters, each 20% wider
LENGTH_EDGES = (0, *sorted({round(1.2**i) for i in range(50)}))
TOP_WORDS = 200
# size of the vocabulary; rarer words always count as unseen, also in the reference
MAX_WORDS = 100_000
# Bloom filter parameters, for a false positive rate of about 1 in 120
BITS_A_WORD = 10
PROBES = 7
FIBONACCI = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio

Share = dict[str, float | int]
"""{"share": from 0 to 1, "of": the denominator}."""


def vocabulary_of(hash_W: np.ndarray) -> dict[str, Any]:
    """Bloom filter of the `MAX_WORDS` most frequent words, as JSON-serialisable values.

    `is_known` recognises all of these words, and accepts about 1% of the others.

    Args:
        hash_W: 64-bit hashes of all words, with repetitions.
    """
    words, counts = np.unique(hash_W, return_counts=True)
    frequent = words[np.lexsort((words, -counts))[:MAX_WORDS]]
    num_bytes = max(8, -(-len(frequent) * BITS_A_WORD // 8))
    is_set = np.zeros(8 * num_bytes, dtype=bool)
    for position in _bit_positions(frequent, len(is_set)):
        is_set[position] = True
    bits = np.packbits(is_set, bitorder="little")
    return {"words": len(frequent), "bits": base64.b64encode(bits.tobytes()).decode()}


def is_known(hash_W: np.ndarray, vocabulary: Mapping[str, Any]) -> np.ndarray:
    """Whether each word (64-bit hash) is in a vocabulary from `vocabulary_of`, bool [W]."""
    bits = np.frombuffer(base64.b64decode(vocabulary["bits"]), dtype=np.uint8)
    is_set = np.unpackbits(bits, bitorder="little").astype(bool)
    known = np.ones(len(hash_W), dtype=bool)
    for position in _bit_positions(hash_W, len(is_set)):
        known &= is_set[position]
    return known


def _bit_positions(hash_W: np.ndarray, num_bits: int) -> list[np.ndarray]:
    """Bit positions of each word, one array per probe, by double hashing (Kirsch and Mitzenmacher,
    2006).
    """
    first = hash_W & np.uint64(0xFFFFFFFF)
    step = (hash_W >> np.uint64(32)) | np.uint64(1)
    probes = [first + np.uint64(probe) * step for probe in range(PROBES)]
    return [(probe % np.uint64(num_bits)).astype(np.int64) for probe in probes]


def measure_texts(
    texts: Sequence[str],
    tokenizer_folder: str | os.PathLike[str],
    max_length: int,
    vocabulary: Mapping[str, Any],
) -> dict[str, Any]:
    """Statistics of texts as the model reads them, as JSON-serialisable values.

    Args:
        tokenizer_folder: folder with tokenizer.json.
        max_length: maximum tokens per text, special tokens included.
        vocabulary: the known words (`vocabulary_of`).

    Returns:
        {"count", "length": {"mean", "histogram"} (characters without surrounding white space,
        binned by `LENGTH_EDGES`), "tokens": {"mean", "buckets"} (without special tokens; tokens per
        hash bucket), "words": {"count", "top"}, and the shares "unknown_tokens" (unknown to the
        tokenizer), "unseen_words" (not in the vocabulary) and "cut" (texts of `max_length`
        tokens)}.

    Raises:
        DataError: an item of `texts` is not a string.
    """
    count = len(texts)
    tokens = encode_texts(texts, tokenizer_folder, max_length)
    unknown_id = load_tokenizer(tokenizer_folder, max_length).unknown_id
    # an empty text has special tokens only
    special_ids = encode_texts([""], tokenizer_folder, max_length).ids
    ids = tokens.ids[~np.isin(tokens.ids, special_ids)]
    array = pa.array(texts, pa.large_string())
    hash_W, top = split_words(array)
    length_N = lengths_of(array)
    bin_N = np.searchsorted(LENGTH_EDGES, length_N, side="right") - 1
    # Fibonacci hashing spreads neighbouring ids over the buckets
    bucket = (ids.astype(np.uint64) * FIBONACCI) >> np.uint64(64 - 8)
    return {
        "count": count,
        "length": {
            "mean": int(length_N.sum()) / max(count, 1),
            "histogram": np.bincount(bin_N, minlength=len(LENGTH_EDGES)).tolist(),
        },
        "tokens": {
            "mean": len(ids) / max(count, 1),
            "buckets": np.bincount(bucket.astype(np.int64), minlength=BUCKETS).tolist(),
        },
        "words": {"count": len(hash_W), "top": top},
        "unknown_tokens": share_of(ids == unknown_id),
        "unseen_words": share_of(~is_known(hash_W, vocabulary)),
        "cut": share_of(tokens.lengths() >= max_length),
    }


def lengths_of(texts: pa.Array) -> np.ndarray:
    """Number of characters of each text without surrounding white space, int64 [N]."""
    lengths = pc.utf8_length(pc.utf8_trim_whitespace(texts))
    return lengths.to_numpy(zero_copy_only=False).astype(np.int64)


def split_words(texts: Any) -> tuple[np.ndarray, dict[str, int]]:
    """Hashes of all words of texts (a list or an Arrow array), uint64 [W], and counts of the
    `TOP_WORDS` most frequent.

    A word is a lower-cased run of letters, digits and "_".
    """
    array = pa.array(texts, pa.large_string())
    flat = pc.list_flatten(pc.split_pattern_regex(pc.utf8_lower(array), r"[^\p{L}\p{N}_]+"))
    encoded = flat.filter(pc.not_equal(flat, "")).dictionary_encode()
    index_W = encoded.indices.to_numpy(zero_copy_only=False)
    words = encoded.dictionary.to_pylist()
    counts = np.bincount(index_W, minlength=len(words)).tolist()
    by_frequency = sorted(zip(words, counts, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return text_hashes(encoded.dictionary)[index_W], dict(by_frequency[:TOP_WORDS])


def text_hashes(array: pa.Array) -> np.ndarray:
    """A 64-bit hash of each text, uint64 [N], which is the same in every process."""
    from pandas.util import hash_array  # takes half a second to import

    return hash_array(array.to_numpy(zero_copy_only=False).astype(object), categorize=False)


def share(part: Any, whole: Any) -> Share:
    """`part` as a share of `whole`, with the whole; 0 if the whole is 0."""
    return {"share": int(part) / int(whole) if whole else 0.0, "of": int(whole)}


def share_of(flag: np.ndarray) -> Share:
    """The share of True values."""
    return share(flag.sum(), len(flag))


def spaced(rows: np.ndarray, most: int = SAMPLE) -> np.ndarray:
    """At most `most` of the rows, evenly spaced."""
    if len(rows) <= most:
        return rows
    return rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]


def profile_dataset(
    dataset: XMCDataset,
    tokenizer_folder: str | os.PathLike[str],
    max_length: int,
    text: Text = "title",
) -> dict[str, Any]:
    """The profile of a data set as JSON-serialisable values, from at most `SAMPLE` texts of each
    kind.

    "queries" describes the training queries; "held_out" the validation queries, or the test queries
    if there are none (None if there are neither). The same data gives the same profile."""
    rows: dict[str, np.ndarray] = {split: dataset.rows(split) for split in SPLITS}
    texts = [dataset.query_texts(spaced(rows[split]), text) for split in SPLITS]
    train, validation, test = texts
    label_texts = dataset.label_texts(spaced(np.arange(dataset.num_labels)), text)
    train_W, _ = split_words(train)
    label_W, _ = split_words(label_texts)
    vocabulary = vocabulary_of(np.concatenate([train_W, label_W]))

    def measured(texts: list[str]) -> dict[str, Any]:
        return measure_texts(texts, tokenizer_folder, max_length, vocabulary)

    held_out = measured(validation or test)
    new_W, _ = split_words(validation + test)
    unseen_W = ~is_known(new_W, vocabulary)
    num_rows = {split: len(split_rows) for split, split_rows in rows.items()}
    num_pairs = int(dataset.relevance.nnz)
    return {
        "version": VERSION,
        "name": dataset.name,
        "sha256": dataset.sha256,
        "text": text,
        "max_length": max_length,
        "rows": {**num_rows, "labels": dataset.num_labels, "pairs": num_pairs},
        "positives": num_pairs / max(dataset.num_queries, 1),
        "shares": {**_shares(dataset, rows, text), "unseen_words": share_of(unseen_W)},
        "queries": measured(train),
        "labels": measured(label_texts),
        "held_out": {key: held_out[key] for key in ("unknown_tokens", "unseen_words")}
        if held_out["count"]
        else None,
        "vocabulary": vocabulary,
    }


def _repeats(hash_N: np.ndarray) -> np.ndarray:
    """Whether each value occurred earlier in the array, bool [N]."""
    from pandas import Series  # takes half a second to import

    return Series(hash_N).duplicated().to_numpy()


def _shares(dataset: XMCDataset, rows: dict[str, np.ndarray], text: Text) -> dict[str, Share]:
    """Shares counted over the whole data set, without sampling."""
    hash_N, length_N = text_facts(dataset, "queries", text)
    hash_L, length_L = text_facts(dataset, "labels", text)
    tested_N, leaked_N = tested_in_training(dataset, hash_N, length_N)
    points_L = training_counts(dataset)
    held_out = np.concatenate([rows["validation"], rows["test"]])
    held_out_L = label_counts(dataset.relevance, held_out) > 0
    flags = {
        "empty_queries": length_N == 0,
        "empty_labels": length_L == 0,
        "repeated_queries": _repeats(hash_N[rows["train"]]),
        "repeated_labels": _repeats(hash_L),
        "test_texts_in_train": leaked_N[tested_N],
        "queries_without_positives": np.diff(dataset.relevance.indptr) == 0,
        "labels_without_training_points": points_L == 0,
        "unseen_labels": points_L[held_out_L] == 0,
    }
    return {name: share_of(flag) for name, flag in flags.items()}


def tested_in_training(
    dataset: XMCDataset, hash_N: np.ndarray, length_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Two masks, bool [N]: test queries with a text, and those of them whose text is also the text
    of a training query.

    Args:
        hash_N, length_N: `text_facts` of the queries.
    """
    tested_N = (dataset.split_N == SPLITS.index("test")) & (length_N > 0)
    return tested_N, tested_N & np.isin(hash_N, hash_N[dataset.rows("train")])


def text_facts(
    dataset: XMCDataset, which: Literal["queries", "labels"], text: Text
) -> tuple[np.ndarray, np.ndarray]:
    """Hash (uint64) and number of characters (int64) of each text, both without surrounding white
    space; a blank text (`tokens.is_blank`) has no characters.
    """
    hashes = [np.zeros(0, np.uint64)]
    lengths = [np.zeros(0, np.int64)]
    for batch in dataset.text_batches(which, text, 65_536):
        texts, length_N = trimmed(pa.array(batch, pa.large_string()))
        hashes.append(text_hashes(texts))
        lengths.append(length_N)
    return np.concatenate(hashes), np.concatenate(lengths)


def trimmed(texts: pa.Array | pa.ChunkedArray) -> tuple[pa.Array | pa.ChunkedArray, np.ndarray]:
    """Texts without surrounding white space, and the number of characters of each, int64 [N]; a
    blank text (`tokens.is_blank`) has none.
    """
    texts = pc.utf8_trim_whitespace(texts)
    is_blank = are_blank(texts).to_numpy(zero_copy_only=False)
    return texts, np.where(is_blank, 0, lengths_of(texts))
