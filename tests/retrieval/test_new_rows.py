"""Estimated classifier rows against a loop over labels, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from unidec.retrieval import new_rows
from unidec.retrieval.new_rows import estimated_rows
from unidec.retrieval.scoring_space import unit_rows


def by_hand(
    vectors: dict[str, np.ndarray], trained: list[int], clf: np.ndarray, de: np.ndarray | None, cosine: bool = False
) -> np.ndarray:
    """Row by row, in Python."""
    length = min(1.0, float(np.mean([np.linalg.norm(vectors["clf"][label]) for label in trained])))
    rows = []
    for s in range(len(clf)):
        text = clf[s] / np.linalg.norm(clf[s]) if clf[s].any() else clf[s]

        def score(label: int, s: int = s, text: np.ndarray = text) -> float:
            return float(vectors["clf"][label] @ text if de is None else vectors["de"][label] @ de[s])

        near = sorted(trained, key=lambda label: (-score(label), label))[:3]
        row = 0.6 * length * text + 0.4 * np.mean([vectors["clf"][label] for label in near], axis=0)
        rows.append(row + 3 * np.mean([vectors["clf"][label] for label in trained], axis=0) * cosine)
    return np.array(rows)


def arrays(rng: np.random.Generator, num: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    made = {
        "de": unit_rows(rng.normal(size=(num, 6))),
        "clf": scale * rng.normal(size=(num, 6)),
        "bias": rng.normal(size=num),
    }
    return {name: array.astype(np.float32) for name, array in made.items()}


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("block", [1, 4, 1 << 15])
@pytest.mark.parametrize("with_de", [True, False])
@pytest.mark.parametrize(("num", "scale"), [(40, 1.0), (40, 0.1), (2, 1.0), (1, 1.0)])
def test_the_text_and_what_is_near(
    num: int, scale: float, with_de: bool, block: int, cosine: bool, rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(new_rows, "_ROWS_AT_ONCE", block)
    vectors = arrays(rng, num, scale)
    trained = np.flatnonzero(rng.random(num) < 0.7) if num > 2 else np.arange(num)
    clf, de = rng.normal(size=(9, 6)).astype(np.float32), unit_rows(rng.normal(size=(9, 6)))
    clf[3] = 0  # a text without a known word
    de = de if with_de else None
    found, bias = estimated_rows(vectors, trained, clf, de, cosine)
    np.testing.assert_allclose(found, by_hand(vectors, trained.tolist(), clf, de, cosine), atol=1e-5)
    assert found.dtype == np.float32 and bias == pytest.approx(vectors["bias"][trained].mean(), abs=1e-6)


def test_a_row_does_not_depend_on_what_else_is_new(rng: np.random.Generator) -> None:
    vectors, trained = arrays(rng, 30), np.arange(30)
    clf, de = rng.normal(size=(5, 6)).astype(np.float32), unit_rows(rng.normal(size=(5, 6)))
    together = estimated_rows(vectors, trained, clf, de)[0]
    alone = [estimated_rows(vectors, trained, clf[s : s + 1], de[s : s + 1])[0] for s in range(5)]
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-6)


@pytest.mark.parametrize("block", [2, 100])
def test_of_equally_near_labels_the_first_count(
    block: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_rows, "_ROWS_AT_ONCE", block)
    vectors = arrays(rng, 12)
    vectors["de"][:] = np.eye(6, dtype=np.float32)[0]  # products without rounding
    clf, de = rng.normal(size=(1, 6)).astype(np.float32), vectors["de"][:1]
    found = estimated_rows(vectors, np.arange(12), clf, de)[0]
    np.testing.assert_allclose(found[0], by_hand(vectors, list(range(3)), clf, de)[0], atol=1e-5)


def test_without_a_trained_label_a_row_is_its_text(rng: np.random.Generator) -> None:
    clf = rng.normal(size=(2, 6)).astype(np.float32)
    found, bias = estimated_rows(arrays(rng, 4), np.zeros(0, dtype=np.int64), clf, None)
    assert np.array_equal(found, unit_rows(clf)) and bias == 0.0
    assert estimated_rows(arrays(rng, 4), np.arange(4), clf[:0], None)[0].shape == (0, 6)
