"""BEIR: corpus.jsonl (labels), queries.jsonl, qrels/{train,dev,test}.tsv.

Two optional additions of ours: `"metadata": {"split": ...}` of a query without judgements, which
BEIR would leave out, and filters.tsv (query-id, corpus-id).
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Source, lines_of_some
from unidec.data.formats.tables import check_uids, pair_table, read_filters, read_table, texts_of
from unidec.data.raw import RawData, text_table
from unidec.data.table_file import json_blocks, to_strings

EXPECTED = "corpus.jsonl, queries.jsonl, qrels/train.tsv (and qrels/dev.tsv, qrels/test.tsv)"
KEEPS_VALIDATION = True
QRELS = {"train": "train", "validation": "dev", "test": "test"}
_UIDS = ("query-id", "corpus-id")


def fits(source: Source) -> bool:
    """Whether the folder has files of this layout."""
    return bool(source.find("corpus.jsonl") and source.find("queries.jsonl"))


def read(source: Source) -> RawData:
    """Read the layout; faults are noted in `source.problems`. A score of 0 means judged and not relevant: left out."""
    corpus, corpus_line_L, _ = _read_objects(source, source.need("corpus.jsonl"), "label")
    source.labels_at = (source.name(source.need("corpus.jsonl")), lambda rows: corpus_line_L[rows])
    queries, line_N, split_N = _read_objects(source, source.need("queries.jsonl"), "query")
    name = source.name(source.need("queries.jsonl"))
    judged = {}
    for split, stem in QRELS.items():
        path = source.need(f"qrels/{stem}.tsv") if split == "train" else source.find(f"qrels/{stem}.tsv")
        if path is not None:
            judged[split] = read_table(source, path, (*_UIDS, "score")).pairs(source, queries, corpus)
    for split, pairs in judged.items():
        own = np.unique(pairs.query_P[pairs.query_P >= 0])
        other = own[(split_N[own] != "") & (split_N[own] != split)]
        kind = f"query of another split again in {split} (leak)"
        source.problems.add_rows(kind, name, other, lambda rows: line_N[rows], lambda row: split_N[row])
        split_N[own] = split
    rows_by_split = {split: np.flatnonzero(split_N == split) for split in QRELS}
    rows_by_split = {split: rows for split, rows in rows_by_split.items() if rows.size or split in judged}
    shape = (queries.num_rows, corpus.num_rows)
    relevance = {}
    for split, rows in rows_by_split.items():
        relevance[split] = csr_matrix((rows.size, shape[1]), dtype=np.float32)
        if split in judged:
            relevant = judged[split].take(np.flatnonzero(judged[split].value_P != 0))
            relevance[split] = relevant.by_split({split: rows}, shape)[split]
        source.queries_at[split] = (name, lines_of_some(lambda rows: line_N[rows], rows))
    return RawData(
        source.root.name,
        {split: queries.take(rows) for split, rows in rows_by_split.items()},
        corpus,
        relevance,
        read_filters(source, source.find("filters.tsv"), _UIDS, (queries, corpus), rows_by_split),
    )


def _read_objects(source: Source, path: Path, what: str) -> tuple[pa.Table, np.ndarray, np.ndarray]:
    """Texts, line of each row, and the split that a query names for itself ("" if none)."""
    report, chunks, numbers, splits = source.report(path), [], [], []
    for lines, items in json_blocks(path, source.bounds, report):
        for line, item in zip(lines, items, strict=True):
            if "_id" not in item or not isinstance(item.get("metadata") or {}, dict):
                report("not an object with _id, text (and title)", line, str(item)[:80])
            if what == "query" and "title" not in item:  # a query alone
                item["title"], item["text"] = item.get("text"), ""
        uids = [str(item.get("_id", "")) for item in items]
        titles, texts = (texts_of([i.get(key) for i in items], lines, key, report) for key in ("title", "text"))
        chunks.append(pa.table([to_strings(uids, lines, report), titles, texts], ["uid", "title", "content"]))
        numbers += lines
        named = [item.get("metadata") for item in items]
        splits += [str(one.get("split", "")) if isinstance(one, dict) else "" for one in named]
    table = pa.concat_tables(chunks) if chunks else text_table([], [])
    titles, contents = table["title"], table["content"]
    if not pc.any(pc.not_equal(titles, "")).as_py():  # BEIR's corpora of short texts leave every title empty
        titles, contents = contents, titles
    line_N = np.asarray(numbers, dtype=np.int64)
    check_uids(source, table["uid"], source.name(path), lambda rows: line_N[rows], what)
    known = [split if split in QRELS else "" for split in splits]
    return text_table(table["uid"], titles, contents), line_N, np.asarray(known, dtype=object)


def write(raw: RawData, out: Path) -> None:
    """Write the layout, with the two additions where they are needed."""
    _write_objects(out / "corpus.jsonl", [_object(row, keep_title=True) for row in raw.labels.to_pylist()])
    (out / "qrels").mkdir()
    items: list[dict[str, Any]] = []
    filters: list[pa.Table] = []
    for split, table in raw.queries.items():
        judged = np.diff(raw.relevance[split].indptr) > 0
        for row, known in zip(table.to_pylist(), judged.tolist(), strict=True):
            metadata = {} if known else {"split": split}
            items.append(_object(row, keep_title=bool(row["content"])) | {"metadata": metadata})
        uids = (table["uid"], raw.labels["uid"])
        pairs = pair_table(raw.relevance[split], uids, (*_UIDS, "score"))
        _write_tsv(pairs, out / "qrels" / f"{QRELS[split]}.tsv")
        filters.append(pair_table(raw.filter_pairs[split], uids, _UIDS))
    _write_objects(out / "queries.jsonl", items)
    if any(table.num_rows for table in filters):
        _write_tsv(pa.concat_tables(filters), out / "filters.tsv")


def _object(row: dict[str, str], keep_title: bool) -> dict[str, Any]:
    texts = {"title": row["title"], "text": row["content"]} if keep_title else {"text": row["title"]}
    return {"_id": row["uid"], **texts}


def _write_tsv(table: pa.Table, path: Path) -> None:
    """As BEIR's own files: quoted only if it holds a tab or quote."""
    rows = zip(*(pc.cast(column, pa.large_string()).to_pylist() for column in table.columns), strict=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows([table.column_names, *rows])


def _write_objects(path: Path, items: list[dict[str, Any]]) -> None:
    path.write_bytes("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items).encode())
