"""Fault 25: raw input that is larger than it looks: exit code 3 with the place, at most 1 GB,
linear work.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from unidec.bundle.text_file import read_texts
from unidec.config import RawBounds
from unidec.data.formats import read_raw
from unidec.data.table_file import read_rows
from unidec.errors import DataError

MOST = 10**9
CHILD = """
import json, sys
from unidec.data.formats import read_raw
from unidec.errors import DataError
from unidec.machine import host_peak  # not getrusage: that starts at the peak of the parent

before, errors = host_peak(), []
for folder in sys.argv[1:]:
    try:
        read_raw(folder)
    except DataError as error:
        errors.append([error.exit_code, error.where, error.what, error.fix])
print(json.dumps({"errors": errors, "before": before, "peak": host_peak()}))
"""


def folder_of_texts(folder: Path) -> Path:
    (folder / "Y.txt").write_text("one\ntwo\n")
    (folder / "trn_X.txt").write_text("first\nsecond\n")
    (folder / "trn_X_Y.txt").write_text("2 2\n0:1\n1:1\n")
    return folder


def folder_of_tables(folder: Path, queries: str = "id,text\nq1,a\nq2,b\n") -> Path:
    (folder / "queries.csv").write_text(queries, newline="")
    (folder / "labels.csv").write_text("id,text\nl1,a\nl2,b\n")
    (folder / "pairs.csv").write_text("query_id,label_id\nq1,l1\nq2,l2\n")
    return folder


def sparse_line(path: Path, size: int) -> None:
    """A file of one line of so many bytes, most of it a hole: it takes no room on the disk."""
    with path.open("wb") as file:
        file.write(b"first\nx")
        file.truncate(size)


def a_line_of_two_gigabytes(folder: Path, name: str) -> str:
    sparse_line(folder_of_texts(folder) / name, 2 << 30)
    if name == "trn_X_Y.txt":
        with (folder / name).open("r+b") as file:
            file.write(b"2 2\n\n\n")
    return f"{folder / name}:{4 if name == 'trn_X_Y.txt' else 2}"


def a_packed_line_of_three_gigabytes(folder: Path) -> str:
    folder_of_texts(folder)
    (folder / "trn_X.txt").unlink()
    block = gzip.compress(bytes(64 << 20), 6)  # members of a gzip file follow each other
    (folder / "trn_X.txt.gz").write_bytes(gzip.compress(b"first\n") + 48 * block)
    return f"{folder / 'trn_X.txt.gz'}:2"


def many_packed_short_lines(folder: Path) -> str:
    folder_of_texts(folder)
    (folder / "trn_X.txt").unlink()
    block = gzip.compress(b"some words of a text\n" * (1 << 20), 6)
    (folder / "trn_X.txt.gz").write_bytes(10 * block)
    return str(folder / "trn_X.txt.gz")


def a_matrix_of_stored_zeros(folder: Path) -> str:
    folder_of_texts(folder)
    (folder / "trn_X_Y.txt").unlink()
    rows = 6000
    columns = 4000
    (folder / "Y.txt").write_text("label\n" * columns)
    (folder / "trn_X.txt").write_text("query\n" * rows)
    members = {
        "indptr": np.arange(0, rows * columns + 1, columns),
        "shape": np.array([rows, columns]),
        "indices": np.tile(np.arange(columns, dtype=np.int32), rows),
        "format": np.array(b"csr"),
        "data": np.zeros(rows * columns, np.float32),
    }
    np.savez_compressed(folder / "Y.trn.npz", **members)
    return str(folder / "Y.trn.npz")


def an_open_quote_before_two_gigabytes(folder: Path) -> str:
    folder_of_tables(folder, 'id,text\nq1,a\nq2,"b\n')
    with (folder / "queries.csv").open("r+b") as file:
        file.truncate(2 << 30)
    return f"{folder / 'queries.csv'}:4"


def test_bombs_are_refused_in_little_memory(tmp_path: Path) -> None:
    row = ("a row of more than 16,777,216 bytes", "max_row_bytes")
    unpacked = ("unpacked size of a compressed file is too large", "max_unpack_ratio")
    bombs: dict[str, tuple[Callable[[Path], str], tuple[str, str]]] = {
        "texts": (lambda folder: a_line_of_two_gigabytes(folder, "trn_X.txt"), row),
        "labels": (lambda folder: a_line_of_two_gigabytes(folder, "Y.txt"), row),
        "pairs": (lambda folder: a_line_of_two_gigabytes(folder, "trn_X_Y.txt"), row),
        "filters": (lambda folder: a_line_of_two_gigabytes(folder, "filter_labels_train.txt"), row),
        "packed": (a_packed_line_of_three_gigabytes, row),
        "packed lines": (many_packed_short_lines, unpacked),
        "matrix": (a_matrix_of_stored_zeros, unpacked),
        "quote": (an_open_quote_before_two_gigabytes, row),
    }
    places = {}
    for name, (make, _) in bombs.items():
        (tmp_path / name).mkdir()
        places[name] = make(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *(tmp_path / name for name in bombs)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found["errors"]) == len(bombs)
    for (name, (_, (words, key))), (code, where, what, fix) in zip(
        bombs.items(), found["errors"], strict=True
    ):
        assert (code, where) == (3, places[name]), name
        assert words in what and f"raw.{key}" in fix, name
    assert found["peak"] < MOST
    assert found["peak"] - found["before"] < 400 << 20


def test_a_csv_quote_that_never_closes(tmp_path: Path) -> None:
    rows = [f"q{row},words of text {row}" for row in range(20_000)]
    rows[700] = 'q700,"words of text'
    folder_of_tables(tmp_path, "\n".join(["id,text", *rows, ""]))
    with pytest.raises(DataError, match="a quote that is never closed") as caught:
        read_raw(tmp_path)
    assert caught.value.where == f"{tmp_path / 'queries.csv'}:702"
    with pytest.raises(DataError, match="a quote that is never closed") as caught:
        list(read_texts(tmp_path / "queries.csv", None))
    assert caught.value.where == f"{tmp_path / 'queries.csv'}:702"


@pytest.mark.parametrize("number", [3, 4])  # an even number of quotes in the file, too
def test_an_open_quote_among_stray_ones(tmp_path: Path, number: int) -> None:
    stray = "".join(f'q{row},a 5" pipe\n' for row in range(number - 1))
    folder_of_tables(tmp_path, f'id,text\n{stray}q8,"open\nq9,last\n')
    with pytest.raises(DataError, match="a quote that is never closed") as caught:
        read_raw(tmp_path)
    expected = f"{tmp_path / 'queries.csv'}:{number + 1}"
    assert caught.value.where == expected


def test_stray_and_doubled_quotes_are_text(tmp_path: Path) -> None:
    folder_of_tables(tmp_path, 'id,text\nq1,a 5" pipe\nq2,"two\r\nlines, ""quoted"""\n')
    texts = read_raw(tmp_path, test_share=0).queries["train"]["title"].to_pylist()
    assert texts == ['a 5" pipe', 'two\r\nlines, "quoted"']


