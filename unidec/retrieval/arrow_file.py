"""Arrow files from others, read without trusting them.

Arrow checks lengths against the file, but unpacks compressed buffers to whatever size they claim. Ours are written
uncompressed, so the messages are read one by one and a compressed one is refused before it is unpacked.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa

from unidec.errors import ArtifactError

_MAGIC = b"ARROW1\0\0"
_HEADER_FIELD = 2  # of the flatbuffer table Message: its header, here a RecordBatch
_COMPRESSION_FIELD = 3  # of the table RecordBatch


def read_texts_table(path: Path, schema: pa.Schema, num_rows: int) -> pa.Table:
    """All record batches of an Arrow IPC file in one table, in memory: so many rows, each text valid and none missing.

    Args:
        schema: columns that it must have; metadata is ignored.

    Raises:
        ArtifactError: anything else.
    """
    fix = "write the bundle again: unidec index build"
    try:
        table = _read_plain_table(path, schema)
        table.validate(full=True)
    except (pa.ArrowException, ValueError, MemoryError, OSError, StopIteration) as error:
        raise ArtifactError("not a readable Arrow file", where=str(path), got=str(error)[:200], fix=fix) from error
    if table.num_rows != num_rows or any(column.null_count for column in table.columns):
        raise ArtifactError("another number of rows", where=str(path), got=table.num_rows, expected=num_rows, fix=fix)
    return table


def _read_plain_table(path: Path, schema: pa.Schema) -> pa.Table:
    """ValueError: not such a file, other columns, dictionaries, or compressed."""
    with pa.OSFile(str(path), "rb") as file:
        data = file.read_buffer()
    if data.size < 16 or data.slice(0, len(_MAGIC)).to_pybytes() != _MAGIC:
        raise ValueError("not an Arrow file")
    reader = pa.ipc.MessageReader.open_stream(pa.BufferReader(data.slice(len(_MAGIC))))
    first = reader.read_next_message()
    if first.type != "schema" or (found := pa.ipc.read_schema(first)).remove_metadata() != schema:
        raise ValueError(f"columns that differ from {', '.join(schema.names)}")
    batches = []
    for message in reader:
        if message.type != "record batch":
            raise ValueError(f"a message of another type: {message.type}")
        if _is_compressed(message.metadata.to_pybytes()):
            raise ValueError("compressed: it could unpack to any size")
        batches.append(pa.ipc.read_record_batch(message, found))
    return pa.Table.from_batches(batches, schema=found).replace_schema_metadata(None)


def _is_compressed(data: bytes) -> bool:
    """Whether the flatbuffer of a record batch's message has the field that names a codec."""

    def field(table: int, number: int) -> int:
        """Where a field of a table lies; 0: it is not set."""
        vtable = table - struct.unpack_from("<i", data, table)[0]
        if vtable < 0:
            raise ValueError("a message that points outside")
        (size,) = struct.unpack_from("<H", data, vtable)
        offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0] if 6 + 2 * number <= size else 0
        return table + offset if offset else 0

    try:
        header = field(struct.unpack_from("<I", data)[0], _HEADER_FIELD)
        if not header:
            raise ValueError("a message without a header")
        return field(header + struct.unpack_from("<I", data, header)[0], _COMPRESSION_FIELD) > 0
    except struct.error as error:
        raise ValueError("a message cut short") from error
