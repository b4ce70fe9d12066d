"""Imports faiss only when a search needs it: it comes with one of two extras, and most stages do
not use it.
"""

from __future__ import annotations

import sys
from typing import Any

from unidec.errors import UnidecError

# number of queries from which a flat search is one matrix product, six times as fast as scans
_BLAS_FROM = 4


def faiss_module() -> Any:
    """The module `faiss`.

    Raises:
        UnidecError: faiss is not installed, or the installation is broken.
    """
    faiss: Any = sys.modules.get("faiss")
    if faiss is None:
        try:
            import faiss
        except ImportError as error:
            raise UnidecError(
                f"faiss cannot be imported: {error}",
                fix=(
                    "install one of the extras, not both: pip install 'unidec-xmc[cpu]' or "
                    "'unidec-xmc[gpu]'"
                ),
            ) from error
    if not hasattr(faiss, "IndexHNSWFlat"):
        raise UnidecError(
            (
                "the installed faiss is broken (both faiss-cpu and faiss-gpu are installed, or a "
                "folder is called faiss)"
            ),
            where=getattr(faiss, "__file__", None),
            fix="pip uninstall faiss-cpu faiss-gpu, then install one of them",
        )
    # faiss 1.15 sets 128,000, which no search here reaches
    faiss.cvar.distance_compute_blas_threshold = _BLAS_FROM
    return faiss
