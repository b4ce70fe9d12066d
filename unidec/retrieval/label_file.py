"""Files of labels to add, change or remove: .csv, .tsv, .jsonl or .parquet with the columns uid, text [, title]."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from unidec.data.csv_file import CsvFile
from unidec.errors import DataError
from unidec.retrieval.label_change import MOST_SHOWN, LabelText
from unidec.retrieval.text_file import ending, json_lines

UIDS = ("uid", "id", "label")  # what the column may be called
TEXTS = ("text", "title")
_EXPECTED = "a header and the columns uid and text, and title where another text is shown"
Row = tuple[int, dict[str, Any]]


def read_labels(path: Path, texts: bool = True) -> list[LabelText]:
    """The labels of a file, in order.

    Args:
        path: .csv, .tsv and .jsonl may be compressed (.gz).
        texts: a text is needed; else only uids are read.

    Raises:
        DataError: an unknown ending, no such file or column, or rows that hold no text: all of them at once, by line.
    """
    readers = {".csv": _csv, ".tsv": _csv, ".jsonl": _json_lines, ".parquet": _parquet}
    kind = ending(path)
    if kind not in readers:
        raise DataError("labels of unknown format", where=str(path), expected=" ".join(readers))
    if not path.is_file():
        raise DataError("no such file", where=str(path), expected=_EXPECTED)
    found, problems = [], []
    try:
        for number, row in readers[kind](path):
            item, wrong = _label(row, f"{path.name}:{number}", texts)
            problems += [f"{path}:{number}: {wrong}"] if wrong else []
            found.append(item)
    except (OSError, pa.ArrowException) as error:
        raise DataError("a file that cannot be read", where=str(path), got=str(error)[:200]) from error
    if problems:
        more = f"\n  and {len(problems) - MOST_SHOWN:,} more" if len(problems) > MOST_SHOWN else ""
        raise DataError(
            "rows that are no labels; nothing was written", where=str(path),
            got="\n    ".join(["", *problems[:MOST_SHOWN]]) + more, expected=_EXPECTED,
        )  # fmt: skip
    if not found:
        raise DataError("a file without labels", where=str(path), expected=_EXPECTED)
    return found


def _label(row: dict[str, Any], where: str, texts: bool) -> tuple[LabelText, str]:
    """A row's label, and what is wrong with it."""
    uid = next((row[name] for name in UIDS if row.get(name) is not None), None)
    text = next((row[name] for name in TEXTS if row.get(name) is not None), "")
    title = row.get("title") or ""
    if isinstance(uid, int) and not isinstance(uid, bool):
        uid = str(uid)
    if not isinstance(uid, str):
        return LabelText("", ""), f"no uid in {', '.join(map(str, row))[:80] or 'an empty row'}"
    if texts and not (isinstance(text, str) and isinstance(title, str)):
        return LabelText(uid, ""), f"a text that is none: {text!r}"[:120]
    for word in (uid, text, title):
        if isinstance(word, str) and not _is_unicode(word):
            return LabelText(uid, ""), f"text that is not valid Unicode: {word!r}"[:120]
    return LabelText(uid, text if texts else "", title if texts else "", where), ""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _csv(path: Path) -> Iterator[Row]:
    file = CsvFile(path)
    _check_columns(file.names, path)
    for number, row in islice(file.rows(), 1, None):
        yield number, dict(zip(file.names, row, strict=False))


def _json_lines(path: Path) -> Iterator[Row]:
    for number, row in json_lines(path):
        yield number, row if isinstance(row, dict) else {}


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        _check_columns(names, path)
        number, wanted = 0, [name for name in names if name in (*UIDS, *TEXTS)]
        for batch in file.iter_batches(columns=wanted):
            for row in batch.to_pylist():
                yield number, row
                number += 1


def _check_columns(names: list[str], path: Path) -> None:
    if not set(names) & set(UIDS):
        raise DataError("no column of uids", where=f"{path}:1", got=", ".join(names)[:200], expected=_EXPECTED)
