"""Raw data in memory, independent of the layout of its files; functions that split or slice it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.csr import ones_at
from unidec.data.spool import take_pairs, take_texts

SPLITS: tuple[Literal["train", "validation", "test"], ...] = ("train", "validation", "test")
TEXT_SCHEMA = pa.schema([(name, pa.large_string()) for name in ("uid", "title", "content")])


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

    def take(self, rows: dict[str, np.ndarray], scratch: Path | None = None) -> RawData:
        """A copy in which the given splits have only these rows; rows of a split that does not
        exist yet are taken from "train". `scratch`: folder for temporary files.
        """
        queries = dict(self.queries)
        relevance = dict(self.relevance)
        filter_pairs = dict(self.filter_pairs)
        for split, split_rows in rows.items():
            part = split if split in self.queries else "train"
            queries[split] = take_texts(self.queries[part], split_rows, scratch)
            relevance[split] = take_pairs(self.relevance[part], split_rows, scratch)
            filter_pairs[split] = take_pairs(self.filter_pairs[part], split_rows, scratch)
        return replace(self, queries=queries, relevance=relevance, filter_pairs=filter_pairs)


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


def joined_texts(
    first: pa.Array | pa.ChunkedArray, second: Iterable[str] | pa.Array | pa.ChunkedArray
) -> pa.ChunkedArray:
    """The texts of an Arrow array, followed by others as the same type."""
    tables = [pa.table({"text": text_array(texts, first.type)}) for texts in (first, second)]
    return pa.concat_tables(tables)["text"]


_VISIBLE = r"[^\p{Z}\p{Cc}\p{Cf}]"  # the rule of `tokens.is_blank`, for Arrow


def are_blank(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """`tokens.is_blank` of each text, as an Arrow array."""
    return pc.invert(pc.match_substring_regex(texts, _VISIBLE))


LARGEST_FAMILY = 0.05  # maximum size of a family, as a share of the queries to hold out


def hold_out(
    queries: pa.Table,
    filter_pairs: csr_matrix,
    share: float,
    seed: int,
    scratch: Path | None = None,
) -> np.ndarray:
    """Choose about `share` of n queries to hold out: bool [n], True for queries that are held out.

    Queries that have equal texts or share a filtered label, directly or through other queries, form
    a family (one query asked twice, versions of one product, parts of one package) and stay
    together, so that a held-out query is as new to the model as a test query. Families are held out
    in the order of a hash of seed and uid, so that adding queries changes the split of few other
    queries. A family is skipped if it would exceed the share, or if it is larger than
    `LARGEST_FAMILY` of the share, because hundreds of similar queries would dominate every metric.
    At least one family is held out if share > 0 and there are two families. `scratch`: folder for
    temporary files.
    """
    num_queries = queries.num_rows
    chosen_N = np.zeros(num_queries, dtype=bool)  # set at the first member of each chosen family
    if share <= 0 or num_queries < 2:
        return chosen_N
    first_N = _families(queries, filter_pairs, scratch)
    size_N = np.bincount(first_N, minlength=num_queries)
    first_F = np.flatnonzero(size_N)
    left = max(1, round(share * num_queries))
    largest = max(1, round(left * LARGEST_FAMILY))
    # a family has the hash of its first member: with the minimum over its members, large families
    # would come first
    hash_F = _hashes(queries["uid"], seed)[first_F]
    for first in first_F[np.argsort(hash_F, kind="stable")]:
        if size_N[first] <= min(left, largest):
            chosen_N[first] = True
            left -= size_N[first]
            if not left:
                break
    if not chosen_N.any() and len(first_F) > 1:
        chosen_N[first_F[np.argmin(size_N[first_F])]] = True
    return chosen_N[first_N]


def _hashes(uids: pa.ChunkedArray, seed: int) -> np.ndarray:
    """A hash of seed and uid of each query, uint64 [n]."""
    members = (f"{seed}|{uid}" for block in uids.chunks for uid in block.to_pylist())
    digests = (hashlib.blake2b(member.encode(), digest_size=8).digest() for member in members)
    return np.fromiter(map(int.from_bytes, digests), np.uint64, len(uids))


def make_slice(raw: RawData, num_train: int, num_test: int) -> RawData:
    """The first `num_train` training and `num_test` test or validation queries, and the labels of
    their positives.
    """
    rows = {}
    for split, table in raw.queries.items():
        size = num_train if split == "train" else num_test
        rows[split] = np.arange(min(size, table.num_rows))
    part = raw.take(rows)
    used = np.concatenate([matrix.indices for matrix in part.relevance.values()])
    labels = np.unique(used)
    return replace(
        part,
        name=f"{raw.name}-slice",
        labels=raw.labels.take(labels),
        relevance=_columns(part.relevance, labels),
        filter_pairs=_columns(part.filter_pairs, labels),
    )


def _columns(matrices: dict[str, csr_matrix], columns: np.ndarray) -> dict[str, csr_matrix]:
    return {split: csr_matrix(matrix[:, columns]) for split, matrix in matrices.items()}


def _families(queries: pa.Table, filter_pairs: csr_matrix, scratch: Path | None) -> np.ndarray:
    """Row of the first member of each query's family, int64 [n]. Families are the connected
    components of a graph that links queries of equal text, and queries to their filtered labels.
    """
    from scipy.sparse.csgraph import connected_components

    from unidec.data.database import first_rows

    first_N = first_rows(_whole_texts(queries), _whole_texts(queries), scratch)
    num_queries, num_labels = filter_pairs.shape
    num_nodes = num_queries + num_labels  # queries, then labels
    pairs = filter_pairs.tocoo()
    from_node = np.concatenate([pairs.row, np.arange(num_queries)])
    to_node = np.concatenate([pairs.col.astype(np.int64) + num_queries, first_N])
    graph = ones_at((from_node, to_node), (num_nodes, num_nodes), np.int8)
    _, family_node = connected_components(graph, directed=False)
    _, member_F, family_N = np.unique(
        family_node[:num_queries], return_index=True, return_inverse=True
    )
    return member_F[family_N]


def _whole_texts(queries: pa.Table) -> Iterator[pa.Array]:
    """Title and content of each query as one text, in blocks."""
    separator = pa.scalar("\n", pa.large_string())
    for block in queries.to_batches():
        yield pc.binary_join_element_wise(block["title"], block["content"], separator)
