"""The texts of a column of a table of any known format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from unidec.data.table_file import read_rows
from unidec.errors import DataError

TEXT_COLUMNS = ("query", "text")


def read_texts(path: Path, column: str | None) -> Iterator[str]:
    """All texts of a file, in order.

    Args:
        column: that holds them; None: `query`, else `text`.

    Raises:
        DataError: as `read_rows`, no such column, or a row that is not text.
    """

    def check(names: list[str]) -> None:
        text_column(names, column, str(path))

    for line, row in read_rows(path, (column,) if column else TEXT_COLUMNS, check):
        name = text_column(list(row), column, f"{path}:{line}")
        if not isinstance(row[name], str):
            raise DataError("not text", where=f"{path}:{line}, {name}", got=repr(row[name])[:80])
        yield row[name]


def text_column(names: Sequence[str], column: str | None, where: str) -> str:
    """The column that holds the queries: the one asked for, else `query`, else `text`; a DataError if it is missing."""
    wanted = (column,) if column else TEXT_COLUMNS
    found = next((name for name in wanted if name in names), None)
    if found is not None:
        return found
    raise DataError(
        "no column of queries", where=where, got=", ".join(map(str, names))[:300] or "no columns",
        expected=" or ".join(wanted), fix="rename the column, or name it: --column NAME",
    )  # fmt: skip
