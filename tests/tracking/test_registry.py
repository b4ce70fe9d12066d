"""Registration: one version a bundle, the alias only after the hashes agree.

The bundle is a stand-in, but for the last test: a real one, served.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request

import pytest
from helpers.ports import free_port
from helpers.small_bundle import write_small_bundle

from unidec.data.storage import folder_sha256, write_folder
from unidec.errors import ArtifactError
from unidec.tracking import registry
from unidec.tracking.run import Tracker
from unidec.tracking.store import open_client, prepare_store

pytestmark = pytest.mark.filterwarnings("ignore:Operation with range")  # MLflow's own use of pandas


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    return prepare_store(f"sqlite:///{tmp_path_factory.mktemp('registry')}/mlflow/mlflow.db")


@pytest.fixture(autouse=True)
def _default_store(uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)


@pytest.fixture
def client(uri):
    return open_client(uri)


@pytest.fixture
def run_id(uri, tmp_path) -> str:
    run_id = Tracker("tests").start(tmp_path / "run", {"optim.epochs": 1})
    assert run_id
    return run_id


@pytest.fixture
def stand_in(monkeypatch):
    """What answers, ranking labels by nothing but their order."""

    class Answerer:
        def __init__(self, path, runtime, threads):
            self.labels = json.loads((pathlib.Path(path) / "labels.json").read_text())
            self.opened = (runtime, threads)

        @classmethod
        def open(cls, *given):
            return cls(*given)

        def table(self, frame, k=5, **filters):
            import pandas as pd

            asked.append((self.opened, filters))

            rows = [
                (query, rank + 1, label, label.title(), 1.0 / (rank + 1))
                for query in frame["query"]
                for rank, label in enumerate(self.labels[:k])
            ]
            return pd.DataFrame(rows, columns=["query", "rank", "label", "title", "score"])

    asked = []
    module = types.ModuleType("unidec.bundle.answer")
    module.Answerer = Answerer
    monkeypatch.setitem(sys.modules, "unidec.bundle.answer", module)
    return asked


@pytest.fixture
def path_as_before(monkeypatch):
    # loading a model puts its copied code in front
    monkeypatch.setattr(sys, "path", list(sys.path))


def make_bundle(path, labels=("vim", "nano", "emacs", "ed")):
    with write_folder(path, "bundle", 1) as out:
        (out.path / "labels.json").write_text(json.dumps(list(labels)))
    return path


def test_one_version_a_bundle_with_card_tags_and_alias(
    uri, client, run_id, tmp_path, stand_in, path_as_before
):
    import mlflow
    import numpy as np
    import pandas as pd

    bundle = make_bundle(tmp_path / "bundle")
    card = {"data set": "tiny", "metrics": {"test": {"P@1": 45.0, "head/P@1": 3.0}}}
    version = registry.register(
        bundle,
        run_id,
        "one",
        card=card,
        tags={"dataset.sha256": "d" * 64},
    )
    assert registry.register(bundle, run_id, "one", card=card) == version
    assert [int(found.version) for found in client.search_model_versions("name = 'one'")] == [
        version
    ]

    kept = client.get_model_version_by_alias("one", "challenger")
    assert kept.run_id == run_id
    assert kept.tags["dataset.sha256"] == "d" * 64
    assert kept.tags["bundle.sha256"] == folder_sha256(bundle)
    assert "| P@1 | 45.00 |" in kept.description and "head/" not in kept.description
    in_order = ("| P@1 |", "- data set: tiny", "load_model", kept.tags["bundle.sha256"])
    assert sorted(in_order, key=kept.description.index) == list(in_order)
    assert client.get_run(run_id).info.status == "RUNNING"  # as it was before

    with registry.tracking_to(uri):
        # before it is loaded: Python may write byte code beside what it loads
        stored = mlflow.artifacts.download_artifacts(
            "models:/one@challenger", dst_path=str(tmp_path / "stored")
        )
        model = mlflow.pyfunc.load_model("models:/one@challenger")
        found = model.predict(pd.DataFrame({"query": ["an editor", "x"]}), params={"k": 3})
        expected = ["vim", "nano", "emacs"] * 2
        assert list(found["label"]) == expected
        assert list(found["rank"]) == [1, 2, 3] * 2
        # the default k is above the labels
        assert len(model.predict(pd.DataFrame({"query": ["an editor"]}))) == 4
        several = (
            {"query": ["a", "b"]},
            {"query": np.array(["a", "b"])},
            [{"query": "a"}, {"query": "b"}],
        )
        for given in several:
            assert list(model.predict(given, params={"k": 1})["query"]) == ["a", "b"]
        assert list(model.predict({"query": "a"}, params={"k": 1})["query"]) == ["a"]
        told = {
            "allow": ["vim"],
            "deny": ["ed", "nano"],
            "min_score": 1,
            "head": "de",
        }
        stand_in.clear()
        model.predict(pd.DataFrame({"query": ["x"]}), params=told)
        model.predict(pd.DataFrame({"query": ["x"]}))
        plain = {"allow": [], "deny": [], "head": "both"}
        assert stand_in == [(("auto", 0), told), (("auto", 0), plain)]
        other = mlflow.pyfunc.load_model(
            "models:/one@challenger", model_config={"runtime": "torch", "threads": 1}
        )
        other.predict(pd.DataFrame({"query": ["x"]}))
        assert stand_in[-1] == (("torch", 1), plain)
        with pytest.raises(mlflow.MlflowException, match="query"):
            model.predict(pd.DataFrame({"text": ["x"]}))
    files = {
        str(file.relative_to(stored)) for file in (tmp_path / "stored").rglob("*") if file.is_file()
    }
    assert "code/unidec/errors.py" in files and not [
        name for name in files if name.endswith((".pkl", ".pyc"))
    ]
    requirements = (tmp_path / "stored" / "requirements.txt").read_text().split("\n")
    assert not [line for line in requirements if line.split("=")[0].strip() == "unidec"]


def test_the_runs_test_metrics_are_the_models_with_its_data_set(
    uri, client, tmp_path, stand_in, path_as_before
):
    tracker = Tracker("tests")
    about = {"name": "tiny", "digest": "f" * 36, "path": "data/dataset"}
    run_id = tracker.start(tmp_path / "run", {}, dataset=about)
    tracker.log_final({"test/P@1": 41.0, "test/tail/R@10": 7.0, "validation/P@1": 40.0})
    version = registry.register(make_bundle(tmp_path / "bundle"), run_id, "measured")
    # models:/<id of the logged model>
    source = client.get_model_version("measured", str(version)).source
    model = client.get_logged_model(source.rpartition("/")[2])
    expected = {
        ("test/P_at_1", 41.0, run_id, "tiny", "f" * 36),
        ("test/tail/R_at_10", 7.0, run_id, "tiny", "f" * 36),
    }
    assert {
        (m.key, m.value, m.run_id, m.dataset_name, m.dataset_digest) for m in model.metrics
    } == expected
    experiment = client.get_run(run_id).info.experiment_id
    found = client.search_logged_models(
        [experiment], datasets=[{"dataset_name": "tiny", "dataset_digest": "f" * 36}]
    )
    assert [one.model_id for one in found] == [model.model_id]
    # once
    values = [point.value for point in client.get_metric_history(run_id, "test/P_at_1")]
    assert values == [41.0]


def test_another_bundle_is_another_version_and_takes_the_alias(
    uri, client, run_id, tmp_path, stand_in, path_as_before
):
    first = registry.register(make_bundle(tmp_path / "a"), run_id, "two")
    second = registry.register(make_bundle(tmp_path / "b", ["joe"]), run_id, "two")
    assert second == first + 1
    assert int(client.get_model_version_by_alias("two", "challenger").version) == second
    assert registry.register(tmp_path / "a", run_id, "two") == first


@pytest.mark.parametrize("point", ["create_model_version", "set_registered_model_alias"])
def test_killed_on_the_way_then_run_again(
    uri, client, run_id, tmp_path, stand_in, path_as_before, monkeypatch, point
):
    from mlflow import MlflowClient

    bundle = make_bundle(tmp_path / "bundle", [point])
    name = f"killed-{point}"

    def killed(*_args, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, point, killed)
        with pytest.raises(KeyboardInterrupt):
            registry.register(bundle, run_id, name)
    assert client.get_registered_model(name).aliases == {}
    version = registry.register(bundle, run_id, name)
    assert len(client.search_model_versions(f"name = '{name}'")) == 1
    assert int(client.get_model_version_by_alias(name, "challenger").version) == version


def test_what_was_stored_is_damaged(
    uri, client, run_id, tmp_path, stand_in, path_as_before, monkeypatch
):
    bundle = make_bundle(tmp_path / "bundle", ["damaged"])
    log_model = registry._log_model

    def log_and_damage(*args):
        model_id, run = log_model(*args)
        with registry.tracking_to(uri) as mlflow:
            path = pathlib.Path(
                mlflow.get_logged_model(model_id).artifact_location.removeprefix("file://")
            )
        (path / "artifacts" / "bundle" / "labels.json").write_text('["DAMAGED"]')
        return model_id, run

    monkeypatch.setattr(registry, "_log_model", log_and_damage)
    with pytest.raises(ArtifactError, match="damaged"):
        registry.register(bundle, run_id, "damage")
    assert client.get_registered_model("damage").aliases == {}


def test_what_does_not_fit_on_the_disk_is_not_downloaded(
    uri, client, run_id, tmp_path, stand_in, path_as_before
):
    bundle = make_bundle(tmp_path / "bundle", ["large"])
    version = registry.register(bundle, run_id, "large")
    sha256 = folder_sha256(bundle)
    copies = tmp_path / "copies"
    copies.mkdir()
    with registry.tracking_to(uri) as mlflow:
        fetched = registry.download(f"models:/large/{version}", sha256, copies)
        assert (fetched / "labels.json").read_text() == '["large"]'
        source = client.get_model_version("large", str(version)).source
        model = mlflow.get_logged_model(source.removeprefix("models:/"))
        stored = pathlib.Path(model.artifact_location.removeprefix("file://"))
        with (stored / "artifacts" / "bundle" / "labels.json").open("r+b") as file:
            file.truncate(1 << 43)  # sparse: 8 TiB that take no space
        before = set(copies.rglob("*"))
        with pytest.raises(ArtifactError, match="at least 8,796,"):
            registry.download(f"models:/large/{version}", sha256, copies)
    assert set(copies.rglob("*")) == before


def test_a_damaged_or_missing_bundle_is_not_logged(uri, tmp_path):
    bundle = make_bundle(tmp_path / "bundle")
    (bundle / "labels.json").write_text('["x"]')
    with pytest.raises(ArtifactError, match="damaged"):
        registry.register(bundle, None, "none")
    with pytest.raises(ArtifactError, match="no bundle here"):
        registry.register(tmp_path / "nowhere", None, "none")


def test_requirements_are_ours_without_our_name():
    names = [
        line.split("<")[0].split(">")[0].split("=")[0] for line in registry.serving_requirements()
    ]
    assert {"torch", "transformers", "mlflow", "numpy"} <= set(names)
    assert not {"unidec", "unidec-xmc", "prefect", "dvc"} & set(names)


ECHO = """
import sys, types
class Echo:
    open = classmethod(lambda cls, *_: cls())
    table = lambda self, frame, **_: print("asked", *frame["query"])
