"""XMC raw JSON lines: {trn,tst,lbl}.json[.gz] with uid, title, content, target_ind, target_rel; filter files beside."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Lines, Source
from unidec.data.formats.pairs import Pairs, read_filter_text
from unidec.data.formats.tables import check_uids, write_objects
from unidec.data.raw import TEXT_SCHEMA, RawData
from unidec.data.table_file import json_blocks, json_texts

CHUNK = 16_384
FILTERS = {
    "train": ("filter_labels_train.txt", "trn_filter_labels.txt"),
    "test": ("filter_labels_test.txt", "tst_filter_labels.txt"),
}
FILES = {"train": "trn.json", "test": "tst.json"}
EXPECTED = "trn.json, lbl.json (and tst.json)"
NEEDS = (("trn.json",), ("lbl.json",))


def read(source: Source) -> RawData:
    """Read the layout; faults are noted in `source.problems`."""
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
    report, chunks = source.report(path), []
    line_blocks, count_blocks = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    label_blocks, value_blocks = [np.zeros(0, np.int64)], [np.zeros(0)]
    for lines, items in json_blocks(path, source.bounds, report):
        uids = pa.array([str(item.get("uid", row)) for row, item in enumerate(items, offset)], pa.large_string())
        texts = [json_texts(items, lines, name, report) for name in ("title", "content")]
        chunks.append(pa.table([uids, *texts], TEXT_SCHEMA))
        line_blocks.append(np.asarray(lines))
        ind, rel = [], []
        for item, line in zip(items, lines, strict=True) if what == "query" else ():
            fault, labels, values = _targets(item)
            if fault:
                report(fault, line, "")
            ind.append(labels)
            rel.append(values)
        count_blocks.append(np.fromiter(map(len, ind), np.int64, len(ind)))
        label_blocks.append(np.fromiter(chain.from_iterable(ind), np.int64))
        value_blocks.append(np.fromiter(chain.from_iterable(rel), np.float64))
        offset += len(items)
    line_N, counts = np.concatenate(line_blocks), np.concatenate(count_blocks)
    table, at = pa.concat_tables([TEXT_SCHEMA.empty_table(), *chunks]), (source.name(path), line_N.__getitem__)
    check_uids(source, table["uid"], at, what)
    query_P = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    label_P, value_P = np.concatenate(label_blocks), np.concatenate(value_blocks)
    return table, at, Pairs(source, (at[0], lambda p: line_N[query_P[p]]), query_P, label_P, value_P)


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


def write(raw: RawData, out: Path) -> None:
    """Write the layout, byte-identically for the same data."""
    write_objects(out / "lbl.json.gz", _objects(raw.labels, None))
    for split, file in FILES.items():
        if split in raw.queries:
            write_objects(out / f"{file}.gz", _objects(raw.queries[split], raw.relevance[split]))
    write_filters(raw, out)


def _objects(table: pa.Table, relevance: Any) -> Iterator[dict[str, Any]]:
    for start in range(0, table.num_rows, CHUNK):
        for row, item in enumerate(table.slice(start, CHUNK).to_pylist(), start):
            if relevance is not None:
                own = slice(relevance.indptr[row], relevance.indptr[row + 1])
                item["target_ind"] = relevance.indices[own].tolist()
                item["target_rel"] = relevance.data[own].tolist()
            yield item


def write_filters(raw: RawData, out: Path) -> None:
    """Write the filter files of train and test."""
    for split, names in FILTERS.items():
        if split in raw.filter_pairs:
            pairs = raw.filter_pairs[split].tocoo()
            np.savetxt(out / names[0], np.column_stack((pairs.row, pairs.col)), fmt="%d")
