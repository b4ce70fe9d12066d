"""Reads the texts of a table file in any supported format, and windows of queries with their labels."""

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
    """Yield all texts of a file in order.

    Args:
        column: name of the text column; None: `query`, else `text`.

    Raises:
        DataError: as `read_rows`; also if the column is missing or a value is not text.
    """
    check = partial(text_column, column=column, where=str(path))
    for line, row in read_rows(path, (column,) if column else TEXT_COLUMNS, check):
        name = text_column(list(row), column, f"{path}:{line}")
        if not isinstance(row[name], str):
            raise DataError("not text", where=f"{path}:{line}, {name}", got=repr(row[name])[:80])
        yield row[name]


def text_column(names: Sequence[str], column: str | None, where: str) -> str:
    """Name of the text column: `column` if given, else `query`, else `text`; raises DataError if it is missing."""
    accepted = (column,) if column else TEXT_COLUMNS
    for name in accepted:
        if name in names:
            return name
    raise DataError(
        "the file has no column of queries", where=where, got=", ".join(map(str, names))[:300] or "no columns",
        expected=" or ".join(accepted), fix="rename the column, or name it: --column NAME",
    )  # fmt: skip


@dataclass(frozen=True)
class Window:
    """Queries in file order, and the uids of the correct labels of each; labels is None if the file has none."""

    texts: list[str]
    labels: list[list[str]] | None = None

    def sample(self, rows: Any) -> Window:
        """The queries at these rows."""
        labels = None if self.labels is None else [self.labels[row] for row in rows]
        return Window([self.texts[row] for row in rows], labels)


def read_window(path: Path, column: str | None = None) -> Window:
    """Read a file of queries and their correct labels.

    Args:
        column: name of the text column; None: `query`, else `text`. Labels are in the column `labels`, if it exists: a
            list of uids, or (always in .csv and .tsv) uids separated by white space. In a file of `serve.feedback`,
            each row has a "label" and whether it is "relevant"; rows of one query are merged, and the last judgement
            of a label counts.

    Raises:
        DataError: the file or column is missing, or a value is neither text nor labels.
    """
    texts, rows = list(read_texts(path, column)), [row for _, row in read_rows(path, ["labels", "label", "relevant"])]
    if rows and all(isinstance(row.get("label"), str) and isinstance(row.get("relevant"), bool) for row in rows):
        judgements: dict[str, dict[str, bool]] = {}
        for text, row in zip(texts, rows, strict=True):
            judgements.setdefault(text, {})[row["label"]] = row["relevant"]
        relevant = [[uid for uid, is_relevant in labels.items() if is_relevant] for labels in judgements.values()]
        return Window(list(judgements), relevant)
    if not any("labels" in row for row in rows):
        return Window(texts)
    uids_of_rows: list[list[str]] = []
    for place, value in enumerate(row.get("labels") for row in rows):
        uids = value.split() if isinstance(value, str) else [] if value is None else value
        if not isinstance(uids, list) or not all(isinstance(uid, str) for uid in uids):
            where, expected = f"{path}, row {place}", "a list of uids, or uids as text"
            raise DataError("the labels have an invalid type", where=where, got=repr(uids)[:80], expected=expected)
        uids_of_rows.append(uids)
    return Window(texts, uids_of_rows)
