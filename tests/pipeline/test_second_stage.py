"""From raw files to a bundle in two stages: a model that starts from another's export, frozen,
residual, on a graph.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers.raw_files import write_raw
from helpers.tiny_training import tiny_params

from unidec import pipeline
from unidec.bundle.bundle import Bundle
from unidec.data.dataset import XMCDataset
from unidec.data.json_file import read_json_lines
from unidec.data.label_graph import load_label_graph
from unidec.data.storage import read_manifest
from unidec.model.unidec import UniDEC
from unidec.pipeline import paths
from unidec.pipeline.ranking import Ranking, validation_metrics
from unidec.training.fit import fit

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path, tiny_raw, tiny_bert, monkeypatch):
    """A working folder with raw files and a tiny transformer."""
    (tmp_path / "raw").mkdir()
    write_raw(tiny_raw, tmp_path / "raw", "xmc-json")
    shutil.copytree(tiny_bert, tmp_path / "bert")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return tmp_path


def train(params):
    """All rounds and what follows; the measures of the rounds."""
    run = pipeline.start_run(params)
    fit(run)
    run.export()
    pipeline.index(params)
    pipeline.evaluate(params)
    return [line["validation"] for line in read_json_lines(run.folder / "rounds.jsonl")]


RESIDUAL = "residual on a frozen encoder"
FUSED = "NGAME: a classifier beside the encoder's own vector, which has no loss"
NO_PROJECTION = {"model.projection": False, "model.dim": 64}
SECOND = {
    FUSED: NO_PROJECTION | {"encoder.frozen": True, "loss.balance": 0.0},
    "a classifier on a frozen encoder": {"model.heads": "clf", "encoder.frozen": True},
    RESIDUAL: {"model.clf_residual": True, "encoder.frozen": True},
    "residual, with Gandalf on walks from half of the labels": {
        "model.clf_residual": True,
        "pool.gandalf": True,
        "label_graph.kind": "random-walk",
        "label_graph.share": 0.5,
    },
}


QUICK = (RESIDUAL, FUSED)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in QUICK)) for k in SECOND]
)
def test_two_stages_from_raw_files_to_a_bundle(folder, kind):
    def params(**values):
        common = {
            "data.path": "raw",
            "data.validation_share": 0.1,
            "encoder.kind": "both",
            "optim.epochs": 2,
        }
        return tiny_params(Path("bert"), **common | values)

    first = params(**{"model.heads": "de"} | (NO_PROJECTION if kind == FUSED else {}))
    second = params(**{"encoder.start": "first", "pool.cluster_start": 3} | SECOND[kind])
    for name in ("ingest", "tokens", "propensity"):
        getattr(pipeline, name)(first)
    said = pipeline.label_graph(second)
    train(first)
    shutil.copytree(paths.MODEL, folder / "first")
    validation = train(second)

    graph = load_label_graph(paths.LABEL_GRAPH)
    assert said == {
        "labels": 40,
        "texts": int((np.diff(graph.indptr) > 0).sum()),
        "edges": graph.nnz,
    }
    assert said["texts"] == round(40 * second.label_graph.share)
    meta = read_manifest(paths.LABEL_GRAPH, "label_graph", 1)["meta"]
    assert meta["kind"] == second.label_graph.kind
    assert meta["share"] == second.label_graph.share

    # what training measured of the model is what the exported one gives, and what the bundle
    # answers
    model = UniDEC.load(paths.MODEL)
    start = UniDEC.load(folder / "first")
    assert not model.settings.clf_residual
    if second.encoder.frozen:
        ours, theirs = (m.encoder.state_dict() for m in (model, start))
        assert all(np.array_equal(ours[name], value) for name, value in theirs.items())
    dataset = XMCDataset.open(paths.DATASET)
    again = validation_metrics(Ranking.of_model(model, dataset, "validation", "fp32"), second)
    assert again == pytest.approx(validation[-1], abs=1e-6)
    # the bundle computes what the caches held in float16 for the evaluation
    bundle = Bundle.load(paths.BUNDLE)
    uids = dataset.label_uids()
    for line in pq.read_table(paths.PREDICTIONS).to_pylist():
        text = dataset.query_texts([line["query_row"]])
        filtered = dataset.filter_pairs[line["query_row"]].indices
        (answer,) = bundle.predict(text, k=5, exclude=[[uids[label] for label in filtered]])
        expected = line["scores"][:5]
        np.testing.assert_allclose(answer.scores, expected, rtol=2e-2, atol=2e-2)
