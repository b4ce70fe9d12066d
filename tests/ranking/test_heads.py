"""The searched space: its inner product is the blend of both heads' scores."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.label_vectors import label_vectors

from unidec.errors import DataError
from unidec.ranking.heads import Heads, unit_rows, width


def _vectors(rng: np.random.Generator, num_queries: int = 7, num_labels: int = 11, dim: int = 5):
    de_BD = unit_rows(rng.normal(size=(num_queries, dim)).astype(np.float32))
    de_LD = unit_rows(rng.normal(size=(num_labels, dim)).astype(np.float32))
    clf_BD = rng.normal(size=(num_queries, dim)).astype(np.float32) * 3
    clf_LD = rng.normal(size=(num_labels, dim)).astype(np.float32) * rng.uniform(
        0.1, 9, (num_labels, 1)
    ).astype("f4")
    return de_BD, de_LD, clf_BD, clf_LD, rng.normal(size=num_labels).astype(np.float32)


def heads_of(de_LD, clf_LD, bias_L, space, normalize: bool, weight: float = 1.0) -> Heads:
    given = {"de": de_LD, "clf": clf_LD, "bias": bias_L}
    return Heads(
        {name: part for name, part in given.items() if part is not None}, space, normalize, weight
    )


def _brute(de_b, de_l, clf_b, clf_l, bias, weight, normalize) -> tuple[float, float]:
    de = sum(float(x) * float(y) for x, y in zip(de_b, de_l, strict=True))
    clf = sum(float(x) * float(y) for x, y in zip(clf_b, clf_l, strict=True))
    if normalize:
        clf /= float(
            np.sqrt((clf_b.astype(float) ** 2).sum()) * np.sqrt((clf_l.astype(float) ** 2).sum())
        )
    elif bias is not None:
        clf += float(bias)
    return de, weight * clf


SPACES = ("both", "de", "clf")


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("space", SPACES)
def test_inner_product_is_the_blend(rng, space, with_bias, normalize):
    de_BD, de_LD, clf_BD, clf_LD, bias_L = _vectors(rng)
    bias = bias_L if with_bias else None
    weight = 0.37
    labels = label_vectors(de_LD, clf_LD, bias, space, normalize)
    queries = heads_of(de_LD, clf_LD, bias, space, normalize, weight).queries(de_BD, clf_BD)
    assert labels.dtype == queries.dtype == np.float32
    assert labels.shape[1] == queries.shape[1]
    assert queries.shape[1] == width(5, space, normalize, with_bias)
    scores = queries @ labels.T
    for b in range(len(queries)):
        for j in range(len(labels)):
            bias_j = None if bias is None else bias[j]
            used = weight if space == "both" else 1.0
            de, clf = _brute(de_BD[b], de_LD[j], clf_BD[b], clf_LD[j], bias_j, used, normalize)
            expected = {"both": de + clf, "de": de, "clf": clf}[space]
            assert scores[b, j] == pytest.approx(expected, rel=2e-5, abs=2e-5)


def test_only_the_heads_that_are_needed(rng):
    de_BD, de_LD, clf_BD, clf_LD, _ = _vectors(rng)
    assert np.array_equal(label_vectors(de_LD, None, None, "de", True), de_LD)
    assert np.array_equal(
        heads_of(None, clf_LD, None, "clf", False, 9.0).queries(None, clf_BD), clf_BD
    )
    for wrong in (
        lambda: label_vectors(de_LD, None, None, "both", True),
        lambda: label_vectors(None, clf_LD, None, "de", True),
        lambda: heads_of(None, clf_LD, None, "clf", True).queries(de_BD, None),
    ):
        with pytest.raises(ValueError, match="got None"):
            wrong()
    with pytest.raises(ValueError, match="space 'sum' needs"):
        label_vectors(de_LD, clf_LD, None, "sum", True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="differ"):
        label_vectors(de_LD, clf_LD[:-1], None, "both", True)


def test_rows_of_zeros_stay_zeros():
    rows = np.array([[0, 0], [3, 4]], dtype=np.float32)
    expected = np.array([[0, 0], [0.6, 0.8]], dtype=np.float32)
    assert np.array_equal(unit_rows(rows), expected)
    heads = heads_of(None, rows, None, "clf", True)
    found = heads.found_scores(heads.queries(None, rows[1:]), np.array([[0, 1]]))
    assert np.array_equal(found, np.array([[0, 1]], dtype=np.float32))


@pytest.mark.parametrize("normalize", [True, False])
def test_scores_of_found_labels_are_those_of_each_pair(rng, normalize):
    _, _, clf_BD, clf_LD, bias_L = _vectors(rng)
    labels_BK = rng.integers(-1, 11, size=(7, 4))
    heads = heads_of(None, clf_LD, bias_L, "clf", normalize)
    got = heads.found_scores(heads.queries(None, clf_BD), labels_BK)
    assert got.dtype == np.float32
    for b in range(7):
        for k, label in enumerate(labels_BK[b]):
            if label < 0:
                assert np.isnan(got[b, k])
            else:
                zero = np.zeros(5)
                _, expected = _brute(
                    zero, zero, clf_BD[b], clf_LD[label], bias_L[label], 1.0, normalize
                )
                assert got[b, k] == pytest.approx(expected, rel=2e-5, abs=2e-5)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("space", SPACES)
def test_scores_of_some_pairs_are_those_of_all(rng, space, with_bias, normalize):
    de_BD, de_LD, clf_BD, clf_LD, bias_L = _vectors(rng)
    bias = bias_L if with_bias else None
    heads = heads_of(de_LD, clf_LD, bias, space, normalize, 0.37)
    queries = heads.queries(de_BD, clf_BD)
    all_BL = queries @ label_vectors(de_LD, clf_LD, bias, space, normalize).T
    asked = rng.random(all_BL.shape) < 0.4
    asked[2] = False
    asked[5] = True
    query_P, label_P = np.nonzero(asked)
    scores = heads.pair_scores(queries, query_P, label_P)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, all_BL[asked], rtol=1e-5, atol=1e-6)
    alone = [heads.pair_scores(queries, *pair) for pair in zip(query_P[:, None], label_P[:, None])]
    np.testing.assert_array_equal(np.concatenate(alone), scores)
    halves = {name: part.astype(np.float16) for name, part in heads.vectors.items()}
    half = Heads(halves, space, normalize, 0.37)
    wide = {name: part.astype(np.float32) for name, part in halves.items()}
    rounded = Heads(wide, space, normalize, 0.37)
    expected = rounded.pair_scores(queries, query_P, label_P)
    np.testing.assert_allclose(half.pair_scores(queries, query_P, label_P), expected, rtol=1e-6)
    nothing = np.zeros(0, dtype=np.int64)
    assert heads.pair_scores(queries, nothing, nothing).shape == (0,)
    shape = heads.pair_scores(queries[:0], nothing, nothing).shape
    assert shape == (0,)


def test_one_head_in_the_space_of_both(rng):
    de_BD, de_LD, clf_BD, clf_LD, bias_L = _vectors(rng)
    heads = heads_of(de_LD, clf_LD, bias_L, "both", False, 0.37)
    for head in ("de", "clf"):
        alone = heads.alone(head)
        expected = alone.queries(de_BD, clf_BD) @ alone.take(slice(None)).T
        got = heads.queries(de_BD, clf_BD, head) @ heads.take(slice(None)).T
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    other = heads.weighted(2.0).queries(de_BD, clf_BD)
    assert np.array_equal(
        other, heads_of(de_LD, clf_LD, bias_L, "both", False, 2.0).queries(de_BD, clf_BD)
    )
    with pytest.raises(DataError, match="does not rank by the head 'clf'"):
        heads.alone("de").queries(de_BD, clf_BD, "clf")
