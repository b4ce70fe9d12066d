"""Pairs given by uids instead of row numbers (BEIR, tables)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.formats.problems import Lines, Problems, filter_matrix, pair_matrix, showing


@dataclass(frozen=True)
class Pairs:
    """One file of pairs: uids, relevance (float64, NaN where it is not a number), the line of each row."""

    file: str
    query: pa.Array | pa.ChunkedArray
    label: pa.Array | pa.ChunkedArray
    relevance: np.ndarray
    lines: Lines


def rows_of(uids: pa.ChunkedArray | pa.Array, known: pa.ChunkedArray) -> np.ndarray:
    """Row of each uid in `known`: int64, -1 where it is not there."""
    found = pc.index_in(uids, value_set=pc.cast(known, pa.large_string()).combine_chunks())
    return pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)


def look_up(pairs: Pairs, queries: pa.Table, labels: pa.Table, problems: Problems) -> tuple[np.ndarray, np.ndarray]:
    """Rows of both sides of every pair (int64, -1 where unknown, which is noted)."""
    found = []
    for what, uids, table in (("query", pairs.query, queries), ("label", pairs.label, labels)):
        rows = rows_of(uids, table["uid"])
        unknown = np.flatnonzero(rows < 0)
        problems.add_rows(f"pair with an unknown {what}", pairs.file, unknown, pairs.lines, showing(uids, "uid "))
        found.append(rows)
    return found[0], found[1]


def split_pairs(
    pairs: Pairs,
    query_P: np.ndarray,
    label_P: np.ndarray,
    rows_by_split: dict[str, np.ndarray],
    shape: tuple[int, int],
    problems: Problems,
    *,
    filters: bool = False,
) -> dict[str, csr_matrix]:
    """One matrix over all queries, then its rows by split; float32 relevance, or bool filter pairs."""
    known = np.flatnonzero((query_P >= 0) & (label_P >= 0))
    lines: Lines = lambda rows: pairs.lines(known[rows])  # noqa: E731
    if filters:
        matrix = filter_matrix(query_P[known], label_P[known], shape, problems=problems, file=pairs.file, lines=lines)
    else:
        matrix = pair_matrix(
            query_P[known],
            label_P[known],
            pairs.relevance[known],
            shape,
            problems=problems,
            file=pairs.file,
            lines=lines,
        )
    return {split: csr_matrix(matrix[rows]) for split, rows in rows_by_split.items()}
