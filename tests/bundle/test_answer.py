"""Answers by request against all scores of all labels, filtered and sorted one by one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from helpers.dense_votes import dense_votes
from helpers.tiny_bundle import TITLES, UIDS, write_tiny_bundle

from unidec.bundle.answer import Answerer, LabelQuery
from unidec.bundle.bundle import Bundle
from unidec.errors import DataError
from unidec.ranking.query_encoder import open_encoder
from unidec.ranking.ranker import Calibration

pytestmark = pytest.mark.usefixtures("stub_model")
TEXTS = [
    "red car",
    "an old house",
    "?",
    "boat boat blue",
    "🚗 unknown \x00 words",
    "big big old new red car green",
]


def _answerer(path) -> Answerer:
    bundle = Bundle.load(path)
    return Answerer(bundle, open_encoder(bundle, "torch"))


def _slow(answerer: Answerer, request: LabelQuery) -> list[tuple[float, str, float, float, float]]:
    """(score, uid, de, clf, votes) of every label that may be returned, by plain arithmetic in
    float64.
    """
    bundle = answerer.bundle
    info = answerer.bundle.info
    asked = bundle.encode([request.text])
    votes_L = np.zeros(len(UIDS))
    if bundle.neighbours is not None and request.head == "both":
        compared = (
            asked.words_BF
            if bundle.words is not None
            else asked.de_BD
            if info.knn.space == "de"
            else asked.clf_BD
        )
        votes_L = dense_votes(bundle.neighbours.votes(compared, info.knn.neighbours))[0].astype(
            float
        )
    rows = []
    for label, uid in enumerate(UIDS):
        de = clf = 0.0
        if asked.de_BD is not None:
            de = float(asked.de_BD[0].astype(float) @ bundle.vectors["de"][label].astype(float))
        if asked.clf_BD is not None:
            a = asked.clf_BD[0].astype(float)
            b = bundle.vectors["clf"][label].astype(float)
            clf = float(a @ b)
            if info.clf_normalize:
                clf /= max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30)
            elif "bias" in bundle.vectors:
                clf += float(bundle.vectors["bias"][label])
        by = info.space if request.head == "both" else request.head
        score = {"both": de + info.clf_weight * clf, "de": de, "clf": clf}[by]
        if request.head == "both" and info.knn is not None:
            score += info.knn.weight * votes_L[label]
        allowed = request.allow is None or uid in request.allow
        if (
            allowed
            and uid not in request.deny
            and (request.min_score is None or score >= request.min_score)
        ):
            rows.append((score, uid, de, clf, votes_L[label]))
    return sorted(rows, key=lambda row: -row[0])[: request.k]


def _random_request(rng: np.random.Generator, heads: list[str]) -> LabelQuery:
    def some(most: int) -> tuple[str, ...]:
        return tuple(rng.choice([*UIDS, "nobody", ""], int(rng.integers(0, most))).tolist())

    return LabelQuery(
        text=str(rng.choice(TEXTS)),
        k=int(rng.integers(1, 20)),
        allow=some(15) if rng.random() < 0.5 else None,
        deny=some(20) if rng.random() < 0.5 else (),
        min_score=float(rng.normal(0, 0.6)) if rng.random() < 0.4 else None,
        head=str(rng.choice(heads)),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("heads", "space", "normalize", "bias", "votes", "by_words"),
    [
        ("both", "both", True, False, False, False),
        ("both", "both", False, True, False, False),
        ("both", "both", False, True, True, False),
        ("both", "both", True, False, True, True),
        ("both", "both", False, True, True, True),
        ("both", "de", True, False, False, False),
        ("both", "clf", False, True, True, False),
        ("de", "de", True, False, True, False),
        ("clf", "clf", False, True, False, False),
    ],
)
def test_answers_as_a_loop_over_all_labels(
    rng, tmp_path, heads, space, normalize, bias, votes, by_words
):
    write_tiny_bundle(
        tmp_path / "b",
        rng,
        heads=heads,
        space=space,
        clf_normalize=normalize,
        bias=bias,
        votes=votes,
        by_words=by_words,
    )
    answerer = _answerer(tmp_path / "b")
    known = ["both", "de", "clf"] if space == "both" else ["both", space]
    requests = [_random_request(rng, known) for _ in range(60)]
    for request, got in zip(requests, answerer.answer(requests), strict=True):
        if (
            request.min_score is not None and abs(request.min_score) > 1e-3
        ):  # not on the very edge, where rounding decides
            edge = [row[0] for row in _slow(answerer, replace(request, min_score=None, k=99))]
            if min((abs(score - request.min_score) for score in edge), default=1) < 1e-4:
                continue
        expected = _slow(answerer, request)
        assert len(got.labels) == len(got.titles) == len(got.scores) == len(expected)
        np.testing.assert_allclose(got.scores, [row[0] for row in expected], rtol=1e-4, atol=2e-5)
        at = {row[1]: row for row in _slow(answerer, replace(request, k=99))}
        for place, uid in enumerate(got.labels):
            score, _, de, clf, knn = at[uid]  # among equals another may stand here
            assert got.titles[place] == TITLES[UIDS.index(uid)]
            assert got.scores[place] == pytest.approx(score, rel=1e-4, abs=2e-5)
            if heads != "clf":
                assert got.de_scores[place] == pytest.approx(de, rel=1e-4, abs=2e-5)
            if heads != "de":
                assert got.clf_scores[place] == pytest.approx(clf, rel=1e-4, abs=2e-5)
            if votes and request.head == "both":
                assert got.knn_scores[place] == pytest.approx(knn, rel=1e-4, abs=2e-5)
        assert len(got.knn_scores) == (len(expected) if votes and request.head == "both" else 0)
        assert got.unknown_labels == len({"nobody", ""} & {*(request.allow or ())}) + len(
            {"nobody", ""} & {*request.deny}
        )


def test_probabilities_only_of_labels_that_are_ranked_as_the_bundle_ranks(rng, tmp_path):
    calibration = Calibration(scores=[-5.0, 5.0], probabilities=[0.25, 0.75])
    write_tiny_bundle(
        tmp_path / "b", rng, votes=True, by_words=True, fused=True, calibration=calibration
    )
    answerer = _answerer(tmp_path / "b")
    requests = [
        LabelQuery("red car"),
        LabelQuery("red car", head="de"),
        LabelQuery("red car", head="clf"),
        LabelQuery("red car", tail=0.5),
        LabelQuery("red car", allow=("L1", "L4"), deny=("L4",), min_score=-99),
        LabelQuery("red car", min_score=1e9),
    ]
    own, *others, chosen, none = answerer.answer(requests)
    expected = calibration.of(np.array(own.scores)).tolist()
    assert own.probabilities == expected
    assert len(own.labels) == 5
    assert [one.probabilities for one in others] == [[], [], []]
    assert all(one.labels for one in others)
    assert chosen.labels == ["L1"]
    assert chosen.probabilities == calibration.of(np.array(chosen.scores)).tolist()
    assert none.labels == none.probabilities == []
    assert answerer.explain(requests[0]).prediction.probabilities == own.probabilities


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_a_batch_answers_as_one_request_does(rng, tmp_path, kind):
    write_tiny_bundle(tmp_path / "b", rng, clf_normalize=False, bias=True, votes=True, kind=kind)
    answerer = _answerer(tmp_path / "b")
    requests = [_random_request(rng, ["both", "de", "clf"]) for _ in range(60)]
    whole = answerer.answer(requests)
    with ThreadPoolExecutor(4) as pool:  # from several threads at once
        single = [
            found for [found] in pool.map(lambda request: answerer.answer([request]), requests)
        ]
    for one, among in zip(single, whole, strict=True):
        np.testing.assert_allclose(one.scores, among.scores, rtol=1e-5, atol=1e-6)
        assert one.num_tokens == among.num_tokens and one.unknown_tokens == among.unknown_tokens
        if len(set(np.round(one.scores, 4))) == len(one.scores):
            assert one.labels == among.labels
    assert answerer.answer([]) == []


@pytest.mark.parametrize("votes", [False, True])
def test_many_denied_labels_are_searched_past_step_by_step(rng, tmp_path, monkeypatch, votes):
    monkeypatch.setattr("unidec.ranking.index._FIRST_MORE", 1)  # then 8, then 64
    monkeypatch.setattr("unidec.bundle.answer._LEAST_K", 1)
    write_tiny_bundle(tmp_path / "b", rng, clf_normalize=False, bias=True, votes=votes)
    answerer = _answerer(tmp_path / "b")
    searched = []
    search = answerer.bundle.index._search
    record = lambda q, k, rescore: searched.append((len(q), k)) or search(q, k, rescore)  # noqa: E731
    monkeypatch.setattr(answerer.bundle.index, "_search", record)
    best = answerer.bundle.predict(["red car"], k=12)[0].labels
    requests = [
        LabelQuery("red car", k=2, deny=tuple(deny)) for deny in ((), best[:2], best[:7], best[1:])
    ]
    searched.clear()
    for request, got in zip(requests, answerer.answer(requests), strict=True):
        expected = _slow(answerer, request)
        assert len(got.labels) == len(expected)
        np.testing.assert_allclose(got.scores, [row[0] for row in expected], rtol=1e-4, atol=2e-5)
        assert not set(got.labels) & set(request.deny)
    # the second was one short after the first step, the third and fourth many; the fourth has but
    # one label
    assert searched == [(4, 3), (3, 10), (1, 12)]


def test_more_labels_than_there_are(rng, tmp_path):
    write_tiny_bundle(tmp_path / "b", rng)
    found = _answerer(tmp_path / "b").answer(
        [LabelQuery("red", k=10**9), LabelQuery("red", k=10**9, allow=("L1", "L2"))]
    )
    assert [len(one.labels) for one in found] == [12, 2]


def test_the_plain_answer_is_the_bundles_own(rng, tmp_path):
    write_tiny_bundle(tmp_path / "b", rng, clf_normalize=False, bias=True, votes=True)
    answerer = _answerer(tmp_path / "b")
    plain = answerer.answer([LabelQuery(text, k=4) for text in TEXTS])
    for got, own in zip(plain, answerer.bundle.predict(TEXTS, k=4), strict=True):
        assert got.labels == own.labels
        assert got.scores == pytest.approx(own.scores)
        assert got.knn_scores == pytest.approx(own.knn_scores)


def test_tokens_are_counted(rng, tmp_path):
    write_tiny_bundle(tmp_path / "b", rng)
    found = _answerer(tmp_path / "b").answer(
        [LabelQuery("red car"), LabelQuery("what is red"), LabelQuery("what")]
    )
    expected = [(2, 0), (3, 2), (1, 1)]
    assert [(one.num_tokens, one.unknown_tokens) for one in found] == expected


def test_what_cannot_be_answered_is_named(rng, tmp_path):
    write_tiny_bundle(tmp_path / "b", rng, space="de")
    answerer = _answerer(tmp_path / "b")
    wrong = [
        LabelQuery("red", k=0),
        LabelQuery(3),
        LabelQuery("\ud800"),
        LabelQuery("red", head="clf"),
        LabelQuery("red", head="x"),
        LabelQuery("red", min_score=float("nan")),
        LabelQuery(""),
        LabelQuery(" \t\u00a0"),
        LabelQuery("\u200b"),
        LabelQuery("\x00"),
    ]
    for request in wrong:
        with pytest.raises(DataError, match="request 1"):
            answerer.answer([LabelQuery("red"), request])
        with pytest.raises(DataError):
            answerer.explain(request)
    assert len(answerer.answer([LabelQuery("red", head="de", min_score=-np.inf)])[0].labels) == 5


@pytest.mark.parametrize("by_words", [False, True])
def test_an_explanation_adds_up(rng, tmp_path, by_words):
    parts = write_tiny_bundle(
        tmp_path / "b",
        rng,
        clf_normalize=False,
        bias=True,
        votes=True,
        by_words=by_words,
        knn_neighbours=20,  # labels' texts are among them
    )
    answerer = _answerer(tmp_path / "b")
    told = answerer.explain(LabelQuery("red strange car", k=6), neighbours=4)
    expected = answerer.answer([LabelQuery("red strange car", k=6)])[0]
    assert told.prediction == expected
    columns = {
        "de": told.prediction.de_scores,
        "clf": told.prediction.clf_scores,
        "knn": told.prediction.knn_scores,
    }
    assert told.weights == pytest.approx({"de": 1.0, "clf": 0.5, "knn": 0.7})
    summed = sum(weight * np.asarray(columns[name]) for name, weight in told.weights.items())
    np.testing.assert_allclose(summed, told.prediction.scores, rtol=1e-5, atol=1e-6)
    assert [(token.text, token.unknown) for token in told.tokens] == [
        ("red", False),
        ("[UNK]", True),
        ("car", False),
    ]
    assert not told.cut
    assert answerer.explain(LabelQuery("red " * 9)).cut
    voters = parts["neighbours"]
    assert told.neighbours is not None and len(told.neighbours) == 4
    asked = answerer.bundle.encode(["red strange car"])
    compared = asked.words_BF if by_words else asked.de_BD
    cosine_M = np.asarray(
        voters.vectors_MD @ (compared.toarray() if by_words else compared).T
    ).ravel()
    cosines = [one.cosine for one in told.neighbours]
    assert cosines == pytest.approx(np.sort(cosine_M)[::-1][:4], abs=2e-3)
    for one in told.neighbours:
        row = int(one.uid[1:])
        assert cosine_M[row] == pytest.approx(one.cosine, abs=2e-3)
        assert one.labels == [(UIDS[i], TITLES[i]) for i in np.sort(voters.labels_ML[row].indices)]
    assert by_words or told.neighbours[0].vote == pytest.approx(1.0)
    more = answerer.explain(LabelQuery("red strange car"), neighbours=6).neighbours
    assert more is not None and more[:4] == told.neighbours  # how many are shown changes no vote
    alone = answerer.explain(LabelQuery("red", head="clf"))
    assert alone.weights == {"clf": 1.0}
    assert alone.prediction.knn_scores == []
    np.testing.assert_allclose(alone.prediction.clf_scores, alone.prediction.scores, rtol=1e-5)


def test_an_explanation_without_voters(rng, tmp_path):
    write_tiny_bundle(tmp_path / "b", rng)
    assert _answerer(tmp_path / "b").explain(LabelQuery("red")).neighbours is None


def test_many_requests_are_encoded_by_length_and_answered_in_their_order(
    rng, tmp_path, monkeypatch
):
    write_tiny_bundle(tmp_path / "b", rng, votes=True)
    answerer = _answerer(tmp_path / "b")
    texts = [
        " ".join(rng.choice(["red", "car", "house", "boat"], rng.integers(1, 30)))
        for _ in range(600)
    ]
    requests = [LabelQuery(text, int(rng.integers(1, 4))) for text in texts]
    encode = answerer.encoder.encode
    lengths = []
    monkeypatch.setattr(
        answerer.encoder, "encode", lambda batch: lengths.extend(map(len, batch)) or encode(batch)
    )
    answers = answerer.answer(requests)
    assert lengths == sorted(map(len, texts))
    for request, answer in zip(requests[::20], answers[::20], strict=True):
        (alone,) = answerer.answer([request])
        assert answer.labels == alone.labels
        assert answer.scores == pytest.approx(alone.scores, abs=1e-5)
