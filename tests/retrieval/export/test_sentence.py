"""sentence-transformers loads what was exported and gives the vectors that the model gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from unidec.errors import ConfigError
from unidec.retrieval.export.heads import Scored
from unidec.retrieval.export.sentence import beyond_stock, export_sentence_transformers

pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:transformers")


def loaded(folder: Path, monkeypatch, tmp_path, trust: bool = False):
    from sentence_transformers import SentenceTransformer
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return SentenceTransformer(str(folder), device="cpu", trust_remote_code=trust, local_files_only=True)


STOCK = {
    "mean": {"kind": "transformer", "trainable_layers": -1},
    "cls, unit length": {"kind": "transformer", "trainable_layers": 0, "pooling": "cls"},
    "distilbert": {"kind": "transformer", "trainable_layers": -1, "source": "distilbert"},
    "residual": {"kind": "transformer", "trainable_layers": -1, "residual": True},
    "bag": {"kind": "bag", "trainable_layers": 0},
    "bag, residual": {"kind": "bag", "trainable_layers": 0, "residual": True},
}


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("head", ["de", "clf"])
def test_stock_modules_give_the_models_vectors(world, tmp_path, monkeypatch, name, head) -> None:
    bundle = world(**STOCK[name], clf_bias=True)
    told = export_sentence_transformers(bundle, tmp_path / "out", head=head)
    assert not told["needs_code"] and not list((tmp_path / "out").rglob("*.py"))
    model = loaded(tmp_path / "out", monkeypatch, tmp_path)
    got = model.encode(world.real.TEXTS)
    expected = Scored.of(bundle.info, head).queries(*world.real.one_by_one(bundle, world.real.TEXTS))
    assert got.dtype == np.float32 and got.shape == expected.shape == (7, told["width"])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected[0] - expected[1]).max() > 0.01  # texts differ: the comparison says something
    assert model.max_seq_length == 16 and model.similarity_fn_name == "dot"


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    "encoder",
    [
        {"kind": "both", "trainable_layers": 0},
        {"kind": "both", "trainable_layers": 0, "bag_head": 2, "residual": True},
        {"kind": "bag", "trainable_layers": 0, "bag_words": 8, "bag_head": 3},
        {"kind": "transformer", "trainable_layers": -1},
    ],
    ids=["both", "both, head, residual", "bag, words, head", "transformer, both heads"],
)
def test_with_a_file_of_code_every_encoder_is_exported(world, tmp_path, monkeypatch, encoder, normalize) -> None:
    bundle = world(**encoder, clf_bias=True, clf_normalize=normalize)
    with pytest.raises(ConfigError, match="--with-code"):
        export_sentence_transformers(bundle, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    told = export_sentence_transformers(bundle, tmp_path / "out", code=True)
    assert told["needs_code"] and (tmp_path / "out" / "sentence_code.py").is_file()
    with pytest.raises(ValueError, match="trust_remote_code"):
        loaded(tmp_path / "out", monkeypatch, tmp_path)
    model = loaded(tmp_path / "out", monkeypatch, tmp_path, trust=True)
    got = model.encode(world.real.TEXTS, batch_size=3)
    expected = Scored.of(bundle.info).queries(*world.real.one_by_one(bundle, world.real.TEXTS))
    assert got.shape == expected.shape == (7, told["width"])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert model.get_embedding_dimension() == told["width"]
    best = bundle.predict(world.real.TEXTS, k=1)  # and the ranking is the bundle's
    sides = Scored.of(bundle.info).labels(bundle.vectors, 0, bundle.num_labels)
    assert [bundle.uids[int(row)].as_py() for row in (got @ sides.T).argmax(axis=1)] == [p.labels[0] for p in best]
    model.save(str(tmp_path / "again"))  # saved by sentence-transformers itself and loaded again
    again = loaded(tmp_path / "again", monkeypatch, tmp_path, trust=True)
    np.testing.assert_array_equal(again.encode(world.real.TEXTS, batch_size=3), got)


def test_what_stock_modules_cannot_say_is_named(world, tmp_path) -> None:
    bundle = world(kind="both", trainable_layers=0, bag_words=8, bag_head=2)
    reasons = beyond_stock(bundle.model, Scored.of(bundle.info, "both"))
    assert [word for word in ("kind: both", "bag_head", "bag_words", "both heads") if word in " ".join(reasons)] == [
        "kind: both", "bag_head", "bag_words", "both heads"]  # fmt: skip
    assert beyond_stock(world(kind="bag", trainable_layers=0).model, Scored.of(bundle.info, "de")) == []


def test_a_folder_of_something_else_is_not_replaced(world, tmp_path) -> None:
    bundle = world(kind="bag", trainable_layers=0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="no earlier export"):
        export_sentence_transformers(bundle, tmp_path / "mine", head="de")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"
    for _ in range(2):  # an earlier export is, with the same bytes
        export_sentence_transformers(bundle, tmp_path / "out", head="de")
        manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["meta"]["bundle_sha256"] == bundle.sha256
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "trust_remote_code" not in readme and bundle.sha256 in readme
