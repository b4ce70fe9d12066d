"""An E5-like encoder of a smaller width through all stages, its heads served at several widths."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from helpers.raw_files import write_raw
from helpers.real_model import cut
from helpers.tiny_architectures import LABEL, QUERY
from helpers.tiny_data import make_raw
from helpers.tiny_training import tiny_params

from unidec import pipeline
from unidec.bundle.bundle import Bundle
from unidec.data.propensity import training_counts
from unidec.methods.assembly import load_model
from unidec.pipeline import paths
from unidec.ranking.query_encoder import open_encoder
from unidec.ranking.row_prior import draw_rows
from unidec.tracking.registry import register
from unidec.tracking.store import open_client, prepare_store, tracking_uri

pytestmark = pytest.mark.timeout(240)
TEXTS = ["river engine music", "garden w3"]
VALUES = {
    "data.path": "raw",
    "data.validation_share": 0.2,
    "encoder.kind": "both",
    "encoder.bag_words": 16,
    "optim.epochs": 2,
    "model.clf_bias": True,
    "loss.widths": [4, 8],
    "index.clf_weight": "auto",
    "index.knn_by": "model",
    "index.knn_weight": 0.5,
    "index.knn_neighbours": 5,
}


def vectors(params):
    pipeline.index(params)
    arrays = Bundle.load(paths.BUNDLE).vectors
    return {name: np.array(arrays[name]) for name in ("de", "clf", "bias")}


def test_one_training_is_served_at_each_of_its_widths(tmp_path, tiny_encoder, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", prepare_store(f"sqlite:///{tmp_path}/mlflow.db"))
    # so many test queries that the first label of one of them is right
    write_raw(make_raw(num_train=96, num_test=96), "raw", "xmc-json")
    folder = shutil.copytree(tiny_encoder("bert"), tmp_path / "e5-like")
    config = folder / "config_sentence_transformers.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"truncate_dim": 24}))
    params = tiny_params(folder, **VALUES)
    for stage in ("ingest", "tokens", "validate", "propensity", "label_graph", "train"):
        getattr(pipeline, stage)(params)
    whole = load_model(paths.MODEL)
    assert whole.encoder_settings.width == 24
    assert (whole.encoder_settings.query_prompt, whole.encoder_settings.label_prompt) == (
        QUERY,
        LABEL,
    )
    assert whole.encoder.width == 24 + 32  # the transformer's, and the bag's
    de, clf = whole.encode_queries(whole.tokens(TEXTS, "queries"))
    sizes = []
    for width in (0, 8, 4):
        served = tiny_params(folder, **VALUES, **{"index.width": width})
        pipeline.index(served)
        assert pipeline.evaluate(served).metrics["P@1"] > 0
        bundle = Bundle.load(paths.BUNDLE)
        assert bundle.info.dim == (width or 16)
        assert [row["width"] for row in bundle.info.card["widths"]] == [4, 8, 16]
        assert 'id="widths"' in paths.REPORT.read_text(encoding="utf-8")
        for runtime in ("torch", "onnx"):
            encoded = open_encoder(bundle, runtime).encode(TEXTS)
            expected = cut(de, width or 16, True), cut(clf, width or 16, False)
            np.testing.assert_allclose(encoded.de_BD, expected[0], rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(encoded.clf_BD, expected[1], rtol=1e-3, atol=1e-4)
        assert bundle.neighbours.vectors_MD.shape[1] == bundle.info.dim
        assert len(bundle.predict(TEXTS, 3)) == 2
        assert bundle.info.width == 2 * (width or 16)  # cosines have no bias
        sizes.append(sum(file.stat().st_size for file in (paths.BUNDLE / "vectors").iterdir()))
    assert sizes == sorted(sizes, reverse=True)
    version = register(paths.BUNDLE, None, "unidec")
    open_client(tracking_uri()).set_registered_model_alias("unidec", "champion", str(version))
    start = pipeline.choose_start(served)
    assert start.kind == "cold"
    assert start.reason == "the champion, version 1, has another model.dim or index.width"

    plain = vectors(tiny_params(folder, **VALUES))
    drawn = vectors(tiny_params(folder, **VALUES, **{"index.clf_prior": 2.0}))
    expected = plain["clf"].copy()
    num_queries_L = training_counts(paths.open_dataset())
    draw_rows(expected, plain["de"], num_queries_L, 2.0)
    assert num_queries_L.max() > 0 and not np.allclose(drawn["clf"], plain["clf"], atol=1e-3)
    np.testing.assert_allclose(drawn["clf"], expected, rtol=1e-4, atol=1e-5)
    assert np.array_equal(drawn["de"], plain["de"])
    assert np.array_equal(drawn["bias"], plain["bias"])
