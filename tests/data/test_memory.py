"""Data given in Python: every form of the same data is the same data set, by the rules of files,
and what could be read in two ways, or only in part, is refused.
"""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from helpers.raw_files import write_raw, write_table
from scipy.sparse import coo_matrix, csc_matrix, csr_matrix

from unidec.data.formats import from_memory, read_raw
from unidec.data.raw import RawData
from unidec.errors import DataError

QUERIES = ["red shoes", "garden hose", "blue shoes"]
LABELS = ["shoes", "hoses"]
PAIRS = [(0, 0), (1, 1), (2, 0)]
MATRIX = np.array([[1, 0], [0, 1], [1, 0]])


class Columns:
    """A table as `datasets.Dataset` is one: column names, and a column by its name."""

    def __init__(self, **columns: list[Any]) -> None:
        self._columns = columns
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, name: str) -> UserList[Any]:
        return UserList(self._columns[name])


class Streamed:
    """A table as polars and others have it: columns, and Arrow's stream."""

    def __init__(self, **columns: list[Any]) -> None:
        self._table = pa.table(columns)
        self.columns = list(columns)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


def same(one: RawData, other: RawData) -> bool:
    texts = one.labels.equals(other.labels) and one.queries.keys() == other.queries.keys()
    return texts and all(
        one.queries[split].equals(other.queries[split])
        and (one.relevance[split] != other.relevance[split]).nnz == 0
        for split in one.queries
    )


def frame(texts: list[str]) -> pd.DataFrame:
    return pd.DataFrame({"id": range(len(texts)), "text": texts})


@pytest.mark.parametrize(
    "texts",
    [
        tuple,
        np.array,
        UserList,
        pa.array,
        pd.Series,
        frame,
        lambda texts: {str(place): text for place, text in enumerate(texts)},
        lambda texts: frame(texts).astype({"id": "Int64"}),
        lambda texts: frame(texts).astype({"id": str, "text": object}),
        lambda texts: frame(texts).set_index("id"),
        lambda texts: pd.DataFrame({"text": texts}),
        lambda texts: pa.table({"text": texts, "id": [str(place) for place in range(len(texts))]}),
        lambda texts: pa.RecordBatch.from_pydict({"text": texts}),
        lambda texts: Streamed(text=texts, id=list(range(len(texts)))),
        lambda texts: Columns(id=list(range(len(texts))), text=texts),
        lambda texts: SimpleNamespace(to_list=lambda: texts),
    ],
)
def test_texts_in_every_form_are_the_same_texts(texts: Callable[[list[str]], Any]) -> None:
    assert same(
        from_memory(texts(QUERIES), texts(LABELS), PAIRS), from_memory(QUERIES, LABELS, PAIRS)
    )


@pytest.mark.parametrize(
    "pairs",
    [
        np.array(PAIRS).astype(str),
        np.array(PAIRS, dtype=object),
        set(PAIRS),
        [(str(query), np.int64(label)) for query, label in PAIRS],
        [(query, label, 1.0) for query, label in PAIRS],
        pd.DataFrame(PAIRS, columns=["query_id", "label_id"]),
        pd.DataFrame(
            [(label, query) for query, label in PAIRS],
            columns=["label_id", "query_id"],
            index=[7, 7, 7],
        ),
        pa.table(
            {"query_id": ["0", "1", "2"], "label_id": ["0", "1", "0"], "relevance": [1, 1, 1]}
        ),
        Columns(query_id=[0, 1, 2], label_id=[0, 1, 0]),
        csr_matrix(MATRIX),
        csc_matrix(MATRIX.astype(bool)),
        coo_matrix(MATRIX.astype(float)),
        MATRIX.astype(bool),
        MATRIX.astype(float),
    ],
)
def test_pairs_in_every_form_are_the_same_pairs(pairs: Any) -> None:
    assert same(from_memory(QUERIES, LABELS, pairs), from_memory(QUERIES, LABELS, PAIRS))


def test_tables_are_read_as_files_are(tiny_raw: RawData, tmp_path: Path) -> None:
    write_raw(tiny_raw, tmp_path, "tables", "csv")
    queries, labels, pairs = (
        pd.read_csv(tmp_path / f"{name}.csv") for name in ("queries", "labels", "pairs")
    )
    given = from_memory(queries, labels, pairs)
    assert "test" in given.queries
    assert given.queries["test"].num_rows > 0
    without_filters = tmp_path / "plain"
    without_filters.mkdir()
    for name, table in (
        ("queries", queries),
        ("labels", labels),
        ("pairs", pairs),
    ):
        write_table(
            pa.Table.from_pandas(table.astype(str).replace("nan", ""), preserve_index=False),
            without_filters / f"{name}.csv",
        )
    assert same(given, read_raw(without_filters))


def test_an_array_of_another_shape_than_the_matrix_holds_pairs() -> None:
    assert same(
        from_memory(QUERIES, LABELS, np.array(PAIRS[:2])), from_memory(QUERIES, LABELS, PAIRS[:2])
    )


