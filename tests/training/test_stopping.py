"""When a training with patience ends, and its schedule; trainings that are cut off:
test_resume.py.
"""

from __future__ import annotations

import json
import math

import pytest

from unidec.training.optim import Optimisers
from unidec.training.stopping import METRIC, ROUNDS, Stopping


def slow(stopping, values, works):
    """Round by round, every condition in words: (begin, end) of the last round in epochs."""
    ends = [
        min((k + 1) * stopping.refresh, stopping.epochs)
        for k in range(-(-stopping.epochs // stopping.refresh))
    ]
    if stopping.patience == 0 or len(ends) == 1:
        return ([0, *ends])[-2], stopping.epochs
    for k in range(len(ends) - 1):  # the round k is trained and measured: is the next one the last?
        if k == len(ends) - 2:
            return ends[k], ends[k + 1]
        if k >= len(values):
            return ends[-2], ends[-1]  # not known yet
        so_far = [-math.inf if math.isnan(v) else v for v in values[: k + 1]]
        best = so_far.index(max(so_far)) if max(so_far) > -math.inf else -1
        a_round = works[k] / (k + 1)
        no_rise = k - best >= stopping.patience
        no_room = (
            stopping.budget_minutes > 0 and works[k] + 2 * a_round > 60 * stopping.budget_minutes
        )
        if no_rise or no_room:
            return ends[k], ends[k + 1]
    raise AssertionError


def lines_of(stopping, values, works):
    return [
        {
            "epoch": min((k + 1) * stopping.refresh, stopping.epochs),
            "validation": {METRIC: v},
            "work_seconds": w,
        }
        for k, (v, w) in enumerate(zip(values, works, strict=True))
    ]


def test_the_decision_equals_a_slow_one_on_random_curves(rng):
    seen = set()
    for _ in range(3000):
        stopping = Stopping(
            int(rng.integers(1, 14)),
            int(rng.integers(1, 4)),
            int(rng.integers(0, 4)),
            float(rng.choice([0, 3, 7])),
        )
        rounds = int(rng.integers(0, -(-stopping.epochs // stopping.refresh) + 1))
        values = rng.choice([1.0, 2.0, 3.0, 4.0, math.nan], rounds).tolist()
        works = (rng.integers(10, 120, rounds).cumsum() + 0.37).tolist()  # no ties
        lines = lines_of(stopping, values, works)
        expected = slow(stopping, values, works)
        assert stopping.last_round(lines) == expected, (stopping, lines)
        seen.add(expected[1] < stopping.epochs)
        if (
            stopping.patience
            and rounds
            and expected[0] <= lines[-1]["epoch"]
            and expected[1] < stopping.epochs
        ):
            # decided: what is measured later changes nothing
            more = [*lines, lines[-1] | {"epoch": expected[1], "validation": {METRIC: 99.0}}]
            assert stopping.last_round(more) == expected
    assert seen == {True, False}


def test_lines_of_a_past_that_was_cut_off_do_not_count(tmp_path):
    stopping = Stopping(20, 2, 1)
    lines = lines_of(stopping, [3.0, 2.0, 1.0], [1.0, 2.0, 3.0])
    (tmp_path / ROUNDS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert stopping.read(tmp_path, 2) == (18, 20)
    assert stopping.read(tmp_path, 4) == (4, 6)
    assert stopping.read(tmp_path, 6) == (4, 6)
    assert Stopping(20, 2).read(tmp_path, 6) == (18, 20)
    assert stopping.read(tmp_path / "none", 6) == (18, 20)


def test_the_rate_is_constant_and_falls_in_the_last_round(open_trainer):
    trainer = open_trainer(**{"optim.patience": 2, "optim.warmup_epochs": 1.5, "optim.epochs": 10})
    optimisers: Optimisers = trainer.optimisers
    optimisers.last_round = (40, 50)
    rise = optimisers.warmup
    factors = [optimisers.factor(step) for step in range(50)]
    expected = [(step + 1) / rise for step in range(rise)]
    assert factors[:rise] == pytest.approx(expected)
    assert set(factors[rise:41]) == {1.0}
    assert factors[40:] == pytest.approx([(50 - step) / 10 for step in range(40, 50)])
    assert optimisers.factor(50) == 0
    optimisers.last_round = (0, 6)  # it is the first round, too
    assert all(0 < factor <= 1 for factor in map(optimisers.factor, range(6)))
