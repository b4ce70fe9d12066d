"""BEIR: corpus.jsonl (labels), queries.jsonl, qrels/{train,dev,test}.tsv.

Two optional additions of ours: `"metadata": {"split": ...}` of a query without judgements, which
BEIR would leave out, and filters.tsv (query-id, corpus-id).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Source
from unidec.data.formats.tables import Table, by_split, check_uids, read_filters, read_table
from unidec.data.raw import RawData, text_table

EXPECTED = "corpus.jsonl, queries.jsonl, qrels/train.tsv (and qrels/dev.tsv, qrels/test.tsv)"
NEEDS = (("corpus.jsonl",), ("queries.jsonl",))
QRELS = {"train": "train", "validation": "dev", "test": "test"}
_UIDS = ("query-id", "corpus-id")


def read(source: Source) -> RawData:
    """Read the layout; faults are noted in the source. A score of 0 means judged and not relevant: left out."""
    found = read_table(source, source.need("corpus.jsonl"), ("_id",), ("title", "text"), lambda _row, _line: None)
    corpus, source.labels_at = _texts(source, found, "label"), found.at
    found = read_table(source, source.need("queries.jsonl"), ("_id",), ("title", "text", "split"), _query)
    queries, at = _texts(source, found, "query"), found.at
    split_N = found.columns["split"].to_numpy(zero_copy_only=False)
    shape = (queries.num_rows, corpus.num_rows)
    relevance = csr_matrix(shape, dtype=np.float32)
    for split, stem in QRELS.items():
        path = source.need(f"qrels/{stem}.tsv") if split == "train" else source.find(f"qrels/{stem}.tsv")
        if path is None:
            continue
        pairs = read_table(source, path, (*_UIDS, "score")).pairs(source, queries, corpus)
        own = np.unique(pairs.query_P[pairs.query_P >= 0])
        other = own[(split_N[own] != "") & (split_N[own] != split)]
        source.note_rows(f"query of another split again in {split} (leak)", at, other, "{}", split_N)
        split_N[own] = split
        relevance += pairs.matrix(shape, zero_is_no_pair=True)
    filters = read_filters(source, ["filters.tsv"], _UIDS, queries, corpus)
    return by_split(source, (queries, at), corpus, (relevance, filters), split_N)


def _texts(source: Source, found: Table, what: str) -> pa.Table:
    check_uids(source, found.columns["_id"], found.at, what)
    titles, contents = found.columns.get("title"), found.columns.get("text")
    if titles is None or not pc.any(pc.not_equal(titles, "")).as_py():  # BEIR's corpora of short texts
        titles, contents = contents, titles
    return text_table(found.columns["_id"], titles, contents)


def _query(row: dict[str, Any], _line: int) -> None:
    """A query alone is a title; the split that it names for itself ("" if none) is one of its columns."""
    metadata = row.get("metadata")
    split = metadata.get("split") if isinstance(metadata, dict) else None
    row["split"] = split if split in QRELS else ""
    if "title" not in row:
        row["title"], row["text"] = row.get("text"), ""
