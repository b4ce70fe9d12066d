"""Reads the lines and tables of input files: .csv, .tsv, .jsonl (each also with .gz) and .parquet.

Files are read once from start to end, and only a block of rows is in memory. An error in a row is passed to a `Report`,
which records it or raises.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from unidec.errors import DataError
from unidec.sections import RawBounds

T = TypeVar("T")
Report = Callable[[str, int, object], None]
"""Called for each error in a file with a description, the line (1-based) and the offending value."""

ALWAYS_UNPACKED = 64 << 20  # unpacked bytes that are allowed for every compressed file
BOM = b"\xef\xbb\xbf"
DEFAULT_BOUNDS = RawBounds()
NOT_UTF8 = "text that is not UTF-8"
BLOCK_ROWS = 4096  # rows in memory as Python objects
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_BUFFER = 1 << 20  # bytes of a Parquet column that are read at once; without a buffer, whole row groups are


def ending(path: Path) -> str:
    """File type by the name: ".csv" for "a.csv" and for "a.csv.gz"."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def refuse(path: Path) -> Report:
    """A `Report` that raises a DataError for the first error."""

    def report(what: str, line: int, got: object) -> None:
        fix = "save the file as UTF-8" if what == NOT_UTF8 else None
        raise DataError(what, where=f"{path}:{line}", got=str(got)[:200], fix=fix)

    return report


def decode(line: bytes, number: int, report: Report) -> str:
    """Decode UTF-8; invalid bytes are reported and replaced."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        report(NOT_UTF8, number, f"byte {error.start + 1} is {line[error.start]:#04x}")
        return line.decode("utf-8", "replace")


def check_unpacked(path: Path, num_bytes: int, bounds: RawBounds) -> None:
    """Raise a DataError if `num_bytes`, the unpacked size of a file, exceeds `max_unpack_ratio` times its size."""
    size = path.stat().st_size
    if num_bytes > max(ALWAYS_UNPACKED, bounds.max_unpack_ratio * size):
        raise DataError(
            "the unpacked size of a compressed file is too large",
            where=str(path),
            got=f"{size:,} bytes unpack to {num_bytes:,} or more",
            expected=f"at most {bounds.max_unpack_ratio} times its size",
            fix="check the file; increase raw.max_unpack_ratio if it is valid",
        )


def read_lines(path: Path, bounds: RawBounds = DEFAULT_BOUNDS) -> Iterator[tuple[int, bytes]]:
    """Number (1-based) and bytes of each line, without line feed and byte order mark; .gz files are unpacked.

    Raises:
        DataError: a line is longer than `bounds.max_row_bytes`, or the file cannot be read, is a damaged gzip file, or
            exceeds the allowed unpacked size.
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
                    raise _row_too_long(path, number, bounds)
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError("damaged gzip file", where=str(path), got=str(error), fix="fetch it again") from error
    except OSError as error:
        raise DataError("the file cannot be read", where=str(path), got=error.strerror or error) from error


def _row_too_long(path: Path, number: int, bounds: RawBounds, hint: str = "") -> DataError:
    return DataError(
        f"a row of more than {bounds.max_row_bytes:,} bytes{hint}",
        where=f"{path}:{number}",
        fix="shorten the row, or increase raw.max_row_bytes if the row is valid",
    )


def in_blocks(rows: Iterable[T]) -> Iterator[list[T]]:
    """Lists of `BLOCK_ROWS` rows; the last one may be shorter."""
    rows = iter(rows)
    while block := list(itertools.islice(rows, BLOCK_ROWS)):
        yield block


