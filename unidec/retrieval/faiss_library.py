"""faiss, imported when it is needed, and how many threads it takes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from unidec.errors import UnidecError

_PRODUCT_FROM = 4  # queries: from so many on a flat search is one matrix product, a sixth of their scans' time


def faiss_module() -> Any:
    """faiss, imported on first use: it comes with one of two extras, and data and training stages do not need it."""
    faiss = sys.modules.get("faiss")
    if faiss is None or not hasattr(faiss, "IndexHNSWFlat"):
        faiss = _imported()
    faiss.cvar.distance_compute_blas_threshold = _PRODUCT_FROM  # of 1.15: 128,000, that is never
    return faiss


def _imported() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise UnidecError(
            f"faiss cannot be imported: {error}",
            fix="install one of the extras, not both: pip install 'unidec-xmc[cpu]' or 'unidec-xmc[gpu]'",
        ) from error
    if not hasattr(faiss, "IndexHNSWFlat"):
        raise UnidecError(
            "the installed faiss is broken (faiss-cpu and faiss-gpu over each other, or a folder called faiss)",
            where=str(getattr(faiss, "__file__", None)),
            fix="pip uninstall faiss-cpu faiss-gpu, then install one of them",
        )
    return faiss


@contextlib.contextmanager
def faiss_threads(threads: int) -> Iterator[None]:
    """So many threads for faiss calls of this thread; 0: as many as it would take."""
    if not threads:
        yield
        return
    faiss = faiss_module()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
