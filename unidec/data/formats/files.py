"""A folder of raw files: found by name with or without .gz, read as UTF-8 lines, every fault noted with its line; and
the pairs of queries and labels in them, from row numbers, uids, sparse text and npz to checked CSR matrices.

Shape suffix: P pairs.
"""

from __future__ import annotations

import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix, load_npz

from unidec.data.raw import RawData
from unidec.data.table_file import DEFAULT_BOUNDS, Report, check_unpacked, decode, in_blocks, read_lines
from unidec.errors import DataError
from unidec.sections import RawBounds

MAX_SAMPLES = 20
Lines = Callable[[np.ndarray], np.ndarray]
"""Maps row numbers (0-based, of pairs or of texts) to line numbers of their file (1-based); called for samples only."""


def next_line(rows: np.ndarray) -> np.ndarray:
    """`Lines` of a file without a header or blank lines."""
    return np.asarray(rows) + 1


class Source:
    """A folder of raw files, the faults found in it, the files read and where texts came from.

    Attributes:
        count, samples: of each kind of fault how many there are, and the first few as `file:line`.
        read: files that were read, by their path within the folder.
        queries_at: by split, the file of its queries and the line of each row in it.
        labels_at: the same of the labels.
    """

    def __init__(self, root: Path, bounds: RawBounds = DEFAULT_BOUNDS) -> None:
        self.root, self.bounds = root, bounds
        self.count: Counter[str] = Counter()
        self.samples: dict[str, list[str]] = {}
        self.read: dict[str, Path] = {}
        self.queries_at: dict[str, tuple[str, Lines]] = {}
        self.labels_at: tuple[str, Lines] = ("", next_line)

    def note(self, kind: str, file: str, line: int, detail: object = "") -> None:
        """One fault."""
        self.count[kind] += 1
        samples = self.samples.setdefault(kind, [])
        if len(samples) < MAX_SAMPLES:
            text = str(detail)[:120]
            samples.append(f"{file}:{line}" + (f" ({text})" if text else ""))

    def note_rows(self, kind: str, at: tuple[str, Lines], rows: np.ndarray, detail: str, *columns: Any) -> None:
        """Faults at many rows of a file; `detail` is a format for the columns' values at a row."""
        first = rows[:MAX_SAMPLES]
        for row, line in zip(first.tolist(), at[1](first).tolist() if len(first) else (), strict=True):
            self.note(kind, at[0], line, detail.format(*(column[row] for column in columns)))
        if len(rows) > MAX_SAMPLES:
            self.count[kind] += len(rows) - MAX_SAMPLES

    def stop(self) -> None:
        """Raise a DataError for what was found, if anything: every kind with its count, and at most 20 samples."""
        if not self.count:
            return
        turns = [(turn, kind) for kind, samples in self.samples.items() for turn in range(len(samples))]
        kept = sorted(turns, key=lambda sample: sample[0])[:MAX_SAMPLES]  # so that no kind hides another
        report = []
        for kind, number in self.count.items():
            report.append(f"{kind}: {number:,}")
            report += [f"    {self.samples[kind][turn]}" for turn, own in kept if own == kind]
        raise DataError(
            f"the raw data cannot be used: {len(self.count)} kind(s) of fault",
            where=str(self.root),
            got="\n    ".join(report),
            fix="correct or remove these lines; nothing was written",
        )

    def find(self, *names: str) -> Path | None:
        """The first of the names that exists, as it is or with .gz."""
        paths = (self.root / f"{name}{suffix}" for name in names for suffix in ("", ".gz"))
        return next((path for path in paths if path.is_file()), None)

    def need(self, *names: str) -> Path:
        """`find`, or a DataError that lists what was looked for."""
        path = self.find(*names)
        if path is None:
            expected = " or ".join(f"{name}[.gz]" for name in names)
            raise DataError("a file is missing", where=str(self.root), expected=expected, fix="add it")
        return path

    def name(self, path: Path) -> str:
        """Path relative to the folder, as errors show it; remembers that the file was read."""
        relative = path.relative_to(self.root).as_posix()
        self.read[relative] = path
        return relative

    def report(self, path: Path) -> Report:
        """Notes what is wrong in a file."""
        name = self.name(path)
        return lambda what, line, got: self.note(what, name, line, got)

    def texts(self, path: Path) -> pa.ChunkedArray:
        """A text a line, as large_string."""
        report = self.report(path)
        lines = read_lines(path, self.bounds)
        texts = (decode(line, number, report).removesuffix("\r") for number, line in lines)
        return pa.chunked_array([pa.array(block, pa.large_string()) for block in in_blocks(texts)], pa.large_string())


