"""A window of queries: the texts of a file, and where it has them the labels that turned out to be right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidec.data.table_file import read_rows
from unidec.errors import DataError
from unidec.retrieval.text_file import read_texts


@dataclass(frozen=True)
class Window:
    """Queries in the order of the file, and the label uids of each; None where the file has no labels."""

    texts: list[str]
    labels: list[list[str]] | None = None

    def sample(self, rows: Any) -> Window:
        """The queries at these rows."""
        kept = [int(row) for row in rows]
        labels = None if self.labels is None else [self.labels[row] for row in kept]
        return Window([self.texts[row] for row in kept], labels)


def read_window(path: Path, column: str | None = None, labels_column: str | None = None) -> Window:
    """A file of queries, and the labels that turned out to be right.

    Args:
        column: of the texts; default: `query`, else `text`.
        labels_column: of the labels, which must be there; default: `labels`, where there is one. A list of uids, or
            (.csv and .tsv always) uids with white space between.

    Raises:
        DataError: no such file or column, or something in it that is neither text nor labels.
    """
    texts, name = list(read_texts(path, column)), labels_column or "labels"
    rows = [row for _, row in read_rows(path, [name])]
    if not any(name in row for row in rows):
        if labels_column is not None:
            raise DataError("no column of labels", where=str(path), expected=labels_column)
        return Window(texts)
    values = [row.get(name) for row in rows]
    labels = [value.split() if isinstance(value, str) else [] if value is None else value for value in values]
    for row, uids in enumerate(labels):
        if not isinstance(uids, list) or not all(isinstance(uid, str) for uid in uids):
            where, expected = f"{path}, row {row}", "a list of uids, or uids as text"
            raise DataError("not labels", where=where, got=repr(uids)[:80], expected=expected)
    return Window(texts, labels)
