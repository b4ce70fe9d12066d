"""Distances against their definitions, noise against new draws: quiet where nothing changed, found
where it did.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.tiny_data import make_raw
from scipy.spatial.distance import jensenshannon

from unidec.config import Drift
from unidec.data.dataset import write_dataset
from unidec.data.profile import measure_texts, profile_dataset
from unidec.evaluation.drift import Check, _distance, _share, compare, js_distance, served_facts

LIMITS = Drift()
TOPICS = np.array(["river", "music", "engine", "garden", "letter", "planet", "bread", "window"])
Figures = dict[str, Any]


@pytest.fixture(scope="module")
def profile(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """1,600 training and 400 validation queries."""
    raw = make_raw(2000, 50, 60)
    dataset = write_dataset(tmp_path_factory.mktemp("d") / "d", raw, validation_share=0.2)
    return profile_dataset(dataset, tiny_bert, 16)


def queries(rng: np.random.Generator, count: int, topics: np.ndarray = TOPICS) -> list[str]:
    """Texts as `raw_factory` writes them."""
    words = rng.integers(0, 50, (count, 2))
    return [f"{topics[rng.integers(len(topics))]} query w{a} w{b}" for a, b in words]


def of_texts(profile: Figures, tiny_bert: Path, texts: list[str]) -> list[Check]:
    measured = measure_texts(texts, tiny_bert, 16, profile["vocabulary"])
    return compare(profile, {"queries": measured, "held_out": measured}, LIMITS)


def changed(checks: list[Check]) -> dict[str, str]:
    return {check.key: check.state for check in checks if check.state != "ok"}


def test_js_distance_is_scipys_on_random_and_degenerate_histograms() -> None:
    rng = np.random.default_rng(0)
    for bins in (1, 2, 7, 100):
        first, second = rng.integers(0, 4, (2, bins)) + np.eye(bins, dtype=int)[0]
        assert js_distance(first, second) == pytest.approx(
            jensenshannon(first, second, base=2), abs=1e-7
        )
    assert js_distance([1, 0], [0, 5]) == 1.0
    assert js_distance([2, 2], [7, 7]) == 0.0
    assert js_distance([0, 0], [0, 0]) == 0.0
    assert js_distance([0, 0], [1, 0]) == 1.0
    assert js_distance([1, 0], [0, 0]) == 1.0


def test_what_is_served_by_hand() -> None:
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(500, 7))
    scores = rng.random(500)
    vectors[:, 6] = 3  # a constant dimension counts nothing in a shift
    reference = served_facts(vectors, scores)
    assert reference is not None
    assert json.loads(json.dumps(reference)) == reference
    assert served_facts(np.zeros((0, 6)), np.zeros(0)) is None
    window = rng.normal(size=(90, 7)) + 1
    answered = rng.random(90) / 2
    later = served_facts(window, answered, reference["score_edges"])
    none = {"length": {"histogram": [0]}, "tokens": {"buckets": [0]}}
    side = {"queries": none, "held_out": None}
    found = {
        check.key: check
        for check in compare(side | {"served": reference}, side | {"served": later}, LIMITS)
    }
    edges = np.quantile(scores, np.arange(1, 20) / 20)
    bins = [
        np.bincount([sum(edge <= s for edge in edges) for s in some], minlength=20)
        for some in (answered, scores)
    ]
    moved = (window.mean(0) - vectors.mean(0))[:6] / vectors.std(0)[:6]
    shift = np.sqrt(np.mean(moved**2))
    assert found["shift"].new == pytest.approx(shift, rel=1e-4)
    assert found["score_distance"].new == pytest.approx(jensenshannon(*bins, base=2), abs=1e-4)


def test_the_noise_of_a_distance_is_what_new_draws_of_one_distribution_give() -> None:
    rng = np.random.default_rng(2)
    share = rng.dirichlet(np.ones(30))
    for size in (100, 1000):
        drawn = [
            js_distance(rng.multinomial(2000, share), rng.multinomial(size, share))
            for _ in range(1000)
        ]
        check = _distance(
            "x", "x", (2000 * share).round().astype(int), rng.multinomial(size, share), (0.0, None)
        )
        expected = np.quantile(drawn, 0.99)
        assert check.noise == pytest.approx(expected, rel=0.15)
    assert _distance("x", "x", [0, 0], [3, 4], (0.1, None)).state == "warning"


def test_windows_of_the_same_texts_stay_below_the_noise(profile: Figures, tiny_bert: Path) -> None:
    """Fresh draws, many seeds: chance exceeds it in few of a hundred, and the checks are quiet."""
    exceeded = 0
    warned = []
    for seed in range(60):
        checks = of_texts(profile, tiny_bert, queries(np.random.default_rng(seed), 150))
        exceeded += sum(check.new > check.noise for check in checks if check.unit == "distance")
        warned += list(changed(checks))
    assert exceeded <= 8 and len(warned) <= 5, (exceeded, warned)  # of 120 and of 240


def test_other_texts_are_found(profile: Figures, tiny_bert: Path) -> None:
    rng = np.random.default_rng(0)
    one_topic = changed(of_texts(profile, tiny_bert, queries(rng, 300, TOPICS[:1])))
    assert "tokens_distance" in one_topic and not set(one_topic) - {
        "tokens_distance",
        "length_distance",
    }
    assert "length_distance" in changed(
        of_texts(profile, tiny_bert, [" ".join(queries(rng, 3)) for _ in range(300)])
    )
    foreign = [f"{text} zebra{i}" for i, text in enumerate(queries(rng, 300))]
    assert "unseen_words" in changed(of_texts(profile, tiny_bert, foreign))


def test_embeddings_and_scores_quiet_and_found() -> None:
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(20, 20)) / 4  # dimensions that go together

    def draw(count: int, move: float = 0.0, score: float = 0.0) -> tuple:
        z = rng.normal(size=(count, 20))
        return z @ mix + move * np.abs(mix).sum(0), z[:, 0] - score

    texts = {
        "queries": {"length": {"histogram": [1]}, "tokens": {"buckets": [1]}},
        "held_out": None,
    }
    reference = served_facts(*draw(1000))
    assert reference is not None

    def states(**moved: float) -> set[str]:
        later = served_facts(*draw(300, **moved), reference["score_edges"])
        return set(
            changed(compare(texts | {"served": reference}, texts | {"served": later}, LIMITS))
        )

    quiet = [states() for _ in range(50)]
    assert sum(map(len, quiet)) <= 3, quiet  # of 100 checks
    assert "shift" in states(move=0.6)
    assert "score_distance" in states(score=1.5)


def test_a_later_data_set_within_and_beyond_its_bounds(profile: Figures) -> None:
    def states(change: Callable[[Figures], Any], **more: Any) -> dict[str, str]:
        new = copy.deepcopy(profile)
        change(new)
        return changed(compare(profile, new | more, LIMITS))

    def rows(name: str, count: float) -> Callable[[Figures], None]:
        return lambda new: new["rows"].update({name: round(count)})

    train = profile["rows"]["train"]
    assert states(lambda new: None) == {}
    assert states(rows("train", train * 1.09)) == {}
    assert states(rows("train", train * 0.91)) == {}
    assert (
        states(rows("train", train * 1.2))
        == {"train": "warning"}
        == states(rows("train", train * 0.8))
    )
    assert (
        states(rows("train", train * 1.6))
        == {"train": "stop"}
        == states(rows("train", train * 0.4))
    )
    assert states(rows("labels", 0)) == {"labels": "stop"}
    share = profile["shares"]["unseen_labels"]["share"]

    def unseen(value: float) -> Callable[[Figures], None]:
        return lambda new: new["shares"].update(unseen_labels={"share": value, "of": 10**6})

    assert states(unseen(share)) == {}
    assert states(unseen(1.0)) == {"unseen_labels": "stop"}
    twisted = profile["queries"]["tokens"]["buckets"][::-1]
    assert (
        states(lambda new: new["queries"]["tokens"].update(buckets=twisted))[
            "queries_tokens_distance"
        ]
        != "ok"
    )
    assert states(lambda new: None, label_changes={"left": 0.05, "new": 0.05}) == {}
    found = states(lambda new: None, label_changes={"left": 0.2, "new": 0.9})
    expected = [("labels_new", "stop"), ("labels_left", "warning")]
    assert list(found.items()) == expected


def test_nothing_before_bounds_nothing(profile: Figures) -> None:
    """A split that the earlier data did not have is no change to judge."""
    old = copy.deepcopy(profile)
    old["rows"]["validation"] = 0
    checks = {check.key: check for check in compare(old, profile, LIMITS)}
    assert checks["validation"].state == "ok"
    assert checks["validation"].warn == (None, None)


def test_small_shares_do_not_cry_wolf() -> None:
    """One duplicate among a hundred where there was none; the same share of a million warns."""
    levels = (LIMITS.warn, LIMITS.stop)
    state = _share("x", "x", {"share": 0.0, "of": 100}, {"share": 0.01, "of": 100}, levels).state
    assert state == "ok"
    many = {"share": 0.0, "of": 10**6}
    assert _share("x", "x", many, {"share": 0.02, "of": 10**6}, levels).state == "warning"
    assert _share("x", "x", many, {"share": 0.06, "of": 10**6}, levels).state == "stop"


def test_quality_of_a_labelled_window() -> None:
    side = {"queries": {"length": {"histogram": [1]}, "tokens": {"buckets": [1]}}, "held_out": None}

    def states(p: float, n: float, unknown: float = 0.0) -> set[str]:
        new = {
            "metrics": {"P@1": (p, 1.0), "nDCG@5": (n, 1.0)},
            "unknown_labels": {"share": unknown, "of": 1000},
        }
        return set(
            changed(compare(side | {"metrics": {"P@1": 40.0, "nDCG@5": 30.0}}, side | new, LIMITS))
        )

    assert states(40, 30) == set() == states(37, 27.5) == states(90, 90)
    assert states(30, 30) == {"P_at_1"}
    assert states(40, 20) == {"nDCG_at_5"}
    assert states(40, 30, 0.5) == {"unknown_labels"}
    unlabelled = {"metrics": {}, "unknown_labels": {"share": 0.0, "of": 0}}
    found = compare(side | {"metrics": {"P@1": 40.0}}, side | unlabelled, LIMITS)
    assert "P_at_1" not in {check.key for check in found}
    assert found[-1].key == "unknown_labels"


def test_words_of_a_check() -> None:
    checks = [
        Check("a", "words", "share", 0.05, 0.06, (None, 0.1), (None, 0.2)),
        Check("b", "queries", "count", 1000, 1200, (900, 1100), (500, 1500)),
        Check("c", "lengths", "distance", None, 0.7, (None, 0.1), (None, 0.5), 0.02),
    ]
    assert [check.words for check in checks] == [
        "words: 5.00% before, 6.00% now",
        "queries: 1,000 before, 1,200 now (+20.0%); 900 to 1,100 expected",
        "lengths: 0.700; at most 0.500 expected",
    ]
    stored = checks[2].to_json()
    assert stored["drifted"]
    assert stored["check"] == "c"
    assert stored["stop"] == [None, 0.5]
    assert Check("n", "n", "mean", 1.0, float("nan"), (0.9, 1.1)).state == "warning"
    assert Check("n", "n", "mean", 1.0, float("nan"), (0.9, 1.1), (0.5, 1.5)).state == "stop"
