"""Raw data in memory, independent of the layout of its files, with functions that split it and cut
a slice from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix, vstack

SPLITS = ("train", "validation", "test")
TEXT_SCHEMA = pa.schema(
    [("uid", pa.large_string()), ("title", pa.large_string()), ("content", pa.large_string())]
)


@dataclass(frozen=True)
class RawData:
    """Texts and pairs of one data set.

    Attributes:
        name: of the data set; by default the name of the raw folder.
        queries: by split ("train", and "test" or "validation" if the data has them), a table of
            texts with columns uid, title, content.
        labels: table of the texts of the L labels, with the same columns. If the layout has one
            text per item, it is the title, and the content is empty.
        relevance: by split, float32 CSR [queries of the split, L] with positive values, sorted and
        without duplicates.
        filter_pairs: by split, bool CSR [queries of the split, L]: pairs that are neither positives
        nor negatives.
        format: layout of the raw files.
        files: sha256 of the raw files by relative path.
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
        """A copy in which the given splits have only these rows; the rows of a new split come from
        "train".
        """
        changed: dict[str, Any] = {}
        for name in ("queries", "relevance", "filter_pairs"):
            parts = getattr(self, name)
            changed[name] = dict(parts)
            for split, split_rows in rows.items():
                part = parts.get(split, parts["train"])
                changed[name][split] = (
                    part.take(split_rows) if name == "queries" else csr_matrix(part[split_rows])
                )
        return replace(self, **changed)


def text_table(uids: Any, titles: Any = None, contents: Any = None) -> pa.Table:
    """Table with columns uid, title and content, from lists or Arrow arrays of texts; None: empty
    texts.
    """
    empty = pa.repeat("", len(uids))
    columns = [empty if column is None else column for column in (uids, titles, contents)]
    return pa.table(
        [text_array(column, pa.large_string()) for column in columns], schema=TEXT_SCHEMA
    )


def text_array(
    values: Iterable[str] | pa.Array | pa.ChunkedArray, kind: pa.DataType
) -> pa.Array | pa.ChunkedArray:
    """Texts as an Arrow array of type `kind`."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.cast(kind)
    return pa.array(list(values), kind)


_VISIBLE = r"[^\p{Z}\p{Cc}\p{Cf}]"  # as `tokens.is_blank`, for Arrow


def are_blank(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """`tokens.is_blank` of each text, as an Arrow array."""
    return pc.invert(pc.match_substring_regex(texts, _VISIBLE))


def row_uids(first: int, count: int) -> pa.Array:
    """`count` row numbers from `first`, which serve as uids if the texts have none."""
    return pa.array(np.arange(first, first + count)).cast(pa.large_string())


def stack(parts: Sequence[csr_matrix]) -> csr_matrix:
    """Stacks matrices vertically, with sorted indices."""
    matrix = csr_matrix(vstack(parts, format="csr"))
    matrix.sort_indices()
    return matrix


LARGEST_FAMILY = 0.05  # maximum size of a family, as a share of the queries to hold out


def hold_out(queries: pa.Table, filter_pairs: csr_matrix, share: float, seed: int) -> np.ndarray:
    """Choose about `share` of n queries to hold out: bool [n], True for queries that are held out.

    Queries with equal texts, and queries that share a filtered label, directly or through other
    queries, form a family (one query asked twice, versions of one product, parts of one package)
    and stay together, so that a held-out query is as new to the model as a test query. Families are
    held out in the order of a hash of seed and uid, so that adding queries changes the split of few
    others. A family is skipped if it would exceed the share, or if it is larger than
    `LARGEST_FAMILY` of the share, because hundreds of similar queries would dominate every metric.
    At least one family is held out if share > 0 and there are two families."""
    num_queries = queries.num_rows
    if share <= 0 or num_queries < 2:
        return np.zeros(num_queries, dtype=bool)
    family_N = _families(queries, filter_pairs)
    num_families = int(family_N.max()) + 1
    size_F = np.bincount(family_N, minlength=num_families)
    prefix = f"{seed}|".encode()
    hashes = (
        hashlib.blake2b(prefix + uid.encode(), digest_size=8) for uid in queries["uid"].to_pylist()
    )
    hash_N = np.fromiter(
        (int.from_bytes(found.digest(), "big") for found in hashes), np.uint64, num_queries
    )
    # a family has the hash of one member: with the minimum over its members, large families would
    # come first
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
    """The first `num_train` training and `num_test` test or validation queries, and the labels of
    their positives.
    """
    sizes = {"train": num_train, "test": num_test, "validation": num_test}
    part = raw.take(
        {
            split: np.arange(min(sizes[split], table.num_rows))
            for split, table in raw.queries.items()
        }
    )
    used = np.zeros(raw.num_labels, dtype=bool)
    for matrix in part.relevance.values():
        used[matrix.indices] = True
    labels = np.flatnonzero(used)
    return replace(
        part,
        name=f"{raw.name}-slice",
        labels=raw.labels.take(labels),
        relevance={
            split: csr_matrix(matrix[:, labels]) for split, matrix in part.relevance.items()
        },
        filter_pairs={
            split: csr_matrix(matrix[:, labels]) for split, matrix in part.filter_pairs.items()
        },
    )


def _families(queries: pa.Table, filter_pairs: csr_matrix) -> np.ndarray:
    """Family of each query, int64 [n]: its connected component in the graph of queries, their texts
    and their filtered labels.
    """
    from scipy.sparse.csgraph import connected_components

    num_queries, num_labels = filter_pairs.shape
    separator = pa.scalar("\n", pa.large_string())
    texts = pc.binary_join_element_wise(
        queries["title"], queries["content"], separator
    ).combine_chunks()
    text_N = pc.dictionary_encode(texts).indices.to_numpy()
    first_text = num_queries + num_labels  # nodes: queries, then labels, then texts
    pairs = filter_pairs.tocoo()
    from_node = np.concatenate([pairs.row, np.arange(num_queries)])
    to_node = np.concatenate(
        [pairs.col.astype(np.int64) + num_queries, text_N.astype(np.int64) + first_text]
    )
    edges = (np.ones(from_node.size, dtype=np.int8), (from_node, to_node))
    num_nodes = first_text + num_queries
    graph = csr_matrix(edges, shape=(num_nodes, num_nodes))
    family = connected_components(graph, directed=False)[1][:num_queries]
    return np.unique(family, return_inverse=True)[1]
