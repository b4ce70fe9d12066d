"""Plain tables: queries, labels and pairs as csv, tsv, parquet or jsonl, each with a header.

queries: id, text [, content] [, split]; labels: id, text [, content]; pairs: query_id, label_id [, relevance] [,
split]; filters (optional): query_id, label_id. A split is train, validation or test, of the query or of its pairs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv
import pyarrow.parquet as pq
from scipy.sparse import csr_matrix

from unidec.data.bounded import check_unpacked
from unidec.data.csv_file import CsvFile
from unidec.data.formats.beir import read_objects, to_numbers
from unidec.data.formats.files import Source
from unidec.data.formats.ids import Pairs, look_up, split_pairs
from unidec.data.formats.problems import Lines, check_uids, lines_of, next_line
from unidec.data.raw import SPLITS, RawData, text_table
from unidec.errors import DataError

EXPECTED = "queries, labels and pairs, each .csv, .tsv, .parquet or .jsonl"
KEEPS_VALIDATION = True
KINDS = ("csv", "tsv", "parquet", "jsonl")
SPLIT_NAMES = {
    **{split: split for split in SPLITS},
    "trn": "train",
    "tst": "test",
    "dev": "validation",
    "val": "validation",
}


def fits(source: Source) -> bool:
    return all(_find(source, stem) for stem in ("queries", "labels", "pairs"))


def read(source: Source) -> RawData:
    """Read the layout; faults are noted in `source.problems`."""
    problems = source.problems
    labels = _Table(source, "labels", ("id", "text"), ("content",))
    queries = _Table(source, "queries", ("id", "text"), ("content", "split"))
    pairs = _Table(source, "pairs", ("query_id", "label_id"), ("relevance", "split"))
    problems.stop()  # ids cannot be looked up in tables with faults
    label_texts, query_texts = labels.texts("label"), queries.texts("query")
    value_P = to_numbers(pairs.columns["relevance"]) if "relevance" in pairs.columns else np.ones(pairs.num_rows)
    given = Pairs(pairs.name, pairs.columns["query_id"], pairs.columns["label_id"], value_P, pairs.lines)
    query_P, label_P = look_up(given, query_texts, label_texts, problems)
    split_N = _splits(queries, pairs, query_P, source)
    rows_by_split = {split: np.flatnonzero(split_N == split) for split in SPLITS}
    rows_by_split = {split: rows for split, rows in rows_by_split.items() if rows.size or split == "train"}
    for split, rows in rows_by_split.items():
        source.queries_at[split] = (queries.name, _lines_of_some(queries, rows))
    source.labels_at = (labels.name, labels.lines)
    shape = (query_texts.num_rows, label_texts.num_rows)
    return RawData(
        source.root.name,
        {split: query_texts.take(rows) for split, rows in rows_by_split.items()},
        label_texts,
        split_pairs(given, query_P, label_P, rows_by_split, shape, problems),
        _filters(source, query_texts, label_texts, rows_by_split),
    )


def write(raw: RawData, out: Path, kind: str = "csv") -> None:
    """Write the layout; kind is csv, tsv, parquet or jsonl."""
    queries: list[pa.Table] = []
    pairs: list[pa.Table] = []
    filters: list[pa.Table] = []
    label_uids = raw.labels["uid"].combine_chunks()
    for split, table in raw.queries.items():
        names = pa.repeat(pa.scalar(split), table.num_rows)
        queries.append(_renamed(table).append_column("split", names))
        uids = table["uid"].combine_chunks()
        for matrix, tables in ((raw.relevance[split], pairs), (raw.filter_pairs[split], filters)):
            coo = matrix.tocoo()
            columns: dict[str, Any] = {
                "query_id": uids.take(pa.array(coo.row)),
                "label_id": label_uids.take(pa.array(coo.col)),
            }
            if tables is pairs:
                columns["relevance"] = pa.array(coo.data.astype(np.float64))
            tables.append(pa.table(columns))
    _write(pa.concat_tables(queries), out / f"queries.{kind}")
    _write(_renamed(raw.labels), out / f"labels.{kind}")
    _write(pa.concat_tables(pairs), out / f"pairs.{kind}")
    if any(table.num_rows for table in filters):
        _write(pa.concat_tables(filters), out / f"filters.{kind}")


def _find(source: Source, stem: str) -> Path | None:
    return source.find(*(f"{stem}.{kind}" for kind in KINDS))


def _lines_of_some(table: _Table, rows: np.ndarray) -> Lines:
    return lambda some: table.lines(rows[some])


def _splits(queries: _Table, pairs: _Table, query_P: np.ndarray, source: Source) -> np.ndarray:
    """Split of each query (object [N]): its own column, else its pairs' column, else train."""
    if "split" in queries.columns:
        return _split_names(queries, source)
    split_N = np.full(queries.num_rows, "train", dtype=object)
    if "split" in pairs.columns:
        split_P = _split_names(pairs, source)
        known = query_P >= 0
        split_N[query_P[known]] = split_P[known]
        differ = np.flatnonzero(known & (split_N[np.maximum(query_P, 0)] != split_P))
        source.problems.add_rows(
            "query with pairs in two splits (leak)",
            pairs.name,
            differ,
            pairs.lines,
            lambda p: f"query {pairs.columns['query_id'][p]}",
        )
    return split_N


