"""Packed texts against padded ones: vectors and gradients, positions, chunks, rounded weights,
operations and compilation. The attention of packed texts is the reference, text by text.
"""

import contextlib

import numpy as np
import pytest
import torch
import transformers
from helpers.packed_attention import one_by_one
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from unidec.config import Encoder
from unidec.data.tokens import Tokens
from unidec.model import encoder_inputs, packed
from unidec.model.encoder import TextEncoder
from unidec.model.encoder_inputs import InputBuilder
from unidec.training.gradient_cache import cut_texts, encode_texts

CPU = torch.device("cpu")
MOST = 12
NUM_TOKENS = 60
KINDS = {
    "bert": {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
    "minilm": {"hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 192},
    "distilbert": {"dim": 32, "n_heads": 4, "hidden_dim": 48, "n_layers": 2},
    "roberta": {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
}
LENGTHS = {
    "mixed": [2, 7, MOST, 1, 5, MOST, 3, 2],
    "one text": [5],
    "one token": [1],
    "only special tokens": [2, 2, 2],
    "all of greatest length": [MOST, MOST, MOST],
    "one without a token": [3, 0, 4],
}


@pytest.fixture(autouse=True)
def _reference(monkeypatch, request):
    """A processor has no kernel."""
    if request.node.get_closest_marker("cuda") is None:
        monkeypatch.setattr(packed, "varlen", one_by_one)


def make_encoder(architecture, **settings):
    torch.manual_seed(0)
    options = {"vocab_size": NUM_TOKENS, "max_position_embeddings": MOST + 2, **KINDS[architecture]}
    if architecture == "roberta":  # its positions begin behind that of the padding
        options["max_position_embeddings"] = MOST + 4
        options["pad_token_id"] = 3
    if architecture != "distilbert":
        options["num_hidden_layers"] = 2
    model_type = "bert" if architecture == "minilm" else architecture
    config = transformers.AutoConfig.for_model(model_type, **options)
    transformers.AttentionInterface.register(packed.ATTENTION, packed.attend)
    pooler = {} if architecture == "distilbert" else {"add_pooling_layer": False}
    transformer = transformers.AutoModel.from_config(
        config, attn_implementation=packed.ATTENTION, **pooler
    )
    with torch.no_grad():  # positions and attention matter
        for weight in transformer.parameters():
            weight.mul_(5 if weight.ndim == 2 else 1)
    chosen = Encoder(**({"kind": "transformer", "trainable_layers": -1} | settings))
    return TextEncoder(chosen, transformer, NUM_TOKENS, transformer.config.hidden_size)


def make_texts(lengths, seed=0):
    offsets = np.cumsum([0, *lengths])
    ids = np.random.default_rng(seed).integers(5, NUM_TOKENS, offsets[-1]).astype(np.uint16)
    return [("queries", Tokens(ids, offsets, NUM_TOKENS, 3, MOST), np.arange(len(lengths)))]


def passed(encoder, batch):
    """Vectors, and the gradients of a loss that weighs each entry otherwise."""
    encoder.zero_grad()
    x_BW = encoder(batch)
    weight_BW = torch.linspace(-1, 1, x_BW.numel()).view_as(x_BW)
    (x_BW * weight_BW).sum().backward()
    grads = {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}
    return x_BW.detach(), grads


def assert_same(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert ours[1].keys() == theirs[1].keys() and ours[1]
    for name, grad in theirs[1].items():
        near = 1e-5 * max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(ours[1][name], grad, rtol=1e-5, atol=near, msg=name)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_texts_are_the_padded_ones(kind, lengths):
    encoder = make_encoder(kind).eval()
    parts = make_texts(lengths)
    padded = InputBuilder(encoder, CPU)(parts)
    together = InputBuilder(encoder, CPU, packs=True)(parts)
    assert len(together.chunks) == 1 and len(together.chunks[0].ids_F) == sum(lengths)
    assert_same(passed(encoder, together), passed(encoder, padded))


@pytest.mark.parametrize(
    "settings",
    [{"pooling": "cls"}, {"transformer_tokens": 3}, {"trainable_layers": 1}, {"kind": "both"}],
    ids=str,
)
def test_packed_texts_with_each_setting(settings):
    encoder = make_encoder("bert", **settings).eval()
    parts = make_texts(LENGTHS["mixed"]) + make_texts([4, 4, 9], seed=1)
    ours = passed(encoder, InputBuilder(encoder, CPU, packs=True)(parts))
    assert_same(ours, passed(encoder, InputBuilder(encoder, CPU)(parts)))


@pytest.mark.parametrize("recompute", [False, True])
def test_several_packs_are_one(monkeypatch, recompute):
    """Activations that are computed again are those of a small pack at a time."""
    encoder = make_encoder("bert").eval()
    parts = make_texts(LENGTHS["mixed"])
    expected = passed(encoder, InputBuilder(encoder, CPU, packs=True)(parts))
    encoder.recompute = recompute
    limit = "GPU_CHUNK_TOKENS" if recompute else "PACK_TOKENS"
    monkeypatch.setattr(encoder_inputs, limit, 10)
    batch = InputBuilder(encoder, CPU, packs=True)(parts)
    assert [len(chunk.bounds) - 1 for chunk in batch.chunks] == [2, 3, 1, 2]
    assert all(len(chunk.ids_F) < 10 + MOST for chunk in batch.chunks)
    assert_same(passed(encoder.train(False), batch), expected)


def test_gradients_are_cached_with_packed_texts():
    encoder = make_encoder("distilbert").eval()
    parts = make_texts(LENGTHS["mixed"])
    build = InputBuilder(encoder, CPU, packs=True)
    expected = passed(encoder, build(parts))
    encoder.zero_grad()
    chunks = cut_texts(parts, build, 3, CPU)
    x_BW, backward = encode_texts(encoder, chunks, contextlib.nullcontext)
    backward((x_BW * torch.linspace(-1, 1, x_BW.numel()).view_as(x_BW)).sum())
    grads = {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}
    assert_same((x_BW.detach(), grads), expected)


@pytest.mark.parametrize("trainable", [-1, 1])
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_are_rounded_once_a_pass(monkeypatch, trainable, recompute):
    """Vectors are those of a model in bfloat16; gradients reach the weights in float32."""
    monkeypatch.setattr(encoder_inputs, "PACK_TOKENS", 10)
    monkeypatch.setattr(encoder_inputs, "GPU_CHUNK_TOKENS", 10)
    encoder = make_encoder("bert", trainable_layers=trainable).eval()
    encoder.recompute = recompute
    batch = InputBuilder(encoder, CPU, packs=True)(make_texts(LENGTHS["mixed"]))
    exact, exact_grads = passed(encoder, batch)
    casts = []
    right = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda to, given: casts.append(to[0].dtype) or right(to, given)
    )
    with torch.autocast("cpu", torch.bfloat16):
        x_BW, grads = passed(encoder, batch)
    assert casts == [torch.bfloat16, torch.float32]
    assert grads.keys() == exact_grads.keys()
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    half = make_encoder("bert", trainable_layers=trainable).eval()
    half.transformer.bfloat16()
    expected, half_grads = passed(half, batch)
    assert torch.equal(x_BW, expected)
    for name, grad in half_grads.items():  # those of several packs are added in another order
        near = max(0.02 * float(grad.abs().max()), 1e-3)
        torch.testing.assert_close(grads[name], grad.float(), rtol=0, atol=near, msg=name)
    torch.testing.assert_close(x_BW, exact, rtol=0.1, atol=0.1)


def test_dropout_is_that_of_the_layers():
    encoder = make_encoder("bert").train()
    build = InputBuilder(encoder, CPU, packs=True)
    batch = build(make_texts(LENGTHS["mixed"]))
    assert not torch.equal(encoder(batch), encoder(batch))
    for layer in encoder.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    config = encoder.transformer.transformer.config
    assert config.attention_probs_dropout_prob > 0  # as its weights have none (docs/training.md)
    assert torch.equal(encoder(batch), encoder(batch))


def test_packed_texts_take_fewer_operations():
    """Of titles: a third of the tokens of a step is padding where 1,000 texts are padded together,
    and still some where they are sorted.
    """
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.gamma(4.0, 2.2, 300).astype(int) + 2, 2, MOST)
    encoder = make_encoder("minilm").eval()
    counts = {}
    for packs in (False, True):
        batch = InputBuilder(encoder, CPU, packs=packs)(make_texts(lengths))
        with FlopCounterMode(display=False) as counter:
            encoder(batch).sum().backward()
        counts[packs] = counter.get_total_flops()
    tokens = lengths.sum()
    hidden, layers = 48, 2
    weights = 12 * hidden**2 * layers
    attention = 4 * 3 * hidden * layers * (lengths**2).sum()  # scores and their sum; 3: backward
    assert 6 * weights * tokens < counts[True] < 1.3 * (6 * weights * tokens + attention)
    assert counts[True] < 0.95 * counts[False]


@pytest.mark.slow
def test_packs_of_any_size_share_a_few_graphs(monkeypatch):
    """Rounded weights too; the number of tokens is a symbol."""
    encoder = make_encoder("bert").train()
    monkeypatch.setattr(packed, "varlen", torch.compiler.disable(one_by_one))
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    encoder.compile_transformer(counter)
    counts = []
    for seed, count in enumerate((8, 5, 7, 3, 6)):
        parts = make_texts(LENGTHS["mixed"][:count], seed)
        with torch.autocast("cpu", torch.bfloat16):
            encoder(InputBuilder(encoder, CPU, packs=True)(parts)).sum().backward()
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert counts[1:] == [counts[1]] * 4
    torch.compiler.reset()


def test_who_packs(monkeypatch):
    config = make_encoder("bert").transformer.transformer.config
    card = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    half = torch.bfloat16
    assert packed.can_pack(config, card, half)
    assert not packed.can_pack(config, card, None)
    assert not packed.can_pack(config, CPU, half)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not packed.can_pack(config, card, half)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    config.num_attention_heads = 8  # 4 wide: the kernel has steps of 8
    assert not packed.can_pack(config, card, half)


def test_what_a_pack_holds():
    encoder = make_encoder("bert").eval()
    batch = InputBuilder(encoder, CPU, packs=True)(make_texts([3, 1]))
    (chunk,) = batch.chunks
    assert chunk.bounds.tolist() == [0, 3, 4] and chunk.bounds.dtype == torch.int32
    assert chunk.place_F.tolist() == [0, 1, 2, 0]
    assert chunk.most == MOST and batch.place_B is None


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_the_card_computes_what_the_reference_does(kind):
    encoder = make_encoder(kind).cuda().eval()
    card = torch.device("cuda", 0)
    parts = make_texts(LENGTHS["mixed"])
    build = InputBuilder(encoder, card, packs=True)
    with torch.autocast("cuda", torch.bfloat16):
        ours = encoder(build(parts))
    expected = encoder.cpu()(InputBuilder(encoder, CPU)(parts))
    torch.testing.assert_close(ours.cpu(), expected, rtol=0.1, atol=0.1)
