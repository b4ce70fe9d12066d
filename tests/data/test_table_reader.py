"""A table in parts that other processes read, against the same files read in this one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.shard_workers import Killed, killed_after
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unidec.config import RawBounds
from unidec.data.formats import read_raw
from unidec.data.shards import dividing
from unidec.errors import DataError, UnidecError
from unidec.pipeline.shard_jobs import run_shard

ALL = 1 << 20
CELL = st.one_of(st.sampled_from(["a", "b c", "", None, 7, 1.5, float("nan"), True, ["x"]]))


def write_parts(folder: Path, parts: dict[str, list[list[dict]]]) -> None:
    for table, files in parts.items():
        (folder / table).mkdir()
        for number, rows in enumerate(files):
            lines = "".join(f"{json.dumps(row)}\n" for row in rows)
            (folder / table / f"part-{number}.jsonl").write_text(lines)


def outcome(folder: Path, write: Callable | None, bounds: RawBounds | None = None) -> object:
    """The texts and pairs of a folder, or the text of the error."""
    try:
        with dividing(write):
            raw = read_raw(folder, test_share=0.0, scratch=folder, bounds=bounds or RawBounds())
    except UnidecError as error:
        return str(error)
    tables = [raw.labels, *raw.queries.values()]
    pairs = [matrix.toarray().tolist() for matrix in raw.relevance.values()]
    return [table.to_pylist() for table in tables], pairs, raw.files


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidec.data.formats.table_reader.DIVIDED_ABOVE", 1)


@pytest.fixture
def parts() -> dict[str, list[list[dict]]]:
    """Parts of valid tables, one of them empty; a column is in some parts only."""
    queries = [{"id": f"q{row}", "text": f"query {row}"} for row in range(7)]
    labels = [{"id": f"l{row}", "text": f"label {row}"} for row in range(3)]
    labels[2]["content"] = "more"
    pairs = [{"query_id": f"q{row}", "label_id": f"l{row % 3}"} for row in range(7)]
    return {
        "queries": [queries[:3], [], queries[3:]],
        "labels": [labels[:1], labels[1:]],
        "pairs": [pairs[::2], pairs[1::2]],
    }


def test_the_same_data_set(tmp_path: Path, parts: dict) -> None:
    write_parts(tmp_path, parts)
    written: list[int] = []
    whole = outcome(tmp_path, None)
    assert not isinstance(whole, str) and whole[0][0][2]["content"] == "more"
    assert outcome(tmp_path, killed_after(ALL, written)) == whole
    assert written == [0, 1, 0, 1, 2, 0, 1]
    assert not list(tmp_path.glob("*.shards"))


@settings(suppress_health_check=list(HealthCheck), max_examples=30)
@given(cells=st.lists(CELL, min_size=12, max_size=12), seed=st.integers(0, 999))
def test_the_same_errors_in_the_same_order(
    tmp_path_factory: pytest.TempPathFactory, cells: list, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    parts: dict[str, list[list[dict]]] = {}
    for table in ("queries", "labels", "pairs"):
        named = ("query_id", "label_id") if table == "pairs" else ("id", "text")
        rows = [{name: cells[rng.integers(12)] for name in named} for _ in range(30)]
        cuts = np.sort(rng.integers(0, 30, 2)).tolist()
        parts[table] = [rows[: cuts[0]], rows[cuts[0] : cuts[1]], rows[cuts[1] :]]
    folder = tmp_path_factory.mktemp("raw")
    write_parts(folder, parts)
    assert outcome(folder, killed_after(ALL, [])) == outcome(folder, None)


@pytest.mark.parametrize(
    "broken",
    [b"not json\n", b'{"id": "q9", "txt": "a"}\n', b"\xff\xfe", b'{"id": "q0", "text": "\xff"}\n'],
)
def test_an_error_of_one_part(tmp_path: Path, parts: dict, broken: bytes) -> None:
    write_parts(tmp_path, parts)
    (tmp_path / "queries/part-1.jsonl").write_bytes(broken)
    whole = outcome(tmp_path, None)
    assert isinstance(whole, str) and "queries/part-1.jsonl" in whole
    assert outcome(tmp_path, killed_after(ALL, [])) == whole


def test_bounds_apply_to_each_part(tmp_path: Path, parts: dict) -> None:
    write_parts(tmp_path, parts)
    path = tmp_path / "queries/part-2.jsonl"
    path.write_text(path.read_text().replace("query 3", "query 3" * 1000))
    bounds = RawBounds(max_row_bytes=2000)
    with pytest.raises(DataError, match=r"part-2\.jsonl:1"), dividing(killed_after(ALL, [])):
        read_raw(tmp_path, scratch=tmp_path, bounds=bounds)


def test_a_killed_reading_resumes_but_not_with_another_file(tmp_path: Path, parts: dict) -> None:
    write_parts(tmp_path, parts)
    written: list[int] = []
    with pytest.raises(Killed), dividing(killed_after(1, written)):
        read_raw(tmp_path, scratch=tmp_path)
    whole = outcome(tmp_path, killed_after(ALL, written))
    assert written == [0, 1, 0, 1, 2, 0, 1]
    with pytest.raises(Killed), dividing(killed_after(1, written := [])):
        read_raw(tmp_path, scratch=tmp_path)
    path = tmp_path / "labels/part-0.jsonl"
    path.write_text(path.read_text().replace("label 0", "other"))
    changed = outcome(tmp_path, killed_after(ALL, written))
    assert written == [0, 0, 1, 0, 1, 2, 0, 1]
    assert changed == outcome(tmp_path, None) != whole


def test_a_single_file_is_not_divided(tmp_path: Path, parts: dict) -> None:
    write_parts(
        tmp_path,
        {table: [[row for rows in files for row in rows]] for table, files in parts.items()},
    )
    assert outcome(tmp_path, pytest.fail) == outcome(tmp_path, lambda work: run_shard(work, 0))


COLUMNS = {
    "texts": pa.array([f"q{row}" for row in range(300)]),
    "large texts": pa.array([f"q{row}" for row in range(300)], pa.large_string()),
    "whole numbers": pa.array(range(-150, 150)),
    "large numbers": pa.array([2**64 - 1 - row for row in range(300)], pa.uint64()),
    "a missing value": pa.array([None if row == 290 else f"q{row}" for row in range(300)]),
    "categories": pa.array(["a", "b", "c"] * 100).dictionary_encode(),
    "fractions": pa.array(np.arange(300) / 4),
    "truth values": pa.array([True, False] * 150),
    "lists": pa.array([["a"]] * 300),
}


@pytest.mark.parametrize("ids", COLUMNS)
@pytest.mark.parametrize("texts", COLUMNS)
def test_columns_of_parquet_that_are_converted_as_a_whole(
    tmp_path: Path, parts: dict, monkeypatch: pytest.MonkeyPatch, ids: str, texts: str
) -> None:
    write_parts(tmp_path, {table: parts[table] for table in ("labels", "pairs")})
    table = pa.table({"text": COLUMNS[texts], "note": pa.nulls(300), "id": COLUMNS[ids]})
    pq.write_table(table, tmp_path / "queries.parquet", row_group_size=100)
    monkeypatch.setattr("unidec.data.parquet_file._BATCHES", 1)
    found = outcome(tmp_path, None)
    monkeypatch.setattr("unidec.data.formats.table_reader._is_plain", lambda column: False)
    assert found == outcome(tmp_path, None)
    assert isinstance(found, str) or "texts" in ids