def _split_names(table: _Table, source: Source) -> np.ndarray:
    column = pc.utf8_lower(pc.utf8_trim_whitespace(table.columns["split"])).to_numpy(zero_copy_only=False)
    names = np.full(column.size, "train", dtype=object)
    known = np.zeros(column.size, dtype=bool)
    for given, split in SPLIT_NAMES.items():
        here = column == given
        names[here] = split
        known |= here
    source.problems.add_rows(
        "split that is not train, validation or test",
        table.name,
        np.flatnonzero(~known),
        table.lines,
        lambda r: repr(column[r]),
    )
    return names


def _filters(
    source: Source, queries: pa.Table, labels: pa.Table, rows_by_split: dict[str, np.ndarray]
) -> dict[str, csr_matrix]:
    if _find(source, "filters") is None:
        return {split: csr_matrix((rows.size, labels.num_rows), dtype=bool) for split, rows in rows_by_split.items()}
    table = _Table(source, "filters", ("query_id", "label_id"), ())
    source.problems.stop()
    pairs = Pairs(
        table.name, table.columns["query_id"], table.columns["label_id"], np.ones(table.num_rows), table.lines
    )
    query_P, label_P = look_up(pairs, queries, labels, source.problems)
    shape = (queries.num_rows, labels.num_rows)
    return split_pairs(pairs, query_P, label_P, rows_by_split, shape, source.problems, filters=True)


