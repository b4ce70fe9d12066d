"""Stage fetch: real folders and files; what is there stays whole whatever goes wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from unidec import pipeline
from unidec.config import Params
from unidec.data.formats import read_raw
from unidec.errors import ConfigError, DataError

TABLES = {
    "queries.csv": "id,text,split\nq0,zero,train\nq1,one,train\nq2,two,test\n",
    "labels.csv": "id,text\na,first\nb,second\n",
    "pairs.csv": "query_id,label_id\nq0,a\nq1,b\nq2,a\n",
}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    export = tmp_path / "export"
    export.mkdir()
    for name, text in TABLES.items():
        (export / name).write_text(text)
    return tmp_path


def params_of(**source: object) -> Params:
    return Params.model_validate({"data": {"path": "data/incoming"}, "source": source})


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_folder_is_mirrored_and_its_content_decides(place):
    params = params_of(kind="folder", path="export")
    (place / "export/inner").mkdir()
    (place / "export/inner/more.txt").write_text("more")
    (place / "export/.hidden").write_text("no data")
    done = pipeline.fetch(params)
    assert done.changed and "4 files" in done.reason
    wanted = {name: data for name, data in content(place / "export").items() if name != ".hidden"}
    assert content(place / "data/incoming") == wanted
    before = (place / "data/incoming").stat().st_ino
    for name in TABLES:
        os.utime(place / "export" / name)  # a new time is no new content
    again = pipeline.fetch(params)
    assert not again.changed and again.sha256 == done.sha256
    assert (place / "data/incoming").stat().st_ino == before
    (place / "export/labels.csv").write_text(TABLES["labels.csv"] + "c,third\n")
    (place / "export/inner/more.txt").unlink()
    third = pipeline.fetch(params)
    assert third.changed and third.sha256 != done.sha256
    assert set(content(place / "data/incoming")) == set(TABLES)  # what left the source leaves here
    assert os.listdir(place / "data") == ["incoming"]


@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
def test_three_tables_become_a_data_set(place, ending):
    import gzip

    paths = {}
    for stem in ("queries", "labels", "pairs"):
        path = place / "export" / f"2026-11.{stem.upper()}{ending}"
        data = TABLES[f"{stem}.csv"].encode()
        path.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
        paths[stem] = str(path)
    assert pipeline.fetch(params_of(kind="files", **paths)).changed
    raw = read_raw("data/incoming", "tables")
    assert raw.labels.num_rows == 2
    assert raw.queries["train"].num_rows == 2
    assert not pipeline.fetch(params_of(kind="files", **paths)).changed
    with pytest.raises(ConfigError, match=r"source\.labels"):
        pipeline.fetch(params_of(kind="files", **paths | {"labels": "labels.xlsx"}))
    with pytest.raises(DataError, match=r"gone\.csv: cannot be read"):
        pipeline.fetch(params_of(kind="files", **paths | {"pairs": "gone.csv"}))


def test_a_source_that_is_missing_or_empty_leaves_the_data(place):
    pipeline.fetch(params_of(kind="folder", path="export"))
    before = content(place / "data/incoming")
    with pytest.raises(DataError, match="nowhere: no files found"):
        pipeline.fetch(params_of(kind="folder", path="nowhere"))
    (place / "empty").mkdir()
    with pytest.raises(DataError, match="empty: no files found"):
        pipeline.fetch(params_of(kind="folder", path="empty"))
    assert content(place / "data/incoming") == before


def test_a_source_that_changes_while_it_is_copied_is_no_data(place, monkeypatch):
    pipeline.fetch(params_of(kind="folder", path="export"))
    before = content(place / "data/incoming")
    copy = shutil.copyfile

    def late(source, target):
        if Path(source).name == "pairs.csv":
            Path(source).write_text("query_id,label_id\n")  # the export is still being written
        return copy(source, target)

    (place / "export/labels.csv").write_text(TABLES["labels.csv"] + "c,third\n")
    monkeypatch.setattr(shutil, "copyfile", late)
    with pytest.raises(DataError, match=r"pairs\.csv: the source changed while it was copied"):
        pipeline.fetch(params_of(kind="folder", path="export"))
    assert content(place / "data/incoming") == before
    assert os.listdir(place / "data") == ["incoming"]


def test_files_of_git_are_never_replaced(place):
    subprocess.run(["git", "init", "-q"], check=True)
    (place / "data/incoming").mkdir(parents=True)
    (place / "data/incoming/labels.csv").write_text("id,text\n")
    subprocess.run(["git", "add", "data"], check=True)
    with pytest.raises(ConfigError, match=r"data\.path: git tracks this folder"):
        pipeline.fetch(params_of(kind="folder", path="export"))
    subprocess.run(["git", "rm", "-q", "--cached", "-r", "data"], check=True)
    assert pipeline.fetch(params_of(kind="folder", path="export")).changed


def test_kinds_that_are_not_fetched_here(place):
    assert not pipeline.fetch(Params()).changed
    assert not pipeline.fetch(params_of(kind="dvc", path="data/raw/mine")).changed
