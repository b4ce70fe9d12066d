"""A tree of label clusters with a classifier at each level, as in CascadeXML (Kharbanda et al.
2022); with one level it is the meta-classifier of SyncXML (Kharbanda et al. 2023, InceptionXML).

Legend: B queries, C clusters of a level, K clusters of a level that a query keeps, P positive
clusters of the queries, N queries of the data set, n training queries, L labels, M labels of the
largest cluster, W width of the encoder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unidec.data.chunks import blocks
from unidec.data.tokens import places
from unidec.methods.label_clusters import cluster_of_label
from unidec.model.additions import Drawn, HeadLoss, Shortlist
from unidec.model.batch import Prepared
from unidec.model.dense import zero_linear
from unidec.model.dropout import Dropout
from unidec.model.pairs import MASKED, PoolTargets
from unidec.model.pool import PoolSampler
from unidec.model.unidec import UniDEC

TREE = "tree"
_QUERIES_AT_ONCE = 4096


class LabelTree(nn.Module):
    """Classifiers of nested clusters, coarse to fine. Level t computes h_t = x + gelu(A_t x + a_t),
    with A_t and a_t that start at 0, and scores its clusters by W_t h_t + b_t. If the next level
    has r times as many clusters, the children of cluster c are its clusters r c to r c + r - 1.

    Args:
        counts: C of each level, powers of two. width: W. dropout: applied to h_t.
    """

    def __init__(self, counts: Sequence[int], width: int, dropout: float):
        super().__init__()
        self.counts = list(counts)
        self.layers = nn.ModuleList(zero_linear(width) for _ in counts)
        self.classifiers = nn.ModuleList(nn.Linear(width, count) for count in counts)
        self.dropout = Dropout(dropout)
        for classifier in self.classifiers:
            nn.init.xavier_uniform_(classifier.get_parameter("weight"))
            nn.init.zeros_(classifier.get_parameter("bias"))

    def forward(
        self, x_BW: Tensor, num_kept: int = 0, positives: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> list[Tensor]:
        """Scores of each level's clusters before the temperature, float32 [B, C].

        Args:
            num_kept: K; clusters whose parent is not among the K highest scores of its level get
                the score `MASKED`. At least min(K, C) clusters of each level are not masked. 0: no
                cluster is masked.
            positives: for each level rows and clusters, int64 [P] each, that are kept whatever
                their scores.
        """
        scores: list[Tensor] = []
        kept_BC: Tensor | None = None
        levels = zip(self.layers, self.classifiers, strict=True)
        for level, (layer, classifier) in enumerate(levels):
            hidden_BW = x_BW + F.gelu(layer(x_BW))
            score_BC = classifier(self.dropout(hidden_BW)).float()
            num_clusters = score_BC.shape[1]
            if kept_BC is not None:
                num_children = num_clusters // kept_BC.shape[1]
                parent_kept_BC = kept_BC.repeat_interleave(num_children, dim=1)
                score_BC = torch.where(parent_kept_BC, score_BC, MASKED)
            scores.append(score_BC)
            if num_kept:
                best_BK = score_BC.detach().topk(min(num_kept, num_clusters), dim=1).indices
                kept_BC = torch.zeros_like(score_BC, dtype=torch.bool)
                kept_BC.scatter_(1, best_BK, True)
                if positives:
                    # created on the device: the host would wait for a copy
                    kept = kept_BC.new_ones(())
                    kept_BC.index_put_(positives[level], kept)
        return scores


@dataclass(frozen=True, kw_only=True)
class TreeLoss:
    """The losses of a label tree, summed over its levels: the classifier's loss, query to label, on
    the clusters whose parents are kept (CascadeXML, a loss for each resolution). Only training uses
    the tree; it is not exported.

    Attributes:
        model: with a label tree and clusters of labels.
        levels: for each level a sampler of the pairs of queries and clusters.
        num_kept: K of each level; 0: all.
        soft: whether relevances are soft targets.
        autocast: returns the context in which the tree computes.
    """

    model: UniDEC
    levels: Sequence[PoolSampler]
    num_kept: int
    soft: bool
    autocast: Callable[[], AbstractContextManager[Any]]
    name: ClassVar = "loss_levels"

    @property
    def tree(self) -> LabelTree:
        """The model's label tree."""
        tree = self.model.get_submodule(TREE)
        assert isinstance(tree, LabelTree)
        return tree

    def draw(self, drawn: Drawn) -> list[PoolTargets]:
        """For each level the pairs of queries and clusters."""
        targets = []
        for level in self.levels:
            pool = level.batch(
                drawn.pool.rows_B, epoch=drawn.epoch, step=drawn.step, up_to=level.num_labels
            )
            targets.append(PoolTargets.from_batch(pool, drawn.device, soft=self.soft))
        return targets

    def loss(self, query_BW: Tensor, batch: Prepared, head_loss: HeadLoss) -> Tensor:
        levels: list[PoolTargets] = batch.added[self.name]
        positives = [(level.row_P, level.col_P) for level in levels]
        with self.autocast():
            scores = self.tree(query_BW, self.num_kept, positives)
        losses = map(head_loss, scores, levels)
        return torch.stack(list(losses)).sum()

    @torch.no_grad()
    def shortlist(
        self, encode: Callable[[np.ndarray], Tensor], rows_n: np.ndarray, relevance: sp.csr_matrix
    ) -> Shortlist:
        """The classifier's shortlist of each training query (CascadeXML, SyncXML): the labels of
        the K clusters of the finest level that the tree ranks highest, among clusters whose parents
        it keeps; those of the best cluster first. It may contain positives. Figures: `queries`,
        `positives_found` (share of the queries' positives in the clusters), `seconds`.
        """
        begin_time = time.perf_counter()
        tree = self.tree
        num_clusters = tree.counts[-1]
        num_kept = min(self.num_kept, num_clusters)
        cluster_L = cluster_of_label(self.model)
        member_CM = members(cluster_L, num_clusters)
        shape = (relevance.shape[0], num_kept * member_CM.shape[1])
        shortlist = np.full(shape, -1, dtype=np.int32)
        num_positives = 0
        num_found = 0
        was_training = tree.training
        for block in blocks(len(rows_n), _QUERIES_AT_ONCE):
            some = rows_n[block]
            x_BW = encode(some)  # may set its model, and so the tree, to training mode again
            tree.eval()
            finest_BC = tree(x_BW, num_kept)[-1]
            cluster_BK = finest_BC.topk(num_kept, dim=1).indices.cpu().numpy()
            shortlist[some] = member_CM[cluster_BK].reshape(len(some), -1)
            positive = relevance[some].tocoo()
            cluster_P1 = cluster_L[positive.col][:, None]
            found_PK = cluster_BK[positive.row] == cluster_P1
            num_positives += positive.nnz
            num_found += int(found_PK.sum())
        tree.train(was_training)
        return shortlist, {
            "queries": len(rows_n),
            "positives_found": num_found / max(num_positives, 1),
            "seconds": time.perf_counter() - begin_time,
        }


def members(cluster_L: np.ndarray, num_clusters: int) -> np.ndarray:
    """The labels of each cluster, ascending, int32 [C, M], padded with -1."""
    size_C = np.bincount(cluster_L, minlength=num_clusters)
    order_L = np.argsort(cluster_L, kind="stable")
    member_CM = np.full((num_clusters, size_C.max()), -1, dtype=np.int32)
    member_CM[cluster_L[order_L], places(size_C)] = order_L
    return member_CM
