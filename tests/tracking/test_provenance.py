"""What a version's tags say of code and data: hashes as DVC has them, dirt only where somebody
edited.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.working_folder import at

from unidec.config import load_params, recorded
from unidec.tracking.provenance import artifact_tags, code_tags, dvc_hash, uncommitted


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with code, parameters and raw data in it."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    run(tmp_path, "git", "init", "-q", "-b", "main")
    write(tmp_path / "unidec/model.py", "x = 1\n")
    write(tmp_path / "README.md", "words\n")
    write(tmp_path / "data/raw/queries.csv", "id,text\n")
    write(tmp_path / "params.yaml", "recipe: unidec\noptim: {epochs: 5}\n")
    write_lock(
        tmp_path,
        {},
        {"data/raw": "7.dir", "data/start.json": "8", "../beside": "9", "/elsewhere": "9"},
    )
    (tmp_path / ".gitignore").write_text(
        "/data/*\n!/data/start.json\n!/data/raw\n/outputs/*\n!/outputs/metrics.json\n"
    )
    commit(tmp_path)
    return tmp_path


def run(folder: Path, *words: str) -> str:
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout


def commit(folder: Path, what: str = "-A") -> None:
    run(folder, "git", "add", what)
    run(
        folder,
        "git",
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.invalid",
        "commit",
        "-q",
        "-m",
        "x",
    )


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_lock(folder: Path, outs: dict[str, str], raw: dict[str, str]) -> None:
    stages = {
        "ingest": {"deps": [{"path": path, "md5": md5} for path, md5 in raw.items()]},
        "other": {"outs": [{"path": path, "md5": md5} for path, md5 in outs.items()]},
    }
    (folder / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": stages}))


def made_with(project: Path) -> dict[str, Any]:
    """What index writes into a bundle: the parameters that decide a result."""
    return recorded(load_params(project / "params.yaml").model_dump())


def test_only_what_decides_a_model_makes_it_dirty(project: Path) -> None:
    clean = at(project, code_tags, made_with=made_with(project))
    assert (
        clean["git.dirty"] == "false"
        and "git.changed" not in clean
        and at(project, uncommitted, clean) == []
    )
    (project / "data/start.json").write_text("{}")
    write(project / "outputs/metrics.json", "{}")
    write(project / "README.md", "other words\n")
    write(project / "predictions.parquet", "untracked")
    write(project / "unidec/untracked.py", "")
    text = (
        "# a comment\nrecipe: unidec\noptim: {epochs: 5}\ngate: {margin: 1.0}\nserve: {port: 1}\n"
    )
    write(project / "params.yaml", text)
    (project / "unidec/model.py").touch()
    assert at(project, code_tags, made_with=made_with(project))["git.dirty"] == "false"
    write(project / "data/raw/queries.csv", "id,text\nq1,a\n")  # has a hash of its own
    (project / "unidec/model.py").write_text("x = 2\n")
    assert at(project, uncommitted, at(project, code_tags)) == ["unidec/model.py"]


def test_parameters_count_by_value_with_their_recipe(project: Path) -> None:
    write(project / "params.yaml", "recipe: unidec\noptim: {epochs: 6}\n")
    assert at(project, code_tags)["git.dirty"] == "false"  # the code alone
    assert at(project, uncommitted, at(project, code_tags, made_with=made_with(project))) == [
        "params.yaml"
    ]
    write(project / "params.yaml", "recipe: depsl\noptim: {epochs: 5}\n")
    assert at(project, uncommitted, at(project, code_tags, made_with=made_with(project))) == [
        "params.yaml"
    ]
    # a trial works in a folder of its own, with absolute paths to the project's models
    trial = project / "runs/own/abc"
    trial.mkdir(parents=True)
    write(
        project / "params.yaml",
        "recipe: unidec\noptim: {epochs: 5}\nencoder: {start: outputs/first}\n",
    )
    commit(project)
    params = made_with(project)
    params["encoder"]["start"] = str(project / params["encoder"]["start"])
    assert at(trial, code_tags, made_with=params)["git.dirty"] == "false"
    params["optim"]["epochs"] = 6
    assert at(project, uncommitted, at(trial, code_tags, made_with=params)) == ["params.yaml"]


def test_what_was_committed_since_is_not_uncommitted_any_more(project: Path) -> None:
    write(project / "unidec/model.py", "from unidec import added\n")
    write(project / "unidec/added.py", "y = 1\n")  # not tracked yet
    write(project / "params.yaml", "recipe: unidec\noptim: {epochs: 6}\n")
    tags = at(project, code_tags, made_with=made_with(project))
    assert at(project, uncommitted, tags) == ["params.yaml", "unidec/model.py"]
    run(project, "git", "stash", "-q")
    # gone from here is not committed
    assert at(project, uncommitted, tags) == ["params.yaml", "unidec/model.py"]
    run(project, "git", "stash", "pop", "-q")
    run(project, "git", "add", "unidec/model.py")
    commit(project, ".")
    assert at(project, uncommitted, tags) == []
    (project / "unidec/model.py").unlink()
    deleted = at(project, code_tags)
    assert at(project, uncommitted, deleted) == ["unidec/model.py"]
    commit(project)
    assert at(project, uncommitted, deleted) == []
    assert at(project, uncommitted, tags) == ["unidec/model.py"]  # another commit, with other code
    assert at(project, uncommitted, {"git.dirty": "true"}) == ["changes that were not recorded"]


def test_where_git_cannot_say_nothing_is_said(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert not {"git.dirty", "mlflow.source.git.commit"} & at(elsewhere, code_tags).keys()
    (project / ".git" / "index").write_bytes(b"damaged")
    assert "git.dirty" not in at(project, code_tags)  # a status that failed is not a clean one


def recorded_by_dvc(folder: Path) -> dict[str, str]:
    """A project whose outputs DVC has recorded in dvc.lock; returns their hashes."""
    run(folder, sys.executable, "-m", "dvc", "init", "-q", "--no-scm")
    write(folder / "data/raw/x", "0")
    for name in ("data/dataset/x", "outputs/model/x", "outputs/bundle/x"):
        write(folder / name, name)
    stages = {
        "ingest": {"cmd": "true", "deps": ["data/raw"], "outs": ["data/dataset"]},
        "other": {"cmd": "true", "outs": ["outputs/model", "outputs/bundle"]},
    }
    write(folder / "dvc.yaml", yaml.safe_dump({"stages": stages}))
    run(folder, sys.executable, "-m", "dvc", "commit", "-q", "--force")
    locked = yaml.safe_load((folder / "dvc.lock").read_text())["stages"].values()
    entries = [
        entry for stage in locked for kind in ("deps", "outs") for entry in stage.get(kind, [])
    ]
    return {entry["path"]: entry["md5"] for entry in entries}


def test_a_tag_never_says_more_than_is_so(tmp_path: Path) -> None:
    assert at(tmp_path, artifact_tags, "data/raw") == {}
    hashes = recorded_by_dvc(tmp_path)
    assert all(md5.endswith(".dir") for md5 in hashes.values())
    assert len(hashes) == 4
    assert at(tmp_path, artifact_tags, "data/raw/") == {
        f"dvc.{path}": md5 for path, md5 in hashes.items()
    }
    shutil.rmtree(tmp_path / "outputs/model")
    kept = {f"dvc.{path}": md5 for path, md5 in hashes.items() if path != "outputs/model"}
    assert at(tmp_path, artifact_tags, "data/raw") == kept | {"dvc.differs": "outputs/model"}
    only = {"dvc.outputs/bundle": hashes["outputs/bundle"]}
    assert at(tmp_path, artifact_tags, "data/raw", only=["outputs/bundle"]) == only
    write(tmp_path / "outputs/bundle/x", "3")
    write(tmp_path / "data/dataset/more", "4")
    assert at(tmp_path, artifact_tags, "data/raw") == {
        "dvc.differs": "data/dataset, outputs/model, outputs/bundle"
    }
    assert at(tmp_path, dvc_hash, "data/dataset") == hashes["data/dataset"]


def test_where_dvc_cannot_say_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_lock(tmp_path, {"data/dataset": "1.dir"}, {"data/raw": "7.dir"})
    assert at(tmp_path, artifact_tags, "data/raw") == {"dvc.differs": "data/dataset"}
    assert "dvc data status" in caplog.text


def test_a_path_that_is_no_name_of_a_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidec.tracking.provenance.changed_outputs", set)
    write_lock(tmp_path, {"data/dataset": "1.dir"}, {"../raw (new)": "7.dir"})
    assert at(tmp_path, artifact_tags, "../raw (new)")["dvc.../raw _new_"] == "7.dir"
