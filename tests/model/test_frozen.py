"""Cached outputs of frozen layers: equal to what is computed anew, made once, named by what decides them."""

import numpy as np
import pytest
import torch

from unidec.config import Encoder
from unidec.errors import ArtifactError
from unidec.model.encoder import InputBuilder, TextEncoder, load_transformer
from unidec.model.frozen import cached_outputs

CPU = torch.device("cpu")


@pytest.fixture(params=["bert", "distilbert"])
def folder(request):
    return request.getfixturevalue(f"tiny_{request.param}")


def make_encoder(folder, trainable_layers):
    return TextEncoder(Encoder(kind="transformer", trainable_layers=trainable_layers), load_transformer(folder), 0, 32)


def cached(encoder, tokens, folder, what, **changes):
    given = {"weights_sha256": "abc", "device": CPU, "amp": None} | changes
    return cached_outputs(encoder.transformer, tokens=tokens, folder=folder, what=what, **given)


@pytest.mark.parametrize(("what", "trainable"), [("vectors", 0), ("hidden", 1), ("hidden", 2)])
def test_cached_equals_uncached(folder, tiny_tokens, tmp_path, rng, monkeypatch, what, trainable):
    monkeypatch.setattr("unidec.model.frozen.TEXTS_AT_ONCE", 17)  # several slices, several chunks
    encoder = make_encoder(folder, trainable).eval()
    stored = {n: cached(encoder, t, tmp_path / n, what) for n, t in tiny_tokens.items()}
    assert all(a.dtype == np.float16 and a.shape[1] == 32 for a in stored.values())
    option = {"frozen_vectors" if what == "vectors" else "frozen_hidden": stored}
    parts = [(n, t, rng.permutation(len(t))[:30]) for n, t in tiny_tokens.items()]
    with torch.no_grad():
        plain = encoder(InputBuilder(encoder, CPU)(parts))
        fast = encoder(InputBuilder(encoder, CPU, **option)(parts))
    torch.testing.assert_close(fast, plain, rtol=5e-3, atol=5e-3)
    assert (plain[0] - plain[1]).abs().max() > 0.05  # texts differ by more than the tolerance


def test_made_once(tiny_bert, tiny_tokens, tmp_path, monkeypatch):
    encoder, tokens = make_encoder(tiny_bert, 0).eval(), tiny_tokens["labels"]
    first = cached(encoder, tokens, tmp_path, "vectors")
    monkeypatch.setattr(encoder.transformer, "forward", None)  # a second computation would fail
    assert np.array_equal(cached(encoder, tokens, tmp_path, "vectors"), first)
    assert len(list(tmp_path.iterdir())) == 1


def test_whatever_decides_the_values_decides_the_name(tiny_bert, tiny_tokens, tmp_path):
    labels = tiny_tokens["labels"]
    one, two = make_encoder(tiny_bert, 1).eval(), make_encoder(tiny_bert, 2).eval()
    cls = make_encoder(tiny_bert, 0).eval()
    cls.transformer.pooling = "cls"
    cached(make_encoder(tiny_bert, 0).eval(), labels, tmp_path, "vectors")
    cached(make_encoder(tiny_bert, 0).eval(), labels, tmp_path, "vectors", weights_sha256="other")
    cached(make_encoder(tiny_bert, 0).eval(), labels, tmp_path, "vectors", amp=torch.bfloat16)
    cached(make_encoder(tiny_bert, 0).eval(), tiny_tokens["queries"], tmp_path, "vectors")
    cached(cls, labels, tmp_path, "vectors")
    cached(one, labels, tmp_path, "hidden")
    cached(two, labels, tmp_path, "hidden")
    assert len(list(tmp_path.iterdir())) == 7


def test_a_damaged_cache_is_refused(tiny_bert, tiny_tokens, tmp_path):
    encoder = make_encoder(tiny_bert, 0).eval()
    cached(encoder, tiny_tokens["labels"], tmp_path, "vectors")
    (file,) = tmp_path.glob("*/values.npy")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match="damaged"):
        cached(encoder, tiny_tokens["labels"], tmp_path, "vectors")


def test_nothing_is_left_of_an_encoding_that_failed(tiny_bert, tiny_tokens, tmp_path, monkeypatch):
    encoder = make_encoder(tiny_bert, 0).eval()
    monkeypatch.setattr("unidec.model.frozen._fill", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cached(encoder, tiny_tokens["labels"], tmp_path, "vectors")
    assert list(tmp_path.iterdir()) == []
