"""Texts of a file of any known format, streamed: all of them, or a range of rows of a Parquet file.

What reads ranges of any other format reads `copy_texts`' copy of its text column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import pyarrow as pa

from unidec.data.table_file import CsvFile, ending, json_blocks, open_parquet
from unidec.errors import DataError
from unidec.progress import progress

Texts = Iterator[list[str]]
TEXT_COLUMNS = ("query", "text")
CHUNK_ROWS = 4096


def text_column(names: Sequence[str], column: str | None, where: str) -> str:
    """The column that holds the queries: the one asked for, else `query`, else `text`; a DataError if it is missing."""
    wanted = (column,) if column else TEXT_COLUMNS
    found = next((name for name in wanted if name in names), None)
    if found is not None:
        return found
    raise DataError(
        "no column of queries",
        where=where,
        got=", ".join(map(str, names))[:300] or "no columns",
        expected=" or ".join(wanted),
        fix="rename the column, or name it: --column NAME",
    )


def read_texts(path: Path, column: str | None) -> Texts:
    """All texts of a file, in order, some at a time.

    Raises:
        DataError: an unknown ending, no such file or column, a row that is not text, or a file that cannot be read.
    """
    readers = {".csv": _read_csv, ".tsv": _read_csv, ".jsonl": _read_json, ".parquet": read_parquet}
    if ending(path) not in readers:
        raise DataError("an input of unknown format", where=str(path), expected=" ".join(readers))
    if not path.is_file():
        raise DataError("no such file", where=str(path))
    return readers[ending(path)](path, column)


def in_batches(texts: Iterable[list[str]], size: int) -> Texts:
    """The same texts in lists of `size`, the last one shorter."""
    waiting: list[str] = []
    for some in texts:
        waiting += some
        whole = len(waiting) - len(waiting) % size
        for start in range(0, whole, size):
            yield waiting[start : start + size]
        waiting = waiting[whole:]
    if waiting:
        yield waiting


def parquet_rows(path: Path) -> int:
    """Number of rows of a Parquet file."""
    with open_parquet(path) as file:
        return file.metadata.num_rows


def read_parquet(path: Path, column: str | None, rows: tuple[int, int] | None = None) -> Texts:
    """Texts of a Parquet file: all, or those of rows[0] to rows[1] - 1; other row groups are not read.

    Raises:
        DataError: as `read_texts`.
    """
    with open_parquet(path) as file:
        first, last = rows or (0, file.metadata.num_rows)
        if last > file.metadata.num_rows:
            raise DataError("too few rows", where=str(path), got=file.metadata.num_rows, expected=f"at least {last}")
        name = text_column(file.schema_arrow.names, column, str(path))
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        starts = list(accumulate(sizes, initial=0))
        groups = [g for g, size in enumerate(sizes) if starts[g] < last and starts[g] + size > first]
        row = starts[groups[0]] if groups else last
        for batch in file.iter_batches(batch_size=CHUNK_ROWS, row_groups=groups, columns=[name]):
            begin, end = max(first - row, 0), min(last - row, len(batch))
            if begin < end:
                yield _as_texts(batch.column(0).slice(begin, end - begin), row + begin, path, name)
            row += len(batch)


def copy_texts(path: Path, column: str | None, out: Path) -> int:
    """Copy a file's texts into a Parquet file with the column `text`; returns their number.

    Raises:
        DataError: as `read_texts`, or a text that is not valid Unicode.
    """
    import pyarrow.parquet as pq

    num_rows, schema = 0, pa.schema([("text", pa.large_string())])
    with pq.ParquetWriter(out, schema) as writer, progress(desc="read", unit="text") as bar:
        for texts in in_batches(read_texts(path, column), 16 * CHUNK_ROWS):
            try:
                writer.write_table(pa.table([texts], schema=schema))
            except (ValueError, pa.ArrowException) as error:
                where = f"{path}, rows {num_rows} to {num_rows + len(texts) - 1}"
                raise DataError("text that is not valid Unicode", where=where, got=str(error)[:200]) from error
            num_rows += len(texts)
            bar.update(len(texts))
    return num_rows


def _read_csv(path: Path, column: str | None) -> Texts:
    file = CsvFile(path)
    try:
        name = text_column(file.names, column, str(path))
    except DataError as error:
        hints = (file.delimiter_hint([one]) for one in ((column,) if column else TEXT_COLUMNS))
        fix = next(filter(None, hints), error.fix)
        raise DataError(error.what, where=error.where, got=error.got, expected=error.expected, fix=fix) from error
    row = 0
    for _, batch in file.batches([name]):
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            part = batch.column(0).slice(start, CHUNK_ROWS)
            yield _as_texts(part, row, path, name)
            row += len(part)


def _read_json(path: Path, column: str | None) -> Texts:
    for lines, items in json_blocks(path):
        texts = []
        for line, item in zip(lines, items, strict=True):
            name = text_column(list(item), column, f"{path}:{line}")
            if not isinstance(item[name], str):
                raise DataError("not text", where=f"{path}:{line}, {name}", got=repr(item[name])[:80])
            texts.append(item[name])
        yield from in_batches([texts], CHUNK_ROWS)


def _as_texts(array: pa.Array, first_row: int, path: Path, name: str) -> list[str]:
    string = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    if not string and not pa.types.is_null(array.type):
        raise DataError("not a column of text", where=f"{path}, {name}", got=array.type, expected="string")
    if array.null_count:
        row = first_row + array.is_null().index(True).as_py()
        raise DataError("no text", where=f"{path}, row {row}, {name}", got="null", fix="give it text or leave it out")
    return array.to_pylist()
