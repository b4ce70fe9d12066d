"""A run's folder is named by all that decides what the training becomes, and by nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unidec import pipeline
from unidec.pipeline import paths, start


@pytest.fixture
def ingested(in_work: SimpleNamespace) -> SimpleNamespace:
    if not paths.DATASET.is_dir():
        pipeline.ingest(in_work.params())
    if not paths.TOKENS.is_dir():
        pipeline.tokens(in_work.params())
    return in_work


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 4},
        {"pool.beta": 1},
        {"optim.lr_bag": 1e-4},
        {"encoder.dropout": 0.1},
        {"model.dim": 8},
        {"loss.balance": 0.4},
        {"tokens.max_length": 12},
        {"optim.epochs": 3},
    ],
    ids=str,
)
def test_what_decides_a_training_names_its_folder(ingested: SimpleNamespace, changes: dict) -> None:
    assert start.run_identity(ingested.params(**changes)) != start.run_identity(ingested.params())


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "auto"},
        {"run.devices": 2},
        {"run.checkpoint_steps": 5},
        {"index.factory": "HNSW32"},
        {"index.clf_weight": 2.0},
        {"tracking.experiment": "other"},
        {"tracking.model_name": "other"},
        {"label_graph.threshold": 0.2},
        {"data.propensity_a": 0.6},
        {"recipe": "unidec"},
    ],
    ids=str,
)
def test_what_only_shows_or_serves_it_does_not(ingested: SimpleNamespace, changes: dict) -> None:
    assert start.run_identity(ingested.params(**changes)) == start.run_identity(ingested.params())


def test_other_data_and_other_code_are_another_run(
    ingested: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = start.run_identity(ingested.params())
    with monkeypatch.context() as patch:
        patch.setattr("unidec.training.identity.code_sha256", lambda *results: "other")
        assert start.run_identity(ingested.params()) != before
    with monkeypatch.context() as patch:
        patch.setattr("unidec.data.dataset.manifest_sha256", lambda manifest: "other")
        assert start.run_identity(ingested.params()) != before
    assert start.run_identity(ingested.params()) == before
