"""A teacher: on each step's pool both heads also learn the scores of an earlier model, usually of a
larger one (knowledge distillation).

Legend: B queries of a step, S labels that a head scores, n training texts, E width of the teacher's
space.

Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2, without its
factor T^2, since each model keeps its own temperature. MOGIC (ICML 2025) guides cheap models of
extreme classification in this way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from unidec.config import Teacher
from unidec.model.additions import Drawn
from unidec.model.batch import Prepared
from unidec.model.pairs import PoolTargets, log_shares, to_device


@dataclass(frozen=True)
class TeacherVectors:
    """An earlier model, as vectors whose inner products are its scores.

    Attributes:
        rows_n: int64, ascending, training rows. query_nE: their vectors, float16.
        of_labels: returns the vectors of labels, float32 [S, E].
    """

    rows_n: np.ndarray
    query_nE: np.ndarray
    of_labels: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class TeacherLoss:
    """KL(teacher || student) of each query's distribution over the pool, mean over the queries: the
    softmax of the teacher's scores by its temperature, and that of a head's logits. Ignored pairs
    are in neither.
    """

    name: ClassVar = "teacher"
    vectors: TeacherVectors
    settings: Teacher

    def draw(self, drawn: Drawn) -> dict[str, Tensor]:
        """The teacher's vectors of the batch's queries, [B, E], and of each head's labels,
        [S, E].
        """
        vectors = self.vectors
        places_B = np.searchsorted(vectors.rows_n, drawn.pool.rows_B)
        query_BE = to_device(vectors.query_nE[places_B], drawn.device)
        of_de = of_clf = to_device(vectors.of_labels(drawn.pool.pool_S), drawn.device)
        if drawn.clf_pool is not drawn.pool:
            of_clf = to_device(vectors.of_labels(drawn.clf_pool.pool_S), drawn.device)
        return {"queries": query_BE, "de": of_de, "clf": of_clf}

    def loss(self, head: str, logit_BS: Tensor, targets: PoolTargets, batch: Prepared) -> Tensor:
        vectors: dict[str, Tensor] = batch.added[self.name]
        score_BS = vectors["queries"].float() @ vectors[head].T / self.settings.temperature
        teacher_BS = log_shares(score_BS, targets)
        student_BS = log_shares(logit_BS, targets)
        divergence = F.kl_div(student_BS, teacher_BS, reduction="batchmean", log_target=True)
        return self.settings.weight * divergence
