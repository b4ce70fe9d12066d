"""Cached outputs of frozen layers: equal to what the layers compute, made once, named by what
decides them.
"""

import shutil

import numpy as np
import pytest
import torch
from helpers.tiny_tokenizers import write_static

from unidec.config import Encoder, Model
from unidec.data.shards import dividing
from unidec.data.tokens import TokenCache, build_token_cache
from unidec.errors import ArtifactError
from unidec.model.encoder import TextEncoder, load_transformer
from unidec.model.encoder_inputs import InputBuilder
from unidec.model.frozen import FrozenCaches, cached_inputs, frozen_sha256
from unidec.model.unidec import UniDEC
from unidec.pipeline.shard_jobs import run_shard

CPU = torch.device("cpu")


def make_encoder(folder, **settings):
    return TextEncoder(Encoder(kind="transformer", **settings), load_transformer(folder), 0, 32)


def cached(encoder, tokens, folder, amp=None):
    return FrozenCaches(encoder, folder, CPU, amp).read("vectors", {"labels": tokens})["labels"]


def test_cached_equals_uncached(folder, tiny_tokens, tmp_path, rng, monkeypatch):
    monkeypatch.setattr("unidec.model.frozen.TEXTS_AT_ONCE", 17)  # several slices, several chunks
    encoder = make_encoder(folder).eval()
    stored = {n: cached(encoder, t, tmp_path / n) for n, t in tiny_tokens.items()}
    assert all(a.dtype == np.float16 and a.shape[1] == 32 for a in stored.values())
    parts = [(n, t, rng.permutation(len(t))[:30]) for n, t in tiny_tokens.items()]
    with torch.no_grad():
        plain = encoder(InputBuilder(encoder, CPU)(parts))
        fast = encoder(InputBuilder(encoder, CPU, stored)(parts))
    torch.testing.assert_close(fast, plain, rtol=5e-3, atol=5e-3)
    assert (plain[0] - plain[1]).abs().max() > 0.05  # texts differ by more than the tolerance


@pytest.mark.parametrize("what", ["vectors", "outputs"])
def test_a_label_that_is_a_query_too_is_computed_once(tiny_bert, tmp_path, monkeypatch, what):
    queries = [f"text {number} of many" for number in range(40)]
    texts = {"queries": queries, "labels": [*queries[5:14], "a text of its own", "and another one"]}
    for name, own in texts.items():
        build_token_cache([own], tiny_bert, 16, tmp_path / name, len(own))
    tokens = {name: TokenCache.open(tmp_path / name) for name in texts}
    encoder = make_encoder(tiny_bert, frozen=what == "outputs").eval()
    whole = FrozenCaches(encoder, tmp_path / "alone", CPU, None)
    alone = {name: whole.read(what, {name: cache})[name] for name, cache in tokens.items()}
    computed = []
    forward = encoder.transformer.forward
    monkeypatch.setattr(
        encoder.transformer,
        "forward",
        lambda texts: computed.append(len(texts.ids_BT)) or forward(texts),
    )
    found = FrozenCaches(encoder, tmp_path / "both", CPU, None).read(what, tokens)
    assert sum(computed) == len(tokens["queries"]) + 2
    for name, values in found.items():
        expected = alone[name].astype(np.float32)
        np.testing.assert_allclose(values.astype(np.float32), expected, atol=2e-3)


def test_made_once(tiny_bert, tiny_tokens, tmp_path, monkeypatch):
    encoder = make_encoder(tiny_bert).eval()
    tokens = tiny_tokens["labels"]
    first = cached(encoder, tokens, tmp_path)
    monkeypatch.setattr(encoder.transformer, "forward", None)  # a second computation would fail
    assert np.array_equal(cached(encoder, tokens, tmp_path), first)
    assert len(list(tmp_path.iterdir())) == 1


def test_whatever_decides_the_values_decides_the_name(tiny_bert, tiny_tokens, tmp_path):
    labels = tiny_tokens["labels"]
    cls = make_encoder(tiny_bert).eval()
    cls.transformer.pooling = "cls"
    cached(make_encoder(tiny_bert).eval(), labels, tmp_path)
    other = make_encoder(tiny_bert).eval()
    next(other.transformer.parameters()).data += 1
    cached(other, labels, tmp_path)
    cached(make_encoder(tiny_bert).eval(), labels, tmp_path, amp=torch.bfloat16)
    cached(make_encoder(tiny_bert).eval(), tiny_tokens["queries"], tmp_path)
    cached(cls, labels, tmp_path)
    cached(make_encoder(tiny_bert, transformer_tokens=3).eval(), labels, tmp_path)
    assert len(list(tmp_path.iterdir())) == 6


