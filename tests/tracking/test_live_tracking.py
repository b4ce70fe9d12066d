"""Figures are sent while a training runs, by a thread, on a real SQLite store; none is lost or doubled."""

from __future__ import annotations

import threading
import time

import pytest

from unidec.tracking.run import Tracker
from unidec.tracking.store import StoreHealth, open_client, prepare_store


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    return prepare_store(f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db")


@pytest.fixture(autouse=True)
def _as_a_new_process(monkeypatch):
    monkeypatch.setattr(StoreHealth, "_known", {})


def begin(uri, run_dir) -> Tracker:
    tracker = Tracker("live", uri=uri)
    tracker.start(run_dir, {"seed": 0})
    return tracker


def history(uri, tracker, name) -> list[tuple[int, float]]:
    points = open_client(uri).get_metric_history(tracker.run_id, name)
    return sorted((point.step, point.value) for point in points)


def test_figures_arrive_meanwhile_and_from_another_thread(uri, tmp_path, monkeypatch):
    tracker = begin(uri, tmp_path)
    senders, send = set(), tracker._send_outbox
    monkeypatch.setattr(tracker, "_send_outbox", lambda: senders.add(threading.get_ident()) or send())
    with tracker.live(0.05):
        for step in range(40):
            tracker.log(step, {"loss": float(step)})
        end = time.monotonic() + 30
        while len(history(uri, tracker, "loss")) < 40:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert senders and threading.get_ident() not in senders
        tracker.log(40, {"loss": 40.0})
    tracker.finish()
    assert history(uri, tracker, "loss") == [(step, float(step)) for step in range(41)]


def test_a_store_that_hangs_costs_the_caller_nothing_and_loses_nothing(uri, tmp_path, monkeypatch, caplog):
    import unidec.tracking.run as tracking

    tracker = begin(uri, tmp_path)
    asked, free = threading.Event(), threading.Event()

    def hang(_uri):
        asked.set()
        assert free.wait(60)
        raise ConnectionError("timed out")

    with monkeypatch.context() as patch:
        patch.setattr(tracking, "open_client", hang)
        tracker._client = None
        with tracker.live(0.01):
            tracker.log(0, {"loss": 0.0})
            assert asked.wait(30)
            begin_at, waited = time.perf_counter(), time.thread_time()
            for step in range(1, 1001):
                tracker.log(step, {"loss": float(step), "grad_norm": 1.0})
            assert time.thread_time() - waited < 0.5 and time.perf_counter() - begin_at < 5
            free.set()
    assert "is away" in caplog.text
    tracker.finish()
    assert history(uri, tracker, "loss") == [(step, float(step)) for step in range(1001)]


def test_what_a_power_failure_took_is_sent_from_the_records(uri, tmp_path):
    first = begin(uri, tmp_path)
    for step in range(0, 50, 10):
        first.log(step, {"loss": float(step)})
    first.flush(force=True)
    records = [{"step": step, "loss": float(step), "lr": 0.1} for step in range(0, 100, 10)]
    # 50 to 90 never reached the disk; the checkpoint, and so the records, reach to 90
    second = begin(uri, tmp_path)
    second.catch_up(records)
    second.catch_up(records)  # again: nothing is doubled
    for step in range(80, 120, 10):  # and the steps after the checkpoint are repeated
        second.log(step, {"loss": float(step)})
    second.finish("KILLED")
    assert history(uri, second, "loss") == [(step, float(step)) for step in range(0, 120, 10)]
    assert [step for step, _ in history(uri, second, "lr")] == list(range(0, 100, 10))


def test_a_backlog_is_not_waited_for(uri, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    import unidec.tracking.run as tracking

    tracker = begin(uri, tmp_path)
    monkeypatch.setattr(tracking, "_PATIENCE", 0.2)
    log_batch = MlflowClient.log_batch
    monkeypatch.setattr(MlflowClient, "log_batch", lambda *a, **k: time.sleep(0.05) or log_batch(*a, **k))
    monkeypatch.setattr(tracking, "_METRICS_A_BATCH", 10)
    for step in range(500):
        tracker.log(step, {"loss": float(step)})
    begin_at = time.perf_counter()
    assert tracker.flush() is False
    assert time.perf_counter() - begin_at < 2
    assert (tmp_path / "outbox.jsonl").is_file()  # in case this process ends now
    assert tracker.flush() is False  # nothing is asked: it would cost more than 1%
    tracker.finish()
    assert history(uri, tracker, "loss") == [(step, float(step)) for step in range(500)]


def test_records_wait_while_the_store_is_away_once_each(uri, tmp_path, monkeypatch):
    import unidec.tracking.run as tracking

    records = [{"step": step, "loss": float(step)} for step in range(5)]

    def away(_uri):
        raise ConnectionError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(tracking, "open_client", away)
        for _ in range(3):  # one start after the other
            tracker = begin(uri, tmp_path)
            tracker.catch_up(records)
            tracker.flush(force=True)
        assert (tmp_path / "outbox.jsonl").read_text().count("loss") == 5
    later = begin(uri, tmp_path)
    later.finish()
    assert history(uri, later, "loss") == [(step, float(step)) for step in range(5)]


def test_what_is_logged_while_it_is_sent_waits_for_the_next_time(uri, tmp_path, monkeypatch):
    tracker = begin(uri, tmp_path)
    drop = tracker._outbox.drop

    def late(entries, num_bytes):
        tracker.log(2, {"loss": 2.0})
        drop(entries, num_bytes)

    tracker.log(1, {"loss": 1.0})
    with monkeypatch.context() as patch:
        patch.setattr(tracker._outbox, "drop", late)
        assert tracker.flush(force=True)
    assert (tmp_path / "outbox.jsonl").read_text().count("loss") == 1
    tracker.finish()
    assert history(uri, tracker, "loss") == [(1, 1.0), (2, 2.0)]


def test_a_status_from_before_a_resumption_is_not_sent(uri, tmp_path):
    tracker = begin(uri, tmp_path)
    tracker._outbox.add({"status": "KILLED", "at": 1})  # the store was away when it was stopped
    again = begin(uri, tmp_path)
    assert open_client(uri).get_run(again.run_id).info.status == "RUNNING"


def test_a_disk_that_is_full_stops_nothing(uri, tmp_path, monkeypatch, caplog):
    tracker = begin(uri, tmp_path)

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", full)
        tracker.log(0, {"loss": 1.0})
    assert "No space left" in caplog.text


def test_a_checkpoint_names_the_run_that_the_folder_forgot(uri, tmp_path):
    tracker = begin(uri, tmp_path)
    (tmp_path / "tracking.json").unlink()
    again = Tracker("live", uri=uri)
    assert again.start(tmp_path, {"seed": 0}, run_id=tracker.run_id) == tracker.run_id
    third = Tracker("live", uri=uri)  # what the folder notes is newer than any checkpoint
    assert third.start(tmp_path, {"seed": 0}, run_id="gone") == tracker.run_id
