"""Plain tables: queries, labels and pairs as csv, tsv, parquet or jsonl, each with a header.

queries: id, text [, content] [, split]; labels: id, text [, content]; pairs: query_id, label_id [, relevance] [,
split]; filters (optional): query_id, label_id. A split is train, validation or test, of the query or of its pairs.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Lines, Source, next_line
from unidec.data.formats.pairs import Pairs, rows_of
from unidec.data.raw import SPLITS, RawData, text_table
from unidec.data.table_file import CsvFile, ending, json_blocks, json_texts, open_parquet, to_numbers
from unidec.errors import DataError

EXPECTED = "queries, labels and pairs, each .csv, .tsv, .parquet or .jsonl"
KEEPS_VALIDATION = True
KINDS = ("csv", "tsv", "parquet", "jsonl")
QUERIES, LABELS, PAIRS, FILTERS = (
    [f"{stem}.{kind}" for kind in KINDS] for stem in ("queries", "labels", "pairs", "filters")
)
NEEDS = (QUERIES, LABELS, PAIRS)
_SPLIT_NAMES = {split: split for split in SPLITS} | {
    "trn": "train",
    "tst": "test",
    "dev": "validation",
    "val": "validation",
}


@dataclass(frozen=True)
class Table:
    """One file: its name and the line of each row, and its columns as strings ("" for a missing value)."""

    at: tuple[str, Lines]
    columns: dict[str, pa.ChunkedArray]
    num_rows: int

    def pairs(self, source: Source, queries: pa.Table, labels: pa.Table, are_filters: bool = False) -> Pairs:
        """Its rows as pairs of the first two columns, uids of query and label; unknown ones are noted.

        The relevance is in the column of that name (or score), else 1.
        """
        query, label, *rest = self.columns
        value = next((name for name in rest if name in ("relevance", "score")), None)
        value_P = np.ones(self.num_rows) if value is None else to_numbers(self.columns[value])
        rows = []
        for what, column, table in (("query", query, queries), ("label", label, labels)):
            rows.append(rows_of(self.columns[column], table["uid"]))
            unknown = np.flatnonzero(rows[-1] < 0)
            source.note_rows(f"pair with an unknown {what}", self.at, unknown, "uid {}", self.columns[column])
        return Pairs(source, self.at, rows[0], rows[1], value_P, by_uid=True, are_filters=are_filters)

    def texts(self, source: Source, what: str) -> pa.Table:
        """uid, title, content; uids checked."""
        check_uids(source, self.columns["id"], self.at, what)
        return text_table(self.columns["id"], self.columns["text"], self.columns.get("content"))


def read(source: Source) -> RawData:
    """Read the layout; faults are noted in the source."""
    labels = read_table(source, source.need(*LABELS), ("id", "text"), ("content",))
    queries = read_table(source, source.need(*QUERIES), ("id", "text"), ("content", "split"))
    pairs = read_table(source, source.need(*PAIRS), ("query_id", "label_id"), ("relevance", "split"))
    source.stop()  # ids cannot be looked up in tables with faults
    label_texts, query_texts = labels.texts(source, "label"), queries.texts(source, "query")
    found = pairs.pairs(source, query_texts, label_texts)
    split_N = _splits(queries, pairs, found.query_P, source)
    rows_by_split = {split: np.flatnonzero(split_N == split) for split in SPLITS}
    rows_by_split = {split: rows for split, rows in rows_by_split.items() if rows.size or split == "train"}
    file, lines = queries.at
    for split, rows in rows_by_split.items():
        source.queries_at[split] = (file, lines(rows).__getitem__)
    source.labels_at = labels.at
    filters = source.find(*FILTERS)
    return RawData(
        source.root.name,
        {split: query_texts.take(rows) for split, rows in rows_by_split.items()},
        label_texts,
        found.by_split(rows_by_split, (query_texts.num_rows, label_texts.num_rows)),
        read_filters(source, filters, ("query_id", "label_id"), (query_texts, label_texts), rows_by_split),
    )


def write(raw: RawData, out: Path, kind: str = "csv") -> None:
    """Write the layout; kind is csv, tsv, parquet or jsonl."""
    queries: list[pa.Table] = []
    pairs: list[pa.Table] = []
    filters: list[pa.Table] = []
    for split, table in raw.queries.items():
        names = pa.repeat(pa.scalar(split), table.num_rows)
        queries.append(table.rename_columns(["id", "text", "content"]).append_column("split", names))
        uids = (table["uid"], raw.labels["uid"])
        pairs.append(pair_table(raw.relevance[split], uids, ("query_id", "label_id", "relevance")))
        filters.append(pair_table(raw.filter_pairs[split], uids, ("query_id", "label_id")))
    write_table(pa.concat_tables(queries), out / f"queries.{kind}")
    write_table(raw.labels.rename_columns(["id", "text", "content"]), out / f"labels.{kind}")
    write_table(pa.concat_tables(pairs), out / f"pairs.{kind}")
    if any(table.num_rows for table in filters):
        write_table(pa.concat_tables(filters), out / f"filters.{kind}")


def read_table(source: Source, path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> Table:
    """A file's columns; `title` is another name for `text`.

    Raises:
        DataError: a needed column is missing, one is given twice, or a file that cannot be read. What is wrong with
            single rows is noted in the source.
    """
    name, report, wanted = source.name(path), source.report(path), (*needed, *optional)
    lines: list[np.ndarray] = [np.zeros(0, np.int64)]
    tables: list[pa.Table] = []
    present = set(needed)
    if ending(path) == ".parquet":
        with open_parquet(path, source.bounds) as file:
            known = _known(path, file.schema_arrow.names, needed, wanted)
            tables.append(file.read(columns=list(known)).rename_columns(known))
            tables[0].validate(full=True)  # also checks UTF-8
        present.update(known.values())
    elif ending(path) == ".jsonl":
        for numbers, items in json_blocks(path, source.bounds, report):
            for item in items:
                if "title" in item:
                    item.setdefault("text", item["title"])
                present |= item.keys()
            kinds = (str, int, float)
            columns = [json_texts(items, numbers, one, report, kinds, one in needed) for one in wanted]
            lines.append(np.asarray(numbers))
            tables.append(pa.table(columns, wanted))
    else:
        csv_file = CsvFile(path, source.bounds, report)
        known = _known(path, csv_file.names, needed, wanted, csv_file.delimiter_hint(needed))
        for numbers, batch in csv_file.batches(list(known)):
            lines.append(np.asarray(numbers))
            tables.append(pa.table(batch.columns, list(known.values())))
        present.update(known.values())
    kept = [column for column in wanted if column in present]
    table = pa.concat_tables(tables) if tables else pa.table({one: pa.array([], pa.large_string()) for one in kept})
    at = next_line if ending(path) == ".parquet" else np.concatenate(lines).__getitem__
    columns_by_name = {one: pc.fill_null(pc.cast(table[one], pa.large_string()), "") for one in kept}
    return Table((name, at), columns_by_name, table.num_rows)


def check_uids(source: Source, uids: pa.Array | pa.ChunkedArray, at: tuple[str, Lines], what: str) -> None:
    """Note every repeated uid and every empty one."""
    if pc.count_distinct(uids).as_py() == len(uids) and not pc.any(pc.equal(uids, "")).as_py():
        return
    rows = np.arange(len(uids))
    first = pa.table({"uid": uids, "row": rows}).group_by("uid").aggregate([("row", "min")])["row_min"].to_numpy()
    empty = pc.equal(uids, "").to_numpy(zero_copy_only=False)
    source.note_rows(f"{what} uid empty or given twice", at, np.flatnonzero(empty | ~np.isin(rows, first)), "{}", uids)


def read_filters(
    source: Source, path: Path | None, names: tuple[str, str], tables: tuple[pa.Table, pa.Table],
    rows_by_split: dict[str, np.ndarray],
) -> dict[str, csr_matrix]:  # fmt: skip
    """Filter pairs by split from a table of uids with these column names; no file, no pairs."""
    shape = (tables[0].num_rows, tables[1].num_rows)
    if path is None:
        return {split: csr_matrix((rows.size, shape[1]), dtype=bool) for split, rows in rows_by_split.items()}
    return read_table(source, path, names).pairs(source, *tables, are_filters=True).by_split(rows_by_split, shape)


def pair_table(matrix: csr_matrix, uids: tuple[pa.ChunkedArray, pa.ChunkedArray], names: Sequence[str]) -> pa.Table:
    """Pairs as uids of query and label and, as a third column, their relevance."""
    coo = matrix.tocoo()
    columns = [uids[0].combine_chunks().take(pa.array(coo.row)), uids[1].combine_chunks().take(pa.array(coo.col))]
    return pa.table(dict(zip(names, [*columns, pa.array(coo.data.astype(np.float64))], strict=False)))


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table in the format of the file's name; csv and tsv are quoted only where it is needed."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".jsonl":
        write_objects(path, table.to_pylist())
    else:
        rows = zip(*(pc.cast(column, pa.large_string()).to_pylist() for column in table.columns), strict=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",", lineterminator="\n")
            writer.writerows([table.column_names, *rows])


def write_objects(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
    """An object a line; .gz by the name, with no time in it: the same bytes for the same objects."""
    with open(path, "wb") as plain:
        packed = gzip.GzipFile(filename="", fileobj=plain, mode="wb", mtime=0) if path.suffix == ".gz" else None
        with packed or plain as file:
            file.writelines(json.dumps(item, ensure_ascii=False).encode() + b"\n" for item in items)


def _known(
    path: Path, names: Sequence[str], needed: Sequence[str], wanted: Sequence[str], hint: str | None = None
) -> dict[str, str]:
    """The file's columns that are read: our name of each."""
    ours = ["text" if name == "title" and "text" not in names else name for name in names]
    missing = [name for name in needed if name not in ours]
    twice = sorted({name for name in ours if ours.count(name) > 1})
    if missing or twice:
        raise DataError(
            f"columns missing: {', '.join(missing)}" if missing else f"columns given twice: {', '.join(twice)}",
            where=f"{path}:1",
            got=", ".join(ours)[:300],
            expected=", ".join(needed) + "".join(f" [, {name}]" for name in wanted[len(needed) :]),
            fix=hint,
        )
    return {name: our for name, our in zip(names, ours, strict=True) if our in wanted}


def _splits(queries: Table, pairs: Table, query_P: np.ndarray, source: Source) -> np.ndarray:
    """Split of each query (object [N]): its own column, else its pairs' column, else train."""
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
    column = pc.utf8_lower(pc.utf8_trim_whitespace(table.columns["split"])).to_numpy(zero_copy_only=False)
    names = np.full(column.size, "", dtype=object)
    for given, split in _SPLIT_NAMES.items():
        names[column == given] = split
    unknown = np.flatnonzero(names == "")
    source.note_rows("split that is not train, validation or test", table.at, unknown, "{!r}", column)
    return names
