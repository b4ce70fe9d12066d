"""Bundles whose heads are cut to their first dimensions, against the whole model's vectors, cut row
by row.
"""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers.real_model import TEXTS, cut, one_by_one, real_bundle

from unidec.bundle.export.query_side import export_onnx, export_sentence_transformers
from unidec.bundle.export.vectors import export_vectors, scored_by
from unidec.ranking.query_encoder import open_encoder

WHOLE = {
    "both heads": {"kind": "both", "bag_words": 16, "bag_head": 2, "clf_bias": True},
    "transformer": {"kind": "transformer", "trainable_layers": -1},
    "cosines": {"kind": "bag", "residual": True, "clf_normalize": True},
    "dual encoder": {"kind": "bag", "heads": "de"},
    "classifier": {"kind": "transformer", "heads": "clf", "clf_bias": True},
    "any length": {"kind": "transformer", "trainable_layers": 1, "unit_length": False},
    "cut encoder": {"kind": "transformer", "width": 20},
}
# what modules of sentence-transformers can express
STOCK = [name for name, options in WHOLE.items() if options["kind"] == "transformer"]


@pytest.fixture
def make(tmp_path, tiny_bert):
    """`make(name)`: the whole bundle; `make(name, 8)`: with its heads' first dimensions."""

    def get(name: str, served: int | None = None):
        folder = tmp_path / f"{name} {served}"
        folder.mkdir()
        return real_bundle(folder, tiny_bert, served=served, **WHOLE[name])

    return get


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("name", WHOLE)
def test_vectors_are_those_of_the_whole_model_cut(make, name, width) -> None:
    whole = make(name)
    small = make(name, width)
    assert small.info.dim == small.model.settings.dim == width
    assert whole.info.dim > width
    is_unit = whole.model.settings.normalize
    whole_de, whole_clf = one_by_one(whole, TEXTS)
    expected = (cut(whole_de, width, is_unit), cut(whole_clf, width, False))
    for runtime in ("torch", "onnx"):
        got = open_encoder(small, runtime).encode(TEXTS)
        for ours, theirs in zip((got.de_BD, got.clf_BD), expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    for head in whole.vectors.keys() - {"bias"}:
        labels = cut(whole.vectors[head], width, is_unit and head == "de")
        np.testing.assert_allclose(small.vectors[head], labels, rtol=1e-5, atol=1e-6)


def test_the_ranking_is_that_of_the_cut_vectors(make) -> None:
    """Each score written as a sum over the first dimensions."""
    whole = make("both heads")
    small = make("both heads", 8)
    (answer,) = small.predict(["music engine w3"], 6)
    de, clf = one_by_one(whole, ["music engine w3"])
    scores = {}
    for row, uid in enumerate(small.uids.to_pylist()):
        query, label = de[0][:8], whole.vectors["de"][row][:8]
        cosine = query @ label / np.linalg.norm(query) / np.linalg.norm(label)
        by_classifier = clf[0][:8] @ whole.vectors["clf"][row][:8] + whole.vectors["bias"][row]
        scores[uid] = cosine + 0.8 * by_classifier
    assert answer.labels == sorted(scores, key=lambda uid: -scores[uid])
    np.testing.assert_allclose(answer.scores, sorted(scores.values())[::-1], rtol=1e-4, atol=1e-5)


def test_only_what_is_cut_differs(make) -> None:
    """The model's other files, and all files of a bundle of the same width, are the same."""
    whole = make("both heads")
    small = make("both heads", 8)

    def hashes(bundle):
        files = json.loads((bundle.path / "model" / "manifest.json").read_text())["files"]
        return {name: entry["sha256"] for name, entry in files.items()}

    differing = {name for name, value in hashes(whole).items() if hashes(small)[name] != value}
    assert differing == {"config.json", "model.safetensors"}
    assert hashes(whole) == hashes(make("both heads", 24))


@pytest.mark.parametrize("name", ["both heads", "transformer", "cut encoder"])
def test_exports_have_the_served_width(make, tmp_path, name) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from tokenizers import Tokenizer

    small = make(name, 8)
    export_onnx(small, tmp_path / "onnx")
    found = Tokenizer.from_file(str(tmp_path / "onnx" / "tokenizer.json")).encode_batch(TEXTS)
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"))
    inputs = {
        "input_ids": np.array([one.ids for one in found]),
        "attention_mask": np.array([one.attention_mask for one in found]),
    }
    expected = scored_by(small).queries(*one_by_one(small, TEXTS))
    (got,) = session.run(["vector"], inputs)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    export_vectors(small, tmp_path / "labels.parquet")
    labels = np.stack(pq.read_table(tmp_path / "labels.parquet")["vector"].to_numpy())
    assert labels.shape == (6, small.info.width) == (6, got.shape[1])


@pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="an extra of its own"
)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:transformers")
@pytest.mark.parametrize("head", ["de", "clf"])
@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("served", [None, 8])
def test_sentence_transformers_gives_the_served_vectors(make, tmp_path, name, head, served) -> None:
    from sentence_transformers import SentenceTransformer

    bundle = make(name, served)
    if head not in bundle.vectors:
        pytest.skip("the model has no such head")
    export_sentence_transformers(bundle, tmp_path / "out", head=head)
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu", local_files_only=True)
    expected = scored_by(bundle, head).queries(*one_by_one(bundle, TEXTS))
    np.testing.assert_allclose(model.encode(TEXTS), expected, rtol=1e-5, atol=1e-5)
