"""`.npy` files, byte for byte those of `np.save`, written in pieces, and sparse matrices read from them with checks."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from unidec.data.storage import REBUILD, load_array
from unidec.errors import ArtifactError

BLOCK_BYTES = 16 << 20


class RowSource(Protocol):
    """Rows that can be had some at a time: an array, a memory map, or what computes them."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> npt.NDArray[Any]: ...


def write_array(path: str | os.PathLike[str], rows: RowSource, dtype: npt.DTypeLike = np.float32) -> str:
    """Write an array of one or more dimensions, at most a block of rows in memory.

    Args:
        path: a file that does not exist yet.
        rows: read block by block, in order, each row once.

    Returns:
        sha256 (hex) of the bytes as they were meant to be written.
    """
    kind = np.dtype(dtype)
    digest = hashlib.sha256()
    step = max(1, BLOCK_BYTES // max(1, kind.itemsize * int(np.prod(rows.shape[1:]))))
    with open(path, "xb") as file:
        _write_header(_Hashed(file, digest), kind, tuple(rows.shape))
        for begin in range(0, rows.shape[0], step):
            block = np.ascontiguousarray(rows[begin : begin + step], dtype=kind)
            if block.size:
                digest.update(block.data.cast("B"))
                file.write(block.data.cast("B"))
    return digest.hexdigest()


class FlatFile:
    """A one-dimensional array on disk that grows: `with FlatFile(path, np.int32) as out: out.add(piece)`.

    Attributes:
        size: entries so far.
    """

    def __init__(self, path: Path, dtype: Any) -> None:
        self.dtype, self.size = np.dtype(dtype), 0
        self._file = open(path, "wb")  # noqa: SIM115 (closed on leaving the context)
        _write_header(self._file, self.dtype, (0,))
        self._begin = self._file.tell()

    def add(self, piece: npt.NDArray[Any]) -> None:
        """Append a piece, cast to the file's type."""
        self._file.write(np.ascontiguousarray(piece, dtype=self.dtype).data)
        self.size += len(piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                _write_header(self._file, self.dtype, (self.size,))
                if self._file.tell() != self._begin:
                    raise AssertionError("numpy pads headers so that the first axis can grow in place")


def load_csr(root: Path, prefix: str, shape: tuple[int, int], dtype: Any, check: bool) -> csr_matrix:
    """`{prefix}indptr.npy` (int64), `{prefix}indices.npy` (int32) and, unless dtype is bool, `{prefix}data.npy` as CSR.

    Args:
        check: also read them to check every index; else only what costs nothing.

    Raises:
        ArtifactError: arrays that do not fit together, or that do not fit the shape.
    """
    starts, columns = root / f"{prefix}indptr.npy", root / f"{prefix}indices.npy"
    indptr, indices = load_array(starts, np.int64), load_array(columns, np.int32)
    is_bool = np.dtype(dtype) == bool
    data = np.ones(len(indices), dtype=bool) if is_bool else load_array(root / f"{prefix}data.npy", dtype)
    where, got, expected = None, "", ""
    if len(indptr) != shape[0] + 1 or indptr[0] != 0 or (check and (np.diff(indptr) < 0).any()):
        where, got, expected = starts, f"{len(indptr)} row starts", f"{shape[0] + 1}, ascending from 0"
    elif not indptr[-1] == len(indices) == len(data):
        where, got, expected = starts, f"{len(indices)} columns, {len(data)} values", f"{int(indptr[-1])} of each"
    elif check and len(indices) and not (indices.min() >= 0 and indices.max() < shape[1]):
        where, got, expected = columns, f"column {indices.max()}", f"0 to {shape[1] - 1}"
    if where is not None:
        what = f"{prefix.replace('_', ' ')}pairs that do not fit together"
        raise ArtifactError(what, where=str(where), got=got, expected=expected, fix=REBUILD)
    matrix = csr_matrix((data, indices, indptr), shape=shape, copy=False)
    matrix.has_sorted_indices = matrix.has_canonical_format = True
    return matrix


def _write_header(file: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


class _Hashed:
    """A file whose bytes are hashed as they are written."""

    def __init__(self, file: Any, digest: Any) -> None:
        self._file, self._digest = file, digest

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return int(self._file.write(data))
