"""The texts of a column of a table of any known format, and windows of queries with their labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
    check = partial(text_column, column=column, where=str(path))
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


@dataclass(frozen=True)
class Window:
    """Queries in the order of the file, and the label uids of each that turned out to be right; None: it has none."""

    texts: list[str]
    labels: list[list[str]] | None = None

    def sample(self, rows: Any) -> Window:
        """The queries at these rows."""
        labels = None if self.labels is None else [self.labels[row] for row in rows]
        return Window([self.texts[row] for row in rows], labels)


def read_window(path: Path, column: str | None = None) -> Window:
    """A file of queries, and the labels that turned out to be right.

    Args:
        column: of the texts; default: `query`, else `text`. Those of the labels are in `labels`, where there is one: a
            list of uids, or (.csv and .tsv always) uids with white space between. Or a file of `serve.feedback`, whose
            rows have a "label" and whether it is "relevant": each query once, the last answer to a label counts.

    Raises:
        DataError: no such file or column, or something in it that is neither text nor labels.
    """
    texts, rows = list(read_texts(path, column)), [row for _, row in read_rows(path, ["labels", "label", "relevant"])]
    if rows and all(isinstance(row.get("label"), str) and isinstance(row.get("relevant"), bool) for row in rows):
        marks: dict[str, dict[str, bool]] = {}
        for text, row in zip(texts, rows, strict=True):
            marks.setdefault(text, {})[row["label"]] = row["relevant"]
        return Window(list(marks), [[uid for uid, right in own.items() if right] for own in marks.values()])
    if not any("labels" in row for row in rows):
        return Window(texts)
    labels: list[list[str]] = []
    for place, value in enumerate(row.get("labels") for row in rows):
        uids = value.split() if isinstance(value, str) else [] if value is None else value
        if not isinstance(uids, list) or not all(isinstance(uid, str) for uid in uids):
            where, expected = f"{path}, row {place}", "a list of uids, or uids as text"
            raise DataError("not labels", where=where, got=repr(uids)[:80], expected=expected)
        labels.append(uids)
    return Window(texts, labels)
