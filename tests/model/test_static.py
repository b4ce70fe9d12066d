"""Static vectors of model2vec in place of a transformer."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.tiny_tokenizers import write_static
from tokenizers import Tokenizer

from unidec.config import Encoder, Model
from unidec.data.storage import write_folder
from unidec.data.tokens import encode_texts, load_tokenizer
from unidec.errors import ArtifactError, ConfigError
from unidec.model.arrays import KIND, VERSION
from unidec.model.encoder import load_transformer
from unidec.model.sources import check_positions, check_static, resolve_encoder
from unidec.model.unidec import UniDEC
from unidec.pipeline.memory_plan import plan_memory
from unidec.pipeline.memory_probe import Sizes

TEXTS = ["river query w1", "music label", "engine 🦑 garden", ""]


@pytest.fixture
def folder(tiny_bert, tmp_path):
    (tmp_path / "static").mkdir()
    shutil.copy(tiny_bert / "tokenizer.json", tmp_path / "static")
    return tmp_path / "static"


def reference(folder, tensors) -> torch.Tensor:
    """As model2vec encodes: known tokens alone, their mean, normalised."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vectors = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        ids = [number for number in ids if number != tokenizer.token_to_id("[UNK]")]
        rows = tensors["mapping"][ids] if "mapping" in tensors else torch.tensor(ids).long()
        rows_TD = tensors["embeddings"][rows].float()
        if "weights" in tensors:
            rows_TD = rows_TD * tensors["weights"][ids, None]
        vectors.append(rows_TD.sum(0) / max(len(ids), 1))
    return F.normalize(torch.stack(vectors), dim=-1)


def make_model(folder, **settings) -> UniDEC:
    encoder = Encoder.model_validate({"kind": "transformer", "name": str(folder)} | settings)
    num_tokens = load_tokenizer(folder, 16).vocab_size
    params = {"tokens": {"max_length": 16}}
    resolved = resolve_encoder(str(folder))
    return UniDEC.create(encoder, Model(dim=8), 5, resolved, num_tokens, params)


@pytest.mark.parametrize("more", ["", "weights", "mapping"])
def test_vectors_are_those_of_model2vec(folder, more):
    size = load_tokenizer(folder, 16).vocab_size
    tensors = {}
    if more:
        tensors["weights"] = torch.rand(size) + 0.5
    if more == "mapping":
        tensors["mapping"] = torch.arange(size) // 2
        tensors["embeddings"] = torch.randn(size // 2 + 1, 24).half()
    tensors = write_static(folder, **tensors)
    model = make_model(folder)
    got = model.encode("queries", encode_texts(TEXTS, folder, 16))
    np.testing.assert_allclose(got, reference(folder, tensors), atol=1e-6)


def test_a_model_with_static_vectors_comes_back_from_disk(folder, tmp_path):
    write_static(folder)
    model = make_model(folder, kind="both", frozen=True)
    assert torch.equal(
        model.encoder.bag.embedding.weight, load_transformer(folder).embedding.weight
    ), "the bag starts with them"
    with write_folder(tmp_path / "model", KIND, VERSION, {}) as out:
        model.save_into(out)
    shutil.rmtree(folder)
    again = UniDEC.load(tmp_path / "model")
    tokens = encode_texts(TEXTS, again.tokenizer_folder, 16)
    got = again.encode("queries", tokens)
    np.testing.assert_array_equal(got, model.encode("queries", tokens))


def test_any_length_is_planned_for(folder, tiny_params):
    write_static(folder)
    check_positions(folder, 8192)
    overrides = {"encoder.name": str(folder), "encoder.kind": "both", "tokens.max_length": 8192}
    sizes = Sizes.given(50, 100, 8192)
    plan = plan_memory(tiny_params(**overrides), sizes)
    names = {amount.name for amount in plan.amounts}
    assert "encoder and heads" in names and "transformer" not in names
    assert "attention of long texts" not in names


@pytest.mark.parametrize("settings", [{"trainable_layers": -1}, {"pooling": "cls"}])
def test_what_needs_a_transformer_is_refused(folder, settings):
    write_static(folder)
    encoder = Encoder.model_validate({"kind": "both", "name": str(folder)} | settings)
    with pytest.raises(ConfigError, match="no layers to train"):
        check_static(folder, encoder)
    check_static(folder, Encoder(kind="both"))


def test_vectors_that_do_not_fit(folder):
    write_static(folder, embeddings=torch.randn(7, 8))
    with pytest.raises(ArtifactError, match=r"(?s)7 vectors of .* tokens.*StaticModel"):
        load_transformer(folder)
