"""Reads the rows of .csv and .tsv files, and decides whether quotes enclose fields or are part of
the texts.

Quotes enclose fields. In files with tabs between columns they do so only if every field that begins
with a quote ends with one in the same line; otherwise they are text. `raw.quotes` overrides this.
An ambiguous file is refused.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unidec.config import RawBounds
from unidec.data.raw_lines import Report, decode, read_lines, row_too_long
from unidec.errors import DataError
from unidec.progress import say

_EITHER = (
    "set raw.quotes: yes if quotes enclose fields, or raw.quotes: no if they are part of the texts"
)
_DOUBLE = (
    'double each quote within quoted text (""), or set raw.quotes: no if quotes are part of the '
    "texts"
)
_DIGITS = re.compile(r"\d+")
_LETTERS = re.compile(r"[^\W\d_]+")


def read_cells(
    path: Path, delimiter: str, bounds: RawBounds, report: Report
) -> Iterator[tuple[int, list[str]]]:
    """Number of the first line and cells of each row, including the header; blank lines are
    skipped.

    Reports on stderr how quotes were read, where this matters, and how many rows span several
    lines.

    Raises:
        DataError: an unclosed quote, text after a closing quote, a bare carriage return, or quotes
            that can be read in two ways.
    """
    quoted = bounds.quotes == "yes"
    if bounds.quotes == "auto":
        quoted = delimiter != "\t" or _quotes_enclose(path, bounds)
    csv.field_size_limit(max(csv.field_size_limit(), bounds.max_row_bytes))
    rows = _Rows(path, delimiter, bounds, report)
    yield from rows.quoted() if quoted else rows.unquoted()


@dataclass
class _Rows:
    """The rows of a file, in one pass over its lines."""

    path: Path
    delimiter: str
    bounds: RawBounds
    report: Report
    start: int = 1
    number: int = 0
    size: int = 0
    lines_of_row: list[str] = field(default_factory=list)

    def unquoted(self) -> Iterator[tuple[int, list[str]]]:
        """Rows in which quotes are text: each line is a row."""
        for number, line in read_lines(self.path, self.bounds):
            text = decode(line, number, self.report).removesuffix("\r")
            if "\r" in text:
                self.number = number
                raise self._bare_return(text)
            if text:
                yield number, text.split(self.delimiter)

    def quoted(self) -> Iterator[tuple[int, list[str]]]:
        """Rows in which quotes enclose fields, which may span lines."""
        num_columns = 0
        spanning = 0
        first = ""
        try:
            for cells in csv.reader(self._lines(), delimiter=self.delimiter, strict=True):
                if cells:
                    num_columns = num_columns or len(cells)
                    if len(self.lines_of_row) > 1:
                        self._check_span(num_columns)
                        spanning += 1
                        first = first or f"lines {self.start} to {self.number}"
                    yield self.start, cells
                self.start = self.number + 1
                self.size = 0
                self.lines_of_row = []
        except csv.Error as error:
            raise self._wrong(error) from error
        if spanning:
            say(f"{self.path.name}: quoted text spans lines in {spanning:,} rows, first in {first}")

    def _lines(self) -> Iterator[str]:
        for number, line in read_lines(self.path, self.bounds):
            self.number = number
            self.size += len(line)
            if self.size > self.bounds.max_row_bytes:
                raise row_too_long(
                    self.path, self.start, self.bounds, " (is there a quote that is never closed?)"
                )
            text = decode(line, number, self.report)
            self.lines_of_row.append(text)
            yield text + "\n"

    def _check_span(self, num_columns: int) -> None:
        """Raise a DataError if every line of this row looks like a complete row, as it would if
        quotes were text.
        """
        if self.bounds.quotes != "auto" or num_columns < 2:
            return
        rows = [line.split(self.delimiter) for line in self.lines_of_row]
        shapes = {_shape(row[0]) for row in rows}
        if len(shapes) > 1 or "9" not in shapes.pop():
            return
        if any(len(row) != num_columns for row in rows):
            return
        raise DataError(
            "a quote merges lines that look like rows of their own",
            where=f"{self.path}:{self.start}",
            got=f"a quote opens in line {self.start} and closes in line {self.number}: "
            f"{self.lines_of_row[0][:60]!r}",
            fix=_EITHER,
        )

    def _wrong(self, error: csv.Error) -> DataError:
        """Translate an error of Python's csv reader to a DataError."""
        if "end of data" in str(error):
            return DataError(
                "a quote that is never closed",
                where=f"{self.path}:{self.start}",
                got=repr(self.lines_of_row[0][:100]),
                fix=f"close the quote, and {_DOUBLE}",
            )
        last = self.lines_of_row[-1][:100]
        if "expected after" in str(error):
            return DataError(
                "text after a closing quote",
                where=f"{self.path}:{self.number}",
                got=f"{last!r}; the row begins in line {self.start}",
                fix=_DOUBLE,
            )
        return self._bare_return(last)

    def _bare_return(self, text: str) -> DataError:
        return DataError(
            "a bare carriage return (CR) outside quotes",
            where=f"{self.path}:{self.number}",
            got=repr(text[:100]),
            fix="save the file with line ends LF or CRLF",
        )


