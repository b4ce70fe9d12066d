"""Git that does not answer: what made a version is unknown then, which is not clean."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.working_folder import at

from unidec.tracking import repository
from unidec.tracking.provenance import code_tags, is_clean, uncommitted, unknown_code

GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.invalid")


def run(folder: Path, *words: str) -> None:
    subprocess.run([*GIT, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    (tmp_path / "unidec").mkdir()
    (tmp_path / "unidec/model.py").write_text("x = 1\n")
    (tmp_path / "params.yaml").write_text("recipe: unidec\n")
    for words in (
        ["init", "-q", "-b", "main"],
        ["add", "-A"],
        ["commit", "-q", "-m", "one"],
    ):
        run(tmp_path, *words)
    return tmp_path


def program(folder: Path, text: str) -> str:
    """A PATH with this program as git."""
    folder.mkdir()
    (folder / "git").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "git").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def another_user(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")


def no_git(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project))


def hanging(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", program(project / "bin", "exec sleep 20"))
    monkeypatch.setattr(repository, "_TIMEOUT_S", 0.3)


def damaged_index(project: Path, _: pytest.MonkeyPatch) -> None:
    (project / ".git/index").write_bytes(b"damaged")


def damaged_head(project: Path, _: pytest.MonkeyPatch) -> None:
    (project / ".git/HEAD").write_text("")


def lost_main_repository(project: Path, _: pytest.MonkeyPatch) -> None:
    """A worktree in a container that does not have the repository it belongs to."""
    (project / ".git").rename(project / "moved")
    (project / ".git").write_text("gitdir: /nowhere/.git/worktrees/one\n")


def file_system(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "echo 'fatal: not a git repository (or any parent up to mount point /)' >&2; exit 128"
    monkeypatch.setenv("PATH", program(project / "bin", text))


CASES: dict[Callable[[Path, pytest.MonkeyPatch], None], str] = {
    another_user: "git config --global --add safe.directory",
    no_git: "install git",
    hanging: "timed out after",
    damaged_index: "index file",
    damaged_head: "not a git repository",
    lost_main_repository: "not a git repository: /nowhere",
    file_system: "mount point",
}


@pytest.mark.parametrize("fault", CASES)
def test_what_git_does_not_tell_is_unknown_with_its_own_fix(
    fault: Callable[[Path, pytest.MonkeyPatch], None],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert is_clean(at(project, code_tags))
    assert at(project, code_tags)["git.dirty"] == "false"
    fault(project, monkeypatch)
    tags = at(project, code_tags)
    assert "git.dirty" not in tags and not is_clean(tags)
    assert CASES[fault] in unknown_code(tags), tags
    trial = project / "runs/own/abc"
    trial.mkdir(parents=True)
    assert unknown_code(at(trial, code_tags)), "also in a trial's folder"


def test_no_repository_is_not_unknown(tmp_path: Path) -> None:
    tags = at(tmp_path, code_tags)
    assert is_clean(tags) and not unknown_code(tags) and "git.dirty" not in tags


def test_a_repository_without_a_commit_has_everything_uncommitted(tmp_path: Path) -> None:
    run(tmp_path, "init", "-q")
    tags = at(tmp_path, code_tags)
    assert not is_clean(tags) and not unknown_code(tags)
    assert at(tmp_path, uncommitted, tags) == ["every file"]


def test_a_shallow_and_an_exported_tree(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (project / "unidec/model.py").write_text("x = 2\n")
    run(project, "commit", "-qam", "two")
    shallow = tmp_path_factory.mktemp("clones") / "shallow"
    run(project, "clone", "-q", "--depth", "1", f"file://{project}", str(shallow))
    assert is_clean(at(shallow, code_tags))
    assert at(shallow, code_tags)["git.dirty"] == "false"
    exported = shallow.with_name("exported")
    exported.mkdir()
    run(project, "archive", "--output", str(exported / "it.tar"), "HEAD")
    subprocess.run(["tar", "xf", "it.tar"], cwd=exported, check=True)
    assert not repository.is_inside(exported) and is_clean(at(exported, code_tags))


def test_init_does_not_take_a_silent_repository_for_none(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unidec.cli.init import write_project

    another_user(project, monkeypatch)
    assert ".dvc/config.local" not in write_project(project)
    no_git(project, monkeypatch)
    assert ".dvc/config.local" not in write_project(project)
