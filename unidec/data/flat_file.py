"""A flat `.npy` written piece by piece: for arrays that need not fit into memory."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


class FlatFile:
    """A one-dimensional array on disk that grows: `with FlatFile(path, np.int32) as out: out.add(piece)`.

    The file is what `numpy.save` writes of the whole.

    Attributes:
        size: entries so far.
    """

    def __init__(self, path: Path, dtype: Any) -> None:
        self.dtype, self.size = np.dtype(dtype), 0
        self._file = open(path, "wb")  # noqa: SIM115 (closed on leaving the context)
        self._begin = self._write_header()

    def add(self, piece: NDArray[Any]) -> None:
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
                if self._write_header() != self._begin:
                    raise AssertionError("numpy pads headers so that the first axis can grow in place")

    def _write_header(self) -> int:
        facts = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self._file, facts)
        return self._file.tell()
