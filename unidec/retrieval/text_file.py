"""Rows of a table of any known format, one at a time with their line, and the texts of a column of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from unidec.data.table_file import CsvFile, ending, json_blocks, open_parquet
from unidec.errors import DataError

TEXT_COLUMNS = ("query", "text")
ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")
CHUNK_ROWS = 4096  # of a Parquet file, read at once


def read_rows(
    path: Path, columns: Sequence[str], check: Callable[[list[str]], object] = lambda _names: None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line (1-based; in a Parquet file the row, from 0) and cells of each row; never more than a block in memory.

    Args:
        columns: what is needed: of a Parquet file no others are read.
        check: called with the names in the header; a .jsonl file has none.

    Raises:
        DataError: an unknown ending, no such file, or one that cannot be read, with its line.
    """
    kind = ending(path)
    if kind not in ENDINGS:
        raise DataError("a table of unknown format", where=str(path), expected=" ".join(ENDINGS))
    if not path.is_file():
        raise DataError("no such file", where=str(path))
    if kind == ".jsonl":
        for lines, items in json_blocks(path):
            yield from zip(lines, items, strict=True)
    elif kind == ".parquet":
        with open_parquet(path) as file:
            names = file.schema_arrow.names
            check(names)
            batches = file.iter_batches(batch_size=CHUNK_ROWS, columns=[name for name in names if name in columns])
            yield from enumerate(row for batch in batches for row in batch.to_pylist())
    else:
        table = CsvFile(path)
        check(table.names)
        for line, cells in table.rows():
            yield line, dict(zip(table.names, cells, strict=True))


def read_texts(path: Path, column: str | None) -> Iterator[str]:
    """All texts of a file, in order.

    Args:
        column: that holds them; None: `query`, else `text`.

    Raises:
        DataError: as `read_rows`, no such column, or a row that is not text.
    """
    wanted = (column,) if column else TEXT_COLUMNS

    def check(names: list[str]) -> None:
        hints = (CsvFile(path).delimiter_hint([one]) for one in (wanted if ending(path) != ".parquet" else ()))
        text_column(names, column, str(path), next(filter(None, hints), None))

    for line, row in read_rows(path, wanted, check):
        name = text_column(list(row), column, f"{path}:{line}")
        if not isinstance(row[name], str):
            raise DataError("not text", where=f"{path}:{line}, {name}", got=repr(row[name])[:80])
        yield row[name]


def text_column(names: Sequence[str], column: str | None, where: str, fix: str | None = None) -> str:
    """The column that holds the queries: the one asked for, else `query`, else `text`; a DataError if it is missing."""
    wanted = (column,) if column else TEXT_COLUMNS
    found = next((name for name in wanted if name in names), None)
    if found is not None:
        return found
    raise DataError(
        "no column of queries", where=where, got=", ".join(map(str, names))[:300] or "no columns",
        expected=" or ".join(wanted), fix=fix or "rename the column, or name it: --column NAME",
    )  # fmt: skip
