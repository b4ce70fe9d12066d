"""Tables in files, .csv, .tsv and .jsonl (each also with .gz) and .parquet: one reader a kind, bounded, by Arrow.

What is wrong with a row goes to a `Report`, which notes it or raises. Arrow does not name the line of a row: a second,
slow pass finds it, and only if something is wrong.
"""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pv

from unidec.data.bounded import DEFAULT_BOUNDS, check_unpacked, open_bounded, read_blocks, read_lines, row_too_long
from unidec.errors import DataError
from unidec.sections import RawBounds

Report = Callable[[str, int, object], None]
"""Takes what is wrong, the line (1-based), and what was found."""

NOT_UTF8 = "text that is not UTF-8"
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


def to_strings(values: Sequence[str], lines: Sequence[int], report: Report) -> pa.Array:
    """Texts as large_string; one with a lone surrogate (\\ud800 in JSON) is reported and becomes empty."""
    try:
        return pa.array(values, pa.large_string())
    except UnicodeEncodeError:
        good = [not any(0xD800 <= ord(letter) < 0xE000 for letter in value) for value in values]
    for number, fine in zip(lines, good, strict=True):
        if not fine:
            report(NOT_UTF8, number, "a lone surrogate")
    return pa.array([value if fine else "" for value, fine in zip(values, good, strict=True)], pa.large_string())


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
        self._collects = report is not None
        self.names = next((cells for _, cells in self.rows()), [])
        if not self.names:
            raise DataError("an empty file", where=str(path), expected="a header and rows")

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """These columns as large_string, some rows at a time.

        Raises:
            DataError: a quote that is never closed, a row that is too long, or as `open_bounded`. Rows of another
                width go to the report, and are left out if it does not raise.
        """
        ragged, last = False, ""

        def invalid_row(_row: Any) -> str:
            nonlocal ragged
            ragged = True
            return "skip" if self._collects else "error"

        try:
            with open_bounded(self.path, self.bounds) as file:
                for batch in pv.open_csv(
                    pa.PythonFile(file, mode="r"),
                    # a row that does not fit into a block is an error
                    read_options=pv.ReadOptions(block_size=self.bounds.max_row_bytes, use_threads=False),
                    parse_options=pv.ParseOptions(
                        delimiter=self.delimiter, newlines_in_values=True, invalid_row_handler=invalid_row
                    ),
                    convert_options=pv.ConvertOptions(
                        include_columns=list(columns),
                        column_types=dict.fromkeys(columns, pa.large_string()),
                        strings_can_be_null=False,
                        quoted_strings_can_be_null=False,
                    ),
                ):
                    if batch.num_rows:
                        last = "".join(column[-1].as_py() for column in batch.columns)
                    yield batch
                # Arrow takes the rest of the file for the text of an open quote
                suspicious = ragged or file.quotes % 2 or "\n" in last
        except pa.ArrowInvalid as error:
            self._find_faults()
            if not self._collects:
                raise DataError("a table that cannot be read", where=str(self.path), got=str(error)[:300]) from error
            suspicious = False
        if suspicious:
            self._find_faults()

    def _find_faults(self) -> None:
        for line, cells in self.rows():
            if len(cells) != len(self.names):
                self.report(f"not {len(self.names)} columns", line, f"{len(cells)}: {cells[0][:40]!r}")

    def rows(self, report: Report | None = None) -> Iterator[tuple[int, list[str]]]:
        """Line on which each row starts (1-based) and its cells, header included, blank lines left out; slowly.

        Raises:
            DataError: a bare carriage return, a row that is longer than it may be, or a quote that is never closed.
        """
        bounds, start, number, size, ended = self.bounds, 1, 0, 0, False
        report = report or self.report

        def lines() -> Iterator[str]:
            nonlocal number, size, ended
            for number, line in read_lines(self.path, bounds):
                size += len(line)
                if size > bounds.max_row_bytes:
                    raise row_too_long(self.path, start, bounds, " (is there a quote that is never closed?)")
                yield decode(line, number, report) + "\n"
            ended = True

        csv.field_size_limit(max(csv.field_size_limit(), bounds.max_row_bytes))
        try:
            for cells in csv.reader(lines(), delimiter=self.delimiter):
                if ended:  # the reader asked for a line after the last one
                    raise DataError(
                        "a quote that is never closed", where=f"{self.path}:{start}", got=repr(cells)[:120],
                        fix='close it, and write a quote within quoted text twice ("")',
                    )  # fmt: skip
                if cells:
                    yield start, cells
                start, size = number + 1, 0
        except csv.Error as error:
            raise DataError(
                "a bare carriage return (CR) outside of quotes", where=f"{self.path}:{number}", got=str(error)[:200],
                fix="save the file with line ends LF or CRLF",
            ) from error  # fmt: skip

    def lines(self, rows: np.ndarray) -> np.ndarray:
        """Line on which each of these rows (0-based, as `batches` gives them) starts; takes a second pass."""
        starts = (line for line, cells in self.rows(lambda *_: None) if len(cells) == len(self.names))
        return np.asarray(list(islice(starts, int(np.max(rows)) + 2)))[np.asarray(rows) + 1]

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

    A line that is no object is reported; where the report does not raise, its object is empty.
    """
    report = report or refuse(path)
    for first, block in read_blocks(path, bounds):
        lines = [(number, line) for number, line in enumerate(block.split(b"\n"), first) if line.strip()]
        try:  # all in one call, ten times as fast as one by one
            items = json.loads("[" + b",".join([line for _, line in lines]).decode() + "]")
        except (ValueError, RecursionError):
            items = []
        if len(items) != len(lines) or not set(map(type, items)) <= {dict}:
            items = [_json_object(line, number, report) for number, line in lines]
        yield [number for number, _ in lines], items


def _json_object(line: bytes, number: int, report: Report) -> dict[str, Any]:
    try:
        item = json.loads(decode(line, number, report))
    except (ValueError, RecursionError) as error:
        report("not a JSON object", number, error)
        return {}
    if isinstance(item, dict):
        return item
    report("not a JSON object", number, type(item).__name__)
    return {}


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
