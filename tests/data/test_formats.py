"""Every layout gives back what was written; layouts are told apart; splits are cut where there is
none.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers.raw_files import as_beir_has_it, write_raw
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_matrix, csc_matrix, csr_matrix, save_npz

from unidec.data.formats import LAYOUTS, read_raw
from unidec.data.raw import RawData, text_table
from unidec.data.storage import file_sha256
from unidec.errors import DataError

ONE_TEXT = ("xmc-text", "pecos")


def assert_same(read: RawData, wanted: RawData, texts_only: bool = False) -> None:
    assert read.queries.keys() == wanted.queries.keys()
    for split in wanted.queries:
        for got, expected in (
            (read.relevance[split], wanted.relevance[split]),
            (read.filter_pairs[split], wanted.filter_pairs[split]),
        ):
            assert got.shape == expected.shape and got.dtype == expected.dtype
            np.testing.assert_array_equal(got.toarray(), expected.toarray())
    tables = [(read.queries[split], wanted.queries[split]) for split in wanted.queries] + [
        (read.labels, wanted.labels)
    ]
    for got, expected in tables:
        columns = ["title"] if texts_only else ["uid", "title", "content"]
        assert got.select(columns).to_pydict() == expected.select(columns).to_pydict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(tiny_raw: RawData, tmp_path: Path, layout: str) -> None:
    write_raw(tiny_raw, tmp_path / "raw", layout)
    read = read_raw(tmp_path / "raw")
    assert read.format == layout and read.name == "raw"
    assert_same(
        read,
        as_beir_has_it(tiny_raw) if layout == "beir" else tiny_raw,
        texts_only=layout in ONE_TEXT,
    )
    files = {
        path.relative_to(tmp_path / "raw").as_posix(): path
        for path in (tmp_path / "raw").rglob("*.*")
    }
    assert read.files == {name: file_sha256(path) for name, path in files.items()}


@pytest.mark.parametrize("layout", ["tables", "beir"])
def test_a_validation_split(tiny_raw: RawData, tmp_path: Path, layout: str) -> None:
    raw = tiny_raw.take({"validation": np.arange(5), "train": np.arange(5, 48)})
    write_raw(raw, tmp_path / "raw", layout)
    assert_same(read_raw(tmp_path / "raw"), as_beir_has_it(raw) if layout == "beir" else raw)


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "jsonl"])
def test_round_trip_of_each_kind_of_table(tiny_raw: RawData, tmp_path: Path, kind: str) -> None:
    write_raw(tiny_raw, tmp_path / "raw", "tables", kind=kind)
    assert_same(read_raw(tmp_path / "raw"), tiny_raw)


@pytest.mark.parametrize("layout", ["xmc-json", "xmc-text", "tables"])
def test_gzip_is_transparent(tiny_raw: RawData, tmp_path: Path, layout: str) -> None:
    write_raw(tiny_raw, tmp_path / "raw", layout)
    for path in list((tmp_path / "raw").iterdir()):
        if path.suffix != ".gz":
            (path.parent / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    assert_same(read_raw(tmp_path / "raw"), tiny_raw, texts_only=layout == "xmc-text")


text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
value = st.floats(0.0009765625, 100, width=32)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.tuples(text, text, st.dictionaries(st.integers(0, 4), value)), min_size=1, max_size=5
    ),
    text,
)
def test_round_trip_of_any_text_and_relevance(queries: list, extra: str) -> None:
    relevance = np.zeros((len(queries), 5), dtype=np.float32)
    for row, (_, _, targets) in enumerate(queries):
        for label, number in targets.items():
            relevance[row, label] = number
    labels = text_table(
        [f"l{i}" for i in range(5)], [extra, "b,\"'", "c", "d", "é\u2028"], [extra, "", "x", "", ""]
    )
    empty = {
        "train": csr_matrix(relevance.shape, dtype=bool),
        "test": csr_matrix((1, 5), dtype=bool),
    }
    raw = RawData(
        "raw",
        {
            "train": text_table(
                [f"q{i}" for i in range(len(queries))], *zip(*[q[:2] for q in queries])
            ),
            "test": text_table(["t"], ["t"]),
        },
        labels,
        {"train": csr_matrix(relevance), "test": csr_matrix((1, 5), dtype=np.float32)},
        empty,
    )
    with tempfile.TemporaryDirectory() as folder:
        for layout in LAYOUTS.keys() - {"beir"}:  # which leaves out queries without a pair
            write_raw(raw, Path(folder, layout), layout)
            assert_same(read_raw(Path(folder, layout)), raw, texts_only=layout in ONE_TEXT)


@pytest.mark.parametrize("make", [csr_matrix, csc_matrix, coo_matrix])
def test_npz_of_every_kind(tiny_raw: RawData, tmp_path: Path, make: Callable) -> None:
    write_raw(tiny_raw, tmp_path / "raw", "xmc-text")
    for split, short in (("train", "trn"), ("test", "tst")):
        (tmp_path / "raw" / f"{short}_X_Y.txt").unlink()
        save_npz(tmp_path / "raw" / f"Y.{short}.npz", make(tiny_raw.relevance[split]))
    (tmp_path / "raw" / "raw").mkdir()
    for name in ("trn_X.txt", "tst_X.txt", "Y.txt"):
        shutil.move(tmp_path / "raw" / name, tmp_path / "raw" / "raw" / name)
    assert_same(read_raw(tmp_path / "raw"), tiny_raw, texts_only=True)


def test_old_names_of_filter_files(tiny_raw: RawData, tmp_path: Path) -> None:
    write_raw(tiny_raw, tmp_path / "raw", "xmc-text")
    for old, new in (
        ("filter_labels_train.txt", "trn_filter_labels.txt"),
        ("filter_labels_test.txt", "tst_filter_labels.txt"),
    ):
        (tmp_path / "raw" / old).rename(tmp_path / "raw" / new)
    assert_same(read_raw(tmp_path / "raw"), tiny_raw, texts_only=True)


def test_lf_debian_as_its_statistics_say(lf_debian: RawData, lf_debian_path: Path) -> None:
    raw = lf_debian
    stats = json.loads((lf_debian_path / "stats.json").read_text())
    assert raw.format == "xmc-json" and raw.num_labels == stats["n_labels"]
    for split in ("train", "test"):
        expected = stats[f"n_{split}"]
        assert raw.queries[split].num_rows == expected
        assert raw.relevance[split].nnz == stats[f"{split}_pairs"]
        assert raw.filter_pairs[split].nnz == stats["filter_pairs"][f"filter_labels_{split}.txt"]


def write_tables(folder: Path, queries: str, labels: str, pairs: str) -> Path:
    folder.mkdir()
    (folder / "queries.csv").write_text(queries)
    (folder / "labels.tsv").write_text(labels)
    (folder / "pairs.jsonl").write_text(pairs)
    return folder


def test_tables_by_hand(tmp_path: Path) -> None:
    path = write_tables(
        tmp_path / "shop",
        '\ufeffid,text,split\n7,"red, round\napple",train\n\n8,pear,test\n9,plum,Validation\n',
        "id\ttext\textra\nfruit\tFruit\t1\ntree\tTree\t2\n",
        '{"query_id": 7, "label_id": "fruit"}\n{"query_id": "8", "label_id": "tree", '
        '"relevance": 0.5}\n'
        '{"query_id": 9, "label_id": "tree", "relevance": "2"}\n',
    )
    # a relevance given for some pairs only is a fault of the others
    with pytest.raises(DataError, match=r"pairs\.jsonl:1"):
        read_raw(path)
    lines = (path / "pairs.jsonl").read_text().replace('"fruit"', '"fruit", "relevance": 1')
    (path / "pairs.jsonl").write_text(lines)
    raw = read_raw(path)
    assert raw.queries["train"].to_pylist() == [
        {"uid": "7", "title": "red, round\napple", "content": ""}
    ]
    assert raw.queries["validation"]["uid"].to_pylist() == ["9"]
    assert raw.relevance["test"].toarray().tolist() == [[0, 0.5]]
    assert raw.relevance["validation"].toarray().tolist() == [[0, 2]]


def test_split_of_the_pairs(tmp_path: Path) -> None:
    path = write_tables(
        tmp_path / "shop",
        "id,text\n1,a\n2,b\n3,no pairs\n",
        "id\ttext\nx\tX\n",
        (
            '{"query_id": 1, "label_id": "x", "split": "train"}\n{"query_id": 2, "label_id": '
            '"x", "split": "test"}\n'
        ),
    )
    raw = read_raw(path)
    assert {split: table["uid"].to_pylist() for split, table in raw.queries.items()} == {
        "train": ["1", "3"],
        "test": ["2"],
    }


def test_parquet_with_numbers_as_ids(tiny_raw: RawData, tmp_path: Path) -> None:
    write_raw(tiny_raw, tmp_path / "raw", "tables", kind="parquet")
    for name, column in (
        ("labels", "id"),
        ("pairs", "label_id"),
        ("filters", "label_id"),
    ):
        table = pq.read_table(tmp_path / "raw" / f"{name}.parquet").to_pandas()
        table[column] = table[column].str.removeprefix("label-").astype(int)
        table.to_parquet(tmp_path / "raw" / f"{name}.parquet")
    raw = read_raw(tmp_path / "raw")
    assert raw.labels["uid"].to_pylist() == [str(i) for i in range(40)]
    expected = tiny_raw.relevance["train"].toarray()
    np.testing.assert_array_equal(raw.relevance["train"].toarray(), expected)


def test_beir_by_hand(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text(
        '{"_id": "d1", "title": "", "text": "one"}\n{"_id": "d2", "title": "", "text": "two"}\n'
    )
    queries = [
        {
            "_id": f"q{i}",
            "text": f"query {i}",
            "metadata": {},
        }
        for i in range(4)
    ]
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps(q) + "\n" for q in queries))
    head = "query-id\tcorpus-id\tscore\n"
    (tmp_path / "qrels" / "train.tsv").write_text(head + "q2\td1\t1\nq0\td2\t2\nq0\td1\t0\n")
    (tmp_path / "qrels" / "test.tsv").write_text(head + "q1\td2\t1\n")
    raw = read_raw(tmp_path)
    assert raw.labels["title"].to_pylist() == ["one", "two"]
    assert raw.labels["content"].to_pylist() == ["", ""]
    assert raw.queries["train"]["uid"].to_pylist() == ["q0", "q2"]  # q3 is in no split: left out
    assert raw.relevance["train"].toarray().tolist() == [[0, 2], [1, 0]]  # a score of 0 is no pair
    assert raw.queries["test"]["title"].to_pylist() == ["query 1"]


def test_a_missing_test_split_is_cut(tmp_path: Path, tiny_raw: RawData) -> None:
    write_raw(tiny_raw, tmp_path / "raw", "xmc-json")
    (tmp_path / "raw" / "tst.json.gz").unlink()
    (tmp_path / "raw" / "filter_labels_test.txt").unlink()
    raw = read_raw(tmp_path / "raw", test_share=0.25, split_seed=1)
    sizes = {split: table.num_rows for split, table in raw.queries.items()}
    assert sizes["train"] + sizes["test"] == 48
    assert abs(sizes["test"] - 12) <= 2
    assert (
        read_raw(tmp_path / "raw", test_share=0.25, split_seed=1)
        .queries["test"]
        .equals(raw.queries["test"])
    )
    whole = {
        q["uid"]: row
        for q, row in zip(
            tiny_raw.queries["train"].to_pylist(), tiny_raw.relevance["train"].toarray()
        )
    }
    for split, table in raw.queries.items():
        for uid, row in zip(table["uid"].to_pylist(), raw.relevance[split].toarray()):
            np.testing.assert_array_equal(row, whole[uid])


def test_uids_where_there_are_none_are_row_numbers(tmp_path: Path) -> None:
    (tmp_path / "lbl.json").write_text('{"title": "a"}\n{"title": "b"}\n')
    (tmp_path / "trn.json").write_text(
        '{"title": "x", "target_ind": [0]}\n\n{"title": "y", "target_ind": []}\n'
    )
    (tmp_path / "tst.json").write_text('{"title": "z", "target_ind": [1], "target_rel": [2.5]}\n')
    raw = read_raw(tmp_path)
    assert raw.labels["uid"].to_pylist() == ["0", "1"]
    assert raw.queries["train"]["uid"].to_pylist() == ["0", "1"]
    assert raw.queries["test"]["uid"].to_pylist() == ["2"]
    assert raw.relevance["test"].toarray().tolist() == [[0, 2.5]]


def test_layouts_that_are_not_told_apart(tmp_path: Path, tiny_raw: RawData) -> None:
    (tmp_path / "readme.txt").write_text("hello")
    with pytest.raises(
        DataError, match=r"no layout fits(.|\n)*readme\.txt(.|\n)*beir: corpus\.jsonl"
    ):
        read_raw(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        read_raw(tmp_path / "none")
    with pytest.raises(DataError, match="unknown layout"):
        read_raw(tmp_path, "libsvm")
    write_raw(tiny_raw, tmp_path / "raw", "xmc-json")
    write_raw(tiny_raw, tmp_path / "text", "xmc-text")
    shutil.copytree(tmp_path / "text", tmp_path / "raw", dirs_exist_ok=True)
    with pytest.raises(DataError, match="more than one layout"):
        read_raw(tmp_path / "raw")
    assert read_raw(tmp_path / "raw", "xmc-json").format == "xmc-json"
