"""Tests of significance against loops written from the definitions, exact enumeration, and what
chance would give.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from unidec.evaluation.metrics import by_query, evaluate
from unidec.evaluation.significance import best_systems, compare_systems, holm

METRICS = ("P@1", "P@5", "nDCG@5", "R@10", "R@100", "PSP@5", "PSnDCG@5", "MRR")


def random_predictions(seed, num_queries, num_labels, width):
    rng = np.random.default_rng(seed)
    order = rng.permuted(np.tile(np.arange(num_labels), (num_queries, 1)), axis=1)[:, :width]
    return np.where(rng.random(order.shape) < 0.1, -1, order)


def scores(above, below=None):
    """One metric, "m"."""
    above = np.asarray(above, dtype=float)
    return {"m": (above, np.ones_like(above) if below is None else np.asarray(below, dtype=float))}


def value(parts, name="m"):
    above, below = parts[name]
    return 100 * above.sum() / below.sum() if below.sum() else 0.0


def compare(runs, against, **options):
    return compare_systems(runs, against, ["m"], **options)


@pytest.mark.parametrize(
    ("num_queries", "num_labels", "width", "density"),
    [
        (40, 130, 110, 0.05),
        (30, 12, 7, 0.3),
        (9, 12, 2, 0.2),
        (5, 12, 12, 0.0),
        (1, 1, 1, 1.0),
        (20, 40, 0, 0.2),
    ],
)
def test_values_by_query_make_the_evaluators_figures(num_queries, num_labels, width, density):
    rng = np.random.default_rng(num_queries)
    truth = csr_matrix(rng.random((num_queries, num_labels)) < density)
    weight_L = rng.random(num_labels) * 5 + 1
    group_L = rng.integers(0, 3, num_labels)
    predicted = random_predictions(1, num_queries, num_labels, width)
    got = by_query(predicted, truth, METRICS, weight_L)
    overall = evaluate(predicted, truth, weight_L, group_L)
    for name in METRICS:
        assert value(got, name) == pytest.approx(overall[name], abs=1e-9), name


def slow_bootstrap(a_runs, b_runs, num_samples, seed):
    """Differences by loops over resamples and queries, with the draws of the library's
    generator.
    """
    num_queries = len(a_runs[0]["m"][0])
    drawn = np.random.default_rng([seed, 0]).integers(num_queries, size=(num_samples, num_queries))

    def metric(run, queries):
        above_N, below_N = run["m"]
        below = sum(below_N[i] for i in queries)
        return 100 * sum(above_N[i] for i in queries) / below if below else 0.0

    return np.array(
        [
            np.mean([metric(run, queries) for run in a_runs])
            - np.mean([metric(run, queries) for run in b_runs])
            for queries in drawn
        ]
    )


@pytest.mark.parametrize("ratio", [False, True])
def test_bootstrap_equals_a_slow_loop_for_means_and_ratios(ratio):
    rng = np.random.default_rng(2)
    below = rng.integers(0, 4, 25).astype(float) if ratio else np.ones(25)
    a = [scores(rng.random(25) * below, below) for _ in range(2)]
    b = [scores(rng.random(25) * below * 0.9, below) for _ in range(3)]
    (got,) = compare(
        {"a": a, "b": b},
        "b",
        num_samples=200,
        seed=7,
    )
    want = slow_bootstrap(a, b, 200, 7)
    expected = tuple(np.percentile(want, [2.5, 97.5]))
    assert (got.low, got.high) == pytest.approx(expected)
    assert got.difference == pytest.approx(
        np.mean([value(r) for r in a]) - np.mean([value(r) for r in b])
    )
    assert got.num_queries == 25


@pytest.mark.parametrize("ratio", [False, True])
def test_randomisation_comes_near_the_exact_test(ratio):
    """All 2^12 swappings, each metric computed from the swapped queries."""
    rng = np.random.default_rng(4)
    below = rng.integers(1, 4, 12).astype(float) if ratio else np.ones(12)
    a, b = (rng.integers(0, 3, 12) + shift for shift in (1.2 if ratio else 0.4, 0.0))
    seen = 100 * (a.sum() - b.sum()) / below.sum()
    extreme = 0
    for swap in itertools.product((False, True), repeat=12):
        first = np.where(swap, b, a)
        second = np.where(swap, a, b)
        extreme += (
            abs(100 * first.sum() / below.sum() - 100 * second.sum() / below.sum())
            >= abs(seen) - 1e-9
        )
    exact = extreme / 2**12
    (got,) = compare({"a": [scores(a, below)], "b": [scores(b, below)]}, "b", num_samples=20_000)
    assert 0.005 < exact < 0.5, "the case must say something"
    assert got.p_value == pytest.approx(exact, abs=4 * np.sqrt(exact / 20_000) + 1e-4)


def test_alike_systems_seem_different_as_often_as_the_level_says():
    rng = np.random.default_rng(0)
    found = 0
    for seed in range(200):
        # both as good on a query, queries of all difficulties
        hits = rng.random((2, 60)) < rng.random(60)
        runs = {"a": [scores(hits[0])], "b": [scores(hits[1])]}
        (got,) = compare(runs, "b", num_samples=400, seed=seed)
        found += got.p_value < 0.05
    assert 2 <= found <= 20, found


def test_the_same_system_differs_from_itself_in_nothing():
    run = scores([1, 0, 1, 1])
    (got,) = compare({"a": [run], "b": [run]}, "b", num_samples=100)
    assert got.difference == 0
    assert got.low == 0
    assert got.high == 0
    assert got.p_value == 1
    assert got.p_adjusted == 1
    assert not got.better and not got.worse


def test_nothing_relevant_is_no_difference():
    run = scores([0, 0], [0, 0])
    other = scores([0, 0], [0, 0])
    (got,) = compare({"a": [run], "b": [other]}, "b", num_samples=50)
    assert got.value == 0
    assert got.difference == 0
    assert got.p_value == 1


def test_a_clear_difference_is_found_on_both_sides():
    rng = np.random.default_rng(1)
    base = rng.random(300)
    runs = {
        "low": [scores(base * 0.5)],
        "base": [scores(base)],
        "high": [scores(base + 0.3)],
    }
    low, high = compare(runs, "base", num_samples=2000)
    assert low.worse and not low.better and low.high < 0
    assert high.better
    assert high.low > 25
    assert high.system == "high"
    assert high.against == "base"


def test_further_seeds_of_the_same_result_prove_nothing_more():
    """Results stacked as if the seeds were queries of their own would make p smaller; here it stays
    as it is.
    """
    rng = np.random.default_rng(8)
    a = scores(rng.random(40) + 0.08)
    b = scores(rng.random(40))
    (once,) = compare({"a": [a], "b": [b]}, "b", num_samples=1000)
    (many,) = compare({"a": [a] * 5, "b": [b] * 5}, "b", num_samples=1000)
    assert many.p_value == pytest.approx(once.p_value, abs=1e-12)
    expected = (once.low, once.high)
    assert (many.low, many.high) == pytest.approx(expected)


def test_holm_equals_a_slow_reference_and_a_worked_example():
    rng = np.random.default_rng(3)
    for size in (1, 2, 7, 30):
        p = np.round(rng.random(size) ** 3, 2)
        order = sorted(range(size), key=lambda j: (p[j], j))
        want = []
        for i in range(size):
            smaller_or_equal = order[: order.index(i) + 1]
            want.append(
                min(
                    1.0,
                    max(
                        p[j] * (size - np.sum((p < p[j]) | ((p == p[j]) & (np.arange(size) < j))))
                        for j in smaller_or_equal
                    ),
                )
            )
        np.testing.assert_allclose(holm(p), want)
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert holm([]).shape == (0,)


def test_a_family_is_corrected_and_gets_the_samples_that_it_needs():
    rng = np.random.default_rng(5)
    base = rng.random(50)
    runs = {"base": [scores(base)]} | {
        f"s{i}": [scores(base + 0.2 + 0.01 * rng.random(50))] for i in range(12)
    }
    found = compare(runs, "base")
    expected = holm([c.p_value for c in found])
    np.testing.assert_allclose([c.p_adjusted for c in found], expected)
    assert all(c.better for c in found), "the smallest p-value, corrected by 12, still counts"


def test_best_of_some_systems_by_metric_and_as_opponents():
    truth = csr_matrix(np.eye(8, 20, dtype=bool))
    weight = np.ones(20)
    right = np.arange(8)[:, None]
    far = np.full((8, 6), -1)
    far[:, 5] = np.arange(8)  # right, but at place 6
    none = np.full((8, 1), 19)
    runs = {
        name: [by_query(labels, truth, METRICS, weight)]
        for name, labels in (("exact", right), ("far", far), ("none", none))
    }
    best = best_systems(runs, ["far", "none"], ["P@1", "R@10"])
    assert best == {"P@1": "far", "R@10": "far"}, "the first of equals at P@1"
    found = compare_systems(runs, {"P@1": "none", "R@10": "far"}, ["P@1", "R@10"], num_samples=100)
    expected = [
        ("exact", "P@1", "none"),
        ("exact", "R@10", "far"),
        ("far", "P@1", "none"),
        ("none", "R@10", "far"),
    ]
    assert [(c.system, c.metric, c.against) for c in found] == expected


def test_the_same_call_gives_the_same_result_and_a_block_changes_nothing(monkeypatch):
    rng = np.random.default_rng(6)
    runs = {name: [scores(rng.random(30))] for name in "abc"}
    first = compare(runs, "a", num_samples=300)
    assert compare(runs, "a", num_samples=300) == first
    monkeypatch.setattr("unidec.evaluation.significance._BLOCK", 30 * 7)
    for one, other in zip(first, compare(runs, "a", num_samples=300), strict=True):
        assert (one.p_value, one.low, one.high) == pytest.approx(
            (other.p_value, other.low, other.high)
        )


def test_a_system_alone_has_nobody_to_differ_from():
    assert compare({"a": [scores([1, 0, 1])]}, "a") == []
