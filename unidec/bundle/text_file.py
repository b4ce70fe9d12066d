"""Reads texts from table files, and queries with their correct labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unidec.config import RawBounds
from unidec.data.line_file import readable_rows
from unidec.data.lookalike import names_like
from unidec.data.raw_lines import DEFAULT_BOUNDS
from unidec.data.table_file import no_text, read_rows
from unidec.data.tokens import is_blank
from unidec.errors import DataError

TEXT_COLUMNS = ("query", "text")
LABEL_COLUMNS = ("labels", "label", "relevant")
MOST_PLACES = 5  # blank texts listed in an error


def read_texts(path: Path, column: str | None, bounds: RawBounds = DEFAULT_BOUNDS) -> Iterator[str]:
    """Yield all texts of a file in order.

    Args:
        column: name of the text column; None: `query`, else `text`.
        bounds: limits, and how quotes are read.

    Raises:
        DataError: as `read_rows`; also if the column is missing or a value is not text. After the
            last text, if some texts are blank: lists the first of them.
    """
    check = partial(text_column, column=column, where=str(path))
    rows = read_rows(path, _accepted(column), check, bounds)
    for text, _ in _texts(rows, path, column):
        yield text


def _accepted(column: str | None) -> tuple[str, ...]:
    """Names of the text column, the first that exists being read."""
    return (column,) if column else TEXT_COLUMNS


def _texts(
    rows: Iterable[tuple[int, dict[str, Any]]], path: Path, column: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The text of each row, and the row. Raises DataError: as `read_texts`."""
    blank: list[int] = []
    for line, row in rows:
        name = text_column(list(row), column, f"{path}:{line}")
        text = row[name]
        if not isinstance(text, str):
            raise DataError(
                "not text", where=f"{path}:{line}, {name}", got=repr(text)[:80], fix=no_text(text)
            )
        if is_blank(text):
            blank.append(line)
        yield text, row
        del row  # may be large, and would be kept while the next row is read
    if blank:
        raise _blank_texts(path, blank)


def _blank_texts(path: Path, lines: Sequence[int]) -> DataError:
    places = ", ".join(f"{path.name}:{line}" for line in lines[:MOST_PLACES])
    got = f"{len(lines):,} blank: {places}"
    if len(lines) > MOST_PLACES:
        got += f" and {len(lines) - MOST_PLACES:,} more"
    return DataError(
        "texts without anything to read",
        where=f"{path}:{lines[0]}",
        got=got,
        expected="a text in every row",
        fix="remove these rows, or fill in their texts",
    )


def text_column(names: Sequence[str], column: str | None, where: str) -> str:
    """Name of the text column: `column` if given, else `query`, else `text`; raises DataError if it
    is missing.
    """
    accepted = _accepted(column)
    for name in accepted:
        if name in names:
            return name
    raise DataError(
        "the file has no column of queries",
        where=where,
        got=", ".join(map(str, names[:50]))[:300] or "no columns",
        expected=" or ".join(accepted),
        fix=names_like(names, accepted) or "rename the column, or name it: --column NAME",
    )


@dataclass(frozen=True)
class Window:
    """Queries in file order, and the uids of each query's correct labels; None if the file has no
    labels.
    """

    texts: list[str]
    labels: list[list[str]] | None = None

    def sample(self, rows: Any) -> Window:
        """The queries at these rows."""
        labels = None if self.labels is None else [self.labels[row] for row in rows]
        return Window([self.texts[row] for row in rows], labels)


def read_window(
    path: Path, column: str | None = None, bounds: RawBounds = DEFAULT_BOUNDS
) -> Window:
    """Read a file of queries and their correct labels.

    Args:
        column: name of the text column; None: `query`, else `text`. Labels are in the column
            `labels`, if it exists: a list of uids, or (always in .csv and .tsv) uids separated by
            white space. In a file of `serve.feedback`, each row has a "label" and whether it is
            "relevant"; rows of one query are merged, and the last judgement of a label counts.
        bounds: limits, and how quotes are read.

    Raises:
        DataError: the file or column is missing, or a value is neither text nor labels. Truncated
            lines of a .jsonl file are skipped with a warning.
    """
    check = partial(text_column, column=column, where=str(path))
    columns = (*_accepted(column), *LABEL_COLUMNS)
    numbered = readable_rows(path, columns, check, bounds)
    texts: list[str] = []
    rows: list[dict[str, Any]] = []
    for text, row in _texts(numbered, path, column):
        texts.append(text)
        rows.append({key: row[key] for key in LABEL_COLUMNS if key in row})
    kinds = {(type(row.get("label")), type(row.get("relevant"))) for row in rows}
    if kinds == {(str, bool)}:
        return _judged(texts, rows)
    if not any("labels" in row for row in rows):
        return Window(texts)
    labels = []
    for place, row in enumerate(rows):
        labels.append(_uids(row.get("labels"), f"{path}, row {place}"))
    return Window(texts, labels)


def _judged(texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> Window:
    """Merge rows of the same query; keep the labels whose last judgement is "relevant"."""
    judgements: dict[str, dict[str, bool]] = {}
    for text, row in zip(texts, rows, strict=True):
        judgements.setdefault(text, {})[row["label"]] = row["relevant"]
    labels = [[uid for uid in of_query if of_query[uid]] for of_query in judgements.values()]
    return Window(list(judgements), labels)


def _uids(value: Any, where: str) -> list[str]:
    """Uids of a list, or of a text separated by white space."""
    if value is None:
        return []
    uids = value.split() if isinstance(value, str) else value
    if not isinstance(uids, list) or not all(isinstance(uid, str) for uid in uids):
        raise DataError(
            "the labels have an invalid type",
            where=where,
            got=repr(uids)[:80],
            expected="a list of uids, or uids as text",
        )
    return uids
