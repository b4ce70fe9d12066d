"""Fault 37: every reader is linear in its bytes and bounded in what it unpacks.

Files of each kind of width (many columns, many keys) take time in proportion to their size, and
files of each kind of compression that unpack to far more than they hold are refused in at most 1
GB; both are measured in a child process."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.sparse import csr_matrix, save_npz

from unidec.data.table_file import read_rows

MOST = 10**9
CHILD = """
import json, sys, time
from unidec.data.formats import read_raw
from unidec.data.table_file import read_rows
from unidec.errors import DataError
from unidec.machine import host_peak
from unidec.bundle.label_file import read_labels
from unidec.bundle.text_file import read_texts
from pathlib import Path
import pyarrow.parquet, pyarrow.compute

def attempt(read, argument):
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    start = time.process_time()
    try:
        read(argument)
        error = ""
    except DataError as caught:
        error = str(caught)
    return [time.process_time() - start, error, host_peak()]

READERS = {
    "raw": lambda name: read_raw(name, test_share=0),
    "texts": lambda name: list(read_texts(Path(name), None)),
    "labels": lambda name: read_labels(Path(name)),
}
found = []
for given in sys.argv[1:]:
    reader, name = given.split("=", 1)
    found.append(attempt(READERS[reader], name))
print(json.dumps(found))
"""
Found = list[tuple[float, str, int]]


def measured(work: list[str]) -> Found:
    """Processor seconds, error and peak memory of each piece of work (reader=path), done in one
    child.
    """
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *work], capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout)


def work_on(folder: Path, name: str, write: Callable[[Path], object]) -> list[str]:
    """Write a file of queries and the tables beside it; the work of every reader of
    tables on it.
    """
    folder.mkdir()
    path = folder / name.replace("a.", "queries.", 1)
    write(path)
    (folder / "labels.csv").write_text("id,text\nl1,a\n")
    (folder / "pairs.csv").write_text("query_id,label_id\nq1,l1\n")
    return [
        f"raw={folder}",
        f"texts={path}",
        f"labels={path}",
    ]


# -- widths
# --------------------------------------------------------------------------------------------------


def wide_delimited(path: Path, columns: int, mark: str) -> None:
    names = ["id", "text", *(f"column number {number}" for number in range(columns))]
    rows = [[f"q{row}", "a text", *["x"] * columns] for row in range(3)]
    path.write_text("".join(mark.join(cells) + "\n" for cells in [names, *rows]))


def wide_json(path: Path, columns: int) -> None:
    more = {f"key number {number}": number for number in range(columns)}
    rows = [{"id": f"q{row}", "text": "a text", **more} for row in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def other_keys_in_each_row(path: Path, columns: int) -> None:
    with path.open("w") as file:
        for row in range(100):
            more = {f"key {row} {number}": 0 for number in range(columns // 25)}
            file.write(json.dumps({"id": f"q{row}", "text": "a text", **more}) + "\n")


def wide_parquet(path: Path, columns: int) -> None:
    more = {f"column number {number}": [number] for number in range(columns)}
    pq.write_table(pa.table({"id": ["q1"], "text": ["a text"], **more}), path)


def many_quotes(path: Path, columns: int) -> None:
    names = ["id", "text", *(f"column number {number}" for number in range(columns))]
    rows = [[f"q{row}", "a text", *['"x"'] * columns] for row in range(3)]
    path.write_text("".join("\t".join(cells) + "\n" for cells in [names, *rows]))


def one_name_for_all(path: Path, columns: int) -> None:
    path.write_text(
        ",".join(["id", "text"] + ["same"] * columns) + "\nq1,a text" + ",x" * columns + "\n"
    )


WIDTHS: dict[str, tuple[str, Callable[[Path, int], None]]] = {
    "csv": ("a.csv", lambda path, columns: wide_delimited(path, columns, ",")),
    "tsv": ("a.tsv", lambda path, columns: wide_delimited(path, columns, "\t")),
    "tsv quotes": ("a.tsv", many_quotes),
    "csv one name": ("a.csv", one_name_for_all),
    "jsonl": ("a.jsonl", wide_json),
    "jsonl rows": ("a.jsonl", other_keys_in_each_row),
    "parquet": ("a.parquet", wide_parquet),
}


FEW = 5_000
MANY = 20_000


@pytest.fixture(scope="module")
def of_widths(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Found]:
    root = tmp_path_factory.mktemp("widths")
    work = []
    cases = [(width, columns) for width in WIDTHS for columns in (FEW, MANY)]
    for width, columns in cases:
        name, write = WIDTHS[width]
        work += work_on(root / f"{width} {columns}", name, lambda path: write(path, columns))  # noqa: B023
    found = measured(work)
    return {case: found[3 * place : 3 * place + 3] for place, case in enumerate(cases)}


@pytest.mark.parametrize("width", WIDTHS)
def test_time_is_linear_in_the_columns(of_widths: dict[tuple[str, int], Found], width: str) -> None:
    """Four times the columns take at most eight times the time."""
    for few, many in zip(of_widths[width, FEW], of_widths[width, MANY], strict=True):
        assert not many[1] or "columns given twice" in many[1]
        assert many[0] < 8 * few[0] + 0.2
        assert many[0] < 3
        assert many[2] < MOST


# -- compression
# --------------------------------------------------------------------------------------------------

TEXT = "x" * 1_000_000


def packed_lines(kind: str) -> bytes:
    row = {"csv": b"q1,%s\n", "tsv": b"q1\t%s\n", "jsonl": b'{"id": "q1", "text": "%s"}\n'}[
        kind
    ] % TEXT.encode()
    header = {"csv": b"id,text\n", "tsv": b"id\ttext\n", "jsonl": b""}[kind]
    return gzip.compress(header) + gzip.compress(row, 6) * 1000


def write_parquet(path: Path, **options: Any) -> None:
    """3,000 rows, or a million numbers a row group, of one value."""
    ids = [str(row) for row in range(3000)]
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(3000, np.int32)), pa.array([TEXT]))
    pq.write_table(
        pa.table({"id": ids, "text": texts}),
        path,
        store_schema=False,
        **options,
    )


def plain_pages(path: Path, codec: str) -> None:
    ids = ["q"] * 600
    texts = [TEXT[:200_000]] * 600
    options = {"compression": codec, "use_dictionary": False, "data_page_size": 1 << 30}
    pq.write_table(pa.table({"id": ids, "text": texts}), path, **options)


def one_number_again_and_again(path: Path) -> None:
    table = pa.table(
        {"id": pa.array(np.full(20_000_000, 7)), "text": pa.array(np.full(20_000_000, 7))}
    )
    pq.write_table(table, path)


def runs_of_nothing(path: Path) -> None:
    nothing = pa.nulls(30_000_000, pa.string())
    pq.write_table(pa.table({"id": nothing, "text": nothing}), path)


def prefixes(path: Path) -> None:
    """Each text is stored as its difference from the one before."""
    texts = {"id": pa.array([str(row) for row in range(400)]), "text": pa.array([TEXT] * 400)}
    options = {
        "use_dictionary": False,
        "column_encoding": {"text": "DELTA_BYTE_ARRAY", "id": "PLAIN"},
    }
    pq.write_table(pa.table(texts), path, **options)


def in_lists(path: Path) -> None:
    words = pa.DictionaryArray.from_arrays(pa.array(np.zeros(3000, np.int32)), pa.array([TEXT]))
    lists = pa.ListArray.from_arrays(pa.array(np.arange(3001, dtype=np.int32)), words)
    pq.write_table(pa.table({"id": ["q"] * 3000, "text": lists}), path, store_schema=False)


COMPRESSIONS: dict[str, tuple[str, Callable[[Path], object]]] = {
    **{
        f"gzip {kind}": (
            f"a.{kind}.gz",
            lambda path, kind=kind: path.write_bytes(packed_lines(kind)),
        )
        for kind in ("csv", "tsv", "jsonl")
    },
    **{
        f"dictionary {codec}": (
            "a.parquet",
            lambda path, codec=codec: write_parquet(path, compression=codec),
        )
        for codec in ("none", "snappy", "gzip", "brotli", "zstd", "lz4")
    },
    **{
        f"pages {codec}": ("a.parquet", lambda path, codec=codec: plain_pages(path, codec))
        for codec in ("gzip", "brotli", "zstd", "lz4")
    },
    "dictionary pages v2": ("a.parquet", lambda path: write_parquet(path, data_page_version="2.0")),
    "row groups": ("a.parquet", lambda path: write_parquet(path, row_group_size=100)),
    "run lengths": ("a.parquet", one_number_again_and_again),
    "nulls": ("a.parquet", runs_of_nothing),
    "prefixes": ("a.parquet", prefixes),
    "lists": ("a.parquet", in_lists),
}


@pytest.fixture(scope="module")
def of_compressions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    root = tmp_path_factory.mktemp("compressions")
    work = []
    for compression, (name, write) in COMPRESSIONS.items():
        work += work_on(root / compression, name, write)
    found = measured(work)
    return {case: found[3 * place : 3 * place + 3] for place, case in enumerate(COMPRESSIONS)}


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_little_memory_for_what_unpacks_to_much(
    of_compressions: dict[str, Found], compression: str
) -> None:
    for seconds, error, peak in of_compressions[compression]:
        assert (
            "the unpacked size of a compressed file is too large" in error and "queries." in error
        )
        assert seconds < 6 and peak < MOST


def a_matrix_of_stored_zeros(folder: Path) -> None:
    rows = 5000
    columns = 5000
    (folder / "Y.txt").write_text("label\n" * columns)
    (folder / "trn_X.txt").write_text("query\n" * rows)
    entries = np.zeros(rows * columns, np.int8), np.tile(np.arange(columns, dtype=np.int32), rows)
    matrix = csr_matrix(
        (*entries, np.arange(0, rows * columns + 1, columns)), shape=(rows, columns)
    )
    save_npz(folder / "Y.trn.npz", matrix)


def rows_with_much_that_is_not_needed(path: Path) -> None:
    more = json.dumps(list(range(500_000)))
    with path.open("w") as file:
        for row in range(30):
            file.write(f'{{"id": "q{row}", "text": "a", "more": {more}}}\n')


def test_little_memory_for_matrices_and_for_what_is_not_needed(tmp_path: Path) -> None:
    """Numbers of 540 MB as Python objects stand beside the texts of a file."""
    (tmp_path / "npz").mkdir()
    a_matrix_of_stored_zeros(tmp_path / "npz")
    work = work_on(tmp_path / "json", "a.jsonl", rows_with_much_that_is_not_needed)
    matrix, raw, texts = measured([f"raw={tmp_path / 'npz'}", *work[:2]])
    assert "the unpacked size of a compressed file is too large" in matrix[1] and matrix[2] < MOST
    assert raw[1] == texts[1] == ""
    assert max(raw[2], texts[2]) < 400 << 20


@pytest.mark.parametrize("limit", [1 << 20, 50])
def test_honest_dictionaries_are_read(tmp_path: Path, limit: int) -> None:
    """Also lists whose dictionary is full before all texts are in it."""
    texts = [f"text {row % 7}" for row in range(5000)]
    labels = [[f"l{row % 300}"] * (row % 4) for row in range(5000)]
    table = pa.table(
        {"text": texts, "labels": labels, "n": list(range(5000)), "none": [None] * 5000}
    )
    options = {"row_group_size": 1600, "dictionary_pagesize_limit": limit, "write_batch_size": 100}
    pq.write_table(table, tmp_path / "a.parquet", **options)
    rows = list(read_rows(tmp_path / "a.parquet", ["none", "labels", "text", "n", "missing"]))
    expected = list(range(1, 5001))
    assert [number for number, _ in rows] == expected
    assert [row for _, row in rows] == table.to_pylist()