module = types.ModuleType("unidec.bundle.answer")
module.Answerer, sys.modules[module.__name__] = Echo, module
"""


def test_the_documented_lines_load_the_champion_in_the_repositorys_folder(
    tmp_path, stand_in, path_as_before, monkeypatch, warm_python
):
    """docs/bundles.md, as pasted; no other database is left behind."""
    uri = prepare_store(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    version = registry.register(make_bundle(tmp_path / "bundle"), None, "unidec")
    open_client(uri).set_registered_model_alias("unidec", "champion", version)
    page = (pathlib.Path(__file__).parents[2] / "docs" / "bundles.md").read_text()
    blocks = [piece.partition("```")[0] for piece in page.split("```python\n")[1:]]
    blocks = [block for block in blocks if "pyfunc.load_model" in block]
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("MLFLOW_", "PYTHONPATH"))
    }
    done = subprocess.run(
        [*warm_python, "-c", "\n".join([ECHO, *blocks])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert len(blocks) == 1, done.stderr
    assert done.stdout.splitlines() == ["asked a text editor"], done.stderr
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.db")] == [
        "mlflow/mlflow.db"
    ]


# -- a real model, in processes that know nothing of us
# ----------------------------------------------------------------


LOAD = """
import json, mlflow, pandas as pd
model = mlflow.pyfunc.load_model("models:/real@challenger")
frame = pd.DataFrame({"query": ["a text editor"]})
told = {"k": 3, "deny": ["text-editor"], "min_score": -1.0, "head": "de"}
for params in ({"k": 3}, told, {"allow": ["music-player", "nobody"]}):
    print(json.dumps(model.predict(frame, params=params).to_dict("records")))
