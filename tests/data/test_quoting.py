"""Quotes in .csv and .tsv files: what is decided, reported and refused; rows are
counted by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from unidec.bundle.label_file import read_labels
from unidec.bundle.text_file import read_texts, read_window
from unidec.config import RawBounds
from unidec.data.formats import read_raw
from unidec.data.table_file import read_rows
from unidec.errors import DataError


def read(path: Path, text: str, quotes: str = "auto") -> list[tuple[int, list[str]]]:
    path.write_text(text, encoding="utf-8", newline="")
    rows = read_rows(path, ["id", "text"], bounds=RawBounds(quotes=quotes))
    return [(line, list(row.values())) for line, row in rows]


def tsv(*texts: str) -> str:
    return "id\ttext\n" + "".join(f"q{row}\t{text}\n" for row, text in enumerate(texts))


OPEN = ('"best" brush', "plain", '"open', "red", 'closes"', '"again')


@pytest.mark.parametrize(
    "texts",
    [
        OPEN,
        ('"open', "b", '"open'),
        ('"a" and "b"', '"c"'),
        ('"', "b"),
        ('""" three', "b"),
        ('5" pipe', 'a "b" c'),
    ],
)
def test_quotes_that_are_text_in_tsv(tmp_path: Path, texts: tuple[str, ...]) -> None:
    rows = read(tmp_path / "a.tsv", tsv(*texts))
    assert rows == [(row + 2, [f"q{row}", text]) for row, text in enumerate(texts)]
    crlf = tsv(*texts).replace("\n", "\r\n")
    assert read(tmp_path / "a.tsv", crlf) == rows


def test_quotes_that_enclose_in_tsv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = '"one, two"', "plain", '"a ""b"" c"', '"tab\tin it"'
    rows = read(tmp_path / "a.tsv", tsv(*texts))
    expected = ["one, two", "plain", 'a "b" c', "tab\tin it"]
    assert [cells[1] for _, cells in rows] == expected
    assert "a.tsv: quotes enclose fields and are removed" in (said := capsys.readouterr().err)
    assert "first in line 4" in said and "raw.quotes: no" in said
    assert [cells[1] for _, cells in read(tmp_path / "a.tsv", tsv('"x"'), "no")] == ['"x"']
    assert read(tmp_path / "a.tsv", '"id"\t"text"\n"1"\t"x"\n') == [(2, ["1", "x"])]


def test_what_was_decided_is_said_only_where_it_matters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path / "a.tsv", tsv("plain", 'a 5" pipe'))
    read(tmp_path / "a.csv", 'id,text\nq1,"quoted, text"\n')
    assert capsys.readouterr().err == ""
    read(tmp_path / "a.tsv", tsv(*OPEN))
    said = capsys.readouterr().err
    assert "quotes are part of the texts" in said and "line 2" in said and "raw.quotes: yes" in said
    read(tmp_path / "a.csv", 'id,text\nq1,"two\nlines"\nq2,"b\nc"\n')
    assert "quoted text spans lines in 2 rows, first in lines 2 to 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.tsv", tsv('"a ""b"" c"', '"open'), ("line 2", "line 3")),
        ("a.tsv", tsv('"open', '"tab\tin it"'), ("line 2", "line 3")),
        ("a.tsv", tsv("x", '"two\nlines"', "y"), ("line 3", "line 4")),
        ("a.csv", 'id,text\nq1,"open\nq2,b\nq3,"c"\n', (":4", "line 2")),
        ("a.csv", 'id,text\nq1,"best" brush\nq2,b\n', (":2", "brush")),
        ("a.csv", 'id,text\nq1,"open\nq2,b\nq3,closes"\n', ("line 2", "line 4")),
        ("a.csv", 'id,text\n100,"open\n205,closes"\n', ("line 2", "line 3")),
        ("a.csv", 'id,text,n\na-1,"open,1\nb-2,c,2\nc-3,closes",3\n', ("line 2", "line 4")),
    ],
)
def test_quotes_that_can_be_read_in_two_ways(
    tmp_path: Path, name: str, text: str, lines: tuple[str, str]
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path / name, text)
    message = str(caught.value)
    assert all(line in message for line in lines)
    assert "raw.quotes: no" in message


def test_the_key_decides(tmp_path: Path) -> None:
    spans = 'id,text\nq1,"open\nq2,b\nq3,closes"\n'
    expected = [(2, ["q1", "open\nq2,b\nq3,closes"])]
    assert read(tmp_path / "a.csv", spans, "yes") == expected
    assert [cells for _, cells in read(tmp_path / "a.csv", spans, "no")] == [
        ["q1", '"open'],
        ["q2", "b"],
        ["q3", 'closes"'],
    ]
    assert read(tmp_path / "a.tsv", tsv('"two\nlines"'), "yes") == [(2, ["q0", "two\nlines"])]


@pytest.mark.parametrize(
    "text", ['"two\nlines, not a row"', '"Dear,\nhello, all"', '"a\n\nb"', '"1\n2"']
)
def test_honest_text_of_several_lines_in_csv(tmp_path: Path, text: str) -> None:
    rows = read(tmp_path / "a.csv", f"id,text\nq1,{text}\nq2,b\n")
    expected = [["q1", text.strip('"')], ["q2", "b"]]
    assert [cells for _, cells in rows] == expected


def test_every_reader_of_tables_reads_all_rows(tmp_path: Path) -> None:
    (tmp_path / "queries.tsv").write_text(tsv(*OPEN))
    (tmp_path / "labels.tsv").write_text('id\ttext\nl1\t"a\nl2\tb\n')
    (tmp_path / "pairs.tsv").write_text(
        "query_id\tlabel_id\n" + "".join(f"q{row}\tl1\n" for row in range(6))
    )
    raw = read_raw(tmp_path, test_share=0)
    assert (
        raw.queries["train"]["title"].to_pylist()
        == list(OPEN)
        == list(read_texts(tmp_path / "queries.tsv", None))
    )
    assert read_window(tmp_path / "queries.tsv").texts == list(OPEN)
    assert (
        raw.labels["title"].to_pylist()
        == ['"a', "b"]
        == [one.text for one in read_labels(tmp_path / "labels.tsv")]
    )
    with pytest.raises(DataError, match="a quote that is never closed"):
        read_raw(tmp_path, bounds=RawBounds(quotes="yes"))
