"""Scores by words against loops; a training query that is left out against data without it; the
network by words.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers.dense_votes import dense_votes
from helpers.tiny_bundle import TITLES, WORDS, StubModel, tiny_neighbours, write_model
from scipy.sparse import csr_matrix

from unidec.data.tokens import encode_texts
from unidec.model.words import WordSpace
from unidec.ranking import fusion_fit
from unidec.ranking.fusion_fit import fit_word_network
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.word_scores import WORD_FEATURES, WordScorer

VOTING = 7


# these names keep the tests' former seeds: see `rng`
@pytest.fixture(params=[0, 2], ids=["ridge-labels", "ridge-labels, head"])
def voters(request, tmp_path, rng) -> Neighbours:
    model = StubModel(write_model(tmp_path / "model", rng))
    return tiny_neighbours(model, rng, by_words=True, word_head=request.param)


def without(voters: Neighbours, row: int) -> Neighbours:
    """The same training queries but one, in the same space."""
    kept = np.delete(np.arange(voters.num_queries), row)
    uids = voters.uids.take(kept)
    titles = voters.titles.take(kept)
    parts = (
        voters.vectors_MD[kept],
        voters.labels_ML[kept],
        uids,
        titles,
        voters.words,
    )
    return Neighbours(*parts, voters.label_words_LF)


def every_pair(num_queries: int) -> tuple[np.ndarray, np.ndarray]:
    return np.divmod(np.arange(num_queries * len(TITLES)), len(TITLES))


def test_a_query_that_is_left_out_is_read_as_if_it_were_not_there(voters):
    rows = np.arange(voters.num_queries)
    scores = WordScorer(voters, VOTING).score(voters.vectors_MD, rows)
    features = scores.features(*every_pair(len(rows))).reshape(len(rows), len(TITLES), -1)
    for row in rows:
        others = WordScorer(without(voters, row), VOTING).score(voters.vectors_MD[row])
        wanted = others.features(*every_pair(1))
        np.testing.assert_allclose(
            features[row], wanted, atol=2e-3, err_msg=f"{row}: {voters.titles[row]}"
        )
    there = WordScorer(voters, VOTING).score(voters.vectors_MD)
    assert (
        np.abs(there.features(*every_pair(len(rows))).reshape(features.shape) - features).max()
        > 0.1
    )


def test_queries_with_the_same_words_and_labels_are_left_out_one_at_a_time(voters):
    vectors = voters.vectors_MD[[5, 5, 7, 8]]
    one_hot = np.eye(len(TITLES))
    labels = csr_matrix(one_hot[[2, 2, 2, 4]] + one_hot[[3, 3, 5, 4]])
    texts = [str(i) for i in range(4)]
    parts = (vectors, labels, texts, texts, voters.words, voters.label_words_LF)
    few = Neighbours(*parts)
    all_but_first = without(Neighbours(*parts), 0)
    first = few.vectors_MD[:1]
    own = WordScorer(few, VOTING).score(first, np.array([0]))
    wanted = WordScorer(all_but_first, VOTING).score(first)
    pairs = every_pair(1)
    expected = wanted.features(*pairs)
    np.testing.assert_allclose(own.features(*pairs), expected, atol=2e-3)


def test_queries_without_words_or_labels_have_no_candidates(voters):
    rows = np.array([0])  # its text is empty
    scores = WordScorer(voters, VOTING).score(voters.vectors_MD[rows], rows)
    key = scores.candidates()
    assert len(key) == 0
    assert scores.features(key, key).shape == (
        0,
        len(WORD_FEATURES) * (2 if voters.words.head else 1),
    )
    rows = np.array([1, 2])  # without labels: nothing is taken out
    given = (
        WordScorer(voters, VOTING).score(voters.vectors_MD[rows], left_out)
        for left_out in (rows, None)
    )
    # votes lack one voter
    left_out, there = (scores.features(*every_pair(2))[:, 3:9] for scores in given)
    np.testing.assert_allclose(left_out, there)


def test_features_are_those_of_a_loop(voters):
    asked = voters.vectors_MD[:6]
    scores = WordScorer(voters, VOTING).score(asked)
    features = scores.features(*every_pair(6))
    parts = 2 if voters.words.head else 1
    assert features.dtype == np.float32 and features.shape == (
        6 * len(TITLES),
        parts * len(WORD_FEATURES),
    )
    features = features[:, : len(WORD_FEATURES)]
    votes = dense_votes(voters.votes(asked, VOTING)).astype(float)
    words = voters.words.part(asked, 0).toarray().astype(float)
    labels = voters.labels_ML.toarray()
    sums = labels.T @ voters.words.part(voters.vectors_MD, 0).toarray()
    for query in range(6):
        own = voters.label_words_LF.toarray() @ words[query]
        profile = (
            np.array([row / np.sqrt(row @ row) if row.any() else row for row in sums])
            @ words[query]
        )
        for label in range(len(TITLES)):
            wanted = []
            for part in (votes[query], own, profile):
                rank = sum(other > part[label] + 1e-6 for other in part)
                wanted += [part[label], part.max() - part[label], np.log1p(rank)]
            wanted += [part.max() for part in (votes[query], own, profile)]
            wanted += [np.log1p(labels[:, label].sum()), np.log1p((words[query] > 0).sum())]
            got = features[query * len(TITLES) + label]
            np.testing.assert_allclose(
                got, wanted, atol=2e-3, err_msg=f"query {query}, label {label}"
            )


def test_candidates_are_the_best_by_each_score(voters, monkeypatch):
    monkeypatch.setattr("unidec.ranking.word_scores.WORD_CANDIDATES", (2, 1, 3))
    scores = WordScorer(voters, VOTING).score(voters.vectors_MD[:6])
    wanted = set()
    for query in range(6):
        parts = [
            dense_votes(part)[query] for part in (scores.votes, scores.by_label, scores.by_queries)
        ]
        for part, count in zip(parts, (2, 1, 3), strict=True):
            least = sorted(part, reverse=True)[count - 1]
            certain = {
                query * len(TITLES) + int(label) for label in np.flatnonzero(part > max(least, 0))
            }
            wanted |= certain
    got = scores.candidates()
    assert (np.diff(got) > 0).all()
    assert wanted <= set(got.tolist())
    assert len(got) <= 6 * (2 + 1 + 3)


def training_data(voters: Neighbours, rng: np.random.Generator, num: int) -> Neighbours:
    """Queries of two random words, relevant: the labels whose text has both, or else
    one of them.
    """
    texts = [list(rng.choice(WORDS, 2, replace=False)) for _ in range(num)]
    shared = np.array([[len(set(text) & set(title.split())) for title in TITLES] for text in texts])
    space = voters.words
    place = {title: row for row, title in enumerate(TITLES)}
    assert space is not None
    assert voters.label_words_LF is not None
    assert len(place) == len(TITLES)
    unit = np.zeros((num, space.num_columns), dtype=np.float32)
    for row, text in enumerate(texts):  # a mean of labels' vectors that have the word
        for word in text:
            having = [place[title] for title in TITLES if word in title.split()]
            unit[row] += voters.label_words_LF[having].toarray().mean(axis=0)
    unit /= np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-9)
    relevant = (shared == shared.max(axis=1, keepdims=True)) & (shared > 0)
    uids = [str(i) for i in range(num)]
    names = [" ".join(text) for text in texts]
    return Neighbours(
        csr_matrix(unit),
        csr_matrix(relevant),
        uids,
        names,
        space,
        voters.label_words_LF,
    )


def test_the_network_by_words_ranks_better_than_each_score(voters, rng, monkeypatch):
    monkeypatch.setattr(fusion_fit, "WORD_STEPS", 80)
    monkeypatch.setattr(fusion_fit, "LEAST_WORD_QUERIES", 200)
    data = training_data(voters, rng, 400)
    kept = np.arange(300)
    new = np.arange(300, 400)
    trained = Neighbours(
        data.vectors_MD[kept],
        data.labels_ML[kept],
        data.uids.take(kept),
        data.titles.take(kept),
        data.words,
        data.label_words_LF,
    )
    scorer = WordScorer(trained, VOTING)
    none = np.zeros(0, np.int64)
    network = fit_word_network(scorer, none)
    assert network is not None
    assert len(network.mean) == len(WORD_FEATURES) * (2 if data.words.head else 1)
    scores = scorer.score(data.vectors_MD[new])
    truth = data.labels_ML[new].toarray() > 0

    def first_is_right(score_BL: np.ndarray) -> float:
        return float(truth[np.arange(len(new)), score_BL.argmax(axis=1)].mean())

    ranked = network.scores(scores.features(*every_pair(len(new)))).reshape(truth.shape)
    parts = [dense_votes(part) for part in (scores.votes, scores.by_label, scores.by_queries)]
    assert first_is_right(ranked) >= max(map(first_is_right, parts))
    assert first_is_right(ranked) > 0.9
    assert network == fit_word_network(scorer, none) != fit_word_network(scorer, none, seed=1)
    monkeypatch.setattr(fusion_fit, "QUERIES_AT_ONCE", 7)  # blocks change nothing but rounding
    np.testing.assert_allclose(fit_word_network(scorer, none).mean, network.mean, atol=1e-4)


def test_excluded_pairs_are_not_ranked(voters, monkeypatch):
    monkeypatch.setattr(fusion_fit, "WORD_STEPS", 0)
    monkeypatch.setattr(fusion_fit, "LEAST_WORD_QUERIES", 1)
    scorer = WordScorer(voters, VOTING)
    every = np.arange(voters.num_queries * len(TITLES))
    kept = scorer.score(voters.vectors_MD[4:5], np.array([4])).candidates()[:1] + 4 * len(TITLES)
    network = fit_word_network(scorer, np.setdiff1d(every, kept))
    wanted = scorer.score(voters.vectors_MD[4:5], np.array([4])).features(
        np.array([0]), kept % len(TITLES)
    )
    np.testing.assert_allclose(network.mean, wanted[0], atol=1e-6)


def test_no_network_of_few_queries(voters, monkeypatch):
    scorer = WordScorer(voters, VOTING)
    none = np.zeros(0, np.int64)
    assert fit_word_network(scorer, none) is None
    monkeypatch.setattr(fusion_fit, "LEAST_WORD_QUERIES", 20)
    monkeypatch.setattr(fusion_fit, "WORD_STEPS", 1)
    assert fit_word_network(scorer, none) is not None


def test_first_words_are_read_as_if_texts_ended_there(tmp_path, rng, monkeypatch):
    model = StubModel(write_model(tmp_path / "model", rng))
    both = tiny_neighbours(model, rng, by_words=True, word_head=2)
    space = WordSpace(model.tokenizer_folder, both.words.keys_F, both.words.idf_F)

    def cut(texts) -> csr_matrix:
        short = [" ".join(text.split()[:2]) for text in texts]
        return space.vectors(
            *encode_texts(short, model.tokenizer_folder, 8).ragged(np.arange(len(short)))
        )

    texts = both.titles.to_pylist()
    # as its tokenizer splits them
    labels = cut([title.replace(",", " ,") for title in TITLES[:-1]] + ["größer ,"])
    alone = Neighbours(cut(texts), both.labels_ML, both.uids, both.titles, space, labels)
    rows = np.arange(both.num_queries)
    for left_out in (None, rows):
        got = (
            WordScorer(both, VOTING)
            .score(both.vectors_MD, left_out)
            .features(*every_pair(len(rows)))
        )
        wanted = (
            WordScorer(alone, VOTING)
            .score(alone.vectors_MD, left_out)
            .features(*every_pair(len(rows)))
        )
        np.testing.assert_allclose(got[:, len(WORD_FEATURES) :], wanted, atol=2e-3)
        scorer = WordScorer(both, VOTING)
        whole = scorer.score(both.vectors_MD, left_out, first_words=False).features(
            *every_pair(len(rows))
        )
        expected = got[:, : len(WORD_FEATURES)]
        np.testing.assert_array_equal(whole, expected)
