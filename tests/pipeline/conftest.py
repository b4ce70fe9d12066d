"""A working folder with a slice of lf-debian and a tiny transformer, and MLflow's store
within it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.raw_files import write_raw
from helpers.tiny_training import tiny_params
from helpers.tiny_transformer import write_transformer

from unidec.config import Params
from unidec.data.raw import RawData


@pytest.fixture(scope="session")
def work(slice_raw: RawData, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`folder` with raw/ and bert/, and `params(**overrides)` for a short training of a bag of
    tokens in it.
    """
    folder = tmp_path_factory.mktemp("work")
    (folder / "raw").mkdir()
    write_raw(slice_raw, folder / "raw", "xmc-json")
    texts = [
        text
        for table in (*slice_raw.queries.values(), slice_raw.labels)
        for text in table["title"].to_pylist()
    ]
    bert = write_transformer(folder / "bert", texts)

    def params(**overrides: Any) -> Params:
        # named as in the working folder: what it is called from must not show in a run's name
        values = {
            "data.path": "raw",
            "data.validation_share": 0.05,
            "pool.batch_size": 256,
            "pool.beta": 2,
            "pool.eta": 2,
            "pool.refresh": 1,
            "optim.epochs": 2,
            "model.dim": 32,
            "index.clf_weight": "auto",
            "optim.lr_bag": 5e-3,
            "optim.lr_heads": 5e-3,
            "optim.lr_clf": 5e-3,
            "tracking.experiment": "stages",
            "tracking.model_name": "stages",
        }
        return tiny_params(Path(bert.name), **(values | overrides))

    return SimpleNamespace(folder=folder, params=params)


@pytest.fixture
def in_work(work: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`work`, as the current folder; tracking goes to a store within it."""
    monkeypatch.chdir(work.folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{work.folder}/mlflow.db")
    return work
