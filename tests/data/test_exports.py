"""Tables as spreadsheets and pandas export them: read, or refused with the way to correct them."""

from __future__ import annotations

import gzip
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


@pytest.mark.parametrize("null", [r"\N", r'"\N"'])
def test_missing_values_of_a_database(folder: Path, null: str) -> None:
    """Read as a text, the mark would become a word of the model; unused columns may have it."""
    path = folder / "queries.csv"
    path.write_text(f"id,deleted,text\r\nq1,{null},a\r\nq2,{null},{null}\r\n", newline="")
    told = refusal(folder)
    assert r"\N, a database's mark for a missing value: 1" in told
    assert "queries.csv:3 ({'id': 'q2'" in told and "fix: export CSV with empty cells" in told
    with pytest.raises(DataError, match=r"csv:3: \\N, a database(.|\n)*fix: export CSV"):
        list(read_texts(path, None))
    path.write_text(f"id,deleted,text\nq1,{null},a\nq2,{null},b\n")
    assert read_raw(folder, test_share=0).queries["train"]["title"].to_pylist() == ["a", "b"]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_that_is_one_array(folder: Path, indent: int | None) -> None:
    (folder / "labels.csv").unlink()
    table = pd.DataFrame({"id": ["l1", "l2"], "text": ["a", "b"]})
    table.to_json(folder / "labels.jsonl", orient="records", indent=indent)
    told = refusal(folder)
    assert "labels.jsonl:1" in told and "to_json(FILE, orient='records', lines=True)" in told
    table.to_json(folder / "labels.jsonl", orient="records", lines=True)
    assert read_raw(folder).num_labels == 2


def test_a_packed_file_whose_name_does_not_say_so(folder: Path) -> None:
    """As `cat` leaves it that joins packed parts."""
    path = folder / "queries.csv"
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert f"{path}: packed with gzip" in refusal(folder)
    path.rename(folder / "queries.csv.gz")
    assert read_raw(folder).labels["uid"].to_pylist() == ["l1", "l2"]


@pytest.mark.parametrize("parts", ["queries", "queries.jsonl"])
def test_part_files_of_spark(folder: Path, parts: str) -> None:
    (folder / "queries.csv").unlink()
    (folder / parts).mkdir()
    for number, row in enumerate([b'{"id": "q1", "text": "a"}\n', b'{"id": "q2", "text": "b"}\n']):
        (folder / parts / f"part-0000{number}-c000.json.gz").write_bytes(gzip.compress(row))
    (folder / parts / "_SUCCESS").touch()
    assert read_raw(folder, test_share=0).queries["train"]["uid"].to_pylist() == ["q1", "q2"]


@pytest.mark.parametrize(("kind", "column"), [("parquet", "label_id"), ("jsonl", "text")])
def test_a_column_of_lists(folder: Path, kind: str, column: str) -> None:
    name = "pairs" if column == "label_id" else "labels"
    table = pd.read_csv(folder / f"{name}.csv")
    (folder / f"{name}.csv").unlink()
    table[column] = table[column].map(lambda value: [value])
    if kind == "parquet":
        table.to_parquet(folder / f"{name}.parquet")
    else:
        table.to_json(folder / f"{name}.jsonl", orient="records", lines=True)
    told = refusal(folder)
    assert f"{column} is not a text: 2" in told
    assert "table.explode('label_id')" in told and "astype(str)" not in told


@pytest.mark.parametrize("cell", ["['l1', 'l2']", "l1,l2", "l1;l2", "l1|l2"])
def test_a_cell_with_several_labels(folder: Path, cell: str) -> None:
    (folder / "pairs.csv").write_text(f'query_id,label_id\nq1,"{cell}"\nq2,l1\n')
    told = refusal(folder)
    assert f"pairs.csv:2 (uid {cell})" in told
    assert "docs/data.md (Layouts) makes pairs of a cell with several ids" in told