def _shape(text: str) -> str:
    """An id with each run of letters as "a" and of digits as "9": "a9" for "q17"."""
    return _LETTERS.sub("a", _DIGITS.sub("9", text[:100]))


def _quotes_enclose(path: Path, bounds: RawBounds) -> bool:
    """Whether quotes enclose fields in a file with tabs, judged by its lines; the result is
    reported if any field begins with a quote.

    Raises:
        DataError: some fields are valid only if quotes enclose fields, others only if quotes are
        text.
    """
    first: dict[str, int] = {}  # result of `_what_quotes_are` -> first line with it
    num_columns = 0
    spans = 0  # first line with a different number of columns after a line whose quotes are text
    for number, line in read_lines(path, bounds):
        text = line.decode("utf-8", "replace").removesuffix("\r")
        if not text:
            continue
        cells = text.split("\t")
        num_columns = num_columns or len(cells)
        if "text" in first and not spans and len(cells) != num_columns:
            spans = number
        if text.startswith('"') or '\t"' in text:
            first.setdefault(_what_quotes_are(text, cells, num_columns), number)
    as_text = first.get("text")
    as_quotes = first.get("quotes")
    encloses = as_quotes or first.get("either")
    against = spans or as_quotes
    if as_text and against:
        raise DataError(
            "quotes that can be read in two ways",
            where=f"{path}:{min(as_text, against)}",
            got=f"a field in line {as_text} begins with a quote and does not end with one, but "
            f"line {against} has other columns, or a field in quotes",
            fix=_EITHER,
        )
    if as_text:
        say(
            f"{path.name}: quotes are part of the texts, since a field in line {as_text} begins "
            "with a quote and does not end with one (raw.quotes: yes reads them as enclosing "
            "fields)"
        )
    elif encloses:
        say(
            f"{path.name}: quotes enclose fields and are removed, since each field that begins "
            f"with a quote ends with one, first in line {encloses} (raw.quotes: no keeps them)"
        )
    return not as_text and bool(encloses)


def _what_quotes_are(text: str, cells: list[str], num_columns: int) -> str:
    """What a line shows about its quotes: "text" if a field begins with a quote but cannot be a
    quoted field; "quotes" if it must be one (it has doubled quotes, or a quoted tab); or "either".
    """
    try:
        quoted = next(csv.reader([text], delimiter="\t", strict=True))
    except csv.Error:
        return "text"
    fits = len(cells) == num_columns
    fits_quoted = len(quoted) == num_columns
    if fits and not fits_quoted:
        return "text"
    if fits_quoted and not fits:
        return "quotes"
    doubled = any(cell.startswith('"') and '""' in cell[1:-1] for cell in cells)
    return "quotes" if doubled else "either"
