"""Reads rows of Parquet files in little memory.

A Parquet file can hold a value once and repeat it in millions of rows, so its decoded size is
counted while it is read: texts that are stored in a dictionary are counted before they are copied
into rows."""

from __future__ import annotations

import contextlib
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
_VALUE_BYTES = 8  # a number, or the place of a text
_DICTIONARY = {"PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_PREFIXES = "DELTA_BYTE_ARRAY"  # each text is stored as its difference from the one before


def read_parquet(
    path: Path, columns: Sequence[str], check: Callable[[list[str]], object], bounds: RawBounds
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number (1-based) and cells of each row.

    Args:
        columns: names of the only columns that are read, if they exist.
        check: called with the names of all columns.

    Raises:
        DataError: the file is damaged, its decoded size exceeds `max_unpack_ratio`, or a column
        holds bytes.
    """
    import pyarrow.parquet as pq

    with _errors(path):
        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
        check(schema.names)
        present = set(schema.names)
        wanted = [name for name in columns if name in present]
        _check_no_bytes(path, schema, wanted)
        stored = _Stored.of(metadata, wanted)
        check_unpacked(path, max(stored.encoded, stored.values * _VALUE_BYTES), bounds)
        number = 1
        decoded = stored.values * _VALUE_BYTES
        for batch in _batches(path, stored, wanted):
            size = sum(_text_bytes(column) for column in batch.columns)
            decoded += size
            check_unpacked(path, decoded, bounds)
            for row in _rows(batch, size):
                yield number, row
                number += 1


def _batches(path: Path, stored: _Stored, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """All rows, with the texts of `stored.dictionaries` as dictionaries.

    Arrow cannot read a list as dictionaries where its dictionary ends within a batch; from there
    on, few rows are read at once."""
    import pyarrow.parquet as pq

    done = 0
    with pq.ParquetFile(path, buffer_size=_BUFFER, read_dictionary=stored.dictionaries) as file:
        try:
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(
                    stored.batch_rows(), row_groups=[group], columns=wanted
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
    """How the wanted columns are stored.

    Attributes:
        rows: number of rows.
        values: number of values, at least one per row.
        encoded: bytes of all columns, uncompressed but encoded.
        largest: the same of the largest column chunk whose texts are stored as differences; 0:
        there is none.
        dictionaries: paths of the text columns that can be read as dictionaries.
    """

    rows: int
    values: int
    encoded: int
    largest: int
    dictionaries: list[str]

    @classmethod
    def of(cls, metadata: Any, wanted: Sequence[str]) -> _Stored:
        """The facts in a file's metadata."""
        schema = metadata.schema
        names = set(wanted)
        leaves = [
            index
            for index in range(len(schema))
            if schema.column(index).path.split(".")[0] in names
        ]
        texts = {index for index in leaves if schema.column(index).physical_type == "BYTE_ARRAY"}
        values = encoded = largest = 0
        plain = set(texts)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            encoded += group.total_byte_size
            for index in leaves:
                chunk = group.column(index)
                values += chunk.num_values
                if _PREFIXES in chunk.encodings:
                    largest = max(largest, chunk.total_uncompressed_size)
                if not _DICTIONARY.issuperset(chunk.encodings):
                    plain.discard(index)
        paths = [schema.column(index).path for index in sorted(plain)]
        return cls(metadata.num_rows, max(values, metadata.num_rows), encoded, largest, paths)

    def batch_rows(self) -> int:
        """Rows that are decoded at once."""
        rows = _BATCH_BYTES * max(self.rows, 1) // max(self.encoded, 1)
        if self.largest:
            rows = min(rows, 4 * _BATCH_BYTES // self.largest)
        return min(max(rows, _FEWEST_ROWS), _BATCH_ROWS)


def _check_no_bytes(path: Path, schema: pa.Schema, wanted: Sequence[str]) -> None:
    """Raise a DataError if a wanted column holds bytes, as pandas writes them for
    Python's bytes.
    """
    is_bytes = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    for field in schema:
        name = field.name
        kind = field.type
        if name in wanted and any(test(kind) for test in is_bytes):
            raise DataError(
                "a column of bytes instead of text",
                where=f"{path}, column {name}",
                got=str(kind),
                expected="strings",
                fix=f"decode it: table[{name!r}] = table[{name!r}].str.decode('utf-8')",
            )


def _text_bytes(column: pa.Array) -> int:
    """Bytes of all texts in a column, each as often as it occurs."""
    kind = column.type
    if pa.types.is_struct(kind):
        return sum(map(_text_bytes, column.flatten()))
    if pa.types.is_map(kind):
        return _text_bytes(column.keys) + _text_bytes(column.items)
    if pa.types.is_nested(kind) and not pa.types.is_dictionary(kind):
        return _text_bytes(column.flatten())
    if pa.types.is_dictionary(kind):
        lengths = _lengths(column.dictionary)
        return 0 if lengths is None else pc.sum(lengths.take(column.indices)).as_py() or 0
    lengths = _lengths(column)
    return 0 if lengths is None else pc.sum(lengths).as_py() or 0


def _lengths(texts: pa.Array) -> pa.Array | None:
    """Bytes of each text (int64); None if these are no texts."""
    if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
        return None
    return pc.cast(pc.binary_length(texts), pa.int64())


def _rows(batch: pa.RecordBatch, size: int) -> Iterator[dict[str, Any]]:
    """Rows of a batch whose texts have `size` bytes, a piece at a time as Python objects."""
    a_row = max(size // max(batch.num_rows, 1), 1)
    rows = min(max(_PIECE_BYTES // a_row, 1), _PIECE_ROWS)
    for first in range(0, batch.num_rows, rows):
        piece = batch.slice(first, rows)
        columns = {
            name: _plain(column).to_pylist()
            for name, column in zip(batch.schema.names, piece, strict=True)
        }
        for row in range(piece.num_rows):
            yield {name: values[row] for name, values in columns.items()}


def _plain(column: pa.Array) -> pa.Array:
    """A column without a dictionary at its top level, which is faster to convert."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Errors of Arrow within the context become a DataError with the file's name."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        fix = "write or copy the file again"
        raise DataError(
            "not a readable Parquet file", where=str(path), got=str(error)[:200], fix=fix
        ) from error
