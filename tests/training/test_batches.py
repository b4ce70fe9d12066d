"""Batches: which texts a step encodes, on one rank and on several."""

import threading
import time

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from helpers.label_targets import soft_targets
from helpers.recorded_batches import texts

from unidec.errors import DataError
from unidec.model.batch import TextChunks
from unidec.training.batches import AHEAD, query_pairs
from unidec.training.distributed import Ranks
from unidec.training.sampler import encoded_labels


def test_a_batch_encodes_its_queries_then_its_pool(make_batches, tiny_tokens):
    batches = make_batches()
    batch = batches.prepare(batches.rows[:9], 0, 0, None)
    expected = [tiny_tokens["queries"].ragged([row])[0].tolist() for row in batches.rows[:9]]
    expected += [tiny_tokens["labels"].ragged([label])[0].tolist() for label in batch.pool.pool_S]
    assert texts(batch, tiny_tokens) == expected
    assert batch.counts.own_queries == 9
    assert batch.counts.tokens == sum(map(len, expected))
    assert (batch.targets.relevance_P == 1).all()


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("world", [2, 3, 7])
def test_ranks_share_the_texts_of_one_batch(make_batches, tiny_tokens, world, fill):
    """All draw the same pool; together they encode each text once."""
    values = {"pool.eta": 0, "pool.beta": 1, "pool.fill": fill}
    alone = make_batches(**values)
    rows = alone.rows[:10]
    whole = alone.prepare(rows, 1, 2, None)
    parts = [
        make_batches(Ranks(rank, world), **values).prepare(rows, 1, 2, None)
        for rank in range(world)
    ]
    assert all(np.array_equal(part.pool.pool_S, whole.pool.pool_S) for part in parts)
    assert (len(whole.pool.positive_row_P) == whole.pool.num_positives_B.sum()) == fill, (
        "all of them are in the pool"
    )
    queries = [
        text for part in parts for text in texts(part, tiny_tokens)[: part.counts.own_queries]
    ]
    labels = [
        text for part in parts for text in texts(part, tiny_tokens)[part.counts.own_queries :]
    ]
    assert queries + labels == texts(whole, tiny_tokens)
    # all say the speed of the whole
    assert {part.counts.tokens for part in parts} == {whole.counts.tokens}


def test_batches_of_an_epoch_from_any_step_on(make_batches):
    """A resumed epoch leaves out what is done; the rest is drawn as it would have been."""
    batches = make_batches()
    cut = np.array_split(batches.rows, 4)
    whole = list(batches.ahead(cut, 3, 0, None))
    rest = list(batches.ahead(cut, 3, 2, None))
    assert len(whole) == 4 and len(rest) == 2
    for one, other in zip(whole[2:], rest, strict=True):
        assert np.array_equal(one.pool.pool_S, other.pool.pool_S)
        assert np.array_equal(one.pool.sampled_P, other.pool.sampled_P)
    assert list(batches.ahead(cut, 3, 4, None)) == []


def test_a_thread_prepares_two_batches_ahead_of_a_gpu(make_batches, monkeypatch):
    batches = make_batches()
    batches.device = torch.device("cuda", 0)
    begun = []

    def prepare(rows_B, epoch, step, negatives):
        begun.append((step, threading.current_thread()))
        if step == 6:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return step

    monkeypatch.setattr(batches, "prepare", prepare)
    ahead = batches.ahead([batches.rows[:1]] * 9, 0, 1, None)
    for number in range(1, 6):
        assert next(ahead) == number
        until = time.monotonic() + 60
        while len(begun) < number + AHEAD and time.monotonic() < until:
            time.sleep(0.001)
        assert [step for step, _ in begun] == list(range(1, number + 1 + AHEAD))
    with pytest.raises(torch.AcceleratorError, match="unspecified"):
        next(ahead)
    assert threading.current_thread() not in [thread for _, thread in begun]


def test_a_table_on_the_host_is_never_fetched_whole(make_batches, tiny_dataset):
    number = {"pool.clf_labels": 20}  # of twice as many, all
    assert make_batches(**number).clf_labels == "all"
    batches = make_batches(**number, **{"run.table_place": "host"})
    seen = batches.prepare(batches.rows[:2], 1, 2, None).clf.ids
    assert batches.clf_labels == "some" and len(seen) < tiny_dataset.num_labels


ALL = {"pool.de_labels": "all"}
POOL = {"pool.de_labels": "pool"}


