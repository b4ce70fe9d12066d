"""Layouts in which pairs are given by uid: plain tables, and BEIR.

tables: queries: id, text [, content] [, split]; labels: id, text [, content]; pairs: query_id,
label_id [, relevance] [, split]; filters (optional): query_id, label_id. The split (train,
validation, test) is a column of either the queries or the pairs.

BEIR: corpus.jsonl (labels), queries.jsonl, qrels/{train,dev,test}.tsv.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.formats.files import MAX_SAMPLES, Layout, Lines, Pairs, Source
from unidec.data.lookalike import Known, difference, names_like, plain, visible
from unidec.data.raw import SPLITS, RawData, text_table
from unidec.data.spool import table_on_disk
from unidec.data.table_file import columns_missing, no_text, read_rows

# rows and characters in memory as Python objects
MOST_ROWS = 4096
MOST_CHARS = 16 << 20
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


class GivenPairs(Protocol):
    """Pairs before their uids are looked up: a `Table`, or a matrix (`memory.PairMatrix`)."""

    @property
    def at(self) -> tuple[str, Lines]: ...

    @property
    def columns(self) -> dict[str, pa.ChunkedArray]: ...

    def pairs(self, source: Source, queries: pa.Table, labels: pa.Table) -> Pairs: ...


@dataclass(frozen=True)
class Table:
    """The contents of a table file or of a table in memory.

    Attributes:
        at: name of the file or table, and the `Lines` of its rows.
        columns: the columns as strings; "" for a missing value.
    """

    at: tuple[str, Lines]
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
                values.extend(map(_number, block.to_pylist()))
            value_P = values.array()
        return Pairs(
            source=source,
            at=self.at,
            query_P=self._rows(source, "query", query, queries["uid"]),
            label_P=self._rows(source, "label", label, labels["uid"]),
            value_P=value_P,
            by_uid=True,
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
    source: Source, queries: Table, labels: Table, pairs: GivenPairs, filters: Table | None = None
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
    relevance = positives.matrix((query_texts.num_rows, label_texts.num_rows))
    raw = _unsplit(source, query_texts, label_texts, relevance)
    if filters is not None:
        found = replace(filters.pairs(source, query_texts, label_texts), value_P=None)
        raw.filter_pairs["train"] = found.matrix(relevance.shape)
    return _by_split(source, queries.at, raw, split_N)


def _read_beir(source: Source) -> RawData:
    """Pairs with a score of 0, which were judged not relevant, are skipped."""
    columns = ("_id", "title", "text")
    corpus = read_table(source, source.need("corpus.jsonl"), ("_id",), columns[1:])
    queries = read_table(source, source.need("queries.jsonl"), ("_id",), columns[1:])
    source.labels_at = corpus.at
    label_texts = corpus.texts(source, "label", columns)
    query_texts = queries.texts(source, "query", columns)
    split_N = np.full(queries.num_rows, -1, dtype=np.int8)
    relevance = csr_matrix((queries.num_rows, corpus.num_rows), dtype=np.float32)
    for number, split in enumerate(SPLITS):
        file = QRELS[split]
        path = source.need(file) if split == "train" else source.find(file)
        if path is None:
            continue
        table = read_table(source, path, ("query-id", "corpus-id", "score"))
        pairs = table.pairs(source, query_texts, label_texts)
        rows = np.unique(pairs.query_P[pairs.query_P >= 0])
        leaked = rows[~np.isin(split_N[rows], (-1, number))]
        kind = f"query of another split again in {split} (leak)"
        others = {row: SPLITS[split_N[row]] for row in leaked[:MAX_SAMPLES].tolist()}
        source.note_rows(kind, queries.at, leaked, "{}", others)
        split_N[rows] = number
        relevance += pairs.matrix(relevance.shape, zero_is_no_pair=True)
    raw = _unsplit(source, query_texts, label_texts, relevance)
    return _by_split(source, queries.at, raw, split_N)


def _unsplit(source: Source, queries: pa.Table, labels: pa.Table, relevance: csr_matrix) -> RawData:
    """Raw data with all queries in "train", without filter pairs."""
    none = csr_matrix(relevance.shape, dtype=bool)
    return RawData(
        source.root.name, {"train": queries}, labels, {"train": relevance}, {"train": none}
    )


def _by_split(
    source: Source, queries_at: tuple[str, Lines], raw: RawData, split_N: np.ndarray
) -> RawData:
    """Divide raw data, with all queries in "train", into splits by each query's split number."""
    file, lines = queries_at
    rows_by_split: dict[str, np.ndarray] = {}
    for number, split in enumerate(SPLITS):
        rows = np.flatnonzero(split_N == number)
        if rows.size or split == "train":
            rows_by_split[split] = rows
            source.queries_at[split] = (file, _lines_of(lines, rows))
    return raw.take(rows_by_split, source.scratch)


