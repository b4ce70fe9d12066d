"""Fault 37: what stands in the place of a raw file but is no file is refused with its path, never
ignored.
"""

from __future__ import annotations

import bz2
import gzip
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.raw_files import write_raw
from scipy.sparse import csr_matrix

from unidec.bundle.label_file import read_labels
from unidec.bundle.text_file import read_texts
from unidec.data.formats import read_raw
from unidec.data.raw import RawData
from unidec.errors import DataError

OPTIONAL = [
    ("tables", "filters.csv"),
    ("tables", "filters.jsonl.gz"),
    ("tables", "filters.parquet"),
    ("xmc-json", "tst.json"),
    ("xmc-json", "filter_labels_train.txt"),
    ("xmc-json", "trn_filter_labels.txt"),
    ("xmc-text", "tst_X.txt"),
    ("xmc-text", "raw/tst_X.txt"),
    ("xmc-text", "filter_labels_test.txt"),
    ("pecos", "X.tst.txt.gz"),
    ("pecos", "tst_filter_labels.txt"),
    ("beir", "qrels/dev.tsv"),
    ("beir", "qrels/test.tsv"),
]


def dangling(path: Path) -> None:
    path.symlink_to("elsewhere")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = os.open(path.parent, os.O_RDONLY)  # the path of a socket is short
        one.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def folder(path: Path) -> None:
    path.mkdir()


@pytest.fixture
def raw_folder(tiny_raw: RawData, tmp_path: Path) -> Callable[[str], Path]:
    def write(layout: str) -> Path:
        write_raw(tiny_raw, tmp_path / "raw", layout)
        for path in [
            *(tmp_path / "raw").glob("*filter*"),
            *(tmp_path / "raw" / "qrels").glob("test.tsv"),
        ]:
            path.unlink()
        for path in (tmp_path / "raw").glob("*tst*"):
            path.unlink()
        assert read_raw(tmp_path / "raw").format == layout
        return tmp_path / "raw"

    return write


@pytest.mark.parametrize(("layout", "name"), OPTIONAL)
@pytest.mark.parametrize("make", [dangling, loop, os.mkfifo, unix_socket, folder])
def test_no_optional_file_is_ignored(
    raw_folder: Callable, layout: str, name: str, make: Callable
) -> None:
    path = raw_folder(layout) / name
    path.parent.mkdir(exist_ok=True)
    make(path)
    with pytest.raises(DataError) as caught:
        read_raw(path.parents[1] if "/" in name else path.parent, layout)
    assert (
        caught.value.exit_code == 3
        and str(path) in str(caught.value)
        and "fix: " in str(caught.value)
    )


@pytest.mark.parametrize(
    ("layout", "place"),
    [
        ("beir", "qrels"),
        ("xmc-text", "raw"),
        ("xmc-text", "Y.txt"),
    ],
)
def test_a_needed_place_that_is_a_dangling_link(
    raw_folder: Callable, layout: str, place: str
) -> None:
    path = raw_folder(layout) / place
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to("elsewhere")
    with pytest.raises(DataError) as caught:
        read_raw(path.parent)
    assert str(path) in str(caught.value)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_without_permission(raw_folder: Callable) -> None:
    path = raw_folder("tables") / "filters.csv"
    path.write_text("query_id,label_id\n")
    path.chmod(0)
    with pytest.raises(DataError, match="no permission to read the file"):
        read_raw(path.parent)


@pytest.mark.parametrize(
    ("layout", "name"),
    [("tables", "filters.csv.bz2"), ("tables", "queries.csv.zst"), ("xmc-json", "tst.json.xz")],
)
def test_another_way_of_packing(raw_folder: Callable, layout: str, name: str) -> None:
    path = raw_folder(layout) / name
    path.write_bytes(bz2.compress(b"query_id,label_id\n"))
    if name.startswith("queries"):
        (path.parent / "queries.csv").unlink()
    with pytest.raises(DataError, match=r"packed with a method(.|\n)*gzip") as caught:
        read_raw(path.parent)
    assert caught.value.where == str(path)


