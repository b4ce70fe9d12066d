"""Queries encoded without torch, and by an exported graph, against the model itself."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from tiny_bundle import write_tiny_bundle

from unidec.data.tokens import encode_texts
from unidec.errors import ArtifactError, UnidecError
from unidec.model.arrays import ModelArrays
from unidec.model.onnx_graph import encoder_graph
from unidec.model.transformer_parts import UnsupportedModel
from unidec.model.unidec import UniDEC
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.encoded import ModelEncoder
from unidec.retrieval.fast_encoder import CHUNK_TEXTS, FastEncoder
from unidec.retrieval.query_encoder import open_encoder
from unidec.sections import Encoder, Model

ort = pytest.importorskip("onnxruntime")
WORDS = ["river", "bread", "music", "letter", "planet", "unknowable", "wörd"]
TEXTS = ["river bread", "", "music", "a wholly strange 🚗 sentence of many more words than there is room for in it",
         "letter river planet bread " * 3, "unknowable", "bread music river letter"]  # fmt: skip


@pytest.fixture
def folders(tiny_bert: Path, tiny_distilbert: Path) -> dict[str, Path]:
    return {"bert": tiny_bert, "distilbert": tiny_distilbert}


def _model(folder: Path, heads: str = "both", **encoder) -> UniDEC:
    torch.manual_seed(4)
    settings = Encoder(name=str(folder), **encoder)
    params = {"tokens": {"max_length": 12}}
    model = UniDEC.create(settings, Model(heads=heads, dim=8), 5, folder, 0, params)  # type: ignore[arg-type]
    if model.encoder.bag is not None:
        torch.nn.init.normal_(model.encoder.bag.log_weight.weight, std=0.3)
        torch.nn.init.normal_(model.encoder.bag.embedding.weight)
    if model.encoder.residual is not None:
        torch.nn.init.normal_(model.encoder.residual[3].weight, std=0.3)
    return model.eval()


CASES = [
    {"kind": "both", "trainable_layers": 0},
    {"kind": "both", "trainable_layers": 1, "pooling": "cls", "bag_words": 64, "transformer": "distilbert"},
    {"kind": "bag", "bag_head": 3, "heads": "de"},
    {"kind": "transformer", "trainable_layers": -1},  # not at unit length
    {"kind": "transformer", "trainable_layers": 0, "residual": True, "heads": "de"},
    {"kind": "bag", "heads": "clf"},
    {"kind": "bag", "bag_words": 32, "bag_head": 3, "residual": True},
]  # fmt: skip


def _close(got, expected, tolerance: float = 2e-5) -> None:
    for ours, theirs in ((got.de_BD, expected.de_BD), (got.clf_BD, expected.clf_BD)):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == np.float32 and ours.flags.c_contiguous
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    assert got.num_tokens_B.tolist() == expected.num_tokens_B.tolist()
    assert got.unknown_B.tolist() == expected.unknown_B.tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_encodes_as_the_model(folders, case):
    model = _model(folders[case.get("transformer", "bert")], **{k: v for k, v in case.items() if k != "transformer"})
    fast = FastEncoder(ModelArrays.of(model), None)
    assert fast.name == ("bag" if case["kind"] == "bag" else "onnx")
    texts = TEXTS * 3
    assert len(texts) > 2 * CHUNK_TEXTS
    whole, expected = fast.encode(texts), ModelEncoder(model, None).encode(texts)
    _close(whole, expected)
    for row in range(len(TEXTS)):
        _close(fast.encode([texts[row]]), expected.take(np.array([row])))
    assert expected.unknown_B[3] > 0 and expected.unknown_B[0] == 0
    nothing = fast.encode([])
    assert len(nothing) == 0 and (nothing.de_BD is None or nothing.de_BD.shape == (0, 8))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_an_exported_graph_computes_what_the_model_does(folders, case):
    model = _model(folders[case.get("transformer", "bert")], **{k: v for k, v in case.items() if k != "transformer"})
    if case.get("bag_words"):
        with pytest.raises(UnsupportedModel, match="bag_words"):
            encoder_graph(ModelArrays.of(model))
        return
    graph = encoder_graph(ModelArrays.of(model))
    assert {node.domain for node in graph.graph.node} == {""}
    import onnx

    onnx.checker.check_model(graph, full_check=True)
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    tokens = encode_texts(TEXTS, model.tokenizer_folder, model.max_length)
    ids, mask = tokens.batch(np.arange(len(TEXTS)))
    found = session.run(None, {"input_ids": ids, "attention_mask": mask.astype(np.int64)})
    expected = ModelEncoder(model, None).encode(TEXTS)
    wanted = {"de": expected.de_BD, "clf": expected.clf_BD}
    assert [output.name for output in session.get_outputs()] == [name for name in wanted if wanted[name] is not None]
    for output, vectors in zip(session.get_outputs(), found, strict=True):
        np.testing.assert_allclose(vectors, wanted[output.name], rtol=1e-4, atol=1e-5)


def test_eight_bits(folders):
    model = _model(folders["bert"], kind="both", trainable_layers=0)
    fast = FastEncoder(ModelArrays.of(model), None, int8=True, texts=[" ".join(WORDS[i : i + 3]) for i in range(6)])
    assert fast.name == "onnx-int8"
    whole, expected = fast.encode(TEXTS), ModelEncoder(model, None).encode(TEXTS)
    assert (whole.de_BD * expected.de_BD).sum(axis=1).min() > 0.995
    for row, text in enumerate(TEXTS):  # and what else is asked changes nothing
        _close(fast.encode([text]), whole.take(np.array([row])))
    assert np.abs(whole.de_BD - expected.de_BD).max() > 1e-6  # it is 8 bits


def _bundle_of(model) -> SimpleNamespace:
    return SimpleNamespace(model=model, about=model, words=None, titles=pa.array(WORDS), neighbours=None)


def test_what_is_opened(folders, caplog, monkeypatch):
    bundle = _bundle_of(_model(folders["bert"], kind="both", trainable_layers=0))
    before = torch.get_num_threads()
    assert open_encoder(bundle, "torch", 1).name == "torch" and torch.get_num_threads() == 1
    torch.set_num_threads(before)
    assert open_encoder(bundle, "onnx", 1).name == "onnx" and open_encoder(bundle, "onnx-int8", 1).name == "onnx-int8"
    assert open_encoder(bundle).name.startswith("onnx")
    assert open_encoder(_bundle_of(_model(folders["bert"], kind="bag")), "onnx-int8").name == "bag"
    for gone in ("onnx", "onnxruntime"):
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            caplog.clear()
            patch.setitem(sys.modules, gone, None)
            with pytest.raises(UnidecError, match="serve"):
                open_encoder(bundle, "onnx")
            assert open_encoder(bundle, "auto", 1).name == "torch"
            assert "encoded by torch" in caplog.text
            assert open_encoder(_bundle_of(_model(folders["bert"], kind="bag"))).name == "bag"  # needs neither


@pytest.mark.usefixtures("stub_model")
def test_a_model_that_is_not_known_is_encoded_by_itself(rng, tmp_path, caplog):
    write_tiny_bundle(tmp_path / "b", rng)
    bundle = Bundle.load(tmp_path / "b")
    with caplog.at_level(logging.WARNING):
        assert open_encoder(bundle, "auto", 1).name == "torch"
    assert "encoded by torch" in caplog.text
    with pytest.raises(UnsupportedModel):
        open_encoder(bundle, "onnx")


@pytest.mark.parametrize("kind", ["bag", "transformer", "both"])
def test_tokens_and_places_that_the_weights_do_not_have_are_refused_at_once(folders, kind):
    arrays = ModelArrays.of(_model(folders["bert"], kind=kind, trainable_layers=0))
    few = {name: value[:40] if "word_embeddings" in name or "encoder.bag." in name else value
           for name, value in arrays.arrays.items()}  # fmt: skip
    with pytest.raises(ArtifactError, match="tokens that"):
        FastEncoder(replace(arrays, arrays=few), None)
    if kind != "bag":
        with pytest.raises(ArtifactError, match="places that"):
            FastEncoder(replace(arrays, max_length=4000), None)


def test_a_bag_does_not_change_a_bit_with_its_batch(folders):
    fast = FastEncoder(ModelArrays.of(_model(folders["bert"], kind="bag")), None)
    whole = fast._parts[0](fast._tokens(TEXTS))
    for row, text in enumerate(TEXTS):
        assert (fast._parts[0](fast._tokens([text]))[0] == whole[row]).all()
