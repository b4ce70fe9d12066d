"""The stages `ingest` and `validate`: what stops before training, by which key, and where the row
is.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from unidec import pipeline
from unidec.config import load_params
from unidec.errors import DataError
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
