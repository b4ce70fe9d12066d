"""`unidec init --project` and git: DVC's setting core.no_scm follows whether there is a
repository.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from unidec.cli import init
from unidec.cli.init import matches_git, write_project
from unidec.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_project(tmp_path)
    return tmp_path


def local(folder: Path) -> str:
    return (folder / ".dvc" / "config.local").read_text()


def git_init(folder: Path) -> None:
    subprocess.run(["git", "init", "-q", str(folder)], check=True)


def test_after_git_init_the_same_command_removes_the_setting(folder: Path) -> None:
    assert "no_scm = true" in local(folder) and matches_git(folder)
    git_init(folder)
    assert not matches_git(folder)
    assert write_project(folder) == [".dvc/config.local"]
    assert local(folder) == "[core]\n"
    assert matches_git(folder)
    assert write_project(folder) == []


def test_other_local_settings_are_kept(folder: Path) -> None:
    (folder / ".dvc" / "config.local").write_text(
        "[core]\n    remote = team\n    no_scm = true\n['remote \"team\"']\n    password = x\n"
    )
    git_init(folder)
    write_project(folder)
    assert local(folder) == "[core]\n    remote = team\n['remote \"team\"']\n    password = x\n"
    (folder / ".git").rename(folder / "git-moved")
    write_project(folder)
    assert local(folder).startswith("[core]\n    remote = team\n    no_scm = true\n['remote")
    assert local(folder).count("[core]") == 1


def test_the_setting_of_dvc_init_counts(tmp_path: Path) -> None:
    """`dvc init --no-scm` writes it to .dvc/config."""
    shared = tmp_path / ".dvc" / "config"
    shared.parent.mkdir()
    shared.write_text("[core]\n    no_scm = True\n    analytics = false\n")
    assert matches_git(tmp_path)
    git_init(tmp_path)
    assert not matches_git(tmp_path)
    assert ".dvc/config" in write_project(tmp_path)
    assert shared.read_text() == "[core]\n    analytics = false\n" and matches_git(tmp_path)


def test_dvc_accepts_the_result(folder: Path) -> None:
    from dvc.repo import Repo

    Repo(str(folder)).close()
    git_init(folder)
    write_project(folder)
    with Repo(str(folder)) as repo:
        assert type(repo.scm).__name__ == "Git"


def test_a_run_says_which_command_sets_it(folder: Path, monkeypatch) -> None:
    from flows import reproduce
    from unidec.errors import ConfigError

    said: list[str] = []
    monkeypatch.setattr(reproduce.log, "warning", lambda text, *given: said.append(text % given))
    monkeypatch.chdir(folder)
    reproduce.check_repository()
    assert not said
    git_init(folder)
    reproduce.check_repository()
    assert len(said) == 1 and "unidec init --project" in said[0]
    write_project(folder)
    (folder / ".git").rename(folder / "git-moved")
    with pytest.raises(ConfigError, match="unidec init --project"):
        reproduce.check_repository()


def test_a_data_path_that_is_not_there_is_named(tmp_path: Path, capsys, monkeypatch) -> None:
    from typer.testing import CliRunner

    from unidec import cli

    (tmp_path / "raw" / "clinic").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["init", "--data-path", "raw/clinik"])
    assert done.exit_code == 0
    assert "raw/clinik: no such folder" in done.stderr and "nearest: raw/clinic" in done.stderr
    assert CliRunner().invoke(cli.app, ["init", "--data-path", "raw/clinic"]).stderr == ""


def test_an_installation_without_the_files_of_a_project_says_so(
    tmp_path: Path, monkeypatch
) -> None:
    """The image of the server holds no files of a project."""
    (tmp_path / "package").mkdir()
    monkeypatch.setattr(init, "PACKAGE", tmp_path / "package")
    with pytest.raises(ConfigError, match="lacks"):
        write_project(tmp_path / "project")
    assert not list(tmp_path.glob("project/*"))