class _Table:
    """One file as string columns, and the line of each row."""

    def __init__(self, source: Source, stem: str, needed: Sequence[str], optional: Sequence[str]) -> None:
        path = _find(source, stem) or source.need(*(f"{stem}.{kind}" for kind in KINDS))
        self.source, self.path, self.name = source, path, source.name(path)
        self.needed, self.optional = needed, optional
        read: dict[str, Callable[[], tuple[pa.Table, Lines]]] = {"parquet": self._parquet, "jsonl": self._jsonl}
        table, self.lines = read.get(path.name.removesuffix(".gz").rpartition(".")[2], self._csv)()
        self.num_rows = table.num_rows
        self.columns = {name: self._strings(table, name) for name in (*needed, *optional) if name in table.column_names}

    def texts(self, what: str) -> pa.Table:
        """uid, title, content; uids checked."""
        check_uids(self.columns["id"], self.source.problems, self.name, self.lines, what)
        return text_table(self.columns["id"], self.columns["text"], self.columns.get("content"))

    def _known(self, names: Sequence[str], hint: str | None = None) -> dict[str, str]:
        """The file's columns that are read: our name of each; `title` is another name for `text`.

        Args:
            names: of the columns in the file.
            hint: what to do when columns are missing.

        Raises:
            DataError: one that is needed is missing, or one is there twice.
        """
        ours = ["text" if name == "title" and "text" not in names else name for name in names]
        missing = [name for name in self.needed if name not in ours]
        twice = {name for name in ours if ours.count(name) > 1}
        if missing or twice:
            raise DataError(
                f"columns missing: {', '.join(missing)}"
                if missing
                else f"columns given twice: {', '.join(sorted(twice))}",
                where=f"{self.path}:1",
                got=", ".join(ours)[:300],
                expected=", ".join(self.needed) + "".join(f" [, {name}]" for name in self.optional),
                fix=hint,
            )
        return {name: our for name, our in zip(names, ours, strict=True) if our in (*self.needed, *self.optional)}

    def _strings(self, table: pa.Table, name: str) -> pa.ChunkedArray:
        column = table[name]
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            column = pc.cast(column, pa.large_string())
        return pc.fill_null(pc.cast(column, pa.large_string()), "")

    def _parquet(self) -> tuple[pa.Table, Lines]:
        try:
            with pq.ParquetFile(self.path, memory_map=True) as file:
                groups = (file.metadata.row_group(group) for group in range(file.num_row_groups))
                check_unpacked(self.path, sum(group.total_byte_size for group in groups), self.source.bounds)
                known = self._known(file.schema_arrow.names)
                table = file.read(columns=list(known)).rename_columns(known)
            table.validate(full=True)  # also checks UTF-8
        except (pa.ArrowException, OSError) as error:
            raise DataError("not a readable Parquet file", where=str(self.path), got=str(error)[:200]) from error
        return table, next_line

    def _jsonl(self) -> tuple[pa.Table, Lines]:
        names = (*self.needed, *self.optional)
        columns: dict[str, list[str | None]] = {name: [] for name in names}
        numbers: list[int] = []
        present: set[str] = set()
        for number, item in read_objects(self.source, self.path):
            if "title" in item and "text" not in item:
                item["text"] = item["title"]
            absent = [name for name in self.needed if not isinstance(item.get(name), str | int | float)]
            if absent:
                self.source.problems.add(f"no {' and '.join(absent)}", self.name, number, str(item)[:80])
                continue
            numbers.append(number)
            present.update(item)
            for name in names:
                value = item.get(name)
                columns[name].append(None if value is None else value if isinstance(value, str) else str(value))
        kept = {name: columns[name] for name in names if name in self.needed or name in present}
        try:
            table = pa.table({name: pa.array(column, pa.large_string()) for name, column in kept.items()})
        except UnicodeEncodeError as error:
            raise DataError(
                "a lone surrogate in a text", where=str(self.path), got=str(error), fix="remove it"
            ) from error
        return table, lines_of(np.asarray(numbers, dtype=np.int64))

    def _csv(self) -> tuple[pa.Table, Lines]:
        problems = self.source.problems

        def decode(line: bytes, path: Path, number: int) -> str:
            self.source.decode(line, path, number)  # notes what is not UTF-8
            return line.decode("utf-8", "replace")

        file = CsvFile(self.path, self.source.bounds, decode)
        problems.stop()
        other = file.other_delimiter(self.needed)
        hint = f"the columns are separated by {other}: save the file with {file.delimiter_name} between them"
        known = self._known(file.names, hint if other else None)
        schema = pa.schema([(name, pa.large_string()) for name in known])
        try:
            table = pa.Table.from_batches(file.batches(list(known)), schema).rename_columns(known)
        except pa.ArrowInvalid as error:
            for line, what, got in file.faults():
                problems.add(what, self.name, line, got)
            problems.stop()
            raise DataError("not a readable table", where=str(self.path), got=str(error)[:300]) from error
        return table, lambda rows: _lines_of_csv(file, rows)


def _lines_of_csv(file: CsvFile, rows: np.ndarray) -> np.ndarray:
    """Line on which each row starts; quoted line breaks and blank lines take a second look."""
    last = int(np.max(rows)) + 1  # the first row is the header
    starts = [line for line, _ in itertools.islice(file.rows(), last + 1)]
    return np.asarray(starts)[np.asarray(rows) + 1]


def _renamed(table: pa.Table) -> pa.Table:
    return table.rename_columns(["id", "text", "content"])


def _write(table: pa.Table, path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".jsonl":
        path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist()).encode())
    else:
        options = pv.WriteOptions(delimiter="\t" if path.suffix == ".tsv" else ",", quoting_style="needed")
        pv.write_csv(table, path, options)
