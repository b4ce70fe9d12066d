"""Distances against their definitions, noise against new draws: quiet where nothing changed, found where it did."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon

from unidec.data.dataset import write_dataset
from unidec.data.profile import DatasetProfile, Vocabulary, measure_texts, profile_dataset
from unidec.data.raw import RawData
from unidec.evaluation import drift
from unidec.evaluation.drift import Noise, compare_served, js_distance, mean_shift, served_facts, served_noise
from unidec.evaluation.drift_checks import (
    Check,
    compare_answers,
    compare_datasets,
    compare_quality,
    compare_texts,
    order,
)
from unidec.sections import Drift

LIMITS = Drift()
TOPICS = np.array(["river", "music", "engine", "garden", "letter", "planet", "bread", "window"])


@pytest.fixture(scope="module")
def tokenizer(helper: Callable[[str], Any], tiny_raw: RawData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helper("conftest").tiny_transformer("bert", tiny_raw, tmp_path_factory.mktemp("tokenizer") / "bert")


@pytest.fixture(scope="module")
def profile(helper: Callable[[str], Any], tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> DatasetProfile:
    """1,600 training and 400 validation queries."""
    raw = helper("conftest").make_raw(2000, 50, 60)
    return profile_dataset(write_dataset(tmp_path_factory.mktemp("d") / "d", raw, validation_share=0.2), tokenizer, 16)


def queries(rng: np.random.Generator, count: int, topics: np.ndarray = TOPICS) -> list[str]:
    """Texts as `raw_factory` writes them."""
    words = rng.integers(0, 50, (count, 2))
    return [f"{topics[rng.integers(len(topics))]} query w{a} w{b}" for a, b in words]


def test_js_distance_is_scipys_on_random_and_degenerate_histograms() -> None:
    rng = np.random.default_rng(0)
    for bins in (1, 2, 7, 100):
        first, second = rng.integers(0, 4, (2, bins)) + np.eye(bins, dtype=int)[0]
        assert js_distance(first, second) == pytest.approx(jensenshannon(first, second, base=2), abs=1e-7)
    assert js_distance([1, 0], [0, 5]) == 1.0 and js_distance([2, 2], [7, 7]) == 0.0
    assert js_distance([0, 0], [0, 0]) == 0.0 and js_distance([0, 0], [1, 0]) == 1.0 == js_distance([1, 0], [0, 0])


def test_mean_shift_by_hand() -> None:
    assert mean_shift([0, 1, 5], [3, 1, 99], [2, 1, 0]) == pytest.approx(np.sqrt((1.5**2 + 0) / 2))
    assert mean_shift([0.0], [9.0], [0.0]) == 0.0


def test_compare_served_by_hand() -> None:
    rng = np.random.default_rng(1)
    vectors, scores = rng.normal(size=(500, 6)), rng.random(500)
    reference = served_facts(vectors, scores)
    assert reference is not None and json.loads(json.dumps(reference)) == reference
    assert served_facts(np.zeros((0, 6)), np.zeros(0)) is None
    window, answered = rng.normal(size=(90, 6)) + 1, rng.random(90) / 2
    found = compare_served(reference, window, answered, 0.05)
    below = np.quantile(scores, 0.05)
    edges = np.quantile(scores, np.arange(1, 20) / 20)
    bins = [np.bincount([sum(edge <= s for edge in edges) for s in some], minlength=20) for some in (answered, scores)]
    assert found["shift"] == pytest.approx(
        np.sqrt(np.mean(((window.mean(0) - vectors.mean(0)) / vectors.std(0)) ** 2)), rel=1e-4
    )
    assert found["spread"] == pytest.approx(window.var(0).sum() / vectors.var(0).sum() - 1, rel=1e-3)
    assert found["low_score"] == (answered < below).mean() and found["low_score_below"] == pytest.approx(
        below, rel=1e-4
    )
    assert found["score"] == pytest.approx(jensenshannon(*bins, base=2), abs=1e-4)


def test_a_low_share_by_chance_is_beta_binomial() -> None:
    rng = np.random.default_rng(2)
    reference, size, low = 200, 100, 0.05
    drawn = []
    for _ in range(4000):
        threshold = np.quantile(rng.random(reference), low)
        drawn.append((rng.random(size) < threshold).mean())
    assert drift.low_score_noise(low, reference, size) == pytest.approx(np.quantile(drawn, 0.99), abs=0.02)


def test_noise_between_and_beyond_the_sizes() -> None:
    noise = Noise({"x": [1 / np.sqrt(size) for size in drift.SIZES]})
    for size in (60, 100, 750, 3000, 49_999):
        assert noise.at("x", size) == pytest.approx(1 / np.sqrt(size), rel=1e-6)
    assert noise.at("x", 5) == pytest.approx(1 / np.sqrt(5)) and noise.at("x", 10**9) == noise.at("x", 50_000)
    assert noise.at("unknown", 100) == 0.0 and noise.at("x", 0) == 0.0
    assert Noise({"x": [0.0] * len(drift.SIZES)}).at("x", 70) == pytest.approx(0.0, abs=1e-9)


def test_windows_of_the_same_texts_stay_below_the_noise(profile: DatasetProfile, tokenizer: Path) -> None:
    """Fresh draws, many seeds: chance exceeds it in few of a hundred, and the checks are quiet."""
    noise = Noise(drift.text_noise(profile))
    assert noise.at("tokens", 100) > noise.at("tokens", 1000) > 0
    vocabulary = Vocabulary.from_json(profile.figures["vocabulary"])
    exceeded, warned = 0, []
    for seed in range(60):
        window = measure_texts(queries(np.random.default_rng(seed), 150), tokenizer, 16, vocabulary).summary()
        checks = {check.key: check for check in compare_texts(profile.figures, window, noise, LIMITS)}
        exceeded += sum(checks[f"{what}_distance"].new > noise.at(what, 150) for what in ("length", "tokens"))
        warned += [check.key for check in checks.values() if check.state != "ok"]
    assert exceeded <= 8 and len(warned) <= 5, (exceeded, warned)  # of 120 and of 240


def test_other_texts_are_found(profile: DatasetProfile, tokenizer: Path) -> None:
    noise = Noise(drift.text_noise(profile))
    vocabulary = Vocabulary.from_json(profile.figures["vocabulary"])
    rng = np.random.default_rng(0)
    found = {}
    for name, texts in {
        "one topic": queries(rng, 300, TOPICS[:1]),
        "long": [" ".join(queries(rng, 3)) for _ in range(300)],
        "foreign": [f"{text} zebra{i}" for i, text in enumerate(queries(rng, 300))],
    }.items():
        checks = compare_texts(
            profile.figures, measure_texts(texts, tokenizer, 16, vocabulary).summary(), noise, LIMITS
        )
        found[name] = {check.key for check in checks if check.state != "ok"}
    assert found["one topic"] == {"tokens_distance"} | (found["one topic"] & {"length_distance"})
    assert "length_distance" in found["long"]
    assert "unseen_words" in found["foreign"]


def test_embeddings_and_scores_quiet_and_found() -> None:
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(20, 20)) / 4  # dimensions that go together

    def draw(count: int, move: float = 0.0, scale: float = 1.0, score: float = 0.0) -> tuple:
        z = rng.normal(size=(count, 20))
        return (scale * z) @ mix + move * np.abs(mix).sum(0), z[:, 0] - score

    vectors, scores = draw(1000)
    reference, noise = served_facts(vectors, scores), Noise(served_noise(vectors, scores))
    assert reference is not None

    def states(**changed: float) -> set[str]:
        answers = compare_served(reference, *draw(300, **changed), LIMITS.low_score_quantile)
        checks = compare_answers(reference, answers, 300, noise, LIMITS)
        return {check.key for check in checks if check.state != "ok"}

    quiet = [states() for _ in range(50)]
    assert sum(map(len, quiet)) <= 4, quiet  # of 200 checks
    assert "shift" in states(move=0.6)
    assert "spread" in states(scale=0.7)
    assert {"score_distance", "low_score"} <= states(score=1.5)


def test_a_later_data_set_within_and_beyond_its_bounds(profile: DatasetProfile) -> None:
    old, noise = profile.figures, Noise(drift.text_noise(profile))

    def states(change: Callable[[dict], None], labels: dict | None = None) -> dict[str, str]:
        new = copy.deepcopy(old)
        change(new)
        checks = compare_datasets(old, new, noise, LIMITS, labels)
        return {check.key: check.state for check in checks if check.state != "ok"}

    def rows(name: str, count: int) -> Callable[[dict], None]:
        return lambda new: new["rows"].update({name: count})

    train = old["rows"]["train"]
    assert states(lambda new: None) == {}
    assert states(rows("train", round(train * 1.09))) == {} == states(rows("train", round(train * 0.91)))
    assert (
        states(rows("train", round(train * 1.2))) == {"train": "warning"} == states(rows("train", round(train * 0.8)))
    )
    assert states(rows("train", round(train * 1.6))) == {"train": "stop"} == states(rows("train", round(train * 0.4)))
    assert states(rows("labels", 0)) == {"labels": "stop"}
    share = old["shares"]["unseen_labels"]["share"]

    def unseen(value: float) -> Callable[[dict], None]:
        return lambda new: new["shares"].update(unseen_labels={"share": value, "of": 10**6})

    assert states(unseen(share)) == {} and states(unseen(1.0)) == {"unseen_labels": "stop"}
    twisted = old["queries"]["tokens"]["buckets"][::-1]
    assert states(lambda new: new["queries"]["tokens"].update(buckets=twisted))["queries_tokens_distance"] != "ok"
    assert states(lambda new: None, {"left": 0.05, "new": 0.05}) == {}
    assert states(lambda new: None, {"left": 0.2, "new": 0.9}) == {"labels_left": "warning", "labels_new": "stop"}


def test_nothing_before_bounds_nothing(profile: DatasetProfile) -> None:
    """A split that the earlier data did not have is no change to judge."""
    old = copy.deepcopy(profile.figures)
    old["rows"]["validation"] = 0
    checks = {check.key: check for check in compare_datasets(old, profile.figures, Noise({}), LIMITS)}
    assert checks["validation"].state == "ok" and checks["validation"].warn == (None, None)


def test_small_shares_do_not_cry_wolf() -> None:
    """One duplicate among a hundred where there was none; the same share of a million warns."""
    base: dict[str, Any] = {"share": 0.0, "of": 100}
    from unidec.evaluation.drift_checks import _share

    levels = (LIMITS.warn_change, LIMITS.stop_change)
    assert _share("x", "x", base, {"share": 0.01, "of": 100}, levels).state == "ok"
    many = {"share": 0.0, "of": 10**6}
    assert _share("x", "x", many, {"share": 0.02, "of": 10**6}, levels).state == "warning"
    assert _share("x", "x", many, {"share": 0.06, "of": 10**6}, levels).state == "stop"


def test_quality_of_a_labelled_window() -> None:
    reference, errors = {"P@1": 40.0, "nDCG@5": 30.0}, {"P@1": 1.0, "nDCG@5": 1.0}

    def states(p: float, n: float, unknown: float = 0.0) -> set[str]:
        missing = {"share": unknown, "of": 1000}
        checks = compare_quality(reference, {"P@1": p, "nDCG@5": n}, errors, missing, LIMITS)
        return {check.key for check in checks if check.state != "ok"}

    assert states(40, 30) == set() == states(37, 27.5) == states(90, 90)
    assert states(30, 30) == {"P_at_1"} and states(40, 20) == {"nDCG_at_5"}
    assert states(40, 30, 0.5) == {"unknown_labels"}
    assert compare_quality({}, {"P@1": 1.0}, errors, {"share": 0.0, "of": 0}, LIMITS)[0].key == "unknown_labels"


def test_words_of_a_check_and_their_order() -> None:
    checks = [
        Check("a", "words", "share", 0.05, 0.06, (None, 0.1), (None, 0.2)),
        Check("b", "queries", "count", 1000, 1200, (900, 1100), (500, 1500)),
        Check("c", "lengths", "distance", None, 0.7, (None, 0.1), (None, 0.5), 0.02),
    ]
    assert [check.key for check in order(checks)] == ["c", "b", "a"]
    assert [check.words for check in checks] == [
        "words: 5.00% before, 6.00% now",
        "queries: 1,000 before, 1,200 now (+20.0%); 900 to 1,100 expected",
        "lengths: 0.700; at most 0.500 expected",
    ]
    stored = checks[2].to_json()
    assert stored["drifted"] and stored["check"] == "c" and stored["stop"] == [None, 0.5]
    assert Check("n", "n", "mean", 1.0, float("nan"), (0.9, 1.1)).state == "warning"
