"""Example queries of new labels, against slow references."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from unidec.bundle.example_queries import with_example_voters, with_examples
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.query_encoder import Encoded
from unidec.ranking.ranker import Head, Voting


def test_vectors_turn_towards_the_sum(rng: np.random.Generator) -> None:
    text = rng.normal(size=(5, 8)).astype(np.float32)
    text[4] = 0
    query = rng.normal(size=(7, 8)).astype(np.float32)
    place = np.array([3, 0, 0, 3, 3, 4, 0])
    found = with_examples(text, query, place)
    for row, vector in enumerate(text):
        length = np.linalg.norm(vector)
        wanted = vector / length if length else vector
        own = query[place == row]
        for one in own:
            wanted = wanted + one / np.linalg.norm(one)
        if len(own):
            wanted = length * wanted / np.linalg.norm(wanted)
            np.testing.assert_allclose(found[row], wanted, atol=1e-6)
        else:
            assert np.array_equal(found[row], vector)


@pytest.mark.parametrize("head", ["de", "clf"])
def test_examples_vote_as_training_queries_do(rng: np.random.Generator, head: Head) -> None:
    labels = csr_matrix((rng.random((6, 5)) < 0.4).astype(np.float32))
    vectors = rng.normal(size=(6, 8)).astype(np.float32)
    titles = [f"query {row}" for row in range(6)]
    voters = Neighbours(vectors, labels, [f"q{row}" for row in range(6)], titles)
    texts = ["unseen", "query 2", "unseen too", "query 2"]
    label = np.array([4, 3, 4, 4])
    encoded = Encoded(*rng.normal(size=(2, 4, 8)).astype(np.float32))
    voting = Voting(neighbours=voters, num=1, head=head)
    found = with_example_voters(voters, texts, label, voting.compared(encoded))
    assert found.titles.to_pylist() == [*titles, "unseen", "unseen too"]
    wanted = np.zeros((8, 5))
    wanted[:6] = labels.toarray()
    wanted[2, [3, 4]] = 1
    wanted[[6, 7], 4] = 1
    assert np.array_equal(found.labels_ML.toarray(), wanted)
    assert np.array_equal(found.vectors_MD[:6], voters.vectors_MD)
    own = encoded.de_BD if head == "de" else encoded.clf_BD
    assert own is not None
    unit = own / np.linalg.norm(own, axis=1, keepdims=True)
    np.testing.assert_allclose(found.vectors_MD[6:], unit[[0, 2]], atol=1e-3)
    _, nearest = found.nearest(own[[0]], 1)
    assert nearest[0, 0] == 6
