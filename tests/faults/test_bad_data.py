"""Fault 16: bad raw data stops at ingest, all kinds at once, with `file:line`; nothing is written.

Fault 17's data side: data that is degenerate but legal goes through.
"""

from __future__ import annotations

import io
import json
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.raw_files import write_raw
from scipy.sparse import csr_matrix, save_npz

from unidec.data.dataset import write_dataset
from unidec.data.formats import read_raw
from unidec.data.raw import RawData, text_table
from unidec.errors import DataError

LABELS = [{"uid": f"l{i}", "title": f"label {i}"} for i in range(3)]
QUERIES = [
    {"uid": f"q{i}", "title": f"query {i}", "target_ind": [0, 2], "target_rel": [1.0, 0.5]}
    for i in range(4)
]
TESTS = [
    {
        "uid": "t0",
        "title": "test",
        "target_ind": [1],
        "target_rel": [1.0],
    }
]


def lines(items: list) -> bytes:
    return b"".join(
        item if isinstance(item, bytes) else json.dumps(item).encode() + b"\n" for item in items
    )


@pytest.fixture
def json_folder(tmp_path: Path) -> Path:
    (tmp_path / "lbl.json").write_bytes(lines(LABELS))
    (tmp_path / "trn.json").write_bytes(lines(QUERIES))
    (tmp_path / "tst.json").write_bytes(lines(TESTS))
    return tmp_path


def with_line(items: list, row: int, **changes: object) -> bytes:
    return lines([{**item, **changes} if i == row else item for i, item in enumerate(items)])


def message(folder: Path, layout: str = "auto") -> str:
    with pytest.raises(DataError) as caught:
        read_raw(folder, layout)
    return str(caught.value)


def test_the_undamaged_folder_is_read(json_folder: Path) -> None:
    assert read_raw(json_folder).relevance["train"].nnz == 8


