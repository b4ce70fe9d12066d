"""Numbers, texts and pairs that may exceed memory: they are written to unnamed temporary files and
memory-mapped. The files vanish when this process ends.

Shape suffix: P pairs of a block.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.sparse import csr_matrix

from unidec.data.chunks import blocks, offsets_of
from unidec.data.storage import storage_error

BLOCK_ROWS = 65_536


@contextlib.contextmanager
def naming_space(path: Path, num_bytes: int) -> Iterator[None]:
    """Turn an OSError for a full disk or quota into an ArtifactError: no space for `path`, which
    needs at least `num_bytes`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise storage_error(path, error, num_bytes) from error


class Numbers:
    """A growing one-dimensional array, stored in a file.

    Args:
        folder: folder of the file; None: the system's folder for temporary files.
    """

    def __init__(self, dtype: npt.DTypeLike, folder: Path | None) -> None:
        self._dtype = np.dtype(dtype)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._few: list[Any] = []  # numbers that are not written yet

    def __del__(self) -> None:
        self._file.close()  # an existing memory map stays valid

    def add(self, values: Any) -> None:
        """Append an array or a list, which is cast to the dtype."""
        self._file.write(np.ascontiguousarray(values, self._dtype).data)

    def extend(self, values: Iterable[Any]) -> None:
        """Append a few Python numbers or tuples; not together with `add`."""
        self._few.extend(values)
        if len(self._few) > BLOCK_ROWS:
            self.add(self._few)
            self._few.clear()

    def array(self) -> np.ndarray:
        """All numbers, read-only; nothing may be added after this call."""
        self.add(self._few)
        return np.frombuffer(_mapped(self._file), self._dtype)


def _mapped(file: IO[bytes]) -> bytes | mmap.mmap:
    file.flush()
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.tell() else b""


def table_on_disk(blocks: Iterable[pa.Table], schema: pa.Schema, folder: Path | None) -> pa.Table:
    """The rows of all blocks as one table."""
    with tempfile.TemporaryFile(dir=folder) as file:
        with pa.ipc.new_stream(pa.PythonFile(file, "w"), schema) as writer:
            for block in blocks:
                writer.write_table(block)
        return pa.ipc.open_stream(pa.py_buffer(_mapped(file))).read_all()


def csr_on_disk(
    blocks: Iterable[pa.RecordBatch],
    shape: tuple[int, int],
    dtype: npt.DTypeLike,
    folder: Path | None,
) -> csr_matrix:
    """A CSR matrix from blocks of pairs (row, column, value) that are sorted by row and column. Of
    repeated pairs, only the first is kept.
    """
    columns = Numbers(np.int32, folder)
    values = Numbers(dtype, folder)
    count_N = np.zeros(shape[0], dtype=np.int64)
    last_pair = -1
    for block in blocks:
        row_P, column_P, value_P = (column.to_numpy() for column in block.columns)
        pair_P = row_P * np.int64(shape[1]) + column_P
        is_new_P = np.diff(pair_P, prepend=last_pair) > 0
        columns.add(column_P[is_new_P])
        values.add(value_P[is_new_P])
        rows, counts = np.unique(row_P[is_new_P], return_counts=True)
        count_N[rows] += counts
        last_pair = pair_P.max(initial=last_pair)
    return _csr(columns, values, count_N, shape[1])


def _csr(columns: Numbers, values: Numbers, count_N: np.ndarray, width: int) -> csr_matrix:
    """A CSR matrix from its entries by row and the number of entries of each row."""
    ends = offsets_of(count_N)
    entries = (values.array(), columns.array(), ends)
    matrix = csr_matrix(entries, shape=(len(count_N), width), copy=False)
    matrix.has_sorted_indices = matrix.has_canonical_format = True
    return matrix


def take_texts(table: pa.Table, rows: np.ndarray, folder: Path | None) -> pa.Table:
    """These rows of a table."""
    blocks = (table.take(pa.array(block)) for block in _blocks(rows))
    return table_on_disk(blocks, table.schema, folder)


def take_pairs(matrix: csr_matrix, rows: np.ndarray, folder: Path | None) -> csr_matrix:
    """These rows of a matrix with sorted indices."""
    columns = Numbers(np.int32, folder)
    values = Numbers(matrix.dtype, folder)
    for block in _blocks(rows):
        part = matrix[block]
        columns.add(part.indices)
        values.add(part.data)
    num_entries = np.diff(matrix.indptr)[rows].astype(np.int64)
    return _csr(columns, values, num_entries, matrix.shape[1])


def _blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    for some in blocks(len(rows), BLOCK_ROWS):
        yield np.asarray(rows[some])
