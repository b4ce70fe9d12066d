"""Numbers, texts and pairs of any number that are written once and then read: in memory while they
are few, then in files without a name, which are mapped and gone when this process ends.

Shape suffix: P pairs of a block.
"""

from __future__ import annotations

import mmap
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.sparse import csr_matrix

from unidec.data.storage import storage_error

MOST_IN_MEMORY = 1 << 20  # bytes of one array or table
BLOCK_ROWS = 65_536
_CODES = {"int32": "i", "int64": "q", "float64": "d", "float32": "f", "bool": "b"}
Triples = Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Blocks of pairs: row and column, int [P], and value [P]; sorted by row and column."""


class Spool:
    """Bytes in the order in which they are written.

    Args:
        folder: of the file; None: the system's folder for temporary files.
    """

    closed = False  # as Arrow asks of a file

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._file = tempfile.SpooledTemporaryFile(MOST_IN_MEMORY, dir=folder)  # noqa: SIM115
        self._size = 0

    def __del__(self) -> None:
        self._file.close()  # a mapping stays

    def write(self, data: Any) -> int:
        """Append bytes. Raises ArtifactError: no space, with the bytes needed so far."""
        self._size += memoryview(data).nbytes
        try:
            return self._file.write(data)
        except OSError as error:
            raise self._error(error) from error

    def flush(self) -> None:
        """For Arrow."""

    def content(self) -> bytes | mmap.mmap:
        """All bytes; nothing may be written after that."""
        if self._size <= MOST_IN_MEMORY:
            self._file.seek(0)
            return self._file.read()
        try:
            self._file.flush()
        except OSError as error:
            raise self._error(error) from error
        return mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def _error(self, error: OSError) -> Exception:
        folder = self._folder or Path(tempfile.gettempdir())
        return storage_error(folder / "temporary file", error, self._size)


class Numbers:
    """A one-dimensional array that grows at its end."""

    def __init__(self, dtype: npt.DTypeLike, folder: Path | None = None) -> None:
        self._dtype = np.dtype(dtype)
        self._spool = Spool(folder)
        self._few = array(_CODES[self._dtype.name])  # not written yet

    def add(self, values: npt.ArrayLike) -> None:
        """Append an array, which is cast."""
        self._spool.write(np.ascontiguousarray(values, self._dtype).data)

    def extend(self, values: Iterable[float]) -> None:
        """Append a few numbers; not together with `add`."""
        self._few.extend(values)
        if len(self._few) > BLOCK_ROWS:
            self.add(self._few)
            del self._few[:]

    def array(self) -> np.ndarray:
        """All numbers, read-only; nothing may be added after that."""
        if self._few:
            self.add(self._few)
        return np.frombuffer(self._spool.content(), self._dtype)


def table_on_disk(
    blocks: Iterable[pa.Table], schema: pa.Schema, folder: Path | None = None
) -> pa.Table:
    """The rows of all blocks as one table."""
    spool = Spool(folder)
    with pa.ipc.new_stream(pa.PythonFile(spool, "w"), schema) as writer:
        for block in blocks:
            writer.write_table(block)
    return pa.ipc.open_stream(pa.py_buffer(spool.content())).read_all()


def csr_on_disk(
    triples: Triples, shape: tuple[int, int], dtype: npt.DTypeLike, folder: Path | None = None
) -> csr_matrix:
    """A CSR matrix of sorted pairs, each of which occurs once."""
    ends = Numbers(np.int64, folder)
    columns = Numbers(np.int32, folder)
    values = Numbers(dtype, folder)
    ends.add([0])
    row = 0  # all rows before it are complete
    done = 0
    for row_P, column_P, value_P in triples:
        if len(row_P):
            last = int(row_P[-1])
            ends.add(done + np.searchsorted(row_P, np.arange(row, last), side="right"))
            row = last
        done += len(row_P)
        columns.add(column_P)
        values.add(value_P)
    for first in range(row, shape[0], BLOCK_ROWS):
        ends.add(np.full(min(BLOCK_ROWS, shape[0] - first), done))
    matrix = csr_matrix((values.array(), columns.array(), ends.array()), shape=shape, copy=False)
    matrix.has_sorted_indices = True
    matrix.has_canonical_format = True
    return matrix


def take_texts(table: pa.Table, rows: np.ndarray, folder: Path | None = None) -> pa.Table:
    """These rows of a table."""
    blocks = (table.take(pa.array(block)) for block in _blocks(rows))
    return table_on_disk(blocks, table.schema, folder)


def take_pairs(matrix: csr_matrix, rows: np.ndarray, folder: Path | None = None) -> csr_matrix:
    """These rows of a matrix."""
    shape = (len(rows), matrix.shape[1])
    return csr_on_disk(_pairs_of(matrix, rows), shape, matrix.dtype, folder)


def _pairs_of(matrix: csr_matrix, rows: np.ndarray) -> Triples:
    first = 0
    for block in _blocks(rows):
        part = csr_matrix(matrix[block])
        part.sort_indices()
        pairs = part.tocoo()
        yield pairs.row.astype(np.int64) + first, pairs.col, pairs.data
        first += len(block)


def _blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), BLOCK_ROWS):
        yield np.asarray(rows[start : start + BLOCK_ROWS])
