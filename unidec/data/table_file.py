"""Lines and tables of files from outside: .csv, .tsv, .jsonl (each also .gz) and .parquet, one reader a kind.

Files are read once from front to back: never more in memory than some megabytes and a row, whatever they hold. What is
wrong with a row goes to a `Report`, which notes it or raises.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from unidec.errors import DataError
from unidec.sections import RawBounds

T = TypeVar("T")
Report = Callable[[str, int, object], None]
"""Takes what is wrong, the line (1-based), and what was found."""

ALWAYS_UNPACKED = 64 << 20  # bytes that any compressed file may unpack to, whatever its own size
BOM = b"\xef\xbb\xbf"
DEFAULT_BOUNDS = RawBounds()
NOT_UTF8 = "text that is not UTF-8"
BLOCK_BYTES = 1 << 20  # of lines that are held as Python objects
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_BUFFER = 1 << 20  # bytes of each column of a Parquet file read at once; without it a row group's whole column is


def ending(path: Path) -> str:
    """The kind by the file's name: ".csv" of "a.csv" and of "a.csv.gz"."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def refuse(path: Path) -> Report:
    """A report that raises a DataError for the first fault."""

    def report(what: str, line: int, got: object) -> None:
        fix = "save the file as UTF-8" if what == NOT_UTF8 else None
        raise DataError(what, where=f"{path}:{line}", got=str(got)[:200], fix=fix)

    return report


def decode(line: bytes, number: int, report: Report) -> str:
    """UTF-8 to text; a fault is reported, and what is no UTF-8 replaced."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        report(NOT_UTF8, number, f"byte {error.start + 1} is {line[error.start]:#04x}")
        return line.decode("utf-8", "replace")


def check_unpacked(path: Path, num_bytes: int, bounds: RawBounds) -> None:
    """Refuse a compressed file that unpacks to so many bytes: more than `max_unpack_ratio` times its own size."""
    size = path.stat().st_size
    if num_bytes > max(ALWAYS_UNPACKED, bounds.max_unpack_ratio * size):
        raise DataError(
            "a compressed file that unpacks to too much",
            where=str(path),
            got=f"{size:,} bytes unpack to {num_bytes:,} or more",
            expected=f"at most {bounds.max_unpack_ratio} times its size",
            fix="check the file; if the raw data is right as it is, raise raw.max_unpack_ratio",
        )


def read_lines(path: Path, bounds: RawBounds = DEFAULT_BOUNDS) -> Iterator[tuple[int, bytes]]:
    """Number (1-based) and bytes of each line, without its line feed and a byte order mark; .gz is unpacked.

    Raises:
        DataError: a line of more than `bounds.max_row_bytes`, or a file that cannot be opened, is a damaged gzip file,
            or unpacks to more than it may.
    """
    packed = path.suffix.lower() == ".gz"
    total = number = 0
    try:
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            if file.read(len(BOM)) != BOM:
                file.seek(0)
            while line := file.readline(bounds.max_row_bytes + 2):
                total, number = total + len(line), number + 1
                if packed and total > ALWAYS_UNPACKED:
                    check_unpacked(path, total, bounds)
                line = line.removesuffix(b"\n")
                if len(line) > bounds.max_row_bytes:
                    raise row_too_long(path, number, bounds)
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError("a damaged gzip file", where=str(path), got=str(error), fix="fetch it again") from error
    except OSError as error:
        raise DataError("a file that cannot be read", where=str(path), got=error.strerror or error) from error


def row_too_long(path: Path, number: int, bounds: RawBounds, hint: str = "") -> DataError:
    """The error for a line or row beyond its bound."""
    return DataError(
        f"a row of more than {bounds.max_row_bytes:,} bytes{hint}",
        where=f"{path}:{number}",
        fix="correct the row; if the raw data is right as it is, raise raw.max_row_bytes",
    )


def to_numbers(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Strings to float64; NaN where one is not a number."""
    try:
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, TypeError):
        return np.asarray([_number(text) for text in column.to_pylist()], dtype=np.float64)


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return float("nan")


def in_blocks(rows: Iterable[tuple[int, int, T]]) -> Iterator[tuple[list[int], list[T]]]:
    """Rows given as (line, bytes, value), some at a time: their lines, and their values."""
    lines: list[int] = []
    values: list[T] = []
    total = 0
    for line, size, value in rows:
        lines.append(line)
        values.append(value)
        total += size + 1
        if total > BLOCK_BYTES:
            yield lines, values
            lines, values, total = [], [], 0
    if lines:
        yield lines, values


