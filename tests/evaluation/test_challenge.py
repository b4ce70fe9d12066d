"""Challenger against champion: figures beside slow references, and each check with its
two sides.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from unidec.config import Gate
from unidec.evaluation.metrics import by_query, evaluate
from unidec.evaluation.significance import challenge, paired_differences
from unidec.metric_names import metric_names

RULES = {
    "metric": "nDCG@5",
    "margin": 0.0,
    "confidence": 0.9,
    "guarded": ["P@1", "tail/R@10"],
    "tolerance": 0.5,
}


def random_case(seed: int, num_queries: int = 40, num_labels: int = 30, k: int = 12):
    rng = np.random.default_rng(seed)
    truth = rng.random((num_queries, num_labels)) < 0.1
    truth[0] = False
    predicted = np.stack([rng.permutation(num_labels)[:k] for _ in range(num_queries)])
    predicted[rng.random(predicted.shape) < 0.1] = -1
    weight = 1 + rng.random(num_labels) * 5
    return predicted, csr_matrix(truth), weight, rng.integers(0, 3, num_labels), rng


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("empty", ["nothing", "truth", "tail", "predictions"])
def test_every_metric_by_query_adds_up_to_the_evaluators(seed: int, empty: str) -> None:
    predicted, truth, weight, group, _ = random_case(seed)
    if empty == "truth":
        truth = csr_matrix(truth.shape, dtype=bool)
    elif empty == "tail":
        group = np.maximum(group, 1)
    elif empty == "predictions":
        predicted = predicted[:, :0]
    figures = evaluate(predicted, truth, weight, group)
    for name in metric_names():
        if "coverage" in name:
            with pytest.raises(ValueError, match="no contributions of single queries"):
                by_query(predicted, truth, [name], weight, group)
        else:
            above_N, below_N = by_query(predicted, truth, [name], weight, group)[name]
            value = 100 * above_N.sum() / below_N.sum() if below_N.sum() else 0
            assert value == pytest.approx(figures[name], abs=1e-9), name


@pytest.mark.parametrize("metric", ["nDCG@5", "PSP@3", "tail/R@10"])
def test_the_bootstrap_beside_a_slow_one_with_the_same_draws(metric: str) -> None:
    first, truth, weight, group, rng = random_case(1, num_queries=7)
    second = np.stack([rng.permutation(30)[:12] for _ in range(7)])
    scores = [by_query(rows, truth, [metric], weight, group) for rows in (first, second)]
    fast = paired_differences(*scores, metric, num_samples=50, seed=4)
    drawn = np.random.default_rng([4, 0]).integers(7, size=(50, 7))
    for r, rows in enumerate(drawn):
        values = [
            evaluate(part[rows], truth[rows], weight, group)[metric] for part in (first, second)
        ]
        expected = values[0] - values[1]
        assert fast[r] == pytest.approx(expected, abs=1e-9)


def one_label_queries(num_queries: int = 400, num_labels: int = 60):
    """Each query has one label; a system is right where its column says so."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, num_labels, num_queries)
    truth = csr_matrix(
        (np.ones(num_queries), (np.arange(num_queries), label)), shape=(num_queries, num_labels)
    )

    def ranking(right: np.ndarray) -> np.ndarray:
        wrong = (label + 1) % num_labels
        return np.stack([np.where(right, label, wrong), np.full(num_queries, -1)], axis=1)

    return truth, np.ones(num_labels), (np.arange(num_labels) % 3), ranking


def judged(first, second, truth, weight, group, rules: dict[str, Any]) -> SimpleNamespace:
    """What is found of the two, and its `checks`."""
    found, facts = challenge(first, second, truth, weight, group, Gate(**rules))
    return SimpleNamespace(checks=found, **facts["comparison"])


def checks(found) -> dict[str, bool]:
    return {check.check: check.passed for check in found.checks}


