"""Fault 15: an object of DVC's remote is missing or damaged: the path is named, before anything is
trained.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from unidec.config import Source
from unidec.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def fetch():
    from flows import reproduce

    return reproduce.fetch


@pytest.fixture(scope="module")
def pushed(tmp_path_factory) -> Path:
    """work/: a project with data of two files that DVC tracks, none of them there; remote/: where
    they were pushed.
    """
    root = tmp_path_factory.mktemp("pushed")
    work = root / "work"
    (work / "data/mine").mkdir(parents=True)
    (work / "data/mine/a.txt").write_text("hello")
    (work / "data/mine/b.txt").write_text("world")
    with contextlib.chdir(work):
        dvc("init", "--no-scm", "-q")
        dvc("remote", "add", "-q", "-d", "there", "../remote")
        dvc("add", "-q", "data/mine")
        dvc("push", "-q")
    shutil.rmtree(work / "data/mine")
    shutil.rmtree(work / ".dvc/cache")
    return root


@pytest.fixture
def project(pushed, tmp_path, monkeypatch) -> Path:
    """A fresh clone."""
    shutil.copytree(pushed, tmp_path / "all")
    monkeypatch.chdir(tmp_path / "all" / "work")
    return tmp_path / "all" / "work"


def dvc(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", *words], check=True, timeout=120)


def source_of(path: str) -> Source:
    return Source(kind="dvc", path=path)


def verified(project: Path) -> None:
    """As in the projects that we write: DVC is not asked about it."""
    config = project / ".dvc/config"
    config.write_text(config.read_text() + "    verify = true\n")


def stored(work: Path, content: bytes | None) -> Path:
    """The remote's object with this content; None: the listing of the folder."""
    objects = [path for path in (work.parent / "remote").rglob("*") if path.is_file()]
    if content is None:
        return next(path for path in objects if path.name.endswith(".dir"))
    return next(path for path in objects if path.read_bytes() == content)


def test_a_damaged_object_is_named_and_mending_the_remote_is_enough(fetch, project):
    there = stored(project, b"hello")
    os.chmod(there, there.stat().st_mode | stat.S_IWUSR)
    there.write_bytes(b"hellO")
    with pytest.raises(
        DataError, match=r"(?s)data/mine\.dvc: DVC cannot fetch this data.*data/mine"
    ):
        fetch(source_of(path="data/mine"))
    there.write_bytes(b"hello")
    assert fetch(source_of(path="data/mine.dvc")) == "dvc pull --force data/mine.dvc"
    assert (project / "data/mine/a.txt").read_text() == "hello"


@pytest.mark.parametrize("content", [b"world", None], ids=["a file", "the listing"])
def test_a_missing_object_is_named(fetch, project, content):
    verified(project)
    there = stored(project, content)
    there.rename(project.parent / "away")
    with pytest.raises(DataError) as caught:
        fetch(source_of(path="data/mine"))
    assert "data/mine.dvc" in str(caught.value)
    assert "nothing was trained" in str(caught.value)
    if content is not None:
        assert there.parent.name + there.name in str(caught.value)
    (project.parent / "away").rename(there)
    fetch(source_of(path="data/mine"))
    assert sorted(os.listdir(project / "data/mine")) == ["a.txt", "b.txt"]


def test_no_such_target(fetch, project):
    with pytest.raises(ConfigError, match=r"source\.path: no such \.dvc file"):
        fetch(source_of(path="data/other"))


def test_an_import_is_updated(fetch, project):
    verified(project)
    export = project.parent / "export.csv"
    export.write_text("one\n")
    dvc("import-url", "-q", str(export), "data/export.csv")
    described = source_of(path="data/export.csv")
    fetch(described)
    export.write_text("one\ntwo\n")
    fetch(described)
    assert (project / "data/export.csv").read_text() == "one\ntwo\n"
    export.unlink()
    with pytest.raises(DataError, match=r"data/export\.csv\.dvc"):
        fetch(described)
