"""Candidates by a scan of all labels on a GPU, with faiss-gpu.

Legend: L labels, B queries, C candidates, D' width of the searched space.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from unidec.errors import UnidecError
from unidec.retrieval.faiss_library import faiss_module
from unidec.retrieval.label_rows import Vectors

MOST_CANDIDATES = 2048
"""What faiss's GPU indexes return at most."""
_ROWS_AT_ONCE = 1 << 16

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


class GpuScan:
    """All label vectors in float16 on a GPU; its candidates are to be scored on the float32 vectors."""

    def __init__(self, vectors: Vectors, device: int = 0) -> None:
        """
        Args:
            vectors: of L labels; 2 x L x D' bytes of the GPU's memory.
            device: number of the GPU.

        Raises:
            UnidecError: no faiss-gpu, or no GPU.
        """
        faiss = faiss_module()
        if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() <= device:
            raise UnidecError(
                "no search on a GPU: faiss-gpu or the GPU is missing", got=f"GPU {device} asked for",
                fix="pip install 'unidec-xmc[gpu]' in place of [cpu], or search on the processor",
            )  # fmt: skip
        self._resources = faiss.StandardGpuResources()
        settings = faiss.GpuIndexFlatConfig()
        settings.useFloat16, settings.device = True, device
        self._index = faiss.GpuIndexFlatIP(self._resources, vectors.shape[1], settings)
        for start in range(0, vectors.shape[0], _ROWS_AT_ONCE):
            rows = np.arange(start, min(start + _ROWS_AT_ONCE, vectors.shape[0]))
            self._index.add(np.ascontiguousarray(vectors.take(rows)))
        self._lock = threading.Lock()  # faiss's GPU indexes share temporary memory between searches

    def search(self, queries_BD: Floats, num: int) -> tuple[Floats, Labels]:
        """(scores, rows) [B, C], C at most `MOST_CANDIDATES`."""
        with self._lock:
            found: tuple[Floats, Labels] = self._index.search(queries_BD, num)
        return found