def test_two_files_for_one_table(raw_folder: Callable) -> None:
    path = raw_folder("tables")
    (path / "labels.jsonl").write_text('{"id": "x", "text": "y"}\n')
    with pytest.raises(
        DataError, match=r"two files for the same table(.|\n)*labels\.csv, labels\.jsonl"
    ):
        read_raw(path)


@pytest.mark.parametrize("names", [("filter_labels_test.txt",), ("tst_X_Y.txt",), ("Y.tst.npz",)])
def test_pairs_of_test_queries_that_are_missing(raw_folder: Callable, names: tuple[str]) -> None:
    path = raw_folder("xmc-text")
    (path / names[0]).write_text("0 0\n")
    with pytest.raises(DataError, match=r"pairs of queries that are missing(.|\n)*tst_X\.txt"):
        read_raw(path)


def parts_of(path: Path, kind: str, places: list[str]) -> None:
    """Split a .csv table into part files of another kind, each with a header, and remove it."""
    header, *rows = path.read_text().splitlines(keepends=True)
    path.unlink()
    for number, place in enumerate(places):
        part = path.parent / place
        part.parent.mkdir(exist_ok=True)
        text = [header, *rows[number :: len(places)]]
        if kind == "parquet":
            cells = [line.rstrip("\n").split(",") for line in text]
            pq.write_table(pa.table([list(column) for column in zip(*cells[1:])], cells[0]), part)
        else:
            part.write_text("".join(text))


TABLES = {
    "queries": "id,text\nq1,a\nq2,b\nq3,c\n",
    "labels": "id,text\nl1,a\nl2,b\n",
    "pairs": "query_id,label_id\nq1,l1\nq2,l2\nq3,l2\n",
    "filters": "query_id,label_id\nq1,l2\nq2,l1\n",
}


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    for name, text in TABLES.items():
        (tmp_path / f"{name}.csv").write_text(text)
    return tmp_path


def contents(folder: Path) -> dict[str, object]:
    """The texts and pairs in a folder by uid: rows of parts come in another order."""
    raw = read_raw(folder, test_share=0.0)
    queries = raw.queries["train"].to_pylist()
    labels = raw.labels["uid"].to_pylist()

    def uids(matrix: csr_matrix) -> set[tuple[str, str]]:
        places = zip(*matrix.nonzero(), strict=True)
        return {(queries[row]["uid"], labels[column]) for row, column in places}

    return {
        "queries": sorted(map(str, queries)),
        "labels": labels,
        "pairs": uids(raw.relevance["train"]),
        "filters": uids(raw.filter_pairs["train"]),
    }


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("parquet", ["queries/part-0000.parquet", "queries/part-0001.parquet"]),
        (
            "parquet",
            [
                "queries.parquet/part-0000.snappy.parquet",
                "queries.parquet/part-0001.snappy.parquet",
            ],
        ),
        ("csv", ["queries-00000-of-00002.csv", "queries-00001-of-00002.csv"]),
        ("csv", ["queries/a.csv", "queries/b.csv"]),
        ("csv", ["queries_1.csv", "queries_2.csv"]),
    ],
)
@pytest.mark.parametrize("table", ["queries", "pairs", "filters"])
def test_part_files_are_read_as_one_table(
    tables: Path, kind: str, places: list[str], table: str
) -> None:
    whole = contents(tables)
    parts = [place.replace("queries", table) for place in places]
    parts_of(tables / f"{table}.csv", kind, parts)
    for name in ("_SUCCESS", ".part-0000.crc"):  # written by Spark beside the parts
        ((tables / parts[0]).parent / name).write_bytes(b"x")
    assert contents(tables) == whole
    assert {place for place in read_raw(tables).files if table in place} == set(parts)


