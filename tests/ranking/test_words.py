"""Words and pairs of words as vectors, beside dictionaries of strings on random and degenerate
texts; as neighbours.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from math import log
from pathlib import Path

import numpy as np
import pytest
from helpers.dense_votes import dense_votes
from helpers.tiny_bundle import TITLES, UIDS, WORDS, write_tiny_bundle
from scipy.sparse import csr_matrix

from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import KIND, VERSION
from unidec.bundle.neighbour_files import FILES
from unidec.data.storage import MANIFEST, folder_sha256, read_manifest, write_manifest
from unidec.data.tokens import Tokens, encode_texts
from unidec.errors import ArtifactError
from unidec.model import words as words_module
from unidec.model.words import FEWEST_TEXTS, MOST_TEXTS, WordSpace, text_blocks
from unidec.ranking.neighbours import Neighbours

QUERIES = ["red car", "an old house", "", "boat boat blue", "🚗 unknown words", "big green boat"]


def features_of(pieces: list[str]) -> list[tuple]:
    """Words of a text as tuples of pieces, and pairs of them; what stands around every text is no
    word.
    """
    words: list[tuple] = []
    for piece in (piece for piece in pieces if piece not in ("[CLS]", "[SEP]")):
        if piece.startswith("##") and words:
            words[-1] = (*words[-1], piece)
        else:
            words.append((piece,))
    return [*words, *itertools.pairwise(words)]


def slow_space(texts: list[list[str]]) -> dict[tuple, float]:
    count = Counter(feature for text in texts for feature in set(features_of(text)))
    most = max(MOST_TEXTS * len(texts), 100)
    return {
        feature: log((1 + len(texts)) / (1 + number)) + 1
        for feature, number in count.items()
        if (number >= FEWEST_TEXTS if isinstance(feature[0], tuple) else number <= most)
    }


def slow_vector(text: list[str], idf: dict[tuple, float]) -> dict[tuple, float]:
    count = Counter(feature for feature in features_of(text) if feature in idf)
    weights = {feature: (1 + log(number)) * idf[feature] for feature, number in count.items()}
    norm = sum(weight**2 for weight in weights.values()) ** 0.5
    return {feature: weight / norm for feature, weight in weights.items()}


def cosine(a: dict[tuple, float], b: dict[tuple, float]) -> float:
    return sum(weight * b[feature] for feature, weight in a.items() if feature in b)


def ragged(texts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    flat = np.concatenate([np.zeros(0, dtype=np.int64), *texts])
    return flat, np.concatenate([[0], np.cumsum([len(text) for text in texts], dtype=np.int64)])


@pytest.fixture(scope="module")
def vocabulary(tiny_bert: Path) -> list[str]:
    described = json.loads((tiny_bert / "tokenizer.json").read_text(encoding="utf-8"))["model"][
        "vocab"
    ]
    return sorted(described, key=described.__getitem__)


@pytest.mark.parametrize(
    ("num_texts", "num_tokens"),
    [
        (0, 30),
        (1, 30),
        (40, 12),
        (40, 60),
        (1500, 60),
    ],
)
def test_as_dictionaries_of_strings_say(rng, tiny_bert, vocabulary, num_texts, num_tokens):
    # few tokens: many texts share words and pairs; in 1,500 texts some words are everywhere
    some = rng.choice(len(vocabulary), min(num_tokens, len(vocabulary)), replace=False)
    some = np.union1d(some, [vocabulary.index("[CLS]"), vocabulary.index("[SEP]")])
    texts = [rng.choice(some, rng.integers(0, 9)) for _ in range(num_texts)]
    others = [rng.choice(len(vocabulary), rng.integers(0, 9)) for _ in range(20)]
    space = WordSpace.fit(tiny_bert, [ragged(texts)])
    pieces, strange = (
        [[vocabulary[i] for i in text] for text in group] for group in (texts, others)
    )
    idf = slow_space(pieces)
    assert space.num_features == len(idf)
    if num_texts == 1500:
        assert len(idf) < len({feature for text in pieces for feature in features_of(text)})
    own = space.vectors(*ragged(texts))
    found = space.vectors(*ragged(others))
    assert own.dtype == np.float32
    assert own.shape == (num_texts, len(idf))
    assert found.has_sorted_indices
    slow_own, slow_found = (
        [slow_vector(text, idf) for text in group] for group in (pieces[:60], strange)
    )
    expected = np.array([[cosine(a, b) for b in slow_own] for a in slow_found]).reshape(20, -1)
    np.testing.assert_allclose((found @ own[:60].T).toarray(), expected, atol=1e-5)
    norms = np.sqrt(
        np.bincount(np.repeat(np.arange(20), np.diff(found.indptr)), found.data**2, minlength=20)
    )
    assert set(np.round(norms, 4)) <= {0.0, 1.0}


@pytest.mark.parametrize("head", [0, 3])
@pytest.mark.parametrize("size", [1, 7, 100])
def test_blocks_of_texts_are_the_same_space_and_vectors(
    rng, tiny_bert, vocabulary, size, head, monkeypatch
):
    """Also without texts."""
    some = rng.choice(len(vocabulary), 12, replace=False)
    for num_texts in (0, 40):
        texts = [rng.choice(some, rng.integers(0, 9)) for _ in range(num_texts)]
        tokens = Tokens(*ragged(texts), len(vocabulary), 0, 9)
        rows = rng.permutation(num_texts)
        whole = WordSpace.fit(tiny_bert, [tokens.ragged(rows)], head)
        expected = whole.vectors(*tokens.ragged(rows))
        monkeypatch.setattr(words_module, "TEXTS_AT_ONCE", size)
        space = WordSpace.fit(tiny_bert, text_blocks(tokens, rows), head)
        assert np.array_equal(space.keys_F, whole.keys_F)
        assert np.array_equal(space.idf_F, whole.idf_F)
        found = space.stacked(text_blocks(tokens, rows))
        for name in ("data", "indices", "indptr"):
            one = getattr(found, name)
            other = getattr(expected, name)
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)


def test_the_order_of_a_pair_matters_and_no_pair_spans_two_texts(tiny_bert, vocabulary):
    words = [i for i, piece in enumerate(vocabulary) if piece.isalpha() and len(piece) > 3]
    pair = np.array(words[:2])
    space = WordSpace.fit(tiny_bert, [ragged([pair, pair, pair[1:], pair[:1]])])
    # two words, one pair: "b a" stands nowhere, and ends of texts are ends
    assert space.num_features == 3
    forward, back = space.vectors(*ragged([pair, pair[::-1]]))
    assert (forward.nnz, back.nnz) == (3, 2)


def test_a_space_that_is_none_is_refused(tiny_bert):
    for keys, weights in (
        ([2, 1], [1, 1]),
        ([1, 1], [1, 1]),
        ([1], [1, 1]),
        ([1], [0]),
        ([1], [np.nan]),
    ):
        with pytest.raises(ValueError):
            WordSpace(
                tiny_bert, np.array(keys, dtype=np.uint64), np.array(weights, dtype=np.float32)
            )


def nearest_first(row, num):
    """The largest, of equals the first."""
    return sorted(range(len(row)), key=lambda m: (-row[m], m))[:num]


def ridge_votes(row, kernel, target, num):
    """(K + I)^-1 of the nearest with a word in common, their similarities and labels, one query."""
    near = [m for m in nearest_first(row, num) if row[m] > 0]
    inverse = np.linalg.inv(kernel[np.ix_(near, near)] + np.eye(len(near)))
    return np.maximum(inverse @ row[near] @ target[near], 0)


def voted_labels(labels):
    """What each training query and, after them, each label's text votes for."""
    num = labels.shape[1]
    target = np.vstack([labels, np.eye(num)]).astype(float)
    together = labels.T.astype(float) @ labels
    for label in range(num):
        for other in set(range(num)) - {label}:
            share = together[label, other] / max(together[label, label], 1)
            target[len(labels) + label, other] = share / 2 if share >= 0.1 else 0.0
    return target


