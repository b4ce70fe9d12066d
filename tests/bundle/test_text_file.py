"""A window of queries from every format, with labels or without, and what is wrong with one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pandas as pd
import pytest

from unidec.bundle.text_file import read_window
from unidec.config import RawBounds
from unidec.errors import DataError

TEXTS = ["red car", "a, b\nc", "zwei größer"]
LABELS = [["L1", "L2"], [], ["L3"]]
ROWS = [{"query": text, "labels": labels} for text, labels in zip(TEXTS, LABELS, strict=True)]


def written(folder: Path, name: str) -> Path:
    path = folder / name
    joined = pd.DataFrame({"query": TEXTS, "labels": [" ".join(uids) for uids in LABELS]})
    if name.startswith("a.csv") or name.startswith("a.tsv"):
        joined.to_csv(path, index=False, sep="\t" if "tsv" in name else ",")
    elif name.startswith("a.jsonl"):
        text = "".join(json.dumps(row) + "\n" for row in ROWS)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    else:
        pd.DataFrame(ROWS).to_parquet(path)
    return path


@pytest.mark.parametrize(
    "name", ["a.csv", "a.csv.gz", "a.tsv", "a.jsonl", "a.jsonl.gz", "a.parquet"]
)
def test_every_format(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name)
    # quoted text of a .tsv file spans lines
    window = read_window(path, bounds=RawBounds(quotes="yes"))
    assert window.texts == TEXTS and window.labels == LABELS
    some = window.sample([2, 0])
    assert some.texts == [TEXTS[2], TEXTS[0]]
    assert some.labels == [["L3"], ["L1", "L2"]]


def test_without_labels_and_with_other_names(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("said,clicked\nx,L1 L2\ny,\n")
    assert read_window(path, "said").labels is None
    assert read_window(path, "said").sample([1]).labels is None
    path.write_text("said,labels\nx,L1 L2\ny,\n")
    assert read_window(path, "said").labels == [["L1", "L2"], []]
    (tmp_path / "b.jsonl").write_text('{"text": "x", "labels": "L1 L2"}\n{"text": "y"}\n')
    expected = [["L1", "L2"], []]
    assert read_window(tmp_path / "b.jsonl").labels == expected


def test_a_file_of_feedback(tmp_path: Path) -> None:
    marks = [
        ("x", "L1", True),
        ("y", "L2", False),
        ("x", "L3", True),
        ("x", "L1", False),
        ("z", "L1", True),
    ]
    lines = [
        {"query": query, "label": label, "relevant": relevant, "at": "now"}
        for query, label, relevant in marks
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    window = read_window(tmp_path / "a.jsonl")
    assert window.texts == ["x", "y", "z"]
    assert window.labels == [["L3"], [], ["L1"]]
    lines[2]["relevant"] = "yes"  # something else than feedback
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    window = read_window(tmp_path / "a.jsonl")
    assert window.texts == [query for query, *_ in marks]
    assert window.labels is None


@pytest.mark.parametrize("labels", [3, ["L1", 2], {"L1": 1}])
def test_what_is_no_label(tmp_path: Path, labels: object) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"query": "x", "labels": labels}) + "\n")
    with pytest.raises(DataError, match="row 0"):
        read_window(tmp_path / "a.jsonl")


def test_what_is_no_window(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_window(tmp_path / "none.csv")
    (tmp_path / "a.csv").write_text("id,title\n1,x\n")
    with pytest.raises(DataError, match="no column of queries"):
        read_window(tmp_path / "a.csv")
