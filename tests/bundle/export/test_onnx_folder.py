"""onnxruntime on the exported file gives the vectors that the model gives."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from helpers import real_model

from unidec.bundle.export.query_side import export_onnx, padded_words
from unidec.bundle.export.vectors import scored_by
from unidec.errors import DataError
from unidec.model.words import with_words
from unidec.ranking.heads import Heads

onnxruntime = pytest.importorskip("onnxruntime")
KINDS = {
    "bag": {"kind": "bag", "trainable_layers": 0},
    "bag, first tokens": {"kind": "bag", "trainable_layers": 0, "bag_head": 3, "residual": True},
    "bag, words": {"kind": "bag", "trainable_layers": 0, "bag_words": 64, "bag_head": 3},
    "inception": {"kind": "inception", "trainable_layers": 0, "inception_tokens": 6},
    "both": {"kind": "both", "trainable_layers": 0},
    "query head": {"kind": "bag", "trainable_layers": 0, "query_head": True},
    "both, first tokens": {"kind": "both", "trainable_layers": 0, "transformer_tokens": 3},
    "bert": {"kind": "transformer", "trainable_layers": -1},
    "bert, cls, unit length": {"kind": "transformer", "trainable_layers": 0, "pooling": "cls"},
    "distilbert": {"kind": "transformer", "trainable_layers": -1, "source": "distilbert"},
    "no projection": {"kind": "both", "trainable_layers": 0, "dim": 64, "unit_length": False},
}


def run(folder, texts: list[str]) -> dict[str, np.ndarray]:
    """What the README says: tokenizer and session, nothing of unidec."""
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(texts)
    session = onnxruntime.InferenceSession(
        str(folder / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    inputs = {
        "input_ids": np.array([one.ids for one in found], dtype=np.int64),
        "attention_mask": np.array([one.attention_mask for one in found], dtype=np.int64),
    }
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("normalize", "bias"),
    [
        (False, True),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
)
def test_every_encoder_in_onnxruntime(make_bundle, tmp_path, name, normalize, bias) -> None:
    bundle = make_bundle(**KINDS[name], clf_normalize=normalize, clf_bias=bias)
    told = export_onnx(bundle, tmp_path / "out")
    texts = real_model.TEXTS
    de, clf = real_model.one_by_one(bundle, texts)
    together = run(tmp_path / "out", texts)
    alone = run(tmp_path / "out", [texts[1]])
    assert list(together) == told["outputs"] == ["de", "clf", "vector"]
    expected = {
        "de": de,
        "clf": clf,
        "vector": scored_by(bundle).queries(de, clf),
    }
    for output, vectors in expected.items():
        assert together[output].dtype == np.float32
        assert together[output].shape == vectors.shape
        np.testing.assert_allclose(together[output], vectors, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(alone[output], vectors[[1]], rtol=1e-4, atol=1e-4)
    assert np.abs(clf[0] - clf[1]).max() > 0.01
    sides = Heads(bundle.vectors, bundle.info.space, bundle.info.clf_normalize).take(slice(None))
    best = (together["vector"] @ sides.T).argmax(axis=1)
    assert [bundle.uids[int(row)].as_py() for row in best] == [
        p.labels[0] for p in bundle.predict(texts, k=1)
    ]


@pytest.mark.parametrize("head", ["de", "clf"])
def test_one_head(make_bundle, tmp_path, head) -> None:
    bundle = make_bundle(kind="bag", trainable_layers=0, heads=head)
    told = export_onnx(bundle, tmp_path / "out")
    assert told["outputs"] == [head, "vector"]
    assert told["width"] == 24
    got = run(tmp_path / "out", real_model.TEXTS)
    np.testing.assert_allclose(got["vector"], got[head], rtol=1e-6)
    with pytest.raises(DataError, match="no such head"):
        export_onnx(bundle, tmp_path / "other", head="both")
    assert not (tmp_path / "other").exists()


def test_the_folder(make_bundle, tmp_path) -> None:
    import onnx

    bundle = make_bundle(kind="bag", trainable_layers=0)
    export_onnx(bundle, tmp_path / "out", head="de")
    first = (tmp_path / "out" / "model.onnx").read_bytes()
    export_onnx(bundle, tmp_path / "out", head="de")
    assert (tmp_path / "out" / "model.onnx").read_bytes() == first
    model = onnx.load(tmp_path / "out" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert {entry.domain for entry in model.opset_import} == {""}  # standard operators only
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        config["bundle_sha256"] == bundle.sha256
        and config["head"] == "de"
        and config["max_length"] == 16
    )
    assert "`vector`" in (tmp_path / "out" / "README.md").read_text()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.onnx", "tokenizer.json", "config.json", "README.md", "manifest.json"}


@pytest.mark.parametrize("num_words", [1, 7, 8, 65536])
def test_words_of_padded_texts_are_those_of_texts_one_after_another(num_words) -> None:
    draw = np.random.default_rng()
    for _ in range(20):
        vocabulary = int(draw.integers(2, 60))
        num_texts = int(draw.integers(1, 6))
        continues_V = draw.random(vocabulary) < draw.random()
        lengths_B = draw.integers(0, 20, num_texts)
        flat_F = draw.integers(0, vocabulary, lengths_B.sum())
        mask_BT = np.arange(max(int(lengths_B.max()), 1)) < lengths_B[:, None]
        ids_BT = np.zeros(mask_BT.shape, dtype=np.int64)
        ids_BT[mask_BT] = flat_F
        given = (ids_BT, mask_BT.astype(np.int64), continues_V)
        row_BT, ends_BT, place_BT = (
            x.numpy() for x in padded_words(*map(torch.from_numpy, given), num_words)
        )
        expected, counts_B = with_words(flat_F, lengths_B, continues_V, num_words)
        got: list[int] = []
        for place, ids, real, ends, row in zip(
            place_BT, ids_BT, mask_BT, ends_BT, row_BT, strict=True
        ):
            at = np.concatenate([place[real], place[ends] + 1])
            got += np.concatenate([ids[real], row[ends]])[np.argsort(at)].tolist()
            assert sorted(at) == list(range(len(at)))
        assert got == expected.tolist()
        assert (mask_BT.sum(1) + ends_BT.sum(1)).tolist() == counts_B.tolist()
