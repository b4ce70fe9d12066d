"""One MLflow run over several processes, on a real SQLite store; and what happens when the store is not there."""

from __future__ import annotations

import json
import multiprocessing
import sqlite3
import subprocess

import pytest

from unidec.tracking.provenance import code_tags, dvc_hash
from unidec.tracking.run import Tracker, metric_name
from unidec.tracking.store import artifact_location, prepare_store, sqlite_path, tracking_uri

PARAMS = {f"section.key{i}": i for i in range(230)} | {"long": "x" * 7000}
DATASET = {"name": "tiny", "digest": "f" * 64, "path": "data/dataset", "num_queries": 7}


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    return prepare_store(f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow/mlflow.db")


@pytest.fixture
def client(uri):
    from unidec.tracking.store import open_client

    return open_client(uri)


def begin(uri, run_dir) -> Tracker:
    tracker = Tracker("tests", uri=uri)
    tracker.start(run_dir, PARAMS, {"git.dirty": "false"}, DATASET)
    return tracker


def history(client, tracker, name) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(tracker.run_id, name))


def test_run_holds_parameters_data_set_tags_and_metrics(uri, client, tmp_path):
    tracker = begin(uri, tmp_path / "run")
    for step in range(2500):  # more than MLflow takes in one batch
        tracker.log(step, {"loss": 1 / (step + 1)})
    tracker.log_final({"test/P@1": 41.0})
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "loss.csv").write_text("step,loss\n")
    (tmp_path / "report.html").write_text("<p>")
    tracker.log_files([tmp_path / "plots", tmp_path / "report.html", tmp_path / "missing.html"], "report")
    tracker.finish()
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {key: str(value)[:6000] for key, value in PARAMS.items()}
    assert run.data.metrics["test/P_at_1"] == 41.0
    assert history(client, tracker, "loss") == [(step, 1 / (step + 1)) for step in range(2500)]
    dataset = run.inputs.dataset_inputs[0].dataset
    assert (dataset.name, dataset.digest, json.loads(dataset.profile)) == ("tiny", "f" * 36, {"num_queries": 7})
    assert json.loads(dataset.source) == {"uri": "data/dataset"}
    assert run.data.tags["git.dirty"] == "false" and run.info.run_name == "run"
    assert {file.path for file in client.list_artifacts(tracker.run_id, "report")} == {
        "report/loss.csv",
        "report/report.html",
    }


def test_another_process_goes_on_with_the_run_and_doubles_nothing(uri, client, tmp_path):
    first = begin(uri, tmp_path)
    for step in range(10):
        first.log(step, {"loss": float(step)})
    first.flush(force=True)
    second = begin(uri, tmp_path)  # a resumed training: from its checkpoint at step 5
    assert second.run_id == first.run_id
    for step in range(5, 15):
        second.log(step, {"loss": float(step)})
    second.finish("KILLED")
    assert client.get_run(first.run_id).info.status == "KILLED"
    assert history(client, first, "loss") == [(step, float(step)) for step in range(15)]
    third = begin(uri, tmp_path)
    assert client.get_run(third.run_id).info.status == "RUNNING"
    later = Tracker.resume(tmp_path)
    later.set_tags({"bundle": "abc"})
    later.log_final({"test/P@1": 1.0})
    later.log_final({"test/P@1": 2.0})  # evaluated anew: the newest counts
    run = client.get_run(third.run_id)
    assert run.data.tags["bundle"] == "abc" and run.data.metrics["test/P_at_1"] == 2.0


def test_a_store_that_is_away_stops_nothing_and_gets_everything_later(uri, client, tmp_path, monkeypatch, caplog):
    import unidec.tracking.run as tracking

    def away(_uri):
        raise ConnectionError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(tracking, "open_client", away)
        tracker = begin(uri, tmp_path)
        assert tracker.run_id is None and tracker.url is None
        for step in range(5):
            tracker.log(step, {"loss": float(step)})
        with tracker.system_metrics():
            pass
        tracker.flush(force=True)
    assert caplog.text.count("is away; what is logged waits in") == 1  # said once
    assert len((tmp_path / "outbox.jsonl").read_text().split()) > 5
    assert (tmp_path / "outbox.jsonl").stat().st_mode & 0o777 == 0o600
    later = Tracker.resume(tmp_path)  # the process died; another one sends what waits
    later.log(5, {"loss": 5.0})
    later.finish("FAILED")
    assert history(client, later, "loss") == [(step, float(step)) for step in range(6)]
    run = client.get_run(later.run_id)
    assert run.info.status == "FAILED" and len(run.data.params) == len(PARAMS)
    assert not (tmp_path / "outbox.jsonl").exists()


