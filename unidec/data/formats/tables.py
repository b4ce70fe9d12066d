"""Layouts in which pairs are given by uid: plain tables, and BEIR.

tables: queries: id, text [, content] [, split]; labels: id, text [, content]; pairs: query_id, label_id [, relevance]
[, split]; filters (optional): query_id, label_id. The split (train, validation, test) belongs to queries or pairs.

BEIR: corpus.jsonl (labels), queries.jsonl, qrels/{train,dev,test}.tsv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Layout, Lines, Pairs, Source, rows_of
from unidec.data.raw import SPLITS, RawData, text_table
from unidec.data.table_file import Report, in_blocks, read_rows
from unidec.errors import DataError

QUERIES, LABELS, PAIRS, FILTERS = (
    [f"{stem}.{kind}" for kind in ("csv", "tsv", "parquet", "jsonl")]
    for stem in ("queries", "labels", "pairs", "filters")
)
QRELS = {split: f"qrels/{stem}.tsv" for split, stem in (("train", "train"), ("validation", "dev"), ("test", "test"))}


@dataclass(frozen=True)
class Table:
    """A file that was read.

    Attributes:
        at: its name and the `Lines` of its rows.
        columns: its columns as strings; "" for a missing value.
    """

    at: tuple[str, Lines]
    columns: dict[str, pa.ChunkedArray]
    num_rows: int

    def pairs(self, source: Source, queries: pa.Table, labels: pa.Table, are_filters: bool = False) -> Pairs:
        """The rows as pairs: the first two columns are the uids of query and label. Unknown uids are recorded.

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
            source.note_rows(f"pair with an unknown {what}", self.at, unknown, "uid {}", self.columns[column])
        return Pairs(source, self.at, rows[0], rows[1], value_P, by_uid=True, are_filters=are_filters)

    def texts(self, source: Source, what: str, columns: Sequence[str] = ("id", "text", "content")) -> pa.Table:
        """Table of uid, title and content from these columns, with checked uids. If all titles are empty, the contents
        become the titles."""
        uids, titles, contents = (self.columns.get(column) for column in columns)
        check_uids(source, uids, self.at, what)
        if titles is None or not pc.any(pc.not_equal(titles, "")).as_py():
            titles, contents = contents, titles
        return text_table(uids, titles, contents)


def _read_tables(source: Source) -> RawData:
    labels = read_table(source, source.need(*LABELS), ("id", "text"), ("content",))
    queries = read_table(source, source.need(*QUERIES), ("id", "text"), ("content", "split"))
    pairs = read_table(source, source.need(*PAIRS), ("query_id", "label_id"), ("relevance", "split"))
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
    if (path := source.find(*FILTERS)) is not None:
        filters = read_table(source, path, ("query_id", "label_id"))
        filter_pairs = filters.pairs(source, query_texts, label_texts, are_filters=True).matrix(relevance.shape)
    return _by_split(source, (queries.at, query_texts), label_texts, relevance, filter_pairs, split_N)


def _read_beir(source: Source) -> RawData:
    """Pairs with a score of 0, which were judged not relevant, are skipped."""
    columns = ("_id", "title", "text")
    table = read_table(source, source.need("corpus.jsonl"), ("_id",), columns[1:])
    source.labels_at, corpus = table.at, table.texts(source, "label", columns)
    table = read_table(source, source.need("queries.jsonl"), ("_id",), columns[1:])
    queries, split_N = table.texts(source, "query", columns), np.full(table.num_rows, "", dtype=object)
    shape = (queries.num_rows, corpus.num_rows)
    relevance = csr_matrix(shape, dtype=np.float32)
    for split, file in QRELS.items():
        path = source.need(file) if split == "train" else source.find(file)
        if path is None:
            continue
        pairs = read_table(source, path, ("query-id", "corpus-id", "score")).pairs(source, queries, corpus)
        rows = np.unique(pairs.query_P[pairs.query_P >= 0])
        leaked = rows[(split_N[rows] != "") & (split_N[rows] != split)]
        source.note_rows(f"query of another split again in {split} (leak)", table.at, leaked, "{}", split_N)
        split_N[rows] = split
        relevance += pairs.matrix(shape, zero_is_no_pair=True)
    filter_pairs = csr_matrix(shape, dtype=bool)
    return _by_split(source, (table.at, queries), corpus, relevance, filter_pairs, split_N)


