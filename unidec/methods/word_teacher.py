"""A teacher of words: on each step's pool both heads also learn how words alone rank the labels of
a training query.

The ranking is that of the word network of a fusion (`unidec.ranking.fusion_fit`): votes of training
queries with common words, and words of the labels. It treats the query itself as absent, so it
reflects the other training data only. Soft targets from an oracle with more input than the model
follow MOGIC (ICML 2025); the loss is that of Hinton et al. 2015, section 2, at temperature 1.

Legend: B queries of a step, S labels that a head scores, n training queries, L labels, P pairs of a
query and a label of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy.sparse as sp
from torch import Tensor

from unidec.config import Teacher
from unidec.model.additions import Drawn
from unidec.model.batch import Prepared
from unidec.model.pairs import PoolTargets, log_shares, to_device


@dataclass(frozen=True)
class WordTargets:
    """Probabilities of each training query's labels, by words alone.

    Attributes:
        rows_n: int64, ascending, training rows.
        probability_nL: CSR float32 [n, L] of positive probabilities, without ignored pairs.
    """

    rows_n: np.ndarray
    probability_nL: sp.csr_matrix


@dataclass(frozen=True)
class WordTeacherLoss:
    """Cross entropy of the softmax of a head's logits with the probabilities by words, which are
    scaled to sum up to 1 over the pool; mean over the queries; a query without a label with a
    probability in the pool counts as 0.
    """

    name: ClassVar = "teacher"
    targets: WordTargets
    settings: Teacher

    def draw(self, drawn: Drawn) -> dict[str, dict[str, Tensor]]:
        """For each head, query and column of the pairs with a probability, int64 [P], and the
        probabilities, float32 [P].
        """
        places_B = np.searchsorted(self.targets.rows_n, drawn.pool.rows_B)
        probability_BL = self.targets.probability_nL[places_B]
        out = {}
        for head, pool in (("de", drawn.pool), ("clf", drawn.clf_pool)):
            of_pool = probability_BL[:, pool.pool_S].tocoo()
            sum_B = np.asarray(of_pool.sum(axis=1)).ravel()
            parts = {
                "query": of_pool.row.astype(np.int64),
                "column": of_pool.col.astype(np.int64),
                "probability": of_pool.data / sum_B[of_pool.row],
            }
            out[head] = {name: to_device(array, drawn.device) for name, array in parts.items()}
        return out

    def loss(self, head: str, logit_BS: Tensor, targets: PoolTargets, batch: Prepared) -> Tensor:
        parts: Mapping[str, Tensor] = batch.added[self.name][head]
        log_BS = log_shares(logit_BS, targets)
        log_P = log_BS[parts["query"], parts["column"]]
        entropy = -(parts["probability"] * log_P).sum() / len(logit_BS)
        return self.settings.weight * entropy


def unread_targets(num_queries: int, num_labels: int) -> WordTargets:
    """Meaningless targets, for a step whose memory is measured."""
    num = min(num_labels, 100)
    probability_nL = sp.csr_matrix(np.full((num_queries, num), 1 / num, dtype=np.float32))
    probability_nL.resize(num_queries, num_labels)
    return WordTargets(np.arange(num_queries), probability_nL)
