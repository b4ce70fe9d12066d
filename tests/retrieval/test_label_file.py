"""Files of labels: every format gives the same, and what is wrong is named by its line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unidec.errors import DataError
from unidec.retrieval.label_change import LabelText
from unidec.retrieval.label_file import read_labels

ROWS = [
    {"uid": "a", "text": "one, \"two\"\nthree", "title": ""},
    {"uid": "7", "text": "größer 🚗", "title": "shown"},
    {"uid": "c d", "text": "", "title": "only a title"},
]  # fmt: skip


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    if kind == "jsonl":
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        mark = "\t" if kind == "tsv" else ","
        quoted = [[json.dumps(v, ensure_ascii=False).replace('\\"', '""').replace("\\n", "\n") for v in row.values()]
                  for row in rows]  # fmt: skip
        text = "\n".join([mark.join(rows[0]), *(mark.join(row) for row in quoted)]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.parquet", "a.csv.gz", "a.jsonl.gz"])
def test_every_format_gives_the_same(name: str, tmp_path: Path) -> None:
    found = read_labels(write(tmp_path / name, ROWS))
    assert [(item.uid, item.text, item.title) for item in found] == [tuple(row.values()) for row in ROWS]
    lines = {"csv": [2, 4, 5], "tsv": [2, 4, 5], "jsonl": [1, 2, 3], "parquet": [0, 1, 2]}[name.split(".")[1]]
    assert [item.where for item in found] == [f"{name}:{line}" for line in lines]
    assert [item.uid for item in read_labels(tmp_path / name, texts=False)] == ["a", "7", "c d"]


def test_uids_alone_and_other_names(tmp_path: Path) -> None:
    (tmp_path / "gone.csv").write_text("\ufeffid,why\nx,old\n\ny,\n", encoding="utf-8")
    assert [item.uid for item in read_labels(tmp_path / "gone.csv", texts=False)] == ["x", "y"]
    (tmp_path / "gone.jsonl").write_text('{"label": 5, "title": "five"}\n\n')
    assert read_labels(tmp_path / "gone.jsonl") == [LabelText("5", "five", "five", "gone.jsonl:1")]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.txt", b"x", "unknown format"),
        ("a.csv", None, "no such file"),
        ("a.csv", b"", "an empty file"),
        ("a.csv", b"name,text\nx,y\n", "no column of uids"),
        ("a.csv", b"uid,text\n", "without labels"),
        ("a.csv", b"uid,text\n\xff,y\n", r"a\.csv:2: text that is not UTF-8"),
        ("a.csv.gz", b"uid,text\nx,y\n", "damaged gzip file"),
        ("a.parquet", b"PAR1", "cannot be read"),
        ("a.jsonl", b'{"uid": "x"', r"a\.jsonl:1: not a line of JSON"),
        ("a.jsonl", b'{"uid": "x", "text": 3}\n[1]\n', r"(?s):1: a text that is none: 3.*:2: no uid"),
        ("a.jsonl", b'{"uid": true, "text": "t"}\n', ":1: no uid"),
        ("a.jsonl", b'{"uid": "x", "text": "\\ud800"}\n', "not valid Unicode"),
    ],
)  # fmt: skip
def test_files_that_are_none(name: str, data: bytes | None, words: str, tmp_path: Path) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=words):
        read_labels(tmp_path / name)
