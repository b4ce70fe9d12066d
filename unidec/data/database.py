"""Tables that are joined, sorted and grouped without being held in memory: DuckDB, on all cores.

A database of this module is private to one `with` block. What does not fit its memory is in files
of a temporary folder. SQL reads tables that were given to it, and no file: names of columns and
values never become part of a statement."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from unidec.cores import usable_cores
from unidec.data.storage import storage_error
from unidec.data.temporary import remove, remove_stale, temporary_path

Database = duckdb.DuckDBPyConnection
MEMORY_MIB = 512  # for two threads; more threads get as much each
_NAME = "tables"


@contextlib.contextmanager
def database(folder: Path, num_bytes: int = 0) -> Iterator[Database]:
    """An empty database, whose temporary files are in a folder in `folder` until the block ends.

    Args:
        num_bytes: about how much it needs on disk, for the error message if there is no space.

    Raises:
        ArtifactError: there is no space for the temporary files.
    """
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
        for setting in ("enable_external_access = false", "lock_configuration = true"):
            connection.execute(f"SET {setting}")
        yield connection
    except (duckdb.IOException, duckdb.OutOfMemoryException) as error:
        full = OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({str(error)[:200]})")
        raise storage_error(spill, full, num_bytes) from error
    finally:
        connection.close()
        remove(spill)


def fill(tables: Database, select: str, blocks: Iterable[pa.RecordBatch]) -> None:
    """Run a statement that reads the rows of `blocks`, one after the other, as a table `given`;
    there is at least one block.
    """
    blocks = iter(blocks)
    first = next(blocks)

    def all_blocks() -> Iterator[pa.RecordBatch]:
        yield first
        yield from blocks

    tables.register("given", pa.RecordBatchReader.from_batches(first.schema, all_blocks()))
    try:
        tables.execute(select)
    finally:
        tables.unregister("given")
