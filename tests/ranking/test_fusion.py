"""Learnt fusion: what it reads of each candidate against loops in double precision; bundles that
rank by it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.dense_votes import dense_votes
from helpers.tiny_bundle import TITLES, UIDS, random_fusion, write_tiny_bundle

from unidec.bundle.answer import Answerer, LabelQuery
from unidec.bundle.bundle import Bundle
from unidec.data.propensity import inverse_propensity
from unidec.data.storage import write_manifest
from unidec.errors import ArtifactError, DataError
from unidec.ranking.fusion import FEATURES, LIMIT, Evidence, Fusion
from unidec.ranking.fusion_fit import fit_fusion
from unidec.ranking.word_scores import WordScorer

QUERIES = [
    "red car",
    "an old house",
    "",
    "boat boat blue",
    "🚗 unknown \x00 words",
    "big green boat new car",
]


@pytest.fixture(params=["plain", "stacked", "stacked, head"])
def fused(request, tmp_path, rng, stub_model) -> Bundle:
    write_tiny_bundle(
        tmp_path / "bundle",
        rng,
        votes=True,
        by_words=True,
        fused=True,
        stacked="stacked" in request.param,
        clf_normalize=False,
        bias=True,
        word_head=2 * ("head" in request.param),
    )
    return Bundle.load(tmp_path / "bundle")


def slow_features(bundle: Bundle, text: str, excluded: set[int]) -> dict[int, list[float]]:
    """label -> what is read of it, for all labels; in double precision, one label after
    the other.
    """
    asked = bundle.encode([text])
    voters = bundle.neighbours
    labels_ML = voters.labels_ML.toarray()
    words_F = voters.words.part(asked.words_BF, 0).toarray()[0].astype(float)
    de = bundle.vectors["de"].astype(float) @ asked.de_BD[0]
    clf = bundle.vectors["clf"].astype(float) @ asked.clf_BD[0] + bundle.vectors["bias"]
    blend = de + bundle.info.clf_weight * clf
    votes = dense_votes(voters.votes(asked.words_BF, bundle.info.knn.neighbours))[0]
    own = voters.label_words_LF.toarray() @ words_F
    sums = labels_ML.T @ voters.words.part(voters.vectors_MD, 0).toarray()
    profiles = np.array([row / np.sqrt(row @ row) if row.any() else row for row in sums]) @ words_F
    usual = [row for row in range(len(TITLES)) if row not in excluded]
    likely = sorted(usual, key=lambda row: (-blend[row], row))[:10]
    chance = np.exp((blend[likely] - max(blend[likely])) / 0.3)
    together = np.zeros(len(TITLES))
    for weight, row in zip(chance / chance.sum(), likely, strict=True):
        count = labels_ML[:, row].sum()
        for other in range(len(TITLES)):
            both = (labels_ML[:, row] * labels_ML[:, other]).sum()
            together[other] += weight * both / count if count and other != row else 0.0
    by_words = np.zeros(len(TITLES))
    if bundle.info.fusion.words is not None:
        every = np.arange(len(TITLES))
        scores = WordScorer(voters, bundle.info.knn.neighbours).score(asked.words_BF)
        by_words = bundle.info.fusion.words.scores(scores.features(0 * every, every))
    out = {}
    for row in range(len(TITLES)):
        parts = (blend, de, clf, votes, own, profiles)
        below = [max(part[usual]) - part[row] for part in parts]
        ranks = [np.log1p(sum(part[other] > part[row] for other in usual)) for part in parts[:4]]
        out[row] = [
            blend[row],
            de[row],
            clf[row],
            votes[row],
            own[row],
            profiles[row],
            together[row],
            np.log1p(labels_ML[:, row].sum()),
            *ranks,
            *below,
            max(blend[usual]),
            np.log1p((words_F > 0).sum()),
        ]
        if bundle.info.fusion.words is not None:
            rank = sum(by_words[other] > by_words[row] for other in usual)
            out[row] += [by_words[row], max(by_words[usual]) - by_words[row], np.log1p(rank)]
    return out


def read(
    bundle: Bundle, texts: list[str], excluded: np.ndarray, allowed: np.ndarray | None = None
) -> Evidence:
    asked = bundle.encode(texts)
    found = np.tile(np.arange(len(TITLES)), (len(texts), 1))  # as a search that finds all of them
    key = np.arange(len(texts))[:, None] * len(TITLES) + found
    found[np.isin(key, excluded)] = -1
    return bundle.ranker.evidence.read(asked, found, excluded, allowed)


def test_features_are_those_of_a_loop(fused):
    excluded = np.array([3, 7, 8, 0]) + 12 * np.array([0, 1, 1, 5])  # label + 12 queries
    evidence = read(fused, QUERIES, excluded)
    assert evidence.num_queries == len(QUERIES)
    for query, text in enumerate(QUERIES):
        left_out = {int(key) % 12 for key in excluded if key // 12 == query}
        wanted = slow_features(fused, text, left_out)
        here = evidence.query_P == query
        assert evidence.label_P[here].tolist() == [row for row in range(12) if row not in left_out]
        for row, features in zip(evidence.label_P[here], evidence.feature_PX[here], strict=True):
            expected = wanted[int(row)]
            np.testing.assert_allclose(
                features, expected, rtol=2e-3, atol=2e-4, err_msg=f"{text} {row}"
            )


def test_more_queries_than_a_block_are_read_alike(fused, monkeypatch):
    excluded = np.array([2 * 12 + 3, 4 * 12 + 7])
    whole = read(fused, QUERIES, excluded)
    monkeypatch.setattr("unidec.ranking.fusion.QUERIES_AT_ONCE", 2)
    parts = read(fused, QUERIES, excluded)
    np.testing.assert_array_equal(parts.query_P, whole.query_P)
    np.testing.assert_array_equal(parts.label_P, whole.label_P)
    np.testing.assert_allclose(parts.feature_PX, whole.feature_PX, atol=1e-5)


def test_labels_to_choose_from_do_not_change_what_is_read(fused):
    excluded = np.array([0 * 12 + 3])
    allowed = np.array([3, 5, 9])
    some = read(fused, QUERIES, excluded, allowed)
    every = read(fused, QUERIES, excluded)
    key = every.query_P * 12 + every.label_P
    place = np.searchsorted(key, some.query_P * 12 + some.label_P)
    assert set(some.label_P) == set(allowed.tolist())
    assert not ((some.query_P == 0) & (some.label_P == 3)).any()
    np.testing.assert_allclose(some.feature_PX, every.feature_PX[place], atol=1e-5)


def test_a_bundle_ranks_by_network_and_tail(fused):
    texts = [text or "?" for text in QUERIES]  # a blank text is refused
    fusion = fused.info.fusion
    evidence = read(fused, texts, np.zeros(0, np.int64))
    x = np.clip(
        (evidence.feature_PX - np.array(fusion.mean)) / np.array(fusion.scale), -LIMIT, LIMIT
    )
    network = (
        x @ fusion.linear
        + np.maximum(x @ np.array(fusion.hidden).T + fusion.hidden_bias, 0) @ fusion.out
    )
    counts = np.asarray(fused.neighbours.labels_ML.sum(axis=0)).ravel().astype(int)
    rare = np.log(inverse_propensity(counts, fused.neighbours.num_queries, 0.55, 1.5))
    answerer = Answerer(fused, fused.encoder)
    for tail in (0.0, 2.0, -1.5):
        found = answerer.answer([LabelQuery(text, k=12, tail=tail) for text in texts])
        for query, prediction in enumerate(found):
            here = evidence.query_P == query
            wanted = network[here] + tail * rare
            got = dict(zip(prediction.labels, prediction.scores, strict=True))
            np.testing.assert_allclose([got[uid] for uid in UIDS], wanted, rtol=1e-3, atol=1e-3)
            assert prediction.scores == sorted(prediction.scores, reverse=True)
    allowed = answerer.answer([LabelQuery(text, k=2, allow=("L3", "L5", "L9")) for text in texts])
    every = answerer.answer([LabelQuery(text, k=12) for text in texts])
    for few, many in zip(allowed, every, strict=True):
        kept = [
            (uid, score)
            for uid, score in zip(many.labels, many.scores, strict=True)
            if uid in ("L3", "L5", "L9")
        ]
        assert few.labels == [uid for uid, _ in kept[:2]]
        expected = [score for _, score in kept[:2]]
        np.testing.assert_allclose(few.scores, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(DataError, match="tail"):
        answerer.answer([LabelQuery("red car", tail=float("nan"))])


def test_one_head_alone_is_not_fused(fused):
    asked = fused.encode(QUERIES)
    rows = fused.ranker.rank(asked, 12, head="de").rows
    expected = np.argsort(-(asked.de_BD @ fused.vectors["de"].T), axis=1, kind="stable")
    np.testing.assert_array_equal(rows, expected)


def test_training_beats_the_best_single_feature_on_queries_not_seen(rng, monkeypatch):
    num = 300
    per_query = 20
    query_P = np.repeat(np.arange(num), per_query)
    feature_PX = rng.normal(size=(num * per_query, len(FEATURES))).astype(np.float32)
    feature_PX[:, 3] *= 100  # units differ
    parts = (feature_PX[:, 0], feature_PX[:, 3] / 100, np.abs(feature_PX[:, 5]))
    hidden = parts[0] + parts[1] + parts[2]
    # the best of each query
    relevant_P = hidden > np.sort(hidden.reshape(num, -1), axis=1)[query_P, -2]
    relevant_P[query_P == 7] = False  # a query without a positive
    label_P = np.tile(np.arange(per_query), num)
    evidence = Evidence(query_P, label_P, feature_PX[:, 0], num, feature_PX)
    fitted = fit_fusion(evidence, relevant_P, (0.55, 1.5))

    def first_is_right(score_P: np.ndarray) -> float:
        return float(
            relevant_P.reshape(num, -1)[
                np.arange(num), score_P.reshape(num, -1).argmax(axis=1)
            ].mean()
        )

    assert first_is_right(fitted.held_out_P) > first_is_right(feature_PX[:, 0]) + 0.2
    # the same again, whatever else draws random numbers; a few steps show it as well as all
    monkeypatch.setattr("unidec.ranking.fusion_fit.MOST_STEPS", 10)
    short = fit_fusion(evidence, relevant_P, (0.55, 1.5)).fusion
    torch.manual_seed(5)
    assert short == fit_fusion(evidence, relevant_P, (0.55, 1.5)).fusion != fitted.fusion
    assert short != fit_fusion(evidence, relevant_P, (0.55, 1.5), seed=1).fusion


def test_training_without_any_positive_is_harmless():
    feature_PX = np.ones((6, len(FEATURES)), np.float32)
    evidence = Evidence(np.arange(6), np.zeros(6, int), np.ones(6), 6, feature_PX)
    assert np.isfinite(fit_fusion(evidence, np.zeros(6, bool), (0.55, 1.5)).held_out_P).all()


def test_a_damaged_fusion_is_refused(tmp_path, rng, stub_model):
    write_tiny_bundle(tmp_path / "bundle", rng, votes=True, by_words=True, fused=True, stacked=True)
    good = (tmp_path / "bundle" / "bundle.json").read_text()

    def edited(change) -> Path:
        info = json.loads(good)
        change(info)
        (tmp_path / "bundle" / "bundle.json").write_text(json.dumps(info))
        sign(tmp_path / "bundle")
        return tmp_path / "bundle"

    def cut(info):
        info["fusion"]["linear"] = info["fusion"]["linear"][1:]

    def endless(info):
        info["fusion"]["out"][0] = 1e400

    def flat(info):
        info["fusion"]["scale"][2] = 0.0

    def alone(info):
        info["knn"] = None

    def unread(info):
        info["fusion"]["words"] = None

    def other_words(info):
        words = info["fusion"]["words"]
        for rows in (words["mean"], words["scale"], words["linear"], *words["hidden"]):
            rows.pop()

    def first_words(info):
        info["knn"]["word_head"] = 3

    def uneven(info):
        info["fusion"]["words"]["hidden_bias"].pop()

    for change in (cut, endless, flat, alone, unread, other_words, first_words, uneven):
        with pytest.raises(ArtifactError, match=r"bundle\.json"):
            Bundle.load(edited(change))
    edited(lambda info: None)
    (tmp_path / "bundle" / "neighbours" / "label_words_indptr.npy").unlink()
    sign(tmp_path / "bundle")
    with pytest.raises(ArtifactError, match="label_words"):
        Bundle.load(tmp_path / "bundle")


def sign(folder: Path) -> None:
    """A manifest of the files as they are."""
    about = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, about["kind"], about["version"], about["meta"])


def test_weights_of_another_number_of_features_are_refused(rng):
    weights = random_fusion(rng).model_dump()
    with pytest.raises(ValueError, match="features"):
        Fusion(**weights | {"mean": weights["mean"][:-1]})
