"""Rows drawn towards their texts' predictions, against equations that are solved label by label."""

import numpy as np
import pytest

from unidec.ranking import row_prior
from unidec.ranking.row_prior import draw_rows


def slow(clf_LD, text_LD, num_L, prior):
    """The formula in float64: each label with its queries adds its own equations."""
    width = text_LD.shape[1]
    left = np.eye(width)
    right = np.zeros((width, width))
    for row, text, num in zip(clf_LD, text_LD, num_L, strict=True):
        for _ in range(num):
            left += np.outer(text, text)
            right += np.outer(text, row)
    weights = np.linalg.inv(left) @ right
    drawn = [
        (num * row + prior * text @ weights) / (num + prior)
        for row, text, num in zip(clf_LD, text_LD, num_L, strict=True)
    ]
    return np.stack(drawn)


def rows(rng, num_labels, width=6):
    clf_LD = rng.normal(size=(num_labels, width)).astype(np.float32)
    text_LD = rng.normal(size=(num_labels, width)).astype(np.float32)
    return clf_LD, text_LD / np.linalg.norm(text_LD, axis=1, keepdims=True)


@pytest.mark.parametrize("prior", [0.5, 1.0, 7.0])
@pytest.mark.parametrize("num_labels", [1, 5, 40])
def test_rows_equal_the_formula(rng, monkeypatch, num_labels, prior):
    monkeypatch.setattr(row_prior, "AT_ONCE", 7)  # several blocks
    clf_LD, text_LD = rows(rng, num_labels)
    num_L = rng.integers(0, 9, num_labels)
    expected = slow(clf_LD.astype(np.float64), text_LD.astype(np.float64), num_L, prior)
    draw_rows(clf_LD, text_LD, num_L, prior)
    assert clf_LD.dtype == np.float32
    np.testing.assert_allclose(clf_LD, expected, rtol=1e-4, atol=1e-5)


def test_well_trained_rows_stay_and_untrained_ones_are_predicted(rng):
    clf_LD, text_LD = rows(rng, 60)
    weights = rng.normal(size=(6, 6)).astype(np.float32)
    clf_LD[:40] = text_LD[:40] @ weights
    before = clf_LD.copy()
    num_L = np.repeat([10_000, 0], [40, 20])
    draw_rows(clf_LD, text_LD, num_L, 1.0)
    np.testing.assert_allclose(clf_LD[:40], before[:40], atol=1e-3)
    np.testing.assert_allclose(clf_LD[40:], text_LD[40:] @ weights, atol=1e-2)


def test_without_training_queries_nothing_can_be_predicted(rng):
    clf_LD, text_LD = rows(rng, 8)
    draw_rows(clf_LD, text_LD, np.zeros(8, dtype=np.int64), 1.0)
    assert not clf_LD.any()


def test_mapped_files_are_changed_in_place(rng, tmp_path):
    clf_LD, text_LD = rows(rng, 30)
    num_L = rng.integers(0, 4, 30)
    paths = [tmp_path / "clf.npy", tmp_path / "text.npy"]
    for path, array in zip(paths, (clf_LD, text_LD), strict=True):
        np.save(path, array)
    draw_rows(np.load(paths[0], mmap_mode="r+"), np.load(paths[1], mmap_mode="r"), num_L, 1.0)
    draw_rows(clf_LD, text_LD, num_L, 1.0)
    assert np.array_equal(np.load(paths[0]), clf_LD)