class CsvFile:
    """A table with a header, separated by commas, or by tabs where the name ends with .tsv.

    Attributes:
        names: of the columns, as the header has them.

    Raises:
        DataError: no header, or one that cannot be read.
    """

    def __init__(self, path: Path, bounds: RawBounds = DEFAULT_BOUNDS, report: Report | None = None) -> None:
        self.path, self.bounds, self.report = path, bounds, report or refuse(path)
        self.delimiter = "\t" if ending(path) == ".tsv" else ","
        self.names = next((cells for _, _, cells in self._rows()), [])
        if not self.names:
            raise DataError("an empty file", where=str(path), expected="a header and rows")

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[list[int], pa.RecordBatch]]:
        """Some rows at a time: the line on which each starts, and these columns as large_string; errors: `rows`."""
        places = [self.names.index(name) for name in columns]
        for lines, rows in in_blocks(self._body()):
            arrays = [pa.array([cells[place] for cells in rows], pa.large_string()) for place in places]
            yield lines, pa.RecordBatch.from_arrays(arrays, list(columns))

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Line on which each row starts (1-based) and its cells; the header and blank lines are left out.

        Rows of another width than the header go to the report, and are left out if it does not raise.

        Raises:
            DataError: a bare carriage return, a row that is longer than it may be, or a quote that is never closed.
        """
        return ((line, cells) for line, _, cells in self._body())

    def _body(self) -> Iterator[tuple[int, int, list[str]]]:
        rows = self._rows()
        next(rows, None)
        for row in rows:
            line, _, cells = row
            if len(cells) == len(self.names):
                yield row
            else:
                self.report(f"not {len(self.names)} columns", line, f"{len(cells)}: {cells[0][:40]!r}")

    def _rows(self) -> Iterator[tuple[int, int, list[str]]]:
        """First line, bytes and cells of each row, the header included."""
        start, number, size, ended = 1, 0, 0, False

        def lines() -> Iterator[str]:
            nonlocal number, size, ended
            for number, line in read_lines(self.path, self.bounds):
                size += len(line)
                if size > self.bounds.max_row_bytes:
                    raise row_too_long(self.path, start, self.bounds, " (is there a quote that is never closed?)")
                yield decode(line, number, self.report) + "\n"
            ended = True

        csv.field_size_limit(max(csv.field_size_limit(), self.bounds.max_row_bytes))
        try:
            for cells in csv.reader(lines(), delimiter=self.delimiter):
                if ended:  # the reader asked for a line after the last one
                    raise DataError(
                        "a quote that is never closed", where=f"{self.path}:{start}", got=repr(cells)[:120],
                        fix='close it, and write a quote within quoted text twice ("")',
                    )  # fmt: skip
                if cells:
                    yield start, size, cells
                start, size = number + 1, 0
        except csv.Error as error:
            raise DataError(
                "a bare carriage return (CR) outside of quotes", where=f"{self.path}:{number}", got=str(error)[:200],
                fix="save the file with line ends LF or CRLF",
            ) from error  # fmt: skip

    def delimiter_hint(self, wanted: Sequence[str]) -> str | None:
        """The fix, where the header has the wanted columns with another delimiter."""
        for delimiter, name in _DELIMITERS.items() if len(self.names) == 1 else ():
            if set(wanted) <= {cell.strip() for cell in self.names[0].split(delimiter)}:
                ours = _DELIMITERS[self.delimiter]
                return f"the columns are separated by {name}: save the file with {ours} between them"
        return None


def json_blocks(
    path: Path, bounds: RawBounds = DEFAULT_BOUNDS, report: Report | None = None
) -> Iterator[tuple[list[int], list[dict[str, Any]]]]:
    """Line numbers (1-based) and objects of a JSON lines file, some megabytes at a time; blank lines are left out.

    A line that is no object in valid Unicode is reported; where the report does not raise, its object is empty.
    """
    report = report or refuse(path)
    lines = ((number, line) for number, line in read_lines(path, bounds) if line.strip())
    return in_blocks((number, len(line), _json_object(line, number, report)) for number, line in lines)


def _json_object(line: bytes, number: int, report: Report) -> dict[str, Any]:
    try:
        item = json.loads(decode(line, number, report))
    except (ValueError, RecursionError) as error:
        report("not a JSON object", number, error)
        return {}
    if not isinstance(item, dict):
        report("not a JSON object", number, type(item).__name__)
        return {}
    try:
        if rb"\u" in line:
            json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        report(NOT_UTF8, number, "a lone surrogate")
        return {}
    return item


def json_texts(
    items: Sequence[dict[str, Any]], lines: Sequence[int], name: str, report: Report,
    kinds: tuple[type, ...] = (str,), needed: bool = False,
) -> pa.Array:  # fmt: skip
    """One field of JSON objects as large_string, empty where there is none.

    What is of another kind, or not there although it is needed, is reported and becomes empty.
    """
    texts = []
    for item, line in zip(items, lines, strict=True):
        value = item.get(name)
        if value is not None and type(value) not in kinds:
            report(f"{name} is not a text", line, type(value).__name__)
            value = None
        elif value is None and needed and item:  # an empty one was reported as no object
            report(f"no {name}", line, str(item)[:80])
        texts.append("" if value is None else str(value))
    return pa.array(texts, pa.large_string())


@contextlib.contextmanager
def open_parquet(path: Path, bounds: RawBounds | None = None) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`; what goes wrong with it inside the context is a DataError with its name.

    Args:
        bounds: of what it may unpack to; None: it is read in pieces.
    """
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=_BUFFER) as file:
            if bounds is not None:
                groups = (file.metadata.row_group(group) for group in range(file.num_row_groups))
                check_unpacked(path, sum(group.total_byte_size for group in groups), bounds)
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DataError("not a readable Parquet file", where=str(path), got=str(error)[:200]) from error
