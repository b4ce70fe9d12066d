"""Chooses the methods that a recipe names, by sections `encoder`, `model`, `pool` and `loss`.

Legend: L labels, C clusters of labels, N queries, D width of a head, W width of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from unidec.config import Encoder, Model, Pool, Teacher, TrainingSettings
from unidec.data.dataset import XMCDataset
from unidec.data.tokens import Tokens
from unidec.methods.auxiliary import AUXILIARY, new_vectors, with_auxiliary
from unidec.methods.cluster_tree import TREE, LabelTree, TreeLoss
from unidec.methods.gandalf import with_label_queries
from unidec.methods.gates import NAME as GATES
from unidec.methods.gates import new_gates
from unidec.methods.graph_rows import GraphTexts
from unidec.methods.inception import token_layers
from unidec.methods.label_clusters import LABEL_CLUSTER, cluster_of_label, over_clusters
from unidec.methods.matryoshka import views
from unidec.methods.mixup import MixUp
from unidec.methods.query_rows import QueryTexts
from unidec.methods.residual_rows import RELATED_GATE, RelatedTexts, ResidualRows, new_related_gate
from unidec.methods.simcse import texts_as_labels
from unidec.methods.surrogate import ClusterRows
from unidec.methods.synonyms import Synonyms, similar_tokens
from unidec.methods.teacher import TeacherLoss, TeacherVectors
from unidec.methods.word_teacher import WordTargets, WordTeacherLoss
from unidec.model.additions import Additions, Exported, Methods, Part, Rows, ScoreLoss, TextInput
from unidec.model.pool import PoolSampler, TrainingPairs, num_clusters
from unidec.model.unidec import UniDEC

# values of section `model` of an ordinary model
_ORDINARY = {
    "clf_residual": False,
    "clf_gates": False,
    "clf_graph": False,
    "clf_queries": 0,
    "surrogate": 0,
    "levels": [],
}


def additions(encoder: Encoder, settings: Model, num_labels: int) -> Additions:
    """What the methods of sections `encoder` and `model` add to a model."""
    size = settings.surrogate
    return Additions(
        num_rows=num_clusters(num_labels, size) if size else None,
        parts=partial(_parts, settings, num_labels),
        token_layers=partial(token_layers, encoder),
        label_vectors=with_auxiliary if settings.auxiliary else None,
    )


def _parts(settings: Model, num_labels: int, width: int) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    size = settings.labels_a_cluster
    if size:
        parts[LABEL_CLUSTER] = torch.zeros(num_labels, dtype=torch.int64)
    if settings.levels:
        counts = [num_clusters(num_labels, level) for level in settings.levels]
        parts[TREE] = LabelTree(counts, width, settings.dropout)
    if settings.auxiliary and settings.heads != "clf":
        parts[AUXILIARY] = new_vectors(num_clusters(num_labels, size), settings.dim)
    if settings.heads == "de":
        return parts
    if settings.clf_gates:
        parts[GATES] = new_gates(settings.dim)
    if settings.clf_graph or settings.clf_queries:
        start = QueryTexts.gate_start if settings.clf_queries else GraphTexts.gate_start
        parts[RELATED_GATE] = new_related_gate(settings.dim, start)
    return parts


def load_model(
    path: str | Path, device: str = "cpu", verify: bool = True, rows: bool = True
) -> UniDEC:
    """Load an exported model with the parts that its methods added; see `UniDEC.load`."""
    return UniDEC.load(path, device, verify, rows, add=additions)


def changed_pairs(
    pairs: TrainingPairs, pool: Pool, label_graph: sp.csr_matrix | None, seed: int
) -> TrainingPairs:
    """The pairs that training uses, derived from the data set's pairs."""
    if pool.gandalf:
        assert label_graph is not None
        return with_label_queries(pairs, label_graph, pool.gandalf_rows, seed)
    if pool.simcse:
        return texts_as_labels(pairs)
    return pairs


