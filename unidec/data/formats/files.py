"""A folder of raw files, and the pairs of queries and labels in them.

Files are found by name, with or without .gz, and read as UTF-8 lines; every error is recorded with
its line. Pairs of row numbers or uids, from sparse text, tables or npz files, become checked CSR
matrices.

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

from unidec.config import RawBounds
from unidec.data.formats import folder
from unidec.data.raw import RawData
from unidec.data.raw_lines import DEFAULT_BOUNDS, Report, check_unpacked, decode, read_lines
from unidec.data.table_file import in_blocks
from unidec.errors import DataError

MAX_SAMPLES = 20
Lines = Callable[[np.ndarray], np.ndarray]
"""Maps row numbers (0-based, of pairs or texts) to line numbers in their file (1-based); called for
samples only.
"""


def next_line(rows: np.ndarray) -> np.ndarray:
    """`Lines` for a file without header and blank lines."""
    return np.asarray(rows) + 1


class Source:
    """A folder of raw files, with the errors found in them and the places of the texts.

    Attributes:
        count: number of errors of each kind.
        samples: the first errors of each kind as `file:line`.
        fixes: how to correct some of these errors.
        read: the files that were read, by relative path.
        queries_at: by split, the file of its queries and the `Lines` of its rows.
        labels_at: the file of the labels and the `Lines` of its rows.
        fix: what to do about errors.
    """

    fix = "correct or remove these lines; nothing was written"

    def __init__(self, root: Path, bounds: RawBounds = DEFAULT_BOUNDS) -> None:
        self.root = root
        self.bounds = bounds
        self.count: Counter[str] = Counter()
        self.samples: dict[str, list[str]] = {}
        self.fixes: list[str] = []
        self.read: dict[str, Path] = {}
        self.queries_at: dict[str, tuple[str, Lines]] = {}
        self.labels_at: tuple[str, Lines] = ("", next_line)

    def note(self, kind: str, file: str, line: int, detail: object = "") -> None:
        """Record one error."""
        self.count[kind] += 1
        samples = self.samples.setdefault(kind, [])
        if len(samples) < MAX_SAMPLES:
            text = str(detail)[:200]
            samples.append(f"{file}:{line}" + (f" ({text})" if text else ""))

    def advise(self, fix: str) -> None:
        """Record how to correct an error, once."""
        if fix not in self.fixes:
            self.fixes.append(fix)

    def note_rows(
        self, kind: str, at: tuple[str, Lines], rows: np.ndarray, detail: str, *columns: Any
    ) -> None:
        """Record an error for each of these rows of a file; `detail` is a format string for the
        columns' values.
        """
        first = rows[:MAX_SAMPLES]
        for row, line in zip(
            first.tolist(), at[1](first).tolist() if len(first) else (), strict=True
        ):
            self.note(kind, at[0], line, detail.format(*(column[row] for column in columns)))
        if len(rows) > MAX_SAMPLES:
            self.count[kind] += len(rows) - MAX_SAMPLES

    def stop(self) -> None:
        """Raise a DataError if there are errors: every kind with its count, and at most 20 samples
        in total.
        """
        if not self.count:
            return
        samples = [
            (index, kind) for kind, places in self.samples.items() for index in range(len(places))
        ]
        # the first samples of every kind
        shown = sorted(samples, key=lambda sample: sample[0])[:MAX_SAMPLES]
        report = []
        for kind, number in self.count.items():
            report.append(f"{kind}: {number:,}")
            report += [
                f"    {self.samples[kind][index]}"
                for index, sample_kind in shown
                if sample_kind == kind
            ]
        raise DataError(
            f"the raw data cannot be used: {len(self.count)} kind(s) of error",
            where=str(self.root),
            got="\n    ".join(report),
            fix="\n    ".join([*self.fixes, self.fix]),
        )

    def find(self, *names: str) -> Path | None:
        """Path of the file with one of these names, with or without .gz; None if there is none.

        Raises:
            DataError: there are two, or what is there is not a file that can be read.
        """
        return folder.find(self.root, names)

    def need(self, *names: str) -> Path:
        """Like `find`, but raises a DataError that lists the names if there is no such file."""
        path = self.find(*names)
        if path is None:
            expected = " or ".join(f"{name}[.gz]" for name in names)
            raise DataError(
                "a file is missing", where=str(self.root), expected=expected, fix="add it"
            )
        return path

    def name(self, path: Path) -> str:
        """Relative path of a file, which is added to `read`."""
        relative = path.relative_to(self.root).as_posix()
        self.read[relative] = path
        return relative

    def report(self, path: Path) -> Report:
        """A `Report` that records the errors of a file."""
        name = self.name(path)
        return lambda what, line, got: self.note(what, name, line, got)

    def texts(self, path: Path) -> pa.ChunkedArray:
        """The lines of a file as texts (large_string)."""
        report = self.report(path)
        lines = read_lines(path, self.bounds)
        texts = (decode(line, number, report).removesuffix("\r") for number, line in lines)
        return pa.chunked_array(
            [pa.array(block, pa.large_string()) for block in in_blocks(texts)], pa.large_string()
        )


@dataclass(frozen=True)
class Layout:
    """A layout of raw files.

    Attributes:
        expected: description of the files, for error messages.
        needs: groups of file names; a folder has this layout if it has one file of each group.
        read: reads the files; errors are recorded in the source.
    """

    expected: str
    needs: tuple[Sequence[str], ...]
    read: Callable[[Source], RawData]


@dataclass(frozen=True)
class Pairs:
    """The pairs of a file, not checked yet.

    Attributes:
        source: records the errors.
        at: the file and the `Lines` of its pairs.
        query_P, label_P: row numbers of queries and labels.
        value_P: relevance as float64, NaN if it is not a number.
        by_uid: pairs were given by uid; a row number of -1 is an unknown uid, which was recorded
        already.
        are_filters: these are filter pairs, which have no relevance.
    """

    source: Source
    at: tuple[str, Lines]
    query_P: np.ndarray
    label_P: np.ndarray
    value_P: np.ndarray
    by_uid: bool = False
    are_filters: bool = False

    def matrix(self, shape: tuple[int, int], zero_is_no_pair: bool = False) -> csr_matrix:
        """CSR matrix with sorted indices: relevance (float32) or filter pairs (bool). Invalid pairs
        are recorded and left out.
        """
        query_P = self.query_P
        label_P = self.label_P
        note = self.source.note_rows
        no_pair_P = (self.value_P == 0) & zero_is_no_pair
        bad_P = no_pair_P.copy()
        for what, index_P, limit in (
            ("label index", label_P, shape[1]),
            ("query row", query_P, shape[0]),
        ):
            outside_P = (index_P < 0) | (index_P >= limit)
            if not self.by_uid:
                kind = (
                    f"{'filter pair with a ' if self.are_filters else ''}{what} outside "
                    f"0..{limit - 1}"
                )
                note(
                    kind,
                    self.at,
                    np.flatnonzero(outside_P),
                    f"{what.partition(' ')[0]} {{}}",
                    index_P,
                )
            bad_P |= outside_P
        with np.errstate(over="ignore", under="ignore"):
            value_P = self.value_P.astype(bool if self.are_filters else np.float32)
        if not self.are_filters:
            wrong_P = ~(np.isfinite(value_P) & (value_P > 0) | no_pair_P)
            kind = "relevance that is not a positive number"
            note(kind, self.at, np.flatnonzero(wrong_P), "label {}: {}", label_P, self.value_P)
            bad_P |= wrong_P
        good = np.flatnonzero(~bad_P) if bad_P.any() else slice(None)
        query_P = query_P[good]
        label_P = label_P[good]
        value_P = value_P[good]
        matrix = csr_matrix((value_P, (query_P, label_P)), shape=shape)
        if matrix.nnz < len(query_P) and not self.are_filters:
            _, first = np.unique(query_P.astype(np.int64) * shape[1] + label_P, return_index=True)
            repeated = np.delete(np.arange(len(bad_P))[good], first)
            note(
                "pair given twice",
                self.at,
                repeated,
                "query row {}, label {}",
                self.query_P,
                self.label_P,
            )
        return matrix


def rows_of(uids: pa.ChunkedArray | pa.Array, known: pa.ChunkedArray) -> np.ndarray:
    """Row of each uid in `known`, int64; -1 if it is not in it."""
    rows = pc.index_in(uids, value_set=pc.cast(known, pa.large_string()).combine_chunks())
    return pc.fill_null(rows, -1).to_numpy(zero_copy_only=False).astype(np.int64)


def read_sparse_text(source: Source, path: Path, shape: tuple[int, int]) -> Pairs:
    """Read XMC sparse text: a header `N L`, then a line `label:relevance ...` per query.

    Raises:
        DataError: the header or the number of rows does not match the texts. The header is checked
            before memory of its size is allocated.
    """
    report = source.report(path)
    lines = read_lines(path, source.bounds)
    head = next(lines, (1, b""))[1].decode("utf-8", "replace").split()
    if head != [str(number) for number in shape]:
        what = "row counts differ: the header does not match the texts"
        if len(head) != 2 or not all(number.isascii() and number.isdigit() for number in head):
            what = "not a header `N L`"
        expected = f"{shape[0]} {shape[1]}: queries and labels, as the text files have"
        raise DataError(what, where=f"{path}:1", got=repr(" ".join(head)[:60]), expected=expected)
    query = array("i")
    label = array("q")
    value = array("d")
    number = 1
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
        got = f"{number - 1:,} rows"
        expected = f"{shape[0]:,}, as in the header"
        raise DataError("row counts differ", where=str(path), got=got, expected=expected)
    query_P = np.asarray(query)
    return Pairs(
        source,
        (source.name(path), lambda p: query_P[p] + 2),
        query_P,
        np.asarray(label),
        np.asarray(value),
    )


def read_filter_text(source: Source, path: Path) -> Pairs:
    """Read a filter file: `query_row label_row` per line, 0-based, without header."""
    report = source.report(path)
    numbers = array("q")
    for number, line in read_lines(path, source.bounds):
        try:
            query, label = map(int, line.split())
            numbers += array("q", (query, label, number))
        except (ValueError, OverflowError):
            if line.strip():
                report(
                    "not `query_row label_row`", number, repr(line[:60].decode("utf-8", "replace"))
                )
    query_P, label_P, line_P = np.asarray(numbers, dtype=np.int64).reshape(-1, 3).T
    at = (source.name(path), line_P.__getitem__)
    return Pairs(source, at, query_P, label_P, np.ones(len(query_P)), are_filters=True)


def read_npz(source: Source, path: Path, shape: tuple[int, int]) -> Pairs:
    """Read relevance from an npz file of `scipy.sparse.save_npz`.

    Raises:
        DataError: not such a file, its unpacked size is too large, or its row counts differ from
        the texts.
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
    except (
        zipfile.BadZipFile,
        MemoryError,
        ValueError,
        TypeError,
        OSError,
        KeyError,
        EOFError,
    ) as error:
        fix = "write it with scipy.sparse.save_npz"
        raise DataError(
            "not a sparse matrix in npz format", where=str(path), got=str(error)[:200], fix=fix
        ) from error
    what = "row counts differ: the matrix does not match the texts"
    got = f"{stored} (queries, labels)"
    expected = f"{shape}, as in the text files"
    raise DataError(what, where=str(path), got=got, expected=expected)
