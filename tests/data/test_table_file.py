"""One reader for tables: values, lines and faults against Python's own csv and json,
line by line.
"""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unidec.config import RawBounds
from unidec.data.table_file import ending, read_rows
from unidec.errors import DataError

CSV = 'id,text\nq1,"two\nlines, ""quoted"""\n\nq2,plain\nq3\nq4,größer\n'


Fault = tuple[str, int]


def rows_and_faults(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[Fault]]:
    faults: list[Fault] = []
    # quoted text spans lines
    bounds = RawBounds(quotes="yes") if path.suffix == ".tsv" else RawBounds()
    report = lambda what, line, _: faults.append((what, line))  # noqa: E731
    rows = list(read_rows(path, ["id", "text"], bounds=bounds, report=report))
    return rows, faults


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.tsv"])
def test_csv_rows_and_their_lines(tmp_path: Path, name: str) -> None:
    text = CSV.replace(",", "\t") if name == "a.tsv" else CSV
    (tmp_path / name).write_bytes(
        gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
    )
    rows, faults = rows_and_faults(tmp_path / name)
    cells = csv.reader(text.splitlines(keepends=True), delimiter="\t" if name == "a.tsv" else ",")
    assert [list(row.values()) for _, row in rows] == [row for row in cells if len(row) == 2][1:]
    assert [line for line, _ in rows] == [2, 5, 7]
    assert faults == [("not 2 columns", 6)]
    with pytest.raises(DataError, match="not 2 columns") as caught:
        list(read_rows(tmp_path / name, ["id"], bounds=RawBounds(quotes="yes")))
    assert caught.value.where == f"{tmp_path / name}:6"


def test_json_lines(tmp_path: Path) -> None:
    lines = [
        '{"a": 1}',
        "",
        "  ",
        '{"a": "x"}',
        "[1]",
        "{broken",
        '{"a": 2},{"a": 3}',
        '{"b": "größer"}',
    ]
    # the last is a lone surrogate: no text
    lines += ['{"a": "\\ud83d\\ude00"}', '{"a": "\\ud800"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    rows, faults = rows_and_faults(tmp_path / "a.jsonl")
    good = {number: json.loads(lines[number - 1]) for number in (1, 4, 8, 9)}
    assert rows == [(number, good.get(number, {})) for number in (1, 4, 5, 6, 7, 8, 9, 10)]
    expected = [5, 6, 7, 10]
    assert [line for _, line in faults] == expected
    with pytest.raises(DataError, match=r"a\.jsonl:5: not a JSON object"):
        list(read_rows(tmp_path / "a.jsonl", ["a"]))


def test_damaged_parquet_is_named_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": [str(number) * 50 for number in range(5000)]}), path, compression="none"
    )
    expected = (2, {"text": "1" * 50})
    assert list(read_rows(path, ["text"]))[1] == expected
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-20])
    with pytest.raises(DataError, match="not a readable Parquet file"):
        list(read_rows(path, ["text"]))
    data[4:400] = bytes(396)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet: not a readable Parquet file"):
        list(read_rows(path, ["text"]))


def test_the_kind_of_a_file() -> None:
    names = {
        "a.csv": ".csv",
        "a.CSV.gz": ".csv",
        "b.x.jsonl": ".jsonl",
        "a": "",
        "a.gz": "",
        "a.tar.gz": ".tar",
    }
    assert {name: ending(Path(name)) for name in names} == names
