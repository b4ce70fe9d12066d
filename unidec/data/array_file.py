"""Writes `.npy` files in pieces, byte for byte like `np.save`; reads and checks sparse matrices
stored in such files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from unidec.data.storage import REBUILD, load_array
from unidec.errors import ArtifactError


@contextlib.contextmanager
def growing_array(
    path: str | os.PathLike[str], dtype: npt.DTypeLike
) -> Iterator[Callable[[npt.NDArray[Any]], None]]:
    """Write a one-dimensional array in pieces, which are cast to `dtype`: `with growing_array(path,
    np.int32) as add: add(piece)`.
    """
    size = 0

    def write_header() -> None:
        """Write the header. numpy pads it, so that a larger size can overwrite it later."""
        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
            "fortran_order": False,
            "shape": (size,),
        }
        np.lib.format.write_array_header_1_0(file, header)

    def add(piece: npt.NDArray[Any]) -> None:
        nonlocal size
        file.write(np.ascontiguousarray(piece, dtype=dtype).data)
        size += len(piece)

    with open(path, "xb") as file:
        write_header()
        yield add
        file.seek(0)
        write_header()


def load_csr(
    root: Path, prefix: str, shape: tuple[int, int], dtype: Any, check: bool
) -> csr_matrix:
    """CSR matrix from `{prefix}indptr.npy` (int64), `{prefix}indices.npy` (int32) and
    `{prefix}data.npy`.

    Args:
        dtype: dtype of the values; bool: there is no data.npy, and all values are True.
        check: also check every index, which reads the whole arrays; False: check only their
        lengths.

    Raises:
        ArtifactError: an unreadable array, or arrays that do not match each other or the shape.
    """
    indptr = load_array(root / f"{prefix}indptr.npy", np.int64)
    indices = load_array(root / f"{prefix}indices.npy", np.int32)
    if np.dtype(dtype) == bool:
        data = np.ones(len(indices), dtype=bool)
    else:
        data = load_array(root / f"{prefix}data.npy", dtype)
    try:
        matrix = csr_matrix((data, indices, indptr), shape=shape, copy=False)
        matrix.check_format(full_check=check)
        falls = check and np.diff(indptr).min(initial=0) < 0
        if falls or indptr[-1] != len(indices):
            raise ValueError("the row starts do not ascend to the number of columns")
    except ValueError as error:
        raise ArtifactError(
            f"the arrays of the {prefix.replace('_', ' ')}pairs do not match",
            where=root,
            got=error,
            fix=REBUILD,
        ) from error
    matrix.has_sorted_indices = matrix.has_canonical_format = True
    return matrix


def write_csr(folder: Path, prefix: str, blocks: Iterable[csr_matrix], dtype: Any) -> int:
    """Write a CSR matrix for `load_csr` from blocks of its rows, whose indices are sorted in place;
    returns the number of stored entries.
    """
    with contextlib.ExitStack() as files:

        def new_file(part: str, kind: npt.DTypeLike) -> Callable[[npt.NDArray[Any]], None]:
            return files.enter_context(growing_array(folder / f"{prefix}{part}.npy", kind))

        add_ends = new_file("indptr", np.int64)
        add_columns = new_file("indices", np.int32)
        add_values = new_file("data", dtype) if np.dtype(dtype) != bool else len
        add_ends(np.zeros(1))
        total = 0
        for block in blocks:
            block.sort_indices()
            add_ends(block.indptr[1:].astype(np.int64) + total)
            add_columns(block.indices)
            add_values(block.data)
            total += block.nnz
    return total


def row_blocks(
    indptr: np.ndarray, most: int = 1 << 20, most_rows: int = 1 << 18
) -> Iterator[tuple[int, int]]:
    """First and last row (exclusive) of consecutive blocks of a CSR matrix, each with at most
    `most` entries (a single row may have more) and `most_rows` rows; at least one block.
    """
    start = 0
    last = len(indptr) - 1
    while True:
        end = int(np.searchsorted(indptr, indptr[start] + most, side="right")) - 1
        end = min(max(end, start + 1), start + most_rows, last)
        yield start, end
        start = end
        if start >= last:
            return
