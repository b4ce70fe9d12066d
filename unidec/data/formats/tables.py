"""Layouts in which pairs are given by uid: plain tables, and BEIR.

tables: queries: id, text [, content] [, split]; labels: id, text [, content]; pairs: query_id,
label_id [, relevance] [, split]; filters (optional): query_id, label_id. The split (train,
validation, test) is a column of either the queries or the pairs.

BEIR: corpus.jsonl (labels), queries.jsonl, qrels/{train,dev,test}.tsv.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Layout, Pairs, Places, Source, places_in
from unidec.data.lookalike import Known, difference, names_like, plain, visible
from unidec.data.raw import SPLITS, RawData, text_table
from unidec.data.spool import table_on_disk, take_pairs, take_texts
from unidec.data.table_file import columns_missing, no_text, read_rows, text_blocks
from unidec.progress import say

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


@dataclass(frozen=True)
class Table:
    """The contents of a table file or of a table in memory.

    Attributes:
        at: the places of its rows.
        columns: the columns as strings; "" for a missing value. The relevance may be numbers.
    """

    at: Places
    columns: dict[str, pa.ChunkedArray]
    num_rows: int

    def pairs(self, source: Source, queries: pa.Table, labels: pa.Table) -> Pairs:
        """The rows as pairs: the first two columns are the uids of query and label. Unknown uids
        are recorded as errors.

        The relevance is in column "relevance" or "score"; without such a column it is 1.
        """
        query, label, *_ = self.columns
        given = self.columns.get("relevance", self.columns.get("score"))
        value_P = np.broadcast_to(1.0, self.num_rows)
        if given is not None:
            values = source.numbers(np.float64)
            for block in given.chunks:
                values.add([_number(value) for value in block.to_pylist()])
            value_P = values.array()
        return Pairs(
            source=source,
            at=self.at,
            query_P=self._rows(source, "query", query, queries["uid"]),
            label_P=self._rows(source, "label", label, labels["uid"]),
            value_P=value_P,
            given=(self.columns[query], self.columns[label], value_P if given is None else given),
        )

    def _rows(self, source: Source, what: str, column: str, known: pa.ChunkedArray) -> np.ndarray:
        """Row in `known` of each uid of a column; -1 for an unknown uid, which is recorded."""
        uids = self.columns[column]
        row_P = source.rows_of(uids, known)
        unknown = np.flatnonzero(row_P < 0)
        if len(unknown):
            by_row = dict(zip(unknown.tolist(), uids.take(unknown).to_pylist(), strict=True))
            _note_unknown(source, self.at, what, by_row, known)
        return row_P

    def texts(
        self, source: Source, what: str, columns: Sequence[str] = ("id", "text", "content")
    ) -> pa.Table:
        """Table of uid, title and content from these columns, with checked uids. If all titles are
        empty, the contents become the titles.
        """
        uids, titles, contents = (self.columns.get(column) for column in columns)
        check_uids(source, uids, self.at, what)
        if titles is None or pc.all(pc.equal(titles, "")).as_py():
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
    source: Source, queries: Table, labels: Table, pairs: Table, filters: Table | None = None
) -> RawData:
    """The data set of these tables: pairs are looked up by uid, and each query belongs to one
    split.

    Raises:
        DataError: the tables have errors. Errors in the pairs are recorded in the source.
    """
    source.stop()  # uids cannot be looked up in tables with errors
    source.labels_at = labels.at
    label_texts = labels.texts(source, "label")
    query_texts = queries.texts(source, "query")
    positives = pairs.pairs(source, query_texts, label_texts)
    split_N = _splits(queries, pairs, positives.query_P, source)
    shape = (query_texts.num_rows, label_texts.num_rows)
    relevance = positives.matrix(shape)
    filter_pairs = csr_matrix(shape, dtype=bool)
    if filters is not None:
        found = filters.pairs(source, query_texts, label_texts)
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
    corpus = read_table(source, source.need("corpus.jsonl"), columns[:1], columns[1:])
    queries = read_table(source, source.need("queries.jsonl"), columns[:1], columns[1:])
    source.labels_at = corpus.at
    label_texts = corpus.texts(source, "label", columns)
    query_texts = queries.texts(source, "query", columns)
    raw = RawData(source.root.name, {}, label_texts, {}, {})
    shape = (queries.num_rows, corpus.num_rows)
    for split, file in QRELS.items():
        path = source.need(file) if split == "train" else source.find(file)
        if path is None:
            continue
        table = read_table(source, path, ("query-id", "corpus-id", "score"))
        pairs = table.pairs(source, query_texts, label_texts)
        rows = np.unique(pairs.query_P[pairs.query_P >= 0])
        parts = (query_texts, pairs.matrix(shape, True), csr_matrix(shape, dtype=bool))
        source.queries_at[split] = places_of(queries.at, rows)
        _add_split(raw, split, rows, parts, source.scratch)
    return raw


def places_of(at: Places, rows: np.ndarray) -> Places:
    """The places of these rows of a file, numbered from 0."""
    return lambda chosen: at(rows[chosen])


def read_table(
    source: Source,
    path: Path,
    needed: Sequence[str],
    optional: Sequence[str] = (),
    look: Callable[[dict[str, Any], int], object] = lambda _row, _line: None,
) -> Table:
    """Read columns of a file; reports on stderr which columns of its header are not used.

    Args:
        needed: columns that must exist.
        optional: further columns, omitted from the table if they do not exist.
        look: called with each row and its line number.

    Raises:
        DataError: a needed column is missing, a column is given twice, or the file cannot be read.
            Errors in single rows are recorded in the source.
    """

    wanted = (*needed, *optional)

    def check(names: list[str]) -> None:
        check_columns(names, needed, optional, f"{path}:1")
        if unused := ", ".join(name for name in names if name not in wanted):
            used = ", ".join(wanted)
            say(f"{path.name}: columns that are not used: {unused} (used: {used})")

    rows = read_rows(path, wanted, check, source.bounds, source.report(path))
    return table_of(rows, source.name(path), source, (needed, optional), look=look)


def check_columns(
    names: Sequence[str], needed: Sequence[str], optional: Sequence[str], where: str
) -> None:
    """Raise a DataError if a needed column is missing."""
    missing = [column for column in needed if column not in names]
    if missing:
        expected = ", ".join(needed) + "".join(f" [, {column}]" for column in optional)
        raise columns_missing(where, names, missing, expected)


def table_of(
    rows: Iterable[tuple[int, dict[str, Any]]],
    name: str,
    source: Source,
    columns: tuple[Sequence[str], Sequence[str]],
    *,
    look: Callable[[dict[str, Any], int], object] = lambda _row, _line: None,
) -> Table:
    """A table of these rows, each given with its line number; `columns` holds `needed` and
    `optional` of `read_table`.
    """
    needed, optional = columns[0], set(columns[1])
    wanted = [*needed, *columns[1]]
    present = set(needed)

    def text(row: dict[str, Any], column: str, line: int) -> str:
        """A cell as text. If it is not a string or number, or is required but missing, an error is
        recorded and "" returned.

        NaN, which pandas writes for a missing value, counts as missing.
        """
        value = row.get(column)
        kind = type(value)
        if kind is str:
            return value  # type: ignore[return-value]
        if kind in (int, float) and value == value:
            return str(value)
        place = f"{name}:{line}"
        if value is not None and kind is not float:
            source.note(f"{column} is not a text", place, kind.__name__)
            source.advise(no_text(value))
        # for an empty row an error is already recorded: it is not a JSON object
        elif column in needed and row:
            names = list(map(str, row))
            source.note(f"no {column}", place, ", ".join(names)[:80])
            if column not in row and (fix := names_like(names, [column])):
                source.advise(fix)
        return ""

    def numbered_texts() -> Iterator[tuple[Any, ...]]:
        for line, row in rows:
            look(row, line)
            present.update(row.keys() & optional)
            yield line, *[text(row, column, line) for column in wanted]
            del row  # free it before the next row, which may be large, is read

    texts = [(column, pa.large_string()) for column in wanted]
    schema = pa.schema([("", pa.int64()), *texts])  # the first column is the line
    table = table_on_disk(text_blocks(numbered_texts(), schema), schema, source.scratch)
    columns_present = {column: table[column] for column in wanted if column in present}
    at = places_in(name, lambda chosen: table[0].take(pa.array(chosen)).to_numpy())
    return Table(at, columns_present, table.num_rows)


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