@pytest.mark.parametrize(
    ("file", "data", "kind", "where"),
    [
        (
            "trn.json",
            with_line(QUERIES, 2, target_ind=[0, 3]),
            "label index outside 0..2: 1",
            "trn.json:3 (label 3)",
        ),
        (
            "trn.json",
            with_line(QUERIES, 0, target_ind=[-1, 2]),
            "label index outside 0..2: 1",
            "trn.json:1 (label -1)",
        ),
        (
            "trn.json",
            with_line(QUERIES, 0, target_ind=[10**15, 2]),
            "label index outside",
            "trn.json:1",
        ),
        (
            "trn.json",
            with_line(QUERIES, 0, target_ind=[10**40, 2]),
            "not a list of whole numbers",
            "trn.json:1",
        ),
        (
            "trn.json",
            with_line(QUERIES, 0, target_ind=[0.5, 2]),
            "not a list of whole numbers",
            "trn.json:1",
        ),
        (
            "trn.json",
            with_line(QUERIES, 1, target_rel=[float("nan"), 1]),
            "not a positive number: 1",
            "trn.json:2",
        ),
        (
            "trn.json",
            with_line(QUERIES, 1, target_rel=[-1, 1]),
            "not a positive number: 1",
            "trn.json:2",
        ),
        (
            "trn.json",
            with_line(QUERIES, 1, target_rel=[0, 1]),
            "not a positive number: 1",
            "trn.json:2",
        ),
        (
            "trn.json",
            with_line(QUERIES, 1, target_rel=[1e39, 1]),
            "not a positive number: 1",
            "trn.json:2",
        ),
        (
            "trn.json",
            with_line(QUERIES, 1, target_rel=[1e-60, 1]),
            "not a positive number: 1",
            "trn.json:2",
        ),
        (
            "trn.json",
            with_line(QUERIES, 1, target_rel=["1", 1]),
            "not a list of numbers",
            "trn.json:2",
        ),
        ("trn.json", with_line(QUERIES, 1, target_rel=[1]), "different lengths: 1", "trn.json:2"),
        (
            "trn.json",
            with_line(QUERIES, 1, target_rel=[10**400, 1]),
            "not a list of numbers: 1",
            "trn.json:2",
        ),
        (
            "trn.json",
            lines([{"uid": "x", "title": "x", "target_ind": 5}]),
            "not a list of whole",
            "trn.json:1",
        ),
        (
            "trn.json",
            lines([{"uid": "x", "title": "x", "target_ind": [-(2**70)]}]),
            "of whole numbers",
            "trn.json:1",
        ),
        (
            "trn.json",
            with_line(QUERIES, 3, target_ind=[2, 2]),
            "pair given twice: 1",
            "trn.json:4 (query 3, label 2)",
        ),
        ("trn.json", with_line(QUERIES, 3, title=[5]), "title is not a text: 1", "trn.json:4"),
        (
            "trn.json",
            with_line(QUERIES, 3, uid="q0"),
            "query uid empty or given twice: 1",
            "trn.json:4 (q0)",
        ),
        (
            "trn.json",
            lines([*QUERIES[:1], b"\n", {"uid": "x", "title": "x"}]),
            "no target_ind",
            "trn.json:3",
        ),
        (
            "trn.json",
            lines([*QUERIES, b'{"title": "caf\xe9", "target_ind": []}\n']),
            "not UTF-8: 1",
            "trn.json:5",
        ),
        (
            "trn.json",
            lines([*QUERIES, b'{"title": "\\ud800", "target_ind": []}\n']),
            "not UTF-8: 1",
            "trn.json:5",
        ),
        ("trn.json", lines([*QUERIES[:2], b"{broken\n"]), "not a JSON object: 1", "trn.json:3"),
        ("trn.json", lines([*QUERIES[:2], b"[1]\n"]), "not a JSON object: 1", "trn.json:3"),
        ("trn.json", lines([b"[" * 100_000 + b"\n"]), "not a JSON object: 1", "trn.json:1"),
        ("trn.json", b"", "no training queries", "train"),
        (
            "lbl.json",
            with_line(LABELS, 2, uid="l0"),
            "label uid empty or given twice: 1",
            "lbl.json:3 (l0)",
        ),
        ("lbl.json", b"", "no labels", "labels"),
        (
            "tst.json",
            with_line(TESTS, 0, uid="q2"),
            "again in test (leak): 1",
            "tst.json:1 (uid q2 is in train)",
        ),
        (
            "tst.json",
            with_line(TESTS, 0, target_ind=[7]),
            "label index outside 0..2: 1",
            "tst.json:1",
        ),
        (
            "filter_labels_train.txt",
            b"0 1\n\n4 0\n",
            "query row outside 0..3: 1",
            "filter_labels_train.txt:3",
        ),
        (
            "filter_labels_train.txt",
            b"0 1\n1 -2\n",
            "label index outside 0..2: 1",
            "filter_labels_train.txt:2",
        ),
        (
            "filter_labels_test.txt",
            b"0 1\n0 1 2\n",
            "not `query_row label_row`: 1",
            "filter_labels_test.txt:2",
        ),
        (
            "filter_labels_test.txt",
            b"0 1\n0 one\n",
            "not `query_row label_row`: 1",
            "filter_labels_test.txt:2",
        ),
    ],
)
def test_xmc_json(json_folder: Path, file: str, data: bytes, kind: str, where: str) -> None:
    (json_folder / file).write_bytes(data)
    text = message(json_folder)
    assert kind in text and where in text


def test_all_kinds_at_once_and_at_most_20_samples(json_folder: Path) -> None:
    many = [
        {**QUERIES[0], "uid": f"x{i}", "target_ind": [3 + i, 0], "target_rel": [1.0, -1.0]}
        for i in range(500)
    ]
    (json_folder / "trn.json").write_bytes(lines([*many, b"broken\n"]))
    (json_folder / "filter_labels_train.txt").write_bytes(b"999 0\n")
    text = message(json_folder)
    for kind in (
        "outside 0..2: 500",
        "not a positive number: 500",
        "not a JSON object: 1",
        "query row outside",
    ):
        assert kind in text
    assert text.count(".json:") + text.count(".txt:") <= 20
    assert "trn.json:501" in text and "filter_labels_train.txt:1" in text


def test_line_numbers_of_a_gzip_file_and_its_damage(json_folder: Path) -> None:
    import gzip

    packed = gzip.compress(with_line(QUERIES, 2, target_ind=[9, 0]))
    (json_folder / "trn.json").unlink()
    (json_folder / "trn.json.gz").write_bytes(packed)
    assert "trn.json.gz:3" in message(json_folder)
    for data in (packed[:-9], b"not gzip", packed[:20] + b"\xff\xff" + packed[22:]):
        (json_folder / "trn.json.gz").write_bytes(data)
        assert "damaged gzip file" in message(json_folder)


@pytest.fixture
def text_folder(tiny_raw: RawData, tmp_path: Path) -> Path:
    write_raw(tiny_raw, tmp_path / "raw", "xmc-text")
    return tmp_path / "raw"


def edit(path: Path, line: int, new: bytes | None) -> None:
    rows = path.read_bytes().split(b"\n")
    rows[line - 1 : line] = [] if new is None else [new]
    path.write_bytes(b"\n".join(rows))


