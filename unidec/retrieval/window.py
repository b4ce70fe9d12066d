"""A window of queries: the texts of a file, and where it has them the labels that turned out to be right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from unidec.data.table_file import CsvFile, ending, json_blocks
from unidec.errors import DataError
from unidec.retrieval.text_file import read_texts

LABELS = "labels"


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
    """Read a file of queries as `text_file.read_texts` does, and its column of label uids.

    Args:
        column: of the texts; default: `query`, else `text`.
        labels_column: of the labels, which must be there; default: `labels`, where there is one. A list of uids, or
            (.csv and .tsv always) uids with white space between.

    Raises:
        DataError: no such file or column, or something in it that is neither text nor labels.
    """
    texts = [text for some in read_texts(path, column) for text in some]
    read = {".parquet": _parquet_labels, ".jsonl": _json_labels}.get(ending(path), _csv_labels)
    values = read(path, labels_column or LABELS)
    if values is None and labels_column is not None:
        raise DataError("no column of labels", where=str(path), expected=labels_column)
    if values is None:
        return Window(texts)
    if len(values) != len(texts):
        raise DataError("labels for another number of queries", where=str(path), got=len(values), expected=len(texts))
    return Window(texts, [_uids(value, row, path) for row, value in enumerate(values)])


def _uids(value: Any, row: int, path: Path) -> list[str]:
    uids = value.split() if isinstance(value, str) else [] if value is None else value
    if not isinstance(uids, list) or not all(isinstance(uid, str) for uid in uids):
        raise DataError(
            "not labels", where=f"{path}, row {row}", got=repr(value)[:80], expected="a list of uids, or uids as text"
        )
    return uids


def _parquet_labels(path: Path, column: str) -> list[Any] | None:
    import pyarrow.parquet as pq

    if column not in pq.read_schema(path).names:
        return None
    try:
        return pq.read_table(path, columns=[column]).column(0).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError("a damaged Parquet file", where=str(path), got=str(error)[:200]) from error


def _json_labels(path: Path, column: str) -> list[Any] | None:
    rows = [row for _, items in json_blocks(path) for row in items]
    return [row.get(column) for row in rows] if any(column in row for row in rows) else None


def _csv_labels(path: Path, column: str) -> list[Any] | None:
    file = CsvFile(path)
    if column not in file.names:
        return None
    return [value for batch in file.batches([column]) for value in batch.column(0).to_pylist()]
