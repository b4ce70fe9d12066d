"""A tree of label clusters with a classifier at each level, as in CascadeXML (Kharbanda et al. 2022); with one level it
is the meta-classifier of SyncXML (Kharbanda et al. 2023, InceptionXML).

Legend: B queries, C clusters of a level, K clusters of a level that a query keeps, P positive clusters of the queries,
W width of the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unidec.model.pairs import MASKED


def num_clusters(num_rows: int, size: int) -> int:
    """The number of clusters that `balanced_clusters` returns: the smallest power of two with which a cluster has at
    most `size` rows."""
    return 2 ** max(-(-num_rows // size) - 1, 0).bit_length()


class LabelTree(nn.Module):
    """Classifiers of nested clusters, coarse to fine. Level t computes h_t = x + gelu(A_t x + a_t), with A_t and a_t
    that start at 0, and scores its clusters by W_t h_t + b_t. If the next level has r times as many clusters, the
    children of cluster c are its clusters r c to r c + r - 1.

    Args:
        counts: C of each level, powers of two. width: W. dropout: applied to h_t.
    """

    def __init__(self, counts: Sequence[int], width: int, dropout: float):
        super().__init__()
        self.counts = list(counts)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in counts)
        self.classifiers = nn.ModuleList(nn.Linear(width, count) for count in counts)
        self.dropout = nn.Dropout(dropout)
        for layer, classifier in zip(self.layers, self.classifiers, strict=True):
            nn.init.zeros_(layer.get_parameter("weight"))
            nn.init.xavier_uniform_(classifier.get_parameter("weight"))
            for part in (layer, classifier):
                nn.init.zeros_(part.get_parameter("bias"))

    def forward(self, x_BW: Tensor, num_kept: int = 0, positives: Sequence[tuple[Tensor, Tensor]] = ()) -> list[Tensor]:
        """Scores of each level's clusters before the temperature, float32 [B, C].

        Args:
            num_kept: K; clusters whose parent is not among the K highest scores of its level get the score `MASKED`. At
                least min(K, C) clusters of each level are not masked. 0: no cluster is masked.
            positives: for each level rows and clusters, int64 [P] each, that are kept whatever their scores.
        """
        scores: list[Tensor] = []
        kept_BC: Tensor | None = None
        for level, (layer, classifier) in enumerate(zip(self.layers, self.classifiers, strict=True)):
            score_BC = classifier(self.dropout(x_BW + F.gelu(layer(x_BW)))).float()
            if kept_BC is not None:
                parent_kept_BC = kept_BC.repeat_interleave(score_BC.shape[1] // kept_BC.shape[1], dim=1)
                score_BC = torch.where(parent_kept_BC, score_BC, MASKED)
            scores.append(score_BC)
            if num_kept:
                best_BK = score_BC.detach().topk(min(num_kept, score_BC.shape[1]), dim=1).indices
                kept_BC = torch.zeros_like(score_BC, dtype=torch.bool).scatter_(1, best_BK, True)
                if positives:  # the value is created on the device: the host would wait for a copy
                    kept_BC.index_put_(positives[level], torch.ones((), dtype=torch.bool, device=x_BW.device))
        return scores
