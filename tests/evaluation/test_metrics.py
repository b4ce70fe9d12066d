"""Metrics against hand-computed cases and a slow dense float64 reference written from the
definitions.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from unidec.errors import DataError
from unidec.evaluation.metrics import (
    GROUPS,
    by_query,
    evaluate,
    filtered_truth,
    moved_up,
    pair_keys,
    remove_filtered,
)

KS = (1, 3, 5, 10, 100)


def ratio(part, whole):
    """0 of nothing."""
    return part / whole if whole else 0.0


def discount(rank):
    return 1 / math.log2(rank + 1)


def dense_reference(predicted, truth, weight, group, ks, propensity_ks):
    """Every metric by loops over queries and ranks; truth is a dense 0/1 matrix."""
    num_queries, num_labels = truth.shape

    def ideal(n):
        return sum(discount(j) for j in range(1, n + 1))

    def one_scope(mask, mean_all):
        out = {}
        counts = truth.astype(bool) & mask
        positives = [np.flatnonzero(row).tolist() for row in counts]
        ranks = [
            [(j, label) for j, label in enumerate(labels, 1) if label >= 0 and row[label]]
            for labels, row in zip(predicted, counts, strict=True)
        ]
        counted = num_queries if mean_all else sum(bool(p) for p in positives)
        relevant = {label for p in positives for label in p}
        for k in ks:
            p = r = n = 0.0
            found = set()
            for i in range(num_queries):
                within = [(j, label) for j, label in ranks[i] if j <= k]
                p += len(within) / k
                found |= {label for _, label in within}
                if positives[i]:
                    r += len(within) / len(positives[i])
                    gain = sum(discount(j) for j, _ in within)
                    n += gain / ideal(min(k, len(positives[i])))
            out[f"P@{k}"] = ratio(p, num_queries)
            out[f"R@{k}"] = ratio(r, counted)
            out[f"nDCG@{k}"] = ratio(n, counted)
            out[f"coverage@{k}"] = ratio(len(found), len(relevant))
        for k in propensity_ks:
            top = top_best = gain = gain_best = 0.0
            for i in range(num_queries):
                if not positives[i]:
                    continue
                norm = ideal(min(k, len(positives[i])))
                best = sorted((weight[label] for label in positives[i]), reverse=True)[:k]
                within = [(j, label) for j, label in ranks[i] if j <= k]
                top += sum(weight[label] for _, label in within)
                top_best += sum(best)
                gain += sum(weight[label] * discount(j) for j, label in within) / norm
                gain_best += sum(w * discount(j) for j, w in enumerate(best, 1)) / norm
            out[f"PSP@{k}"] = ratio(top, top_best)
            out[f"PSnDCG@{k}"] = ratio(gain, gain_best)
        firsts = [found[0][0] for found in ranks if found]
        reciprocal = sum(1 / rank for rank in firsts if rank <= max(ks))
        out["MRR"] = ratio(reciprocal, counted)
        num_with_positives = sum(bool(p) for p in positives)
        return {key: 100 * value for key, value in out.items()}, float(num_with_positives)

    out, _ = one_scope(np.ones(num_labels, bool), True)
    out["num_queries"] = float(num_queries)
    for g, name in enumerate(GROUPS):
        part, counted = one_scope(group == g, False)
        out |= {f"{name}/{key}": value for key, value in part.items()}
        out[f"{name}/num_queries"] = counted
    return out


def random_case(seed, num_queries, num_labels, width, density):
    """Predictions without doubles and with -1 at random ranks; graded truth with stored zeros and
    empty rows.
    """
    rng = np.random.default_rng(seed)
    truth = (rng.random((num_queries, num_labels)) < density) * rng.choice(
        [0.5, 1.0, 3.0], (num_queries, num_labels)
    )
    truth[rng.random(num_queries) < 0.15] = 0
    relevance = csr_matrix(truth)
    if relevance.nnz:
        relevance.data[rng.random(relevance.nnz) < 0.1] = 0  # stored, but not relevant
    truth = relevance.toarray() > 0
    columns = min(width, num_labels)
    predicted = np.argsort(rng.random((num_queries, num_labels)) - 0.5 * truth, axis=1)[:, :columns]
    predicted = np.pad(predicted, ((0, 0), (0, width - columns)), constant_values=-1)
    predicted[rng.random(predicted.shape) < 0.1] = -1
    return (
        predicted,
        relevance,
        truth,
        1 + 9 * rng.random(num_labels),
        rng.integers(0, 3, num_labels),
    )


def assert_same(got, want):
    assert got.keys() == want.keys()
    assert all(math.isfinite(value) for value in got.values())
    np.testing.assert_allclose([got[k] for k in want], list(want.values()), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("seed", "num_queries", "num_labels", "width", "density"),
    [
        (0, 60, 40, 12, 0.1),
        (1, 40, 150, 120, 0.05),
        (2, 50, 8, 100, 0.4),
        (3, 30, 1, 3, 0.5),
        (4, 25, 30, 2, 0.9),
    ],
)
def test_equals_dense_reference_whole_and_in_blocks(
    seed, num_queries, num_labels, width, density, monkeypatch
):
    predicted, relevance, truth, weight, group = random_case(
        seed, num_queries, num_labels, width, density
    )
    want = dense_reference(predicted, truth, weight, group, KS, (1, 3, 5))
    assert_same(evaluate(predicted, relevance, weight, group), want)
    monkeypatch.setattr("unidec.evaluation.metrics._BLOCK", 7)
    assert_same(evaluate(predicted, relevance, weight, group), want)
    for k in KS:
        parts = sum(want[f"{name}/P@{k}"] for name in GROUPS)
        assert parts == pytest.approx(want[f"P@{k}"])


def test_hand_computed():
    """Two queries, four labels: 0 and 1 tail, 2 torso, 3 head; weights 4, 3, 2, 1.

    Query 0: relevant {0, 3}, predicted 3, 2, 0. Query 1: relevant {1}, predicted 0, 1 (then
    nothing).
    """
    relevance = csr_matrix(np.array([[1, 0, 0, 1], [0, 1, 0, 0]], dtype=np.float32))
    predicted = np.array([[3, 2, 0], [0, 1, -1]])
    got = evaluate(predicted, relevance, [4.0, 3.0, 2.0, 1.0], [0, 0, 1, 2])
    d2 = 1 / math.log2(3)
    d3 = 1 / 2
    want = {
        "P@1": 1 / 2,
        "P@3": (2 / 3 + 1 / 3) / 2,
        "R@1": (1 / 2 + 0) / 2,
        "R@3": 1.0,
        "nDCG@1": 1 / 2,
        "nDCG@3": ((1 + d3) / (1 + d2) + d2) / 2,
        "MRR": (1 + 1 / 2) / 2,
        "coverage@1": 1 / 3,
        "coverage@3": 1.0,
        "PSP@1": 1 / (4 + 3),
        "PSP@3": 1.0,
        "PSnDCG@1": 1 / 7,
        "PSnDCG@3": ((1 + 4 * d3) / (1 + d2) + 3 * d2) / ((4 + d2) / (1 + d2) + 3),
        "tail/P@3": (1 / 3 + 1 / 3) / 2,
        "tail/R@3": 1.0,
        "tail/R@1": 0.0,
        "tail/MRR": (1 / 3 + 1 / 2) / 2,
        "tail/nDCG@3": (d3 + d2) / 2,
        "tail/PSP@3": 1.0,
        "torso/R@3": 0.0,
        "torso/coverage@3": 0.0,
        "head/P@1": 1 / 2,
        "head/R@1": 1.0,
        "head/MRR": 1.0,
    }
    for key, value in want.items():
        assert got[key] == pytest.approx(100 * value), key
    assert (
        got["num_queries"],
        got["tail/num_queries"],
        got["torso/num_queries"],
        got["head/num_queries"],
    ) == (
        2,
        2,
        0,
        1,
    )


def test_perfect_and_useless_predictions():
    relevance = csr_matrix(np.array([[1, 1, 0], [0, 0, 1]]))
    perfect = evaluate(np.array([[1, 0], [2, -1]]), relevance, [1.0, 5.0, 2.0], [0, 1, 2])
    for key in (
        "P@1",
        "R@3",
        "nDCG@1",
        "nDCG@3",
        "PSP@1",
        "PSP@3",
        "PSnDCG@1",
        "PSnDCG@3",
        "MRR",
        "coverage@3",
    ):
        assert perfect[key] == pytest.approx(100), key
    useless = evaluate(np.array([[2], [0]]), relevance, [1.0, 5.0, 2.0], [0, 1, 2])
    assert all(value == 0 for key, value in useless.items() if not key.endswith("num_queries"))


def test_degenerate_inputs_are_defined():
    nothing = evaluate(np.zeros((0, 3), int), csr_matrix((0, 4)), np.ones(4), np.zeros(4, int))
    assert set(nothing.values()) == {0.0}
    no_positives = evaluate(np.zeros((3, 1), int), csr_matrix((3, 4)), np.ones(4), np.zeros(4, int))
    assert no_positives.pop("num_queries") == 3
    assert set(no_positives.values()) == {0.0}
    no_columns = evaluate(
        np.zeros((2, 0), int), csr_matrix(np.eye(2)), np.ones(2), np.zeros(2, int)
    )
    assert no_columns["P@1"] == no_columns["MRR"] == 0
    assert no_columns["tail/num_queries"] == 2
    zero_weight = evaluate(np.array([[0]]), csr_matrix([[1.0]]), [0.0], [0])
    assert zero_weight["PSP@1"] == 0
    assert zero_weight["P@1"] == 100


def test_unsorted_and_repeated_truth_entries_count_once():
    columns = [2, 0, 0, 1]
    messy = csr_matrix((np.ones(4), columns, [0, 3, 4]), shape=(2, 3))
    clean = csr_matrix(np.array([[1, 0, 1], [0, 1, 0]]))
    predicted = np.array([[0, 2, 1], [2, 1, 0]])
    of_messy, of_clean = (
        evaluate(predicted, truth, np.ones(3), [0, 1, 2]) for truth in (messy, clean)
    )
    assert of_messy == of_clean


@pytest.mark.parametrize(
    ("predicted", "message"),
    [
        ([[0, 1, 0], [1, 2, -1]], "predicted twice"),
        ([[0, 1, 3], [1, 2, -1]], "does not exist"),
        ([[0, 1, -2], [1, 2, -1]], "does not exist"),
        ([[0, 1, 2]], "do not fit together"),
        ([[0.0, 1.0], [1.0, 2.0]], "matrix of label ids"),
        ([0, 1], "matrix of label ids"),
    ],
)
def test_faulty_predictions_are_refused(predicted, message):
    relevance = csr_matrix((2, 3))
    with pytest.raises(DataError, match=message):
        evaluate(np.array(predicted), relevance, np.ones(3), np.zeros(3, int))
    with pytest.raises(DataError, match=message):
        by_query(np.array(predicted), relevance, ["P@1"], np.ones(3))


def test_the_refusal_names_the_row():
    with pytest.raises(DataError, match="predictions row 1"):
        by_query(np.array([[0, 1], [2, 2]]), csr_matrix((2, 3)), ["P@1"], np.ones(3))


@pytest.mark.parametrize(
    ("k", "density"),
    [
        (1, 0.2),
        (6, 0.3),
        (12, 0.2),
        (20, 0.5),
        (0, 0.1),
        (4, 0.0),
        (4, 1.0),
    ],
)
def test_remove_filtered_equals_a_slow_loop(k, density):
    rng = np.random.default_rng(int(100 * density) + k)
    predicted, _, _, _, _ = random_case(k, 40, 25, 12, 0.1)
    filtered = rng.random((40, 25)) < density
    got = remove_filtered(predicted, csr_matrix(filtered), k)
    assert got.shape == (40, k)
    assert got.dtype == np.int64
    for i in range(40):
        left = [p for p in predicted[i] if p >= 0 and not filtered[i, p]][:k]
        expected = left + [-1] * (k - len(left))
        assert got[i].tolist() == expected


def test_what_is_left_moves_up():
    labels = np.array([[1, -1, 3, -1], [-1, -1, -1, 7]])
    assert moved_up(labels, 3).tolist() == [[1, 3, -1], [7, -1, -1]]
    expected = [[1], [7]]
    assert moved_up(labels, 1).tolist() == expected
    assert moved_up(labels, 6).shape == (2, 6)
    assert moved_up(np.zeros((2, 0), dtype=int), 2).tolist() == [[-1, -1]] * 2


def test_keys_of_pairs():
    pairs = csr_matrix(([True, False, True], ([0, 2, 2], [3, 1, 0])), shape=(3, 4))
    assert pair_keys(pairs).tolist() == [3, 8, 9]
    assert pair_keys(pairs, positive_only=True).tolist() == [3, 8]
    assert pair_keys(csr_matrix((0, 4))).tolist() == []


@pytest.mark.parametrize("seed", range(3))
def test_equals_scikit_learn_ndcg(seed):
    """An independent implementation, where its definition agrees: binary truth, at least one
    positive a query.
    """
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(seed)
    truth = rng.random((40, 30)) < 0.2
    truth[:, 0] = True
    scores = rng.random(truth.shape)
    got = evaluate(np.argsort(-scores, axis=1), csr_matrix(truth), np.ones(30), np.zeros(30, int))
    for k in (1, 3, 5, 10):
        expected = 100 * metrics.ndcg_score(truth, scores, k=k)
        assert got[f"nDCG@{k}"] == pytest.approx(expected)


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_filtered_truth_equals_dense(density):
    _, relevance, truth, _, _ = random_case(4, 30, 12, 3, 0.4)
    filtered = np.random.default_rng(2).random(truth.shape) < density
    got = filtered_truth(relevance, csr_matrix(filtered))
    np.testing.assert_array_equal(got.toarray(), truth & ~filtered)
    with pytest.raises(DataError, match="differ in shape"):
        filtered_truth(relevance, csr_matrix((30, 11)))
