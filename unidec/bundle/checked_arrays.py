"""Reads a bundle's numpy arrays, which may be damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from unidec.data.chunks import blocks
from unidec.data.storage import load_array
from unidec.errors import ArtifactError

FIX = "write the bundle again: unidec index build"
_CHECKED_AT_ONCE = 1 << 22  # numbers


def damaged(what: str, where: Path, got: object = None, expected: object = None) -> ArtifactError:
    """An error about a file of a bundle."""
    return ArtifactError(what, where=where, got=got, expected=expected, fix=FIX)


def read_array(
    where: Path, dtype: Any, shape: tuple[int, ...], verify: bool = True
) -> npt.NDArray[Any]:
    """Memory-map an array; -1 in `shape` means any length.

    Raises:
        ArtifactError: the file is missing, has another dtype or shape, or (with `verify`) is not
        finite.
    """
    array = load_array(where, dtype, ndim=len(shape))
    for length, expected in zip(array.shape, shape, strict=True):
        if expected not in (-1, length):
            raise damaged("the array has another shape", where, array.shape, shape)
    row_size = max(1, array[:1].size)
    step = max(1, _CHECKED_AT_ONCE // row_size)
    for some in blocks(len(array), step) if verify else ():
        if not np.isfinite(array[some]).all():
            raise damaged("the array holds numbers that are not finite", where)
    # a plain view: each access to an np.memmap costs microseconds
    return np.asarray(array)


def csr_arrays(names: tuple[str, ...], matrix: csr_matrix) -> dict[str, npt.NDArray[Any]]:
    """A CSR matrix as arrays by file name: row offsets, columns and, if there is a third name,
    values.
    """
    arrays = (
        matrix.indptr.astype(np.int64),
        matrix.indices.astype(np.int32),
        matrix.data.astype(np.float16),
    )
    return dict(zip(names, arrays, strict=False))


def read_csr(
    folder: Path, names: tuple[str, ...], shape: tuple[int, int], num_entries: int = -1
) -> csr_matrix:
    """Read a float32 CSR matrix from the files of `csr_arrays`; without a values file all entries
    are 1.

    Raises:
        ArtifactError: as `read_array`; also if the arrays do not form a matrix of this shape.
    """
    where, columns, *values = (folder / name for name in names)
    indptr = read_array(where, np.int64, (shape[0] + 1,))
    indices = read_array(columns, np.int32, (num_entries,))
    num_entries = len(indices)
    data = np.ones(num_entries, dtype=np.float32)
    for file in values:
        data = read_array(file, np.float16, (num_entries,)).astype(np.float32)
    if indptr[-1] != num_entries:
        raise damaged(f"row offsets do not fit {columns.name}", where)
    try:
        matrix = csr_matrix((data, indices, indptr), shape=shape)
        matrix.check_format(full_check=True)
    except ValueError as error:
        raise damaged(f"{columns.name} or {where.name} is damaged", columns, error) from error
    return matrix
