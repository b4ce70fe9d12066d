"""Encoders against dense loops: the bag, the transformer's lower and upper layers, padding, order,
gradients.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from unidec.config import Encoder
from unidec.data.chunks import CHUNK_TEXTS, GPU_CHUNK_TOKENS, LONG, length_chunks
from unidec.data.tokens import Tokens
from unidec.errors import ConfigError
from unidec.methods.inception import token_layers
from unidec.model.encoder import (
    TextEncoder,
    TransformerEncoder,
    empty_transformer,
    load_transformer,
)
from unidec.model.encoder_inputs import InputBuilder
from unidec.model.packed import Padded

CPU = torch.device("cpu")
NUM_TOKENS = 40
WIDTH = 7


def make_tokens(rng, lengths, num_tokens=NUM_TOKENS):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = rng.integers(0, num_tokens, offsets[-1]).astype(np.uint16)
    return Tokens(ids, offsets, num_tokens, 0, 16)


def inputs_of(encoder, tokens, rows):
    return InputBuilder(encoder, CPU)([("queries", tokens, rows)])


def make_encoder(folder=None, num_tokens=NUM_TOKENS, width=WIDTH, **settings):
    transformer = None if folder is None else load_transformer(folder)
    if transformer is not None:
        width = transformer.config.hidden_size
    settings = Encoder(**({"kind": "bag"} | settings))
    layers = token_layers(settings, width)
    encoder = TextEncoder(settings, transformer, num_tokens, width, layers)
    if encoder.bag is not None:
        torch.nn.init.normal_(encoder.bag.embedding.weight)
        torch.nn.init.normal_(encoder.bag.log_weight.weight, std=0.5)
    return encoder


def dense_bag(tokens, rows, embedding_VD, log_weight_V):
    """One text after the other, one token after the other."""
    vectors = []
    for row in rows:
        vector = torch.zeros(embedding_VD.shape[1])
        for token in tokens.ids[tokens.offsets[row] : tokens.offsets[row + 1]].tolist():
            vector = vector + log_weight_V[token].exp() * embedding_VD[token]
        vectors.append(vector / vector.norm().clamp_min(1e-12))
    return torch.stack(vectors)


# -- bag
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"kind": "inception", "inception_tokens": 4}], ids=["bag", "inception"]
)
def test_gradients_of_two_threads_are_the_same_each_time(rng, two_threads, settings):
    """Enough tokens that torch adds gradients of `x[index]` by atomic operations, in any order."""
    encoder = make_encoder(width=64, bag_dropout=0, dropout=0, **settings).train()
    rows = np.arange(10_000)
    batch = inputs_of(encoder, make_tokens(rng, np.full(len(rows), 5)), rows)
    weight_BD = torch.randn(len(rows), encoder.width)

    def gradients() -> torch.Tensor:
        tables = (encoder.bag.embedding, encoder.bag.log_weight)
        for table in tables:
            table.forget()
        (encoder(batch) * weight_BD).sum().backward()
        return torch.cat([table.used[1].grad.flatten() for table in tables])

    first = gradients()
    assert first.abs().max() > 0
    assert all(torch.equal(gradients(), first) for _ in range(5))


def test_bag_equals_a_loop_over_tokens_with_its_gradients(rng):
    encoder = make_encoder().train()
    queries = make_tokens(rng, [5, 1, 9, 3])
    labels = make_tokens(rng, [2, 12])
    parts = [("queries", queries, np.array([2, 0, 2])), ("labels", labels, np.array([1, 0]))]
    x_BD = encoder(InputBuilder(encoder, CPU)(parts))
    target_BD = torch.randn_like(x_BD)
    (x_BD * target_BD).sum().backward()

    embedding = encoder.bag.embedding.weight.detach().clone().requires_grad_()
    log_weight = encoder.bag.log_weight.weight.detach().clone().requires_grad_()
    expected = torch.cat([dense_bag(t, rows, embedding, log_weight[:, 0]) for _, t, rows in parts])
    (expected * target_BD).sum().backward()
    torch.testing.assert_close(x_BD, expected, rtol=1e-5, atol=1e-6)
    for table, dense in (
        (encoder.bag.embedding, embedding),
        (encoder.bag.log_weight, log_weight),
    ):
        rows_U, leaf = table.used
        scattered = torch.zeros_like(dense).index_add_(0, rows_U, leaf.grad)
        torch.testing.assert_close(scattered, dense.grad, rtol=1e-4, atol=1e-5)


def test_token_dropout_is_of_training_only(rng):
    encoder = make_encoder(bag_dropout=0.5)
    tokens = make_tokens(rng, [16] * 20)
    batch = inputs_of(encoder, tokens, np.arange(20))
    without = dense_bag(
        tokens, range(20), encoder.bag.embedding.weight, encoder.bag.log_weight.weight[:, 0]
    )
    encoder.eval()
    torch.testing.assert_close(encoder(batch), without, rtol=1e-5, atol=1e-6)
    encoder.train()
    trained = encoder(batch).detach()
    changed = ((trained - without).abs() > 1e-3).any(1)
    assert changed.sum() >= 18  # 16 tokens all kept: once in 65,536 texts


def test_token_dropout_of_every_token_gives_zeros_not_nan(rng):
    encoder = make_encoder(bag_dropout=1.0).train()
    tokens = make_tokens(rng, [3, 2])
    x_BD = encoder(inputs_of(encoder, tokens, np.arange(2)))
    x_BD.sum().backward()
    assert torch.equal(x_BD, torch.zeros_like(x_BD))
    assert torch.isfinite(encoder.bag.embedding.used[1].grad).all()


def test_empty_texts_give_finite_vectors(rng):
    encoder = make_encoder().train()
    tokens = make_tokens(rng, [0, 4, 0])
    x_BD = encoder(inputs_of(encoder, tokens, np.arange(3)))
    x_BD.sum().backward()
    expected = torch.zeros(2, WIDTH)
    assert torch.equal(x_BD[[0, 2]], expected)
    assert float(x_BD[1].detach().norm()) == pytest.approx(1, abs=1e-5)
    assert torch.isfinite(encoder.bag.log_weight.used[1].grad).all()


def test_bag_starts_as_a_tf_idf_mean(rng):
    encoder = make_encoder()
    tokens = make_tokens(rng, [6, 3, 8])
    frequency = rng.integers(0, 100, NUM_TOKENS)
    frequency[:3] = (100, 0, 99)
    encoder.bag.start_weights(frequency, 100)
    weight = np.maximum(np.log(101 / (1 + frequency)), 1e-3)
    assert weight[0] == 1e-3  # in every text: nearly nothing, and its logarithm is finite
    vectors = weight[:, None] * encoder.bag.embedding.weight.numpy()
    expected = [vectors[ids].sum(0) for ids in np.split(tokens.ids, tokens.offsets[1:-1])]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    x_BD = encoder.eval()(inputs_of(encoder, tokens, np.arange(3)))
    np.testing.assert_allclose(x_BD.numpy(), expected, rtol=1e-4, atol=1e-5)


# -- transformer
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def texts(rng):
    """40 texts of 2 to 12 tokens."""
    return make_tokens(rng, rng.integers(2, 13, 40))


def one_by_one(transformer, tokens, rows, pooling, most=None):
    """Each text alone, through the transformer as its authors wrote it."""
    vectors = []
    for row in rows:
        ids = torch.from_numpy(
            tokens.ids[tokens.offsets[row] : tokens.offsets[row + 1]][:most].astype(np.int64)
        )[None]
        hidden = transformer(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[
            0
        ]
        vectors.append(hidden[0] if pooling == "cls" else hidden.mean(0))
    return torch.stack(vectors)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("trainable", [-1, 0, 1, 3])
def test_a_text_does_not_depend_on_its_batch(folder, texts, rng, monkeypatch, pooling, trainable):
    """Padding, chunks by length, sources, frozen layers: nothing of it shows, and the order is the
    one asked for.
    """
    monkeypatch.setattr(
        "unidec.model.encoder_inputs.length_chunks",
        lambda lengths, tokens: length_chunks(lengths, 7, tokens),
    )
    encoder = make_encoder(
        folder, kind="transformer", trainable_layers=trainable, pooling=pooling
    ).eval()
    rows = rng.permutation(40)[:25]
    more = rng.permutation(40)[:9]
    with torch.no_grad():
        x_BD = encoder(
            InputBuilder(encoder, CPU)([("queries", texts, rows), ("labels", texts, more)])
        )
        expected = one_by_one(encoder.transformer.transformer, texts, [*rows, *more], pooling)
    if trainable == 0:
        expected = F.normalize(expected, dim=-1)
    torch.testing.assert_close(x_BD, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trainable", [-1, 0, 1, 2, 3])
def test_gradients_reach_the_layers_that_train_and_no_other(folder, texts, trainable):
    encoder = make_encoder(folder, kind="transformer", trainable_layers=trainable).train()
    batch = inputs_of(encoder, texts, np.arange(40))
    x_BD = encoder(batch)
    if trainable == 0:
        assert not x_BD.requires_grad
        assert not any(p.requires_grad for p in encoder.parameters())
        return
    x_BD.pow(2).sum().backward()
    for name, parameter in encoder.named_parameters():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        trains = trainable == -1 or (layer is not None and layer >= 3 - trainable)
        assert parameter.requires_grad == trains, name
        assert (parameter.grad is not None) == trains, name
        # a shift of all keys cancels in the softmax
        if trains and not name.endswith(("k_lin.bias", "key.bias")):
            assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("trainable", [-1, 0, 1, 3])
def test_layers_that_do_not_train_have_no_dropout(folder, trainable):
    transformer = (
        make_encoder(folder, kind="transformer", trainable_layers=trainable).train().transformer
    )
    at_work = [
        name
        for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Dropout) and module.training
    ]
    layers = {
        next((int(part) for part in name.split(".") if part.isdigit()), None) for name in at_work
    }
    assert layers == {-1: {None, 0, 1, 2}, 0: set(), 1: {2}, 3: {0, 1, 2}}[trainable]
    assert not any(module.training for module in transformer.eval().modules())


@pytest.mark.parametrize("trainable", [1, -1])
def test_activations_computed_again_change_nothing(tiny_bert, texts, trainable):
    """Value and gradients bit for bit, dropouts on; what is kept for backward is a small part."""
    results = []
    for recompute in (False, True):
        torch.manual_seed(5)
        encoder = make_encoder(
            tiny_bert, kind="both", trainable_layers=trainable, dropout=0.1
        ).train()
        encoder.recompute = recompute
        batch = inputs_of(encoder, texts, np.arange(len(texts)))
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: (saved.append(x), x)[1], lambda x: x
        ):
            x_BW = encoder(batch)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
        x_BW.square().sum().backward()
        gradients = {
            name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None
        }
        results.append((x_BW.detach(), gradients, sum(storages.values())))
    (one, one_grad, all_kept), (other, other_grad, few_kept) = results
    assert torch.equal(one, other)
    assert one_grad.keys() == other_grad.keys()
    assert len(one_grad) > 10
    assert all(torch.equal(one_grad[name], other_grad[name]) for name in one_grad)
    assert few_kept < 0.7 * all_kept


def test_a_frozen_transformer_has_no_dropout_in_training(tiny_bert, texts):
    encoder = make_encoder(tiny_bert, kind="transformer", trainable_layers=0)
    build = InputBuilder(encoder, CPU)
    parts = [("queries", texts, np.arange(40))]
    trained = encoder.train()(build(parts))
    evaluated = encoder.eval()(build(parts))
    assert torch.equal(trained, evaluated)
    moving = make_encoder(tiny_bert, kind="transformer", trainable_layers=1).train()
    batch = InputBuilder(moving, CPU)(parts)
    assert not torch.equal(moving(batch), moving(batch))


@pytest.mark.parametrize("most", [0, 1, 5])
def test_both_are_two_unit_halves(tiny_bert, texts, most):
    """The transformer reads the first tokens alone where it shall; the bag reads all of them."""
    encoder = make_encoder(
        tiny_bert, kind="both", trainable_layers=0, transformer_tokens=most
    ).eval()
    with torch.no_grad():
        x_BW = encoder(inputs_of(encoder, texts, np.arange(40)))
        alone = one_by_one(encoder.transformer.transformer, texts, range(40), "mean", most or None)
        vector = F.normalize(alone, dim=-1)
    bag = dense_bag(
        texts, range(40), encoder.bag.embedding.weight, encoder.bag.log_weight.weight[:, 0]
    )
    torch.testing.assert_close(
        x_BW,
        torch.cat([vector, bag], -1),
        rtol=1e-4,
        atol=1e-5,
    )
    assert encoder.width == 64


@pytest.mark.parametrize("kind", ["bag", "both", "transformer"])
def test_residual_network_starts_as_the_identity(tiny_bert, texts, kind):
    plain = make_encoder(tiny_bert if kind != "bag" else None, kind=kind, trainable_layers=0).eval()
    added = make_encoder(
        tiny_bert if kind != "bag" else None, kind=kind, trainable_layers=0, residual=True
    ).eval()
    added.load_state_dict(plain.state_dict(), strict=False)
    parts = [("queries", texts, np.arange(40))]
    build = InputBuilder(plain, CPU)
    expected = added(build(parts))
    assert torch.equal(plain(build(parts)), expected)
    added.residual[-1].weight.data.normal_()
    assert not torch.allclose(plain(build(parts)), added(build(parts)))


# -- parts
# --------------------------------------------------------------------------------------------------


def test_pooling_equals_a_loop(rng):
    hidden = torch.from_numpy(rng.normal(size=(6, 5, 4))).to(torch.bfloat16)
    length = np.array([5, 1, 3, 0, 2, 4])
    mask = torch.from_numpy(np.arange(5) < length[:, None])
    mean = Padded(mask, mask).pool(hidden, "mean")
    cls = Padded(mask, mask).pool(hidden, "cls")
    assert mean.dtype == cls.dtype == torch.float32
    for i, n in enumerate(length):
        expected = hidden[i, :n].float().mean(0) if n else torch.zeros(4)
        torch.testing.assert_close(mean[i], expected)
        assert torch.equal(cls[i], hidden[i, 0].float())


def test_chunks_hold_each_place_once_shortest_first(rng):
    lengths = rng.integers(1, 30, 50)
    chunks = list(length_chunks(lengths, 8))
    assert [len(chunk) for chunk in chunks] == [8] * 6 + [2]
    order = np.concatenate(chunks)
    assert sorted(order) == list(range(50))
    assert (np.diff(lengths[order]) >= 0).all()
    assert list(length_chunks(lengths[:0])) == []


def test_chunks_grow_up_to_a_number_of_tokens(rng):
    """As many texts as fit, but never fewer than `size`."""
    lengths = rng.integers(0, 30, 200)
    chunks = list(length_chunks(lengths, 8, tokens=300))
    order = np.concatenate(chunks)
    assert sorted(order) == list(range(200))
    assert (np.diff(lengths[order]) >= 0).all()
    for chunk, following in itertools.pairwise(chunks):
        padded = len(chunk) * lengths[chunk].max()
        more = (len(chunk) + 1) * lengths[following[0]]
        assert padded <= 300 or len(chunk) == 8
        assert more > 300
    assert len(chunks) > 2
    assert len(chunks[0]) > 8
    assert [len(chunk) for chunk in length_chunks(np.zeros(50, dtype=np.int64), 8, tokens=1)] == [
        50
    ]
    assert [len(chunk) for chunk in length_chunks(np.zeros(20, dtype=np.int64), 8)] == [8, 8, 4]


@pytest.mark.parametrize("tokens", [0, GPU_CHUNK_TOKENS])
def test_long_and_short_texts_are_padded_little(rng, tokens):
    lengths = np.where(rng.random(600) < 0.05, rng.integers(513, 8193, 600), 32)
    chunks = list(length_chunks(lengths, tokens=tokens))
    assert sorted(np.concatenate(chunks)) == list(range(600))
    padded = np.array([len(chunk) * lengths[chunk].max() for chunk in chunks])
    longest = np.array([lengths[chunk].max() for chunk in chunks])
    assert padded.sum() < 1.3 * lengths.sum()
    assert (padded * longest <= CHUNK_TEXTS * LONG**2).all(), "attention of 256 texts of 512 tokens"
    one_long = np.append(np.full(255, 32), 8192)
    assert [len(chunk) for chunk in length_chunks(one_long, tokens=tokens)] == [255, 1]
    short = np.append(np.full(255, 32), LONG)
    assert len(list(length_chunks(short))) == 1, "texts that were always allowed: as ever"


def test_only_a_gpu_is_given_more_short_texts_at_once(folder):
    encoder = make_encoder(folder, kind="transformer")
    assert InputBuilder(encoder, CPU).chunk_tokens == 0
    assert InputBuilder(encoder, torch.device("cuda", 0)).chunk_tokens == GPU_CHUNK_TOKENS


def test_more_layers_than_there_are(tiny_bert):
    with pytest.raises(ConfigError, match="more trainable layers than the transformer has"):
        make_encoder(tiny_bert, kind="transformer", trainable_layers=4)


def test_an_unknown_stack_of_layers():
    unknown = torch.nn.Linear(2, 2)
    unknown.config = SimpleNamespace(hidden_size=2, num_hidden_layers=2)
    TransformerEncoder(unknown, "mean", 0)
    with pytest.raises(ConfigError, match="no stack of layers"):
        TransformerEncoder(unknown, "mean", 1)


@pytest.mark.parametrize("kind", ["bag", "transformer", "both"])
@pytest.mark.parametrize("trainable", [0, 1, -1])
def test_no_texts_at_all_give_no_vectors(tiny_bert, texts, kind, trainable):
    """A rank whose part of a batch is empty."""
    encoder = make_encoder(
        tiny_bert, 60, kind=kind, trainable_layers=trainable, residual=True
    ).train()
    build = InputBuilder(encoder, CPU)
    x_BW = encoder(build([("queries", texts, np.empty(0, dtype=np.int64))]))
    assert x_BW.shape == (0, encoder.width)
    x_BW.sum().backward()


def test_a_bag_of_the_first_tokens_stands_beside_the_whole_text(rng):
    encoder = make_encoder(bag_head=4).eval()
    tokens = make_tokens(rng, [5, 1, 9, 0, 4])
    rows = np.array([2, 0, 3, 4, 1])
    x_BD = encoder(inputs_of(encoder, tokens, rows))
    embedding = encoder.bag.embedding.weight
    log_weight = encoder.bag.log_weight.weight[:, 0]
    ids = [tokens.ids[tokens.offsets[row] : tokens.offsets[row + 1]][:4] for row in range(5)]
    starts = Tokens(np.concatenate(ids), np.cumsum([0, *map(len, ids)]), NUM_TOKENS, 0, 16)
    expected = [dense_bag(t, rows, embedding, log_weight) for t in (tokens, starts)]
    assert encoder.width == 2 * WIDTH
    torch.testing.assert_close(
        x_BD,
        torch.cat(expected, dim=-1),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("kind", "on_gpu"),
    [
        ("MPNet", "eager"),
        ("Bert", "unidec"),
        ("DistilBert", "unidec"),
        ("Electra", "sdpa"),
    ],
)
def test_attention_is_fused_on_a_gpu_where_the_architecture_has_it(
    monkeypatch, tmp_path, kind, on_gpu
):
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch.device("meta"):
        assert empty_transformer(tmp_path).config._attn_implementation == on_gpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with torch.device("meta"):
        assert empty_transformer(tmp_path).config._attn_implementation == "eager"
