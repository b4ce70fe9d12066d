"""What a retraining tells: commits in real repositories, events, people; no failure of it stops a
run.
"""

from __future__ import annotations

import logging
import subprocess
import types
from pathlib import Path

import pytest

from unidec.config import Params
from unidec.errors import UnidecError


@pytest.fixture(scope="module")
def publish():
    from flows import publish

    return publish


def test_what_a_task_returned_as_heads_that_people_read(publish, monkeypatch):
    made = []
    monkeypatch.setattr(publish, "create_table_artifact", lambda rows, **_: made.append(rows))
    monkeypatch.setattr(publish.FlowRunContext, "get", lambda: object())
    result = {"metrics": {"P@1": 50.123456}, "page": Path("a/b.html"), "steps": ["a"]}
    publish.show_task("evaluate", result)
    publish.show_task("fetch", "https://user:secret@host/x")
    publish.show_task("record", None)
    told = [[(row["what"], row["value"]) for row in rows] for rows in made]
    assert told == [
        [("metrics.P@1", "50.12"), ("page", "a/b.html"), ("steps", "['a']")],
        [("result", "https://host/x")],
    ]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("train round 3 of 3", "train"),
        ("gate of version 7", "gate"),
        ("promote version 12", "promote"),
        ("mine 1 of 3", "mine"),
        ("dvc push", "dvc-push"),
        ("label_graph", "label-graph"),
    ],
)
def test_the_same_task_has_one_key(publish, monkeypatch, name, key):
    made = []
    monkeypatch.setattr(
        publish, "create_table_artifact", lambda rows, **named: made.append((rows, named))
    )
    publish.show_task(name, {"a": 1})  # outside of a flow run
    monkeypatch.setattr(publish.FlowRunContext, "get", lambda: object())
    publish.show_task(name, None)
    publish.show_task(name, {str(i): i for i in range(100)})
    ((rows, named),) = made
    assert (
        len(rows) == 60
        and rows[1] == {"what": "1", "value": "1"}
        and named == {"key": key, "description": name}
    )


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    git("init", "-q", "-b", "main")
    git("config", "user.name", "somebody")
    git("config", "user.email", "somebody@example.org")
    for name in ("data", "outputs/plots"):
        Path(name).mkdir(parents=True)
    Path("code.py").write_text("1")
    Path("dvc.lock").write_text("old")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return tmp_path


@pytest.fixture
def tagged(publish, monkeypatch) -> list[tuple]:
    tags: list[tuple] = []
    client = types.SimpleNamespace(set_model_version_tag=lambda *told: tags.append(told))
    monkeypatch.setattr(publish, "open_client", lambda: client)
    return tags


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def params_of(commit: str = "commit", **retrain: object) -> Params:
    return Params.model_validate({"retrain": {"commit": commit, **retrain}})


def retrained() -> None:
    for name, text in {
        "dvc.lock": "new",
        "data/start.json": "{}",
        "outputs/metrics.json": "{}",
    }.items():
        Path(name).write_text(text)
    Path("outputs/plots/training.csv").write_text("step,loss\n")


def test_only_what_was_recorded_is_committed(publish, repository, tagged):
    retrained()
    Path("code.py").write_text("2")  # somebody's edit, and a file of theirs
    Path("notes.txt").write_text("mine")
    Path("data/mine.dvc").write_text("outs: []")
    done = publish.commit(params_of("tag"), 7, "champion", ["data/mine.dvc"])
    assert done == {"commit": git("rev-parse", "HEAD"), "tag": "unidec-v7"}
    names = set(git("show", "--name-only", "--format=", "HEAD").splitlines())
    assert names == {
        "dvc.lock",
        "data/start.json",
        "data/mine.dvc",
        "outputs/metrics.json",
        "outputs/plots/training.csv",
    }
    assert git("log", "-1", "--format=%s %an") == "Retrain: version 7 of unidec, champion somebody"
    assert git("rev-list", "-n1", "unidec-v7") == done["commit"]
    assert git("status", "--porcelain").splitlines() == ["M code.py", "?? notes.txt"]
    assert tagged == [("unidec", "7", "git.lock_commit", done["commit"])]


def test_again_changes_nothing(publish, repository, tagged):
    retrained()
    first = publish.commit(params_of("tag"), 7, "champion")
    assert publish.commit(params_of("tag"), 7, "champion") == first
    assert git("rev-list", "--count", "HEAD") == "2"


def test_states_in_which_nothing_is_committed(publish, repository, tagged, tmp_path, monkeypatch):
    retrained()
    git("checkout", "-q", "--detach")
    with pytest.raises(UnidecError, match="no branch is checked out"):
        publish.commit(params_of(), 7, "champion")
    git("checkout", "-q", "main")
    (repository / ".git/MERGE_HEAD").write_text(git("rev-parse", "HEAD"))
    with pytest.raises(UnidecError, match=r"git commit: .*merge"):
        publish.commit(params_of(), 7, "champion")
    (repository / ".git/MERGE_HEAD").unlink()
    assert git("rev-list", "--count", "HEAD") == "1"
    assert git("diff", "--cached", "--name-only") == ""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(UnidecError, match=r"git branch: .*not a git repository"):
        publish.commit(params_of(), 7, "champion")


def test_what_somebody_else_staged_stays_staged(publish, repository, tagged):
    retrained()
    Path("code.py").write_text("2")
    git("add", "code.py")
    publish.commit(params_of(), 7, "champion")
    assert "code.py" not in git("show", "--name-only", "--format=", "HEAD")
    assert git("diff", "--cached", "--name-only") == "code.py"


def test_a_registry_that_is_away_costs_a_warning(publish, repository, monkeypatch, caplog):
    def away(*_told: object) -> None:
        raise ConnectionError("the registry is away")

    monkeypatch.setattr(publish, "open_client", away)
    retrained()
    with caplog.at_level(logging.WARNING):
        commit = publish.commit(params_of(), 7, "champion")["commit"]
        assert commit == git("rev-parse", "HEAD")
    assert "the registry is away" in caplog.text


def test_an_event_that_cannot_be_sent_stops_nothing(publish, monkeypatch, caplog):
    def away(**_told: object) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(publish, "emit_event", away)
    monkeypatch.setattr(publish, "current_flow_run", types.SimpleNamespace(id="one"))
    with caplog.at_level(logging.WARNING):
        publish.emit("unidec", "skipped", {})
    assert "no server" in caplog.text
