"""A teacher: its vectors in a batch of any kind, its loss against loops, and what a training with
it learns; bundles as teachers are in tests/pipeline/test_teaching.py.
"""

import math

import numpy as np
import pytest
import torch
from helpers.label_targets import soft_targets
from helpers.trainings import POOLS, loss_by_teacher, train_to_the_end

from unidec.config import Teacher
from unidec.methods.teacher import TeacherLoss, TeacherVectors
from unidec.training.trainer import Trainer, TrainingData

BUNDLE_POOLS = POOLS | {
    "further positives for the classifier": {"pool.size": 14, "pool.clf_beta": 2},
    "label texts": {"pool.gandalf": True},
    "chunks": {"optim.encode_chunk": 7},
}


@pytest.fixture
def vectors(tiny_dataset):
    """A teacher of random vectors, also of label texts."""
    rng = np.random.default_rng(5)
    num_labels = tiny_dataset.num_labels
    rows = tiny_dataset.rows("train")
    rows = np.concatenate([rows, tiny_dataset.num_queries + np.arange(num_labels)])
    label_LE = rng.standard_normal((num_labels, 3)).astype(np.float32)
    query_nE = rng.standard_normal((len(rows), 3)).astype(np.float16)
    return TeacherVectors(rows, query_nE, label_LE.__getitem__)


@pytest.fixture
def open_taught(tiny_dataset, tiny_tokens, tiny_params, tmp_path, vectors):
    """`open_taught("run", teacher, **overrides)`: a trainer with a teacher, or None."""

    def open_taught(run="run", teacher=vectors, **overrides):
        params = tiny_params(**overrides)
        graph = soft_targets(tiny_dataset.relevance[tiny_dataset.rows("train")], 0.1)
        data = TrainingData(tiny_dataset, *tiny_tokens.values(), graph, teacher)
        return Trainer(params.training, data, tmp_path / run, tmp_path / "cache")

    return open_taught


def scores_by_loops(vectors, rows, labels):
    """The teacher's scores, [B, S] in float64."""
    place = {row: i for i, row in enumerate(vectors.rows_n.tolist())}
    scores = []
    for row in rows:
        query = vectors.query_nE[place[row]].astype(float)
        scores.append([float(query @ vectors.of_labels(label).astype(float)) for label in labels])
    return scores


def divergence_by_loops(theirs, logits, ignored, temperature):
    """Mean over rows of sum_l p_l log(p_l / q_l), p and q softmax over entries not ignored."""
    total = 0.0
    for i, row in enumerate(theirs):
        seen = [j for j in range(len(row)) if (i, j) not in ignored]
        p = [math.exp(row[j] / temperature) for j in seen]
        q = [math.exp(logits[i][j]) for j in seen]
        for p_j, q_j in zip(p, q, strict=True):
            total += p_j / sum(p) * math.log(p_j / sum(p) * sum(q) / q_j)
    return total / len(theirs)


@pytest.mark.parametrize("pools", BUNDLE_POOLS)
def test_its_loss_equals_loops_on_every_kind_of_pool(open_taught, vectors, pools):
    trainer = open_taught(
        **BUNDLE_POOLS[pools] | {"teacher.weight": 0.7, "teacher.temperature": 0.4}
    )
    trainer.mine()
    trainer.made = trainer.refresher.load(0)
    methods = trainer.batches.methods
    (method,) = methods.score_losses
    met = set()
    for number, rows in enumerate(trainer.made.batches(trainer.rows, 12, 0, 0)):
        batch = trainer.prepare(rows, number)
        heads = {"de": (batch.pool, batch.targets), "clf": (None, batch.clf.targets)}
        if batch.clf.ids is not None:
            labels = {"clf": batch.clf.ids.numpy()}
        else:
            labels = {"clf": np.arange(trainer.dataset.num_labels)}
        labels["de"] = batch.pool.pool_S
        for head in ("de", "clf") if trainer.model.heads == "both" else (trainer.model.heads,):
            targets = heads[head][1]
            shape = (len(rows), len(labels[head]))
            logits = torch.from_numpy(np.random.default_rng(number).normal(size=shape))
            ignored = set(
                zip(targets.ignored_row_F.tolist(), targets.ignored_col_F.tolist(), strict=True)
            )
            theirs = scores_by_loops(vectors, batch.pool.rows_B, labels[head])
            expected = 0.7 * divergence_by_loops(theirs, logits.tolist(), ignored, 0.4)
            found = method.loss(head, logits.clone(), targets, batch)
            assert float(found) == pytest.approx(expected, rel=1e-5)
            met.add(bool(ignored))
    assert True in met, "no pool has a filter pair"
    num_labels = trainer.dataset.num_labels if "texts" in pools else 0
    assert len(trainer.rows) == len(trainer.dataset.rows("train")) + num_labels


