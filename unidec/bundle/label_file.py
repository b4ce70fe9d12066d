"""Reads files of labels: ids, texts and shown titles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from unidec.config import RawBounds
from unidec.data.raw_lines import DEFAULT_BOUNDS
from unidec.data.table_file import columns_missing, no_text, read_rows
from unidec.errors import DataError

# accepted names of the id column; messages show the first
ID_COLUMNS = ("id", "uid", "label_id")
MOST_SHOWN = 10  # problems listed in one message


@dataclass(frozen=True)
class LabelText:
    """A label to add, or the new text of an existing one.

    Attributes:
        uid: unique name of the label.
        text: the text to encode; for a model of long texts, title and content joined by a space.
        title: the title to show; "": the text is shown.
        where: `file:line`, for error messages.
    """

    uid: str
    text: str
    title: str = ""
    where: str = ""

    @property
    def shown(self) -> str:
        """The title to show."""
        return self.title if self.title.strip() else self.text


def listing(problems: Sequence[str]) -> str:
    """The first `MOST_SHOWN` problems, one per line, and the number of further ones."""
    listing = "\n    ".join(["", *problems[:MOST_SHOWN]])
    num_more = len(problems) - MOST_SHOWN
    return f"{listing}\n  and {num_more:,} more" if num_more > 0 else listing


def read_labels(path: Path, bounds: RawBounds = DEFAULT_BOUNDS) -> list[LabelText]:
    """Read labels from a file with the columns id, text and, optionally, the title to show.

    Args:
        path: .csv, .tsv, .jsonl (also with .gz) or .parquet. The id column may also be named uid or
        label_id.
        bounds: limits, and how quotes are read.

    Raises:
        DataError: as `read_rows`; also if rows lack an id or text: lists all these rows by line.
    """
    labels = []
    problems = []
    columns = (*ID_COLUMNS, "text", "title")
    for line, row in read_rows(path, columns, partial(_check_header, path), bounds):
        where = f"{path}:{line}"
        name = _id_column(where, list(row))
        uid = row.get(name or "")
        text = row.get("text")
        title = row.get("title") or ""
        if type(uid) is int:
            uid = str(uid)
        if text is None:
            text = title
        if uid is None:
            names = ", ".join(map(str, row))[:80] or "an empty row"
            problems.append(f"{where}: no {ID_COLUMNS[0]} in {names}")
        elif not isinstance(uid, str):
            what = f"{where}: an id that is not a text: {uid!r}"[:200]
            problems.append(f"{what}; {no_text(uid)}")
        elif not isinstance(text, str) or not isinstance(title, str):
            problems.append(f"{where}: not a text: {(text, title)!r}"[:200])
        else:
            labels.append(LabelText(uid, text, title, f"{path.name}:{line}"))
    if problems or not labels:
        raise DataError(
            "not a file of labels; nothing was written",
            where=path,
            got=listing(problems) if problems else "no rows",
            expected="a header and the columns id and text, and title where another text is shown",
        )
    return labels


def _id_column(where: str, names: Sequence[str]) -> str | None:
    """Name of the id column; None if there is none. Raises a DataError if there are several."""
    found = [name for name in ID_COLUMNS if name in names]
    if len(found) > 1:
        raise DataError(
            "more than one column of ids",
            where=where,
            got=" and ".join(found),
            fix=f"keep one, {ID_COLUMNS[0]}",
        )
    return found[0] if found else None


def _check_header(path: Path, names: list[str]) -> None:
    where = f"{path}:1"
    if _id_column(where, names) is None:
        raise columns_missing(where, names, ID_COLUMNS[:1], "id, text [, title]")