def test_an_index_holds_the_uids_and_pairs_follow_it() -> None:
    queries = pd.Series(QUERIES, index=[30, 10, 20])
    raw = from_memory(queries, LABELS, [(10, 1), (30, 0)])
    assert raw.queries["train"]["uid"].to_pylist() == ["30", "10", "20"]
    expected = [[1, 0], [0, 1], [0, 0]]
    assert raw.relevance["train"].toarray().tolist() == expected
    kept = frame(QUERIES)[lambda rows: rows["text"].str.contains("shoes")]  # its index has a gap
    assert from_memory(kept, LABELS, [(2, 0)]).relevance["train"].toarray().tolist() == [
        [0, 0],
        [1, 0],
    ]


def test_splits_relevance_and_contents_are_read() -> None:
    splits = ["train", "Test", "validation"]
    queries = pd.DataFrame(
        {
            "text": QUERIES,
            "split": splits,
            "content": ["x", None, ""],
        }
    )
    pairs = pd.DataFrame(
        {
            "query_id": [0, 1, 2],
            "label_id": [0, 1, 0],
            "relevance": [0.5, 1, 2],
        }
    )
    raw = from_memory(queries, LABELS, pairs)
    assert {name: table["title"].to_pylist() for name, table in raw.queries.items()} == {
        "train": QUERIES[:1],
        "test": QUERIES[1:2],
        "validation": QUERIES[2:],
    }
    assert raw.queries["train"]["content"].to_pylist() == ["x"]
    assert [raw.relevance[name].data.tolist() for name in ("train", "test", "validation")] == [
        [0.5],
        [1],
        [2],
    ]
    by_pair = from_memory(QUERIES, LABELS, pairs.assign(split=splits))
    assert same(by_pair, from_memory(queries.drop(columns="content"), LABELS, pairs))


MANY = pd.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1)], names=["query_id", "label_id"])