def test_a_damaged_cache_is_refused(tiny_bert, tiny_tokens, tmp_path):
    encoder = make_encoder(tiny_bert).eval()
    cached(encoder, tiny_tokens["labels"], tmp_path)
    (file,) = tmp_path.glob("*/values.npy")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match="damaged"):
        cached(encoder, tiny_tokens["labels"], tmp_path)


def test_nothing_is_left_of_an_encoding_that_failed(tiny_bert, tiny_tokens, tmp_path, monkeypatch):
    encoder = make_encoder(tiny_bert).eval()
    monkeypatch.setattr(
        encoder.transformer, "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        cached(encoder, tiny_tokens["labels"], tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- encoders that are frozen as a whole
# -------------------------------------------------------------------------------

WHOLE = {
    "bag": {"kind": "bag"},
    "transformer": {"kind": "transformer"},
    "both": {"kind": "both", "pooling": "cls"},
    "residual": {"kind": "both", "residual": True},
}


def make_whole(folder, seed=0, **settings):
    torch.manual_seed(seed)
    transformer = load_transformer(folder)
    num_tokens, width = transformer.get_input_embeddings().weight.shape
    encoder = TextEncoder(Encoder(frozen=True, **settings), transformer, num_tokens, width)
    if encoder.bag is not None:
        torch.nn.init.normal_(encoder.bag.embedding.weight)
        torch.nn.init.normal_(encoder.bag.log_weight.weight)
    if encoder.residual is not None:
        torch.nn.init.normal_(encoder.residual[-1].weight, std=0.3)
    return encoder


@pytest.mark.parametrize("kind", WHOLE)
def test_a_frozen_encoder_reads_what_it_would_compute(
    tiny_bert, tiny_tokens, tmp_path, rng, monkeypatch, kind
):
    monkeypatch.setattr("unidec.model.frozen.TEXTS_AT_ONCE", 17)
    encoder = make_whole(tiny_bert, **WHOLE[kind]).train()
    parts = [(n, t, rng.permutation(len(t))[:30]) for n, t in tiny_tokens.items()]
    plain = InputBuilder(encoder, CPU)(parts)
    build = cached_inputs(encoder, tiny_tokens, tmp_path, CPU, None)
    assert all(
        x.dtype == np.float16 and x.shape[1] == encoder.width for x in build.frozen_outputs.values()
    )
    like = TextEncoder(
        encoder.settings.model_copy(update={"frozen": False}),
        load_transformer(tiny_bert),
        encoder.bag.embedding.num_rows if encoder.bag else 0,
        32,
    )
    like.load_state_dict(encoder.state_dict())
    expected = like.eval()(InputBuilder(like, CPU)(parts)).detach()
    monkeypatch.setattr(encoder, "_parts", None)  # nothing is computed any more
    fast = encoder(build(parts))
    torch.testing.assert_close(encoder(plain), expected)
    torch.testing.assert_close(fast, expected, rtol=5e-3, atol=5e-3)
    assert (expected[0] - expected[1]).abs().max() > 0.05  # texts differ by more than the tolerance
    assert fast.dtype == torch.float32 and not fast.requires_grad
    assert build([(n, t, rows[:0]) for n, t, rows in parts]).num_texts == 0
    again = cached_inputs(encoder, tiny_tokens, tmp_path, CPU, None).frozen_outputs
    assert all(np.array_equal(again[name], values) for name, values in build.frozen_outputs.items())


def test_of_a_frozen_encoder_the_output_alone_has_dropout(tiny_bert, tiny_tokens):
    encoder = make_whole(tiny_bert, kind="both", residual=True, dropout=0.5).train()
    texts = InputBuilder(encoder, CPU)([("labels", tiny_tokens["labels"], np.arange(20))])
    again = InputBuilder(encoder, CPU)([("labels", tiny_tokens["labels"], np.arange(20))])
    assert torch.equal(texts.output_BW, again.output_BW)
    assert 0.3 < (encoder(texts) == 0).float().mean() < 0.7
    assert torch.equal(encoder.eval()(texts), texts.output_BW)
    assert encoder.bag.embedding.used is None and not any(
        p.requires_grad for p in encoder.parameters()
    )


def test_whatever_decides_a_frozen_encoders_output_decides_the_name(
    tiny_bert, tiny_tokens, tmp_path
):
    def made(amp=None, **settings):
        cached_inputs(make_whole(tiny_bert, **settings), tiny_tokens, tmp_path, CPU, amp)
        return len(list(tmp_path.glob("outputs-*")))

    numbers = [
        made(kind="bag"),
        made(kind="bag"),
        made(kind="bag", seed=1),
        made(kind="bag", amp=torch.bfloat16),
        made(kind="transformer"),
        made(kind="transformer", pooling="cls"),
        made(kind="both"),
        made(kind="both", residual=True),
    ]
    assert numbers == [2, 2, 4, 6, 8, 10, 12, 14]
    kept = len(list(tmp_path.glob("vectors-*")))
    assert kept == 4, "the transformer's vectors are shared by all that are beside it"


def test_hash_of_a_frozen_encoder_is_of_all_its_weights(tiny_bert):
    encoder = make_whole(tiny_bert, kind="both", residual=True)
    seen = {frozen_sha256(encoder)}
    for parameter in encoder.parameters():
        parameter.data[..., -1] += 1
        seen.add(frozen_sha256(encoder))
    assert len(seen) == 1 + len(list(encoder.parameters()))


# -- shards
# -------------------------------------------------------------------------------


class Killed(BaseException):
    """In place of a signal that ends the process."""


def pair_of_caches(folder, root):
    """Tokens of 40 queries, and of labels of which 4 have the text of a query."""
    queries = [f"text {number} of {'very ' * (number % 5)}many" for number in range(40)]
    texts = {"queries": queries, "labels": [*queries[5:9], *(f"own {n} text" for n in range(20))]}
    for name, own in texts.items():
        build_token_cache([own], folder, 16, root / name, len(own), prompt=f"{name}: ")
    return {name: TokenCache.open(root / name) for name in texts}


@pytest.mark.parametrize(
    ("architecture", "amp", "settings"),
    [
        ("bert", None, {"width": 9, "transformer_tokens": 5}),
        ("bert", torch.bfloat16, {"frozen": True, "kind": "both", "residual": True}),
        ("gemma3", None, {}),  # linear layers after the pooling
        ("t5", None, {"frozen": True, "trainable_layers": -1}),
        ("modernbert", None, {"kind": "both"}),
    ],
)
def test_shards_give_the_bytes_of_one_piece(
    tiny_encoder, tmp_path, monkeypatch, architecture, amp, settings
):
    monkeypatch.setattr("unidec.model.frozen.TEXTS_AT_ONCE", 8)
    folder = tiny_encoder(architecture)
    tokens = pair_of_caches(folder, tmp_path)
    torch.manual_seed(0)
    given = Encoder(**{"kind": "transformer"} | settings)
    model = UniDEC.create(given, Model(), 3, folder, 0, {"tokens": {"max_length": 16}})
    for parameter in model.encoder.transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # not the weights of the encoder's folder
    written = []

    def write(work):
        for number in work.missing():
            if len(written) == 2:
                raise Killed
            run_shard(work.folder, number)
            written.append(f"{work.job.title} {number}")

    what = "outputs" if given.frozen else "vectors"
    FrozenCaches(model.encoder, tmp_path / "whole", CPU, amp).read(what, tokens)
    caches = FrozenCaches(model.encoder, tmp_path / "cache", CPU, amp)
    with dividing(write):
        with pytest.raises(Killed):
            caches.read(what, tokens)
        (values,) = tmp_path.glob("cache/*.shards/00001-of-00005/values.npy")
        values.write_bytes(values.read_bytes()[:-1])  # damaged: computed again
        written.clear()
        with pytest.raises(Killed):
            caches.read(what, tokens)
        assert written == ["encode queries, cached 1", "encode queries, cached 2"]
        written.extend("xyz")  # not killed any more
        caches.read(what, tokens)
    assert written[5:] == [
        *(f"encode queries, cached {number}" for number in (3, 4)),
        *(f"encode labels, cached {number}" for number in (0, 1, 2)),
    ]
    found, expected = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*.*")}
        for root in (tmp_path / "cache", tmp_path / "whole")
    )
    assert found == expected


