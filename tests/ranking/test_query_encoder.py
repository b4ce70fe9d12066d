"""Queries encoded without torch against the model itself."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from unidec.bundle.bundle_model import write_model
from unidec.config import Encoder, Model
from unidec.data.storage import write_folder
from unidec.errors import ArtifactError, ConfigError
from unidec.model.arrays import GRAPH, INT8_GRAPH, KIND, VERSION, ModelConfig
from unidec.model.unidec import UniDEC
from unidec.ranking.query_encoder import CHUNK_TEXTS, FastEncoder, ModelEncoder, open_encoder

pytest.importorskip("onnxruntime")
WORDS = ["river", "bread", "music", "letter", "planet", "unknowable", "wörd"]
TEXTS = [
    "river bread",
    "",
    "music",
    "a wholly strange 🚗 sentence of many more words than there is room for in it",
    "letter river planet bread " * 3,
    "unknowable",
    "bread music river letter",
]


@pytest.fixture
def bundled(tmp_path: Path, tiny_bert: Path, tiny_distilbert: Path):
    """`bundled(heads=..., **encoder)`: a random model, and its configuration as it lies in a
    bundle.
    """

    def make(
        heads: str = "both",
        transformer: str = "bert",
        dim: int = 8,
        normalize: bool = True,
        query_head: bool = False,
        **encoder,
    ) -> tuple[UniDEC, ModelConfig]:
        torch.manual_seed(4)
        source = {"bert": tiny_bert, "distilbert": tiny_distilbert}[transformer]
        settings = Encoder(name=str(source), **encoder)
        params = {"tokens": {"max_length": 12}}
        options = Model(heads=heads, dim=dim, projection=dim == 8, normalize=normalize)  # type: ignore[arg-type]
        options = options.model_copy(update={"query_head": query_head})
        model = UniDEC.create(settings, options, 5, source, 0, params)  # type: ignore[arg-type]
        if model.encoder.bag is not None:
            torch.nn.init.normal_(model.encoder.bag.log_weight.weight, std=0.3)
            torch.nn.init.normal_(model.encoder.bag.embedding.weight)
        if model.head_query is not None:
            torch.nn.init.normal_(model.head_query[0].weight)
        if model.encoder.residual is not None:
            torch.nn.init.normal_(model.encoder.residual[3].weight, std=0.3)
        with write_folder(tmp_path / "model", KIND, VERSION) as out:
            model.save_into(out)
        (tmp_path / "bundle").mkdir()
        typical = [" ".join(WORDS[i : i + 3]) for i in range(6)]
        served = tmp_path / "bundle" / "model"
        write_model(tmp_path / "model", served, num_labels=5, dim=dim, texts=typical)
        return model.eval(), ModelConfig.read(tmp_path / "bundle" / "model")

    return make


CASES = [
    {"kind": "both", "trainable_layers": 0},
    {
        "kind": "both",
        "trainable_layers": 1,
        "pooling": "cls",
        "bag_words": 64,
        "transformer": "distilbert",
    },
    {"kind": "bag", "bag_head": 3, "heads": "de"},
    {"kind": "transformer", "trainable_layers": -1},  # not at unit length
    {"kind": "transformer", "trainable_layers": 0, "residual": True, "heads": "de"},
    {"kind": "bag", "heads": "clf"},
    {"kind": "bag", "bag_words": 32, "bag_head": 3, "residual": True},
    {"kind": "both", "trainable_layers": 0, "transformer_tokens": 3},
    {"kind": "transformer", "trainable_layers": -1, "dim": 32},  # no projection
    {"kind": "both", "trainable_layers": 0, "dim": 64, "normalize": False},
    {"kind": "transformer", "trainable_layers": -1, "heads": "de", "normalize": False},
    {"kind": "bag", "query_head": True},
    {"kind": "both", "trainable_layers": 0, "heads": "de", "query_head": True},
]


def _close(got, expected, tolerance: float = 2e-5) -> None:
    for ours, theirs in (
        (got.de_BD, expected.de_BD),
        (got.clf_BD, expected.clf_BD),
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == np.float32 and ours.flags.c_contiguous
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    assert got.num_tokens_B.tolist() == expected.num_tokens_B.tolist()
    assert got.unknown_B.tolist() == expected.unknown_B.tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_encodes_as_the_model(bundled, case):
    model, about = bundled(**case)
    fast = FastEncoder(about, None)
    assert fast.name == ("bag" if case["kind"] == "bag" else "onnx")
    texts = TEXTS * 3
    assert len(texts) > 2 * CHUNK_TEXTS
    whole = fast.encode(texts)
    expected = ModelEncoder(model, None).encode(texts)
    _close(whole, expected)
    for row in range(len(TEXTS)):
        _close(fast.encode([texts[row]]), expected.take(np.array([row])))
    assert expected.unknown_B[3] > 0
    assert expected.unknown_B[0] == 0
    nothing = fast.encode([])
    assert len(nothing) == 0
    assert nothing.de_BD is None or nothing.de_BD.shape == (0, case.get("dim", 8))


def test_eight_bits(bundled):
    model, about = bundled(kind="both", trainable_layers=0)
    fast = FastEncoder(about, None, int8=True)
    assert fast.name == "onnx-int8"
    whole = fast.encode(TEXTS)
    expected = ModelEncoder(model, None).encode(TEXTS)
    assert (whole.de_BD * expected.de_BD).sum(axis=1).min() > 0.995
    for row, text in enumerate(TEXTS):  # and the other requests change nothing
        _close(fast.encode([text]), whole.take(np.array([row])))
    assert np.abs(whole.de_BD - expected.de_BD).max() > 1e-6  # it is 8 bits


def test_inception_is_encoded_by_torch_alone(bundled, caplog):
    model, about = bundled(kind="inception", inception_tokens=4, heads="clf")
    bundle = _bundle_of(model, about)
    for runtime in ("onnx", "onnx-int8"):
        with pytest.raises(ConfigError, match=r"fix: runtime: auto or torch"):
            open_encoder(bundle, runtime)
    before = torch.get_num_threads()
    with caplog.at_level(logging.WARNING):
        encoder = open_encoder(bundle, "auto", 1)
    torch.set_num_threads(before)
    assert encoder.name == "torch" and "only torch" in caplog.text
    whole = encoder.encode(TEXTS)
    assert whole.clf_BD.dtype == np.float32
    assert np.isfinite(whole.clf_BD).all()
    for row, text in enumerate(TEXTS):
        np.testing.assert_allclose(
            encoder.encode([text]).clf_BD[0], whole.clf_BD[row], rtol=1e-4, atol=1e-5
        )


def _bundle_of(model: UniDEC, about: ModelConfig) -> SimpleNamespace:
    return SimpleNamespace(model=model, about=model, path=about.folder.parent, words=None)


def test_what_is_opened(bundled, caplog, monkeypatch):
    bundle = _bundle_of(*bundled(kind="both", trainable_layers=0))
    before = torch.get_num_threads()
    assert open_encoder(bundle, "torch", 1).name == "torch"
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
    assert (
        open_encoder(bundle, "onnx", 1).name == "onnx"
        and open_encoder(bundle, "onnx-int8", 1).name == "onnx-int8"
    )
    assert open_encoder(bundle).name == "onnx-int8"

    def only_torch(expected: str) -> None:
        caplog.clear()
        with pytest.raises(ConfigError, match=expected):
            open_encoder(bundle, "onnx")
        with caplog.at_level(logging.WARNING):
            assert open_encoder(bundle, "auto", 1).name == "torch"
        assert "encoded by torch" in caplog.text

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        only_torch("serve")
    for name in (GRAPH, INT8_GRAPH):  # as in a bundle that was written before there were graphs
        (bundle.path / "model" / name).unlink()
    only_torch("no ONNX graph")


def test_a_bag_needs_no_onnxruntime(bundled, monkeypatch):
    bundle = _bundle_of(*bundled(kind="bag"))
    assert not list((bundle.path / "model").glob("*.onnx"))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert open_encoder(bundle).name == open_encoder(bundle, "onnx-int8").name == "bag"


def test_an_architecture_without_a_graph_leaves_none(bundled, monkeypatch, caplog):
    """The exporter refuses, or what it writes computes something else."""
    from unidec.model import onnx_export

    monkeypatch.setattr(onnx_export, "TOLERANCE", 0.0)
    with caplog.at_level(logging.WARNING):
        model, about = bundled(kind="transformer", trainable_layers=-1)
    assert "no ONNX graph" in caplog.text
    assert not list(about.folder.glob("*.onnx*"))
    assert open_encoder(_bundle_of(model, about)).name == "torch"


@pytest.mark.parametrize("kind", ["bag", "transformer", "both"])
def test_tokens_and_places_that_the_weights_do_not_have_are_refused_at_once(bundled, kind):
    _, about = bundled(kind=kind, trainable_layers=0)
    config = json.loads((about.folder / "config.json").read_text())
    changes = [] if kind == "bag" else [{"max_length": 4000}]
    if kind != "transformer":
        changes.append({"num_tokens": config["num_tokens"] + 1})
    for change in changes:
        (about.folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ArtifactError, match="do not fit together"):
            FastEncoder(ModelConfig.read(about.folder), None)


@pytest.mark.parametrize(
    "case",
    [
        CASES[0],
        CASES[6],
    ],
    ids=["both", "bag"],
)
def test_weights_of_another_shape_or_name_are_refused(bundled, case):
    _, about = bundled(**case)
    weights = load_file(about.folder / "model.safetensors")
    FastEncoder(about, None)
    for name, value in weights.items():
        if name.startswith("encoder.transformer.") or name == "log_scale":
            continue
        for wrong in ({}, {name: value[..., :-1].contiguous()}, {name: torch.cat([value, value])}):
            others = {other: tensor for other, tensor in weights.items() if other != name}
            save_file(others | wrong, about.folder / "model.safetensors")
            with pytest.raises(ArtifactError, match="do not fit together"):
                FastEncoder(about, None)


def test_a_bag_does_not_change_a_bit_with_its_batch(bundled):
    fast = FastEncoder(bundled(kind="bag")[1], None)

    def part(texts: list[str]) -> np.ndarray:
        return fast._parts[0](fast._tokens(*fast._tokenizer.encode(texts)))

    whole = part(TEXTS)
    for row, text in enumerate(TEXTS):
        assert (part([text])[0] == whole[row]).all()


def test_neither_torch_nor_transformers_is_imported(bundled):
    _, about = bundled(kind="both", trainable_layers=0)
    code = f"""
import sys
from pathlib import Path
from unidec.model.arrays import ModelConfig
from unidec.bundle.answer import Answerer
from unidec.bundle.bundle import Bundle
from unidec.ranking.query_encoder import FastEncoder
encoder = FastEncoder(ModelConfig.read(Path({str(about.folder)!r})), None, int8=True)
assert encoder.encode(["red car"]).de_BD.shape == (1, 8)
assert not {{"torch", "transformers", "onnx"}} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