def test_a_run_whose_id_got_lost_is_found_again(uri, tmp_path):
    tracker = begin(uri, tmp_path)
    state = json.loads((tmp_path / "tracking.json").read_text())
    (tmp_path / "tracking.json").write_text(json.dumps(state | {"run_id": None}))
    assert begin(uri, tmp_path).run_id == tracker.run_id


def test_a_deleted_run_and_a_damaged_state_begin_anew(uri, client, tmp_path):
    tracker = begin(uri, tmp_path)
    client.delete_run(tracker.run_id)
    again = begin(uri, tmp_path)
    assert again.run_id not in (None, tracker.run_id)
    (tmp_path / "tracking.json").write_text("{")
    assert begin(uri, tmp_path).run_id not in (None, tracker.run_id, again.run_id)


def test_no_run_was_begun(tmp_path):
    tracker = Tracker.resume(tmp_path)
    tracker.log(0, {"loss": 1.0})
    tracker.log_files([tmp_path])
    tracker.set_tags({"a": "b"})
    tracker.finish()
    assert tracker.run_id is None and list(tmp_path.iterdir()) == []


def test_system_metrics_are_sampled(uri, client, tmp_path, monkeypatch):
    pytest.importorskip("psutil")
    import time

    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    tracker = begin(uri, tmp_path)
    with tracker.system_metrics():
        time.sleep(1.5)
    tracker.flush(force=True)
    assert "system/cpu_utilization_percentage" in client.get_run(tracker.run_id).data.metrics


def _start_together(barrier, uri: str, results) -> None:
    barrier.wait()
    prepare_store(uri)
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as database:
        results.put(len(database.execute("select * from alembic_version").fetchall()))
    database.close()


def test_several_first_starts_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    processes = [context.Process(target=_start_together, args=(barrier, uri, results)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert [results.get(timeout=5) for _ in processes] == [1, 1, 1]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["mlflow.db", "mlflow.db-lock"]


def test_addresses(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    assert artifact_location(tracking_uri(tmp_path)) == (tmp_path / "mlflow" / "artifacts").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.test:5000")
    assert tracking_uri(tmp_path) == "http://tracking.test:5000"
    assert artifact_location(tracking_uri()) is None and sqlite_path(tracking_uri()) is None
    assert metric_name("head/R@10") == "head/R_at_10"


def test_code_tags_and_dvc_hash(tmp_path):
    assert set(code_tags(tmp_path)) - {"mlflow.user"} == {"unidec.version", "mlflow.source.name"}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t.test"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "unidec").mkdir()
    (tmp_path / "unidec" / "code.py").write_text("1\n")
    (tmp_path / "dvc.lock").write_text(
        "schema: '2.0'\nstages:\n  ingest:\n    cmd: x\n    outs:\n    - path: data/dataset\n      md5: 0ab.dir\n"
    )
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    assert code_tags(tmp_path)["git.dirty"] == "false"
    with (tmp_path / "dvc.lock").open("a") as lock:
        lock.write("# rewritten by the pipeline\n")
    tags = code_tags(tmp_path)
    assert tags["git.dirty"] == "false" and len(tags["mlflow.source.git.commit"]) == 40
    assert len(tags["dvc.lock.sha256"]) == 64
    (tmp_path / "unidec" / "code.py").write_text("2\n")
    assert code_tags(tmp_path)["git.dirty"] == "true"
    assert dvc_hash("data/dataset", tmp_path) == "0ab.dir"
    assert dvc_hash("data/other", tmp_path) is None and dvc_hash("x", tmp_path / "none") is None


@pytest.mark.parametrize("note", [b"[1]", b"3", b'{"run_id": "\xff"}', b'{"run_key": "x"}', b"{"])
def test_a_damaged_note_of_the_run_begins_a_new_one(uri, tmp_path, note):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tracking.json").write_bytes(note)
    assert Tracker.resume(tmp_path / "run").run_id is None
    assert Tracker(uri=uri).start(tmp_path / "run", {}) is not None
