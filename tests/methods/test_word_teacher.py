"""A teacher of words: its loss against loops on every kind of pool, and what a training with it
learns; where its probabilities come from is in tests/pipeline/test_teaching.py.
"""

import math

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from helpers.trainings import POOLS, loss_by_teacher

from unidec.config import Teacher
from unidec.methods.word_teacher import WordTargets, WordTeacherLoss, unread_targets
from unidec.training.trainer import Trainer, TrainingData


@pytest.fixture
def targets(tiny_dataset):
    """Random probabilities of a few labels for each training query, of none for some queries."""
    rng = np.random.default_rng()
    rows = tiny_dataset.rows("train")
    probability = rng.random((len(rows), tiny_dataset.num_labels)).astype(np.float32)
    probability[rng.random(probability.shape) < 0.8] = 0
    probability[::5] = 0
    probability[tiny_dataset.filter_pairs[rows].toarray() > 0] = 0
    return WordTargets(rows, sp.csr_matrix(probability))


@pytest.fixture
def open_taught(tiny_dataset, tiny_tokens, tiny_params, tmp_path, targets):
    """`open_taught("run", **overrides)`: a trainer with the teacher."""

    def open_taught(run="run", **overrides):
        params = tiny_params(**overrides)
        data = TrainingData(tiny_dataset, *tiny_tokens.values(), None, targets)
        return Trainer(params.training, data, tmp_path / run, tmp_path / "cache")

    return open_taught


def cross_entropy_by_loops(probability, logits, ignored):
    """Mean over rows of -sum_l p_l log q_l: p scaled to the sum 1 over the row, q the softmax over
    entries not ignored.
    """
    total = 0.0
    for i, row in enumerate(probability):
        seen = [j for j in range(len(row)) if (i, j) not in ignored]
        q = {j: math.exp(logits[i][j]) for j in seen}
        for j in seen:
            if row[j] > 0:
                total -= row[j] / sum(row) * math.log(q[j] / sum(q.values()))
    return total / len(probability)


@pytest.mark.parametrize("pools", POOLS)
def test_its_loss_equals_loops_on_every_kind_of_pool(open_taught, targets, pools):
    trainer = open_taught(**POOLS[pools] | {"teacher.weight": 0.7})
    trainer.mine()
    trainer.made = trainer.refresher.load(0)
    (method,) = trainer.batches.methods.score_losses
    dense = targets.probability_nL.toarray().astype(float)
    place = {row: i for i, row in enumerate(targets.rows_n.tolist())}
    met = set()
    for number, rows in enumerate(trainer.made.batches(trainer.rows, 12, 0, 0)):
        batch = trainer.prepare(rows, number)
        labels = {"de": batch.pool.pool_S, "clf": np.arange(trainer.dataset.num_labels)}
        if batch.clf.ids is not None:
            labels["clf"] = batch.clf.ids.numpy()
        pool_targets = {"de": batch.targets, "clf": batch.clf.targets}
        for head in ("de", "clf") if trainer.model.heads == "both" else (trainer.model.heads,):
            shape = (len(rows), len(labels[head]))
            logits = torch.from_numpy(np.random.default_rng(number).normal(size=shape))
            ignored_F = (pool_targets[head].ignored_row_F, pool_targets[head].ignored_col_F)
            ignored = set(zip(*(part.tolist() for part in ignored_F), strict=True))
            theirs = [dense[place[row]][labels[head]].tolist() for row in batch.pool.rows_B]
            expected = 0.7 * cross_entropy_by_loops(theirs, logits.tolist(), ignored)
            found = method.loss(head, logits.clone(), pool_targets[head], batch)
            assert float(found) == pytest.approx(expected, rel=1e-5)
            met |= {bool(ignored), "a query without labels" if [] in map(_some, theirs) else ""}
    assert {True, "a query without labels"} <= met


def _some(row):
    return [value for value in row if value > 0]


def test_a_pool_of_no_probable_label_has_no_loss_and_no_gradient():
    targets = WordTargets(np.arange(2), sp.csr_matrix((2, 3), dtype=np.float32))
    drawn = type("Drawn", (), {"device": torch.device("cpu")})
    drawn.pool = drawn.clf_pool = type("Pool", (), {"rows_B": np.arange(2), "pool_S": np.arange(3)})
    method = WordTeacherLoss(targets, Teacher())
    batch = type("Batch", (), {"added": {"teacher": method.draw(drawn)}})
    none = torch.zeros(0, dtype=torch.int64)
    pool_targets = type("Targets", (), {"ignored_row_F": none, "ignored_col_F": none})
    logits = torch.randn(2, 3, requires_grad=True)
    loss = method.loss("clf", logits * 2, pool_targets, batch)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert float(loss.detach()) == 0
    assert not gradient.any()


def test_students_come_nearer_to_their_teacher(open_taught):
    """The mean loss of the training queries' pools after a training, with the teacher and
    without.
    """
    losses = {}
    for name, weight in (("taught", 4.0), ("alone", 1e-9)):
        trainer = open_taught(name, **{"teacher.weight": weight, "optim.epochs": 8})
        losses[name] = loss_by_teacher(trainer)
    assert losses["taught"] < 0.95 * losses["alone"]


@pytest.mark.parametrize("num_labels", [1, 7, 1000])
def test_targets_for_a_measured_step(num_labels):
    targets = unread_targets(5, num_labels)
    assert targets.probability_nL.shape == (5, num_labels)
    np.testing.assert_allclose(targets.probability_nL.sum(axis=1), 1, rtol=1e-5)
