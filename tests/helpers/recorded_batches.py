"""Batches of a small training without its model's encoder: what would be encoded is recorded."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from unidec.methods.assembly import additions, changed_pairs, chosen_methods, rows_of
from unidec.model.encoder import TextEncoder
from unidec.model.unidec import UniDEC
from unidec.training.batches import Batches, TrainingTexts, inverse_propensities, query_pairs
from unidec.training.distributed import Ranks


class Recorded:
    """Stands for the input builder: keeps what it was asked for."""

    num_texts = 0
    unique_U = None
    encoder = SimpleNamespace(bag=None)

    def __call__(self, parts):
        self.parts = parts
        return self


def record_batches(params, dataset, tokens, *, ranks=None, graph=None, cluster_L=None) -> Batches:
    """`Batches` of a bag's training, with its methods.

    Args:
        cluster_L: int64 [L], the cluster of each label, for methods that have clusters.
    """
    settings = params.training
    encoder = TextEncoder(params.encoder, None, num_tokens=11, width=8)
    model = UniDEC(params.encoder, params.model, dataset.num_labels, encoder, add=additions)
    if cluster_L is not None:
        model.label_cluster.copy_(torch.from_numpy(cluster_L))
    pairs = changed_pairs(query_pairs(dataset), settings.pool, graph, settings.seed)
    rows = rows_of(model, dataset, graph, never)
    methods, pairs = chosen_methods(settings, model, rows, pairs, contextlib.nullcontext)
    return Batches(
        settings,
        TrainingTexts(tokens),
        pairs,
        methods,
        build=Recorded(),
        device=torch.device("cpu"),
        ranks=ranks or Ranks(),
        inverse_L=inverse_propensities(settings, dataset),
    )


def never(*_: Any) -> Any:
    """Fails: nothing is to be encoded."""
    raise AssertionError("not needed")


def texts(batch, tokens) -> list[list[int]]:
    """Token ids of what is encoded, text after text."""
    return [
        tokens[name].ragged(np.array([row]))[0].tolist()
        for name, _, rows in batch.texts.parts
        for row in rows
    ]
