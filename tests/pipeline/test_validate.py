"""The stages `ingest` and `validate`: what stops before training, by which key, and where the row
is.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from unidec import pipeline
from unidec.config import load_params
from unidec.data.spool import BLOCK_ROWS, Numbers
from unidec.errors import ArtifactError, DataError
from unidec.pipeline import paths


@pytest.fixture
def one_empty_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """600 queries, of which one has an empty text."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "raw" / "mine"
    folder.mkdir(parents=True)
    texts = ["" if row == 41 else f"words of query {row}" for row in range(600)]
    (folder / "queries.csv").write_text(
        "id,text\n" + "".join(f"q{row},{text}\n" for row, text in enumerate(texts))
    )
    (folder / "labels.csv").write_text(
        "id,text\n" + "".join(f"l{row},label {row}\n" for row in range(20))
    )
    (folder / "pairs.csv").write_text(
        "query_id,label_id\n" + "".join(f"q{row},l{row % 20}\n" for row in range(600))
    )
    return folder


def validate(folder: Path, overrides: dict[str, object]) -> dict:
    params = load_params(None, {"data.path": str(folder), **overrides})
    pipeline.ingest(params)
    return pipeline.validate(params)


def test_one_empty_text_of_600_is_a_warning_with_its_row(one_empty_text: Path) -> None:
    done = validate(one_empty_text, {})
    assert done.success
    [line] = [line for line in done.warnings.values() if "empty texts" in line]
    assert "found 1 of 600" in line and "(q41)" in line and "validation.empty_texts" in line
    assert "q41" in (paths.VALIDATION / "index.html").read_text()
    # training depends on this file: it is the same whatever layout the data came in
    assert "queries.csv" not in (paths.VALIDATION / "result.json").read_text()


def test_an_error_names_the_key_and_the_line(one_empty_text: Path) -> None:
    with pytest.raises(DataError) as caught:
        validate(one_empty_text, {"validation.empty_texts": "0.001 error"})
    text = str(caught.value)
    assert (
        "found 1 of 600" in text
        and "queries.csv:43" in text
        and "bound: validation.empty_texts" in text
    )
    assert "section validation" in text and caught.value.exit_code == 3


def test_rows_of_files_that_changed_since_ingest_are_named_by_uid(one_empty_text: Path) -> None:
    limit = {"validation.empty_texts": "0.001 error"}
    params = load_params(None, {"data.path": str(one_empty_text), **limit})
    pipeline.ingest(params)
    with (one_empty_text / "queries.csv").open("a") as file:
        file.write("q600,another\n")
    with pytest.raises(DataError) as caught:
        pipeline.validate(params)
    assert "queries.csv" not in str(caught.value)
    assert "(q41)" in str(caught.value)


@pytest.mark.parametrize("place", ["temporary files", "data set"])
def test_ingest_on_a_full_disk_names_the_bytes_and_leaves_nothing(
    one_empty_text: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    params = load_params(None, {"data.path": str(one_empty_text)})
    needed = sum(file.stat().st_size for file in one_empty_text.iterdir())
    if place == "temporary files":
        monkeypatch.setattr(Numbers, "add", full)
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(ArtifactError, match="no space left") as caught:
        pipeline.ingest(params)
    found = re.search(r"at least ([\d,]+) bytes", str(caught.value))
    assert found and int(found[1].replace(",", "")) >= needed
    assert [path.name for path in paths.DATASET.parent.iterdir()] == ["raw"]
    monkeypatch.undo()
    monkeypatch.chdir(one_empty_text.parents[2])
    assert pipeline.ingest(params)["num_pairs"] == 600


def test_validation_on_a_full_disk_names_the_bytes(
    one_empty_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = load_params(None, {"data.path": str(one_empty_text)})
    pipeline.ingest(params)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(ArtifactError, match=r"no space left[^§]*at least [\d,]+ bytes"):
        pipeline.validate(params)
    assert not paths.VALIDATION.exists()
    monkeypatch.undo()
    monkeypatch.chdir(one_empty_text.parents[2])
    assert pipeline.validate(params).success


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_one_bad_row_among_many_is_named_with_its_line(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each file, whatever the blocks in which it is read."""
    monkeypatch.chdir(tmp_path)
    count = BLOCK_ROWS + 5_000
    row = {"first": 0, "middle": BLOCK_ROWS + 1, "last": count - 1}[where]
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "queries.csv").write_text(
        "id,text\n" + "".join(f"q{number},words {number}\n" for number in range(count))
    )
    (folder / "labels.csv").write_text("id,text\n" + "".join(f"l{n},label {n}\n" for n in range(9)))
    lines = [f"q{number},l{number % 9},1\n" for number in range(count)]
    good = "q3,l3,1\n"
    for bad, words in (
        ("q1,nobody,1\n", "unknown label"),
        ("nobody,l1,1\n", "unknown query"),
        ("q1,l5,-2\n", "not a positive number"),
        (good, "given twice"),
    ):
        changed = [*lines[:row], bad, *lines[row:]]
        (folder / "pairs.csv").write_text("query_id,label_id,relevance\n" + "".join(changed))
        with pytest.raises(DataError) as caught:
            pipeline.ingest(load_params(None, {"data.path": str(folder)}))
        text = str(caught.value)
        # of a repeated pair the later one is named
        line = max(row, 4) + 2 if bad is good and row == 0 else row + 2
        assert f"pairs.csv:{line} " in text and words in text, text
        assert "1 kind(s)" in text, text
