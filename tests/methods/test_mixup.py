"""MixUp: what is mixed with what, by how much, and whose labels count; losses are in
tests/model/test_family.py.
"""

import dataclasses

import numpy as np
import pytest
import torch

from unidec.methods.mixup import draw_mix
from unidec.training.round_refresh import Refresh

CPU = torch.device("cpu")


def drawn(open_trainer, kind, **overrides):
    trainer = open_trainer(**{"loss.mixup": kind, "model.dropout": 0.0} | overrides)
    trainer.mine()
    trainer.made = Refresh.load(trainer.run_dir / "refresh" / "epoch-00000", 0)
    batch = trainer.prepare(trainer.rows[:17], 0)
    return trainer, batch, torch.randn(batch.counts.texts, trainer.model.encoder.width)


def test_queries_are_mixed_in_pairs_and_labels_are_left(open_trainer):
    trainer, batch, x = drawn(open_trainer, "queries")
    own = batch.counts.own_queries
    mix = batch.added["mixup"]
    (share, targets), (rest, _) = mix.targets(batch.targets).mixture
    assert targets is batch.targets
    assert share + rest == pytest.approx(1)
    assert share == mix.share
    assert sorted(mix.partner_B.tolist()) == list(range(own))
    mixed = mix.vectors(x)
    expected = share * x[:own] + rest * x[mix.partner_B]
    torch.testing.assert_close(mixed[:own], expected)
    assert torch.equal(mixed[own:], x[own:])
    again = trainer.prepare(trainer.rows[:17], 0)
    next_step = trainer.prepare(trainer.rows[:17], 1)
    assert torch.equal(again.added["mixup"].vectors(x), mixed)
    assert next_step.added["mixup"].share != mix.share
    settings = trainer.settings.loss
    shares = np.array(
        [
            draw_mix(settings, batch.pool, np.random.default_rng((0, step)), CPU).share
            for step in range(2000)
        ]
    )
    assert shares.mean() == pytest.approx(0.5, abs=0.05)
    assert shares.var() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), rel=0.15)  # of Beta(0.4, 0.4)


def test_the_labels_of_a_row_are_its_partners(open_trainer):
    _, batch, _ = drawn(open_trainer, "queries")
    order = torch.randperm(batch.counts.own_queries)
    targets = batch.targets
    moved = batch.targets.of_rows(order)
    for row in range(len(order)):
        for old, new in (("row_P", "col_P"), ("ignored_row_F", "ignored_col_F")):
            was = getattr(targets, new)[getattr(targets, old) == order[row]]
            assert sorted(getattr(moved, new)[getattr(moved, old) == row].tolist()) == sorted(
                was.tolist()
            )
        assert moved.num_positives_B[row] == targets.num_positives_B[order[row]]


def test_a_query_is_mixed_with_the_text_of_one_of_its_sampled_labels(open_trainer):
    trainer, batch, x = drawn(
        open_trainer, "labels", **{"pool.size": 5, "pool.batch_size": 4, "pool.eta": 0}
    )
    own = batch.counts.own_queries
    pool = batch.pool
    met = set()
    sampled = [
        set(pool.positive_col_P[(pool.positive_row_P == row) & pool.sampled_P].tolist())
        for row in range(own)
    ]
    assert any(not labels for labels in sampled) and any(sampled)
    for step in range(100):
        mix = draw_mix(trainer.settings.loss, pool, np.random.default_rng((0, step)), CPU)
        assert mix.targets(batch.targets) is batch.targets
        mixed = mix.vectors(x)
        assert torch.equal(mixed[own:], x[own:])
        for row, labels in enumerate(sampled):
            other = int(mix.other_B[row])
            if not labels:
                assert torch.equal(mixed[row], x[row])
                continue
            assert other - own in labels
            expected = mix.share * x[row] + (1 - mix.share) * x[other]
            torch.testing.assert_close(mixed[row], expected)
            met.add((row, other - own))
    assert met == {(row, label) for row, labels in enumerate(sampled) for label in labels}


def test_outside_of_training_queries_are_as_they_are(open_trainer):
    trainer, batch, x = drawn(open_trainer, "queries")
    found = {}
    for mode in (True, False):
        trainer.model.train(mode)
        for mixes in (True, False):
            changes = trainer.batches.methods.changes if mixes else []
            trainer.objective.methods = dataclasses.replace(
                trainer.batches.methods, changes=changes
            )
            losses = trainer.objective.losses(x, batch, 0)
            found[mode, mixes] = float(torch.stack(list(losses.values())).sum().detach())
            for table in trainer.model.tables().values():
                table.forget()
    assert found[True, True] != found[True, False] == found[False, True] == found[False, False]