def test_what_no_other_process_could_compute_is_computed_here(
    tiny_bert, tiny_tokens, tmp_path, monkeypatch
):
    """The bag of a frozen encoder, and static vectors: both are looked up."""
    monkeypatch.setattr("unidec.model.frozen.TEXTS_AT_ONCE", 8)
    static = tmp_path / "static"
    shutil.copytree(tiny_bert, static)
    write_static(static)
    encoders = [
        (make_whole(tiny_bert, kind="bag"), "outputs"),
        (make_encoder(static), "vectors"),
    ]
    with dividing(pytest.fail):
        for encoder, what in encoders:
            found = FrozenCaches(encoder, tmp_path / what, CPU, None).read(what, tiny_tokens)
            assert len(found["queries"]) == 60


def test_a_worker_refuses_damaged_weights(tiny_bert, tiny_tokens, tmp_path, monkeypatch):
    monkeypatch.setattr("unidec.model.frozen.TEXTS_AT_ONCE", 8)

    def write(work):
        weights = work.folder / "inputs" / "weights.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
        run_shard(work.folder, 0)

    with dividing(write), pytest.raises(ArtifactError, match=r"damaged[\s\S]*weights.safetensors"):
        cached(make_encoder(tiny_bert), tiny_tokens["labels"], tmp_path)
