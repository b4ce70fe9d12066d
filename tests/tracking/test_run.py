"""One MLflow run over several processes, on a real SQLite store; and what happens when the store is
not there.
"""

from __future__ import annotations

import contextlib
import json
import subprocess

import pytest
from helpers.working_folder import at

import unidec.tracking.run as tracking
from unidec.metric_names import without_at
from unidec.tracking.provenance import code_tags, dvc_hash
from unidec.tracking.run import Tracker
from unidec.tracking.store import VIEW, open_client, prepare_store, sqlite_path, tracking_uri

PARAMS = {f"section.key{i}": i for i in range(230)} | {"long": "x" * 7000}
DATASET = {
    "name": "tiny",
    "digest": "f" * 64,
    "path": "data/dataset",
    "num_queries": 7,
}


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    return prepare_store(f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow/mlflow.db")


@pytest.fixture
def client(uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr(tracking, "_ask_again", {})
    return open_client(uri)


def begin(run_dir) -> Tracker:
    tracker = Tracker("tests")
    tracker.start(run_dir, PARAMS, {"git.dirty": "false"}, DATASET)
    return tracker


@contextlib.contextmanager
def away(monkeypatch):
    """The store refuses everything; afterwards some time has passed."""

    def refuse(_uri):
        raise ConnectionError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(tracking, "open_client", refuse)
        yield
    tracking._ask_again.clear()


def history(client, tracker, name) -> list[tuple[int, float]]:
    return sorted(
        (point.step, point.value) for point in client.get_metric_history(tracker.run_id, name)
    )


def test_run_holds_parameters_data_set_tags_and_metrics(client, tmp_path):
    tracker = begin(tmp_path / "run")
    for step in range(2500):  # more than MLflow takes in one batch
        tracker.log(step, {"loss": 1 / (step + 1)})
    tracker.log_final({"test/P@1": 41.0})
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "loss.csv").write_text("step,loss\n")
    (tmp_path / "report.html").write_text("<p>")
    tracker.log_files(
        [tmp_path / "plots", tmp_path / "report.html", tmp_path / "missing.html"], "report"
    )
    tracker.finish()
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {key: str(value)[:6000] for key, value in PARAMS.items()}
    assert run.data.metrics["test/P_at_1"] == 41.0
    assert history(client, tracker, "loss") == [(step, 1 / (step + 1)) for step in range(2500)]
    dataset = run.inputs.dataset_inputs[0].dataset
    assert dataset.name == "tiny"
    assert dataset.digest == "f" * 36
    assert json.loads(dataset.profile) == {"num_queries": 7}
    assert json.loads(dataset.source) == {"uri": "data/dataset"}
    assert run.data.tags["git.dirty"] == "false"
    assert run.info.run_name == tracker.run_name == "run"
    experiment = client.get_experiment(run.info.experiment_id)
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{VIEW}"])
    assert "metrics.`test/PSP_at_5`" in view["selectedColumns"]
    paths = {file.path for file in client.list_artifacts(tracker.run_id, "report")}
    assert paths == {
        "report/loss.csv",
        "report/report.html",
    }


def test_another_process_goes_on_with_the_run_and_doubles_nothing(client, tmp_path):
    first = begin(tmp_path)
    for step in range(10):
        first.log(step, {"loss": float(step)})
    first.flush()
    second = begin(tmp_path)  # a resumed training: from its checkpoint at step 5
    assert second.run_id == first.run_id
    for step in range(5, 15):
        second.log(step, {"loss": float(step)})
    second.finish("KILLED")
    assert client.get_run(first.run_id).info.status == "KILLED"
    expected = [(step, float(step)) for step in range(15)]
    assert history(client, first, "loss") == expected
    third = begin(tmp_path)
    assert client.get_run(third.run_id).info.status == "RUNNING"
    later = Tracker.resume(tmp_path)
    later.set_tags({"bundle": "abc"})
    later.log_final({"test/P@1": 1.0})
    later.log_final({"test/P@1": 2.0})  # evaluated again: the newest counts
    run = client.get_run(third.run_id)
    assert run.data.tags["bundle"] == "abc"
    assert run.data.metrics["test/P_at_1"] == 2.0


def test_a_store_that_is_away_stops_nothing_and_gets_everything_later(
    client, tmp_path, monkeypatch, caplog
):
    with away(monkeypatch):
        tracker = begin(tmp_path)
        assert tracker.run_id is None and tracker.url is None
        for step in range(5):
            tracker.log(step, {"loss": float(step)})
        assert not tracker.flush()
    assert caplog.text.count("is unreachable; logs wait in") == 1  # said once
    assert (tmp_path / "tracking.jsonl").stat().st_mode & 0o777 == 0o600
    later = Tracker.resume(tmp_path)  # the process died; another one sends what waits
    later.log(5, {"loss": 5.0})
    later.finish("FAILED")
    expected = [(step, float(step)) for step in range(6)]
    assert history(client, later, "loss") == expected
    run = client.get_run(later.run_id)
    assert run.info.status == "FAILED"
    assert len(run.data.params) == len(PARAMS)
    assert not tracking.is_behind(tmp_path)


def test_figures_arrive_while_a_training_runs(client, tmp_path, monkeypatch):
    pytest.importorskip("psutil")
    monkeypatch.setattr(tracking, "_EVERY", 0.0)
    tracker = begin(tmp_path)
    for step in range(3):
        tracker.log(step, {"loss": float(step)})
        assert len(history(client, tracker, "loss")) == step + 1
    assert "system/cpu_utilization_percentage" in client.get_run(tracker.run_id).data.metrics


def test_another_store_gets_the_whole_history(client, tmp_path, monkeypatch):
    first = begin(tmp_path / "run")
    first.log(0, {"loss": 0.0})
    first.set_tags({"told": "once"})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other/mlflow.db")
    second = begin(tmp_path / "run")
    second.log(1, {"loss": 1.0})
    second.finish()
    other = open_client(tracking_uri())
    expected = [(0, 0.0), (1, 1.0)]
    assert history(other, second, "loss") == expected
    assert second.run_id != first.run_id
    assert other.get_run(second.run_id).data.tags["told"] == "once"


def test_a_status_from_before_a_resumption_is_not_sent(client, tmp_path, monkeypatch):
    tracker = begin(tmp_path)
    with away(monkeypatch):
        tracker._client = None
        tracker.finish("KILLED")
    assert tracking.is_behind(tmp_path)
    again = begin(tmp_path)
    assert client.get_run(again.run_id).info.status == "RUNNING"


def test_a_disk_that_is_full_stops_nothing(client, tmp_path, monkeypatch, caplog):
    tracker = begin(tmp_path)

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", full)
        tracker.log(0, {"loss": 1.0})
    assert "No space left" in caplog.text


def test_a_run_whose_id_got_lost_is_found_again(client, tmp_path):
    """By its key."""
    run_id = begin(tmp_path).run_id
    note = tmp_path / "tracking.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"run_id": None}))
    assert Tracker("tests").start(tmp_path, {"seed": 0}) == run_id


def test_a_deleted_run_and_a_damaged_state_begin_again(client, tmp_path):
    tracker = begin(tmp_path)
    client.delete_run(tracker.run_id)
    again = begin(tmp_path)
    assert again.run_id not in (None, tracker.run_id)
    (tmp_path / "tracking.json").write_text("{")
    assert begin(tmp_path).run_id not in (None, tracker.run_id, again.run_id)


def test_no_run_was_begun(tmp_path):
    tracker = Tracker.resume(tmp_path)
    tracker.log(0, {"loss": 1.0})
    tracker.log_files([tmp_path])
    tracker.set_tags({"a": "b"})
    tracker.finish()
    assert tracker.run_id is None
    assert list(tmp_path.iterdir()) == []


# three processes that are forked with everything imported, and start as one writes to their pipe
STARTED_TOGETHER = """
import os, sqlite3, sys
from unidec.tracking.store import import_mlflow, prepare_store
import_mlflow()
import mlflow.store.tracking.sqlalchemy_store
uri = sys.argv[1]
wait, start = os.pipe()
children = []
for _ in range(3):
    children.append(os.fork())
    if children[-1] == 0:
        os.read(wait, 1)
        prepare_store(uri)
        with sqlite3.connect(uri.removeprefix("sqlite:///")) as database:
            rows = database.execute("select * from alembic_version").fetchall()
        os._exit(len(rows) != 1)
os.write(start, b"...")
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def test_several_first_starts_at_once(tmp_path, warm_python):
    words = [
        *warm_python,
        "-c",
        STARTED_TOGETHER,
        f"sqlite:///{tmp_path}/new/mlflow.db",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[0, 0, 0]\n", done.stderr
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == [
        "mlflow.db",
        "mlflow.db-lock",
    ]


def test_addresses(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert at(tmp_path, tracking_uri) == f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.test:5000")
    assert at(tmp_path, tracking_uri) == "http://tracking.test:5000"
    assert sqlite_path(tracking_uri()) is None
    assert without_at("head/R@10") == "head/R_at_10"


def test_code_tags_and_dvc_hash(tmp_path):
    assert set(at(tmp_path, code_tags)) - {"mlflow.user"} == {
        "unidec.version",
        "mlflow.source.name",
    }
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t.test"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "unidec").mkdir()
    (tmp_path / "unidec" / "code.py").write_text("1\n")
    (tmp_path / "dvc.lock").write_text(
        "schema: '2.0'\nstages:\n  ingest:\n    cmd: x\n    outs:\n    - path: data/dataset\n"
        "      md5: 0ab.dir\n"
    )
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    assert at(tmp_path, code_tags)["git.dirty"] == "false"
    with (tmp_path / "dvc.lock").open("a") as lock:
        lock.write("# rewritten by the pipeline\n")
    tags = at(tmp_path, code_tags)
    assert tags["git.dirty"] == "false"
    assert len(tags["mlflow.source.git.commit"]) == 40
    assert len(tags["dvc.lock.sha256"]) == 64
    (tmp_path / "unidec" / "code.py").write_text("2\n")
    assert at(tmp_path, code_tags)["git.dirty"] == "true"
    assert at(tmp_path, dvc_hash, "data/dataset") == "0ab.dir"
    assert at(tmp_path, dvc_hash, "data/other") is None


@pytest.mark.parametrize("note", [b"[1]", b"3", b'{"run_id": "\xff"}', b'{"run_key": "x"}', b"{"])
def test_a_damaged_note_of_the_run_begins_a_new_one(client, tmp_path, note):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tracking.json").write_bytes(note)
    assert Tracker.resume(tmp_path / "run").run_id is None
    assert Tracker().start(tmp_path / "run", {}) is not None
