"""Reads Parquet files with little memory.

A Parquet file can store a value once and repeat it in millions of rows, so the decoded size is
checked while reading, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from unidec.config import RawBounds
from unidec.data.raw_lines import check_unpacked
from unidec.errors import DataError

_BUFFER = 1 << 20  # bytes of a column that are read at once; without a buffer, whole row groups are
_BATCH_ROWS = 128  # decoded at once: even if each text has a million characters, they fit in memory
_BATCHES = 32  # at most, of a block
_BLOCK_BYTES = 16 << 20
_VALUE_BYTES = 8  # a number, or the offset of a text


def read_parquet(
    path: Path, columns: Sequence[str], check: Callable[[list[str]], object], bounds: RawBounds
) -> Iterator[pa.Table]:
    """The rows, in blocks of at most `_BATCHES` batches, or about `_BLOCK_BYTES`.

    Args:
        columns: names of the columns to read, as far as they exist; no others are read.
        check: called with the names of all columns.

    Raises:
        DataError: the file is damaged, its decoded size exceeds `max_unpack_ratio`, or a column
        holds bytes.
    """
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=_BUFFER) as file:
            schema = file.schema_arrow
            check(schema.names)
            present = set(schema.names)
            wanted = [name for name in columns if name in present]
            _check_no_bytes(path, schema, wanted)
            check_unpacked(path, _stored_bytes(file.metadata, wanted), bounds)
            decoded = 0
            yielded = 0
            block: list[pa.RecordBatch] = []
            for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
                decoded += batch.nbytes
                check_unpacked(path, decoded, bounds)
                block.append(batch)
                if len(block) == _BATCHES or decoded - yielded > _BLOCK_BYTES:
                    yield pa.Table.from_batches(block)
                    yielded = decoded
                    block.clear()
            if block:
                yield pa.Table.from_batches(block)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            "not a readable Parquet file", where=path, got=error, fix="write or copy the file again"
        ) from error


def _stored_bytes(metadata: Any, wanted: Sequence[str]) -> int:
    """Bytes of the wanted columns, by the file's metadata: uncompressed but still encoded, or those
    of their numbers and offsets, whichever is more.
    """
    encoded = 0
    values = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for index in range(metadata.num_columns):
            chunk = group.column(index)
            if chunk.path_in_schema.partition(".")[0] in wanted:
                encoded += chunk.total_uncompressed_size
                values += chunk.num_values
    return max(encoded, values * _VALUE_BYTES)


def _check_no_bytes(path: Path, schema: pa.Schema, wanted: Sequence[str]) -> None:
    """Raise a DataError if a wanted column holds bytes, as pandas writes Python's `bytes`."""
    for name in wanted:
        kind = str(schema.field(name).type)
        if "binary" in kind:
            raise DataError(
                "a column of bytes instead of text",
                where=f"{path}, column {name}",
                got=kind,
                expected="strings",
                fix=f"decode it: table[{name!r}] = table[{name!r}].str.decode('utf-8')",
            )