@pytest.mark.parametrize("name", ["trn.json", "lbl.json"])
def test_bounds_of_json_lines(tmp_path: Path, name: str) -> None:
    (tmp_path / "lbl.json").write_text('{"uid": "l", "title": "label"}\n')
    (tmp_path / "trn.json").write_text('{"uid": "q", "title": "query", "target_ind": [0]}\n')
    long = {"uid": "x", "title": "many words " * 100, "target_ind": [0]}
    with (tmp_path / name).open("a") as file:
        file.write(json.dumps(long) + "\n")
    assert read_raw(tmp_path, test_share=0)
    with pytest.raises(DataError, match="a row of more than 1,000 bytes") as caught:
        read_raw(tmp_path, bounds=RawBounds(max_row_bytes=1000))
    assert caught.value.where == f"{tmp_path / name}:2"
    with pytest.raises(
        DataError, match=r"text of more than raw\.max_text_chars = 1,099 characters: 1"
    ) as caught:
        read_raw(tmp_path, bounds=RawBounds(max_text_chars=1099))
    assert f"{name}:2 (title: 1100)" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "line"),
    [("id,text\rq1,a\rq2,b\r", 1), ("id,te\rxt\nq1,a\n", 1), ("id,text\nq1,a\nq2,b\rc\n", 3)],
)
def test_a_bare_carriage_return(tmp_path: Path, data: str, line: int) -> None:
    folder_of_tables(tmp_path, data)
    with pytest.raises(DataError, match=r"a bare carriage return \(CR\)") as caught:
        read_raw(tmp_path)
    expected = f"{tmp_path / 'queries.csv'}:{line}"
    assert caught.value.where == expected


def test_a_row_of_a_table_beyond_its_bound(tmp_path: Path) -> None:
    text = "word " * 300
    path = tmp_path / "queries.csv"
    path.write_text(f'id,text\nq1,a\nq2,"{text}\n{text}"\nq3,b\n')
    assert len(list(read_rows(path, ["id"]))) == 3
    with pytest.raises(DataError, match="a row of more than 2,000 bytes") as caught:
        list(read_rows(path, ["id"], bounds=RawBounds(max_row_bytes=2000)))
    assert caught.value.where == f"{path}:3"
