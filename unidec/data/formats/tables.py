"""Plain tables: queries, labels and pairs as csv, tsv, parquet or jsonl, each with a header.

queries: id, text [, content] [, split]; labels: id, text [, content]; pairs: query_id, label_id [, relevance] [,
split]; filters (optional): query_id, label_id. A split is train, validation or test, of the query or of its pairs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv
import pyarrow.parquet as pq
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Lines, Source, lines_of_some, next_line
from unidec.data.formats.pairs import Pairs, pairs_of_uids
from unidec.data.raw import SPLITS, RawData, text_table
from unidec.data.table_file import CsvFile, ending, json_blocks, open_parquet, to_numbers, to_strings
from unidec.errors import DataError

EXPECTED = "queries, labels and pairs, each .csv, .tsv, .parquet or .jsonl"
KEEPS_VALIDATION = True
KINDS = ("csv", "tsv", "parquet", "jsonl")
_SPLIT_NAMES = {split: split for split in SPLITS} | {
    "trn": "train",
    "tst": "test",
    "dev": "validation",
    "val": "validation",
}


@dataclass(frozen=True)
class Table:
    """One file: its name, its columns as strings ("" for a missing value), and the line of each row."""

    name: str
    columns: dict[str, pa.ChunkedArray]
    lines: Lines
    num_rows: int

    def pairs(self, source: Source, queries: pa.Table, labels: pa.Table, filters: bool = False) -> Pairs:
        """Its rows as pairs of the first two columns; the relevance is in the column of that name, else 1."""
        query, label, *rest = self.columns
        value = next((name for name in rest if name in ("relevance", "score")), None)
        value_P = np.ones(self.num_rows) if value is None else to_numbers(self.columns[value])
        uids = (self.columns[query], self.columns[label])
        return pairs_of_uids(uids, value_P, (queries, labels), self.lines, self.name, source.problems, filters)

    def texts(self, source: Source, what: str) -> pa.Table:
        """uid, title, content; uids checked."""
        check_uids(source, self.columns["id"], self.name, self.lines, what)
        return text_table(self.columns["id"], self.columns["text"], self.columns.get("content"))


def fits(source: Source) -> bool:
    """Whether the folder has files of this layout."""
    return all(_find(source, stem) for stem in ("queries", "labels", "pairs"))


def read(source: Source) -> RawData:
    """Read the layout; faults are noted in `source.problems`."""
    labels = read_table(source, _need(source, "labels"), ("id", "text"), ("content",))
    queries = read_table(source, _need(source, "queries"), ("id", "text"), ("content", "split"))
    pairs = read_table(source, _need(source, "pairs"), ("query_id", "label_id"), ("relevance", "split"))
    source.problems.stop()  # ids cannot be looked up in tables with faults
    label_texts, query_texts = labels.texts(source, "label"), queries.texts(source, "query")
    found = pairs.pairs(source, query_texts, label_texts)
    split_N = _splits(queries, pairs, found.query_P, source)
    rows_by_split = {split: np.flatnonzero(split_N == split) for split in SPLITS}
    rows_by_split = {split: rows for split, rows in rows_by_split.items() if rows.size or split == "train"}
    for split, rows in rows_by_split.items():
        source.queries_at[split] = (queries.name, lines_of_some(queries.lines, rows))
    source.labels_at = (labels.name, labels.lines)
    shape = (query_texts.num_rows, label_texts.num_rows)
    return RawData(
        source.root.name,
        {split: query_texts.take(rows) for split, rows in rows_by_split.items()},
        label_texts,
        found.by_split(rows_by_split, shape),
        read_filters(
            source, _find(source, "filters"), ("query_id", "label_id"), (query_texts, label_texts), rows_by_split
        ),
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
            single rows is noted in `source.problems`.
    """
    name, wanted = source.name(path), (*needed, *optional)
    if ending(path) == ".jsonl":
        table, lines = _read_json(source, path, needed, wanted)
    elif ending(path) == ".parquet":
        with open_parquet(path, source.bounds) as file:
            known = _known(path, file.schema_arrow.names, needed, wanted)
            table, lines = file.read(columns=list(known)).rename_columns(known), next_line
            table.validate(full=True)  # also checks UTF-8
    else:
        file = CsvFile(path, source.bounds, source.report(path))
        known = _known(path, file.names, needed, wanted, file.delimiter_hint(needed))
        schema = pa.schema([(column, pa.large_string()) for column in known])
        table, lines = pa.Table.from_batches(file.batches(list(known)), schema).rename_columns(known), file.lines
    columns = {name: _strings(table[name]) for name in wanted if name in table.column_names}
    return Table(name, columns, lines, table.num_rows)