def read_rows(
    path: Path, columns: Sequence[str], check: Callable[[list[str]], object] = lambda _names: None,
    bounds: RawBounds = DEFAULT_BOUNDS, report: Report | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:  # fmt: skip
    """Line number (for Parquet the row number; 1-based) and cells of each row; blank lines are skipped.

    Args:
        columns: columns that the caller needs; no others are read from a Parquet file.
        check: called with the column names in the header; not called for .jsonl, which has no header.
        report: called for rows that cannot be read. If it does not raise, such a row is skipped, or empty (JSON).

    Raises:
        DataError: unknown file type, or a file or row that cannot be read.
    """
    kind, report = ending(path), report or refuse(path)
    if kind not in (".csv", ".tsv", ".jsonl", ".json", ".parquet"):
        raise DataError("unknown file type of a table", where=str(path), expected=".csv .tsv .jsonl .parquet")
    if not path.is_file():
        raise DataError("no such file", where=str(path))
    if kind in (".jsonl", ".json"):
        lines = read_lines(path, bounds)
        yield from ((number, _json_object(line, number, report)) for number, line in lines if line.strip())
    elif kind == ".parquet":
        with _open_parquet(path, bounds) as file:
            names = file.schema_arrow.names
            check(names)
            batches = file.iter_batches(batch_size=BLOCK_ROWS, columns=[name for name in names if name in columns])
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
    else:
        delimiter = "\t" if kind == ".tsv" else ","
        rows = _csv_rows(path, delimiter, bounds, report)
        _, names = next(rows, (0, []))
        if not names:
            raise DataError("an empty file", where=str(path), expected="a header and rows")
        for other, called in _DELIMITERS.items():
            if len(names) == 1 and other in names[0]:
                fix = f"the columns are separated by {called}: save the file with {_DELIMITERS[delimiter]} between them"
                raise DataError("a header of one column", where=f"{path}:1", got=names[0][:300], fix=fix)
        check(names)
        for line, cells in rows:
            if len(cells) == len(names):
                yield line, dict(zip(names, cells, strict=True))
            else:
                report(f"not {len(names)} columns", line, f"{len(cells)}: {cells[0][:40]!r}")


def _csv_rows(path: Path, delimiter: str, bounds: RawBounds, report: Report) -> Iterator[tuple[int, list[str]]]:
    """Number of the first line and cells of each row, including the header; blank lines are skipped."""
    start, number, size, ended = 1, 0, 0, False

    def lines() -> Iterator[str]:
        nonlocal number, size, ended
        for number, line in read_lines(path, bounds):
            size += len(line)
            if size > bounds.max_row_bytes:
                raise _row_too_long(path, start, bounds, " (is there a quote that is never closed?)")
            yield decode(line, number, report) + "\n"
        ended = True

    csv.field_size_limit(max(csv.field_size_limit(), bounds.max_row_bytes))
    try:
        for cells in csv.reader(lines(), delimiter=delimiter):
            if ended:  # the reader read on after the last line, because a quote was open
                raise DataError(
                    "a quote that is never closed", where=f"{path}:{start}", got=repr(cells)[:120],
                    fix='close the quote, and double each quote within quoted text ("")',
                )  # fmt: skip
            if cells:
                yield start, cells
            start, size = number + 1, 0
    except csv.Error as error:
        raise DataError(
            "a bare carriage return (CR) outside quotes", where=f"{path}:{number}", got=str(error)[:200],
            fix="save the file with line ends LF or CRLF",
        ) from error  # fmt: skip


def _json_object(line: bytes, number: int, report: Report) -> dict[str, Any]:
    """The JSON object in a line; {} (and a report) if the line is not an object in valid Unicode."""
    try:
        item = json.loads(decode(line, number, report))
        if isinstance(item, dict):
            if rb"\u" in line:
                json.dumps(item, ensure_ascii=False).encode()
            return item
        report("not a JSON object", number, type(item).__name__)
    except UnicodeEncodeError:
        report(NOT_UTF8, number, "a lone surrogate")
    except (ValueError, RecursionError) as error:
        report("not a JSON object", number, error)
    return {}


@contextlib.contextmanager
def _open_parquet(path: Path, bounds: RawBounds) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`; errors of Arrow within the context become a DataError with the file's name."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=_BUFFER) as file:
            groups = (file.metadata.row_group(group) for group in range(file.num_row_groups))
            check_unpacked(path, sum(group.total_byte_size for group in groups), bounds)
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError("not a readable Parquet file", where=str(path), got=str(error)[:200]) from error
