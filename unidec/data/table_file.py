"""Reads tables: .csv, .tsv, .jsonl (each also with .gz) and .parquet. Every table that a user gives
is read here.

Files are streamed: only a block of rows is in memory. An error in a row is passed to a `Report`,
which records it or raises.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from unidec.config import RawBounds
from unidec.data.lookalike import names_like, plain
from unidec.data.parquet_file import read_parquet
from unidec.data.quoting import read_cells
from unidec.data.raw_lines import (
    DATABASE_NULL,
    DEFAULT_BOUNDS,
    NOT_JSON,
    NOT_UTF8,
    Report,
    check_file,
    decode,
    read_lines,
    refuse,
)
from unidec.errors import DataError
from unidec.progress import say

Check = Callable[[list[str]], object]

# rows and characters in memory as Python objects
BLOCK_ROWS = 4096
BLOCK_CHARS = 16 << 20


def ending(path: Path) -> str:
    """File type from the name: ".csv" for "a.csv" and for "a.csv.gz"."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def text_blocks(rows: Iterable[Sequence[Any]], schema: pa.Schema) -> Iterator[pa.Table]:
    """Tables of at most `BLOCK_ROWS` rows, given as a number or uid and texts; a block ends after
    `BLOCK_CHARS` characters of texts.
    """
    block: list[Sequence[Any]] = []
    num_chars = 0
    for row in rows:
        block.append(row)
        num_chars += sum(map(len, row[1:]))
        if num_chars > BLOCK_CHARS or len(block) == BLOCK_ROWS:
            yield _table(block, schema)
            block = []
            num_chars = 0
    if block:
        yield _table(block, schema)


def _table(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    return pa.table(list(map(pa.array, zip(*rows, strict=True))), schema=schema)


def read_rows(
    path: Path,
    columns: Sequence[str],
    check: Check = lambda _names: None,
    bounds: RawBounds = DEFAULT_BOUNDS,
    report: Report | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number (for Parquet the row number; 1-based) and cells of each row; blank lines are
    skipped.

    Args:
        columns: columns that the caller needs; no others are read from a Parquet file.
        check: called with the column names in the header; not called for .jsonl, which has no
        header.
        report: called for rows that cannot be read. If it does not raise, the row is skipped
        (JSON: yielded without cells).

    Raises:
        DataError: unknown file type, a needed column is given twice, or a file or row that cannot
        be read.
    """
    kind = ending(path)
    report = report or refuse(path)
    if kind not in (".csv", ".tsv", ".jsonl", ".json", ".parquet"):
        raise DataError(
            "unknown file type of a table", where=path, expected=".csv .tsv .jsonl .parquet"
        )
    if kind == ".parquet":
        tables = read_columns(path, columns, check, bounds)
        yield from enumerate(chain.from_iterable(table.to_pylist() for table in tables), 1)
        return
    check_file(path)
    if kind in (".jsonl", ".json"):
        lines = read_lines(path, bounds)
        yield from (
            (number, _json_object(line, number, report)) for number, line in lines if line.strip()
        )
    else:
        rows = read_cells(path, _delimiter(path, bounds), bounds, report)
        _, names = next(rows, (0, []))
        if not names:
            raise DataError("an empty file", where=path, expected="a header and rows")
        check(names)
        check_names(names, columns, f"{path}:1")
        for line, cells in rows:
            row = dict(zip(names, cells, strict=False))
            if len(cells) != len(names):
                got = f"{len(cells)}: {cells[0][:40]!r}"
                report(f"not {len(names)} columns", line, got)
            elif r"\N" in map(row.get, columns):
                report(DATABASE_NULL, line, row)
            else:
                yield line, row


def read_columns(
    path: Path, columns: Sequence[str], check: Check, bounds: RawBounds
) -> Iterator[pa.Table]:
    """The rows of a Parquet file in blocks; arguments and errors as for `read_rows`."""
    check_file(path)

    def check_header(names: list[str]) -> None:
        check(names)
        check_names(names, columns, f"{path}:1")

    return read_parquet(path, columns, check_header, bounds)


def columns_missing(
    where: str, names: Sequence[str], missing: Sequence[str], expected: str
) -> DataError:
    """The error for a table without these columns."""
    return DataError(
        f"columns missing: {', '.join(missing)}",
        where=where,
        got=", ".join(map(plain, map(str, names[:50])))[:300],
        expected=expected,
        fix=names_like(names, missing)
        or "rename the columns that hold them; pandas writes an index as a column only after "
        "table.reset_index()",
    )


def no_text(value: object) -> str:
    """How to correct a value that is not a text."""
    if isinstance(value, bytes):
        return "decode bytes: column.str.decode('utf-8')"
    if isinstance(value, list):
        return (
            "write a row per label: table.explode('label_id'), or join texts: column.str.join(' ')"
        )
    return "save the column as strings, without lists, dates or truth values: column.astype(str)"


def _delimiter(path: Path, bounds: RawBounds) -> str:
    """What separates the columns: a comma (.tsv: a tab), or, if the header has none, another
    delimiter, which is reported on stderr: Excel uses the one of the system's language.
    """
    usual = "\t" if ending(path) == ".tsv" else ","
    header = next((line for _, line in read_lines(path, bounds) if line.strip()), b"")
    for delimiter in (usual, *"\t,;|"):
        if delimiter.encode() in header:
            if delimiter != usual:
                say(f"{path.name}: the columns are separated by {delimiter!r}")
            return delimiter
    return usual


def check_names(names: Sequence[str], columns: Sequence[str], where: str) -> None:
    """Raise a DataError if one of these columns is given twice."""
    twice = [name for name in columns if names.count(name) > 1]
    if twice:
        raise DataError(
            f"columns given twice: {', '.join(twice)[:300]}",
            where=where,
            fix="remove or rename one of them",
        )


def _json_object(line: bytes, number: int, report: Report) -> dict[str, Any]:
    """The JSON object in a line; {}, after a report, if it is not an object in valid Unicode."""
    try:
        item = json.loads(decode(line, number, report))
        if isinstance(item, dict):
            if rb"\u" in line:
                json.dumps(item, ensure_ascii=False).encode()
            return item
        report(NOT_JSON, number, type(item).__name__)
    except UnicodeEncodeError:
        report(NOT_UTF8, number, "a lone surrogate")
    except (ValueError, RecursionError) as error:
        report(NOT_JSON, number, error)
    return {}