def test_a_student_that_equals_its_teacher_has_no_loss(open_taught, vectors):
    trainer = open_taught(**{"teacher.temperature": 0.5})
    batch = trainer.prepare(trainer.rows[:9], 0)
    labels = batch.pool.pool_S
    theirs = torch.tensor(scores_by_loops(vectors, batch.pool.rows_B, labels))
    theirs.requires_grad_()
    loss = TeacherLoss(vectors, Teacher(temperature=0.5)).loss(
        "de", theirs / 0.5 + 3.0, batch.targets, batch
    )
    (gradient,) = torch.autograd.grad(loss, theirs)
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-5)
    assert gradient.abs().max() < 1e-5


def test_a_pool_of_ignored_labels_alone_has_a_finite_loss(vectors):
    every = torch.cartesian_prod(torch.arange(2), torch.arange(3)).T
    targets = type("Targets", (), {"ignored_row_F": every[0], "ignored_col_F": every[1]})
    batch = type("Batch", (), {})
    batch.added = {"teacher": {"queries": torch.ones(2, 3), "de": torch.ones(3, 3)}}
    logits = torch.randn(2, 3, requires_grad=True)
    loss = TeacherLoss(vectors, Teacher()).loss("de", logits * 2, targets, batch)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()


def test_each_heads_loss_is_its_own_and_the_teachers(open_taught):
    plain = open_taught("plain", None)
    taught = open_taught("taught", **{"teacher.weight": 0.3})
    heavy = open_taught("heavy", **{"teacher.weight": 0.6})
    found = []
    for trainer in (plain, taught, heavy):
        batch = trainer.prepare(trainer.rows[:12], 0)
        trainer.model.eval()
        x = torch.from_numpy(
            np.random.default_rng(0).normal(size=(batch.counts.texts, trainer.model.encoder.width))
        )
        found.append(trainer.objective.losses(x.float(), batch, 0))
    for head in ("loss_de", "loss_clf"):
        once, twice = (float((each[head] - found[0][head]).detach()) for each in found[1:])
        assert once > 0
        assert twice == pytest.approx(2 * once, rel=1e-3)


def test_a_training_killed_in_a_round_goes_on_in_it(open_taught, monkeypatch):
    saves = {"run.checkpoint_steps": 2}
    whole = train_to_the_end(open_taught("whole"))
    for cut in (3, whole.steps_per_epoch * 2 + 3):
        part = open_taught("parts", **saves)

        def dies(batch, part=part, cut=cut, step=part.train_step):
            if part.at.step == cut:
                raise KeyboardInterrupt
            return step(batch)

        monkeypatch.setattr(part, "train_step", dies)
        with pytest.raises(KeyboardInterrupt):
            train_to_the_end(part)
        assert open_taught("parts", **saves).at.step == cut - 1
    again = train_to_the_end(open_taught("parts", **saves))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name


def test_students_come_nearer_to_their_teacher(open_taught):
    """The mean divergence of the training queries' pools after a training, with the teacher and
    without.
    """
    divergences = {}
    for name, weight in (("taught", 4.0), ("alone", 1e-9)):
        trainer = open_taught(
            name, **{"teacher.weight": weight, "teacher.temperature": 1.0, "optim.epochs": 8}
        )
        divergences[name] = loss_by_teacher(trainer)
    assert divergences["taught"] < 0.8 * divergences["alone"]
