"""Fault 10: the tracking server is away for a while; training continues, and all it logged arrives
later, each once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from helpers.mlflow_server import LossyProxy, MlflowServer

import unidec.tracking.run as tracking
from unidec.tracking.run import Tracker, is_behind, reconcile_runs
from unidec.tracking.store import open_client

PARAMS = {f"section.key{i}": i for i in range(120)}
DATASET = {
    "name": "tiny",
    "digest": "0" * 32,
    "path": "data/dataset",
    "num_queries": 7,
}

CHILD = """
import os, sys, tempfile, time
from pathlib import Path
from unidec.tracking.run import Tracker
run_dir = Path(sys.argv[1])
tracker = Tracker("down")
data = {"name": "tiny", "digest": "1", "path": "d"}
tracker.start(run_dir, {"seed": 7}, {"git.dirty": "false"}, data, "killed")
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "curve.txt").write_text("seen once")
    tracker.log_files([Path(folder) / "curve.txt"], "plots")
tracker.log_final({"test/P@1": 41.0})
for step in range(10**6):
    tracker.log(step, {"loss": 1.0 / (step + 1)})
    time.sleep(0.002)
    if step == 100:
        print(os.getpid(), flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with MlflowServer(tmp_path_factory.mktemp("mlflow")).running() as server:
        yield server


@pytest.fixture
def proxy(server):
    proxy = LossyProxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    monkeypatch.setattr(tracking, "_ask_again", {})
    monkeypatch.setattr(tracking, "_EVERY", 0.05)


def history(uri: str, run_id: str, name: str) -> list[tuple[int, float]]:
    points = open_client(uri).get_metric_history(run_id, name)
    return sorted((point.step, point.value) for point in points)


@pytest.mark.slow
def test_a_server_killed_and_brought_back_while_a_training_goes_on(server, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    tracker = Tracker("down")
    tracker.start(tmp_path / "run", PARAMS, {"git.dirty": "false"}, DATASET)
    spent = 0.0
    steps = 400
    with tempfile.TemporaryDirectory() as folder:
        for step in range(steps):
            begin = time.perf_counter()
            if step == 100:
                server.kill()
            elif step == 200:  # what training says meanwhile
                tracker.set_tags({"told": "while it was away"})
                tracker.log_final({"test/P@1": 40.0})
                tracker.log_final({"test/P@1": 41.0})
                (Path(folder) / "plot.txt").write_text("as it was")
                tracker.log_files([Path(folder) / "plot.txt"], "plots")
                (Path(folder) / "plot.txt").write_text("overwritten later")
            elif step == 300:
                server.start()
            tracker.log(step, {"training/loss": 1 / (step + 1), "training/epoch": step / 100})
            spent += time.perf_counter() - begin if 100 < step < 300 else 0.0
            time.sleep(0.005)
    # 200 calls and four that send; a refusal that MLflow waits for takes seconds each
    assert spent < 1.0
    tracker.finish()
    run = open_client(server.uri).get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {key: str(value) for key, value in PARAMS.items()}
    assert run.data.tags["told"] == "while it was away"
    assert run.data.tags["git.dirty"] == "false"
    assert history(server.uri, tracker.run_id, "training/loss") == [
        (s, 1 / (s + 1)) for s in range(steps)
    ]
    assert history(server.uri, tracker.run_id, "training/epoch") == [
        (s, s / 100) for s in range(steps)
    ]
    assert history(server.uri, tracker.run_id, "test/P_at_1") == [(0, 40.0), (0, 41.0)]
    assert run.data.metrics["test/P_at_1"] == 41.0, "the newest is shown"
    path = open_client(server.uri).download_artifacts(
        tracker.run_id, "plots/plot.txt", str(tmp_path)
    )
    assert Path(path).read_text() == "as it was"
    assert not is_behind(tmp_path / "run")
    assert not (tmp_path / "run" / "tracking-files").exists()


def test_begun_and_killed_while_the_server_is_away(
    server, proxy, tmp_path, monkeypatch, warm_python
):
    run_dir = tmp_path / "runs" / "one"
    proxy.close()  # nobody listens there any more
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
    with subprocess.Popen(
        [*warm_python, "-c", CHILD, str(run_dir)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
    queued = [
        line for line in (run_dir / "tracking.jsonl").read_bytes().splitlines() if b"loss" in line
    ]
    assert len(queued) > 50
    with (run_dir / "tracking.jsonl").open("ab") as file:
        file.write(b'\n{"step": 99')  # a kill in the middle of a line
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)  # it is back
    assert reconcile_runs([run_dir]) == ["one"]
    assert reconcile_runs([run_dir]) == []
    state = json.loads((run_dir / "tracking.json").read_text())
    run = open_client(server.uri).get_run(state["run_id"])
    assert (
        run.info.status == "KILLED"
        and run.info.run_name == "killed"
        and run.data.params == {"seed": "7"}
    )
    assert run.info.start_time == state["begun"]  # when it began, not when it was sent
    assert run.inputs.dataset_inputs[0].dataset.name == "tiny"
    losses = history(server.uri, state["run_id"], "loss")
    assert losses == [(step, 1.0 / (step + 1)) for step in range(len(losses))]
    assert len(losses) >= len(queued) - 1
    assert history(server.uri, state["run_id"], "test/P_at_1") == [(0, 41.0)]
    path = open_client(server.uri).download_artifacts(
        state["run_id"], "plots/curve.txt", str(tmp_path)
    )
    assert Path(path).read_text() == "seen once"
    assert not is_behind(run_dir) and not (run_dir / "tracking-files").exists()


@pytest.mark.parametrize("seed", range(3))
def test_lost_requests_and_lost_answers_double_nothing(server, proxy, tmp_path, monkeypatch, seed):
    """An answer that is lost leaves the figures stored and the sender in doubt: it sends them
    again.
    """
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
    draw = random.Random(seed)
    steps = 40
    expected = {}
    tracker = None
    for step in range(steps):
        if tracker is None or draw.random() < 0.1:  # another process continues
            proxy.fault = draw.choice(["", "refuse", "answer"])
            tracker = Tracker("down")
            tracker.start(tmp_path / "run", PARAMS, {"a": "b"}, DATASET)
        proxy.fault = draw.choice(["", "", "refuse", "answer"])
        expected[step] = draw.random()
        tracker.log(step, {"loss": expected[step]})
        tracking._ask_again.clear()  # time passes
        tracker.flush()
    proxy.fault = ""
    tracker.finish("FAILED")
    client = open_client(server.uri)
    assert history(server.uri, tracker.run_id, "loss") == list(expected.items())
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FAILED"
    assert len(run.data.params) == len(PARAMS)
    key = run.data.tags["unidec.run_key"]
    assert (
        len(client.search_runs([run.info.experiment_id], f"tags.`unidec.run_key` = '{key}'")) == 1
    )
    assert len(run.inputs.dataset_inputs) == 1


def test_a_server_that_hangs_is_not_waited_for_again_and_again(
    server, proxy, tmp_path, monkeypatch
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
    tracker = Tracker("down")
    tracker.start(tmp_path / "run", {"seed": 0}, {}, DATASET)
    proxy.fault = "hang"
    begin = time.perf_counter()
    asked = proxy.connections
    for step in range(20):
        tracker.log(step, {"loss": float(step)})
        other = Tracker.resume(tmp_path / "run")  # each stage has a tracker of its own
        other.set_tags({"step": str(step)})
        tracker = Tracker.resume(tmp_path / "run")
    assert time.perf_counter() - begin < 15
    assert proxy.connections - asked <= 4
    proxy.fault = ""
    tracker.finish()
    assert history(server.uri, tracker.run_id, "loss") == [
        (step, float(step)) for step in range(20)
    ]
    assert open_client(server.uri).get_run(tracker.run_id).data.tags["step"] == "19"
