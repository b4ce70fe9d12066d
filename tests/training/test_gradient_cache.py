"""Gradient caching: a step in chunks against the same chunks in one graph, dropout on; and against
one pass.
"""

import contextlib

import numpy as np
import pytest
import torch
from helpers.trainings import with_first_round

from unidec.model.row_table import RowTable
from unidec.pipeline.live_bytes import LiveBytes
from unidec.training import gradient_cache as module
from unidec.training.gradient_cache import TextChunks, cut_texts, encode_texts

ENCODERS = {
    "bag": {"encoder.bag_dropout": 0.3, "encoder.dropout": 0.2},
    "bag of words and starts": {
        "encoder.bag_words": 16,
        "encoder.bag_head": 4,
        "encoder.bag_dropout": 0.3,
    },
    "inception": {"encoder.kind": "inception", "encoder.bag_dropout": 0.3},
    "words": {"encoder.bag_words": 50, "encoder.bag_dropout": 0.3},
    "beside, residual": {
        "encoder.kind": "both",
        "encoder.bag_dropout": 0.3,
        "encoder.residual": True,
    },
    "frozen transformer": {
        "encoder.kind": "transformer",
        "encoder.dropout": 0.5,
        "encoder.residual": True,
    },
    "one layer": {
        "encoder.kind": "transformer",
        "encoder.trainable_layers": 1,
        "encoder.dropout": 0.2,
    },
    "all layers": {
        "encoder.kind": "both",
        "encoder.trainable_layers": -1,
        "encoder.bag_dropout": 0.3,
    },
    "all layers, recomputed": {
        "encoder.kind": "transformer",
        "encoder.trainable_layers": -1,
        "run.recompute": True,
    },
}