def test_an_error_in_a_part_names_its_file_and_line(tables: Path) -> None:
    parts = ["pairs/part-0.csv.gz", "pairs/part-1.csv.gz"]
    (tables / "pairs.csv").unlink()
    (tables / "pairs").mkdir()
    for place, text in zip(parts, ("q1,l1\nq2,l2\n", "q3,l2\nq9,l2\nq3,l2\n"), strict=True):
        (tables / place).write_bytes(gzip.compress(f"query_id,label_id\n{text}".encode()))
    with pytest.raises(DataError) as caught:
        read_raw(tables)
    assert "pairs/part-1.csv.gz:3 (uid q9)" in str(caught.value)
    assert "pairs/part-1.csv.gz:4 (query q3, label l2)" in str(caught.value)


def test_a_part_without_a_needed_column(tables: Path) -> None:
    parts_of(tables / "queries.csv", "csv", ["queries/a.csv", "queries/b.csv"])
    (tables / "queries/b.csv").write_text("id,title\nq2,b\n")
    with pytest.raises(DataError, match=r"b\.csv:1: columns missing: text"):
        read_raw(tables)


def test_a_column_of_some_parts_is_empty_in_the_others(tables: Path) -> None:
    parts_of(tables / "labels.csv", "csv", ["labels/a.csv", "labels/b.csv"])
    (tables / "labels/b.csv").write_text("id,text,content\nl2,b,more\n")
    assert read_raw(tables).labels["content"].to_pylist() == ["", "more"]


def test_parts_of_two_kinds_are_two_files_for_one_table(tables: Path) -> None:
    parts_of(tables / "queries.csv", "csv", ["queries/a.csv", "queries/b.csv"])
    (tables / "queries/c.jsonl").write_text('{"id": "q4", "text": "d"}\n')
    with pytest.raises(DataError, match="two files for the same table"):
        read_raw(tables)


@pytest.mark.parametrize("part", ["queries/a.csv", "queries-0-of-1.csv.gz"])
def test_a_file_beside_its_parts(tables: Path, part: str) -> None:
    (tables / "queries").mkdir()
    (tables / part).write_text("id,text\nq1,newer\n")
    with pytest.raises(DataError, match=rf"two files(.|\n)*queries\.csv, {part}"):
        read_raw(tables)


def test_parts_that_are_missing(tables: Path) -> None:
    places = [f"pairs-0000{number}-of-00003.csv" for number in range(3)]
    parts_of(tables / "pairs.csv", "csv", places)
    read_raw(tables)
    (tables / places[1]).unlink()
    with pytest.raises(DataError, match=r"2 parts(.|\n)*3, as the name pairs-00000-of-00003\.csv"):
        read_raw(tables)


def test_parts_that_are_being_written(tables: Path) -> None:
    parts_of(tables / "pairs.csv", "parquet", ["pairs/part-0.parquet"])
    (tables / "pairs/_temporary/0").mkdir(parents=True)
    with pytest.raises(DataError, match=r"pairs: a program is writing(.|\n)*_temporary"):
        read_raw(tables)


def test_parts_packed_in_another_way(tables: Path) -> None:
    parts_of(tables / "queries.csv", "csv", ["queries/a.csv", "queries/b.csv"])
    (tables / "queries/b.csv").rename(tables / "queries/b.csv.zst")
    with pytest.raises(DataError, match=r"b\.csv\.zst: packed with a method(.|\n)*b\.csv\.gz"):
        read_raw(tables)


def test_parts_of_a_file_whose_lines_are_numbered_through(raw_folder: Callable) -> None:
    path = raw_folder("xmc-json") / "lbl.json.gz"
    for number in range(2):
        shutil.copy(path, path.with_name(f"lbl-{number:05d}.json.gz"))
    path.unlink()
    with pytest.raises(DataError, match=r"a file in several parts(.|\n)*one file lbl\.json"):
        read_raw(path.parent)


@pytest.mark.parametrize("make", [dangling, os.mkfifo, folder])
@pytest.mark.parametrize("read", [lambda path: list(read_texts(path, None)), read_labels])
def test_tables_of_other_commands(tmp_path: Path, make: Callable, read: Callable) -> None:
    make(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"a\.csv: a (link to a missing file|pipe|folder)"):
        read(tmp_path / "a.csv")
