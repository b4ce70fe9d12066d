"""Auxiliary vectors: a label's vector in the dual encoder is that of its text plus one learnt for
its cluster of labels (DEXA: Dahiya et al. 2023).

Legend: S labels, C clusters of labels, D width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unidec.methods.label_clusters import LABEL_CLUSTER

AUXILIARY = "auxiliary"


def new_vectors(num_clusters: int, dim: int) -> nn.Parameter:
    """The clusters' vectors [C, D], which start at 0."""
    return nn.Parameter(torch.zeros(num_clusters, dim))


def with_auxiliary(model: nn.Module, label_SD: Tensor, labels_S: Tensor) -> Tensor:
    """The labels' vectors plus the vectors of their clusters, float32 [S, D]."""
    cluster_S = model.get_buffer(LABEL_CLUSTER)[labels_S]
    return label_SD + F.embedding(cluster_S, model.get_parameter(AUXILIARY))
