"""One reader for tables: values, lines and faults against Python's own csv and json, line by line."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unidec.data import table_file
from unidec.data.table_file import CsvFile, ending, json_blocks, json_texts, open_parquet, to_numbers
from unidec.errors import DataError

CSV = 'id,text\nq1,"two\nlines, ""quoted"""\n\nq2,plain\nq3\nq4,größer\n'


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.tsv"])
def test_csv_rows_and_their_lines(tmp_path: Path, name: str) -> None:
    text = CSV.replace(",", "\t") if name == "a.tsv" else CSV
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    faults: list[tuple[str, int]] = []
    file = CsvFile(tmp_path / name, report=lambda what, line, _: faults.append((what, line)))
    (lines, batch), *rest = file.batches(["text", "id"])
    table = pa.Table.from_batches([batch])
    cells = [row for row in csv.reader(text.splitlines(keepends=True), delimiter=file.delimiter) if len(row) == 2]
    assert [[row["id"], row["text"]] for row in table.to_pylist()] == cells[1:]
    assert faults == [("not 2 columns", 6)]
    assert lines == [2, 5, 7] and not rest
    with pytest.raises(DataError, match="not 2 columns") as caught:
        list(CsvFile(tmp_path / name).batches(["id"]))
    assert caught.value.where == f"{tmp_path / name}:6"


@pytest.mark.parametrize("size", [1, 7, 1 << 23])
def test_json_lines_in_blocks_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    lines = ['{"a": 1}', "", "  ", '{"a": "x"}', "[1]", "{broken", '{"a": 2},{"a": 3}', '{"b": "größer"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(table_file, "BLOCK_BYTES", size)
    faults: list[int] = []
    blocks = list(json_blocks(tmp_path / "a.jsonl", report=lambda _what, line, _got: faults.append(line)))
    found = [pair for numbers, items in blocks for pair in zip(numbers, items, strict=True)]
    good = {number: json.loads(lines[number - 1]) for number in (1, 4, 8)}
    assert found == [(number, good.get(number, {})) for number in (1, 4, 5, 6, 7, 8)] and faults == [5, 6, 7]
    with pytest.raises(DataError, match=r"a\.jsonl:5: not a JSON object"):
        list(json_blocks(tmp_path / "a.jsonl"))


def test_numbers_and_texts() -> None:
    column = pa.array(["1", "-2.5e3", "nan", "", "many", None, "1e999"], pa.large_string())
    np.testing.assert_array_equal(to_numbers(column), [1, -2500, np.nan, np.nan, np.nan, np.nan, np.inf])
    np.testing.assert_array_equal(to_numbers(column.slice(0, 2)), [1, -2500])
    faults: list[tuple[str, int]] = []
    items = [{"a": "x"}, {"a": 3}, {"a": None}, {}, {"b": 1}]
    for kinds, needed in (((str,), False), ((str, int), True)):
        report = lambda what, line, _got: faults.append((what, line))  # noqa: E731
        texts = json_texts(items, [3, 5, 9, 10, 11], "a", report, kinds, needed)
        assert texts.to_pylist() == ["x", "3" if needed else "", "", "", ""]
    assert faults == [("a is not a text", 5), ("no a", 9), ("no a", 11)]


def test_a_lone_surrogate_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "\\ud83d\\ude00"}\n{"a": "\\ud800"}\n')
    faults: list[int] = []
    ((_, items),) = json_blocks(tmp_path / "a.jsonl", report=lambda _what, line, _got: faults.append(line))
    assert items == [{"a": "\U0001f600"}, {}] and faults == [2]


def test_damaged_parquet_is_named_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [str(number) * 50 for number in range(5000)]}), path, compression="none")
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-20])
    with pytest.raises(DataError, match="not a readable Parquet file"), open_parquet(path):
        pass
    data[4:400] = bytes(396)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet: not a readable Parquet file"), open_parquet(path) as file:
        file.read()


def test_the_kind_of_a_file() -> None:
    names = {"a.csv": ".csv", "a.CSV.gz": ".csv", "b.x.jsonl": ".jsonl", "a": "", "a.gz": "", "a.tar.gz": ".tar"}
    assert {name: ending(Path(name)) for name in names} == names
