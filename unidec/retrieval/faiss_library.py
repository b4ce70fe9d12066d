"""faiss, imported when it is needed, and how many threads it takes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from unidec.errors import UnidecError


def faiss_module() -> Any:
    """faiss, imported on first use: it comes with one of two extras, and data and training stages do not need it."""
    if (loaded := sys.modules.get("faiss")) is not None and hasattr(loaded, "IndexHNSWFlat"):
        return loaded
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