@dataclass(frozen=True)
class Layout:
    """A way to lay raw data out in files.

    Attributes:
        expected: the files, for people. needs: names of files; a folder has this layout if it has one of each.
        read: reads it; faults are noted in the source.
    """

    expected: str
    needs: tuple[Sequence[str], ...]
    read: Callable[[Source], RawData]


@dataclass(frozen=True)
class Pairs:
    """The pairs of a file, and where to note what is wrong with them.

    Attributes:
        at: the file, and the line of each pair.
        query_P, label_P: rows of queries and labels.
        value_P: float64 relevance, NaN where it is not a number.
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


def rows_of(uids: pa.ChunkedArray | pa.Array, known: pa.ChunkedArray) -> np.ndarray:
    """Row of each uid in `known`: int64, -1 where it is not there."""
    found = pc.index_in(uids, value_set=pc.cast(known, pa.large_string()).combine_chunks())
    return pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)


def read_sparse_text(source: Source, path: Path, shape: tuple[int, int]) -> Pairs:
    """XMC sparse text: a header `N L`, then `label:relevance ...` a row.

    Raises:
        DataError: a header that does not match the texts, before anything of its size is allocated.
    """
    report, lines = source.report(path), read_lines(path, source.bounds)
    head = next(lines, (1, b""))[1].decode("utf-8", "replace").split()
    if head != [str(number) for number in shape]:
        what = "row counts that differ: the header does not match the texts"
        if len(head) != 2 or not all(number.isascii() and number.isdigit() for number in head):
            what = "not a header `N L`"
        expected = f"{shape[0]} {shape[1]}: queries and labels, as the text files have"
        raise DataError(what, where=f"{path}:1", got=repr(" ".join(head)[:60]), expected=expected)
    query, label, value, number = array("i"), array("q"), array("d"), 1
    for number, line in lines:
        for token in line.split():
            try:
                index, relevance = token.split(b":")
                pair = int(index), float(relevance)
                label.append(pair[0])
            except (ValueError, OverflowError):
                report("not `label:relevance`", number, repr(token[:60].decode("utf-8", "replace")))
                continue
            query.append(number - 2)
            value.append(pair[1])
    if number - 1 != shape[0]:
        got, expected = f"{number - 1:,} rows", f"{shape[0]:,}, as in the header"
        raise DataError("row counts that differ", where=str(path), got=got, expected=expected)
    query_P = np.asarray(query)
    return Pairs(source, (source.name(path), lambda p: query_P[p] + 2), query_P, np.asarray(label), np.asarray(value))


def read_filter_text(source: Source, path: Path) -> Pairs:
    """Filter file: `query_row label_row` a line, 0-based, no header."""
    report, found = source.report(path), array("q")
    for number, line in read_lines(path, source.bounds):
        try:
            query, label = map(int, line.split())
            found += array("q", (query, label, number))
        except (ValueError, OverflowError):
            if line.strip():
                report("not `query_row label_row`", number, repr(line[:60].decode("utf-8", "replace")))
    query_P, label_P, line_P = np.asarray(found, dtype=np.int64).reshape(-1, 3).T
    at = (source.name(path), line_P.__getitem__)
    return Pairs(source, at, query_P, label_P, np.ones(len(query_P)), are_filters=True)


def read_npz(source: Source, path: Path, shape: tuple[int, int]) -> Pairs:
    """Relevance from an npz file of `scipy.sparse.save_npz`.

    Raises:
        DataError: not such a file, one that unpacks to too much, or row counts that differ from the texts.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            check_unpacked(path, sum(info.file_size for info in archive.infolist()), source.bounds)
        with np.load(path, allow_pickle=False) as arrays:
            stored = tuple(arrays["shape"].ravel().tolist())
        if stored == shape:
            matrix = load_npz(path)
            if matrix.format in ("csr", "csc"):
                matrix.check_format(full_check=True)
            pairs = matrix.tocoo()
            value_P = pairs.data.astype(np.float64, casting="safe")
            at = (source.name(path), lambda p: next_line(pairs.row[p]))
            return Pairs(source, at, pairs.row, pairs.col, value_P)
    except (zipfile.BadZipFile, MemoryError, ValueError, TypeError, OSError, KeyError, EOFError) as error:
        fix = "write it with scipy.sparse.save_npz"
        raise DataError("not a sparse matrix in npz", where=str(path), got=str(error)[:200], fix=fix) from error
    what = "row counts that differ: the matrix does not match the texts"
    got, expected = f"{stored} (queries, labels)", f"{shape}, as the text files have"
    raise DataError(what, where=str(path), got=got, expected=expected)
