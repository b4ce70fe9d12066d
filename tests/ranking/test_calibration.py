"""Probabilities by score: against neighbouring bins joined one by one, degenerate answers, and what
is refused.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError

from unidec.ranking.calibration import (
    LEAST_RELEVANT,
    MOST_POINTS,
    RELEVANT_A_BIN,
    Calibration,
    fit_calibration,
)


def pooled(bins: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Pool adjacent violators, begun again after each pair that is joined: of each bin the weight,
    the relevant labels, and whatever else is added up.
    """
    share = [relevant / weight for weight, relevant, *_ in bins]
    for i in range(len(bins) - 1):
        if share[i] >= share[i + 1]:
            joined = tuple(map(sum, zip(bins[i], bins[i + 1], strict=True)))
            return pooled([*bins[:i], joined, *bins[i + 2 :]])
    return bins


def slow(score: np.ndarray, relevant: np.ndarray) -> list[tuple[float, float]]:
    """(mean score, probability) of each pool, by loops over the labels."""
    rows = [
        (float(s), bool(r))
        for s, r in zip(score.ravel(), relevant.ravel(), strict=True)
        if np.isfinite(s)
    ]
    of_relevant = [s for s, r in rows if r]
    num_bins = min(MOST_POINTS, len(of_relevant) // RELEVANT_A_BIN)
    edges = sorted({float(np.quantile(of_relevant, i / num_bins)) for i in range(1, num_bins)})
    bins: list[tuple[float, ...]] = []
    for low, high in zip([-np.inf, *edges], [*edges, np.inf], strict=True):
        if own := [(s, r) for s, r in rows if low <= s < high]:
            num_relevant = sum(r for _, r in own)
            total = sum(s for s, _ in own)
            bins.append((len(own) + 1, num_relevant + 0.5, total, len(own)))
    return [(total / size, right / weight) for weight, right, total, size in pooled(bins)]


def answers(rng: np.random.Generator, num: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """float32 scores and relevance [num, 10], with places that have no label."""
    score = rng.normal(size=(num, 10)).astype(np.float32)
    if kind == "ties":
        score = score.round(0)
    if kind == "noise":
        relevant = rng.random(score.shape) < 0.4
    elif kind == "reversed":
        relevant = rng.random(score.shape) < 1 / (1 + np.exp(score))
    else:
        relevant = rng.random(score.shape) < 1 / (1 + np.exp(2 - 1.5 * score))
    missing = rng.random(score.shape) < 0.05
    return np.where(missing, -np.inf, score).astype(np.float32), relevant & ~missing


@pytest.mark.parametrize("kind", ["plain", "ties", "noise", "reversed"])
@pytest.mark.parametrize("num", [40, 90, 400])
def test_as_pools_joined_one_by_one(rng: np.random.Generator, kind: str, num: int) -> None:
    score, relevant = answers(rng, num, kind)
    found = fit_calibration(score, relevant)
    assert found is not None and 1 <= len(found.scores) <= MOST_POINTS
    expected = slow(score, relevant)
    np.testing.assert_allclose(found.scores, [at for at, _ in expected], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.probabilities, [share for _, share in expected], rtol=1e-9)


def test_it_finds_the_probability_that_was_drawn_from(rng: np.random.Generator) -> None:
    score, relevant = answers(rng, 8000, "plain")
    found = fit_calibration(score, relevant)
    assert found is not None and len(found.scores) > 20
    at = np.linspace(-1.5, 2, 50)
    assert np.abs(found.of(at) - 1 / (1 + np.exp(2 - 1.5 * at))).max() < 0.05
    expected = relevant[np.isfinite(score)].mean()
    assert found.of(score[np.isfinite(score)]).mean() == pytest.approx(expected, abs=0.01)


def test_a_higher_score_is_never_less_likely(rng: np.random.Generator) -> None:
    for kind in ("plain", "ties", "noise", "reversed"):
        found = fit_calibration(*answers(rng, 200, kind))
        assert found is not None
        at = np.sort(rng.normal(scale=3, size=500)).astype(np.float32)
        for scores in (at, at.reshape(50, 10)):
            likely = found.of(scores)
            assert likely.dtype == np.float64 and likely.shape == scores.shape
            assert (np.diff(likely.ravel()) >= 0).all()
            assert likely.min() > 0
            assert likely.max() < 1
        ends = found.of(at[[0, -1]] * 99)
        assert found.of(np.array([-np.inf, np.inf])).tolist() == ends.tolist()


def test_one_score_all_relevant_none_and_too_few() -> None:
    one = np.full((30, 10), 0.25, dtype=np.float32)
    half = np.arange(300).reshape(30, 10) % 2 == 0
    found = fit_calibration(one, half)
    assert found == Calibration(scores=[0.25], probabilities=[0.5])
    rising = np.arange(300, dtype=np.float32).reshape(30, 10)
    sure = fit_calibration(rising, np.ones((30, 10), dtype=bool))
    assert sure is not None
    assert 0.95 < sure.of(rising).min() <= sure.of(rising).max() < 1
    assert fit_calibration(rising, np.zeros((30, 10), dtype=bool)) is None
    few = np.arange(300).reshape(30, 10) >= 300 - LEAST_RELEVANT
    assert fit_calibration(rising, few) is not None
    assert fit_calibration(np.where(rising == 299, -np.inf, rising), few) is None
    for shape in ((0, 10), (0, 0)):
        assert (
            fit_calibration(np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=bool)) is None
        )


def test_it_is_the_same_out_of_json(rng: np.random.Generator) -> None:
    found = fit_calibration(*answers(rng, 300, "plain"))
    assert found is not None
    again = Calibration.model_validate_json(json.dumps(found.model_dump()))
    at = rng.normal(size=200)
    assert again == found
    assert again.of(at).tolist() == found.of(at).tolist()


@pytest.mark.parametrize(
    ("scores", "probabilities"),
    [
        ([], []),
        ([0.0, 1.0], [0.5]),
        ([0.0, 0.0], [0.1, 0.2]),
        ([1.0, 0.0], [0.1, 0.2]),
        ([0.0, 1.0], [0.2, 0.1]),
        ([0.0, 1.0], [0.2, 1.1]),
        ([0.0, 1.0], [-0.1, 0.1]),
        ([0.0, float("nan")], [0.1, 0.2]),
        ([0.0, float("inf")], [0.1, 0.2]),
        ([-1e308, 1e308], [0.1, 0.2]),
        ([0.0, 1.0], [0.1, float("nan")]),
        ([0.0, "1"], [0.1, 0.2]),
        ([float(i) for i in range(MOST_POINTS + 1)], [0.5] * (MOST_POINTS + 1)),
    ],
    ids=str,
)
def test_what_is_none_is_refused(scores: list, probabilities: list) -> None:
    with pytest.raises(ValidationError):
        Calibration(scores=scores, probabilities=probabilities)