@pytest.mark.parametrize(
    ("queries", "labels", "words"),
    [
        ("one text", LABELS, "single text"),
        (b"bytes", LABELS, "single text"),
        ([], LABELS, "no texts given"),
        (pd.DataFrame({"id": [], "text": []}), LABELS, "no texts given"),
        (["q", " ", "r"], LABELS, r"missing or empty: 1\n +queries:1"),
        (QUERIES, ["a", None], r"missing or empty: 1\n +labels:1 \(None\)"),
        (QUERIES, ["a", float("nan")], "missing or empty"),
        (QUERIES, pd.Series(["a", pd.NA]), "missing or empty"),
        ([["q"], ["r"], ["s"]], LABELS, "text is not a text: 3"),
        ([("u", "q"), ("v", "r"), ("w", "s")], LABELS, "text is not a text: 3"),
        ([{"id": 1, "text": "q"}] * 3, LABELS, "text is not a text: 3"),
        ([1, 2, 3], LABELS, "text is not a text: 3"),
        ([b"q", "r", "s"], LABELS, "text is not a text: 1"),
        (["q", "\ud800", "s"], LABELS, "not valid Unicode: 1"),
        ({"id": [1, 2], "text": ["q", "r"]}, LABELS, "text is not a text: 2"),
        ((text for text in QUERIES), LABELS, r"got: generator(.|\n)*list\(queries\)"),
        (map(str, QUERIES), LABELS, r"list\(queries\)"),
        (set(QUERIES), LABELS, "got: set"),
        (dict(enumerate(QUERIES)).values(), LABELS, "got: dict_values"),
        (3, LABELS, "got: int"),
        (np.array([QUERIES]), LABELS, r"an array of shape \(1, 3\)"),
        (pd.DataFrame({"name": QUERIES}), LABELS, "columns missing: text"),
        (Streamed(name=QUERIES), LABELS, "columns missing: text"),
        (SimpleNamespace(columns=["text"], collect=None), LABELS, r"cannot be read(.|\n)*collect"),
        (Columns(id=[1, 2], text=QUERIES), LABELS, "different lengths(.|\n)*id: 2, text: 3"),
        (pd.DataFrame({"text": QUERIES, "title": QUERIES}), LABELS, "unknown columns(.|\n)*title"),
        (pd.DataFrame({"text": QUERIES, "Split": "test"}), LABELS, "unknown columns(.|\n)*Split"),
        (pd.DataFrame([QUERIES], columns=["text", "id", "text"]), LABELS, "given twice: text"),
        (pd.DataFrame({"text": QUERIES}, index=MANY), LABELS, "several levels"),
        (
            pd.DataFrame({"text": QUERIES, "id": [1, 2, 3]}, index=MANY),
            LABELS,
            "index would not be read",
        ),
        (pd.Series(QUERIES, index=MANY), LABELS, "several levels"),
        (frame(QUERIES).assign(id=[1, 1, 2]), LABELS, "uid empty or given twice"),
        (frame(QUERIES).assign(id=[1.0, 2.0, 3.0]), LABELS, "id is a float(.|\n)*Int64"),
        (frame(QUERIES).assign(id=[1, None, 2]), LABELS, "id is a float"),
        (frame(QUERIES).assign(id=["a", None, "b"]), LABELS, "no id: 1"),
        (
            frame(QUERIES).assign(id=[True, False, None]),
            LABELS,
            "neither a text nor a whole number",
        ),
        (
            frame(QUERIES).assign(id=pd.date_range("2024", periods=3)),
            LABELS,
            "neither a text nor a whole number",
        ),
        (pd.Series(QUERIES, index=[0.5, 1.5, 2.5]), LABELS, "id is a float"),
        (
            frame(QUERIES).assign(split=["train", "dev", None]),
            LABELS,
            "not train, validation or test: 2",
        ),
        (frame(QUERIES).assign(split="test"), LABELS, "no training queries"),
        (QUERIES, pd.DataFrame({"text": LABELS, "split": "train"}), "unknown columns(.|\n)*split"),
    ],
)
def test_texts_that_are_not_understood_are_refused(queries: Any, labels: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        from_memory(queries, labels, [])


TABLE = pd.DataFrame(PAIRS, columns=["query_id", "label_id"])
NAN = float("nan")


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([(0, 7)], "unknown label"),
        ([("x", 0)], "unknown query"),
        ([(0, -1)], "unknown label"),
        ([(0, 0.0)], "label_id is a float"),
        ([(0, True)], "neither a text nor a whole number"),
        ([(0, None)], "no label_id"),
        ([(0, 0), (0, 0)], "pair given twice"),
        ([(0, "0"), ("0", 0)], "pair given twice"),
        ([(0, 0, 0)], "relevance that is not a positive number"),
        ([(0, 0, NAN)], "relevance that is not a positive number"),
        ([(0, 0, "much")], "relevance is not a number"),
        ([(0, 0), (0, 1, 1)], "position 1: not a pair"),
        ([(0,)], "position 0: not a pair"),
        ([(0, 0, 1, 1)], "position 0: not a pair"),
        (["00", "11"], "position 0: not a pair"),
        ([{"query_id": 0, "label_id": 0}], "not a pair"),
        ([[0, 1], [1], [0]], "position 1: not a pair"),
        ([[0, 1], [1, 0], [0, 1]], r"ambiguous(.|\n)*\[tuple\(pair\)"),
        ("0 0", "got: str"),
        ({0: [0]}, "got: dict"),
        (zip([0], [0], strict=True), r"got: zip(.|\n)*list\(pairs\)"),
        (None, "got: NoneType"),
        (pd.Series([0, 1]), "got: Series"),
        (pd.DataFrame({"query_id": [0]}), "columns missing: label_id"),
        (TABLE.assign(score=1), "unknown columns(.|\n)*score"),
        (TABLE.assign(relevance=[1, 0, 1]), r"not a positive number: 1\n +pairs:1"),
        (TABLE.assign(relevance=[1, -1, 1]), "not a positive number: 1"),
        (TABLE.assign(relevance=[1, NAN, float("inf")]), "not a positive number: 2"),
        (TABLE.assign(label_id=[0, NAN, 0]), "label_id is a float"),
        (TABLE.assign(split="tests"), "not train, validation or test: 3"),
        (pd.concat([TABLE, TABLE]), "pair given twice: 3"),
        (TABLE.set_index("query_id"), "index would not be read(.|\n)*query_id"),
        (
            TABLE.assign(relevance=0).set_index("relevance"),
            r"index would not be read(.|\n)*relevance",
        ),
        (MATRIX, "ambiguous"),
        (np.ones((2, 1)), "wrong shape"),
        (np.ones((3, 3)), "wrong shape"),
        (np.array(["0", "1"]), "wrong shape"),
        (np.array([[0.0, 0.0]]), "wrong shape"),
        (csr_matrix((3, 3)), "wrong shape"),
        (csr_matrix(MATRIX.T), "wrong shape"),
        (csr_matrix(-MATRIX), "not a positive number: 3"),
        (csr_matrix(MATRIX * NAN), "not a positive number: 6"),
        (csr_matrix(MATRIX * 1j), "does not hold numbers"),
        (coo_matrix(([1, 1], ([0, 0], [1, 1])), (3, 2)), "pair given twice"),
    ],
)
def test_pairs_that_are_not_understood_are_refused(pairs: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        from_memory(QUERIES, LABELS, pairs)


def test_two_splits_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    queries = frame(QUERIES).assign(split=["train", "test", "train"])
    pairs = TABLE.assign(split=["train", "test", "test"])
    with pytest.raises(DataError, match=r"pair in another split than its query: 1\n +pairs:2"):
        from_memory(queries, LABELS, pairs)
    for name, table in (
        ("queries", queries),
        ("labels", frame(LABELS)),
        ("pairs", pairs),
    ):
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    with pytest.raises(DataError, match=r"pair in another split than its query: 1\n +pairs\.csv:4"):
        read_raw(tmp_path)
