"""A model's weights as arrays: read from its folder as from the model itself, and nothing read that does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from unidec.data.storage import write_folder
from unidec.errors import ArtifactError
from unidec.model.arrays import CLASSIFIER, KIND, VERSION, ModelArrays, ModelConfig
from unidec.model.transformer_parts import UnsupportedModel
from unidec.model.unidec import UniDEC
from unidec.sections import Encoder, Model

CASES: dict[str, dict[str, Any]] = {
    "both": {"kind": "both", "trainable_layers": 0},
    "distilbert": {"kind": "both", "trainable_layers": 1, "bag_words": 64, "bag_head": 3},
    "bag": {"kind": "bag", "bag_words": 32, "residual": True},
    "transformer": {"kind": "transformer", "trainable_layers": -1, "residual": True},
}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tiny_bert: Path, tiny_distilbert: Path, tmp_path: Path) -> Path:
    """A trained model's folder, of one of the cases."""
    source = tiny_distilbert if request.param == "distilbert" else tiny_bert
    torch.manual_seed(3)
    settings = Encoder(name=str(source), **CASES[request.param])
    heads: Any = "de" if request.param == "bag" else "both"
    model = UniDEC.create(settings, Model(heads=heads, dim=8), 5, source, 0, {"tokens": {"max_length": 12}})
    for value in model.state_dict().values():
        if value.is_floating_point():
            torch.nn.init.normal_(value)
    with write_folder(tmp_path / "model", KIND, VERSION) as out:
        model.save_into(out)
    return tmp_path / "model"


every = pytest.mark.parametrize("folder", list(CASES), indirect=True)
one = pytest.mark.parametrize("folder", ["both"], indirect=True)


def same(got: Any, expected: Any) -> None:
    if isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    elif hasattr(expected, "__dataclass_fields__"):
        for name in expected.__dataclass_fields__:
            same(getattr(got, name), getattr(expected, name))
    elif isinstance(expected, (tuple, list)):
        assert len(got) == len(expected)
        for pair in zip(got, expected, strict=True):
            same(*pair)
    else:
        assert got == expected


@every
def test_a_folder_is_read_as_the_model_has_it(folder: Path) -> None:
    about = ModelConfig.read(folder)
    read, own = ModelArrays.of(about), ModelArrays.of(UniDEC.load(folder))
    same(read.transformer, own.transformer)
    for part in ("bag", "residual"):
        same(getattr(read, part)(), getattr(own, part)())
    assert list(read.heads()) == list(own.heads()) == (["de"] if about.heads == "de" else ["de", "clf"])
    same(list(read.heads().values()), list(own.heads().values()))
    for name in ("encoder", "unit_vectors", "width", "tokenizer_folder", "max_length"):
        assert getattr(read, name) == getattr(own, name), name
    assert all(array.flags.aligned and not array.flags.writeable for array in read.arrays.values())
    assert not set(CLASSIFIER) & {*read.arrays, *own.arrays}


@every
def test_a_file_of_before_unit_vectors_were_written(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    config = {name: value for name, value in json.loads(text).items() if name != "unit_vectors"}
    (folder / "config.json").write_text(json.dumps(config).ljust(len(text)))  # sizes are checked
    own = UniDEC.load(folder, verify=False)
    assert ModelArrays.of(ModelConfig.read(folder)).unit_vectors == own.encoder.unit_vectors


@one
def test_half_precision_is_read_where_numpy_has_it(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "head_de.0.weight"
    save_file(weights | {name: weights[name].half()}, folder / "model.safetensors")
    read = ModelArrays.of(ModelConfig.read(folder))
    assert read.arrays[name].dtype == np.float32
    np.testing.assert_array_equal(read.arrays[name], weights[name].half().float())
    save_file(weights | {name: weights[name].bfloat16()}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="numpy"):
        ModelArrays.of(ModelConfig.read(folder))


@every
def test_weights_of_another_shape_or_name_are_refused(folder: Path) -> None:
    weights = {name: value for name, value in load_file(folder / "model.safetensors").items() if "table" not in name}
    ignored = ("bias.weight", "log_scale")
    for name, value in weights.items():
        if name in ignored or not value.dim():
            continue
        for wrong in ({}, {name: value[..., :-1].contiguous()}, {name: torch.cat([value, value])}):
            if "position_embeddings" in name and len(next(iter(wrong.values()), value)) == 2 * len(value):
                continue  # more places than are ever used are no harm
            if "word_embeddings" in name and len(next(iter(wrong.values()), value)) == 2 * len(value):
                continue
            others = {other: tensor for other, tensor in weights.items() if other != name}
            if "token_type" in name:
                continue  # one row of it is used, and a model may have none
            save_file(others | wrong, folder / "model.safetensors")
            with pytest.raises(ArtifactError, match="do not fit together"):
                ModelArrays.of(ModelConfig.read(folder))


@one
@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", {"encoder": {"kind": "cube"}}),
        ("config.json", {"num_labels": "many"}),
        ("config.json", {"encoder_width": None}),
        ("config.json", None),
        ("encoder_config/config.json", None),
        ("model.safetensors", None),
    ],
)
def test_damaged_files_are_named(folder: Path, file: str, change: dict[str, Any] | None) -> None:
    text = (folder / file).read_bytes()
    (folder / file).write_bytes(text[:-9] if change is None else json.dumps(json.loads(text) | change).encode())
    with pytest.raises(ArtifactError, match="do not fit together") as caught:
        ModelArrays.of(ModelConfig.read(folder))
    assert str(folder) in str(caught.value)
    (folder / file).unlink()
    with pytest.raises(ArtifactError, match="do not fit together"):
        ModelArrays.of(ModelConfig.read(folder))


@one
@pytest.mark.parametrize(
    "key", ["model_type", "num_attention_heads", "num_hidden_layers", "hidden_act", "layer_norm_eps"]
)
def test_a_configuration_that_leaves_something_out_is_left_to_the_library(folder: Path, key: str) -> None:
    file = folder / "encoder_config" / "config.json"
    file.write_text(json.dumps({name: value for name, value in json.loads(file.read_text()).items() if name != key}))
    with pytest.raises(UnsupportedModel):
        ModelArrays.of(ModelConfig.read(folder))


@one
def test_what_is_asked_of_a_configuration_that_lies(folder: Path) -> None:
    file = folder / "encoder_config" / "config.json"
    for change in ({"num_hidden_layers": 10**9}, {"num_attention_heads": 7}, {"num_attention_heads": 0},
                   {"num_hidden_layers": "x"}):  # fmt: skip
        text = file.read_text()
        file.write_text(json.dumps(json.loads(text) | change))
        with pytest.raises(ArtifactError, match="do not fit together"):
            ModelArrays.of(ModelConfig.read(folder))
        file.write_text(text)


@one
def test_neither_torch_nor_transformers_is_imported(folder: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from unidec.model.arrays import ModelArrays, ModelConfig
from unidec.retrieval.answer import Answerer
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.fast_encoder import FastEncoder
encoder = FastEncoder(ModelArrays.of(ModelConfig.read(Path({str(folder)!r}))), None, int8=True, texts=["red car"])
assert encoder.encode(["red car"]).de_BD.shape == (1, 8)
assert not {{"torch", "transformers"}} & set(sys.modules), sorted(sys.modules)
"""
    pytest.importorskip("onnxruntime")
    subprocess.run([sys.executable, "-c", code], check=True)
