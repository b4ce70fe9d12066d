"""Pairs of queries and labels: from row numbers, uids, sparse text and npz to checked CSR matrices.

Shape suffix: P pairs.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Lines, Source, next_line
from unidec.data.table_file import check_unpacked, to_numbers
from unidec.errors import DataError

_TOKEN = r"^(?P<label>-?\d{1,18}):(?P<value>[^\s:]+)$"
_FILTER = r"^\s*(?P<query>-?\d{1,18})\s+(?P<label>-?\d{1,18})\s*$"


@dataclass(frozen=True)
class Pairs:
    """The pairs of a file, and where to note what is wrong with them.

    Attributes:
        query_P, label_P: rows of queries and labels.
        value_P: float64 relevance, NaN where it is not a number.
        at: the file, and the line of each pair.
        by_uid: a row of -1 is an unknown uid, which was noted.
        are_filters: they are neither positives nor negatives, and have no relevance.
    """

    source: Source
    at: tuple[str, Lines]
    query_P: np.ndarray
    label_P: np.ndarray
    value_P: np.ndarray
    by_uid: bool = False
    are_filters: bool = False

    def matrix(self, shape: tuple[int, int], zero_is_no_pair: bool = False) -> csr_matrix:
        """CSR with sorted indices, float32 relevance or bool filter pairs; every fault is noted and left out."""
        query_P, label_P, note = self.query_P, self.label_P, self.source.note_rows
        no_pair_P = (self.value_P == 0) & zero_is_no_pair
        bad_P = no_pair_P.copy()
        for what, index_P, limit in (("label index", label_P, shape[1]), ("query row", query_P, shape[0])):
            outside_P = (index_P < 0) | (index_P >= limit)
            if not self.by_uid:
                kind = f"{'filter pair with a ' if self.are_filters else ''}{what} outside 0..{limit - 1}"
                note(kind, self.at, np.flatnonzero(outside_P), f"{what.partition(' ')[0]} {{}}", index_P)
            bad_P |= outside_P
        with np.errstate(over="ignore", under="ignore"):
            value_P = self.value_P.astype(bool if self.are_filters else np.float32)
        if not self.are_filters:
            wrong_P = ~(np.isfinite(value_P) & (value_P > 0) | no_pair_P)
            kind = "relevance that is not a positive number"
            note(kind, self.at, np.flatnonzero(wrong_P), "label {}: {}", label_P, self.value_P)
            bad_P |= wrong_P
        good = np.flatnonzero(~bad_P) if bad_P.any() else slice(None)
        query_P, label_P, value_P = query_P[good], label_P[good], value_P[good]
        matrix = csr_matrix((value_P, (query_P, label_P)), shape=shape)
        if matrix.nnz < len(query_P) and not self.are_filters:
            _, first = np.unique(query_P.astype(np.int64) * shape[1] + label_P, return_index=True)
            again = np.delete(np.arange(len(bad_P))[good], first)
            note("pair given twice", self.at, again, "query row {}, label {}", self.query_P, self.label_P)
        return matrix

    def by_split(self, rows_by_split: dict[str, np.ndarray], shape: tuple[int, int]) -> dict[str, csr_matrix]:
        """One matrix over all queries, then its rows by split."""
        matrix = self.matrix(shape)
        return {split: csr_matrix(matrix[rows]) for split, rows in rows_by_split.items()}


def rows_of(uids: pa.ChunkedArray | pa.Array, known: pa.ChunkedArray) -> np.ndarray:
    """Row of each uid in `known`: int64, -1 where it is not there."""
    found = pc.index_in(uids, value_set=pc.cast(known, pa.large_string()).combine_chunks())
    return pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)


def read_sparse_text(source: Source, path: Path, shape: tuple[int, int]) -> Pairs:
    """XMC sparse text: a header `N L`, then `label:relevance ...` a row.

    Raises:
        DataError: a header that does not match the texts, before anything of its size is allocated.
    """
    report, num_lines = source.report(path), -1
    blocks = [(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0))]
    for number, texts in source.line_blocks(path):
        if number == 1:
            _check_header(texts[0].as_py(), path, shape)
            texts, num_lines = texts[1:], 0
        tokens = pc.ascii_split_whitespace(pc.ascii_trim_whitespace(texts))
        row_T = np.repeat(np.arange(len(texts)), pc.list_value_length(tokens).to_numpy(zero_copy_only=False))
        flat = tokens.flatten()
        found, good_T = _matches(flat, _TOKEN)
        blank_T = pc.equal(flat, "").to_numpy(zero_copy_only=False)
        for token in np.flatnonzero(~good_T & ~blank_T).tolist():
            report("not `label:relevance`", num_lines + int(row_T[token]) + 2, repr(flat[token].as_py()[:60]))
        label_P = found.field("label").cast(pa.int64()).to_numpy(zero_copy_only=False)
        smallest = np.int32 if np.abs(label_P).max(initial=0) < 2**31 else np.int64  # half of the memory
        query_P = (row_T[good_T] + num_lines).astype(np.int32)
        blocks.append((query_P, label_P.astype(smallest), to_numbers(found.field("value"))))
        num_lines += len(texts)
    if num_lines < 0:
        _check_header("", path, shape)
    if num_lines != shape[0]:
        got, expected = f"{num_lines:,} rows", f"{shape[0]:,}, as in the header"
        raise DataError("row counts that differ", where=str(path), got=got, expected=expected)
    query_P, label_P, value_P = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return Pairs(source, (source.name(path), lambda p: query_P[p] + 2), query_P, label_P, value_P)


def _matches(texts: pa.Array, pattern: str) -> tuple[pa.StructArray, np.ndarray]:
    """The named groups of the texts that match, and which do: bool [len(texts)]."""
    found = pc.extract_regex(texts, pattern)
    good = found.is_valid().to_numpy(zero_copy_only=False)
    return found.filter(pa.array(good)), good


def _check_header(head: str, path: Path, shape: tuple[int, int]) -> None:
    found, where = head.split(), f"{path}:1"
    if len(found) != 2 or not all(number.isascii() and number.isdigit() for number in found):
        fix = "put both counts on the first line"
        raise DataError("not a header `N L`", where=where, got=repr(head[:60]), fix=fix)
    if found != [str(number) for number in shape]:
        what = "row counts that differ: the header does not match the texts"
        got = f"{found[0][:20]} queries and {found[1][:20]} labels"
        expected = f"{shape[0]:,} queries and {shape[1]:,} labels, as the text files have"
        raise DataError(what, where=where, got=got, expected=expected)


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
    at = (source.name(path), line_P.__getitem__)
    return Pairs(source, at, query_P, label_P, np.ones(len(query_P)), are_filters=True)


def read_npz(source: Source, path: Path, shape: tuple[int, int]) -> Pairs:
    """Relevance from an npz file of `scipy.sparse.save_npz` (csr, csc or coo).

    Raises:
        DataError: not such a file, one that unpacks to too much, or row counts that differ from the texts.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            check_unpacked(path, sum(info.file_size for info in archive.infolist()), source.bounds)
        with np.load(path, allow_pickle=False) as arrays:
            stored = tuple(int(number) for number in arrays["shape"].ravel())
            if stored == shape:
                query_P, label_P = _rows_and_columns(str(arrays["format"].astype("U8")), arrays, shape)
                value_P = arrays["data"]
                if not query_P.shape == label_P.shape == value_P.shape or value_P.ndim != 1:
                    raise ValueError(f"{query_P.shape} rows, {label_P.shape} columns, {value_P.shape} values")
                if query_P.dtype.kind + label_P.dtype.kind != "ii" or value_P.dtype.kind not in "biuf":
                    raise ValueError(f"indices of {query_P.dtype} and {label_P.dtype}, values of {value_P.dtype}")
                at = (source.name(path), lambda p: next_line(query_P[p]))
                return Pairs(source, at, query_P, label_P, value_P.astype(np.float64))
    except (zipfile.BadZipFile, MemoryError, ValueError, TypeError, OSError, KeyError, EOFError) as error:
        fix = "write it with scipy.sparse.save_npz"
        raise DataError("not a sparse matrix in npz", where=str(path), got=str(error)[:200], fix=fix) from error
    what = "row counts that differ: the matrix does not match the texts"
    got, expected = f"{stored} (queries, labels)", f"{shape}, as the text files have"
    raise DataError(what, where=str(path), got=got, expected=expected)


def _rows_and_columns(kind: str, arrays: Any, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    if kind == "coo":
        return arrays["row"], arrays["col"]
    if kind not in ("csr", "csc"):
        raise ValueError(f"format {kind!r}")
    indptr, minor = arrays["indptr"], arrays["indices"]
    starts = shape[0 if kind == "csr" else 1] + 1
    if indptr.shape != (starts,) or indptr[0] != 0 or indptr[-1] != len(minor) or np.any(np.diff(indptr) < 0):
        raise ValueError("row pointers that do not ascend from 0 to the number of pairs")
    major = np.repeat(np.arange(starts - 1), np.diff(indptr))
    return (major, minor) if kind == "csr" else (minor, major)
