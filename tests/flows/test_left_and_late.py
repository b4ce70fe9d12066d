"""Runs whose process was killed, and runs that are late: on a real server, with processes that are really gone."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def flows_():
    import flows.train  # noqa: F401
    from flows import endings, late, left

    return {"left": left, "late": late, "endings": endings}


@pytest.fixture
def left(flows_, tmp_path, monkeypatch):
    monkeypatch.setattr(flows_["left"], "NOTES", tmp_path / "notes")
    return flows_["left"]


@pytest.fixture
def client(prefect_server):
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client


def holder_that_is_gone() -> dict:
    """A process that told of itself and ended."""
    program = "import json; from unidec.tracking.lock_holder import this_process; print(json.dumps(this_process()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_run_of_a_killed_process_is_set_crashed_and_its_training_closed(left, client, monkeypatch):
    from prefect import flow
    from prefect.states import Completed, Running

    @flow(name="unidec-test")
    def nothing() -> None: ...

    closed = []
    monkeypatch.setattr(left, "close_tracking", lambda run_dir, how: closed.append((run_dir, how)))
    killed, ended, alive = (client.create_flow_run(nothing) for _ in range(3))
    for run in (killed, alive):
        client.set_flow_run_state(run.id, Running(), force=True)
    client.set_flow_run_state(ended.id, Completed(), force=True)
    left.NOTES.mkdir()
    gone = holder_that_is_gone()
    here = {"server": left._server(), "run_dir": None}
    for run, holder in ((killed, gone), (ended, gone), (alive, left.this_process())):
        about = here | {"holder": holder, "run_dir": f"runs/{run.name}"}
        (left.NOTES / f"{run.id}.json").write_text(json.dumps(about))
    (left.NOTES / "4711.json").write_text(json.dumps(here | {"holder": gone}))  # it had no flow run
    other = here | {"holder": gone, "server": "http://elsewhere.invalid/api"}  # it alone can say what became of its run
    (left.NOTES / "other.json").write_text(json.dumps(other))
    (left.NOTES / "torn.json").write_text('{"holder": ')

    assert left.reconcile() == [killed.name]
    crashed = client.read_flow_run(killed.id).state
    assert crashed.is_crashed() and "process is gone" in crashed.message
    assert client.read_flow_run(ended.id).state.is_completed() and client.read_flow_run(alive.id).state.is_running()
    assert sorted(closed) == sorted((f"runs/{run.name}", "KILLED") for run in (killed, ended))
    assert {path.stem for path in left.NOTES.iterdir()} == {str(alive.id), "torn", "other"}
    assert left.reconcile() == []


def test_a_server_that_is_away_is_asked_again_the_next_time(left, monkeypatch, caplog):
    left.NOTES.mkdir()
    note = left.NOTES / "7f3a0f9e-0000-0000-0000-000000000000.json"
    about = {"holder": holder_that_is_gone(), "server": left._server(), "run_dir": None}
    note.write_text(json.dumps(about))

    def away(*_args: object, **_options: object) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(left, "_crash", away)
    monkeypatch.setattr(left, "get_client", lambda **_options: __import__("contextlib").nullcontext())
    assert left.reconcile() == [] and note.exists() and "no server" in caplog.text


def test_the_note_of_a_run_says_where_it_is(left):
    with left.noted():
        (note,) = left.NOTES.iterdir()
        left.note_training("runs/abc")
        about = json.loads(note.read_text())
        assert about["run_dir"] == str(Path("runs/abc").resolve()) and about["holder"] == left.this_process()
        left.note_training(None)
        assert json.loads(note.read_text())["run_dir"] is None
    left.note_training("runs/abc")  # nobody would remove it
    assert not list(left.NOTES.iterdir())
    with pytest.raises(KeyboardInterrupt), left.noted():
        raise KeyboardInterrupt
    assert not list(left.NOTES.iterdir())


def test_hooks_end_the_training_that_the_flow_run_was_at(left, flows_, monkeypatch):
    import types

    ended = []
    monkeypatch.setattr(left, "close_tracking", lambda run_dir, how: ended.append((run_dir, how)))
    left.NOTES.mkdir()
    (left.NOTES / "some-id.json").write_text(json.dumps({"run_dir": "runs/abc"}))
    hook = flows_["endings"].hook("KILLED")
    hook(None, types.SimpleNamespace(id="some-id"), None)
    hook(None, types.SimpleNamespace(id="some-id"), None)  # told once
    assert ended == [("runs/abc", "KILLED")]


def test_words_that_nobody_hears_end_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = (
        "import sys, time; {}\n"
        "while sys.stdin.readline():\n"  # told when nobody reads any more
        "    print('1 of 3 batches', flush=True); print('2', file=sys.stderr, flush=True)\n"
        "    open('heard', 'w').close()"
    )
    unheard = "from flows.endings import _Unheard; sys.stdout, sys.stderr = _Unheard(sys.stdout), _Unheard(sys.stderr)"
    assert [speak(program.format(first)) for first in ("", unheard)] == [False, True]


def speak(program: str) -> bool:
    """Whether a program goes on though its words are not read."""
    Path("heard").unlink(missing_ok=True)
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    process.stdout.close()
    process.stderr.close()
    process.stdin.write("speak\n")
    process.stdin.close()
    process.wait(120)
    return Path("heard").exists()


# -- late runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def deployed(client):
    """`deployed(minutes late, by schedule, parameters)`: a run that waits; `deployed.work(run)`: `collapse` in it."""
    from prefect import flow
    from prefect.states import Scheduled

    from flows import late

    told = []

    @flow(name="unidec-late")
    def body(force: bool = False) -> None:
        told.append(late.collapse())

    deployment = client.create_deployment(client.create_flow(body), "late")

    def ask(minutes: float, by_schedule: bool = True, **parameters: bool):
        due = datetime.now(UTC) - timedelta(minutes=minutes)
        run = client.create_flow_run_from_deployment(
            deployment, parameters=parameters, state=Scheduled(scheduled_time=due)
        )
        if by_schedule:  # only the server's scheduler says so of itself
            mark_scheduled(run.id)
        return client.read_flow_run(run.id)

    def work(run):
        from prefect.flow_engine import run_flow

        run_flow(body, flow_run=client.read_flow_run(run.id), return_type="state")
        return told[-1]

    ask.work = work
    ask.state = lambda run: client.read_flow_run(run.id).state
    yield ask
    client.delete_deployment(deployment)


def mark_scheduled(run_id) -> None:
    """In the server's database: `auto_scheduled`."""
    import sqlite3

    from prefect.settings import get_current_settings

    url = get_current_settings().server.database.connection_url.get_secret_value()
    with sqlite3.connect(url.partition("///")[2]) as database:
        database.execute("update flow_run set auto_scheduled = 1 where id = ?", (str(run_id),))
    database.close()


def test_of_ten_late_runs_one_works(deployed):
    late = [deployed(60 * (10 - number)) for number in range(10)]
    future = deployed(-60)
    by_hand, forced = deployed(5, by_schedule=False), deployed(5, force=True)
    assert deployed.work(late[0]) is None
    assert deployed.state(late[0]).is_completed()
    for run in late[1:]:
        state = deployed.state(run)
        assert state.is_cancelled() and f"run {late[0].name} does its work too" in state.message
    for run in (future, by_hand, forced):  # not due, asked for by a person, asked for something else
        assert deployed.state(run).is_scheduled()


def test_a_run_whose_work_was_done_after_it_was_due_does_nothing(deployed):
    first, second = deployed(10, by_schedule=False), deployed(20)
    assert deployed.work(first) is None
    assert "has done its work" in deployed.work(second)
    again = deployed(0, by_schedule=False)
    assert deployed.work(again) is None  # a person knows what they want
