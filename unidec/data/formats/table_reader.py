"""Reads the columns of table files as texts. A table may be in parts, which other processes can
read (`unidec.data.shards`), with the same result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from unidec.config import RawBounds
from unidec.data.formats.files import Places, Source
from unidec.data.lookalike import names_like
from unidec.data.shards import Job, Work, divided, is_dividing
from unidec.data.spool import table_on_disk
from unidec.data.storage import file_sha256, read_json, write_json
from unidec.data.table_file import (
    columns_missing,
    ending,
    no_text,
    read_columns,
    read_rows,
    text_blocks,
)
from unidec.progress import say

DIVIDED_ABOVE = 1 << 26  # bytes of the parts after the first: 15 seconds of csv for a process
# of a shard
_ROWS = "rows.arrow"
_FOUND = "found.json"
Look = Callable[[dict[str, Any], int], object]


@dataclass(frozen=True)
class Table:
    """The contents of a table file or of a table in memory.

    Attributes:
        at: the places of its rows.
        columns: the columns as strings; "" for a missing value. The relevance may be numbers.
    """

    at: Places
    columns: dict[str, pa.ChunkedArray]
    num_rows: int


def read_table(
    source: Source,
    paths: Sequence[Path],
    needed: Sequence[str],
    optional: Sequence[str] = (),
    look: Look = lambda _row, _line: None,
) -> Table:
    """Read columns of a file, or of the parts of one; reports on stderr which columns are not used.

    Args:
        needed: columns that must exist.
        optional: further columns, omitted from the table if no part has them.
        look: called with each row and its line number; only for a single file.

    Raises:
        DataError: a needed column is missing, a column is given twice, or a file cannot be read.
            Errors in single rows are recorded in the source.
    """
    reader = TableReader(source, needed, optional)
    names = list(map(source.name, paths))
    num_bytes = sum(map(os.path.getsize, paths[1:]))
    if num_bytes < DIVIDED_ABOVE or source.scratch is None or not is_dividing():
        return reader.table(zip(names, (reader.file(path, look) for path in paths), strict=True))
    title = f"read {names[0]} and {len(names) - 1} more"
    settings = {
        "root": str(source.root.absolute()),
        "names": names,
        "sha256": list(map(file_sha256, paths)),
        "bounds": source.bounds.model_dump(),
        "columns": (needed, optional),
    }
    output = source.scratch / names[0].replace("/", "-")
    with divided(output, Job("rows", title, "file"), settings, (len(paths), 1)) as shards:
        return reader.table(zip(names, map(reader.shard, shards), strict=True))


@dataclass
class TableReader:
    """Reads rows as texts.

    Attributes:
        source: errors in rows are recorded in it.
        needed, optional: columns, as in `read_table`.
        present: the columns found so far.
        unused: other columns, which were reported.
    """

    source: Source
    needed: Sequence[str]
    optional: Sequence[str]
    present: set[str] = field(default_factory=set)
    unused: set[str] = field(default_factory=set)

    @property
    def wanted(self) -> list[str]:
        return [*self.needed, *self.optional]

    @property
    def schema(self) -> pa.Schema:
        """Of the blocks of rows: the line, and the wanted columns."""
        texts = [(column, pa.large_string()) for column in self.wanted]
        return pa.schema([("", pa.int64()), *texts])

    def table(self, files: Iterable[tuple[str, Iterable[pa.Table]]]) -> Table:
        """The rows of all files, given with their names."""
        names: list[str] = []
        ends: list[int] = []

        def blocks() -> Iterator[pa.Table]:
            num_rows = 0
            for name, tables in files:
                names.append(name)
                for block in tables:
                    num_rows += block.num_rows
                    yield block
                ends.append(num_rows)

        table = table_on_disk(blocks(), self.schema, self.source.scratch)
        self.present.update(self.needed)
        columns = {column: table[column] for column in self.wanted if column in self.present}

        def at(chosen: np.ndarray) -> list[str]:
            lines = table[0].take(pa.array(chosen)).to_pylist()
            files = np.searchsorted(ends, chosen, side="right").tolist()
            return [f"{names[file]}:{line}" for file, line in zip(files, lines, strict=True)]

        return Table(at, columns, table.num_rows)

    def file(self, path: Path, look: Look) -> Iterator[pa.Table]:
        """The rows of a file, in blocks."""
        check = partial(self._check_header, path)
        name = self.source.name(path)
        if ending(path) == ".parquet":
            tables = read_columns(path, self.wanted, check, self.source.bounds)
            return self._columns(tables, name)
        report = self.source.report(path)
        rows = read_rows(path, self.wanted, check, self.source.bounds, report)
        return self.blocks(rows, name, look)

    def _columns(self, tables: Iterator[pa.Table], name: str) -> Iterator[pa.Table]:
        """The rows of a Parquet file, in blocks. Columns of texts and whole numbers are converted
        as a whole, others cell by cell.
        """
        row = 1
        for table in tables:
            end = row + table.num_rows
            if all(map(_is_plain, table.columns)):
                self.present.update(table.column_names)
                empty = pa.repeat("", table.num_rows)
                given = dict(zip(table.column_names, table.columns, strict=True))
                texts = [given.get(column, empty).cast(pa.large_string()) for column in self.wanted]
                yield pa.table([np.arange(row, end), *texts], schema=self.schema)
            else:
                yield from self.blocks(enumerate(table.to_pylist(), row), name)
            row = end

    def blocks(
        self,
        rows: Iterable[tuple[int, dict[str, Any]]],
        name: str,
        look: Look = lambda _row, _line: None,
    ) -> Iterator[pa.Table]:
        """Tables of these rows, each given with its line number; `name` is that of their file."""
        wanted = self.wanted
        optional = set(self.optional)

        def texts() -> Iterator[tuple[Any, ...]]:
            for line, row in rows:
                look(row, line)
                self.present.update(row.keys() & optional)
                yield line, *[self._text(row, column, name, line) for column in wanted]
                del row  # free it before the next row, which may be large, is read

        return text_blocks(texts(), self.schema)

    def shard(self, folder: Path) -> Iterator[pa.Table]:
        """The rows that `write_shard` read; the errors that it found are recorded."""
        found = read_json(folder / _FOUND)
        self.present.update(found.pop("present"))
        self.source.record(**found)
        with pa.ipc.open_stream(folder / _ROWS) as stream:
            for batch in stream:
                yield pa.Table.from_batches([batch])

    def _check_header(self, path: Path, names: list[str]) -> None:
        check_columns(names, self.needed, self.optional, f"{path}:1")
        unused = [name for name in names if name not in {*self.wanted, *self.unused}]
        if unused:
            self.unused.update(unused)
            used = ", ".join(self.wanted)
            say(f"{path.name}: columns that are not used: {', '.join(unused)} (used: {used})")

    def _text(self, row: dict[str, Any], column: str, name: str, line: int) -> str:
        """A cell as text. If it is not a string or number, or is required but missing, an error is
        recorded and "" returned.

        NaN, which pandas writes for a missing value, counts as missing.
        """
        value = row.get(column)
        kind = type(value)
        if kind is str:
            return value  # type: ignore[return-value]
        if kind in (int, float) and value == value:
            return str(value)
        if value is not None and kind is not float:
            self.source.note(f"{column} is not a text", f"{name}:{line}", kind.__name__)
            self.source.advise(no_text(value))
        # for an empty row an error is already recorded: it is not a JSON object
        elif column in self.needed and row:
            names = list(map(str, row))
            self.source.note(f"no {column}", f"{name}:{line}", ", ".join(names)[:80])
            if column not in row and (fix := names_like(names, [column])):
                self.source.advise(fix)
        return ""


def _is_plain(column: pa.ChunkedArray) -> bool:
    """Whether a column holds only texts or whole numbers, and no missing values."""
    kind = column.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return not column.null_count and (is_text or pa.types.is_integer(kind))


def check_columns(
    names: Sequence[str], needed: Sequence[str], optional: Sequence[str], where: str
) -> None:
    """Raise a DataError if a needed column is missing."""
    missing = [column for column in needed if column not in names]
    if missing:
        expected = ", ".join(needed) + "".join(f" [, {column}]" for column in optional)
        raise columns_missing(where, names, missing, expected)


def write_shard(work: Work, number: int, threads: int = 0) -> None:
    """Read one part of a table. `threads` is not used: it takes one."""
    settings = work.settings
    source = Source(Path(settings["root"]), RawBounds(**settings["bounds"]))
    reader = TableReader(source, *settings["columns"])
    path = source.root / settings["names"][number]
    with work.write(number) as out:
        with pa.ipc.new_stream(out.path / _ROWS, reader.schema) as stream:
            for block in reader.file(path, lambda _row, _line: None):
                stream.write_table(block)
        found = {"count": source.count, "samples": source.samples, "fixes": source.fixes}
        write_json(out.path / _FOUND, {"present": sorted(reader.present), **found})
