"""MixUp: what is mixed with what, by how much, and whose labels count; losses are in tests/model/test_family.py."""

import numpy as np
import pytest
import torch

from unidec.training.mixup import UNMIXED, mix
from unidec.training.refresh import Refresh


def drawn(open_trainer, kind, **overrides):
    trainer = open_trainer(**{"loss.mixup": kind, "model.dropout": 0.0} | overrides)
    trainer.refresh()
    trainer.made = Refresh.load(trainer.run_dir / "refresh" / "epoch-00000", 0)
    batch = trainer.prepare(trainer.rows[:17], 0)
    x = torch.randn(batch.num_texts, trainer.model.encoder.width)
    return trainer, batch, x


def test_queries_are_mixed_in_pairs_and_labels_are_left(open_trainer):
    trainer, batch, x = drawn(open_trainer, "queries")
    own, settings = batch.num_own_queries, trainer.settings.loss
    mixed, [(share, none), (rest, partner)] = mix(x, batch, settings, 3, 7)
    assert none is None and share + rest == pytest.approx(1) and sorted(partner.tolist()) == list(range(own))
    torch.testing.assert_close(mixed[:own], share * x[:own] + rest * x[partner])
    assert torch.equal(mixed[own:], x[own:])
    again, other = mix(x, batch, settings, 3, 7), mix(x, batch, settings, 3, 8)
    assert torch.equal(again[0], mixed) and not torch.equal(other[0], mixed)
    shares = np.array([mix(x, batch, settings, 3, step)[1][0][0] for step in range(2000)])
    assert shares.mean() == pytest.approx(0.5, abs=0.05)
    assert shares.var() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), rel=0.15)  # of Beta(0.4, 0.4)


def test_the_labels_of_a_row_are_its_partners(open_trainer):
    _, batch, _ = drawn(open_trainer, "queries")
    order = torch.randperm(batch.num_own_queries)
    targets, moved = batch.targets, batch.targets.of_rows(order)
    for row in range(len(order)):
        for old, new in (("row_P", "col_P"), ("ignored_row_F", "ignored_col_F")):
            was = getattr(targets, new)[getattr(targets, old) == order[row]]
            assert sorted(getattr(moved, new)[getattr(moved, old) == row].tolist()) == sorted(was.tolist())
        assert moved.num_positives_B[row] == targets.num_positives_B[order[row]]


def test_a_query_is_mixed_with_the_text_of_one_of_its_sampled_labels(open_trainer):
    trainer, batch, x = drawn(open_trainer, "labels", **{"pool.size": 5, "pool.batch_size": 4, "pool.eta": 0})
    own, pool, met = batch.num_own_queries, batch.pool, set()
    sampled = [set(pool.positive_col_P[(pool.positive_row_P == row) & pool.sampled_P].tolist()) for row in range(own)]
    assert any(not labels for labels in sampled) and any(sampled)
    for step in range(200):
        mixed, shares = mix(x, batch, trainer.settings.loss, 0, step)
        assert shares is UNMIXED and torch.equal(mixed[own:], x[own:])
        for row, labels in enumerate(sampled):
            if not labels:
                assert torch.equal(mixed[row], x[row])
                continue
            move = mixed[row] - x[row]  # towards the label's text
            if move.norm() > 1e-3:
                cosine = {label: float(move @ (x[own + label] - x[row])) for label in labels}
                length = {label: float(move.norm() * (x[own + label] - x[row]).norm()) for label in labels}
                label = max(labels, key=lambda known: cosine[known] / length[known])
                assert cosine[label] == pytest.approx(length[label], rel=1e-3)
                met.add((row, label))
    assert met == {(row, label) for row, labels in enumerate(sampled) for label in labels}


def test_validation_and_refresh_see_queries_as_they_are(open_trainer):
    trainer, batch, x = drawn(open_trainer, "queries")

    def losses():
        found = []
        for step in range(3):
            found.append(float(torch.stack(list(trainer.objective.losses(x, batch, step).values())).sum().detach()))
            for table in trainer.model.tables().values():
                table.forget()
        return found

    trainer.model.train()
    assert len(set(losses())) == 3
    trainer.model.eval()
    assert len(set(losses())) == 1