@pytest.mark.parametrize(
    ("file", "line", "new", "kind", "where"),
    [
        ("trn_X.txt", 5, b"caf\xe9", "text that is not UTF-8: 1", "trn_X.txt:5"),
        ("trn_X.txt", 5, None, "row counts differ", "trn_X_Y.txt:1"),
        ("Y.txt", 5, None, "row counts differ", "trn_X_Y.txt:1"),
        ("trn_X_Y.txt", 1, b"48 41", "row counts differ", "trn_X_Y.txt:1"),
        ("trn_X_Y.txt", 1, b"999999999999999 40", "row counts differ", "trn_X_Y.txt:1"),
        ("trn_X_Y.txt", 1, b"forty 8", "not a header", "trn_X_Y.txt:1"),
        ("trn_X_Y.txt", 9, None, "row counts differ", "trn_X_Y.txt"),
        ("trn_X_Y.txt", 9, b"40:1", "label index outside 0..39: 1", "trn_X_Y.txt:9"),
        ("trn_X_Y.txt", 9, b"-1:1", "label index outside 0..39: 1", "trn_X_Y.txt:9"),
        ("trn_X_Y.txt", 9, b"1:nan 2:1", "not a positive number: 1", "trn_X_Y.txt:9"),
        ("trn_X_Y.txt", 9, b"1:0", "not a positive number: 1", "trn_X_Y.txt:9"),
        ("trn_X_Y.txt", 9, b"1:1e999", "not a positive number: 1", "trn_X_Y.txt:9"),
        ("trn_X_Y.txt", 9, b"1:1 2:1 1:1", "pair given twice: 1", "trn_X_Y.txt:9"),
        ("trn_X_Y.txt", 9, b"1 2:1", "not `label:relevance`: 1", "trn_X_Y.txt:9"),
        ("trn_X_Y.txt", 9, b"1:2:3 4", "not `label:relevance`: 2", "trn_X_Y.txt:9"),
        ("trn_X_Y.txt", 9, b"1.5:1", "not `label:relevance`: 1", "trn_X_Y.txt:9"),
        ("trn_X_Y.txt", 9, b"nan:1", "not `label:relevance`: 1", "trn_X_Y.txt:9"),
        ("trn_X_Y.txt", 9, b"a:b", "not `label:relevance`: 1", "trn_X_Y.txt:9"),
        ("trn_X_Y.txt", 9, b"1: 2:1", "not `label:relevance`: 1", "trn_X_Y.txt:9"),
    ],
)
def test_xmc_text(
    text_folder: Path, file: str, line: int, new: bytes | None, kind: str, where: str
) -> None:
    edit(text_folder / file, line, new)
    text = message(text_folder)
    assert kind in text and where in text


def save(arrays: dict[str, np.ndarray], path: Path) -> None:
    np.savez_compressed(path, **arrays)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"shape": np.array([49, 40])}, "row counts differ"),
        ({"shape": np.array([2**60, 40])}, "row counts differ"),
        ({"indices": lambda a: np.where(np.arange(a.size) == 0, 40, a)}, "indices must be < 40"),
        ({"indices": lambda a: np.where(np.arange(a.size) == 0, -1, a)}, "indices must be >= 0"),
        ({"indices": lambda a: a[:-1]}, "not a sparse matrix"),
        (
            {"data": lambda a: np.where(np.arange(a.size) == 0, np.nan, a)},
            "not a positive number: 1",
        ),
        ({"data": lambda a: np.where(np.arange(a.size) == 0, -1, a)}, "not a positive number: 1"),
        ({"data": np.array([{}], dtype=object)}, "not a sparse matrix"),
        ({"indptr": lambda a: a[::-1].copy()}, "not a sparse matrix"),
        ({"indptr": lambda a: np.where(np.arange(a.size) == 1, a[-1], a)}, "not a sparse matrix"),
        ({"data": lambda a: a.astype(complex)}, "not a sparse matrix"),
        ({"indptr": lambda a: np.zeros(5, dtype=np.int64)}, "not a sparse matrix"),
        ({"format": np.array(b"dia")}, "not a sparse matrix"),
    ],
)
def test_pecos_matrices(tiny_raw: RawData, tmp_path: Path, change: dict, kind: str) -> None:
    write_raw(tiny_raw, tmp_path / "raw", "pecos")
    path = tmp_path / "raw" / "Y.trn.npz"
    arrays = dict(np.load(path))
    for name, new in change.items():
        arrays[name] = new(arrays[name]) if callable(new) else new
    save(arrays, path)
    assert kind in message(tmp_path / "raw")


