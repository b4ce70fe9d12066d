"""Fault 15: an object of DVC's remote is missing or damaged: the path is named, before anything is trained."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from unidec.config import Params
from unidec.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def source():
    from flows import source

    return source


@pytest.fixture(scope="module")
def pushed(tmp_path_factory) -> Path:
    """work/: a project with data of two files that DVC tracks, none of them there; remote/: where they were pushed."""
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


def params_of(**source: object) -> Params:
    return Params.model_validate({"data": {"path": "data/mine"}, "source": {"kind": "dvc", **source}})


def stored(work: Path, content: bytes | None) -> Path:
    """The remote's object with this content; None: the listing of the folder."""
    objects = [path for path in (work.parent / "remote").rglob("*") if path.is_file()]
    if content is None:
        return next(path for path in objects if path.name.endswith(".dir"))
    return next(path for path in objects if path.read_bytes() == content)


def test_a_damaged_object_is_named_and_mending_the_remote_is_enough(source, project):
    there = stored(project, b"hello")
    os.chmod(there, there.stat().st_mode | stat.S_IWUSR)
    there.write_bytes(b"hellO")
    said: list[str] = []
    with pytest.raises(DataError, match=r"data/mine/a\.txt: not the data that DVC recorded"):
        source.fetch(params_of(path="data/mine"), said.append)
    there.write_bytes(b"hello")
    done = source.fetch(params_of(path="data/mine.dvc"), said.append)
    assert (project / "data/mine/a.txt").read_text() == "hello"
    assert not done["changed"] and done["source"] == "data/mine.dvc" and said


@pytest.mark.parametrize("content", [b"world", None], ids=["a file", "the listing"])
def test_a_missing_object_is_named(source, project, content):
    there = stored(project, content)
    there.rename(project.parent / "away")
    with pytest.raises(DataError) as caught:
        source.fetch(params_of(path="data/mine"), lambda _line: None)
    assert "data/mine.dvc" in str(caught.value) and "nothing was trained" in str(caught.value)
    if content is not None:
        assert there.parent.name + there.name in str(caught.value)
    (project.parent / "away").rename(there)
    source.fetch(params_of(path="data/mine"), lambda _line: None)
    assert sorted(os.listdir(project / "data/mine")) == ["a.txt", "b.txt"]


def test_no_such_target(source, project):
    with pytest.raises(ConfigError, match=r"source\.path: no such file of DVC"):
        source.fetch(params_of(path="data/other"), lambda _line: None)


def test_an_import_is_updated(source, project):
    export = project.parent / "export.csv"
    export.write_text("one\n")
    dvc("import-url", "-q", str(export), "data/export.csv")
    params = params_of(path="data/export.csv")
    assert not source.fetch(params, lambda _line: None)["changed"]
    export.write_text("one\ntwo\n")
    done = source.fetch(params, lambda _line: None)
    assert done["changed"] and (project / "data/export.csv").read_text() == "one\ntwo\n"
    export.unlink()
    with pytest.raises(DataError, match=r"data/export\.csv\.dvc"):
        source.fetch(params, lambda _line: None)