@pytest.mark.parametrize(
    ("overrides", "encoded", "clf"),
    [
        (POOL, "pool", "pool"),
        (ALL, "all", "pool"),
        (POOL | {"pool.clf_labels": "all"}, "pool", "all"),
        (ALL | {"pool.clf_labels": "all"}, "all", "all"),
        (POOL | {"pool.clf_labels": 20}, "pool", "all"),
        (ALL | {"model.heads": "de"}, "all", None),
        (ALL | {"model.heads": "clf"}, None, "pool"),
        (ALL | {"model.heads": "clf", "pool.clf_labels": "all"}, None, "all"),
        (ALL | {"model.clf_residual": True}, "all", "pool"),
        (POOL | {"model.clf_residual": True}, "pool", "pool"),
        ({"model.heads": "clf", "model.clf_residual": True}, "pool", "pool"),
    ],
    ids=str,
)
def test_which_labels_are_encoded_and_which_classified(
    make_batches, tiny_dataset, tiny_tokens, overrides, encoded, clf
):
    batches = make_batches(**overrides)
    drawn = make_batches().prepare(batches.rows[:9], 1, 2, None).pool.pool_S.tolist()
    labels = {
        "all": list(range(tiny_dataset.num_labels)),
        "pool": drawn,
        None: [],
    }
    assert len(drawn) < tiny_dataset.num_labels
    batch = batches.prepare(batches.rows[:9], 1, 2, None)
    expected = [tiny_tokens["labels"].ragged([label])[0].tolist() for label in labels[encoded]]
    assert texts(batch, tiny_tokens)[9:] == expected
    settings = batches.settings
    assert encoded_labels(settings.model, settings.pool, batches.methods.rows.holds_text) == (
        encoded or "none"
    )
    seen = [
        None if clf is None else labels[clf],
        None if batch.clf.ids is None else batch.clf.ids.tolist(),
    ]
    assert seen[1] == (seen[0] if clf == "pool" else None)
    if encoded and batches.settings.model.heads != "clf":
        assert batch.pool.pool_S.tolist() == labels[encoded]
    if overrides.get("model.clf_residual"):
        places = (
            range(len(drawn))
            if batch.added["rows"].places is None
            else batch.added["rows"].places.tolist()
        )
        assert [labels[encoded][place] for place in places] == drawn
    # pairs of either head, against a dense matrix
    relevance = tiny_dataset.relevance[batches.rows[:9]].toarray() > 0
    for which, targets in (
        (encoded, batch.targets),
        (clf, batch.clf.targets),
    ):
        if which is not None and not (which == encoded and batches.settings.model.heads == "clf"):
            dense = np.zeros((9, len(labels[which])), dtype=bool)
            dense[targets.row_P.numpy(), targets.col_P.numpy()] = True
            assert np.array_equal(dense, relevance[:, labels[which]])


def test_texts_come_in_chunks_where_gradients_are_cached(make_batches, tiny_tokens):
    batches = make_batches(**{"optim.encode_chunk": 4})
    batch = batches.prepare(batches.rows[:9], 0, 0, None)
    assert isinstance(batch.texts, TextChunks)
    assert batch.texts.num_texts == batch.counts.texts
    assert batch.counts.texts == 9 + len(batch.pool.pool_S)
    assert max(len(places) for places, _ in batch.texts.chunks) == 4


def test_importance_is_the_inverse_propensity_of_the_label(make_batches, tiny_dataset):
    """From training queries alone, Gandalf's label texts not counted."""
    train = tiny_dataset.rows("train")
    graph = soft_targets(tiny_dataset.relevance[train], 0.1)
    count = (tiny_dataset.relevance[train].toarray() > 0).sum(0)
    c = (np.log(len(train)) - 1) * (2.0 + 1) ** 0.7
    expected = 1 + c * (count + 2.0) ** -0.7
    assert make_batches().inverse_L is None
    for overrides in ({}, {"pool.gandalf": True}, {"pool.positives": "tail"}):
        given = {
            "loss.weights": "propensity",
            "data.propensity_a": 0.7,
            "data.propensity_b": 2.0,
        } | overrides
        batches = make_batches(None, graph, **given)
        assert np.allclose(batches.inverse_L, expected)
        targets = (batch := batches.prepare(batches.rows[:9], 0, 0, None)).targets
        assert np.allclose(
            targets.importance_P.numpy(), expected[batch.pool.pool_S[targets.col_P.numpy()]]
        )
    tail = make_batches(**{"pool.positives": "tail"})
    assert tail.inverse_L is not None
    assert tail.prepare(tail.rows[:9], 0, 0, None).targets.importance_P is None


def test_nothing_to_train_on(raw_factory, tmp_path):
    from unidec.data.dataset import write_dataset

    raw = raw_factory(4, 2, 3)
    raw.relevance["train"] = sp.csr_matrix(raw.relevance["train"].shape, dtype=np.float32)
    dataset = write_dataset(tmp_path / "dataset", raw, validation_share=0.0)
    with pytest.raises(DataError, match="nothing to train on"):
        query_pairs(dataset)