def test_a_matrix_that_declares_more_than_it_holds(tiny_raw: RawData, tmp_path: Path) -> None:
    write_raw(tiny_raw, tmp_path / "raw", "pecos")
    path = tmp_path / "raw" / "Y.trn.npz"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        huge, {"descr": "<f4", "fortran_order": False, "shape": (10**13,)}
    )
    members["data.npy"] = huge.getvalue()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    assert "10000000000000" in message(tmp_path / "raw")
    path.write_bytes(path.read_bytes()[:200])
    assert "not a sparse matrix" in message(tmp_path / "raw")


def test_features_without_texts(tiny_raw: RawData, tmp_path: Path) -> None:
    write_raw(tiny_raw, tmp_path / "raw", "pecos")
    save_npz(tmp_path / "raw" / "X.trn.npz", csr_matrix((48, 9)))
    (tmp_path / "raw" / "X.trn.txt").unlink()
    assert "X.trn.txt" in message(tmp_path / "raw")


@pytest.fixture
def table_folder(tmp_path: Path) -> Path:
    (tmp_path / "queries.csv").write_text('id,text,split\nq1,"two\nlines",train\nq2,b,test\n')
    (tmp_path / "labels.csv").write_text("id,text\nl1,a\nl2,b\n")
    (tmp_path / "pairs.csv").write_text("query_id,label_id,relevance\nq1,l1,1\nq2,l2,1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "data", "kind", "where"),
    [
        (
            "pairs.csv",
            b"query_id,label_id\nq1,l1\nq1,l9\n",
            "pair with an unknown label: 1",
            "pairs.csv:3 (uid l9)",
        ),
        (
            "pairs.csv",
            b"query_id,label_id\nq9,l1\n",
            "pair with an unknown query: 1",
            "pairs.csv:2 (uid q9)",
        ),
        ("pairs.csv", b"query_id,label_id\nq1,l1\n\nq1,l1\n", "pair given twice: 1", "pairs.csv:4"),
        (
            "pairs.csv",
            b"query_id,label_id,relevance\nq1,l1,nan\n",
            "not a positive number: 1",
            "pairs.csv:2",
        ),
        (
            "pairs.csv",
            b"query_id,label_id,relevance\nq1,l1,-2\n",
            "not a positive number: 1",
            "pairs.csv:2",
        ),
        (
            "pairs.csv",
            b"query_id,label_id,relevance\nq1,l1,many\n",
            "not a positive number: 1",
            "pairs.csv:2",
        ),
        ("pairs.csv", b"query_id,label_id\nq1\n", "not 2 columns: 1", "pairs.csv:2"),
        ("pairs.csv", b"query,label_id\nq1,l1\n", "columns missing: query_id", "pairs.csv:1"),
        ("pairs.csv", b"", "an empty file", "pairs.csv"),
        (
            "queries.csv",
            b'id,text\nq1,"a\nb"\nq2,caf\xe9\n',
            "text that is not UTF-8: 1",
            "queries.csv:4",
        ),
        (
            "queries.csv",
            b'id,text\nq1,"a\nb"\nq2,b\nq1,c\n',
            "query uid empty or given twice: 1",
            "queries.csv:5 (q1)",
        ),
        (
            "queries.csv",
            b"id,text\nq1,a\nq2,b\n,c\n",
            "query uid empty or given twice: 1",
            "queries.csv:4",
        ),
        (
            "queries.csv",
            b"id,text,split\nq1,a,train\nq2,b,exam\n",
            "split that is not train",
            "queries.csv:3 ('exam')",
        ),
        (
            "labels.csv",
            b"id,text\nl1,a\nl2,b\nl1,c\n",
            "label uid empty or given twice: 1",
            "labels.csv:4",
        ),
        (
            "filters.csv",
            b"query_id,label_id\nq1,l1\nq1,zz\n",
            "pair with an unknown label: 1",
            "filters.csv:3",
        ),
    ],
)
def test_tables(table_folder: Path, file: str, data: bytes, kind: str, where: str) -> None:
    assert read_raw(table_folder).num_labels == 2
    (table_folder / file).write_bytes(data)
    text = message(table_folder)
    assert kind in text and where in text


def test_a_query_with_pairs_in_two_splits(table_folder: Path) -> None:
    (table_folder / "queries.csv").write_text("id,text\nq1,a\nq2,b\n")
    (table_folder / "pairs.csv").write_text(
        "query_id,label_id,split\nq1,l1,train\nq2,l1,train\nq1,l2,test\n"
    )
    text = message(table_folder)
    assert "two splits (leak): 1" in text and "pairs.csv:2" in text


