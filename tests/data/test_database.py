"""The database against loops; what it must not read; what it leaves."""

from __future__ import annotations

import errno
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from unidec.data import database as module
from unidec.data.database import database, fill, first_rows, one_row, ordered

TEXTS = ["", " ", "a", "A", "a\x00b", "a\x00", "é", "e\u0301", "'; DROP TABLE known; --", "x" * 300]


def arrays(texts: list[str], size: int) -> list[pa.Array]:
    starts = range(0, len(texts), size)
    return [pa.array(texts[start : start + size], pa.large_string()) for start in starts]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_first_rows_as_by_a_loop(tmp_path: Path, size: int) -> None:
    rng = np.random.default_rng(size)
    texts = rng.choice(TEXTS, 50).tolist()
    known = rng.choice(TEXTS[:7], 40).tolist()
    expected = [known.index(text) if text in known else -1 for text in texts]
    found = first_rows(arrays(texts, size), arrays(known, size), tmp_path)
    assert found.dtype == np.int64
    assert found.tolist() == expected
    assert first_rows([], arrays(known, size), tmp_path).tolist() == []
    assert first_rows(arrays(texts, size), [], tmp_path).tolist() == [-1] * 50


def test_rows_come_in_the_order_of_the_statement(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).permutation(300_000)
    with database(tmp_path) as tables:
        blocks = (pa.table({"number": part}) for part in np.array_split(numbers, 9))
        fill(tables, "CREATE TABLE numbers AS SELECT * FROM given", blocks)
        found = ordered(tables, "SELECT number FROM numbers ORDER BY number")
        assert np.concatenate([block["number"] for block in found]).tolist() == list(range(300_000))


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM read_csv('{}')",
        "SELECT * FROM read_text('{}')",
        "SELECT * FROM '{}'",
        "COPY (SELECT 1) TO '{}'",
        "ATTACH '{}' AS other",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET memory_limit = '100GB'",
        "SET autoinstall_known_extensions = true",
    ],
)
def test_a_statement_reads_and_writes_no_file(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "secret.csv"
    path.write_text("a,b\n1,2\n")
    with database(tmp_path) as tables, pytest.raises(duckdb.Error):
        tables.execute(statement.format(path))
    assert path.read_text() == "a,b\n1,2\n"


def test_what_does_not_fit_is_on_disk_and_then_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEMORY_MIB", 128)
    with database(tmp_path) as tables:
        rows = "SELECT hash(range) AS a, range::VARCHAR || repeat('x', 40) AS b FROM range(4000000)"
        tables.execute(f"CREATE TABLE many AS {rows}")
        spilled = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
        assert spilled > 10 << 20
        assert one_row(tables, "SELECT count(*), count(a) FROM many") == (4_000_000, 4_000_000)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (duckdb.IOException, "Could not write file: No space left on device"),
        (duckdb.OutOfMemoryException, "set by the 'max_temp_directory_size' setting"),
    ],
)
def test_no_space_is_an_error_of_the_system(
    tmp_path: Path, kind: type[Exception], words: str
) -> None:
    with pytest.raises(OSError, match=words) as caught, database(tmp_path):
        raise kind(words)
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())
    with pytest.raises(kind, match="another reason"), database(tmp_path):
        raise kind("another reason")
