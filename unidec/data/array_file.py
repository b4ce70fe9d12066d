"""`.npy` files written as a stream: at most a block of rows is in memory, and the hash is known at the end.

The files are numpy's: byte for byte what `np.save` writes of the same values.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 16 << 20


class RowSource(Protocol):
    """Rows that can be had some at a time: an array, a memory map, or what computes them."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> npt.NDArray[Any]: ...


def write_array(path: str | os.PathLike[str], rows: RowSource, dtype: npt.DTypeLike = np.float32) -> str:
    """Write an array of one or more dimensions.

    Args:
        path: a file that is not there yet.
        rows: read block by block, in order, each row once.
        dtype: of the file.

    Returns:
        sha256 (hex) of the bytes as they were meant to be written.

    Raises:
        OSError: no space, no permission.
    """
    kind = np.dtype(dtype)
    digest = hashlib.sha256()
    step = max(1, BLOCK_BYTES // max(1, kind.itemsize * int(np.prod(rows.shape[1:]))))
    with open(path, "xb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": tuple(rows.shape)}
        np.lib.format.write_array_header_1_0(_Hashed(file, digest), header)
        for begin in range(0, rows.shape[0], step):
            block = np.ascontiguousarray(rows[begin : begin + step], dtype=kind)
            if block.size:
                digest.update(block.data.cast("B"))
                file.write(block.data.cast("B"))
    return digest.hexdigest()


class _Hashed:
    """A file whose bytes are hashed as they are written."""

    def __init__(self, file: Any, digest: Any) -> None:
        self._file, self._digest = file, digest

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return int(self._file.write(data))