def _by_split(
    source: Source, queries: tuple[tuple[str, Lines], pa.Table], labels: pa.Table, relevance: csr_matrix,
    filter_pairs: csr_matrix, split_N: np.ndarray,
) -> RawData:  # fmt: skip
    """Raw data with the queries of each split and their pairs."""
    (file, lines), table = queries
    rows_by_split = {split: np.flatnonzero(split_N == split) for split in SPLITS}
    rows_by_split = {split: rows for split, rows in rows_by_split.items() if rows.size or split == "train"}
    source.queries_at = {split: (file, lines(rows).__getitem__) for split, rows in rows_by_split.items()}
    texts = {split: table.take(rows) for split, rows in rows_by_split.items()}
    positives, filters = (
        {split: csr_matrix(pairs[rows]) for split, rows in rows_by_split.items()} for pairs in (relevance, filter_pairs)
    )
    return RawData(source.root.name, texts, labels, positives, filters)


def read_table(
    source: Source, path: Path, needed: Sequence[str], optional: Sequence[str] = (),
    look: Callable[[dict[str, Any], int], object] = lambda _row, _line: None,
) -> Table:  # fmt: skip
    """Read columns of a file.

    Args:
        needed: columns that must exist.
        optional: further columns, which are left out of the table if they do not exist.
        look: called with each row and its line.

    Raises:
        DataError: a needed column is missing, a column is given twice, or the file cannot be read. Errors in single
            rows are recorded in the source.
    """
    name, report, wanted = source.name(path), source.report(path), (*needed, *optional)
    line_blocks, present = [np.zeros(0, np.int64)], set(needed)
    tables = [pa.table({column: pa.array([], pa.large_string()) for column in wanted})]

    def check(names: list[str]) -> None:
        missing = [column for column in needed if column not in names]
        twice = sorted({column for column in names if names.count(column) > 1})
        if missing or twice:
            what = f"columns missing: {', '.join(missing)}" if missing else f"columns given twice: {', '.join(twice)}"
            expected = ", ".join(needed) + "".join(f" [, {column}]" for column in optional)
            raise DataError(what, where=f"{path}:1", got=", ".join(names)[:300], expected=expected)

    for block in in_blocks(read_rows(path, wanted, check, source.bounds, report)):
        for line, row in block:
            look(row, line)
            present |= row.keys()
        columns = [_column(block, column, column in needed, report) for column in wanted]
        line_blocks.append(np.asarray([line for line, _ in block]))
        tables.append(pa.table(columns, wanted))
    table = pa.concat_tables(tables)
    columns_present = {column: table[column] for column in wanted if column in present}
    return Table((name, np.concatenate(line_blocks).__getitem__), columns_present, table.num_rows)


def _column(block: list[tuple[int, dict[str, Any]]], name: str, needed: bool, report: Report) -> pa.Array:
    """One column of these rows as large_string. A value that is not a string or number, or a needed value that is
    missing, is reported and becomes ""."""
    texts = []
    for line, row in block:
        value = row.get(name)
        if value is not None and type(value) not in (str, int, float):
            report(f"{name} is not a text", line, type(value).__name__)
            value = None
        elif value is None and needed and row:  # an empty row was already reported: it is not a JSON object
            report(f"no {name}", line, str(row)[:80])
        texts.append("" if value is None else str(value))
    return pa.array(texts, pa.large_string())


def check_uids(source: Source, uids: pa.Array | pa.ChunkedArray, at: tuple[str, Lines], what: str) -> None:
    """Record every repeated and every empty uid."""
    rows = np.arange(len(uids))
    first = pa.table({"uid": uids, "row": rows}).group_by("uid").aggregate([("row", "min")])["row_min"].to_numpy()
    empty = pc.equal(uids, "").to_numpy(zero_copy_only=False)
    source.note_rows(f"{what} uid empty or given twice", at, np.flatnonzero(empty | ~np.isin(rows, first)), "{}", uids)


def _splits(queries: Table, pairs: Table, query_P: np.ndarray, source: Source) -> np.ndarray:
    """Split of each query (object [N]): from the queries' column "split", else from the pairs', else "train"."""
    if "split" in queries.columns:
        return _split_names(queries, source)
    split_N = np.full(queries.num_rows, "train", dtype=object)
    if "split" in pairs.columns:
        split_P = _split_names(pairs, source)
        known = query_P >= 0
        split_N[query_P[known]] = split_P[known]
        differ = np.flatnonzero(known & (split_N[np.maximum(query_P, 0)] != split_P))
        kind = "query with pairs in two splits (leak)"
        source.note_rows(kind, pairs.at, differ, "query {}", pairs.columns["query_id"])
    return split_N


def _split_names(table: Table, source: Source) -> np.ndarray:
    names = pc.utf8_lower(pc.utf8_trim_whitespace(table.columns["split"])).to_numpy(zero_copy_only=False)
    unknown = np.flatnonzero(~np.isin(names.astype(str), SPLITS))
    source.note_rows("split that is not train, validation or test", table.at, unknown, "{!r}", names)
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
        "queries, labels and pairs, each .csv, .tsv, .parquet or .jsonl", (QUERIES, LABELS, PAIRS), _read_tables
    ),
}
