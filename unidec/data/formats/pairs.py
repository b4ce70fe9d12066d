"""Pairs of queries and labels: from row numbers, uids, sparse text and npz to checked CSR matrices.

Shape suffix: P pairs.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.bounded import check_unpacked
from unidec.data.formats.files import Lines, Problems, Source
from unidec.data.table_file import to_numbers
from unidec.errors import DataError

_TOKEN = r"^(?P<label>-?\d{1,18}):(?P<value>[^\s:]+)$"
_FILTER = r"^\s*(?P<query>-?\d{1,18})\s+(?P<label>-?\d{1,18})\s*$"


@dataclass(frozen=True)
class Pairs:
    """The pairs of a file: rows of queries and labels (-1: unknown), the line of each, and where to note faults.

    Attributes:
        value_P: float64 relevance, NaN where it is not a number.
        are_filters: they are neither positives nor negatives, and have no relevance.
    """

    query_P: np.ndarray
    label_P: np.ndarray
    value_P: np.ndarray
    lines: Lines
    file: str
    problems: Problems
    are_filters: bool = False

    def take(self, kept: np.ndarray) -> Pairs:
        """Some of the pairs."""
        return replace(
            self,
            query_P=self.query_P[kept],
            label_P=self.label_P[kept],
            value_P=self.value_P[kept],
            lines=lambda p: self.lines(kept[p]),
        )

    def matrix(self, shape: tuple[int, int]) -> csr_matrix:
        """CSR with sorted indices, float32 relevance or bool filter pairs; every fault is noted and left out."""
        bad_P = np.zeros(len(self.query_P), dtype=bool)
        for what, index_P, limit in (("label index", self.label_P, shape[1]), ("query row", self.query_P, shape[0])):
            kind = f"{'filter pair with a ' if self.are_filters else ''}{what} outside 0..{limit - 1}"
            outside_P = (index_P < 0) | (index_P >= limit)
            self._note(kind, outside_P, [what.partition(" ")[0]], index_P)
            bad_P |= outside_P
        with np.errstate(over="ignore", under="ignore"):
            value_P = self.value_P.astype(bool if self.are_filters else np.float32)
        if not self.are_filters:
            wrong_P = ~(np.isfinite(value_P) & (value_P > 0))
            self._note("relevance that is not a positive number", wrong_P, ["label", ":"], self.label_P, self.value_P)
            bad_P |= wrong_P
        found = replace(self, value_P=value_P)
        return _sorted_csr(found.take(np.flatnonzero(~bad_P)) if bad_P.any() else found, shape)

    def _note(self, kind: str, bad_P: np.ndarray, words: list[str], *values_P: np.ndarray) -> None:
        def details(pair: int) -> str:
            return "".join(f"{word} {values[pair]}" for word, values in zip(words, values_P, strict=True))

        self.problems.add_rows(kind, self.file, np.flatnonzero(bad_P), self.lines, details)

    def known(self) -> Pairs:
        """Without the pairs of an unknown uid, which were noted."""
        unknown_P = (self.query_P < 0) | (self.label_P < 0)
        return self.take(np.flatnonzero(~unknown_P)) if unknown_P.any() else self

    def by_split(self, rows_by_split: dict[str, np.ndarray], shape: tuple[int, int]) -> dict[str, csr_matrix]:
        """One matrix over all queries, then its rows by split."""
        matrix = self.known().matrix(shape)
        return {split: csr_matrix(matrix[rows]) for split, rows in rows_by_split.items()}


def _sorted_csr(pairs: Pairs, shape: tuple[int, int]) -> csr_matrix:
    """CSR of pairs within the shape; one given twice is noted, and kept once (filter pairs: only kept once)."""
    query_P, label_P = pairs.query_P, pairs.label_P
    same_query = query_P[1:] == query_P[:-1]
    if not np.all((query_P[1:] > query_P[:-1]) | (same_query & (label_P[1:] > label_P[:-1]))):
        order = np.lexsort((label_P, query_P))
        query_P, label_P = query_P[order], label_P[order]
        again = np.concatenate(([False], (query_P[1:] == query_P[:-1]) & (label_P[1:] == label_P[:-1])))
        if not pairs.are_filters:
            kind, twice = "pair given twice", np.zeros(len(order), dtype=bool)
            twice[order[again]] = True
            pairs._note(kind, twice, ["query row", ", label"], pairs.query_P, pairs.label_P)
        pairs = pairs.take(order[~again])
    indptr = np.zeros(shape[0] + 1, dtype=np.int64)
    np.cumsum(np.bincount(pairs.query_P, minlength=shape[0]), out=indptr[1:])
    matrix = csr_matrix((pairs.value_P, pairs.label_P.astype(np.int32, copy=False), indptr), shape=shape)
    matrix.has_sorted_indices = matrix.has_canonical_format = True
    return matrix


def rows_of(uids: pa.ChunkedArray | pa.Array, known: pa.ChunkedArray) -> np.ndarray:
    """Row of each uid in `known`: int64, -1 where it is not there."""
    found = pc.index_in(uids, value_set=pc.cast(known, pa.large_string()).combine_chunks())
    return pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)


def pairs_of_uids(
    uids: tuple[pa.ChunkedArray, pa.ChunkedArray], value_P: np.ndarray, tables: tuple[pa.Table, pa.Table],
    lines: Lines, file: str, problems: Problems, are_filters: bool = False,
) -> Pairs:  # fmt: skip
    """Pairs given by the uids of query and label; `tables` are all queries and all labels. Unknown uids are noted."""
    rows = []
    for what, column, table in zip(("query", "label"), uids, tables, strict=True):
        rows.append(rows_of(column, table["uid"]))
        unknown = np.flatnonzero(rows[-1] < 0)
        kind = f"pair with an unknown {what}"
        problems.add_rows(kind, file, unknown, lines, partial(_uid, column))
    return Pairs(rows[0], rows[1], value_P, lines, file, problems, are_filters)


def _uid(column: pa.ChunkedArray, row: int) -> str:
    return f"uid {column[row]}"


def read_sparse_text(source: Source, path: Path, num_queries: int, num_labels: int) -> Pairs:
    """XMC sparse text: a header `N L`, then `label:relevance ...` a row.

    Raises:
        DataError: a header that does not match the texts, before anything of its size is allocated.
    """
    report, blocks, num_lines = source.report(path), [], -1
    for number, texts in source.line_blocks(path):
        if number == 1:
            _check_header(texts[0].as_py(), path, num_queries, num_labels)
            texts, num_lines = texts[1:], 0
        tokens = pc.ascii_split_whitespace(pc.ascii_trim_whitespace(texts))
        row_T = np.repeat(np.arange(len(texts)), pc.list_value_length(tokens).to_numpy(zero_copy_only=False))
        flat = tokens.flatten()
        keep_T = pc.not_equal(flat, "").to_numpy(zero_copy_only=False)  # of a blank line
        found, good_T = _matches(flat, _TOKEN)
        for token in np.flatnonzero(keep_T & ~good_T).tolist():
            report("not `label:relevance`", num_lines + int(row_T[token]) + 2, repr(flat[token].as_py()[:60]))
        label_P = found.field("label").cast(pa.int64()).to_numpy(zero_copy_only=False)
        smallest = np.int32 if np.abs(label_P).max(initial=0) < 2**31 else np.int64  # half of the memory
        query_P = (row_T[good_T] + num_lines).astype(np.int32)
        blocks.append((query_P, label_P.astype(smallest), to_numbers(found.field("value"))))
        num_lines += len(texts)
    if num_lines < 0:
        _check_header("", path, num_queries, num_labels)
    if num_lines != num_queries:
        raise DataError(
            "row counts that differ",
            where=str(path),
            got=f"{num_lines:,} rows",
            expected=f"{num_queries:,}, as in the header",
        )
    empty = (np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0))
    query_P, label_P, value_P = (np.concatenate(parts) for parts in zip(empty, *blocks, strict=True))
    return Pairs(
        query_P, label_P, value_P, lambda p: query_P[p].astype(np.int64) + 2, source.name(path), source.problems
    )


def _matches(texts: pa.Array, pattern: str) -> tuple[pa.StructArray, np.ndarray]:
    """The named groups of the texts that match, and which do: bool [len(texts)]."""
    found = pc.extract_regex(texts, pattern)
    good = found.is_valid().to_numpy(zero_copy_only=False)
    return found.filter(pa.array(good)), good


def _check_header(head: str, path: Path, num_queries: int, num_labels: int) -> None:
    found = head.split()
    if len(found) != 2 or not all(number.isascii() and number.isdigit() for number in found):
        raise DataError(
            "not a header `N L`", where=f"{path}:1", got=repr(head[:60]), fix="put both counts on the first line"
        )
    if found != [str(num_queries), str(num_labels)]:
        raise DataError(
            "row counts that differ: the header does not match the texts",
            where=f"{path}:1",
            got=f"{found[0][:20]} queries and {found[1][:20]} labels",
            expected=f"{num_queries:,} queries and {num_labels:,} labels, as the text files have",
        )


def read_filter_text(source: Source, path: Path) -> Pairs:
    """Filter file: `query_row label_row` a line, 0-based, no header."""
    report, blocks = source.report(path), [np.zeros((3, 0), dtype=np.int64)]
    for number, texts in source.line_blocks(path):
        found, good = _matches(texts, _FILTER)
        blank = pc.equal(pc.ascii_trim_whitespace(texts), "").to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(~good & ~blank).tolist():
            report("not `query_row label_row`", number + row, repr(texts[row].as_py()[:60]))
        ids = [found.field(name).cast(pa.int64()).to_numpy(zero_copy_only=False) for name in ("query", "label")]
        blocks.append(np.stack([*ids, np.flatnonzero(good) + number]))
    query_P, label_P, line_P = np.concatenate(blocks, axis=1)
    return Pairs(query_P, label_P, np.ones(len(query_P)), lambda p: line_P[p], source.name(path), source.problems, True)


def read_npz(source: Source, path: Path, shape: tuple[int, int]) -> Pairs:
    """Relevance from an npz file of `scipy.sparse.save_npz` (csr, csc or coo).

    What the archive declares is checked before an array is read: sizes, types, and the shape (queries, labels).

    Raises:
        DataError: not such a file, or row counts that differ from the texts.
    """
    try:
        _check_archive(path, source)
        with np.load(path, allow_pickle=False) as arrays:
            found = tuple(int(n) for n in arrays["shape"].ravel()[:3])
            if found != shape:
                raise DataError(
                    "row counts that differ: the matrix does not match the texts",
                    where=str(path),
                    got=f"{found} (queries, labels)",
                    expected=f"{shape}, as the text files have",
                )
            query_P, label_P = _rows_and_columns(str(arrays["format"].astype("U8")), arrays, shape)
            value_P = arrays["data"].astype(np.float64)
        if not query_P.shape == label_P.shape == value_P.shape or value_P.ndim != 1:
            raise ValueError(f"{query_P.shape} rows, {label_P.shape} columns, {value_P.shape} values")
    except (zipfile.BadZipFile, ValueError, TypeError, OSError, KeyError, EOFError, NotImplementedError) as error:
        raise DataError(
            "not a sparse matrix in npz",
            where=str(path),
            got=str(error)[:200],
            fix="write it with scipy.sparse.save_npz",
        ) from error
    return Pairs(query_P, label_P, value_P, lambda p: query_P[p] + 1, source.name(path), source.problems)


def _rows_and_columns(kind: str, arrays: Any, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    if kind == "coo":
        return arrays["row"].astype(np.int64), arrays["col"].astype(np.int64)
    if kind not in ("csr", "csc"):
        raise ValueError(f"format {kind!r}")
    indptr, minor = arrays["indptr"].astype(np.int64), arrays["indices"].astype(np.int64)
    starts = shape[0 if kind == "csr" else 1] + 1
    if indptr.shape != (starts,) or indptr[0] != 0 or indptr[-1] != len(minor) or np.any(np.diff(indptr) < 0):
        raise ValueError("row pointers that do not ascend from 0 to the number of pairs")
    major = np.repeat(np.arange(starts - 1), np.diff(indptr))
    return (major, minor) if kind == "csr" else (minor, major)


def _check_archive(path: Path, source: Source) -> None:
    """Each array is of plain numbers (indices: whole ones), and as large as its header declares."""
    with zipfile.ZipFile(path) as archive:
        check_unpacked(path, sum(info.file_size for info in archive.infolist()), source.bounds)
        for info in archive.infolist():
            with archive.open(info) as member:
                version = np.lib.format.read_magic(member)
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                shape, _, dtype = read[version](member)
                stored, declared = info.file_size - member.tell(), dtype.itemsize
            for extent in shape:  # Python integers: no overflow
                declared *= int(extent)
            kinds = {"data.npy": "biuf", "format.npy": "SU"}.get(info.filename, "iu")
            if declared != stored or dtype.kind not in kinds:
                raise ValueError(f"{info.filename}: {dtype} {shape} declared, {stored} bytes stored")
