"""Rankings of random vectors, against every label of every query scored in double precision."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from helpers.dense_votes import dense_votes
from scipy.sparse import csr_matrix

from unidec.config import Params
from unidec.data.propensity import Propensity
from unidec.evaluation.metrics import by_query
from unidec.model.search import exact_search
from unidec.pipeline.ranking import (
    CLF_WEIGHTS,
    KNN_WEIGHTS,
    Blend,
    Ranking,
    quality_by_width,
    tuned_blend,
)
from unidec.ranking.heads import Heads, unit_rows
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.query_encoder import Encoded

NUM = 60
LABELS = 40
DIM = 6
TRAIN = 80


@pytest.fixture
def random_ranking(monkeypatch: pytest.MonkeyPatch):
    """Queries and labels of some topics: each score tells something of the truth, none
    tells all.
    """
    group_L = np.zeros(LABELS, dtype=np.int8)
    propensity = Propensity(np.ones(LABELS), np.ones(LABELS, dtype=np.int64), group_L, 0.5, 1.5)
    monkeypatch.setattr("unidec.pipeline.paths.open_propensity", lambda: propensity)

    def make(
        seed: int, heads: str = "both", num: int = NUM, helps: bool = True
    ) -> tuple[Ranking, Neighbours]:
        rng = np.random.default_rng(seed)
        hidden_ND = rng.normal(size=(num, DIM))
        hidden_LD = rng.normal(size=(LABELS, DIM))
        train_MD = rng.normal(size=(TRAIN, DIM))

        def seen(hidden: np.ndarray, noise: float) -> np.ndarray:
            return (hidden + noise * rng.normal(size=hidden.shape)).astype(np.float32)

        def truth(hidden: np.ndarray) -> csr_matrix:
            return csr_matrix(
                (hidden @ hidden_LD.T + rng.normal(size=(len(hidden), LABELS)) > 4).astype(
                    np.float32
                )
            )

        de = (
            {}
            if heads == "clf"
            else {"q": unit_rows(seen(hidden_ND, 1.0)), "l": unit_rows(seen(hidden_LD, 1.0))}
        )
        clf = {} if heads == "de" else {"q": seen(hidden_ND, 1.0), "l": seen(hidden_LD, 1.0)}
        dataset = SimpleNamespace(
            relevance=truth(hidden_ND),
            filter_pairs=csr_matrix(rng.random((num, LABELS)) < 0.1),
            num_labels=LABELS,
            query_columns=lambda rows: [pa.array(f"{kind}{row}" for row in rows) for kind in "vt"],
        )
        ranking = Ranking(
            dataset,
            np.arange(num),
            Encoded(de.get("q"), clf.get("q")),  # type: ignore[arg-type]
            {name: part["l"] for name, part in (("de", de), ("clf", clf)) if part},
        )
        labels = truth(train_MD) if helps else csr_matrix(rng.random((TRAIN, LABELS)) < 0.1)
        compared = seen(train_MD, 1.0) if helps else rng.normal(size=train_MD.shape)
        return ranking, Neighbours(compared, labels, map(str, range(TRAIN)), map(str, range(TRAIN)))

    return make


def params_of(**index: object) -> Params:
    return Params.model_validate(
        {
            "model": {"heads": index.pop("heads", "both")},
            "index": {"clf_normalize": False, "knn_neighbours": 15, **index},
            "loss": {"clf_bce": 0.0},
        }
    )


def dense(
    ranking: Ranking, neighbours: Neighbours | None, params: Params, clf: float, knn: float
) -> np.ndarray:
    """Scores of all labels, float64 [n, L], -inf for filtered pairs."""
    score_NL = np.zeros((len(ranking.rows), LABELS))
    query_de = ranking.encoded.de_BD
    query_clf = ranking.encoded.clf_BD
    if query_de is not None:
        score_NL += query_de.astype(float) @ ranking.vectors["de"].astype(float).T
    if query_clf is not None:
        weight = clf if query_de is not None else 1.0
        score_NL += weight * (query_clf.astype(float) @ ranking.vectors["clf"].astype(float).T)
    if neighbours is not None:
        score_NL += knn * dense_votes(
            ranking.voting(neighbours, params.index.knn_neighbours).votes(ranking.encoded)
        )
    score_NL[ranking.filter_pairs.toarray()] = -np.inf
    return score_NL


def slow_ndcg(ranking: Ranking, score_NL: np.ndarray) -> float:
    best = np.argsort(-score_NL, axis=1, kind="stable")[:, :5]
    found, _ = by_query(best, ranking.truth, ["nDCG@5"], np.ones(ranking.truth.shape[1]))["nDCG@5"]
    return 100 * float(found.mean())


def slow_tuning(ranking: Ranking, neighbours: Neighbours, params: Params) -> tuple[float, float]:
    """One weight after the other over its whole grid, always from dense scores."""

    def best(pairs: list[tuple[float, float]]) -> tuple[float, float]:
        return max(
            pairs, key=lambda pair: slow_ndcg(ranking, dense(ranking, neighbours, params, *pair))
        )

    index = params.index
    clf = CLF_WEIGHTS if index.clf_weight == "auto" else (index.clf_weight,)
    knn = KNN_WEIGHTS if index.knn_weight == "auto" else (index.knn_weight,)
    at = best([(weight, 0.0) for weight in clf])
    at = (at[0], knn[0])
    for _ in range(3):
        before = at
        at = best([(at[0], weight) for weight in knn])
        at = best([(weight, at[1]) for weight in clf])
        if at == before:
            break
    return at


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "index",
    [
        {"clf_weight": "auto", "knn_weight": "auto"},
        {"clf_weight": 0.5, "knn_weight": "auto"},
        {"clf_weight": "auto", "knn_weight": 0.3},
        {"clf_weight": 2.0, "knn_weight": 0.3},
        {"heads": "de", "space": "de", "knn_weight": "auto"},
        {"heads": "clf", "space": "clf", "knn_weight": "auto"},
    ],
    ids=str,
)
@pytest.mark.parametrize("few", [False, True])
def test_tuned_weights_are_those_of_dense_scores(
    random_ranking, monkeypatch, seed, index, few
) -> None:
    params = params_of(**index)
    ranking, neighbours = random_ranking(seed, index.get("heads", "both"))
    some = ranking
    if few:  # every other query decides, the figures are of all
        monkeypatch.setattr("unidec.pipeline.ranking.TUNING_QUERIES", len(ranking.rows) // 2)
        some = ranking.part(slice(None, None, 2))
    blend = tuned_blend(ranking, params, neighbours)
    assert (blend.clf_weight, blend.knn_weight) == slow_tuning(some, neighbours, params)
    for line in blend.tried:
        scores = dense(some, neighbours, params, line["clf_weight"], line["knn_weight"])
        assert line["nDCG@5"] == pytest.approx(slow_ndcg(some, scores), abs=1e-9)
    own = dense(ranking, neighbours, params, blend.clf_weight, blend.knn_weight)
    assert blend.metrics["nDCG@5"] == pytest.approx(slow_ndcg(ranking, own), abs=1e-9)


def test_all_labels_are_ranked_as_by_dense_scores(random_ranking) -> None:
    params = params_of(knn_weight=0.4)
    ranking, neighbours = random_ranking(9)
    voting = ranking.voting(neighbours, 15)
    votes = voting.votes(ranking.encoded)
    ranker = ranking.ranker(Heads(ranking.vectors, "both", False), voting)
    score_NL = dense(ranking, neighbours, params, 0.7, 0.4)
    for k in (1, 5, 40):
        found = ranker.candidates(ranking.encoded, (0.7,), k, ranking.excluded)(0.7, 0.4, k)
        best = np.argsort(-score_NL, axis=1, kind="stable")[:, :k]
        best = np.where(np.take_along_axis(score_NL, best, axis=1) > -np.inf, best, -1)
        np.testing.assert_array_equal(found.rows, best)
    alone = np.where(score_NL > -np.inf, dense_votes(votes), 0)
    best = np.argsort(-alone, axis=1, kind="stable")
    best = np.where(np.take_along_axis(alone, best, axis=1) > 0, best, -1)
    assert ranking.metrics_of_votes(voting) == ranking.metrics_of(best)


def test_votes_that_know_nothing_get_little_weight_and_none_where_there_is_nothing_to_tune_on(
    random_ranking,
) -> None:
    params = params_of(clf_weight="auto", knn_weight="auto")
    ranking, neighbours = random_ranking(3, helps=False)
    assert tuned_blend(ranking, params, neighbours).knn_weight < 0.5
    ranking, neighbours = random_ranking(3)
    assert tuned_blend(ranking, params, neighbours).knn_weight > 0
    without = tuned_blend(ranking, params_of(clf_weight=2.0), None)
    assert without.clf_weight == 2.0
    assert without.knn_weight == 0.0
    assert without.tried == []
    empty, neighbours = random_ranking(3, num=0)
    assert isinstance(tuned_blend(empty, params, neighbours), Blend)
    assert tuned_blend(empty, params, neighbours).knn_weight == 0


def test_queries_that_weights_were_chosen_by_vote_in_the_end(random_ranking) -> None:
    ranking, neighbours = random_ranking(5)
    joined = ranking.joined_to(ranking.voting(neighbours, 15))
    assert joined.num_queries == TRAIN + NUM
    assert joined.uids.to_pylist()[TRAIN - 1 : TRAIN + 1] == [str(TRAIN - 1), "v0"]
    np.testing.assert_array_equal(joined.vectors_MD[:TRAIN], neighbours.vectors_MD)
    assert joined.nearest(ranking.encoded.de_BD, 1)[1].ravel().tolist() == list(
        range(TRAIN, TRAIN + NUM)
    )
    kept = ranking.dataset.relevance.toarray() * (ranking.filter_pairs.toarray() == 0)
    np.testing.assert_array_equal(joined.labels_ML[TRAIN:].toarray(), kept > 0)


def test_labels_are_searched_on_the_models_device(random_ranking, monkeypatch) -> None:
    ranking, _ = random_ranking(0)
    devices = []

    def search(*given, device=None, **options):
        devices.append(device)
        return exact_search(*given, **options)

    monkeypatch.setattr("unidec.model.search.exact_search", search)
    replace(ranking, device=torch.device("cuda", 1)).metrics(Heads(ranking.vectors, "both", True))
    assert devices == [torch.device("cuda", 1)]


def test_of_equal_scores_the_smaller_label_comes_first(random_ranking) -> None:
    ranking, _ = random_ranking(0)
    rng = np.random.default_rng(0)
    whole = {
        name: rng.integers(-1, 2, part.shape).astype(np.float32)
        for name, part in ranking.vectors.items()
    }
    query = rng.integers(-1, 2, (NUM, DIM)).astype(np.float32)
    ranking = replace(ranking, vectors=whole, encoded=Encoded(query, query))
    score_NL = query @ whole["de"].T + 2 * query @ whole["clf"].T
    score_NL[ranking.filter_pairs.toarray() > 0] = -np.inf
    ranker = ranking.ranker(Heads(whole, "both", False, 2.0))
    found = ranker.search(ranking.encoded, LABELS + 3, ranking.excluded)
    scores = found.scores
    labels = found.rows
    expected = np.lexsort((np.broadcast_to(np.arange(LABELS), score_NL.shape), -score_NL), axis=1)
    np.testing.assert_array_equal(scores, np.take_along_axis(score_NL, expected, axis=1))
    np.testing.assert_array_equal(labels, np.where(np.isinf(scores), -1, expected))


# -- widths


@pytest.mark.parametrize("heads", ["both", "de", "clf"])
@pytest.mark.parametrize("is_unit", [True, False])
def test_a_smaller_width_equals_loops(random_ranking, heads, is_unit) -> None:
    ranking, _ = random_ranking(5, heads)
    cut = ranking.at_width(2, is_unit)
    queries = {"de": (ranking.encoded.de_BD, cut.encoded.de_BD)}
    queries["clf"] = (ranking.encoded.clf_BD, cut.encoded.clf_BD)
    for head, (whole, got) in queries.items():
        if whole is None:
            assert got is None and head not in cut.vectors
            continue
        for before, after in ((whole, got), (ranking.vectors[head], cut.vectors[head])):
            assert after.shape == (len(before), 2) and after.flags.c_contiguous
            for row, expected in zip(after, before[:, :2], strict=True):
                length = np.linalg.norm(expected) if is_unit and head == "de" else 1.0
                np.testing.assert_allclose(row, expected / length, rtol=1e-6)
    bias = replace(ranking, vectors={**ranking.vectors, "bias": np.ones(LABELS)})
    assert bias.at_width(2, is_unit).vectors["bias"] is bias.vectors["bias"]


@pytest.mark.parametrize("heads", ["both", "de"])
def test_quality_of_each_width(random_ranking, heads) -> None:
    """Of dense scores, with the best weight for each width; the widths really differ."""
    ranking, _ = random_ranking(7, heads)
    params = params_of(clf_weight="auto", knn_weight="auto", heads=heads, space=heads)
    params = params.model_copy(
        update={
            "loss": params.loss.model_copy(update={"widths": [1, 3]}),
            "model": params.model.model_copy(update={"dim": DIM}),
        }
    )
    found = quality_by_width(ranking, params, is_unit=True)
    assert [row["width"] for row in found] == [1, 3, DIM]
    for row in found:
        cut = ranking.at_width(row["width"], is_unit=True)
        qualities = [slow_ndcg(cut, dense(cut, None, params, w, 0.0)) for w in CLF_WEIGHTS]
        assert row["nDCG@5"] == pytest.approx(max(qualities), abs=1e-9)
    assert found[0]["nDCG@5"] + 5 < found[-1]["nDCG@5"]
    assert quality_by_width(ranking, params_of(), is_unit=True) == []
    assert quality_by_width(ranking.part(slice(0)), params, is_unit=True) == []
