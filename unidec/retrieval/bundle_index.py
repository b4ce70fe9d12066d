"""The search index within a bundle's folder.

    index.faiss        the index as faiss writes it
    index_rows.npy     int64 [nodes]: the label row of each node of a graph, -1 where the label left; only where nodes
                       are not rows, since labels changed (`LabelIndex.changed`)

Legend: L labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from unidec.data.storage import load_array
from unidec.errors import ArtifactError
from unidec.retrieval.bundle_info import BundleInfo
from unidec.retrieval.index import IndexOptions, LabelIndex
from unidec.retrieval.index_kinds import GRAPHS
from unidec.retrieval.label_rows import LabelRows

INDEX, NODES = "index.faiss", "index_rows.npy"
_FIX = "write the bundle again: unidec index build"


def write_index(root: Path, index: LabelIndex) -> None:
    """The files of the index.

    Raises:
        ArtifactError: they cannot be written.
    """
    index.save(root / INDEX)
    if index.nodes is not None:
        np.save(root / NODES, index.nodes, allow_pickle=False)


def read_index(root: Path, info: BundleInfo, vectors: Mapping[str, npt.NDArray[np.float32]]) -> LabelIndex:
    """The index of a bundle, mapped into memory, checked against bundle.json.

    Args:
        vectors: the arrays under vectors/, on which a compressed index scores its candidates.

    Raises:
        ArtifactError: a file is missing, damaged, or does not fit.
    """
    options = info.index_options or IndexOptions(search=info.index_search)
    rows = LabelRows(vectors, info.space, info.clf_normalize)
    nodes = _read_nodes(root, info)
    return LabelIndex.load(root / INDEX, info.num_labels, info.width, info.index_kind, options, rows, nodes)


def _read_nodes(root: Path, info: BundleInfo) -> npt.NDArray[np.int64] | None:
    where, wanted = root / NODES, info.index_nodes
    if (wanted is not None) != where.is_file() or (wanted is not None and info.index_kind not in GRAPHS):
        raise ArtifactError(
            "a graph's rows and bundle.json differ", where=str(where), got=f"{wanted} nodes of {info.index_kind}",
            expected="a file of rows where bundle.json says so, for a graph", fix=_FIX,
        )  # fmt: skip
    if wanted is None:
        return None
    nodes = np.array(load_array(where, np.int64, ndim=1, mmap=True))
    alive = nodes[nodes >= 0]
    sound = len(nodes) == wanted and len(alive) == info.num_labels and nodes.min(initial=0) >= -1
    if not sound or not np.array_equal(np.sort(alive), np.arange(info.num_labels)):
        raise ArtifactError(
            "rows of a graph that are not the bundle's labels", where=str(where), got=f"{len(nodes)} nodes",
            expected=f"{wanted}, and each of {info.num_labels} labels once", fix=_FIX,
        )  # fmt: skip
    return nodes
