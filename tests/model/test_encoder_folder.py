"""What an encoder's folder says about its use, and what of it is refused."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers.tiny_architectures import LABEL, QUERY

from unidec.config import Encoder
from unidec.errors import ArtifactError, ConfigError
from unidec.model.encoder_folder import DenseLayer, EncoderFolder, read_encoder_folder, resolved
from unidec.model.sources import resolve_encoder


@pytest.fixture
def folder(tiny_encoder, tmp_path):
    """A copy of T5's folder: mean pooling, a layer with tanh, prompts."""
    return shutil.copytree(tiny_encoder("t5"), tmp_path / "copy")


def rewrite(file, change):
    content = json.loads(file.read_text())
    file.write_text(json.dumps(change(content)))


def test_what_is_read(folder, tiny_bert) -> None:
    layer = DenseLayer(in_features=32, out_features=24, activation="Tanh", path="2_Dense")
    assert read_encoder_folder(folder) == EncoderFolder(
        pooling="mean",
        dense=(layer,),
        normalizes=True,
        query_prompt=QUERY,
        label_prompt=LABEL,
        max_length=48,
    )
    assert read_encoder_folder(tiny_bert) == EncoderFolder()
    minilm = read_encoder_folder(resolve_encoder("all-MiniLM-L6-v2"))
    assert minilm == EncoderFolder(normalizes=True, max_length=256)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["weightedmean"]}, "weighted_mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_weightedmean_tokens": True}, "weighted_mean"),
        ({"pooling_mode_max_tokens": True, "include_prompt": True}, "max"),
        ({"word_embedding_dimension": 32}, "mean"),
    ],
)
def test_poolings_of_all_versions(folder, config, pooling) -> None:
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert read_encoder_folder(folder).pooling == pooling


def test_width_of_either_file(folder) -> None:
    """That of sentence-transformers' file counts more; null is none."""
    rewrite(folder / "config.json", lambda config: config | {"truncate_dim": 16})
    assert read_encoder_folder(folder).width == 16
    rewrite(folder / "config_sentence_transformers.json", lambda c: c | {"truncate_dim": 8})
    assert read_encoder_folder(folder).width == 8
    assert resolved(Encoder(kind="transformer"), folder).width == 8
    assert resolved(Encoder(kind="transformer", width=24), folder).width == 24
    for file in ("config.json", "config_sentence_transformers.json"):
        rewrite(folder / file, lambda c: c | {"truncate_dim": None})
    assert read_encoder_folder(folder).width == 0


@pytest.mark.parametrize("name", ["document", "passage", "corpus"])
def test_prompts_of_labels(folder, name) -> None:
    prompts = {"prompts": {name: "a: ", "classification": "b: "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    found = read_encoder_folder(folder)
    assert (found.query_prompt, found.label_prompt) == ("", "a: ")


def test_keys_override_the_folder(folder) -> None:
    auto = resolved(Encoder(kind="transformer"), folder)
    assert (auto.pooling, auto.query_prompt, auto.label_prompt) == ("mean", QUERY, LABEL)
    own = Encoder(kind="transformer", pooling="cls", query_prompt="", label_prompt="x ")
    assert resolved(own, folder) == own
    bag = resolved(Encoder(kind="bag"), folder)
    assert (bag.pooling, bag.query_prompt, bag.label_prompt) == ("mean", "", "")


def module(kind: str, place: int = 1, path: str = "1_Pooling"):
    def change(modules):
        modules[place] |= {"type": kind, "path": path}
        return modules

    return change


OURS = "sentence_transformers.models"
REFUSED = {
    "clip": ("modules.json", module(f"{OURS}.CLIPModel", 0, ""), "a CLIP"),
    "splade": ("modules.json", module(f"{OURS}.MLMTransformer", 0, ""), "SPLADE"),
    "router": ("modules.json", module(f"{OURS}.Router", 0, ""), "a router"),
    "words": ("modules.json", module(f"{OURS}.WordEmbeddings", 0, ""), "word vectors"),
    "cnn": ("modules.json", module(f"{OURS}.CNN"), "module 1: sentence_transformers.models.CNN"),
    "lstm": ("modules.json", module(f"{OURS}.LSTM"), "LSTM"),
    "own code": ("modules.json", module("custom_st.Pooling"), "custom_st.Pooling"),
    "outside": ("modules.json", module(f"{OURS}.Pooling", path="../1_Pooling"), "../1_Pooling"),
    "two poolings": ("modules.json", module(f"{OURS}.Pooling", 2), "module 2"),
    "layer before": ("modules.json", module(f"{OURS}.Dense"), "module 1"),
    "cross-encoder": (
        "config.json",
        lambda c: c | {"architectures": ["BertForSequenceClassification"]},
        "a cross-encoder",
    ),
    "two modes": (
        "1_Pooling/config.json",
        lambda _: {"pooling_mode": ["cls", "mean"]},
        "this pooling",
    ),
    "square root": (
        "1_Pooling/config.json",
        lambda _: {"pooling_mode_mean_sqrt_len_tokens": True},
        "this pooling",
    ),
    "without prompt": (
        "1_Pooling/config.json",
        lambda c: c | {"include_prompt": False},
        "without the prompt",
    ),
    "residual": ("2_Dense/config.json", lambda c: c | {"use_residual": True}, "a residual layer"),
    "activation": (
        "2_Dense/config.json",
        lambda c: c | {"activation_function": "os.system"},
        "damaged",
    ),
    "width": ("2_Dense/config.json", lambda c: c | {"out_features": 1 << 40}, "damaged"),
    "no number": ("config.json", lambda c: c | {"truncate_dim": "many"}, "damaged"),
    "not modules": ("modules.json", lambda _: {"a": 1}, "damaged"),
    "not prompts": ("config_sentence_transformers.json", lambda _: [1], "damaged"),
    "capitals": ("sentence_bert_config.json", lambda c: c | {"do_lower_case": True}, "capitals"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_file_and_fix(folder, name) -> None:
    file, change, words = REFUSED[name]
    rewrite(folder / file, change)
    with pytest.raises(ConfigError) as caught:
        read_encoder_folder(folder)
    assert words in str(caught.value)
    assert str(folder / file) in str(caught.value)
    assert caught.value.fix


def test_a_huge_description_is_not_read(folder) -> None:
    (folder / "modules.json").write_text("[" + " " * (1 << 24) + "]")
    with pytest.raises(ConfigError, match="bytes"):
        read_encoder_folder(folder)


def test_pickles_are_never_loaded(folder) -> None:
    weights = folder / "2_Dense" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(ConfigError, match="never loaded"):
        read_encoder_folder(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match="a pickle, which is never loaded"):
        resolve_encoder(str(folder))
