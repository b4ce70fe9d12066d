"""Lines and tables of files from outside: .csv, .tsv, .jsonl (each also .gz) and .parquet, one reader for all.

Files are read once from front to back: never more in memory than a block of rows, whatever they hold. What is wrong
with a row goes to a `Report`, which notes it or raises.
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
"""Takes what is wrong, the line (1-based), and what was found."""

ALWAYS_UNPACKED = 64 << 20  # bytes that any compressed file may unpack to, whatever its own size
BOM = b"\xef\xbb\xbf"
DEFAULT_BOUNDS = RawBounds()
NOT_UTF8 = "text that is not UTF-8"
BLOCK_ROWS = 4096  # rows that are held as Python objects
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
                    raise _row_too_long(path, number, bounds)
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError("a damaged gzip file", where=str(path), got=str(error), fix="fetch it again") from error
    except OSError as error:
        raise DataError("a file that cannot be read", where=str(path), got=error.strerror or error) from error


def _row_too_long(path: Path, number: int, bounds: RawBounds, hint: str = "") -> DataError:
    return DataError(
        f"a row of more than {bounds.max_row_bytes:,} bytes{hint}",
        where=f"{path}:{number}",
        fix="correct the row; if the raw data is right as it is, raise raw.max_row_bytes",
    )


def in_blocks(rows: Iterable[T]) -> Iterator[list[T]]:
    """`BLOCK_ROWS` at a time."""
    rows = iter(rows)
    while block := list(itertools.islice(rows, BLOCK_ROWS)):
        yield block


def read_rows(
    path: Path, columns: Sequence[str], check: Callable[[list[str]], object] = lambda _names: None,
    bounds: RawBounds = DEFAULT_BOUNDS, report: Report | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:  # fmt: skip
    """Line (of a Parquet file the row; 1-based) and cells of each row; blank lines are left out.

    Args:
        columns: what is needed: of a Parquet file no others are read.
        check: called with the names in the header; a .jsonl file has none.
        report: of rows that cannot be read; where it does not raise, such a row is left out, or empty (JSON).

    Raises:
        DataError: an unknown ending, or a file that cannot be read, with its line.
    """
    kind, report = ending(path), report or refuse(path)
    if kind not in (".csv", ".tsv", ".jsonl", ".json", ".parquet"):
        raise DataError("a table of unknown format", where=str(path), expected=".csv .tsv .jsonl .parquet")
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
    """First line and cells of each row, the header included; blank lines are left out."""
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
            if ended:  # the reader asked for a line after the last one
                raise DataError(
                    "a quote that is never closed", where=f"{path}:{start}", got=repr(cells)[:120],
                    fix='close it, and write a quote within quoted text twice ("")',
                )  # fmt: skip
            if cells:
                yield start, cells
            start, size = number + 1, 0
    except csv.Error as error:
        raise DataError(
            "a bare carriage return (CR) outside of quotes", where=f"{path}:{number}", got=str(error)[:200],
            fix="save the file with line ends LF or CRLF",
        ) from error  # fmt: skip


def _json_object(line: bytes, number: int, report: Report) -> dict[str, Any]:
    """The object in a line; {} for what is no object in valid Unicode."""
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
    """A `pyarrow.parquet.ParquetFile`; what goes wrong with it inside the context is a DataError with its name."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=_BUFFER) as file:
            groups = (file.metadata.row_group(group) for group in range(file.num_row_groups))
            check_unpacked(path, sum(group.total_byte_size for group in groups), bounds)
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError("not a readable Parquet file", where=str(path), got=str(error)[:200]) from error
