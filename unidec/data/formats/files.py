"""A folder of raw files, and the query-label pairs in them.

Files are found by name, with or without .gz, and read as UTF-8 lines; every error is recorded with
its line. Pairs, given by row numbers or uids in sparse text, tables or npz files, are checked and
converted to CSR matrices.

Shape suffix: P pairs.
"""

from __future__ import annotations

import re
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.sparse import csr_matrix, load_npz

from unidec.config import RawBounds
from unidec.data.chunks import blocks
from unidec.data.database import database, fill, first_rows, one_row, ordered
from unidec.data.formats import folder
from unidec.data.raw import TEXT_SCHEMA, RawData
from unidec.data.raw_lines import (
    DEFAULT_BOUNDS,
    FIXES,
    Report,
    check_unpacked,
    decode,
    read_lines,
)
from unidec.data.spool import Numbers, csr_on_disk, table_on_disk
from unidec.data.table_file import text_blocks
from unidec.errors import DataError

MAX_SAMPLES = 20
BLOCK_PAIRS = 1 << 20
_NO_MATRIX = (
    zipfile.BadZipFile,
    MemoryError,
    ValueError,
    TypeError,
    OSError,
    KeyError,
    EOFError,
)  # of the readers of npz files
Places = Callable[[np.ndarray], list[str]]
"""Maps rows (from 0) to their places, as `file:line`; called only for samples."""


def places_in(name: str, line_of: Callable[[np.ndarray], np.ndarray] | None = None) -> Places:
    """The places of rows in a file; `line_of` gives their lines (from 1). None: the file has
    neither header nor blank lines.
    """

    def places(rows: np.ndarray) -> list[str]:
        lines = rows + 1 if line_of is None else line_of(rows)
        return [f"{name}:{line}" for line in lines.tolist()]

    return places


