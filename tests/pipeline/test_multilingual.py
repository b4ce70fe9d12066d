"""All stages on texts of many scripts, with a tokenizer of each kind."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.raw_files import write_raw
from helpers.tiny_bundle import predict_file
from helpers.tiny_tokenizers import (
    KINDS,
    TOPICS,
    multilingual_raw,
    train_tokenizer,
    write_multilingual,
    write_static,
)
from helpers.tiny_training import tiny_params

from unidec import pipeline
from unidec.bundle.bundle import Bundle
from unidec.pipeline import paths
from unidec.ranking.query_encoder import open_encoder

pytestmark = pytest.mark.timeout(240)
GARDEN = 2  # row of the topic; each has six labels
SETTINGS = {
    "data.path": "raw",
    "data.validation_share": 0.2,
    "tokens.max_length": 32,
    "encoder.kind": "both",
    "encoder.trainable_layers": 1,
    "encoder.bag_words": 64,
    "pool.refresh": 1,
    "optim.epochs": 6,
    "index.knn_by": "words",
    "index.knn_weight": 0.5,
    "index.knn_neighbours": 5,
}


@pytest.mark.parametrize("kind", [*KINDS, "static unigram"])
def test_every_stage_takes_its_tokens(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    raw = multilingual_raw()
    write_raw(raw, "raw", "xmc-json")
    titles = [text for words in TOPICS for text in words]
    for table in (*raw.queries.values(), raw.labels):
        titles += table["title"].to_pylist()
    folder = tmp_path / "encoder"
    settings = SETTINGS
    if kind == "static unigram":
        train_tokenizer("unigram", titles, folder)
        write_static(folder)
        settings = SETTINGS | {"encoder.trainable_layers": 0}
    else:
        write_multilingual(kind, titles, folder)
    params = tiny_params(folder, **settings)
    for stage in ("ingest", "tokens", "validate", "propensity", "label_graph", "train"):
        result = getattr(pipeline, stage)(params)
        if stage == "validate":
            assert not result.warnings
    pipeline.index(params)
    assert pipeline.evaluate(params).metrics["P@1"] > 60
    bundle = Bundle.load(paths.BUNDLE)
    assert bundle.words.spelt == (kind != "cased-wordpiece")
    texts = ["garden 树木", "GARDEN 树木", "حديقة شجرة"]
    for answer in bundle.predict(texts[::2], 3):
        assert int(answer.labels[0].removeprefix("label-")) // 6 == GARDEN
    plain, loud, _ = bundle.encode(texts).words_BF.toarray()
    assert plain.any()
    assert np.array_equal(plain, loud) == bundle.words.spelt
    by_model = open_encoder(bundle, "torch").encode(texts)
    by_graph = open_encoder(bundle, "onnx").encode(texts)
    np.testing.assert_allclose(by_model.de_BD, by_graph.de_BD, atol=1e-4)
    tmp_path.joinpath("queries.csv").write_text("query\nجسر نهر\n水流桥\n", encoding="utf-8")
    assert predict_file(bundle, tmp_path / "queries.csv", tmp_path / "out.csv", k=1) == 2
    assert tmp_path.joinpath("out.csv").read_text(encoding="utf-8").count("水流桥") == 1
