"""BEIR: corpus.jsonl (labels), queries.jsonl, qrels/{train,dev,test}.tsv.

Two optional additions of ours: `"metadata": {"split": ...}` of a query without judgements, which
BEIR would leave out, and filters.tsv (query-id, corpus-id).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Lines, Source
from unidec.data.formats.tables import check_uids, pair_table, read_filters, read_table, write_objects, write_table
from unidec.data.raw import RawData, text_table
from unidec.data.table_file import json_blocks, json_texts

EXPECTED = "corpus.jsonl, queries.jsonl, qrels/train.tsv (and qrels/dev.tsv, qrels/test.tsv)"
NEEDS = (("corpus.jsonl",), ("queries.jsonl",))
KEEPS_VALIDATION = True
QRELS = {"train": "train", "validation": "dev", "test": "test"}
_UIDS = ("query-id", "corpus-id")


def read(source: Source) -> RawData:
    """Read the layout; faults are noted in the source. A score of 0 means judged and not relevant: left out."""
    corpus, source.labels_at, _ = _read_objects(source, source.need("corpus.jsonl"), "label")
    queries, (name, lines), split_N = _read_objects(source, source.need("queries.jsonl"), "query")
    shape = (queries.num_rows, corpus.num_rows)
    judged = {}
    for split, stem in QRELS.items():
        path = source.need(f"qrels/{stem}.tsv") if split == "train" else source.find(f"qrels/{stem}.tsv")
        if path is None:
            continue
        pairs = read_table(source, path, (*_UIDS, "score")).pairs(source, queries, corpus)
        own = np.unique(pairs.query_P[pairs.query_P >= 0])
        other = own[(split_N[own] != "") & (split_N[own] != split)]
        source.note_rows(f"query of another split again in {split} (leak)", (name, lines), other, "{}", split_N)
        split_N[own] = split
        judged[split] = pairs.matrix(shape, zero_is_no_pair=True)
    rows_by_split = {split: np.flatnonzero(split_N == split) for split in QRELS}
    rows_by_split = {split: rows for split, rows in rows_by_split.items() if rows.size or split in judged}
    source.queries_at = {split: (name, lines(rows).__getitem__) for split, rows in rows_by_split.items()}
    no_pairs = csr_matrix(shape, dtype=np.float32)
    return RawData(
        source.root.name,
        {split: queries.take(rows) for split, rows in rows_by_split.items()},
        corpus,
        {split: csr_matrix(judged.get(split, no_pairs)[rows]) for split, rows in rows_by_split.items()},
        read_filters(source, source.find("filters.tsv"), _UIDS, (queries, corpus), rows_by_split),
    )


def _read_objects(source: Source, path: Path, what: str) -> tuple[pa.Table, tuple[str, Lines], np.ndarray]:
    """Texts, where they are, and the split that a query names for itself ("" if none)."""
    report, chunks, numbers, splits = source.report(path), [], [], []
    for lines, items in json_blocks(path, source.bounds, report):
        for item, line in zip(items, lines, strict=True):
            metadata = item.get("metadata") or {}
            if not isinstance(metadata, dict):
                report("metadata that is not an object", line, str(metadata)[:80])
                metadata = {}
            split = str(metadata.get("split", ""))
            splits.append(split if split in QRELS else "")
            if what == "query" and "title" not in item:  # a query alone
                item["title"], item["text"] = item.get("text"), ""
        uids = json_texts(items, lines, "_id", report, (str, int), needed=True)
        chunks.append([uids, *(json_texts(items, lines, name, report) for name in ("title", "text"))])
        numbers += lines
    columns = [pa.chunked_array(column, pa.large_string()) for column in zip(*chunks, strict=True)] or [[], [], []]
    uids, titles, contents = columns
    if chunks and not pc.any(pc.not_equal(titles, "")).as_py():  # BEIR's corpora of short texts leave titles empty
        titles, contents = contents, titles
    at = (source.name(path), np.asarray(numbers, dtype=np.int64).__getitem__)
    table = text_table(uids, titles, contents)
    check_uids(source, table["uid"], at, what)
    return table, at, np.asarray(splits, dtype=object)


def write(raw: RawData, out: Path) -> None:
    """Write the layout, with the two additions where they are needed."""
    write_objects(out / "corpus.jsonl", (_object(row, keep_title=True) for row in raw.labels.to_pylist()))
    (out / "qrels").mkdir()
    items: list[dict[str, Any]] = []
    filters: list[pa.Table] = []
    for split, table in raw.queries.items():
        judged = np.diff(raw.relevance[split].indptr) > 0
        for row, known in zip(table.to_pylist(), judged.tolist(), strict=True):
            metadata = {} if known else {"split": split}
            items.append(_object(row, keep_title=bool(row["content"])) | {"metadata": metadata})
        uids = (table["uid"], raw.labels["uid"])
        write_table(pair_table(raw.relevance[split], uids, (*_UIDS, "score")), out / "qrels" / f"{QRELS[split]}.tsv")
        filters.append(pair_table(raw.filter_pairs[split], uids, _UIDS))
    write_objects(out / "queries.jsonl", items)
    if any(table.num_rows for table in filters):
        write_table(pa.concat_tables(filters), out / "filters.tsv")


def _object(row: dict[str, str], keep_title: bool) -> dict[str, Any]:
    texts = {"title": row["title"], "text": row["content"]} if keep_title else {"text": row["title"]}
    return {"_id": row["uid"], **texts}
