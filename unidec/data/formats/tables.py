"""Layouts in which pairs are given by uid: plain tables, and BEIR.

tables: queries: id, text [, content] [, split]; labels: id, text [, content]; pairs: query_id,
label_id [, relevance] [, split]; filters (optional): query_id, label_id. The split (train,
validation, test) is a column of either the queries or the pairs.

BEIR: corpus.jsonl (labels), queries.jsonl, qrels/{train,dev,test}.tsv.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Layout, Pairs, Places, Source
from unidec.data.formats.table_reader import Table, read_table
from unidec.data.lookalike import Known, difference, plain, visible
from unidec.data.raw import SPLITS, RawData, text_table
from unidec.data.spool import take_pairs, take_texts

QUERIES, LABELS, PAIRS, FILTERS = (
    [f"{stem}.{kind}" for kind in ("csv", "tsv", "parquet", "jsonl")]
    for stem in ("queries", "labels", "pairs", "filters")
)
QUERY_COLUMNS = ("id", "text"), ("content", "split")  # required, optional
LABEL_COLUMNS = ("id", "text"), ("content",)
PAIR_COLUMNS = ("query_id", "label_id"), ("relevance", "split")
QRELS = {
    "train": "qrels/train.tsv",
    "validation": "qrels/dev.tsv",
    "test": "qrels/test.tsv",
}


def pairs_of(table: Table, source: Source, queries: pa.Table, labels: pa.Table) -> Pairs:
    """The rows of a table as pairs: its first two columns are the uids of query and label. Unknown
    uids are recorded as errors.

    The relevance is in column "relevance" or "score"; without such a column it is 1.
    """
    query, label, *_ = table.columns
    given = table.columns.get("relevance", table.columns.get("score"))
    value_P = np.broadcast_to(1.0, table.num_rows)
    if given is not None:
        values = source.numbers(np.float64)
        for block in given.chunks:
            values.add([_number(value) for value in block.to_pylist()])
        value_P = values.array()
    return Pairs(
        source=source,
        at=table.at,
        query_P=_rows(table, source, "query", query, queries["uid"]),
        label_P=_rows(table, source, "label", label, labels["uid"]),
        value_P=value_P,
        given=(table.columns[query], table.columns[label], value_P if given is None else given),
    )


def _rows(
    table: Table, source: Source, what: str, column: str, known: pa.ChunkedArray
) -> np.ndarray:
    """Row in `known` of each uid of a column; -1 for an unknown uid, which is recorded."""
    uids = table.columns[column]
    row_P = source.rows_of(uids, known)
    unknown = np.flatnonzero(row_P < 0)
    if len(unknown):
        by_row = dict(zip(unknown.tolist(), uids.take(unknown).to_pylist(), strict=True))
        _note_unknown(source, table.at, what, by_row, known)
    return row_P


def texts_of(
    table: Table, source: Source, what: str, columns: Sequence[str] = ("id", "text", "content")
) -> pa.Table:
    """Table of uid, title and content from these columns, with checked uids. If all titles are
    empty, the contents become the titles.
    """
    uids, titles, contents = (table.columns.get(column) for column in columns)
    check_uids(source, uids, table.at, what)
    if titles is None or pc.all(pc.equal(titles, "")).as_py():
        titles, contents = contents, titles
    return text_table(uids, titles, contents)


def _read_tables(source: Source) -> RawData:
    labels = read_table(source, source.parts(*LABELS), *LABEL_COLUMNS)
    queries = read_table(source, source.parts(*QUERIES), *QUERY_COLUMNS)
    pairs = read_table(source, source.parts(*PAIRS), *PAIR_COLUMNS)
    files = source.present(*FILTERS)
    filters = read_table(source, files, PAIR_COLUMNS[0]) if files else None
    return join_tables(source, queries, labels, pairs, filters)


def join_tables(
    source: Source, queries: Table, labels: Table, pairs: Table, filters: Table | None = None
) -> RawData:
    """The data set of these tables: pairs are looked up by uid, and each query belongs to one
    split.

    Raises:
        DataError: the tables have errors. Errors in the pairs are recorded in the source.
    """
    source.stop()  # uids cannot be looked up in tables with errors
    source.labels_at = labels.at
    label_texts = texts_of(labels, source, "label")
    query_texts = texts_of(queries, source, "query")
    positives = pairs_of(pairs, source, query_texts, label_texts)
    split_N = _splits(queries, pairs, positives.query_P, source)
    shape = (query_texts.num_rows, label_texts.num_rows)
    relevance = positives.matrix(shape)
    filter_pairs = csr_matrix(shape, dtype=bool)
    if filters is not None:
        found = pairs_of(filters, source, query_texts, label_texts)
        filter_pairs = replace(found, value_P=None).matrix(shape)
    raw = RawData(source.root.name, {}, label_texts, {}, {})
    for number, split in enumerate(SPLITS):
        rows = np.flatnonzero(split_N == number)
        if rows.size or split == "train":
            source.queries_at[split] = places_of(queries.at, rows)
            _add_split(raw, split, rows, (query_texts, relevance, filter_pairs), source.scratch)
    return raw


def _add_split(
    raw: RawData,
    split: str,
    rows: np.ndarray,
    parts: tuple[pa.Table, csr_matrix, csr_matrix],
    scratch: Path | None,
) -> None:
    """Add the rows of a split to a data set; `parts`: texts, pairs and filter pairs of all
    queries.
    """
    texts, relevance, filter_pairs = parts
    raw.queries[split] = take_texts(texts, rows, scratch)
    raw.relevance[split] = take_pairs(relevance, rows, scratch)
    raw.filter_pairs[split] = take_pairs(filter_pairs, rows, scratch)


def _read_beir(source: Source) -> RawData:
    """Pairs with a score of 0, which were judged not relevant, are skipped."""
    columns = ("_id", "title", "text")
    corpus = read_table(source, source.parts("corpus.jsonl"), columns[:1], columns[1:])
    queries = read_table(source, source.parts("queries.jsonl"), columns[:1], columns[1:])
    source.labels_at = corpus.at
    label_texts = texts_of(corpus, source, "label", columns)
    query_texts = texts_of(queries, source, "query", columns)
    raw = RawData(source.root.name, {}, label_texts, {}, {})
    shape = (queries.num_rows, corpus.num_rows)
    for split, file in QRELS.items():
        path = source.need(file) if split == "train" else source.find(file)
        if path is None:
            continue
        table = read_table(source, [path], ("query-id", "corpus-id", "score"))
        pairs = pairs_of(table, source, query_texts, label_texts)
        rows = np.unique(pairs.query_P[pairs.query_P >= 0])
        parts = (query_texts, pairs.matrix(shape, True), csr_matrix(shape, dtype=bool))
        source.queries_at[split] = places_of(queries.at, rows)
        _add_split(raw, split, rows, parts, source.scratch)
    return raw


def places_of(at: Places, rows: np.ndarray) -> Places:
    """The places of these rows of a file, numbered from 0."""
    return lambda chosen: at(rows[chosen])


def _note_unknown(
    source: Source, at: Places, what: str, uids: dict[int, str], known: pa.ChunkedArray
) -> None:
    """Record pairs with an unknown uid (`uids`: by row), each with the known uid that it resembles
    and how they differ.
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
        elif {*",;|"}.intersection(uid):
            source.advise("docs/data.md (Layouts) makes pairs of a cell with several ids")
    source.note_rows(f"pair with an unknown {what}", at, np.asarray(list(uids)), "uid {}", details)
    for (words, fix), count in differences.items():
        source.advise(
            f"{count:,} unknown {what} uid(s) differ from a known one only in {words}; {fix}"
        )


