"""Faults in raw files, collected over all files and reported together; the checks of pairs that layouts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.errors import DataError

MAX_SAMPLES = 20
Lines = Callable[[np.ndarray], np.ndarray]
"""Maps row numbers (0-based, of pairs or of texts) to line numbers of their file (1-based); called for samples only."""


def next_line(rows: np.ndarray) -> np.ndarray:
    """Rows of a file without a header or blank lines."""
    return np.asarray(rows) + 1


def lines_of(line_N: np.ndarray, rows: np.ndarray | None = None) -> Lines:
    """Line numbers held in an array; of some of its rows, where given."""
    return lambda some: line_N[some if rows is None else rows[some]]


def showing(values: Sequence | np.ndarray | pa.ChunkedArray | pa.Array, what: str = "") -> Callable[[int], object]:
    """Details of a sample: its value."""
    return lambda row: f"{what}{values[row]}"


class Problems:
    """Kinds of fault, each with a count and samples as `file:line`; `stop` raises one DataError for all."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count: dict[str, int] = {}
        self.samples: dict[str, list[str]] = {}

    def add(self, kind: str, file: str, line: int, detail: object = "") -> None:
        """One fault."""
        self.count[kind] = self.count.get(kind, 0) + 1
        samples = self.samples.setdefault(kind, [])
        if len(samples) < MAX_SAMPLES:
            text = str(detail)[:120]
            samples.append(f"{file}:{line}" + (f" ({text})" if text else ""))

    def add_rows(self, kind: str, file: str, rows: np.ndarray, lines: Lines, details: Callable[[int], object]) -> None:
        """Faults at many rows; only the first few are looked at one by one."""
        rows = np.asarray(rows)
        if not rows.size:
            return
        first = rows[:MAX_SAMPLES]
        for row, line in zip(first.tolist(), lines(first).tolist(), strict=True):
            self.add(kind, file, line, details(row))
        self.count[kind] += int(rows.size - first.size)

    def stop(self) -> None:
        """Raise what was found, if anything was.

        Raises:
            DataError: every kind with its count, and at most 20 samples over all kinds.
        """
        if not self.count:
            return
        shown: dict[str, list[str]] = {kind: [] for kind in self.samples}
        for turn in range(MAX_SAMPLES):  # a sample of each kind in turn, so that no kind hides another
            for kind, samples in self.samples.items():
                if turn < len(samples) and sum(map(len, shown.values())) < MAX_SAMPLES:
                    shown[kind].append(samples[turn])
        report = []
        for kind, number in self.count.items():
            report.append(f"{kind}: {number:,}")
            report += [f"    {sample}" for sample in shown[kind]]
        raise DataError(
            f"the raw data cannot be used: {len(self.count)} kind(s) of fault",
            where=str(self.root),
            got="\n    ".join(report),
            fix="correct or remove these lines; nothing was written",
        )


