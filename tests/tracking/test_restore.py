"""The commit that restores a version: the one with its dvc.lock, wherever it is in the history."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.working_folder import at

from unidec.config import load_params, recorded
from unidec.tracking.provenance import code_tags
from unidec.tracking.restore import restore_point


class Project:
    """A repository with code, parameters and a lock file, possibly in a folder below its root."""

    def __init__(self, root: Path, below: str) -> None:
        self.root = root
        self.folder = root / below
        (self.folder / "unidec").mkdir(parents=True)
        self.git("init", "-q", "-b", "main")
        self.write("params.yaml", "recipe: unidec\noptim: {epochs: 5}\n")
        self.write("unidec/model.py", "x = 1\n")
        self.write("dvc.lock", "data: one\n")

    def git(self, *words: str) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid", *words]
        return subprocess.run(
            command, cwd=self.root, check=True, capture_output=True, text=True
        ).stdout.strip()

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def commit(self, *names: str) -> str:
        self.git("add", *(str(self.folder / name) for name in names or (".",)))
        self.git("commit", "-q", "--allow-empty", "-m", "x")
        return self.git("rev-parse", "HEAD")

    def tags(self) -> dict[str, str]:
        made_with = recorded(load_params(self.folder / "params.yaml").model_dump())
        return at(self.folder, code_tags, made_with=made_with)

    def point(self, tags: dict[str, str]) -> tuple[Any, list[str]]:
        found = at(self.folder, restore_point, tags, "run1")
        return found.commit, found.missing


@pytest.fixture(params=["", "below/it"])
def project(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Project:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    return Project(tmp_path, request.param)


def test_a_lock_that_was_committed_later(project: Project) -> None:
    """Also if further trainings, and commits on other branches, followed."""
    project.commit()
    project.write("dvc.lock", "data: two\n")
    tags = project.tags()
    assert tags["git.dirty"] == "false"
    commit, missing = project.point(tags)
    assert commit == tags["mlflow.source.git.commit"]
    assert missing == [
        "its dvc.lock is in no commit here; MLflow run run1 keeps it as made_of/dvc.lock"
    ]
    later = project.commit()
    assert project.point(tags) == (later, [])
    project.git("checkout", "-q", "-b", "other")
    project.write("dvc.lock", "data: three\n")
    project.commit()
    assert project.point(tags) == (later, [])


def test_uncommitted_changes_that_were_committed_with_the_lock_or_after_it(
    project: Project,
) -> None:
    first = project.commit()
    project.write("unidec/model.py", "x = 2\n")
    project.write("params.yaml", "recipe: unidec\noptim: {epochs: 6}\n")
    project.write("dvc.lock", "data: two\n")
    tags = project.tags()
    assert tags["git.dirty"] == "true" and tags["mlflow.source.git.commit"] == first
    only_lock = project.commit("dvc.lock")
    commit, missing = project.point(tags)
    assert commit == only_lock
    assert missing == [
        "other code or parameters than it was made with: params.yaml, unidec/model.py"
    ]
    everything = project.commit()
    assert project.point(tags) == (everything, [])
    project.write("unidec/model.py", "x = 3\n")
    project.commit()
    assert project.point(tags) == (everything, [])


def test_a_lock_that_was_never_committed(project: Project) -> None:
    first = project.commit()
    project.write("dvc.lock", "data: two\n")
    project.write("unidec/model.py", "x = 2\n")
    tags = project.tags()
    project.write("dvc.lock", "data: three\n")
    project.commit()
    commit, missing = project.point(tags)
    assert (
        commit == first
        and len(missing) == 2
        and "in no commit" in missing[0]
        and "model.py" in missing[1]
    )


def test_what_cannot_be_known_is_not_claimed(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.commit()
    tags = project.tags()
    assert project.point(tags | {"mlflow.source.git.commit": "f" * 40}) == ("f" * 40, [])
    del tags["dvc.lock.sha256"]
    assert project.point(tags) == (tags["mlflow.source.git.commit"], [])
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert project.point(tags) == (tags["mlflow.source.git.commit"], [])
    assert at(project.folder, restore_point, {}, None).commit is None
