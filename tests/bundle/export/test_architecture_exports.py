"""Bundles of each architecture, with prompts and layers: served by onnxruntime and exported, they
give the model's vectors.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from helpers import real_model
from helpers.tiny_architectures import ARCHITECTURES, LENGTH, QUERY, TEXTS

from unidec.bundle.export.query_side import export_onnx, export_sentence_transformers
from unidec.errors import ConfigError
from unidec.ranking.query_encoder import open_encoder

onnxruntime = pytest.importorskip("onnxruntime")
QUICK = ("qwen3", "gemma3", "t5")
NAMES = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES
]


@pytest.fixture
def make(tmp_path, tiny_encoder):
    """`make(name, **of real_bundle)`: a bundle."""

    def get(name: str, **options):
        options = {"kind": "transformer", "trainable_layers": -1, "max_length": LENGTH} | options
        return real_model.real_bundle(tmp_path, tiny_encoder(name), **options)

    return get


def angles(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosines of rows."""
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return (first * second).sum(axis=1) / lengths


@pytest.mark.parametrize("kind", ["transformer", "both"])
@pytest.mark.parametrize("name", NAMES)
def test_onnxruntime_serves_it(make, name, kind) -> None:
    bundle = make(name, kind=kind)
    assert bundle.model.encoder_settings.query_prompt == QUERY
    de, clf = real_model.one_by_one(bundle, TEXTS)
    exact = open_encoder(bundle, "onnx").encode(TEXTS)
    np.testing.assert_allclose(exact.de_BD, de, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(exact.clf_BD, clf, rtol=1e-4, atol=1e-4)
    rounded = open_encoder(bundle, "auto")
    # on some processors onnxruntime cannot open DeBERTa's graph in 8 bits
    assert rounded.name == "onnx-int8" or (name == "deberta-v2" and rounded.name == "torch")
    # large random weights round badly: trained ones are measured in benchmarks/results/serving.md
    assert np.median(angles(rounded.encode(TEXTS).de_BD, de)) > 0.85
    assert np.abs(de[0] - de[1]).max() > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_one_graph_for_other_programs(make, tmp_path, name) -> None:
    from tokenizers import Tokenizer

    bundle = make(name)
    export_onnx(bundle, tmp_path / "out")
    assert QUERY in (tmp_path / "out" / "README.md").read_text()
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    found = tokenizer.encode_batch([QUERY + text for text in TEXTS])
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    inputs = {
        "input_ids": np.array([one.ids for one in found]),
        "attention_mask": np.array([one.attention_mask for one in found]),
    }
    de, clf = real_model.one_by_one(bundle, TEXTS)
    for got, expected in zip(session.run(["de", "clf"], inputs), (de, clf), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="an extra of its own"
)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:transformers")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sentence_transformers_gives_the_same_vectors(make, tmp_path, name) -> None:
    from sentence_transformers import SentenceTransformer

    bundle = make(name)
    export_sentence_transformers(bundle, tmp_path / "out", head="de")
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu", local_files_only=True)
    de, _ = real_model.one_by_one(bundle, TEXTS)
    np.testing.assert_allclose(model.encode(TEXTS), de, rtol=1e-5, atol=1e-5)
    labels = model.encode_document(real_model.LABELS)
    np.testing.assert_allclose(labels, bundle.vectors["de"], rtol=1e-5, atol=1e-5)


def test_a_prompt_beside_a_bag_has_no_graph(make, tmp_path) -> None:
    with pytest.raises(ConfigError, match="one graph has one text"):
        export_onnx(make("t5", kind="both"), tmp_path / "out")