def test_neighbours_by_words_as_a_loop_says(rng, tiny_bert, vocabulary, monkeypatch):
    texts = [rng.choice(len(vocabulary), 6) for _ in range(50)]
    asked = [
        *texts[:3],
        *(rng.choice(len(vocabulary), 6) for _ in range(9)),
        np.zeros(0, dtype=np.int64),
    ]
    space = WordSpace.fit(tiny_bert, [ragged(texts)])
    own = space.vectors(*ragged(texts))
    query = space.vectors(*ragged(asked))
    labels = rng.random((50, 8)) < 0.3
    stored = own.copy()
    stored.data = own.data.astype(np.float16).astype(np.float32)
    label_words = space.vectors(*ragged([rng.choice(len(vocabulary), 3) for _ in range(8)]))
    of_queries = csr_matrix(labels), range_of("q", 50), range_of("text", 50), space
    more = Neighbours(own, *of_queries, label_words)
    every = np.vstack([stored.toarray(), more.label_words_LF.toarray()])
    target = voted_labels(labels)
    dense = query @ every.T
    kernel = every @ every.T
    votes = dense_votes(more.votes(query, 20))
    for row, got in zip(dense, votes, strict=True):
        np.testing.assert_allclose(got, ridge_votes(row, kernel, target, 20), atol=1e-5)
    assert not votes[-1].any()  # no word, no vote
    assert (more.nearest(query, 58)[1] >= 50).any()
    assert more.num_queries == 50
    with pytest.raises(ValueError, match="a column for each word"):
        Neighbours(own[:, 1:], *of_queries, label_words)
    with pytest.raises(ValueError, match="vote by their words"):
        Neighbours(own, *of_queries)


