"""sentence-transformers loads what was exported and gives the vectors that the model gives."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from helpers import real_model

from unidec.bundle.export.query_side import export_sentence_transformers
from unidec.bundle.export.vectors import scored_by
from unidec.errors import ConfigError

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("sentence_transformers") is None, reason="an extra of its own"
    ),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:transformers"),
]


STOCK = {
    "mean": {"kind": "transformer", "trainable_layers": -1},
    "cls, unit length": {"kind": "transformer", "trainable_layers": 0, "pooling": "cls"},
    "query head": {"kind": "transformer", "trainable_layers": 0, "query_head": True},
    "distilbert": {"kind": "transformer", "trainable_layers": -1, "source": "distilbert"},
    "no projection": {"kind": "transformer", "trainable_layers": -1, "dim": 32},
    "no projection, any length": {
        "kind": "transformer",
        "trainable_layers": -1,
        "dim": 32,
        "unit_length": False,
    },
}


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("head", ["de", "clf"])
def test_stock_modules_give_the_models_vectors(
    make_bundle, tmp_path, name, head, capfd, caplog
) -> None:
    from sentence_transformers import SentenceTransformer

    bundle = make_bundle(**STOCK[name], clf_bias=True)
    told = export_sentence_transformers(bundle, tmp_path / "out", head=head)
    assert not list((tmp_path / "out").rglob("*.py"))
    capfd.readouterr()
    caplog.clear()
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu", local_files_only=True)
    printed = "".join(capfd.readouterr()) + caplog.text
    assert "pooler" not in printed and "MISSING" not in printed and "UNEXPECTED" not in printed, (
        printed
    )
    got = model.encode(real_model.TEXTS)
    expected = scored_by(bundle, head).queries(*real_model.one_by_one(bundle, real_model.TEXTS))
    assert got.dtype == np.float32
    assert got.shape == expected.shape == (7, told["width"])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    # texts differ: the comparison says something
    assert np.abs(expected[0] - expected[1]).max() > 0.01
    assert model.max_seq_length == 16 and model.similarity_fn_name == "dot"


@pytest.mark.parametrize(
    ("encoder", "head", "reasons"),
    [
        ({"kind": "both", "trainable_layers": 0}, "de", ["a bag of tokens", "unidec export onnx"]),
        ({"kind": "bag", "trainable_layers": 0}, "both", ["a bag of tokens"]),
        (
            {"kind": "transformer", "trainable_layers": -1, "residual": True},
            "de",
            ["a residual layer"],
        ),
        (
            {"kind": "transformer", "trainable_layers": -1},
            "both",
            ["both heads", "--head de or clf"],
        ),
    ],
    ids=["both parts", "bag", "residual", "both heads"],
)
def test_what_modules_in_a_row_cannot_express_is_refused(
    make_bundle, tmp_path, encoder, head, reasons
) -> None:
    with pytest.raises(ConfigError) as caught:
        export_sentence_transformers(make_bundle(**encoder), tmp_path / "out", head=head)
    assert all(reason in str(caught.value) for reason in reasons)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_not_replaced(make_bundle, tmp_path) -> None:
    bundle = make_bundle(kind="transformer", trainable_layers=-1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="not an earlier export"):
        export_sentence_transformers(bundle, tmp_path / "mine", head="de")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"
    for _ in range(2):  # an earlier export is, with the same bytes
        export_sentence_transformers(bundle, tmp_path / "out", head="de")
        manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["meta"]["bundle_sha256"] == bundle.sha256
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "trust_remote_code" not in readme and bundle.sha256 in readme
