"""A tree of label clusters with a classifier at each level (CascadeXML: Kharbanda et al. 2022; with one level the
meta-classifier of SyncXML: Kharbanda et al. 2023, InceptionXML).

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
    """2^depth with the smallest depth that leaves at most `size` rows in a cluster (as `balanced_clusters` cuts)."""
    return 2 ** max(-(-num_rows // size) - 1, 0).bit_length()


class LabelTree(nn.Module):
    """Classifiers of nested clusters, coarse to fine: level t reads h_t = x + gelu(A_t x + a_t), A_t and a_t 0 at
    first, and scores its clusters by W_t h_t + b_t. Cluster c of a level has the clusters r c to r c + r - 1 of the
    next one, which has r times as many.

    Args:
        counts: C of each level, powers of two. width: W. dropout: of h_t.
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
            num_kept: K; a cluster whose parent is not among the K of the highest scores of its level has the score
                `MASKED` (at least K of a level have another one, where it has so many); 0: all clusters have scores.
            positives: rows and clusters, int64 [P] each, of each level: kept whatever their scores.
        """
        scores: list[Tensor] = []
        kept_BC: Tensor | None = None
        for level, (layer, classifier) in enumerate(zip(self.layers, self.classifiers, strict=True)):
            score_BC = classifier(self.dropout(x_BW + F.gelu(layer(x_BW)))).float()
            if kept_BC is not None:
                seen_BC = kept_BC.repeat_interleave(score_BC.shape[1] // kept_BC.shape[1], dim=1)
                score_BC = torch.where(seen_BC, score_BC, MASKED)
            scores.append(score_BC)
            if num_kept:
                best_BK = score_BC.detach().topk(min(num_kept, score_BC.shape[1]), dim=1).indices
                kept_BC = torch.zeros_like(score_BC, dtype=torch.bool).scatter_(1, best_BK, True)
                if positives:  # the value is filled in on the device: a copy would wait for it
                    kept_BC.index_put_(positives[level], torch.ones((), dtype=torch.bool, device=x_BW.device))
        return scores