def range_of(name: str, num: int) -> list[str]:
    return [f"{name}{i}" for i in range(num)]


@pytest.mark.usefixtures("stub_model")
@pytest.mark.parametrize("heads", ["both", "de", "clf"])
def test_a_bundle_whose_training_queries_are_compared_by_words(rng, tmp_path, heads):
    parts = write_tiny_bundle(
        tmp_path / "b", rng, heads=heads, space=heads, votes=True, by_words=True
    )
    own = parts["neighbours"]
    bundle = Bundle.load(tmp_path / "b")
    read = bundle.neighbours
    assert bundle.info.knn.num_words == own.words.num_features == read.words.num_features
    assert (read.vectors_MD != own.vectors_MD).nnz == 0 and (
        read.labels_ML != own.labels_ML
    ).nnz == 0
    np.testing.assert_array_equal(read.words.keys_F, own.words.keys_F)
    texts = [text.split() for text in own.titles.to_pylist()]
    idf = slow_space(texts)
    vectors = [slow_vector(text, idf) for text in texts]
    encoded = [words_known(title) for title in TITLES]
    vectors += [slow_vector(words, idf) for words in encoded]
    kernel = np.array([[cosine(one, other) for other in vectors] for one in vectors])
    target = voted_labels(own.labels_ML.toarray())
    found = bundle.predict(QUERIES, k=len(UIDS), batch_size=2)
    tokens = encode_texts(QUERIES, bundle.model.tokenizer_folder, 8)
    de, clf = bundle.model.encode_queries(tokens, np.arange(len(QUERIES)))
    plain_scores, plain_rows = bundle.index.search(_query(bundle, de, clf), len(UIDS))
    for i, (text, got) in enumerate(zip(QUERIES, found, strict=True)):
        mine = slow_vector(words_known(text), idf)
        near = np.array([cosine(mine, other) for other in vectors])
        votes = ridge_votes(near.round(6), kernel, target, 7)
        heads_score = dict(zip(plain_rows[i].tolist(), plain_scores[i].tolist(), strict=True))
        for uid, score, vote in zip(got.labels, got.scores, got.knn_scores, strict=True):
            row = UIDS.index(uid)
            assert vote == pytest.approx(votes[row], abs=2e-3)
            expected = heads_score[row] + 0.7 * vote
            assert score == pytest.approx(expected, abs=1e-4)
    assert len(found[0].labels) == len(TITLES)


def words_known(text: str) -> list[str]:
    """A word that the tokenizer does not know is one token, [UNK], a word like any other here."""
    return [word if word in WORDS else "<unknown>" for word in text.split()][:8]


def _query(bundle, de, clf):
    return bundle.ranker.heads.queries(de, clf)


@pytest.mark.usefixtures("stub_model")
def test_two_writings_are_the_same_and_damage_is_named(tmp_path):
    for name in ("one", "two"):
        write_tiny_bundle(
            tmp_path / name / "b",
            np.random.default_rng(5),
            votes=True,
            by_words=True,
            fused=True,
        )
    path = tmp_path / "one" / "b"
    assert folder_sha256(path) == folder_sha256(tmp_path / "two" / "b")
    names = set(read_manifest(path, KIND, VERSION)["files"]) & FILES
    assert names == FILES - {"neighbours/vectors.npy"}
    values = np.load(path / "neighbours/words_values.npy")
    words = np.load(path / "neighbours/words.npy")
    keys = np.load(path / "neighbours/word_keys.npy")
    begins = np.load(path / "neighbours/words_indptr.npy")
    for name, array in (
        ("words_values", np.full_like(values, np.inf)),
        ("words", words + 1000),
        ("words", words[:-1]),
        ("word_keys", keys[::-1]),
        ("word_keys", keys[1:]),
        ("words_indptr", begins[::-1]),
    ):
        file = path / "neighbours" / f"{name}.npy"
        before = file.read_bytes()
        np.save(file, array)
        manifest = json.loads((path / MANIFEST).read_text())
        write_manifest(path, KIND, VERSION, manifest["meta"])
        with pytest.raises(ArtifactError, match=r"words?"):
            Bundle.load(path)
        file.write_bytes(before)
    (path / "neighbours/word_weights.npy").unlink()
    write_manifest(path, KIND, VERSION, json.loads((path / MANIFEST).read_text())["meta"])
    with pytest.raises(ArtifactError, match="No such file"):
        Bundle.load(path)
