"""Layouts in which pairs are given by uid: plain tables, and BEIR.

tables: queries: id, text [, content] [, split]; labels: id, text [, content]; pairs: query_id,
label_id [, relevance]
[, split]; filters (optional): query_id, label_id. The split (train, validation, test) belongs to
queries or pairs.

BEIR: corpus.jsonl (labels), queries.jsonl, qrels/{train,dev,test}.tsv.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Layout, Lines, Pairs, Source, rows_of
from unidec.data.lookalike import Known, difference, names_like, plain, visible
from unidec.data.raw import SPLITS, RawData, text_table
from unidec.data.table_file import columns_missing, no_text, read_rows
from unidec.errors import DataError

# rows and characters in memory as Python objects
MOST_ROWS = 4096
MOST_CHARS = 16 << 20
QUERIES, LABELS, PAIRS, FILTERS = (
    [f"{stem}.{kind}" for kind in ("csv", "tsv", "parquet", "jsonl")]
    for stem in ("queries", "labels", "pairs", "filters")
)
QUERY_COLUMNS = ("id", "text"), ("content", "split")  # needed, optional
LABEL_COLUMNS = ("id", "text"), ("content",)
PAIR_COLUMNS = ("query_id", "label_id"), ("relevance", "split")
QRELS = {
    split: f"qrels/{stem}.tsv"
    for split, stem in (("train", "train"), ("validation", "dev"), ("test", "test"))
}


class GivenPairs(Protocol):
    """Pairs before their look-up: a `Table`, or a matrix (`memory.PairMatrix`)."""

    @property
    def at(self) -> tuple[str, Lines]: ...

    @property
    def columns(self) -> dict[str, pa.ChunkedArray]: ...

    def pairs(self, source: Source, queries: pa.Table, labels: pa.Table) -> Pairs: ...


@dataclass(frozen=True)
class Table:
    """A file, or a table in memory, that was read.

    Attributes:
        at: its name and the `Lines` of its rows.
        columns: its columns as strings; "" for a missing value.
    """

    at: tuple[str, Lines]
    columns: dict[str, pa.ChunkedArray]
    num_rows: int

    def pairs(
        self, source: Source, queries: pa.Table, labels: pa.Table, are_filters: bool = False
    ) -> Pairs:
        """The rows as pairs: the first two columns are the uids of query and label. Unknown uids
        are recorded.

        The relevance is in column "relevance" or "score"; without such a column it is 1.
        """
        query, label, *rest = self.columns
        value = next((name for name in rest if name in ("relevance", "score")), None)
        values = ["1"] * self.num_rows if value is None else self.columns[value].to_pylist()
        value_P = np.fromiter(map(_number, values), np.float64, self.num_rows)
        rows = []
        for what, column, table in (("query", query, queries), ("label", label, labels)):
            rows.append(rows_of(self.columns[column], table["uid"]))
            unknown = np.flatnonzero(rows[-1] < 0)
            if len(unknown):
                uids = self.columns[column].take(pa.array(unknown)).to_pylist()
                _note_unknown(
                    source,
                    self.at,
                    what,
                    dict(zip(unknown.tolist(), uids, strict=True)),
                    table["uid"],
                )
        return Pairs(
            source, self.at, rows[0], rows[1], value_P, by_uid=True, are_filters=are_filters
        )

    def texts(
        self, source: Source, what: str, columns: Sequence[str] = ("id", "text", "content")
    ) -> pa.Table:
        """Table of uid, title and content from these columns, with checked uids. If all titles are
        empty, the contents become the titles.
        """
        uids, titles, contents = (self.columns.get(column) for column in columns)
        check_uids(source, uids, self.at, what)
        if titles is None or not pc.any(pc.not_equal(titles, "")).as_py():
            titles, contents = contents, titles
        return text_table(uids, titles, contents)


def _read_tables(source: Source) -> RawData:
    labels = read_table(source, source.need(*LABELS), *LABEL_COLUMNS)
    queries = read_table(source, source.need(*QUERIES), *QUERY_COLUMNS)
    pairs = read_table(source, source.need(*PAIRS), *PAIR_COLUMNS)
    path = source.find(*FILTERS)
    filters = None if path is None else read_table(source, path, PAIR_COLUMNS[0])
    return join_tables(source, queries, labels, pairs, filters)


def join_tables(
    source: Source, queries: Table, labels: Table, pairs: GivenPairs, filters: Table | None = None
) -> RawData:
    """The data set of these tables: pairs are looked up by uid, and each query belongs to one
    split.

    Raises:
        DataError: the tables have errors. Errors in the pairs are recorded in the source.
    """
    source.stop()  # uids cannot be looked up in tables with errors
    source.labels_at, label_texts, query_texts = (
        labels.at,
        labels.texts(source, "label"),
        queries.texts(source, "query"),
    )
    positives = pairs.pairs(source, query_texts, label_texts)
    split_N = _splits(queries, pairs, positives.query_P, source)
    relevance = positives.matrix((query_texts.num_rows, label_texts.num_rows))
    filter_pairs = csr_matrix(relevance.shape, dtype=bool)
    if filters is not None:
        filter_pairs = filters.pairs(source, query_texts, label_texts, are_filters=True).matrix(
            relevance.shape
        )
    return _by_split(
        source, (queries.at, query_texts), label_texts, relevance, filter_pairs, split_N
    )


def _read_beir(source: Source) -> RawData:
    """Pairs with a score of 0, which were judged not relevant, are skipped."""
    columns = ("_id", "title", "text")
    table = read_table(source, source.need("corpus.jsonl"), ("_id",), columns[1:])
    source.labels_at, corpus = table.at, table.texts(source, "label", columns)
    table = read_table(source, source.need("queries.jsonl"), ("_id",), columns[1:])
    queries = table.texts(source, "query", columns)
    split_N = np.full(table.num_rows, "", dtype=object)
    shape = (queries.num_rows, corpus.num_rows)
    relevance = csr_matrix(shape, dtype=np.float32)
    for split, file in QRELS.items():
        path = source.need(file) if split == "train" else source.find(file)
        if path is None:
            continue
        pairs = read_table(source, path, ("query-id", "corpus-id", "score")).pairs(
            source, queries, corpus
        )
        rows = np.unique(pairs.query_P[pairs.query_P >= 0])
        leaked = rows[(split_N[rows] != "") & (split_N[rows] != split)]
        source.note_rows(
            f"query of another split again in {split} (leak)", table.at, leaked, "{}", split_N
        )
        split_N[rows] = split
        relevance += pairs.matrix(shape, zero_is_no_pair=True)
    filter_pairs = csr_matrix(shape, dtype=bool)
    return _by_split(source, (table.at, queries), corpus, relevance, filter_pairs, split_N)


def _by_split(
    source: Source,
    queries: tuple[tuple[str, Lines], pa.Table],
    labels: pa.Table,
    relevance: csr_matrix,
    filter_pairs: csr_matrix,
    split_N: np.ndarray,
) -> RawData:
    """Raw data with the queries of each split and their pairs."""
    (file, lines), table = queries
    rows_by_split = {split: np.flatnonzero(split_N == split) for split in SPLITS}
    rows_by_split = {
        split: rows for split, rows in rows_by_split.items() if rows.size or split == "train"
    }
    source.queries_at = {
        split: (file, lines(rows).__getitem__) for split, rows in rows_by_split.items()
    }
    texts = {split: table.take(rows) for split, rows in rows_by_split.items()}
    positives, filters = (
        {split: csr_matrix(pairs[rows]) for split, rows in rows_by_split.items()}
        for pairs in (relevance, filter_pairs)
    )
    return RawData(source.root.name, texts, labels, positives, filters)


def read_table(
    source: Source,
    path: Path,
    needed: Sequence[str],
    optional: Sequence[str] = (),
    look: Callable[[dict[str, Any], int], object] = lambda _row, _line: None,
) -> Table:
    """Read columns of a file.

    Args:
        needed: columns that must exist.
        optional: further columns, which are left out of the table if they do not exist.
        look: called with each row and its line.

    Raises:
        DataError: a needed column is missing, a column is given twice, or the file cannot be read.
            Errors in single rows are recorded in the source.
    """

    def check(names: list[str]) -> None:
        check_columns(names, needed, optional, f"{path}:1")

    rows = read_rows(path, (*needed, *optional), check, source.bounds, source.report(path))
    return table_of(rows, source.name(path), source, (needed, optional), look=look)


def check_columns(
    names: Sequence[str], needed: Sequence[str], optional: Sequence[str], where: str
) -> None:
    """Raise a DataError if a needed column is missing, or a column is given twice."""
    count = Counter(names)
    missing = [column for column in needed if column not in count]
    twice = sorted(column for column in count if count[column] > 1)
    expected = ", ".join(needed) + "".join(f" [, {column}]" for column in optional)
    if missing:
        raise columns_missing(where, names, missing, expected)
    if twice:
        what = f"columns given twice: {', '.join(twice)[:300]}"
        raise DataError(what, where=where, got=", ".join(names[:50])[:300], expected=expected)


def table_of(
    rows: Iterable[tuple[int, dict[str, Any]]],
    name: str,
    source: Source,
    columns: tuple[Sequence[str], Sequence[str]],
    *,
    look: Callable[[dict[str, Any], int], object] = lambda _row, _line: None,
) -> Table:
    """The table of these rows, each with its line; `columns` are the needed and the optional ones
    of `read_table`.
    """
    needed, optional = columns
    wanted = (*needed, *optional)
    block = _Block(source, name, needed, wanted)
    tables = [block.take()]
    present = set(needed)
    for line, row in rows:
        look(row, line)
        present.update(column for column in optional if column in row)
        block.add(line, row)
        if block.is_full():
            tables.append(block.take())
        del row  # the next one is read before this name is set again, and may be large
    tables.append(block.take())
    table = pa.concat_tables(tables)
    columns_present = {column: table[column] for column in wanted if column in present}
    return Table(
        (block.name, np.concatenate(block.lines).__getitem__), columns_present, table.num_rows
    )


class _Block:
    """Rows of a file as lists of texts by column; `take` makes them a table.

    Attributes:
        lines: arrays of the lines of all rows taken.
    """

    def __init__(
        self, source: Source, name: str, needed: Sequence[str], wanted: Sequence[str]
    ) -> None:
        self.source = source
        self.name = name
        self.needed = needed
        self.texts: dict[str, list[str]] = {column: [] for column in wanted}
        self.lines: list[np.ndarray] = []
        self._new_lines: list[int] = []
        self._size = 0

    def add(self, line: int, row: dict[str, Any]) -> None:
        """Add a row."""
        for column, texts in self.texts.items():
            text = self._text(row.get(column), column, line, row)
            texts.append(text)
            self._size += len(text)
        self._new_lines.append(line)

    def is_full(self) -> bool:
        return self._size > MOST_CHARS or len(self._new_lines) >= MOST_ROWS

    def take(self) -> pa.Table:
        """The rows as a table of large_string; they are forgotten."""
        columns = [pa.array(texts, pa.large_string()) for texts in self.texts.values()]
        table = pa.table(columns, list(self.texts))
        self.lines.append(np.asarray(self._new_lines, dtype=np.int64))
        self.texts = {column: [] for column in self.texts}
        self._new_lines = []
        self._size = 0
        return table

    def _text(self, value: Any, column: str, line: int, row: dict[str, Any]) -> str:
        """A value as text. One that is not a string or number, or a needed value that is missing,
        is noted and "".

        NaN, which pandas writes for a missing value, is a missing value.
        """
        if type(value) is str:
            return value
        if type(value) in (int, float) and value == value:
            return str(value)
        if value is not None and type(value) is not float:
            self.source.note(f"{column} is not a text", self.name, line, type(value).__name__)
            self.source.advise(no_text(value))
        # an empty row was already noted: it is not a JSON object
        elif column in self.needed and row:
            self._note_missing(column, line, row)
        return ""

    def _note_missing(self, column: str, line: int, row: dict[str, Any]) -> None:
        names = list(map(str, row))
        self.source.note(f"no {column}", self.name, line, ", ".join(names[:10])[:80])
        if column not in row and (fix := names_like(names, [column])):
            self.source.advise(fix)


def _note_unknown(
    source: Source, at: tuple[str, Lines], what: str, uids: dict[int, str], known: pa.ChunkedArray
) -> None:
    """Record pairs with an unknown uid (by row), each with the known uid that it looks like, and
    the difference.
    """
    lookalikes = Known(known.to_pylist())
    differences = Counter[tuple[str, str]]()
    details: dict[int, str] = {}
    for row, uid in uids.items():
        details[row] = plain(uid)
        other = lookalikes.like(uid)
        if other is not None:
            details[row] = f"{visible(uid)}; there is a {what} {visible(other)}"
            differences[difference(uid, other)] += 1
    source.note_rows(
        f"pair with an unknown {what}",
        at,
        np.fromiter(uids, np.int64, len(uids)),
        "uid {}",
        details,
    )
    for (words, fix), count in differences.items():
        source.advise(
            f"{count:,} unknown {what} uid(s) differ from a known one only in {words}; {fix}"
        )


def check_uids(
    source: Source, uids: pa.Array | pa.ChunkedArray, at: tuple[str, Lines], what: str
) -> None:
    """Record every repeated and every empty uid."""
    rows = np.arange(len(uids))
    first = (
        pa.table({"uid": uids, "row": rows})
        .group_by("uid")
        .aggregate([("row", "min")])["row_min"]
        .to_numpy()
    )
    empty = pc.equal(uids, "").to_numpy(zero_copy_only=False)
    source.note_rows(
        f"{what} uid empty or given twice",
        at,
        np.flatnonzero(empty | ~np.isin(rows, first)),
        "{}",
        uids,
    )


def _splits(queries: Table, pairs: GivenPairs, query_P: np.ndarray, source: Source) -> np.ndarray:
    """Split of each query (object [N]): from the queries' column "split", else from the pairs',
    else "train".
    """
    if "split" in queries.columns:
        split_N = _split_names(queries, source)
        if "split" in pairs.columns:
            known_P = np.flatnonzero(query_P >= 0)
            differ = known_P[_split_names(pairs, source)[known_P] != split_N[query_P[known_P]]]
            kind = "pair in another split than its query"
            source.note_rows(kind, pairs.at, differ, "query {}", pairs.columns["query_id"])
        return split_N
    split_N = np.full(queries.num_rows, "train", dtype=object)
    if "split" in pairs.columns:
        split_P = _split_names(pairs, source)
        known = query_P >= 0
        split_N[query_P[known]] = split_P[known]
        differ = np.flatnonzero(known & (split_N[np.maximum(query_P, 0)] != split_P))
        kind = "query with pairs in two splits (leak)"
        source.note_rows(kind, pairs.at, differ, "query {}", pairs.columns["query_id"])
    return split_N


def _split_names(table: Table | GivenPairs, source: Source) -> np.ndarray:
    names = pc.utf8_lower(pc.utf8_trim_whitespace(table.columns["split"])).to_numpy(
        zero_copy_only=False
    )
    unknown = np.flatnonzero(~np.isin(names.astype(str), SPLITS))
    source.note_rows(
        "split that is not train, validation or test", table.at, unknown, "{!r}", names
    )
    return names


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


LAYOUTS = {
    "beir": Layout(
        "corpus.jsonl, queries.jsonl, qrels/train.tsv (and qrels/dev.tsv, qrels/test.tsv)",
        (["corpus.jsonl"], ["queries.jsonl"]),
        _read_beir,
    ),
    "tables": Layout(
        "queries, labels and pairs, each .csv, .tsv, .parquet or .jsonl",
        (QUERIES, LABELS, PAIRS),
        _read_tables,
    ),
}
