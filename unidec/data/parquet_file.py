"""Reads rows of Parquet files with little memory.

A Parquet file can store a value once and repeat it in millions of rows, so the decoded size is
checked while reading: dictionary-encoded texts are counted before they are copied into rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from unidec.config import RawBounds
from unidec.data.raw_lines import check_unpacked
from unidec.errors import DataError

_BUFFER = 1 << 20  # bytes of a column that are read at once; without a buffer, whole row groups are
_BATCH_BYTES = 32 << 20  # encoded bytes in memory
_BATCH_ROWS = 1 << 16
_FEWEST_ROWS = 16
# decoded bytes and rows that become Python objects at once
_PIECE_BYTES = 16 << 20
_PIECE_ROWS = 4096
_VALUE_BYTES = 8  # a number, or the offset of a text
_DICTIONARY = {"PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_PREFIXES = "DELTA_BYTE_ARRAY"  # each text is stored as its difference from the one before


def read_parquet(
    path: Path, columns: Sequence[str], check: Callable[[list[str]], object], bounds: RawBounds
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number (1-based) and cells of each row.

    Args:
        columns: names of the columns to read, as far as they exist; no others are read.
        check: called with the names of all columns.

    Raises:
        DataError: the file is damaged, its decoded size exceeds `max_unpack_ratio`, or a column
        holds bytes.
    """
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
        check(schema.names)
        present = set(schema.names)
        wanted = [name for name in columns if name in present]
        _check_no_bytes(path, schema, wanted)
        stored = _Stored.of(metadata, wanted)
        decoded = stored.values * _VALUE_BYTES
        check_unpacked(path, max(stored.encoded, decoded), bounds)
        number = 1
        for batch in _batches(path, stored, wanted):
            size = sum(map(_text_bytes, batch.columns))
            decoded += size
            check_unpacked(path, decoded, bounds)
            for row in _rows(batch, size):
                yield number, row
                number += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            "not a readable Parquet file", where=path, got=error, fix="write or copy the file again"
        ) from error


def _batches(path: Path, stored: _Stored, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """All rows; columns in `stored.dictionaries` are read as dictionary arrays.

    Arrow cannot read a list column this way if its dictionary ends within a batch: from there on,
    nested columns are decoded, a few rows at a time.
    """
    import pyarrow.parquet as pq

    done = 0
    with pq.ParquetFile(path, buffer_size=_BUFFER, read_dictionary=stored.dictionaries) as file:
        try:
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(
                    stored.batch_rows, row_groups=[group], columns=wanted
                ):
                    done += batch.num_rows
                    yield batch
            return
        except pa.ArrowNotImplementedError:
            flat = [name for name in stored.dictionaries if "." not in name]
    with pq.ParquetFile(path, buffer_size=_BUFFER, read_dictionary=flat) as file:
        for batch in file.iter_batches(_FEWEST_ROWS, columns=wanted):
            if done < batch.num_rows:
                yield batch.slice(done)
            done = max(done - batch.num_rows, 0)


@dataclass(frozen=True)
class _Stored:
    """How the wanted columns are stored in a file.

    Attributes:
        values: number of values, at least one per row.
        encoded: bytes of all columns, uncompressed but still encoded.
        batch_rows: number of rows that are decoded at once.
        dictionaries: paths of the text columns that can be read as dictionaries.
    """

    values: int
    encoded: int
    batch_rows: int
    dictionaries: list[str]

    @classmethod
    def of(cls, metadata: Any, wanted: Sequence[str]) -> _Stored:
        """From a file's metadata."""
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        encoded = sum(group.total_byte_size for group in groups)
        values = 0
        largest = 0  # bytes of the largest column chunk whose texts are stored as differences
        dictionaries = []
        for index in range(metadata.num_columns):
            column = metadata.schema.column(index)
            if column.path.partition(".")[0] not in wanted:
                continue
            chunks = [group.column(index) for group in groups]
            values += sum(chunk.num_values for chunk in chunks)
            for chunk in chunks:
                if _PREFIXES in chunk.encodings:
                    largest = max(largest, chunk.total_uncompressed_size)
            is_text = column.physical_type == "BYTE_ARRAY"
            if is_text and all(_DICTIONARY.issuperset(chunk.encodings) for chunk in chunks):
                dictionaries.append(column.path)
        batch_rows = _BATCH_BYTES * metadata.num_rows // max(encoded, 1)
        if largest:
            batch_rows = min(batch_rows, 4 * _BATCH_BYTES // largest)
        batch_rows = min(max(batch_rows, _FEWEST_ROWS), _BATCH_ROWS)
        return cls(max(values, metadata.num_rows), encoded, batch_rows, dictionaries)


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


def _text_bytes(column: pa.Array) -> int:
    """Total bytes of the texts in a column; repeated texts count each time."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return pc.sum(_sizes(column.dictionary).take(column.indices)).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(map(_text_bytes, column.flatten()))
    if pa.types.is_map(kind):
        return _text_bytes(column.keys) + _text_bytes(column.items)
    if pa.types.is_nested(kind):
        return _text_bytes(column.flatten())
    return pc.sum(_sizes(column)).as_py() or 0


def _sizes(texts: pa.Array) -> pa.Array:
    """Bytes of each text, int64; null for values of other types."""
    if pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type):
        return pc.cast(pc.binary_length(texts), pa.int64())
    return pa.nulls(len(texts), pa.int64())


def _rows(batch: pa.RecordBatch, size: int) -> Iterator[dict[str, Any]]:
    """Rows of a batch whose texts have `size` bytes, converted to Python objects in pieces."""
    row_bytes = max(size // max(batch.num_rows, 1), 1)
    rows = min(max(_PIECE_BYTES // row_bytes, 1), _PIECE_ROWS)
    for first in range(0, batch.num_rows, rows):
        piece = batch.slice(first, rows)
        columns = [_plain(column) for column in piece.columns]
        yield from pa.RecordBatch.from_arrays(columns, piece.schema.names).to_pylist()


def _plain(column: pa.Array) -> pa.Array:
    """A column without dictionary encoding at the top level, which is faster to convert."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
