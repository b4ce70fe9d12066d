"""Reads Arrow files from untrusted sources.

Arrow checks lengths against the file, but decompresses buffers to whatever size they declare.
Bundles store Arrow files uncompressed, so messages are read one at a time, and a compressed message
is rejected before it is decompressed."""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa

from unidec.bundle.checked_arrays import damaged

_MAGIC = b"ARROW1\0\0"
_HEADER_FIELD = 2  # field of the flatbuffer table Message that holds its header, here a RecordBatch
_COMPRESSION_FIELD = 3  # field of the flatbuffer table RecordBatch


def read_texts_table(path: Path, schema: pa.Schema, num_rows: int) -> pa.Table:
    """Read an Arrow IPC file of valid, non-null texts into memory.

    Args:
        schema: expected columns; metadata is ignored. num_rows: expected number of rows.

    Raises:
        ArtifactError: the file is missing, damaged or compressed, or has other columns, other rows
        or null values.
    """
    try:
        table = _read_plain_table(path, schema)
        table.validate(full=True)
    except (pa.ArrowException, ValueError, MemoryError, OSError, StopIteration) as error:
        raise damaged("not a readable Arrow file", path, str(error)[:200]) from error
    if table.num_rows != num_rows or any(column.null_count for column in table.columns):
        raise damaged(
            "the number of rows differs, or values are null", path, table.num_rows, num_rows
        )
    return table


def _read_plain_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Read uncompressed record batches; raises ValueError for anything else in the file."""
    with pa.OSFile(str(path), "rb") as file:
        data = file.read_buffer()
    if data.size < 16 or data.slice(0, len(_MAGIC)).to_pybytes() != _MAGIC:
        raise ValueError("not an Arrow file")
    reader = pa.ipc.MessageReader.open_stream(pa.BufferReader(data.slice(len(_MAGIC))))
    file_schema = pa.ipc.read_schema(reader.read_next_message())
    if file_schema.remove_metadata() != schema:
        raise ValueError(f"columns that differ from {', '.join(schema.names)}")
    batches = []
    for message in reader:
        if message.type != "record batch":
            raise ValueError(f"unexpected message type: {message.type}")
        if _is_compressed(message.metadata.to_pybytes()):
            raise ValueError("compressed: it could unpack to any size")
        batches.append(pa.ipc.read_record_batch(message, file_schema))
    return pa.Table.from_batches(batches, schema=file_schema).replace_schema_metadata(None)


def _is_compressed(data: bytes) -> bool:
    """Whether the flatbuffer of a record batch message names a codec."""

    def field(table: int, number: int) -> int:
        """Position of a field of a table; 0 if the field is not set."""
        vtable = table - struct.unpack_from("<i", data, table)[0]
        if vtable < 0:
            raise ValueError("a message with an invalid offset")
        (size,) = struct.unpack_from("<H", data, vtable)
        place = 4 + 2 * number
        if place >= size:
            return 0
        (offset,) = struct.unpack_from("<H", data, vtable + place)
        return table + offset if offset else 0

    try:
        header = field(struct.unpack_from("<I", data)[0], _HEADER_FIELD)
        if not header:
            raise ValueError("a message without a header")
        return field(header + struct.unpack_from("<I", data, header)[0], _COMPRESSION_FIELD) > 0
    except struct.error as error:
        raise ValueError("a truncated message") from error
