"""Inner loops that are compiled with numba at their first call, and the matrices they read.

The machine code is stored beside the source or in the user's cache folder (`NUMBA_CACHE_DIR`), so
that only the first process compiles.

Legend: R rows, N entries."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

Array = NDArray[Any]
NOT_REACHED = np.float32(-np.inf)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function; it releases the interpreter's lock while it runs."""
    compile_it = partial(numba.njit, nogil=True, error_model="numpy", **options)
    try:
        return compile_it(cache=True)(function)
    except RuntimeError:  # no folder can be written: each process compiles
        return compile_it()(function)


# for sums of many products: they are computed by vector instructions, in another order
compiled_reordered = partial(compiled, fastmath={"reassoc", "contract", "nsz"})
# for the innermost calls: a call of its own takes several times as long
compiled_inline = partial(compiled, inline="always")


class Csr(NamedTuple):
    """A CSR matrix as compiled code reads it.

    Attributes:
        begin: int64 [R + 1], place of each row's first entry. value: float32 [N].
        column: uint32 [N]; compiled code need not check whether it is negative.
    """

    begin: NDArray[np.int64]
    column: NDArray[np.uint32]
    value: NDArray[np.float32]

    @classmethod
    def of(cls, matrix: csr_matrix) -> Csr:
        """The same entries; arrays are copied only if their types differ."""
        return cls(
            matrix.indptr.astype(np.int64, copy=False),
            matrix.indices.astype(np.uint32),
            matrix.data.astype(np.float32, copy=False),
        )


class Sums(NamedTuple):
    """Sums of columns to which few entries contribute.

    Attributes:
        total: float32, the sum of each column that was reached; `NOT_REACHED` for others, and for
            all between two uses.
        reached: int64, the columns that were reached, in the order in which they were.
    """

    total: NDArray[np.float32]
    reached: NDArray[np.int64]


class Workspace(threading.local):
    """Each thread's own `Sums` of a number of columns, made at its first use."""

    def __init__(self, num_columns: int) -> None:
        total = np.full(num_columns, NOT_REACHED)
        self.sums = Sums(total, np.zeros(num_columns, dtype=np.int64))


@compiled_inline
def add(sums: Sums, num_reached: int, column: int, amount: float) -> Any:
    """Add to the sum of a column; returns the number of columns reached."""
    total = sums.total[column]
    if total == NOT_REACHED:
        sums.reached[num_reached] = column
        sums.total[column] = amount
        return num_reached + 1
    sums.total[column] = total + amount
    return num_reached
