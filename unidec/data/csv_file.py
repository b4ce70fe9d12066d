"""CSV and TSV files with a header, by Arrow's reader; where a row is wrong, and on which line, by Python's."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pv

from unidec.data.bounded import (
    DEFAULT_BOUNDS,
    BoundedFile,
    decode_line,
    open_bounded,
    read_lines,
    row_too_long,
)
from unidec.errors import DataError
from unidec.sections import RawBounds

_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}


class CsvFile:
    """A table with a header.

    Args:
        path: .csv, or .tsv for tabs; also with .gz.
        bounds: of the file and its rows.
        decode: a line to text, from its bytes, path and number.

    Attributes:
        names: of the columns, as the header has them.

    Raises:
        DataError: no header, or one that cannot be read.
    """

    def __init__(
        self,
        path: Path,
        bounds: RawBounds = DEFAULT_BOUNDS,
        decode: Callable[[bytes, Path, int], str] = decode_line,
    ) -> None:
        self.path, self.bounds, self._decode = path, bounds, decode
        self.delimiter = "\t" if path.name.lower().removesuffix(".gz").endswith(".tsv") else ","
        self.names = next((cells for _, cells in self.rows()), [])
        if not self.names:
            raise DataError("an empty file", where=str(path), expected="a header and rows")

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """These columns as large_string, some rows at a time.

        Raises:
            pa.ArrowInvalid: a row that does not fit: `faults` finds the place.
            DataError: a quote that is never closed, or as `open_bounded`.
        """
        with open_bounded(self.path, self.bounds) as file:
            yield from self._batches(file, columns)

    def _batches(self, file: BoundedFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        last = ""
        for batch in pv.open_csv(
            pa.PythonFile(file, mode="r"),
            # a row that does not fit into a block is an error
            read_options=pv.ReadOptions(block_size=self.bounds.max_row_bytes, use_threads=False),
            parse_options=pv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
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
        if file.quotes % 2 or "\n" in last:  # Arrow takes the rest of the file for the text of an open quote
            for _ in self.rows():
                pass

    def faults(self) -> Iterator[tuple[int, str, str]]:
        """What Arrow's reader refuses without naming the place: line, what is wrong, what was found.

        Raises:
            DataError: what makes the rest of the file unreadable.
        """
        for line, cells in self.rows():
            if len(cells) != len(self.names):
                yield line, f"not {len(self.names)} columns", f"{len(cells)}: {cells[0][:40]!r}"

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Line on which each row starts (1-based) and its cells, header included; blank lines are left out.

        Raises:
            DataError: text that is not UTF-8, a bare carriage return, a row that is longer than it may be, or a quote
                that is never closed.
        """
        bounds, start, number, size, ended = self.bounds, 1, 0, 0, False

        def lines() -> Iterator[str]:
            nonlocal number, size, ended
            for number, line in read_lines(self.path, bounds):
                size += len(line)
                if size > bounds.max_row_bytes:
                    raise row_too_long(self.path, start, bounds, " (is there a quote that is never closed?)")
                yield self._decode(line, self.path, number) + "\n"
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

    @property
    def delimiter_name(self) -> str:
        """In words."""
        return _DELIMITERS[self.delimiter]

    def other_delimiter(self, wanted: Sequence[str]) -> str | None:
        """What seems to separate the columns instead: the header has the wanted ones with it."""
        if len(self.names) != 1:
            return None
        for delimiter, name in _DELIMITERS.items():
            if set(wanted) <= {cell.strip() for cell in self.names[0].split(delimiter)} and delimiter != self.delimiter:
                return name
        return None
