"""Joins, sorts and groups tables that may be larger than memory, with DuckDB on all cores.

Each database is private to one `with` block. Data beyond its memory limit spills to a temporary
folder. SQL statements read only registered tables, never files, and never contain column names or
values from the data.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from unidec.cores import usable_cores
from unidec.data.spool import BLOCK_ROWS, Numbers
from unidec.data.temporary import remove, remove_stale, temporary_path

Database = duckdb.DuckDBPyConnection
MEMORY_MIB = 512  # for one or two threads; each further thread adds half of it
_NAME = "tables"


@contextlib.contextmanager
def database(folder: Path | None) -> Iterator[Database]:
    """An empty database. Its temporary files are in a subfolder of `folder` (None: of the system's
    folder for temporary files), which is removed when the block ends.

    Raises:
        OSError: there is no space for the temporary files.
    """
    folder = folder or Path(tempfile.gettempdir())
    remove_stale(folder, _NAME)
    spill = temporary_path(folder / _NAME)
    threads = usable_cores()
    config: dict[str, Any] = {
        "threads": threads,
        "memory_limit": f"{MEMORY_MIB * max(threads, 2) // 2}MiB",
        "temp_directory": str(spill),
        "preserve_insertion_order": False,  # rows are numbered
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    connection = duckdb.connect(":memory:", config=config)
    try:
        connection.execute("SET enable_external_access = false; SET lock_configuration = true")
        yield connection
    except (duckdb.IOException, duckdb.OutOfMemoryException) as error:
        if "temp_directory" not in str(error) and "No space left" not in str(error):
            raise
        reason = os.strerror(errno.ENOSPC)
        raise OSError(errno.ENOSPC, f"{reason} ({str(error)[:200]})") from error
    finally:
        connection.close()
        remove(spill)


def fill(tables: Database, statements: str, blocks: Iterator[pa.Table]) -> None:
    """Run statements; the first one reads the rows of `blocks` as the table `given`. There must be
    at least one block, which may be empty.
    """
    first = next(blocks)
    batches = (block.to_batches() for block in itertools.chain([first], blocks))
    reader = pa.RecordBatchReader.from_batches(first.schema, itertools.chain.from_iterable(batches))
    tables.register("given", reader)
    try:
        tables.execute(statements)
    finally:
        tables.unregister("given")


def one_row(tables: Database, select: str) -> tuple[Any, ...]:
    """The only row of a statement's result."""
    (row,) = tables.execute(select).fetchall()
    return tuple(row)


def ordered(tables: Database, select: str) -> Iterator[pa.RecordBatch]:
    """The rows of a statement's result, in blocks."""
    yield from tables.sql(select).to_arrow_reader(BLOCK_ROWS)


def first_rows(
    texts: Iterable[pa.Array], known: Iterable[pa.Array], folder: Path | None
) -> np.ndarray:
    """For each text, the first row in `known` with the same text, int64; -1 if there is none."""
    numbers = Numbers(np.int64, folder)
    with database(folder) as tables:
        first = "CREATE TABLE known AS SELECT text, min(row) AS first FROM given GROUP BY text"
        fill(tables, first, _numbered(known))
        found = "CREATE TABLE found AS SELECT row, first FROM given LEFT JOIN known USING (text)"
        fill(tables, found, _numbered(texts))
        select = "SELECT coalesce(first, -1) AS first FROM found ORDER BY row"
        for block in ordered(tables, select):
            numbers.add(block["first"])
    return numbers.array()


def _numbered(texts: Iterable[pa.Array]) -> Iterator[pa.Table]:
    """Tables of row numbers and texts; the texts as bytes."""
    row = 0
    for block in itertools.chain(texts, [pa.array([], pa.large_string())]):
        rows = np.arange(row, row + len(block))
        yield pa.table({"row": rows, "text": block.cast(pa.large_binary())})
        row += len(block)