def gradients(model):
    """Of all parameters and of the rows gathered, by name."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for name, table in model.tables().items():
        if table.used is not None:
            rows, leaf = table.used
            assert leaf.grad is not None, name
            whole = torch.zeros(table.num_rows, leaf.shape[1])
            whole[slice(None) if rows is None else rows] = leaf.grad
            found[f"rows of {name}"] = whole
    return found


def forget(trainer):
    found = gradients(trainer.model)
    trainer.optimisers.zero_grad()
    return found


def in_one_graph(encoder, texts, context):
    """The same chunks in the same order, all of their activations held: what gradient caching must
    equal.
    """
    with contextlib.ExitStack() as stack:
        for table in [m for m in encoder.modules() if isinstance(m, RowTable)]:
            stack.enter_context(one_leaf(table, texts.unique_U))
        vectors = []
        for _, chunk in texts.chunks:
            with context():
                vectors.append(encoder(chunk))
    place_B = torch.cat([places for places, _ in texts.chunks])
    return torch.cat(vectors)[torch.argsort(place_B)], torch.Tensor.backward


@contextlib.contextmanager
def one_leaf(table, rows_U):
    leaf = table.gather(rows_U)
    ids = rows_U.tolist()
    table.gather = lambda rows_C: leaf[[ids.index(row) for row in rows_C.tolist()]]
    yield
    del table.gather


def step(trainer, encode, size, rows, seed=11):
    """Losses, gradients and the random state behind a step that is encoded in one way."""
    batch = trainer.prepare(rows, 0)
    parts = [
        *trainer.batches.texts.parts(batch.pool.rows_B),
        ("labels", trainer.encoding.tokens["labels"], batch.pool.pool_S),
    ]
    texts = cut_texts(parts, trainer.batches.build, size, trainer.device) if size else batch.texts
    torch.manual_seed(seed)
    x_BW, backward = encode(trainer.model.encoder, texts, trainer.encoding.autocast)
    losses = trainer.objective.losses(x_BW, batch, 0)
    backward(torch.stack(list(losses.values())).sum())
    return {k: v.detach() for k, v in losses.items()}, forget(trainer), torch.get_rng_state()


def assert_same(ours, theirs, tolerance=1e-5):
    (loss, grads, state), (expected_loss, expected_grads, expected_state) = ours, theirs
    for name, value in expected_loss.items():
        assert torch.allclose(loss[name], value, rtol=tolerance, atol=0), name
    assert grads.keys() == expected_grads.keys()
    for name, expected in expected_grads.items():
        size = expected.abs().max()
        # a key's bias moves all of a text's attention scores alike: its gradient is rounding
        if size > 1e-9 and not name.endswith("key.bias"):
            assert (grads[name] - expected).abs().max() <= tolerance * size, name
    assert torch.equal(state, expected_state)


# -- with dropout
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5, 100])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_cached_step_is_the_uncached_one_with_dropout_on(open_trainer, encoder, size):
    trainer = with_first_round(open_trainer(**ENCODERS[encoder], **{"model.dropout": 0.3}))
    rows = trainer.rows[:11]
    cached = step(trainer, encode_texts, size, rows)
    assert_same(cached, step(trainer, in_one_graph, size, rows))
    assert any(name.startswith("rows of encoder") for name in cached[1]) == (
        trainer.model.encoder.bag is not None
    )
    other = step(trainer, in_one_graph, size, rows, seed=12)
    assert (cached[1]["head_de.0.weight"] - other[1]["head_de.0.weight"]).abs().max() > 1e-3, (
        "dropout is on"
    )


def test_dropout_that_is_not_replayed_would_be_seen(open_trainer, monkeypatch):
    trainer = with_first_round(open_trainer(**ENCODERS["bag"]))
    expected = step(trainer, in_one_graph, 5, trainer.rows[:11])
    monkeypatch.setattr(module, "restore_random_state", lambda *_: None)
    with pytest.raises(AssertionError, match="rows of encoder"):
        assert_same(step(trainer, encode_texts, 5, trainer.rows[:11]), expected)


def test_in_half_precision_every_weight_gets_its_gradient(open_trainer):
    """Under autocast too; casts of weights made in the pass without a graph must not serve in the
    other.
    """
    trainer = with_first_round(
        open_trainer(**ENCODERS["all layers"], **{"optim.precision": "bf16"})
    )
    rows = trainer.rows[:11]
    assert_same(
        step(trainer, encode_texts, 5, rows), step(trainer, in_one_graph, 5, rows), tolerance=0.02
    )


# -- against one pass
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", ["bag", "one layer", "beside, residual"])
def test_without_dropout_it_is_the_plain_step(open_trainer, tiny_bert, encoder, monkeypatch):
    none = dict.fromkeys(("encoder.bag_dropout", "encoder.dropout", "model.dropout"), 0.0)
    trainer = with_first_round(open_trainer(**(ENCODERS[encoder] | none)))
    for part in trainer.model.modules():
        if isinstance(part, torch.nn.Dropout):
            monkeypatch.setattr(part, "p", 0.0)
    rows = trainer.rows[:11]
    plain = step(trainer, encode_texts, 0, rows)
    cached = step(trainer, encode_texts, 4, rows)
    assert_same((*cached[:2], plain[2]), plain)


def test_a_run_in_chunks(open_trainer):
    """The parameter leads here; a run in chunks that draws no dropout in the encoder is the run in
    one pass.
    """
    runs = []
    for size in (0, 7):
        trainer = open_trainer(f"chunks-{size}", **{"optim.encode_chunk": size, "optim.epochs": 2})
        trainer.mine()
        trainer.train_round()
        runs.append(trainer)
    batch = with_first_round(runs[1]).prepare(runs[1].rows[:9], 0)
    assert isinstance(batch.texts, TextChunks)
    assert max(len(places) for places, _ in batch.texts.chunks) == 7
    one, other = (trainer.model.state_dict() for trainer in runs)
    for name, value in one.items():
        assert torch.allclose(other[name], value, rtol=1e-3, atol=1e-4), name


def test_the_activations_of_one_chunk_are_held(open_trainer):
    trainer = with_first_round(
        open_trainer(
            **{"encoder.kind": "transformer", "encoder.trainable_layers": -1, "pool.eta": 4}
        )
    )
    peaks = {}
    for size in (0, 4):
        live = LiveBytes()
        with live:
            step(trainer, encode_texts, size, trainer.rows[:12])
        peaks[size] = live.peak
    assert peaks[4] < 0.6 * peaks[0]


# -- chunks
# --------------------------------------------------------------------------------------------------


def test_chunks_hold_each_text_once(open_trainer, rng):
    trainer = with_first_round(open_trainer(**{"encoder.kind": "both"}))
    for size in (1, 3, 50):
        queries = rng.choice(trainer.dataset.num_queries, 13, replace=False)
        labels = rng.choice(trainer.dataset.num_labels, 17, replace=False)
        parts = [
            ("queries", trainer.encoding.tokens["queries"], queries),
            ("labels", trainer.encoding.tokens["labels"], labels),
        ]
        texts = cut_texts(parts, trainer.batches.build, size, trainer.device)
        places = torch.cat([places for places, _ in texts.chunks])
        assert sorted(places.tolist()) == list(range(30))
        assert texts.num_texts == 30
        assert all(given.num_texts == len(some) <= size for some, given in texts.chunks)
        distinct = set()
        for _, tokens, rows in parts:
            distinct |= set(
                np.concatenate([tokens.ragged(np.array([row]))[0] for row in rows]).tolist()
            )
        assert texts.unique_U.tolist() == sorted(distinct)
        # of one source
        assert all((some.max() < 13) == (some.min() < 13) for some, _ in texts.chunks)


def test_no_texts_at_all(open_trainer):
    trainer = with_first_round(open_trainer())
    none = [("labels", trainer.encoding.tokens["labels"], np.empty(0, np.int64))]
    texts = cut_texts(none, trainer.batches.build, 3, trainer.device)
    x_BW, backward = encode_texts(trainer.model.encoder, texts, trainer.encoding.autocast)
    assert x_BW.shape == (0, trainer.model.encoder.width)
    backward(x_BW.sum())


def test_chunks_of_all_labels_follow_those_of_the_queries(open_trainer):
    trainer = with_first_round(
        open_trainer(**{"encoder.kind": "both", "pool.de_labels": "all", "optim.encode_chunk": 6})
    )
    batches = trainer.batches
    for number, rows in enumerate((trainer.rows[:3], trainer.rows[5:12])):
        batch = trainer.prepare(rows, number)
        parts = [
            *batches.texts.parts(batch.pool.rows_B),
            ("labels", trainer.encoding.tokens["labels"], batch.pool.pool_S),
        ]
        ours = batch.texts
        theirs = cut_texts(parts, batches.build, 6, trainer.device)
        assert ours.num_texts == theirs.num_texts
        assert theirs.num_texts == len(rows) + trainer.dataset.num_labels
        assert torch.equal(ours.unique_U, theirs.unique_U)
        for (places, one), (other_places, other) in zip(ours.chunks, theirs.chunks, strict=True):
            assert torch.equal(places, other_places)
            assert torch.equal(one.local_F, other.local_F) and torch.equal(
                one.vector_BD, other.vector_BD
            )