def rows_of(
    model: UniDEC, dataset: XMCDataset, label_graph: sp.csr_matrix | None, encode: TextInput
) -> Rows:
    """How the classifier's rows are made.

    Args:
        encode: returns the encoder's outputs of texts.
    """
    settings = model.settings
    if settings.heads == "de":
        return Rows()
    if settings.surrogate:
        return ClusterRows(model)
    if settings.clf_residual:
        return ResidualRows(model, encode, _related(settings, dataset, label_graph))
    return Rows()


def _related(
    settings: Model, dataset: XMCDataset, label_graph: sp.csr_matrix | None
) -> RelatedTexts | None:
    if settings.clf_queries:
        train = dataset.rows("train")
        has_LN = sp.csr_matrix((dataset.relevance[train] > 0).T, dtype=np.float32)
        return QueryTexts(has_LN, train, settings.clf_queries)
    if settings.clf_graph:
        assert label_graph is not None
        return GraphTexts(label_graph)
    return None


def chosen_methods(
    settings: TrainingSettings,
    model: UniDEC,
    rows: Rows,
    pairs: TrainingPairs,
    autocast: Callable[[], AbstractContextManager[Any]],
    *,
    tokens: Mapping[str, Tokens] | None = None,
    teacher: TeacherVectors | WordTargets | None = None,
) -> tuple[Methods, TrainingPairs]:
    """The methods of a training whose clusters of labels are known, and the pairs that it uses.

    Args:
        tokens: of the texts by source; None: they are not changed, whatever the settings.
    """
    tree: TreeLoss | None = None
    if settings.model.levels:
        tree = _tree_loss(settings, model, pairs, autocast)
    if settings.model.surrogate and model.table is not None:
        pairs = over_clusters(pairs, cluster_of_label(model), model.table.num_rows)
    methods = Methods(
        rows=rows,
        losses=[tree] if tree else [],
        score_losses=_teacher_losses(teacher, settings.teacher),
        changes=[MixUp(settings.loss)] if settings.loss.mixup != "none" else [],
        reads_labels=settings.model.auxiliary > 0,
        export=partial(export_of, settings.model, rows),
        shortlister=tree if settings.pool.shortlist else None,
        texts=_synonyms(settings.loss.synonyms, model, tokens),
        views=views(settings.loss.widths),
    )
    return methods, pairs


def _teacher_losses(
    teacher: TeacherVectors | WordTargets | None, settings: Teacher
) -> list[ScoreLoss]:
    if isinstance(teacher, WordTargets):
        return [WordTeacherLoss(teacher, settings)]
    return [TeacherLoss(teacher, settings)] if teacher else []


def _synonyms(share: float, model: UniDEC, tokens: Mapping[str, Tokens] | None) -> Synonyms | None:
    if not share or tokens is None:
        return None
    return Synonyms(share, similar_tokens(model.tokenizer_folder, tokens))


def export_of(settings: Model, rows: Rows) -> Exported:
    """How a model is exported: as an ordinary one, without parts that only training uses."""
    parts = {GATES, RELATED_GATE, TREE, LABEL_CLUSTER}
    if settings.auxiliary:
        parts.remove(LABEL_CLUSTER)
    return Exported(classifier=rows.exported(), settings=_ORDINARY, without=parts)


def _tree_loss(
    settings: TrainingSettings,
    model: UniDEC,
    pairs: TrainingPairs,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> TreeLoss:
    finest_L = cluster_of_label(model)
    counts = [num_clusters(model.num_labels, level) for level in settings.model.levels]
    levels = []
    for count in counts:
        # a cluster of a coarser level consists of consecutive clusters of the finest one
        cluster_L = finest_L // (counts[-1] // count)
        of_level = over_clusters(pairs, cluster_L, count)
        levels.append(
            PoolSampler(
                of_level.relevance,
                of_level.filter_pairs,
                beta=settings.pool.beta,
                eta=0,
                size=0,
                seed=settings.seed,
            )
        )
    return TreeLoss(
        model=model,
        levels=levels,
        num_kept=settings.pool.shortlist,
        soft=pairs.soft,
        autocast=autocast,
    )
