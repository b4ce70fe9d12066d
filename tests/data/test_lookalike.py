"""Ids and column names that look alike: found, shown and explained."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unidec.bundle.label_file import read_labels
from unidec.bundle.text_file import read_texts
from unidec.data.formats import read_raw
from unidec.data.lookalike import Known, canonical, difference, visible
from unidec.errors import DataError

ALIKE = [
    ("100.0", "100", "a decimal point", r"dtype=str"),
    ("1e+05", "100000", "a decimal point", r"dtype=str"),
    ("7", "007", "zeros in front", r"dtype=str"),
    ("shoes ", "shoes", "blanks at the beginning or end", r"str\.strip"),
    ("red\u00a0shoes", "red shoes", "other kinds or numbers of blanks", "normal blanks"),
    ("shoes\u00a0", "shoes", "other kinds or numbers of blanks", "normal blanks"),
    ("cafe\u0301", "café", "accents", r"NFC"),
    ("\ufeffshoes", "shoes", "invisible characters", "remove"),
    ("sho\u200bes", "shoes", "invisible characters", "remove"),
    ("soft\u00adware", "software", "invisible characters", "remove"),
    ("ﬁne１", "fine1", "other forms", "NFKC"),
    ("Shoes", "shoes", "upper and lower case", "alike"),
]


@pytest.mark.parametrize(("given", "known", "words", "fix"), ALIKE)
def test_a_pair_whose_id_looks_like_a_known_one(
    tmp_path: Path, given: str, known: str, words: str, fix: str
) -> None:
    (tmp_path / "queries.csv").write_text("id,text\nq1,a\nq2,b\n", encoding="utf-8")
    (tmp_path / "labels.csv").write_text(f"id,text\n{known},a\nother,b\n", encoding="utf-8")
    (tmp_path / "pairs.csv").write_text(
        f"query_id,label_id\nq1,{given}\nq2,other\nq2,{given}\n", encoding="utf-8"
    )
    with pytest.raises(DataError) as caught:
        read_raw(tmp_path)
    message = str(caught.value)
    assert f"pairs.csv:2 (uid {visible(given)}; there is a label {visible(known)})" in message
    assert (
        f"2 unknown label uid(s) differ from a known one only in {words}" in message
        and fix.replace("\\", "") in message
    )
    assert message.replace("\n", "").isprintable()


def test_ids_that_became_floats_in_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2], "text": ["a", "b"]}), tmp_path / "queries.parquet")
    pq.write_table(pa.table({"id": [100, 200], "text": ["a", "b"]}), tmp_path / "labels.parquet")
    pairs = pa.table({"query_id": [1, 2], "label_id": [100.0, None]})
    pq.write_table(pairs, tmp_path / "pairs.parquet")
    with pytest.raises(DataError) as caught:
        read_raw(tmp_path)
    assert "no label_id: 1" in str(caught.value)
    pq.write_table(pairs.slice(0, 1), tmp_path / "pairs.parquet")
    with pytest.raises(
        DataError, match=r"'100\.0'; there is a label '100'(.|\n)*astype\('Int64'\)"
    ):
        read_raw(tmp_path)


def test_what_does_not_look_alike_and_what_can_be_read(tmp_path: Path) -> None:
    known = Known(["shoes", "café", "100", "漢字"])
    assert all(known.like(text) is None for text in ("shoe", "cafe", "10.5", "1000", "", "字漢"))
    assert (
        visible("漢字 é 🙂") == "'漢字 é 🙂'" and visible("a\u0301\u200b ") == "'a\\u0301\\u200b '"
    )
    assert canonical("9" * 400 + ".0")
    assert canonical("1e9999") == "1e9999"
    with pytest.raises(ValueError, match="do not look alike"):
        difference("a", "b")


@pytest.mark.parametrize(
    ("header", "fix"),
    [
        (
            "id,  text",
            "rename the column '  text' to 'text': they differ in blanks at the beginning or end",
        ),
        (
            "id,text\u00a0",
            (
                "rename the column 'text\\u00a0' to 'text': they differ in other kinds or "
                "numbers of blanks"
            ),
        ),
        (
            "id,te\u200bxt",
            "rename the column 'te\\u200bxt' to 'text': they differ in invisible characters",
        ),
        ("ID,Text", "rename the column 'Text' to 'text': they differ in upper and lower case"),
    ],
)
def test_a_header_that_looks_right(tmp_path: Path, header: str, fix: str) -> None:
    (tmp_path / "queries.csv").write_text(f"{header}\nq1,a\n", encoding="utf-8")
    (tmp_path / "labels.csv").write_text("id,text\nl1,a\n")
    (tmp_path / "pairs.csv").write_text("query_id,label_id\nq1,l1\n")
    with pytest.raises(DataError, match="columns missing: ") as caught:
        read_raw(tmp_path)
    assert fix in str(caught.value)
    with pytest.raises(DataError) as caught:
        list(read_texts(tmp_path / "queries.csv", None))
    assert fix in str(caught.value)
    if header.startswith("ID"):
        with pytest.raises(DataError, match="rename the column 'ID' to 'id'"):
            read_labels(tmp_path / "queries.csv")


def test_keys_of_json_lines_that_look_right(tmp_path: Path) -> None:
    (tmp_path / "queries.jsonl").write_text(
        '{"id": "q1", "text ": "a"}\n{"id": "q2", "text ": "b"}\n'
    )
    (tmp_path / "labels.csv").write_text("id,text\nl1,a\n")
    (tmp_path / "pairs.csv").write_text("query_id,label_id\nq1,l1\n")
    with pytest.raises(DataError, match=r"no text: 2(.|\n)*rename the column 'text ' to 'text'"):
        read_raw(tmp_path)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.binary(), b"a"),
        (pa.large_binary(), b"a"),
        (pa.binary(2), b"ab"),
    ],
)
def test_bytes_in_parquet(tmp_path: Path, kind: pa.DataType, value: bytes) -> None:
    table = pa.table(
        {
            "id": ["q1"],
            "text": pa.array([value], kind),
            "more": pa.array([b"x"]),
        }
    )
    pq.write_table(table, tmp_path / "queries.parquet")
    (tmp_path / "labels.csv").write_text("id,text\nl1,a\n")
    (tmp_path / "pairs.csv").write_text("query_id,label_id\nq1,l1\n")
    for read in (read_raw, lambda path: list(read_texts(path / "queries.parquet", None))):
        with pytest.raises(
            DataError, match=r"a column of bytes instead of text(.|\n)*str\.decode\('utf-8'\)"
        ):
            read(tmp_path)
    pq.write_table(table.set_column(1, "text", pa.array(["a"])), tmp_path / "queries.parquet")
    # a column that is not read may hold bytes
    assert read_raw(tmp_path, test_share=0).num_labels == 1


def test_missing_values_of_pandas_in_json_lines(tmp_path: Path) -> None:
    (tmp_path / "queries.jsonl").write_text(
        '{"id": "q1", "text": NaN}\n{"id": "q2", "text": ["a"]}\n'
    )
    (tmp_path / "labels.jsonl").write_text('{"id": 1, "text": "a", "content": NaN}\n')
    (tmp_path / "pairs.csv").write_text("query_id,label_id\nq1,1\n")
    with pytest.raises(
        DataError, match=r"no text: 1(.|\n)*text is not a text: 1(.|\n)*column\.str\.join"
    ) as caught:
        read_raw(tmp_path)
    assert "labels" not in str(caught.value.got)


@pytest.mark.parametrize("layout", ["parquet", "csv"])
def test_a_layout_that_is_a_kind_of_file(tmp_path: Path, layout: str) -> None:
    with pytest.raises(DataError, match=r"unknown layout(.|\n)*has the layout tables"):
        read_raw(tmp_path, layout)