class Source:
    """A folder of raw files, with the errors found in them and the line numbers of their texts.

    Attributes:
        count: number of errors of each kind.
        samples: the first errors of each kind as `file:line`.
        fixes: how to correct some of these errors.
        read: the files that were read, by relative path.
        queries_at: by split, the `Places` of its queries.
        labels_at: the `Places` of the labels.
        scratch: folder for temporary files; None: the system's.
        fix: general advice that ends the error message.
    """

    fix = "correct or remove these lines; nothing was written"

    def __init__(
        self, root: Path, bounds: RawBounds = DEFAULT_BOUNDS, scratch: Path | None = None
    ) -> None:
        self.root = root
        self.bounds = bounds
        self.scratch = scratch
        self.count: Counter[str] = Counter()
        self.samples: dict[str, list[str]] = {}
        self.fixes: list[str] = []
        self.read: dict[str, Path] = {}
        self.queries_at: dict[str, Places] = {}
        self.labels_at = places_in("labels")

    def note(self, kind: str, place: str, detail: object = "") -> None:
        """Record one error."""
        self.count[kind] += 1
        samples = self.samples.setdefault(kind, [])
        if len(samples) < MAX_SAMPLES:
            text = str(detail)[:200]
            samples.append(f"{place} ({text})" if text else place)

    def record(
        self, count: dict[str, int], samples: dict[str, list[str]], fixes: list[str]
    ) -> None:
        """Record errors that another source found: its attributes of these names."""
        for kind, places in samples.items():
            known = self.samples.setdefault(kind, [])
            known += places[: MAX_SAMPLES - len(known)]
        self.count.update(count)
        for fix in fixes:
            self.advise(fix)

    def advise(self, fix: str) -> None:
        """Record how to correct an error, once."""
        if fix not in self.fixes:
            self.fixes.append(fix)

    def note_rows(
        self, kind: str, at: Places, rows: np.ndarray, detail: str, *columns: Any
    ) -> None:
        """Record an error for each of these rows of a file; `detail` is a format string for the
        columns' values.
        """
        if not len(rows):
            return
        first = rows[:MAX_SAMPLES]
        for row, place in zip(first.tolist(), at(first), strict=True):
            values = [column[row] for column in columns]
            self.note(kind, place, detail.format(*values))
        self.count[kind] += len(rows) - len(first)

    def stop(self) -> None:
        """Raise a DataError if there are errors. It lists each kind with its count, and up to 20
        samples in total, but at least one of each kind.
        """
        if not self.count:
            return
        shown = max(MAX_SAMPLES // len(self.count), 1)  # of each kind
        report = []
        for kind, number in self.count.items():
            report.append(f"{kind}: {number:,}")
            report += [f"    {sample}" for sample in self.samples[kind][:shown]]
        raise DataError(
            f"the raw data cannot be used: {len(self.count)} kind(s) of error",
            where=self.root,
            got="\n    ".join(report),
            fix="\n    ".join([*self.fixes, self.fix]),
        )

    def find(self, *names: str) -> Path | None:
        """Path of the file with one of these names, with or without .gz; None if there is none.

        Raises:
            DataError: there are two, or the path is not a readable file, or it is in parts.
        """
        files = self.present(*names)
        if len(files) > 1:
            raise DataError(
                "a file in several parts",
                where=files[0].parent,
                got=f"{files[0].name} and others",
                expected=f"one file {names[0]}",
                fix="join them: lines are numbered through (only tables and BEIR may be in parts)",
            )
        return files[0] if files else None

    def need(self, *names: str) -> Path:
        """Like `find`, but raises a DataError that lists the names if there is no such file."""
        if path := self.find(*names):
            return path
        raise self._missing(names)

    def parts(self, *names: str) -> list[Path]:
        """Like `need`, but the file may be in parts, which are returned in order."""
        if files := self.present(*names):
            return files
        raise self._missing(names)

    def present(self, *names: str) -> list[Path]:
        """Like `parts`, but [] if there is no such file."""
        return folder.find(self.root, names)

    def _missing(self, names: Sequence[str]) -> DataError:
        return DataError(
            "a file is missing",
            where=self.root,
            expected=" or ".join(f"{name}[.gz]" for name in names),
            fix="add it",
        )

    def name(self, path: Path) -> str:
        """Relative path of a file; also adds the file to `read`."""
        relative = path.relative_to(self.root).as_posix()
        self.read[relative] = path
        return relative

    def report(self, path: Path) -> Report:
        """A `Report` that records the errors of a file."""
        name = self.name(path)

        def report(what: str, line: int, got: object) -> None:
            self.note(what, f"{name}:{line}", got)
            if what in FIXES:
                self.advise(FIXES[what])

        return report

    def texts(self, path: Path, first: int = 0) -> pa.Table:
        """The lines of a file as titles; their uids are row numbers from `first`."""
        report = self.report(path)
        rows = (
            (str(row), decode(line, number, report).removesuffix("\r"), "")
            for row, (number, line) in enumerate(read_lines(path, self.bounds), first)
        )
        return table_on_disk(text_blocks(rows, TEXT_SCHEMA), TEXT_SCHEMA, self.scratch)

    def numbers(self, dtype: npt.DTypeLike) -> Numbers:
        """An empty array that grows."""
        return Numbers(dtype, self.scratch)

    def rows_of(self, uids: pa.ChunkedArray, known: pa.ChunkedArray) -> np.ndarray:
        """First row of each uid in `known`, int64; -1 for an unknown uid."""
        return first_rows(uids.chunks, known.chunks, self.scratch)


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


# `value` is stored: a `given` value beyond float32 becomes 0, which is no relevance
_STORED = """
CREATE TABLE pairs AS SELECT *, coalesce(TRY_CAST(given AS FLOAT), 0) AS value FROM given
"""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The pairs of a file, before they are checked.

    Attributes:
        source: records the errors.
        at: the places of the pairs.
        query_P, label_P: row numbers of queries and labels.
        value_P: relevance as float64, NaN if it is not a number; None for filter pairs, which have
            no relevance.
        given: uids of query and label, and relevance, of each pair as in the file; empty: pairs
        were given by row. Row number -1 is that of an unknown uid, already recorded as an error.
    """

    source: Source
    at: Places
    query_P: np.ndarray
    label_P: np.ndarray
    value_P: np.ndarray | None
    given: tuple[Any, ...] = ()

    def matrix(self, shape: tuple[int, int], zero_is_no_pair: bool = False) -> csr_matrix:
        """CSR matrix with sorted indices: relevance (float32) or filter pairs (bool). Invalid pairs
        are recorded and left out.
        """
        is_filter = self.value_P is None
        last_query, last_label = (size - 1 for size in shape)
        query = f"query BETWEEN 0 AND {last_query}"
        label = f"label BETWEEN 0 AND {last_label}"
        value = "value > 0 AND isfinite(value)"
        good = f"FROM pairs WHERE {query} AND {label} AND {value}"
        given = self.given or (self.query_P, self.label_P, self.value_P)
        again = "row_number() OVER (PARTITION BY query, label ORDER BY place) > 1"
        with database(self.source.scratch) as tables:
            fill(tables, _STORED, self._blocks())

            def note(kind: str, bad: str, detail: str, *columns: Any) -> None:
                found = tables.execute(f"SELECT place {bad} ORDER BY place").fetchnumpy()["place"]
                self.source.note_rows(kind, self.at, found, detail, *columns)

            if not self.given:
                of = "filter pair with a " if is_filter else ""
                kind = f"{of}label index outside 0..{last_label}"
                note(kind, f"FROM pairs WHERE NOT ({label})", "label {}", self.label_P)
                kind = f"{of}query row outside 0..{last_query}"
                note(kind, f"FROM pairs WHERE NOT ({query})", "query {}", self.query_P)
            if not is_filter:
                kind = "relevance that is not a positive number"
                wrong = f"FROM pairs WHERE NOT ({value} OR (given = 0 AND {zero_is_no_pair}))"
                note(kind, wrong, "query {}, label {}: {}", *given)
            triples = ordered(tables, f"SELECT query, label, value {good} ORDER BY query, label")
            dtype = bool if is_filter else np.float32
            matrix = csr_on_disk(triples, shape, dtype, self.source.scratch)
            if not is_filter and matrix.nnz < one_row(tables, f"SELECT count(*) {good}")[0]:
                repeated = f"{good} QUALIFY {again}"
                note("pair given twice", repeated, "query {}, label {}", *given[:2])
        return matrix

    def _blocks(self) -> Iterator[pa.Table]:
        """All pairs; `given` is the value in the file."""
        for block in blocks(max(len(self.query_P), 1), BLOCK_PAIRS):
            query_P = self.query_P[block]
            given_P = np.ones(len(query_P)) if self.value_P is None else self.value_P[block]
            columns = {
                "query": query_P,
                "label": self.label_P[block],
                "given": given_P,
                "place": np.arange(block.start, block.start + len(query_P)),
            }
            yield pa.table(columns)


def read_sparse_text(source: Source, path: Path, shape: tuple[int, int]) -> Pairs:
    """Read XMC sparse text: a header `N L`, then a line `label:relevance ...` per query.

    Raises:
        DataError: the header or the number of rows does not match the texts. The header is checked
            before any memory is allocated by it.
    """
    report = source.report(path)
    lines = read_lines(path, source.bounds)
    _, header = next(lines, (1, b""))
    _check_header(f"{path}:1", " ".join(header.decode("utf-8", "replace").split()), shape)
    queries = source.numbers(np.int32)
    labels = source.numbers(np.int64)
    values = source.numbers(np.float64)
    number = 1
    for number, line in lines:
        found = array("q")
        for token in line.split():
            try:
                label, text = token.split(b":")
                relevance = float(text)
                found.append(int(label))
            except (ValueError, OverflowError):
                report("not `label:relevance`", number, _shown(token))
                continue
            values.extend((relevance,))
        queries.extend([number - 2] * len(found))
        labels.extend(found)
    if number - 1 != shape[0]:
        raise DataError(
            "row counts differ",
            where=path,
            got=f"{number - 1:,} rows",
            expected=shape[0],
        )
    query_P = queries.array()
    return Pairs(
        source=source,
        at=places_in(source.name(path), lambda rows: query_P[rows] + 2),
        query_P=query_P,
        label_P=labels.array(),
        value_P=values.array(),
    )


def _check_header(where: str, head: str, shape: tuple[int, int]) -> None:
    wanted = " ".join(map(str, shape))
    if head == wanted:
        return
    what = "row counts differ: the header does not match the texts"
    if not re.fullmatch(r"[0-9]+ [0-9]+", head):
        what = "not a header `N L`"
    raise DataError(
        what,
        where=where,
        got=repr(head[:60]),
        expected=f"{wanted}: queries and labels, as the text files have",
    )


def _shown(data: bytes) -> str:
    return repr(data[:60].decode("utf-8", "replace"))


def read_filter_text(source: Source, path: Path) -> Pairs:
    """Read a filter file: `query_row label_row` per line, 0-based, without header."""
    report = source.report(path)
    numbers = source.numbers(np.int64)
    for number, line in read_lines(path, source.bounds):
        try:
            query, label = map(int, line.split())
            numbers.extend((query, label, number))
        except (ValueError, OverflowError):
            if line.strip():
                report("not `query_row label_row`", number, _shown(line))
    query_P, label_P, line_P = numbers.array().reshape(-1, 3).T
    return Pairs(
        source=source,
        at=places_in(source.name(path), line_P.__getitem__),
        query_P=query_P,
        label_P=label_P,
        value_P=None,
    )


def read_npz(source: Source, path: Path, shape: tuple[int, int]) -> Pairs:
    """Read relevance from an npz file of `scipy.sparse.save_npz`.

    Raises:
        DataError: not such a file, its unpacked size is too large, or its shape does not match the
        texts.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        check_unpacked(path, size, source.bounds)
        with np.load(path, allow_pickle=False) as arrays:
            stored = tuple(arrays["shape"].ravel().tolist())
        if stored != shape:
            raise DataError(
                "row counts differ: the matrix does not match the texts",
                where=path,
                got=stored,
                expected=shape,
            )
        matrix = load_npz(path)
        if matrix.format in ("csr", "csc"):
            matrix.check_format(full_check=True)
        pairs = matrix.tocoo()
        value_P = pairs.data.astype(np.float64, casting="safe")
    except _NO_MATRIX as error:
        raise DataError(
            "not a sparse matrix in npz format",
            where=path,
            got=error,
            fix="write it with scipy.sparse.save_npz",
        ) from error
    return Pairs(
        source=source,
        at=places_in(source.name(path), lambda rows: pairs.row[rows] + 1),
        query_P=pairs.row,
        label_P=pairs.col,
        value_P=value_P,
    )
