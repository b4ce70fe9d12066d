"""Inverse propensities and groups against the formula written out, on random and
degenerate data.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from unidec.data import propensity, storage
from unidec.data.propensity import (
    build_propensity,
    frequency_group,
    inverse_propensity,
    label_counts,
    load_propensity,
)
from unidec.errors import ArtifactError, DataError


def test_formula_by_hand():
    """N = e^3, so C = 2 * 2.5^0.55; a label with one point weighs 1 + (log N - 1) whatever A and B
    are.
    """
    num_train = math.exp(3)
    got = inverse_propensity([0, 1, 10], num_train, 0.55, 1.5)
    assert got.dtype == np.float64
    assert got == pytest.approx([1 + 2 * (2.5 / 1.5) ** 0.55, 3.0, 1 + 2 * (2.5 / 11.5) ** 0.55])
    assert inverse_propensity([1], num_train, 0.5, 0.4) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0.55, 1.5),
        (0.6, 2.6),
        (0.5, 0.4),
    ],
)
def test_random_counts(a, b):
    count_L = np.random.default_rng(1).integers(0, 500, 40)
    got = inverse_propensity(count_L, 20_000, a, b)
    for value, count in zip(got, count_L, strict=True):
        c = (math.log(20_000) - 1) * (b + 1) ** a
        expected = 1 + c / (count + b) ** a
        assert value == pytest.approx(expected)
    assert (np.diff(got[np.argsort(count_L)]) <= 0).all(), "rarer labels weigh at least as much"


@pytest.mark.parametrize("num_train", [0, 1, 2, 3])
@pytest.mark.parametrize("b", [0.0, 1.5])
def test_tiny_data_gives_finite_weights(num_train, b):
    got = inverse_propensity([0, 1, 2], num_train, 0.55, b)
    assert np.isfinite(got).all()
    assert (got >= 1).all()


@pytest.mark.parametrize(
    ("counts", "a", "b"),
    [
        ([-1], 0.5, 1),
        ([1], 0, 1),
        ([1], 0.5, -1),
        ([np.nan], 0.5, 1),
    ],
)
def test_out_of_range(counts, a, b):
    with pytest.raises(DataError):
        inverse_propensity(counts, 10, a, b)


def test_group_borders():
    got = frequency_group([0, 9, 10, 100, 101, 10**6])
    assert got.tolist() == [0, 0, 1, 1, 2, 2]
    assert got.dtype == np.int8


def fake_dataset(seed=0):
    rng = np.random.default_rng(seed)
    relevance = csr_matrix(
        (rng.random((60, 12)) < 0.3) * rng.choice([0.5, 2.0], (60, 12)).astype(np.float32)
    )
    relevance.data[:5] = 0
    split_N = rng.integers(0, 3, 60)
    names = ["train", "validation", "test"]
    return SimpleNamespace(
        relevance=relevance,
        num_labels=12,
        split_N=split_N,
        rows=lambda split: np.flatnonzero(split_N == names.index(split)),
    )


def test_counts_see_the_published_training_rows_only_and_stream(monkeypatch, tmp_path):
    monkeypatch.setattr(propensity, "_ROWS_AT_ONCE", 7)
    dataset = fake_dataset()
    train = np.concatenate([dataset.rows("train"), dataset.rows("validation")])
    expected = (dataset.relevance.toarray()[train] > 0).sum(axis=0)
    assert label_counts(dataset.relevance, train).tolist() == expected.tolist()

    build_propensity(dataset, 0.6, 2.6, tmp_path / "propensity")
    got = load_propensity(tmp_path / "propensity")
    assert got.counts_L.tolist() == expected.tolist()
    np.testing.assert_array_equal(got.inverse_L, inverse_propensity(expected, len(train), 0.6, 2.6))
    np.testing.assert_array_equal(got.group_L, frequency_group(expected))
    assert (got.a, got.b) == (0.6, 2.6)
    assert sorted(p.name for p in (tmp_path / "propensity").iterdir()) == [
        "group.npy",
        "inverse_propensity.npy",
        "label_counts.npy",
        "manifest.json",
    ]


def test_faulty_folder_is_refused(tmp_path):
    folder = build_propensity(fake_dataset(), 0.6, 2.6, tmp_path / "propensity")
    np.save(folder / "group.npy", np.zeros(3, np.int8))
    with pytest.raises(ArtifactError, match="damaged"):
        load_propensity(folder)
    storage.write_manifest(folder, "propensity", 1, {"a": 0.6, "b": 2.6, "num_labels": 12})
    with pytest.raises(ArtifactError, match="different lengths"):
        load_propensity(folder)
