"""The files of training queries that vote (`ranking/neighbours.py`), in a bundle's folder
neighbours/: vectors or words, labels, uids and titles; with words, also the words of label texts.

Legend: M training queries, L labels, D width of a head, F words and C columns of their vectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from unidec.bundle.arrow_file import read_texts_table
from unidec.bundle.bundle_info import BundleInfo
from unidec.bundle.checked_arrays import csr_arrays, damaged, read_array, read_csr
from unidec.data.dataset import write_texts_table
from unidec.model.words import WordSpace
from unidec.ranking.neighbours import Neighbours

_FOLDER = "neighbours"
_LABELS = ("indptr.npy", "labels.npy")
_VECTORS = "vectors.npy"
_WORDS = ("words_indptr.npy", "words.npy", "words_values.npy")
_SPACE = ("word_keys.npy", "word_weights.npy")
_LABEL_WORDS = ("label_words_indptr.npy", "label_words.npy", "label_words_values.npy")
_QUERIES = "queries.arrow"
FILES = frozenset(
    f"{_FOLDER}/{name}" for name in (*_LABELS, _VECTORS, *_WORDS, *_SPACE, *_LABEL_WORDS, _QUERIES)
)
"""All files that the folder may hold: either vectors.npy or the word files.
"""
# large_string: the titles of many queries exceed the 2 GB limit of a string column
_QUERY_SCHEMA = pa.schema(
    [
        pa.field("uid", pa.large_string(), nullable=False),
        pa.field("title", pa.large_string(), nullable=False),
    ]
)


def write_neighbours(root: Path, neighbours: Neighbours) -> None:
    """Write `FILES` below a bundle's folder, deterministically."""
    folder = root / _FOLDER
    folder.mkdir()
    arrays = csr_arrays(_LABELS, neighbours.labels_ML)
    words = neighbours.words
    if words is None:
        arrays[_VECTORS] = neighbours.vectors_MD
    else:
        arrays |= csr_arrays(_WORDS, neighbours.vectors_MD)
        arrays |= zip(_SPACE, (words.keys_F, words.idf_F), strict=True)
        arrays |= csr_arrays(_LABEL_WORDS, neighbours.label_words_LF)
    for name, array in arrays.items():
        np.save(folder / name, np.ascontiguousarray(array), allow_pickle=False)
    table = pa.table([neighbours.uids, neighbours.titles], schema=_QUERY_SCHEMA)
    write_texts_table(folder / _QUERIES, table)


def read_neighbours(root: Path, info: BundleInfo, tokenizer_folder: Path) -> Neighbours:
    """Read the files of `write_neighbours` and check them against bundle.json.

    Raises:
        ArtifactError: a file is missing, or has a wrong type, a wrong size, non-finite numbers or
        invalid label rows.
    """
    knn = info.knn
    assert knn is not None
    folder = root / _FOLDER
    num_queries = knn.num_queries
    num_labels = info.num_labels
    labels_ML = read_csr(folder, _LABELS, (num_queries, num_labels), knn.num_pairs)
    words = label_words = None
    vectors: Any
    if knn.num_words is None:
        vectors = read_array(folder / _VECTORS, np.float16, (num_queries, info.dim))
    else:
        keys, weights = (folder / name for name in _SPACE)
        try:
            words = WordSpace(
                tokenizer_folder,
                read_array(keys, np.uint64, (knn.num_words,)),
                read_array(weights, np.float32, (-1,)),
                knn.word_head,
                knn.spelt_words,
            )
        except ValueError as error:
            raise damaged("the words are damaged", keys, error) from error
        vectors = read_csr(folder, _WORDS, (num_queries, words.num_columns))
        label_words = read_csr(folder, _LABEL_WORDS, (num_labels, words.num_columns))
    table = read_texts_table(folder / _QUERIES, _QUERY_SCHEMA, num_queries)
    return Neighbours(
        vectors,
        labels_ML,
        table["uid"],
        table["title"],
        words=words,
        label_words_LF=label_words,
    )
