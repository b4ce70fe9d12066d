"""Fault 37: what stands in the place of a raw file but is no file is refused with its path, never
ignored.
"""

from __future__ import annotations

import bz2
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.raw_files import write_raw

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
@pytest.mark.parametrize("table", ["queries", "filters"])
def test_part_files_are_named_with_how_to_join_them(
    tmp_path: Path, kind: str, places: list[str], table: str
) -> None:
    (tmp_path / "queries.csv").write_text("id,text\nq1,a\nq2,b\nq3,c\n")
    (tmp_path / "labels.csv").write_text("id,text\nl1,a\nl2,b\n")
    (tmp_path / "pairs.csv").write_text("query_id,label_id\nq1,l1\nq2,l2\nq3,l2\n")
    (tmp_path / "filters.csv").write_text("query_id,label_id\nq1,l2\nq2,l1\n")
    parts_of(tmp_path / f"{table}.csv", kind, [place.replace("queries", table) for place in places])
    with pytest.raises(DataError, match="a table in several part files") as caught:
        read_raw(tmp_path)
    assert table in str(caught.value.where or "") + str(caught.value.got)
    assert caught.value.expected == f"one file {table}.{kind}"
    assert "join them" in str(caught.value.fix)


@pytest.mark.parametrize("make", [dangling, os.mkfifo, folder])
@pytest.mark.parametrize("read", [lambda path: list(read_texts(path, None)), read_labels])
def test_tables_of_other_commands(tmp_path: Path, make: Callable, read: Callable) -> None:
    make(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"a\.csv: a (link to a missing file|pipe|folder)"):
        read(tmp_path / "a.csv")