import unidec; print(unidec.__file__)
"""


def serve(folder, environment, port: int) -> subprocess.Popen:
    """`mlflow models serve` of what is registered, in a process group of its own."""
    words = [
        "models",
        "serve",
        "-m",
        "models:/real@challenger",
        "--env-manager",
        "local",
        "--port",
        str(port),
    ]
    with (folder / "serve.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "mlflow", *words],
            cwd=folder,
            env=environment
            | {"PATH": f"{os.path.dirname(sys.executable)}:{environment.get('PATH', '')}"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def invoke(port: int, params: dict) -> tuple[int, dict]:
    """Status and JSON of a request to MLflow's server."""
    body = json.dumps(
        {"dataframe_records": [{"query": "a text editor"}], "params": params}
    ).encode()
    url = f"http://127.0.0.1:{port}/invocations"
    request = urllib.request.Request(url, body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
def test_a_real_model_loads_elsewhere_and_is_served(uri, run_id, tmp_path, path_as_before):
    registry.register(write_small_bundle(tmp_path), run_id, "real")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"MLFLOW_TRACKING_URI": uri, "DO_NOT_TRACK": "true", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    *rows, package = done.stdout.strip().splitlines()[-4:]
    local, filtered, allowed = map(json.loads, rows)
    assert [row["rank"] for row in local] == [1, 2, 3]
    assert local[0]["label"] == "text-editor"
    assert len(filtered) == 3
    assert "text-editor" not in [row["label"] for row in filtered]
    assert [row["label"] for row in allowed] == ["music-player"]
    assert "/code/unidec/" in package  # what was logged, not what is installed here

    port = free_port()
    server = serve(tmp_path, environment, port)
    try:
        for _ in range(240):
            assert server.poll() is None, (tmp_path / "serve.log").read_text()
            with contextlib.suppress(urllib.error.URLError):
                expected = (200, {"predictions": local})
                assert invoke(port, {"k": 3}) == expected
                break
            time.sleep(0.5)
        told = {
            "k": 3,
            "deny": ["text-editor"],
            "min_score": -1.0,
            "head": "de",
        }
        assert invoke(port, told) == (200, {"predictions": filtered})
        assert invoke(port, {"allow": ["music-player", "nobody"]}) == (
            200,
            {"predictions": allowed},
        )
        for wrong, words in (
            ({"k": 0}, "k is out of range"),
            ({"head": "tail"}, "head"),
            ({"deny": "x"}, "deny"),
        ):
            status, said = invoke(port, wrong)
            assert status == 400 and words in said["message"], said
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)
