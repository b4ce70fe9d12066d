"""`.npy` files, byte for byte those of `np.save`, written in pieces, and sparse matrices read from them with checks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from unidec.data.storage import REBUILD, load_array
from unidec.errors import ArtifactError


class ArrayFile:
    """An array of one dimension on disk, that grows: `with ArrayFile(path, np.int32) as out: out.add(piece)`.

    Attributes:
        size: values so far.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: npt.DTypeLike) -> None:
        self.dtype, self.size = np.dtype(dtype), 0
        self._file = open(path, "xb")  # noqa: SIM115 (closed on leaving the context)
        self._write_header()

    def add(self, piece: npt.NDArray[Any]) -> None:
        """Append values, cast to the file's type."""
        self._file.write(np.ascontiguousarray(piece, dtype=self.dtype).data)
        self.size += len(piece)

    def _write_header(self) -> None:
        """numpy pads headers so that the first axis can grow in place."""
        descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                self._write_header()


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
