"""XMC raw JSON lines: {trn,tst,lbl}.json[.gz] with uid, title, content, target_ind, target_rel; filter files beside."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Lines, Source
from unidec.data.formats.pairs import Pairs, read_filter_text
from unidec.data.formats.tables import check_uids, read_table
from unidec.data.raw import RawData, row_uids, text_table

FILTERS = {
    "train": ("filter_labels_train.txt", "trn_filter_labels.txt"),
    "test": ("filter_labels_test.txt", "tst_filter_labels.txt"),
}
FILES = {"train": "trn.json", "test": "tst.json"}
EXPECTED = "trn.json, lbl.json (and tst.json)"
NEEDS = (("trn.json",), ("lbl.json",))


def read(source: Source) -> RawData:
    """Read the layout; faults are noted in the source."""
    labels, source.labels_at, _ = _read_objects(source, source.need("lbl.json"), "label", 0)
    queries, relevance, filters = {}, {}, {}
    offset = 0
    for split, file in FILES.items():
        path = source.need(file) if split == "train" else source.find(file)
        if path is None:
            continue
        queries[split], source.queries_at[split], pairs = _read_objects(source, path, "query", offset)
        shape = (queries[split].num_rows, labels.num_rows)
        relevance[split] = pairs.matrix(shape)
        filters[split] = read_filters(source, split, shape)
        offset += shape[0]
    return RawData(source.root.name, queries, labels, relevance, filters)


def read_filters(source: Source, split: str, shape: tuple[int, int]) -> csr_matrix:
    """The split's filter file as bool CSR [queries, labels]; no file, no pairs."""
    path = source.find(*FILTERS[split])
    return csr_matrix(shape, dtype=bool) if path is None else read_filter_text(source, path).matrix(shape)


def _read_objects(source: Source, path: Path, what: str, offset: int) -> tuple[pa.Table, tuple[str, Lines], Pairs]:
    """Texts, where they are, and the targets of queries; a row without a uid has its number from `offset` on."""
    report, counts, labels, values = source.report(path), array("q"), array("q"), array("d")

    def add_targets(item: dict[str, Any], line: int) -> None:
        fault, ind, rel = _targets(item) if what == "query" else ("", [], [])
        if fault:
            report(fault, line, "")
        counts.append(len(ind))
        labels.extend(ind)
        values.extend(rel)

    found = read_table(source, path, (), ("uid", "title", "content"), add_targets)
    numbers = row_uids(offset, found.num_rows)
    uids = found.columns.get("uid", numbers)
    texts = text_table(
        pc.if_else(pc.equal(uids, ""), numbers, uids), found.columns.get("title"), found.columns.get("content")
    )
    check_uids(source, texts["uid"], found.at, what)
    query_P = np.repeat(np.arange(found.num_rows, dtype=np.int32), np.asarray(counts))
    at = (found.at[0], lambda p: found.at[1](query_P[p]))
    return texts, found.at, Pairs(source, at, query_P, np.asarray(labels), np.asarray(values))


def _targets(item: dict[str, Any]) -> tuple[str, list[int], list[float]]:
    """What is wrong with an object ("": nothing), its target_ind, and its target_rel, 1 where it has none."""
    ind, rel = item.get("target_ind"), item.get("target_rel")
    if not isinstance(ind, list) or not all(map(_is_small, ind)):
        missing, kind = "no target_ind (use [] for a query without labels)", "target_ind is not a list of whole numbers"
        return (missing if "target_ind" not in item else kind) if item else "", [], []
    rel = [1.0] * len(ind) if rel is None else rel
    if not isinstance(rel, list) or not all(type(number) is float or _is_small(number) for number in rel):
        return "target_rel is not a list of numbers", [], []
    if len(ind) != len(rel):
        return "target_ind and target_rel of different lengths", [], []
    return "", ind, rel


def _is_small(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**62
