"""Bins of labels by frequency against a loop over queries and labels, and against the metrics they
are parts of.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from unidec.evaluation.metrics import evaluate, frequency_bins, volume_bins


def _case(seed: int, num_queries: int = 60, num_labels: int = 40, width: int = 7):
    rng = np.random.default_rng(seed)
    truth_NL = rng.random((num_queries, num_labels)) < 0.1
    predicted_NK = np.stack([rng.permutation(num_labels)[:width] for _ in range(num_queries)])
    predicted_NK[rng.random(predicted_NK.shape) < 0.1] = -1
    # a long tail of ties, zeros at its end
    count_L = (30 / (1 + np.arange(num_labels))).astype(int)
    return predicted_NK, truth_NL, rng.permutation(count_L), 1.0 + rng.random(num_labels) * 5


def _slow(predicted_NK, truth_NL, bin_L, count_L, inverse_L, b, k):
    """One bin, by loops."""
    hits = psp = best = 0.0
    found = set()
    tested = set()
    for row, truth_L in zip(predicted_NK, truth_NL, strict=True):
        true = [label for label in range(len(bin_L)) if truth_L[label]]
        best += sum(sorted((inverse_L[label] for label in true), reverse=True)[:k])
        tested |= {label for label in true if bin_L[label] == b}
        for label in row[:k]:
            if label >= 0 and truth_L[label] and bin_L[label] == b:
                hits = hits + 1
                psp = psp + inverse_L[label]
                found.add(label)
    places = len(predicted_NK) * k
    pairs = truth_NL[:, bin_L == b].sum()
    return {
        f"P@{k}": 100 * hits / places,
        f"PSP@{k}": 100 * psp / best if best else 0.0,
        f"recall@{k}": 100 * hits / pairs if pairs else 0.0,
        f"coverage@{k}": 100 * len(found) / len(tested) if tested else 0.0,
        "test_pairs": pairs,
        "labels": (bin_L == b).sum(),
        "train_pairs": count_L[bin_L == b].sum(),
    }


@pytest.mark.parametrize(
    ("seed", "num_bins"),
    [
        (0, 5),
        (1, 3),
        (2, 1),
        (3, 40),
    ],
)
def test_bins_against_loops(seed, num_bins):
    predicted_NK, truth_NL, count_L, inverse_L = _case(seed)
    bins = frequency_bins(predicted_NK, csr_matrix(truth_NL), count_L, inverse_L, num_bins)
    bin_L = volume_bins(count_L, num_bins)
    assert [row["bin"] - 1 for row in bins] == sorted(set(bin_L.tolist()))
    for row in bins:
        expected = _slow(predicted_NK, truth_NL, bin_L, count_L, inverse_L, row["bin"] - 1, 5)
        assert {name: row[name] for name in expected} == pytest.approx(expected)
        members = count_L[bin_L == row["bin"] - 1]
        assert row["most"] == members.max()
        assert row["least"] == members.min()
        assert row["mean_frequency"] == pytest.approx(members.mean())


def test_contributions_add_up_to_the_metrics():
    predicted_NK, truth_NL, count_L, inverse_L = _case(5, num_queries=300)
    truth = csr_matrix(truth_NL)
    whole = evaluate(predicted_NK, truth, inverse_L, np.zeros(len(count_L), dtype=int))
    bins = frequency_bins(predicted_NK, truth, count_L, inverse_L)
    for name in ("P@5", "PSP@5"):
        assert sum(row[name] for row in bins) == pytest.approx(whole[name])


def test_bins_have_equal_volume_and_keep_ties_together():
    rng = np.random.default_rng(0)
    count_L = rng.zipf(1.6, 5000).clip(max=2000)
    bin_L = volume_bins(count_L, 5)
    volumes = np.bincount(bin_L, weights=count_L)
    largest = np.bincount(count_L, weights=count_L).max()  # one frequency cannot be cut
    assert np.abs(volumes - count_L.sum() / 5).max() <= largest
    used = sorted(set(bin_L.tolist()))
    assert used[-1] == 4
    assert len(used) > 2
    for b, after in itertools.pairwise(used):
        assert count_L[bin_L == b].min() > count_L[bin_L == after].max()
    assert volume_bins([3, 0, 3, 0], 2).tolist() == [1, 1, 1, 1]  # the middle of the only volume
    assert volume_bins([9, 1, 0], 2).tolist() == [0, 1, 1]
    assert volume_bins([0, 0], 3).tolist() == [2, 2]
    assert volume_bins([], 3).tolist() == []


def test_degenerate_input():
    bins = frequency_bins(np.full((2, 3), -1), csr_matrix((2, 4)), [1, 2, 3, 0], np.ones(4))
    assert all(row["P@5"] == row["PSP@5"] == row["coverage@5"] == 0.0 for row in bins)
    assert sum(row["labels"] for row in bins) == 4
    assert (
        frequency_bins(np.zeros((0, 3), int), csr_matrix((0, 2)), [1, 1], np.ones(2))[0]["recall@5"]
        == 0.0
    )
    explicit_zero = csr_matrix(
        (np.array([0.0, 1.0]), np.array([0, 1]), np.array([0, 2])), shape=(1, 2)
    )
    assert (
        sum(
            row["test_pairs"] for row in frequency_bins([[0, 1]], explicit_zero, [1, 1], np.ones(2))
        )
        == 1
    )