def check_uids(source: Source, uids: pa.Array | pa.ChunkedArray, file: str, lines: Lines, what: str) -> None:
    """Note every repeated uid and every empty one."""
    if pc.count_distinct(uids).as_py() == len(uids) and not pc.any(pc.equal(uids, "")).as_py():
        return
    rows = np.arange(len(uids))
    first = pa.table({"uid": uids, "row": rows}).group_by("uid").aggregate([("row", "min")])["row_min"].to_numpy()
    empty = pc.equal(uids, "").to_numpy(zero_copy_only=False)
    again = np.flatnonzero(empty | ~np.isin(rows, first))
    source.problems.add_rows(f"{what} uid empty or given twice", file, again, lines, lambda row: uids[row].as_py())


def read_filters(
    source: Source, path: Path | None, names: tuple[str, str], tables: tuple[pa.Table, pa.Table],
    rows_by_split: dict[str, np.ndarray],
) -> dict[str, csr_matrix]:  # fmt: skip
    """Filter pairs by split from a table of uids with these column names; no file, no pairs."""
    shape = (tables[0].num_rows, tables[1].num_rows)
    if path is None:
        return {split: csr_matrix((rows.size, shape[1]), dtype=bool) for split, rows in rows_by_split.items()}
    return read_table(source, path, names).pairs(source, *tables, filters=True).by_split(rows_by_split, shape)


def pair_table(matrix: csr_matrix, uids: tuple[pa.ChunkedArray, pa.ChunkedArray], names: Sequence[str]) -> pa.Table:
    """Pairs as uids of query and label and, as a third column, their relevance."""
    coo = matrix.tocoo()
    columns = [uids[0].combine_chunks().take(pa.array(coo.row)), uids[1].combine_chunks().take(pa.array(coo.col))]
    return pa.table(dict(zip(names, [*columns, pa.array(coo.data.astype(np.float64))], strict=False)))


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table in the format of the file's name."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".jsonl":
        path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist()).encode())
    else:
        options = pv.WriteOptions(delimiter="\t" if path.suffix == ".tsv" else ",", quoting_style="needed")
        pv.write_csv(table, path, options)


def _find(source: Source, stem: str) -> Path | None:
    return source.find(*(f"{stem}.{kind}" for kind in KINDS))


def _need(source: Source, stem: str) -> Path:
    return source.need(*(f"{stem}.{kind}" for kind in KINDS))


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


def _read_json(source: Source, path: Path, needed: Sequence[str], wanted: Sequence[str]) -> tuple[pa.Table, Lines]:
    """The columns that are wanted, and the line of each row; rows without a needed one are noted and left out."""
    report = source.report(path)
    chunks: dict[str, list[pa.Array]] = {name: [] for name in wanted}
    numbers: list[int] = []
    present: set[str] = set(needed)
    for lines, items in json_blocks(path, source.bounds, report):
        kept = []
        for line, item in zip(lines, items, strict=True):
            if "title" in item and "text" not in item:
                item["text"] = item["title"]
            absent = [name for name in needed if not isinstance(item.get(name), str | int | float)]
            if not absent:
                kept.append((line, item))
            elif item:  # an empty one was noted as no object
                report(f"no {' and '.join(absent)}", line, str(item)[:80])
        numbers += [line for line, _ in kept]
        present.update(*(item for _, item in kept))
        for name, arrays in chunks.items():
            values = [item.get(name) for _, item in kept]
            texts = ["" if value is None else value if isinstance(value, str) else str(value) for value in values]
            arrays.append(to_strings(texts, numbers[len(numbers) - len(texts) :], report))
    kept_columns = {name: pa.chunked_array(chunks[name], pa.large_string()) for name in wanted if name in present}
    line_N = np.asarray(numbers, dtype=np.int64)
    return pa.table(kept_columns), lambda rows: line_N[rows]


def _strings(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.fill_null(pc.cast(column, pa.large_string()), "")


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
        kind, uids = "query with pairs in two splits (leak)", pairs.columns["query_id"]
        source.problems.add_rows(kind, pairs.name, differ, pairs.lines, lambda p: f"query {uids[p]}")
    return split_N


def _split_names(table: Table, source: Source) -> np.ndarray:
    column = pc.utf8_lower(pc.utf8_trim_whitespace(table.columns["split"])).to_numpy(zero_copy_only=False)
    names = np.full(column.size, "", dtype=object)
    for given, split in _SPLIT_NAMES.items():
        names[column == given] = split
    kind = "split that is not train, validation or test"
    source.problems.add_rows(kind, table.name, np.flatnonzero(names == ""), table.lines, lambda r: repr(column[r]))
    return names


def texts_of(values: list[Any], lines: list[int], what: str, report: Any) -> pa.Array:
    """Values of a JSON field as texts: none is empty, another type is reported."""
    texts = [value or "" for value in values]
    if not set(map(type, texts)) <= {str}:
        for line, value in zip(lines, texts, strict=True):
            if not isinstance(value, str):
                report(f"{what} is not a text", line, type(value).__name__)
        texts = [value if isinstance(value, str) else "" for value in texts]
    return to_strings(texts, lines, report)
