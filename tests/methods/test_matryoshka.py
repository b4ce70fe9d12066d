"""Losses at several widths against loops over the first dimensions of vectors; gradients against
those of a formula are in tests/model/test_family.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.trainings import with_first_round

from unidec.methods.matryoshka import views

QUIET = {
    "model.dropout": 0.0,
    "loss.clf_bce": 0.0,
    "pool.de_labels": "all",
    "pool.clf_labels": "all",
}
TAU = 0.1


def decoupled(logit, positive, ignored):
    """Mean over a query's positives of log(e^p + sum over negatives of e^n) - p, mean over queries
    that have one.
    """
    rows = []
    for x, is_positive, is_ignored in zip(logit, positive, ignored, strict=True):
        negatives = [math.exp(v) for v in x[~is_positive & ~is_ignored]]
        one = [math.log(math.exp(v) + sum(negatives)) - v for v in x[is_positive]]
        if one:
            rows.append(sum(one) / len(one))
    return sum(rows) / len(rows)


def bce(logit, positive, ignored):
    """Sum over a query's labels, mean over queries that have a positive."""
    rows = []
    for x, is_positive, is_ignored in zip(logit, positive, ignored, strict=True):
        if is_positive.any():
            signs = np.where(is_positive, -1, 1)
            rows.append(sum(math.log1p(math.exp(v)) for v in (signs * x)[~is_ignored]))
    return sum(rows) / len(rows)


def unit(vectors):
    """Each row divided by its length; rows of zeros as they are."""
    lengths = [np.linalg.norm(row) for row in vectors]
    return np.stack([row / length if length else row for row, length in zip(vectors, lengths)])


def first(vectors, width, is_unit):
    cut = vectors[:, :width]
    return unit(cut) if is_unit else cut


CASES = {
    "two heads": {},
    "one width": {"loss.widths": [1]},
    "one way": {"loss.de_forward": 1.0, "loss.clf_forward": 1.0},
    "any length": {"model.normalize": False},
    "cosines": {"model.clf_cosine": True, "model.clf_bias": True},
    "bce in chunks": {"loss.clf": "bce", "loss.bce_normalise": "rows", "model.clf_bias": True},
    "classifier alone": {"model.heads": "clf", "model.clf_bias": True},
    "dual encoder alone": {"model.heads": "de"},
    "rows of zeros": {"zeros": True},
}


@pytest.mark.parametrize("name", CASES)
def test_losses_of_all_widths_are_added_up(open_trainer, tiny_dataset, name):
    options = {"loss.widths": [3, 5, 8], "loss.balance": 0.3} | CASES[name]
    has_zeros = options.pop("zeros", False)
    trainer = with_first_round(open_trainer(**QUIET, **options))
    model = trainer.model
    settings = trainer.settings
    loss = settings.loss
    with torch.no_grad():
        for table in model.tables().values():
            torch.nn.init.normal_(table.weight, std=0.3)
        if has_zeros:  # in the first dimensions
            model.table.weight[::2, :5] = 0.0
    rows = np.sort(trainer.rows[:13])
    batch = trainer.prepare(rows, 0)
    model.train()
    x_BW = model.encoder(batch.texts)
    found = {key: value.item() for key, value in trainer.objective.losses(x_BW, batch, 0).items()}
    model.eval()
    tokens = trainer.encoding.tokens
    query_de, query_clf = model.encode_queries(tokens["queries"], rows)
    label_de = model.encode_labels(tokens["labels"])
    rows_LD, bias_L = trainer.classifier()
    positive = tiny_dataset.relevance[rows].toarray() > 0
    ignored = tiny_dataset.filter_pairs[rows].toarray().astype(bool) & ~positive
    expected = {"loss_de": 0.0, "loss_clf": 0.0}
    for width in [*loss.widths, model.settings.dim]:
        if query_de is not None:
            cut = [first(x, width, model.settings.normalize) for x in (query_de, label_de)]
            logit = cut[0] @ cut[1].T / TAU
            forth = decoupled(logit, positive, ignored)
            back = decoupled(logit.T, positive.T, ignored.T)
            expected["loss_de"] += loss.de_forward * forth + (1 - loss.de_forward) * back
        if query_clf is not None:
            cut = [first(x, width, model.settings.clf_cosine) for x in (query_clf, rows_LD)]
            logit = cut[0] @ cut[1].T
            logit = (logit if bias_L is None else logit + bias_L) / TAU
            if loss.clf == "bce":
                expected["loss_clf"] += bce(logit, positive, ignored)
                continue
            forth = decoupled(logit, positive, ignored)
            back = decoupled(logit.T, positive.T, ignored.T)
            expected["loss_clf"] += loss.clf_forward * forth + (1 - loss.clf_forward) * back
    shares = {"loss_de": 0.3, "loss_clf": 0.7} if len(found) == 2 else dict.fromkeys(found, 1.0)
    for key, value in found.items():
        assert value == pytest.approx(shares[key] * expected[key], rel=1e-4), key


def test_views_are_first_dimensions(rng):
    query, label = (torch.from_numpy(rng.normal(size=(rows, 6))) for rows in (4, 3))
    label[1, :4] = 0.0
    for width, view in zip((6, 1, 4), views([1, 4]), strict=True):
        for got, whole in zip(view(query, label, False), (query, label), strict=True):
            assert torch.equal(got, whole[:, :width])
        if width < 6:
            for got, whole in zip(view(query, label, True), (query, label), strict=True):
                np.testing.assert_allclose(got, unit(whole[:, :width].numpy()), atol=1e-12)
    assert view(query, label, True)[1][1].tolist() == [0.0] * 4
    assert len(views([])) == 1
