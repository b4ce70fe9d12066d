"""Registration: one version a bundle, the alias only after the hashes agree.

The bundle is a stand-in; the pipeline's test has a real one.
"""

from __future__ import annotations

import json
import sys
import types

import pytest

from unidec.data.storage import folder_sha256, write_folder
from unidec.errors import ArtifactError, ConfigError
from unidec.ops import registry
from unidec.ops.tracking import Tracker
from unidec.ops.tracking_store import open_client, prepare_store

# MLflow's own: its use of pandas, and advice when it loads a model
pytestmark = pytest.mark.filterwarnings("ignore:Operation with range", "ignore:.*type hints")


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    return prepare_store(f"sqlite:///{tmp_path_factory.mktemp('registry')}/mlflow/mlflow.db")


@pytest.fixture
def client(uri):
    return open_client(uri)


@pytest.fixture
def run_id(uri, tmp_path) -> str:
    run_id = Tracker("tests", uri=uri).start(tmp_path / "run", {"optim.epochs": 1})
    assert run_id
    return run_id


@pytest.fixture
def stand_in(monkeypatch):
    """A bundle class that ranks labels by nothing but their order."""

    class Bundle:
        @classmethod
        def load(cls, path, verify=True):
            import pathlib

            bundle = cls()
            bundle.labels = json.loads((pathlib.Path(path) / "labels.json").read_text())
            return bundle

        def predict_frame(self, frame, k=5):
            import pandas as pd

            rows = [
                (query, rank + 1, label, label.title(), 1.0 / (rank + 1))
                for query in frame["query"]
                for rank, label in enumerate(self.labels[:k])
            ]
            return pd.DataFrame(rows, columns=["query", "rank", "label", "title", "score"])

    module = types.ModuleType("unidec.retrieval.bundle")
    module.Bundle = Bundle
    monkeypatch.setitem(sys.modules, "unidec.retrieval.bundle", module)


@pytest.fixture
def path_as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading a model puts its copied code in front


def make_bundle(path, labels=("vim", "nano", "emacs", "ed")):
    with write_folder(path, "bundle", 1) as out:
        (out.path / "labels.json").write_text(json.dumps(list(labels)))
    return path


def test_one_version_a_bundle_with_card_tags_and_alias(uri, client, run_id, tmp_path, stand_in, path_as_before):
    import mlflow
    import pandas as pd

    bundle = make_bundle(tmp_path / "bundle")
    card = {"data set": "tiny", "metrics": {"test": {"P@1": 45.0, "head/P@1": 3.0}}}
    version = registry.register(bundle, run_id, "one", card=card, tags={"dataset.sha256": "d" * 64}, uri=uri)
    assert registry.register(bundle, run_id, "one", card=card, uri=uri) == version
    assert [int(found.version) for found in client.search_model_versions("name = 'one'")] == [version]
    assert registry.is_registered(bundle, "one", uri=uri) and not registry.is_registered(bundle, "other", uri=uri)

    kept = client.get_model_version_by_alias("one", "challenger")
    assert kept.run_id == run_id and kept.tags["dataset.sha256"] == "d" * 64
    assert kept.tags["bundle.sha256"] == folder_sha256(bundle)
    assert "| P@1 | 45.00 |" in kept.description and "head/" not in kept.description
    assert client.get_run(run_id).info.status == "RUNNING"  # as it was before

    with registry._tracking_to(uri):
        model = mlflow.pyfunc.load_model("models:/one@challenger")
        found = model.predict(pd.DataFrame({"query": ["an editor", "x"]}), params={"k": 3})
        assert list(found["label"]) == ["vim", "nano", "emacs"] * 2 and list(found["rank"]) == [1, 2, 3] * 2
        assert len(model.predict(pd.DataFrame({"query": ["an editor"]}))) == 4  # the default k is above the labels
        with pytest.raises(ConfigError, match="k is out of range"):
            model.predict(pd.DataFrame({"query": ["x"]}), params={"k": 0})
        with pytest.raises(mlflow.MlflowException, match="query"):
            model.predict(pd.DataFrame({"text": ["x"]}))
        stored = mlflow.artifacts.download_artifacts("models:/one@challenger", dst_path=str(tmp_path / "stored"))
    files = {str(file.relative_to(stored)) for file in (tmp_path / "stored").rglob("*") if file.is_file()}
    assert "code/unidec/errors.py" in files and not [name for name in files if name.endswith((".pkl", ".pyc"))]
    requirements = (tmp_path / "stored" / "requirements.txt").read_text().split("\n")
    assert not [line for line in requirements if line.split("=")[0].strip() == "unidec"]


def test_another_bundle_is_another_version_and_takes_the_alias(uri, client, run_id, tmp_path, stand_in, path_as_before):
    first = registry.register(make_bundle(tmp_path / "a"), run_id, "two", uri=uri)
    second = registry.register(make_bundle(tmp_path / "b", ["joe"]), run_id, "two", uri=uri)
    assert second == first + 1
    assert int(client.get_model_version_by_alias("two", "challenger").version) == second
    assert registry.register(tmp_path / "a", run_id, "two", alias=None, uri=uri) == first
    assert int(client.get_model_version_by_alias("two", "challenger").version) == second


@pytest.mark.parametrize("point", ["create_model_version", "set_registered_model_alias"])
def test_killed_on_the_way_then_run_again(uri, client, run_id, tmp_path, stand_in, path_as_before, monkeypatch, point):
    from mlflow import MlflowClient

    bundle, name = make_bundle(tmp_path / "bundle", [point]), f"killed-{point}"

    def killed(*_args, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, point, killed)
        with pytest.raises(KeyboardInterrupt):
            registry.register(bundle, run_id, name, uri=uri)
    assert client.get_registered_model(name).aliases == {}
    version = registry.register(bundle, run_id, name, uri=uri)
    assert len(client.search_model_versions(f"name = '{name}'")) == 1
    assert int(client.get_model_version_by_alias(name, "challenger").version) == version


def test_what_was_stored_is_damaged(uri, client, run_id, tmp_path, stand_in, path_as_before, monkeypatch):
    bundle = make_bundle(tmp_path / "bundle", ["damaged"])
    log_model = registry._log_model

    def log_and_damage(*args):
        model_id, run = log_model(*args)
        with registry._tracking_to(uri) as mlflow:
            import pathlib

            path = pathlib.Path(mlflow.get_logged_model(model_id).artifact_location.removeprefix("file://"))
        (path / "artifacts" / "bundle" / "labels.json").write_text('["DAMAGED"]')
        return model_id, run

    monkeypatch.setattr(registry, "_log_model", log_and_damage)
    with pytest.raises(ArtifactError, match="damaged"):
        registry.register(bundle, run_id, "damage", uri=uri)
    assert client.get_registered_model("damage").aliases == {}


def test_a_damaged_or_missing_bundle_is_not_logged(uri, tmp_path):
    bundle = make_bundle(tmp_path / "bundle")
    (bundle / "labels.json").write_text('["x"]')
    with pytest.raises(ArtifactError, match="damaged"):
        registry.register(bundle, None, "none", uri=uri)
    with pytest.raises(ArtifactError, match="no bundle here"):
        registry.register(tmp_path / "nowhere", None, "none", uri=uri)


def test_requirements_are_ours_without_our_name():
    names = [line.split("<")[0].split(">")[0].split("=")[0] for line in registry.serving_requirements()]
    assert {"torch", "transformers", "mlflow", "numpy"} <= set(names)
    assert not {"unidec", "unidec-xmc", "prefect", "dvc"} & set(names)