def check_uids(source: Source, uids: pa.ChunkedArray, at: Places, what: str) -> None:
    """Record an error for every repeated and every empty uid."""
    is_bad_N = source.rows_of(uids, uids) != np.arange(len(uids))
    is_bad_N |= pc.equal(uids, "").to_numpy(zero_copy_only=False)
    source.note_rows(f"{what} uid empty or given twice", at, np.flatnonzero(is_bad_N), "{}", uids)


def _splits(queries: Table, pairs: Table, query_P: np.ndarray, source: Source) -> np.ndarray:
    """Index in SPLITS of each query's split (int8 [N]): from the queries' column "split", else from
    the pairs' column, else 0 ("train"). -1 for an unknown split, which is recorded as an error.
    """
    split_N = np.zeros(queries.num_rows, dtype=np.int8)
    kind = "query with pairs in two splits (leak)"
    of_queries = "split" in queries.columns
    if of_queries:
        split_N = _split_numbers(queries, source)
        kind = "pair in another split than its query"
    if "split" not in pairs.columns:
        return split_N
    split_P = _split_numbers(pairs, source)
    known = np.flatnonzero(query_P >= 0)
    if not of_queries:
        split_N[query_P[known]] = split_P[known]
    differ = known[split_N[query_P[known]] != split_P[known]]
    source.note_rows(kind, pairs.at, differ, "query {}", pairs.columns["query_id"])
    return split_N


def _split_numbers(table: Table, source: Source) -> np.ndarray:
    names = pc.utf8_lower(pc.utf8_trim_whitespace(table.columns["split"]))
    numbers = pc.index_in(names, value_set=pa.array(SPLITS, pa.large_string()))
    number_N = pc.fill_null(numbers, -1).to_numpy(zero_copy_only=False).astype(np.int8)
    unknown = np.flatnonzero(number_N < 0)
    kind = "split that is not train, validation or test"
    source.note_rows(kind, table.at, unknown, "'{}'", names)
    return number_N


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
