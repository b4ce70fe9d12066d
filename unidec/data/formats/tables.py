"""Plain tables: queries, labels and pairs as csv, tsv, parquet or jsonl, each with a header.

queries: id, text [, content] [, split]; labels: id, text [, content]; pairs: query_id, label_id [, relevance] [,
split]; filters (optional): query_id, label_id. A split is train, validation or test, of the query or of its pairs.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv
import pyarrow.parquet as pq
from scipy.sparse import csr_matrix

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
        self.lines: Lines = self._lines_of_csv
        kind = path.name.removesuffix(".gz").rpartition(".")[2]
        self.delimiter = "\t" if kind == "tsv" else ","
        if kind == "parquet":
            table, self.lines = self._parquet(), next_line
        elif kind == "jsonl":
            table = self._jsonl(needed, optional)
        else:
            table = self._csv()
        if "title" in table.column_names and "text" not in table.column_names:
            table = table.rename_columns(["text" if name == "title" else name for name in table.column_names])
        missing = [name for name in needed if name not in table.column_names]
        twice = {name for name in table.column_names if table.column_names.count(name) > 1}
        if missing or twice:
            raise DataError(
                f"columns missing: {', '.join(missing)}"
                if missing
                else f"columns given twice: {', '.join(sorted(twice))}",
                where=f"{path}:1",
                got=", ".join(table.column_names),
                expected=", ".join(needed) + "".join(f" [, {name}]" for name in optional),
            )
        self.num_rows = table.num_rows
        self.columns = {name: self._strings(table, name) for name in (*needed, *optional) if name in table.column_names}

    def texts(self, what: str) -> pa.Table:
        """uid, title, content; uids checked."""
        check_uids(self.columns["id"], self.source.problems, self.name, self.lines, what)
        return text_table(self.columns["id"], self.columns["text"], self.columns.get("content"))

    def _strings(self, table: pa.Table, name: str) -> pa.ChunkedArray:
        column = table[name]
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            column = pc.cast(column, pa.large_string())
        return pc.fill_null(pc.cast(column, pa.large_string()), "")

    def _parquet(self) -> pa.Table:
        try:
            table = pq.read_table(self.path, memory_map=True)
            table.validate(full=True)  # also checks UTF-8
        except (pa.ArrowException, OSError) as error:
            raise DataError("not a readable Parquet file", where=str(self.path), got=str(error)[:200]) from error
        return table

    def _jsonl(self, needed: Sequence[str], optional: Sequence[str]) -> pa.Table:
        names = (*needed, *optional)
        columns: dict[str, list[str | None]] = {name: [] for name in names}
        numbers: list[int] = []
        present: set[str] = set()
        for number, item in read_objects(self.source, self.path):
            if "title" in item and "text" not in item:
                item["text"] = item["title"]
            absent = [name for name in needed if not isinstance(item.get(name), str | int | float)]
            if absent:
                self.source.problems.add(f"no {' and '.join(absent)}", self.name, number, str(item)[:80])
                continue
            numbers.append(number)
            present.update(item)
            for name in names:
                value = item.get(name)
                columns[name].append(None if value is None else value if isinstance(value, str) else str(value))
        line_N = np.asarray(numbers, dtype=np.int64)
        self.lines = lines_of(line_N)
        kept = {name: columns[name] for name in names if name in needed or name in present}
        try:
            return pa.table({name: pa.array(column, pa.large_string()) for name, column in kept.items()})
        except UnicodeEncodeError as error:
            raise DataError(
                "a lone surrogate in a text", where=str(self.path), got=str(error), fix="remove it"
            ) from error

    def _csv(self) -> pa.Table:
        data = self.source.data(self.path)
        names = self._header(data)
        try:
            return pv.read_csv(
                io.BytesIO(data),
                parse_options=pv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                convert_options=pv.ConvertOptions(
                    column_types=dict.fromkeys(names, pa.large_string()),
                    strings_can_be_null=False,
                    quoted_strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as error:
            self._find_faults(data, len(names))
            self.source.problems.stop()
            raise DataError("not a readable table", where=str(self.path), got=str(error)[:300]) from error

    def _header(self, data: bytes) -> list[str]:
        head = data.partition(b"\n")[0]
        text = self.source.decode(head.rstrip(b"\r"), self.path, 1)
        self.source.problems.stop()
        if not text:
            raise DataError("an empty file", where=str(self.path), expected="a header and rows")
        return next(csv.reader([text], delimiter=self.delimiter))

    def _find_faults(self, data: bytes, num_columns: int) -> None:
        """Look for the lines that Arrow's reader refused without saying where."""
        for number, line in enumerate(data.split(b"\n"), 1):
            self.source.decode(line, self.path, number)
        rows = csv.reader(io.StringIO(data.decode("utf-8", "replace"), newline=""), delimiter=self.delimiter)
        start = 1
        for row in rows:
            if row and len(row) != num_columns:
                self.source.problems.add(f"not {num_columns} columns", self.name, start, f"{len(row)}: {row[0][:40]!r}")
            start = rows.line_num + 1

    def _lines_of_csv(self, rows: np.ndarray) -> np.ndarray:
        """Line on which each row starts; quoted line breaks and blank lines take a second look."""
        text = self.source.data(self.path).decode("utf-8")
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=self.delimiter)
        last, starts, start = int(np.max(rows)), [], 1
        for row in reader:
            if row:
                starts.append(start)
            start = reader.line_num + 1
            if len(starts) > last + 1:  # the first row is the header
                break
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
