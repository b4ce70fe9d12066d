"""Tables as spreadsheets and pandas export them: read, or refused with the way to correct them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from unidec.bundle.text_file import read_texts
from unidec.data.formats import read_raw
from unidec.errors import DataError

TABLES = {
    "queries": "id,text\nq1,größer\nq2,b\n",
    "labels": "id,text\nl1,a\nl2,b\n",
    "pairs": "query_id,label_id\nq1,l1\nq2,l2\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TABLES.items():
        (tmp_path / f"{name}.csv").write_text(text, encoding="utf-8")
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_raw(folder)
    return str(caught.value)


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_another_delimiter_of_the_header_is_used_and_told(
    folder: Path, delimiter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "queries.csv").write_text(
        f'id{delimiter}text\r\nq1{delimiter}"a, b{delimiter}\nc"\r\n', "utf-8-sig", newline=""
    )
    (folder / "pairs.csv").write_text("query_id,label_id\nq1,l1\n")
    if delimiter == "\t":  # as in .tsv, where only whole fields on one line are in quotes
        (folder / "queries.csv").write_text('id\ttext\nq1\t"a, b\t\\nc"\n')
    raw = read_raw(folder, test_share=0)
    assert raw.queries["train"]["title"].to_pylist()[0].startswith(f"a, b{delimiter}")
    assert f"queries.csv: the columns are separated by {delimiter!r}" in capsys.readouterr().err
    assert len(list(read_texts(folder / "queries.csv", None))) == 1


def test_commas_in_a_tsv_file(folder: Path) -> None:
    (folder / "labels.csv").rename(folder / "labels.tsv")
    assert read_raw(folder).labels["uid"].to_pylist() == ["l1", "l2"]


def test_a_header_with_commas_has_no_other_delimiter(folder: Path) -> None:
    (folder / "labels.csv").write_text("id,text;more\nl1,a;b\nl2,c\n")
    assert "columns missing: text" in refusal(folder)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_in_utf_16(folder: Path, encoding: str) -> None:
    text = TABLES["queries"] if encoding == "utf-16" else f"\ufeff{TABLES['queries']}"
    (folder / "queries.csv").write_bytes(text.encode(encoding))
    told = refusal(folder)
    assert "queries.csv: text in UTF-16" in told and "-f UTF-16 for text in UTF-16" in told


def test_a_file_in_the_encoding_of_windows(folder: Path) -> None:
    (folder / "queries.csv").write_text(TABLES["queries"], encoding="cp1252")
    told = refusal(folder)
    assert "text that is not UTF-8: 1\n        queries.csv:2" in told
    assert "iconv -f CP1252 -t UTF-8" in told
    with pytest.raises(DataError, match="iconv -f CP1252"):
        list(read_texts(folder / "queries.csv", None))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_that_are_not_used_are_told(
    folder: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "pairs.csv").unlink()
    pairs = pd.DataFrame({"query_id": ["q1", "q2"], "label_id": ["l1", "l2"], "score": [0, 5]})
    path = folder / f"pairs.{kind}"
    if kind == "csv":
        pairs.to_csv(path, index=False)
    else:
        pairs.to_parquet(path)
    assert read_raw(folder, test_share=0).relevance["train"].nnz == 2
    assert capsys.readouterr().err == (
        f"pairs.{kind}: columns that are not used: score (used: query_id, label_id, relevance, "
        "split)\n"
    )


def test_an_index_of_pandas_that_parquet_does_not_hold(folder: Path) -> None:
    (folder / "labels.csv").unlink()
    index = pd.RangeIndex(2, name="id")
    pd.DataFrame({"text": ["a", "b"]}, index=index).to_parquet(folder / "labels.parquet")
    assert "after table.reset_index()" in refusal(folder)


def test_what_is_missing_is_named(folder: Path) -> None:
    (folder / "labels.csv").write_text("label_id,name\nl1,a\n")
    assert "fix: rename the columns that hold them" in refusal(folder)


def test_errors_in_pairs_show_the_cells(folder: Path) -> None:
    pairs = 'query_id,label_id,relevance\nq1,l1,"0,5"\nq1,l2,1\nq1,l2,1\n'
    (folder / "pairs.csv").write_text(pairs)
    told = refusal(folder)
    assert "pairs.csv:2 (query q1, label l1: 0,5)" in told
    assert "pairs.csv:4 (query q1, label l2)" in told


def test_only_test_queries(folder: Path) -> None:
    (folder / "queries.csv").write_text("id,text,split\nq1,a,test\nq2,b,test\n")
    assert "name the split `train`" in refusal(folder)