def test_beir(tiny_raw: RawData, tmp_path: Path) -> None:
    write_raw(tiny_raw, tmp_path / "raw", "beir")
    train = tmp_path / "raw" / "qrels" / "train.tsv"
    test = tmp_path / "raw" / "qrels" / "test.tsv"
    kept = test.read_bytes()
    test.write_bytes(kept + b"train-0\tlabel-1\t1\n" + b"test-3\tnone\t1\n")
    text = message(tmp_path / "raw")
    assert "again in test (leak): 1" in text and "queries.jsonl:1" in text
    assert "pair with an unknown label: 1" in text
    assert f"qrels/test.tsv:{kept.count(bytes([10])) + 2}" in text
    test.write_bytes(kept)
    rows = train.read_bytes().split(b"\n")
    rows[3] = b"train-0\tlabel-1\t-1"
    rows[4] = b"only two\tcolumns"
    train.write_bytes(b"\n".join(rows))
    text = message(tmp_path / "raw")
    assert (
        "qrels/train.tsv:4" in text and "not 3 columns: 1" in text and "qrels/train.tsv:5" in text
    )


def test_a_million_bad_pairs_are_told_quickly(
    raw_factory: Callable[..., RawData], tmp_path: Path
) -> None:
    write_raw(raw_factory(1000, 10, 1000, filters=False), tmp_path / "raw", "xmc-text")
    row = b" ".join(b"%d:1" % label for label in range(500, 1500)) + b"\n"
    (tmp_path / "raw" / "trn_X_Y.txt").write_bytes(b"1000 1000\n" + row * 1000)
    start = time.monotonic()
    text = message(tmp_path / "raw")
    assert time.monotonic() - start < 30
    assert "label index outside 0..999: 500,000" in text


@pytest.mark.parametrize("layout", ["xmc-json", "xmc-text", "pecos", "beir", "tables"])
def test_degenerate_data_is_legal(
    raw_factory: Callable[..., RawData], tmp_path: Path, layout: str
) -> None:
    """A query without positives, a label without training queries, L = 1."""
    for number, sizes in enumerate(
        [
            (4, 2, 1),
            (1, 1, 3),
            (6, 3, 4),
        ]
    ):
        raw = raw_factory(*sizes)
        write_raw(raw, tmp_path / f"{layout}-{number}", layout)
        back = read_raw(tmp_path / f"{layout}-{number}", test_share=0)
        # BEIR leaves such a query out
        assert layout == "beir" or back.relevance["test"][0].nnz == 0
        dataset = write_dataset(tmp_path / "dataset", back)
        expected = sum(m.nnz for m in raw.relevance.values())
        assert dataset.relevance.nnz == expected


@pytest.mark.slow
def test_a_million_stored_queries_are_judged_within_a_minute(tmp_path: Path) -> None:
    """What ingest lets through, legal but wrong: empty texts and a leak, told with few samples."""
    from unidec.validation.suite import validate_dataset

    sizes = {"train": 900_000, "test": 100_000}
    num_labels = 1000
    titles = {
        split: [f"a query of {split} number {row}" for row in range(size)]
        for split, size in sizes.items()
    }
    titles["train"][:20_000] = [""] * 20_000
    titles["test"][:50_000] = titles["train"][20_000:70_000]
    raw = RawData(
        "large",
        {
            split: text_table([f"{split}-{row}" for row in range(size)], titles[split], [""] * size)
            for split, size in sizes.items()
        },
        text_table(
            [f"label-{row}" for row in range(num_labels)],
            [f"label {row}" for row in range(num_labels)],
            None,
        ),
        {
            split: csr_matrix(
                (np.ones(size, np.float32), np.arange(size) % num_labels, np.arange(size + 1))
            )
            for split, size in sizes.items()
        },
        {split: csr_matrix((size, num_labels), dtype=bool) for split, size in sizes.items()},
    )
    write_dataset(tmp_path / "dataset", raw, validation_share=0)
    start = time.process_time()
    verdict = validate_dataset(tmp_path / "dataset", tmp_path / "out")
    assert time.process_time() - start < 60
    assert not verdict["success"]
    assert any("empty texts" in line and "20,000" in line for line in verdict["failed"])
    assert any("(leak)" in line and "50,000" in line for line in verdict["failed"])
    assert max(len(result["samples"]) for result in verdict["expectations"]) == 20
