"""Raw data in memory, whatever layout it came from, and the two ways of dividing it: splits and slices."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_matrix, vstack

SPLITS = ("train", "validation", "test")
TEXT_SCHEMA = pa.schema([("uid", pa.large_string()), ("title", pa.large_string()), ("content", pa.large_string())])


@dataclass(frozen=True)
class RawData:
    """Texts and pairs of one data set.

    Attributes:
        name: of the data set; the raw folder's name.
        queries: texts by split ("train", "test", "validation" where the data names one); columns uid, title, content.
        labels: texts of the L labels, the same columns. A layout with one text has it as title, and an empty content.
        relevance: by split, float32 [queries of the split, L], positive, sorted, each pair once.
        filter_pairs: by split, bool [queries of the split, L]: pairs that are neither positives nor negatives.
        format: the layout the data came in.
        files: sha256 by relative path of the files read.
    """

    name: str
    queries: dict[str, pa.Table]
    labels: pa.Table
    relevance: dict[str, csr_matrix]
    filter_pairs: dict[str, csr_matrix]
    format: str = "memory"
    files: dict[str, str] = field(default_factory=dict)

    @property
    def num_labels(self) -> int:
        return self.labels.num_rows

    def take(self, rows: dict[str, np.ndarray]) -> RawData:
        """The queries of these splits at these rows (of train, where a split is new), and their pairs."""
        taken: dict[str, Any] = {}
        for name in ("queries", "relevance", "filter_pairs"):
            parts = getattr(self, name)
            taken[name] = dict(parts)
            for split, own in rows.items():
                part = parts.get(split, parts["train"])
                taken[name][split] = part.take(own) if name == "queries" else csr_matrix(part[own])
        return replace(self, **taken)


def text_table(uids: Any, titles: Any = None, contents: Any = None) -> pa.Table:
    """Columns (lists or Arrow arrays of texts) to a table uid, title, content; None: empty texts."""
    none = pa.repeat("", len(uids))
    columns = [none if column is None else column for column in (uids, titles, contents)]
    return pa.table([text_array(column, pa.large_string()) for column in columns], schema=TEXT_SCHEMA)


def text_array(values: Iterable[str] | pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """Texts as an Arrow array of this type."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.cast(kind)
    return pa.array(list(values), kind)


def row_uids(first: int, count: int) -> pa.Array:
    """Row numbers from `first` on, as the uids of texts that have none."""
    return pa.array(np.arange(first, first + count)).cast(pa.large_string())


def stack(parts: Sequence[csr_matrix]) -> csr_matrix:
    """Rows of several matrices below each other, with sorted indices."""
    matrix = csr_matrix(vstack(parts, format="csr"))
    matrix.sort_indices()
    return matrix


LARGEST_FAMILY = 0.05  # of the queries held out


def hold_out(uids: Sequence[str] | pa.ChunkedArray, filter_pairs: csr_matrix, share: float, seed: int) -> np.ndarray:
    """Choose about `share` of n queries, seeded by query: bool [n], true for the queries held out.

    Queries that share a filtered label, directly or through others, are a family (versions of one product, parts of one
    package) and stay together, so that what is held out is as new to the model as a test query is. Families are taken
    in the order of a hash of seed and uid, so appending queries moves few of the old ones; a family that would exceed
    the share, or make up more than `LARGEST_FAMILY` of it, is passed over: hundreds of near-equal queries would decide
    every figure. At least one family is held out where two exist and share > 0.
    """
    num_queries = len(uids)
    held = np.zeros(num_queries, dtype=bool)
    if share <= 0 or num_queries < 2:
        return held
    family_N = _families(filter_pairs)
    num_families = int(family_N.max()) + 1
    size_F = np.bincount(family_N, minlength=num_families)
    prefix = f"{seed}|".encode()
    hash_N = np.fromiter(
        (int.from_bytes(hashlib.blake2b(prefix + str(u).encode(), digest_size=8).digest(), "big") for u in uids),
        np.uint64,
        num_queries,
    )
    # one member's hash is the family's: the smallest of all would draw large families first
    hash_F = hash_N[np.unique(family_N, return_index=True)[1]]
    target = max(1, round(share * num_queries))
    chosen_F = np.zeros(num_families, dtype=bool)
    total = 0
    largest = max(1, round(target * LARGEST_FAMILY))
    for family in np.argsort(hash_F, kind="stable"):
        if size_F[family] <= largest and total + size_F[family] <= target:
            chosen_F[family] = True
            total += int(size_F[family])
            if total == target:
                break
    if total == 0 and num_families > 1:
        chosen_F[np.argmin(size_F)] = True
    return chosen_F[family_N]


def make_slice(raw: RawData, num_train: int, num_test: int) -> RawData:
    """The first `num_train` training and `num_test` test queries, with the labels that occur among their positives."""
    sizes = {"train": num_train, "test": num_test, "validation": num_test}
    some = raw.take({split: np.arange(min(sizes[split], table.num_rows)) for split, table in raw.queries.items()})
    used = np.zeros(raw.num_labels, dtype=bool)
    for matrix in some.relevance.values():
        used[matrix.indices] = True
    kept = np.flatnonzero(used)
    return replace(
        some,
        name=f"{raw.name}-slice",
        labels=raw.labels.take(kept),
        relevance={split: csr_matrix(matrix[:, kept]) for split, matrix in some.relevance.items()},
        filter_pairs={split: csr_matrix(matrix[:, kept]) for split, matrix in some.filter_pairs.items()},
    )


def _families(filter_pairs: csr_matrix) -> np.ndarray:
    """Connected components of the graph query - filtered label: int64 [n], the family of each query."""
    num_queries, num_labels = filter_pairs.shape
    if not filter_pairs.nnz:
        return np.arange(num_queries)
    from scipy.sparse.csgraph import connected_components

    pairs = filter_pairs.tocoo()
    edges = (np.ones(pairs.nnz, dtype=np.int8), (pairs.row, pairs.col.astype(np.int64) + num_queries))
    graph = csr_matrix(edges, shape=(num_queries + num_labels,) * 2)
    family = connected_components(graph, directed=False)[1][:num_queries]
    return np.unique(family, return_inverse=True)[1]
