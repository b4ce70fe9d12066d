"""faiss, imported where something is searched: it comes with one of two extras, and most stages do not need it."""

from __future__ import annotations

import sys
from typing import Any

from unidec.errors import UnidecError

_BLAS_FROM = 4  # queries: from so many on a flat search is one matrix product, a sixth of their scans' time


def faiss_module() -> Any:
    """The module.

    Raises:
        UnidecError: it is not installed, or broken.
    """
    faiss: Any = sys.modules.get("faiss")
    if faiss is None:
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
    faiss.cvar.distance_compute_blas_threshold = _BLAS_FROM  # of 1.15: 128,000, that is never
    return faiss
