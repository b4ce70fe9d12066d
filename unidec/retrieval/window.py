"""A window of queries: the texts of a file, and where it has them the labels that turned out to be right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidec.data.table_file import CsvFile, ending, json_blocks, open_parquet
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
    texts = [text for some in read_texts(path, column) for text in some]
    values = _label_values(path, labels_column or "labels")
    if values is None and labels_column is not None:
        raise DataError("no column of labels", where=str(path), expected=labels_column)
    if values is None:
        return Window(texts)
    if len(values) != len(texts):
        raise DataError("labels for another number of queries", where=str(path), got=len(values), expected=len(texts))
    labels = [value.split() if isinstance(value, str) else [] if value is None else value for value in values]
    for row, uids in enumerate(labels):
        if not isinstance(uids, list) or not all(isinstance(uid, str) for uid in uids):
            where, expected = f"{path}, row {row}", "a list of uids, or uids as text"
            raise DataError("not labels", where=where, got=repr(uids)[:80], expected=expected)
    return Window(texts, labels)


def _label_values(path: Path, column: str) -> list[Any] | None:
    if ending(path) == ".parquet":
        with open_parquet(path) as file:
            there = column in file.schema_arrow.names
            return file.read([column]).column(0).to_pylist() if there else None
    if ending(path) == ".jsonl":
        rows = [row for _, items in json_blocks(path) for row in items]
        return [row.get(column) for row in rows] if any(column in row for row in rows) else None
    table = CsvFile(path)
    if column not in table.names:
        return None
    return [value for _, batch in table.batches([column]) for value in batch.column(0).to_pylist()]
