"""Clusters of labels, which surrogate rows, label trees and auxiliary vectors share, and training
on them as labels.

Legend: L labels, C clusters.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse as sp
from torch import nn

from unidec.data.csr import ones_at
from unidec.model.pool import TrainingPairs

LABEL_CLUSTER = "label_cluster"  # the model's buffer, int64 [L]: the cluster of each label


def cluster_of_label(model: nn.Module) -> np.ndarray:
    """int64 [L], the cluster of each label."""
    return model.get_buffer(LABEL_CLUSTER).cpu().numpy()


def over_clusters(pairs: TrainingPairs, cluster_L: np.ndarray, num_clusters: int) -> TrainingPairs:
    """The pairs with clusters instead of labels: a cluster is relevant, or filtered, if one of its
    labels is.

    Args:
        cluster_L: int64 [L], the cluster of each label.
    """
    labels = np.arange(len(cluster_L))
    member_LC = ones_at((labels, cluster_L), (len(labels), num_clusters))
    relevance = _any_member(pairs.relevance, member_LC)
    return replace(
        pairs, relevance=relevance, filter_pairs=_any_member(pairs.filter_pairs, member_LC)
    )


def _any_member(matrix: sp.csr_matrix, member_LC: sp.csr_matrix) -> sp.csr_matrix:
    of_clusters = sp.csr_matrix(matrix @ member_LC)
    of_clusters.sort_indices()
    np.minimum(of_clusters.data, 1, out=of_clusters.data)
    return of_clusters