def pair_matrix(
    query_P: np.ndarray,
    label_P: np.ndarray,
    relevance_P: np.ndarray,
    shape: tuple[int, int],
    *,
    problems: Problems,
    file: str,
    lines: Lines,
) -> csr_matrix:
    """Pairs to a float32 CSR matrix with sorted indices, every fault noted; P pairs.

    Args:
        query_P, label_P: whole numbers, rows and columns. relevance_P: float64.
        shape: (queries of the split, labels).
        lines: pair number -> line.

    Returns:
        The matrix of the pairs that have no fault (used for further checks only: `Problems.stop` raises before it is
        kept).
    """
    num_queries, num_labels = shape
    with np.errstate(over="ignore", under="ignore"):
        value_P = relevance_P.astype(np.float32)
    bad_label = (label_P < 0) | (label_P >= num_labels)
    bad_query = (query_P < 0) | (query_P >= num_queries)
    bad_value = ~(np.isfinite(value_P) & (value_P > 0))
    checks: list[tuple[str, np.ndarray, Callable[[int], object]]] = [
        (f"label index outside 0..{num_labels - 1}", bad_label, lambda p: f"label {label_P[p]}"),
        (f"query row outside 0..{num_queries - 1}", bad_query, lambda p: f"query {query_P[p]}"),
        ("relevance that is not a positive number", bad_value, lambda p: f"label {label_P[p]}: {relevance_P[p]}"),
    ]
    for kind, bad, details in checks:
        problems.add_rows(kind, file, np.flatnonzero(bad), lines, details)
    bad = bad_label | bad_query | bad_value
    if not bad.any() and _is_sorted(query_P, label_P):  # as most files have them: nothing is copied
        return sorted_csr(query_P, label_P, value_P, shape)
    good = np.flatnonzero(~bad)
    key = query_P[good].astype(np.int64) * num_labels + label_P[good]
    if not np.all(key[1:] > key[:-1]):
        order = np.argsort(key, kind="stable")
        key, good = key[order], good[order]
        again = np.flatnonzero(key[1:] == key[:-1]) + 1
        problems.add_rows(
            "pair given twice",
            file,
            np.sort(good[again]),
            lines,
            lambda p: f"query row {query_P[p]}, label {label_P[p]}",
        )
        keep = np.ones(key.size, dtype=bool)
        keep[again] = False
        good = good[keep]
    return sorted_csr(query_P[good], label_P[good], value_P[good], shape)


def _is_sorted(query_P: np.ndarray, label_P: np.ndarray) -> bool:
    """By query, then label, each pair once."""
    same_query = query_P[1:] == query_P[:-1]
    return bool(np.all((query_P[1:] > query_P[:-1]) | (same_query & (label_P[1:] > label_P[:-1]))))


def filter_matrix(
    query_P: np.ndarray, label_P: np.ndarray, shape: tuple[int, int], *, problems: Problems, file: str, lines: Lines
) -> csr_matrix:
    """Filter pairs to a bool CSR matrix; rows out of range are faults, pairs given twice are the same as once."""
    for name, index_P, limit in (("query row", query_P, shape[0]), ("label index", label_P, shape[1])):
        bad = np.flatnonzero((index_P < 0) | (index_P >= limit))
        problems.add_rows(f"filter pair with a {name} outside 0..{limit - 1}", file, bad, lines, showing(index_P))
    good = (query_P >= 0) & (query_P < shape[0]) & (label_P >= 0) & (label_P < shape[1])
    key = np.unique(query_P[good].astype(np.int64) * shape[1] + label_P[good])
    return sorted_csr(key // max(shape[1], 1), key % max(shape[1], 1), np.ones(key.size, dtype=bool), shape)


def sorted_csr(query_P: np.ndarray, label_P: np.ndarray, value_P: np.ndarray, shape: tuple[int, int]) -> csr_matrix:
    """CSR of pairs that are sorted by query, then label, and unique."""
    indptr = np.zeros(shape[0] + 1, dtype=np.int64)
    np.cumsum(np.bincount(query_P, minlength=shape[0]), out=indptr[1:])
    matrix = csr_matrix((value_P, label_P.astype(np.int32, copy=False), indptr), shape=shape)
    matrix.has_sorted_indices = True
    matrix.has_canonical_format = True
    return matrix


def check_uids(
    uids: list[str] | pa.Array | pa.ChunkedArray, problems: Problems, file: str, lines: Lines, what: str
) -> None:
    """Note every uid that is there already, and every empty one."""
    column = pa.array(uids, pa.large_string()) if isinstance(uids, list) else uids
    if pc.count_distinct(column).as_py() == len(column) and not pc.any(pc.equal(column, "")).as_py():
        return
    seen: set[str] = set()
    again = []
    for row, uid in enumerate(column.to_pylist()):
        if uid in seen or not uid:
            again.append(row)
        seen.add(uid)
    problems.add_rows(
        f"{what} uid empty or given twice", file, np.asarray(again), lines, lambda row: column[row].as_py()
    )