def test_a_better_one_passes_a_worse_one_does_not_and_the_same_one_ties() -> None:
    truth, weight, group, ranking = one_label_queries()
    half = np.arange(400) % 2 == 0
    more = np.arange(400) % 5 > 0
    better = judged(ranking(more), ranking(half), truth, weight, group, RULES)
    assert all(checks(better).values())
    assert better.confidence == 1.0
    assert (
        better.difference == pytest.approx(30)
        and better.intervals["nDCG@5"][0] > 20
        and better.intervals["P@1"][1] < 40
    )
    assert better.better - better.worse == 0.3 * 400
    worse = judged(ranking(half), ranking(more), truth, weight, group, RULES)
    expected = {"nDCG@5": False, "confidence": False, "P@1": False, "tail/R@10": False}
    assert checks(worse) == expected
    assert worse.difference == -better.difference
    same = judged(ranking(half), ranking(half), truth, weight, group, RULES)
    assert all(checks(same).values())
    assert same.difference == 0
    assert same.confidence == 1.0


def test_a_little_better_by_chance_is_not_sure() -> None:
    truth, weight, group, ranking = one_label_queries()
    rng = np.random.default_rng(1)
    one = rng.random(400) < 0.5
    other = rng.random(400) < 0.5
    if one.sum() < other.sum():
        one, other = other, one
    other = other.copy()
    # one is ahead by a single query
    other[np.flatnonzero(~other)[: one.sum() - other.sum() - 1]] = True
    found = judged(ranking(one), ranking(other), truth, weight, group, RULES)
    assert checks(found)["nDCG@5"]
    assert not checks(found)["confidence"]
    assert 0.4 < found.confidence < 0.9
    assert found.intervals["nDCG@5"][0] < 0 < found.intervals["nDCG@5"][1]
    unsure = judged(ranking(one), ranking(other), truth, weight, group, RULES | {"confidence": 0.0})
    assert "confidence" not in checks(unsure)


def test_margin_and_tolerance_count_to_the_point() -> None:
    truth, weight, group, ranking = one_label_queries()
    half = np.arange(400) % 2 == 0
    three = half.copy()
    three[np.flatnonzero(~half)[:12]] = True  # 12 of 400: 3 points
    for margin, passed in [
        (2.9, True),
        (3.0, True),
        (3.1, False),
    ]:
        found = judged(
            ranking(three), ranking(half), truth, weight, group, RULES | {"margin": margin}
        )
        assert checks(found)["nDCG@5"] is passed
    for tolerance, passed in [(2.9, False), (3.0, True)]:
        rules = RULES | {
            "tolerance": tolerance,
            "guarded": ["P@1"],
            "margin": -9.0,
        }
        found = judged(ranking(half), ranking(three), truth, weight, group, rules)
        assert checks(found) == {"nDCG@5": True, "confidence": True, "P@1": passed}
    # a negative margin is a loss that is borne: sure enough that no more is lost
    lost = judged(
        ranking(half), ranking(three), truth, weight, group, RULES | {"margin": -3.5, "guarded": []}
    )
    assert (
        checks(lost)["nDCG@5"]
        and 0.5 < lost.confidence < 1
        and "worse by at most 3.50" in lost.checks[1].words
    )
    equal = judged(ranking(half), ranking(half), truth, weight, group, RULES | {"margin": 0.0})
    assert "worse by at most 0.00 points" in equal.checks[1].words


def test_the_tail_alone_can_refuse() -> None:
    truth, weight, group, ranking = one_label_queries()
    label = truth.indices
    base = np.arange(400) % 2 == 0
    for hurt, name in itertools.product((0, 2), ("tail/R@10", "head/R@10")):
        right = np.where(group[label] == hurt, False, True)
        found = judged(
            ranking(right), ranking(base), truth, weight, group, RULES | {"guarded": [name]}
        )
        assert checks(found) == {
            "nDCG@5": True,
            "confidence": True,
            name: (hurt == 0) != (name[:4] == "tail"),
        }


def test_coverage_can_decide_without_a_bootstrap() -> None:
    truth, weight, group, ranking = one_label_queries()
    rules = RULES | {"metric": "coverage@5", "confidence": 0.0}
    found = judged(
        ranking(np.arange(400) % 2 == 0), ranking(np.zeros(400, bool)), truth, weight, group, rules
    )
    assert (
        "coverage@5" not in found.intervals
        and found.confidence is None
        and checks(found)["coverage@5"]
    )
