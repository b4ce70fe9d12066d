"""A project that was copied or moved with its store writes below its own folder, and
nowhere else.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest

from unidec.tracking import relocation
from unidec.tracking.registry import check_artifacts
from unidec.tracking.run import Tracker
from unidec.tracking.store import import_mlflow, open_client, prepare_store


def every_file(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def work(project: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """A run with a file, a logged model and a version, made in a project's folder; the run's id."""
    monkeypatch.chdir(project)
    tracker = Tracker("tests")
    run_id = tracker.start(Path("runs", name), {"a": 1})
    assert run_id is not None
    (project / "note.txt").write_text(name)
    tracker.log_files([project / "note.txt"])
    tracker.finish()
    client = open_client(tracker.uri)
    with contextlib.suppress(Exception):
        client.create_registered_model("m")
    place = client.get_run(run_id).info.artifact_uri
    client.create_model_version("m", source=place, run_id=run_id)
    model = client.create_logged_model(
        client.get_run(run_id).info.experiment_id, source_run_id=run_id
    )
    Path(model.artifact_location.removeprefix("file://")).mkdir(parents=True)
    return run_id


def locations(project: Path) -> set[str]:
    with contextlib.closing(sqlite3.connect(project / "mlflow/mlflow.db")) as database:
        found = [
            database.execute(f"SELECT {column} FROM {table}").fetchall()
            for table, column in relocation._LOCATIONS
        ]
    return {str(row[0]) for rows in found for row in rows if row[0]}


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    project = tmp_path / "my original"  # percent-encoded in addresses
    project.mkdir()
    work(project, monkeypatch, "first")
    return project


def test_a_copy_leaves_the_original_alone(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = every_file(original)
    copy = original.with_name("my original (2)")
    shutil.copytree(original, copy)
    run_id = work(copy, monkeypatch, "second")
    assert every_file(original) == before
    assert all(place.startswith(copy.as_uri()) for place in locations(copy))
    stored = copy / "mlflow/artifacts" / run_id / "artifacts/note.txt"
    assert stored.read_text() == "second"
    # and the other way round
    copied = every_file(copy)
    work(original, monkeypatch, "third")
    assert every_file(copy) == copied and all(
        place.startswith(original.as_uri()) for place in locations(original)
    )


def test_a_moved_project_finds_its_files(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = original.with_name("elsewhere")
    original.rename(moved)
    monkeypatch.chdir(moved)
    tracker = Tracker.resume(Path("runs/first"))
    path = open_client(tracker.uri).download_artifacts(str(tracker.run_id), "note.txt")
    assert Path(path).read_text() == "first"
    work(moved, monkeypatch, "second")
    assert not original.exists() and all(
        place.startswith(moved.as_uri()) for place in locations(moved)
    )


def test_a_database_without_its_files_does_not_write_to_the_original(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = every_file(original)
    backup = original.with_name("backup")
    (backup / "mlflow").mkdir(parents=True)
    shutil.copy2(original / "mlflow/mlflow.db", backup / "mlflow/mlflow.db")
    work(backup, monkeypatch, "second")
    assert every_file(original) == before


def test_a_folder_that_was_chosen_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store/mlflow.db"
    uri = prepare_store(f"sqlite:///{store}")
    chosen = tmp_path / "large disk/artifacts"
    chosen.mkdir(parents=True)
    client = open_client(uri)
    client.create_experiment("beside", chosen.as_uri())
    assert open_client(uri).get_experiment_by_name("beside").artifact_location == chosen.as_uri()
    with contextlib.closing(sqlite3.connect(store)) as database, database:
        database.execute("UPDATE experiments SET artifact_location = ?", (chosen.as_uri(),))
    assert open_client(uri).get_experiment("0").artifact_location == chosen.as_uri()
    with contextlib.closing(sqlite3.connect(store)) as database, database:
        database.execute("UPDATE experiments SET artifact_location = 'mlflow-artifacts:/0'")
    assert open_client(uri).get_experiment("0").artifact_location == "mlflow-artifacts:/0"


def test_a_folder_that_was_chosen_and_is_gone_is_refused(tmp_path: Path) -> None:
    uri = prepare_store(f"sqlite:///{tmp_path}/store/mlflow.db")
    client = open_client(uri)
    client.create_experiment("beside", (tmp_path / "disk/of/runs").as_uri())
    with pytest.raises(Exception, match="a folder that no longer exists"):
        check_artifacts(client.get_experiment_by_name("beside"), uri)


def test_one_folder_with_two_paths_is_no_copy(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a bind mount: both sides keep working, without a rewrite at each opening."""
    monkeypatch.setattr(relocation, "_is_same", lambda _folder, _own: True)
    second = original.with_name("mount")
    shutil.copytree(original, second)
    before = locations(second)
    open_client(f"sqlite:///{second}/mlflow/mlflow.db")
    assert locations(second) == before


def test_a_copy_that_cannot_be_written_writes_nowhere(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = every_file(original)
    copy = original.with_name("read only")
    shutil.copytree(original, copy)
    monkeypatch.setattr(relocation, "_is_writable", lambda _: False)  # root may write to any file
    uri = f"sqlite:///{copy}/mlflow/mlflow.db"
    assert [version.version for version in open_client(uri).search_model_versions("name='m'")]
    import_mlflow()
    assert every_file(original) == before