def _lines_of(lines: Lines, rows: np.ndarray) -> Lines:
    return lambda places: lines(rows[places])


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
        optional: further columns, omitted from the table if they do not exist.
        look: called with each row and its line number.

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
    """Raise a DataError if a needed column is missing."""
    missing = [column for column in needed if column not in names]
    if missing:
        raise columns_missing(
            where,
            names,
            missing,
            ", ".join(needed) + "".join(f" [, {column}]" for column in optional),
        )


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
    needed, optional = columns
    wanted = [*needed, *optional]
    cells = _Cells(source, name, needed)
    lines = source.numbers(np.int64)
    present = set(needed)
    texts: dict[str, list[str]] = {column: [] for column in wanted}

    def blocks() -> Iterator[pa.Table]:
        size = 0
        num_rows = 0
        for line, row in rows:
            look(row, line)
            for column, block in texts.items():
                if column in row:
                    present.add(column)
                block.append(cells.text(row, column, line))
                size += len(block[-1])
            lines.extend([line])
            num_rows += 1
            if size > MOST_CHARS or num_rows == MOST_ROWS:
                yield _block(texts)
                size = 0
                num_rows = 0
            del row  # free it before the next row, which may be large, is read
        yield _block(texts)

    schema = pa.schema([(column, pa.large_string()) for column in wanted])
    table = table_on_disk(blocks(), schema, source.scratch)
    line_N = lines.array()
    columns_present = {column: table[column] for column in wanted if column in present}
    return Table((name, line_N.__getitem__), columns_present, table.num_rows)


def _block(texts: dict[str, list[str]]) -> pa.Table:
    """A table of these columns; their lists are cleared."""
    arrays = [pa.array(block, pa.large_string()) for block in texts.values()]
    for block in texts.values():
        block.clear()
    return pa.table(arrays, list(texts))


@dataclass(frozen=True)
class _Cells:
    """Reads cells of a table as texts; invalid cells are recorded in the source."""

    source: Source
    name: str
    needed: Sequence[str]

    def text(self, row: dict[str, Any], column: str, line: int) -> str:
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
        if value is not None and kind is not float:
            self.source.note(f"{column} is not a text", self.name, line, kind.__name__)
            self.source.advise(no_text(value))
        # for an empty row an error is already recorded: it is not a JSON object
        elif column in self.needed and row:
            names = list(map(str, row))
            self.source.note(f"no {column}", self.name, line, ", ".join(names)[:80])
            if column not in row and (fix := names_like(names, [column])):
                self.source.advise(fix)
        return ""


def _note_unknown(
    source: Source, at: tuple[str, Lines], what: str, uids: dict[int, str], known: pa.ChunkedArray
) -> None:
    """Record pairs with an unknown uid (`uids`: by row), each with the known uid that it resembles
    and how they differ.
    """
    lookalikes = Known(itertools.chain.from_iterable(block.to_pylist() for block in known.chunks))
    differences = Counter[tuple[str, str]]()
    details: dict[int, str] = {}
    for row, uid in uids.items():
        details[row] = plain(uid)
        other = lookalikes.like(uid)
        if other is not None:
            details[row] = f"{visible(uid)}; there is a {what} {visible(other)}"
            differences[difference(uid, other)] += 1
    source.note_rows(f"pair with an unknown {what}", at, np.asarray(list(uids)), "uid {}", details)
    for (words, fix), count in differences.items():
        source.advise(
            f"{count:,} unknown {what} uid(s) differ from a known one only in {words}; {fix}"
        )


def check_uids(source: Source, uids: pa.ChunkedArray, at: tuple[str, Lines], what: str) -> None:
    """Record an error for every repeated and every empty uid."""
    is_bad_N = source.rows_of(uids, uids) != np.arange(len(uids))
    is_bad_N |= pc.equal(uids, "").to_numpy(zero_copy_only=False)
    source.note_rows(f"{what} uid empty or given twice", at, np.flatnonzero(is_bad_N), "{}", uids)


def _splits(queries: Table, pairs: GivenPairs, query_P: np.ndarray, source: Source) -> np.ndarray:
    """Index in SPLITS of each query's split (int8 [N]): from the queries' column "split", else from
    the pairs' column, else 0 ("train"). -1 for an unknown split, which is recorded as an error.
    """
    split_N = np.zeros(queries.num_rows, dtype=np.int8)
    if "split" in queries.columns:
        split_N = _split_numbers(queries, source)
        kind = "pair in another split than its query"
    else:
        kind = "query with pairs in two splits (leak)"
    if "split" not in pairs.columns:
        return split_N
    split_P = _split_numbers(pairs, source)
    known = np.flatnonzero(query_P >= 0)
    if "split" not in queries.columns:
        split_N[query_P[known]] = split_P[known]
    differ = known[split_N[query_P[known]] != split_P[known]]
    source.note_rows(kind, pairs.at, differ, "query {}", pairs.columns["query_id"])
    return split_N


def _split_numbers(table: Table | GivenPairs, source: Source) -> np.ndarray:
    names = pc.utf8_lower(pc.utf8_trim_whitespace(table.columns["split"]))
    numbers = pc.index_in(names, value_set=pa.array(SPLITS, pa.large_string()))
    number_N = pc.fill_null(numbers, -1).to_numpy(zero_copy_only=False).astype(np.int8)
    unknown = np.flatnonzero(number_N < 0)
    source.note_rows(
        "split that is not train, validation or test",
        table.at,
        unknown,
        "{!r}",
        dict(zip(unknown.tolist(), names.take(unknown).to_pylist(), strict=True)),
    )
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
