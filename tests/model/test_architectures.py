"""Encoders of each architecture as sentence-transformers gives them: their vectors, padded and
packed, and pooling.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from helpers.packed_attention import one_by_one
from helpers.tiny_architectures import ARCHITECTURES, LABEL, LENGTH, QUERY, TEXTS

from unidec.config import Encoder, Model
from unidec.errors import ConfigError
from unidec.model import packed
from unidec.model.encoder_folder import read_encoder_folder
from unidec.model.encoder_inputs import InputBuilder
from unidec.model.packed import PACKABLE, Packed, Padded
from unidec.model.sources import resolve_encoder
from unidec.model.unidec import UniDEC

CPU = torch.device("cpu")
needs_sentence_transformers = pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="an extra of its own"
)


def new_model(folder: Path, **encoder) -> UniDEC:
    """A model whose dual encoder is the encoder itself."""
    settings = Encoder(
        **{"name": str(folder), "kind": "transformer", "trainable_layers": -1} | encoder
    )
    found = read_encoder_folder(folder)
    dim = settings.width or (found.dense[-1].out_features if found.dense else 32)
    options = Model(heads="de", projection=False, dim=dim, dropout=0.0)
    params = {"tokens": {"max_length": LENGTH}}
    return UniDEC.create(settings, options, 5, folder, 0, params).eval()


def vectors(model: UniDEC, texts: list[str], side: str) -> np.ndarray:
    return model.vectors(side, model.tokens(texts, side))[0]


def theirs(folder: Path, texts: list[str], prompt: str, width: int | None = None) -> np.ndarray:
    """At a width, which leaves vectors of any length, of unit length."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        str(folder), device="cpu", local_files_only=True, truncate_dim=width
    )
    return model.encode(texts, prompt=prompt, normalize_embeddings=width is not None)


@needs_sentence_transformers
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vectors_are_those_of_sentence_transformers(tiny_encoder, name) -> None:
    folder = tiny_encoder(name)
    model = new_model(folder)
    for side, prompt in (("queries", QUERY), ("labels", LABEL)):
        expected = theirs(folder, TEXTS, prompt)
        np.testing.assert_allclose(vectors(model, TEXTS, side), expected, rtol=0, atol=1e-5)
    assert np.abs(expected[0] - expected[1]).max() > 0.01
    assert np.abs(vectors(model, TEXTS, "queries") - vectors(model, TEXTS, "labels")).max() > 0.01


@needs_sentence_transformers
@pytest.mark.parametrize("width", [1, 8, 24])
@pytest.mark.parametrize("name", ["bert", "qwen3", "t5"])  # t5 has 24 dimensions
def test_vectors_of_a_smaller_width(tiny_encoder, name, width) -> None:
    folder = tiny_encoder(name)
    model = new_model(folder, width=width)
    for side, prompt in (("queries", QUERY), ("labels", LABEL)):
        expected = theirs(folder, TEXTS, prompt, width)
        assert expected.shape == (len(TEXTS), width)
        np.testing.assert_allclose(vectors(model, TEXTS, side), expected, rtol=0, atol=1e-5)


def test_a_larger_width_is_refused(tiny_encoder) -> None:
    with pytest.raises(ConfigError, match="other dimensions") as caught:
        new_model(tiny_encoder("t5"), width=25)
    assert caught.value.where == "encoder.width"
    assert "24" in caught.value.fix


@needs_sentence_transformers
def test_vectors_of_minilm() -> None:
    folder = resolve_encoder("all-MiniLM-L6-v2")
    settings = Encoder(kind="transformer", trainable_layers=-1)
    options = Model(heads="de", projection=False, dim=384)
    params = {"tokens": {"max_length": LENGTH}}
    model = UniDEC.create(settings, options, 5, folder, 0, params).eval()
    assert (model.encoder_settings.pooling, model.encoder_settings.query_prompt) == ("mean", "")
    from sentence_transformers import SentenceTransformer

    library = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    library.max_seq_length = LENGTH
    np.testing.assert_allclose(
        vectors(model, TEXTS, "queries"), library.encode(TEXTS), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "last", "weighted_mean"])
@pytest.mark.parametrize("name", [n for n, t in ARCHITECTURES.items() if t.model_type in PACKABLE])
def test_packed_vectors_are_the_padded_ones(tiny_encoder, monkeypatch, name, pooling) -> None:
    monkeypatch.setattr(packed, "varlen", one_by_one)
    model = new_model(tiny_encoder(name), pooling=pooling)
    rows = np.arange(len(TEXTS))
    parts = [("queries", model.tokens(TEXTS, "queries"), rows)]
    expected = model.encoder(InputBuilder(model.encoder, CPU)(parts))
    transformers.AttentionInterface.register(packed.ATTENTION, packed.attend)
    model.encoder.transformer.transformer.set_attn_implementation(packed.ATTENTION)
    together = InputBuilder(model.encoder, CPU, packs=True)(parts)
    torch.testing.assert_close(model.encoder(together), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "max", "last", "weighted_mean"])
def test_pooling_equals_a_loop(rng, pooling) -> None:
    """Padded and packed, also of a text without tokens."""
    lengths = [3, 0, 5, 1]
    hidden_BTW = torch.from_numpy(rng.normal(size=(4, 5, 6)).astype(np.float32))
    mask_BT = torch.arange(5) < torch.tensor(lengths)[:, None]
    expected = []
    for text_TW, length in zip(hidden_BTW.numpy(), lengths, strict=True):
        own = text_TW[:length]
        places = np.arange(1, length + 1)[:, None]
        of = {
            "mean": lambda own=own: own.mean(0),
            "max": lambda own=own: own.max(0),
            "last": lambda own=own: own[-1],
            "weighted_mean": lambda own=own, p=places: (own * p).sum(0) / p.sum(),
        }
        expected.append(of[pooling]() if length else np.zeros(6))
    got = Padded(mask_BT.long(), mask_BT).pool(hidden_BTW, pooling)
    np.testing.assert_allclose(got, np.stack(expected), rtol=1e-5, atol=1e-6)
    bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    place_F = torch.cat([torch.arange(length) for length in lengths])
    got = Packed(place_F, place_F, bounds, 5).pool(hidden_BTW[mask_BT][None], pooling)
    np.testing.assert_allclose(got, np.stack(expected), rtol=1e-5, atol=1e-6)
