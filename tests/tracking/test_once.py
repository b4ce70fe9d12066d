"""Replies of a real tracking server that are lost after it acted: nothing is created twice."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from helpers.mlflow_server import LossyProxy, MlflowServer

import unidec.tracking.run as tracking
from unidec.data.storage import write_folder
from unidec.tracking import registry
from unidec.tracking.run import Tracker
from unidec.tracking.store import open_client

CREATIONS = (
    "runs/create",
    "logged-models ",
    "model-versions/create",
    "registered-models/create",
    "experiments/create",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with MlflowServer(tmp_path_factory.mktemp("mlflow")).running() as server:
        yield server


@pytest.fixture
def proxy(server, monkeypatch, tmp_path):
    proxy = LossyProxy(server.port)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
    monkeypatch.setattr(tracking, "_ask_again", {})
    monkeypatch.chdir(tmp_path)
    yield proxy
    proxy.close()


def creates(request: bytes) -> bool:
    line = request.split(b"\r\n", 1)[0]
    return line.startswith(b"POST") and any(f"{name}".encode() in line for name in CREATIONS)


def everything(server, experiment):
    """Runs, logged models and versions in the store."""
    client = open_client(server.uri)
    place = client.get_experiment_by_name(experiment).experiment_id
    return (
        client.search_runs([place]),
        client.search_logged_models([place]),
        client.search_model_versions(""),
    )


def train_and_register(name):
    tracker = Tracker(name)
    tracker.start(Path("runs/one"), {"seed": 0}, {"git.dirty": "false"})
    for step in range(20):
        tracker.log(step, {"training/loss": 1.0 / (step + 1)})
        tracker.flush()
    with write_folder(Path("bundle"), "bundle", 1) as out:
        (out.path / "labels.json").write_text(json.dumps([name]))
    version = registry.register(Path("bundle"), tracker.run_id, name)
    tracker.finish()
    return tracker, version


@pytest.mark.filterwarnings("ignore:Operation with range")
def test_each_reply_to_a_creation_is_lost_once(server, proxy):
    asked = set()

    def first_of_its_kind(request: bytes) -> bool:
        kind = request.split(b" HTTP", 1)[0]
        is_first = creates(request) and kind not in asked
        asked.add(kind)
        return is_first

    proxy.fault = "some"
    proxy.lost = first_of_its_kind
    tracker, version = train_and_register("first-lost")
    proxy.fault = ""
    runs, models, versions = everything(server, "first-lost")
    assert [run.info.run_id for run in runs] == [tracker.run_id]
    assert runs[0].info.status == "FINISHED"
    assert len(models) == 1
    assert models[0].status.name == "READY"
    assert [found.version for found in versions if found.name == "first-lost"] == [str(version)]
    assert sum(creates(kind + b" HTTP") for kind in asked) >= 4, asked


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Operation with range")
def test_a_seventh_of_all_replies_is_lost(server, proxy, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    dice = random.Random(3)
    proxy.fault = "some"
    proxy.lost = lambda _request: dice.random() < 0.15
    for number in itertools.count():
        try:
            tracker, _ = train_and_register("seventh")
            break
        except Exception:  # as a flow retries
            assert number < 5
    tracker.finish()
    proxy.fault = ""
    tracker.flush()
    runs, models, versions = everything(server, "seventh")
    assert len(runs) == 1
    assert len(models) == 1
    assert runs[0].info.status == "FINISHED"
    assert len([found for found in versions if found.name == "seventh"]) == 1
