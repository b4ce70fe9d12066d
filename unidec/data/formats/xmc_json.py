"""XMC raw JSON lines: {trn,tst,lbl}.json[.gz] with uid, title, content, target_ind, target_rel; filter files beside."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Lines, Source
from unidec.data.formats.pairs import Pairs, read_filter_text
from unidec.data.formats.tables import check_uids, texts_of
from unidec.data.raw import TEXT_SCHEMA, RawData
from unidec.data.table_file import Report, json_blocks, to_strings

CHUNK = 16_384
FILTERS = {
    "train": ("filter_labels_train.txt", "trn_filter_labels.txt"),
    "test": ("filter_labels_test.txt", "tst_filter_labels.txt"),
}
FILES = {"train": "trn.json", "test": "tst.json"}
EXPECTED = "trn.json, lbl.json (and tst.json)"


def fits(source: Source) -> bool:
    """Whether the folder has files of this layout."""
    return bool(source.find("trn.json") and source.find("lbl.json"))


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
        uids = [str(item.get("uid", row)) for row, item in enumerate(items, offset)]
        texts = [texts_of([item.get(name) for item in items], lines, name, report) for name in ("title", "content")]
        chunks.append(pa.table([to_strings(uids, lines, report), *texts], TEXT_SCHEMA))
        line_blocks.append(np.asarray(lines, dtype=np.int64))
        if what == "query":
            ind, rel = _targets(items, lines, report)
            count_blocks.append(np.fromiter(map(len, ind), np.int64, len(ind)))
            label_blocks.append(np.fromiter(chain.from_iterable(ind), np.int64))
            value_blocks.append(np.fromiter(chain.from_iterable(rel), np.float64))
        offset += len(items)
    name, table = source.name(path), pa.concat_tables(chunks) if chunks else TEXT_SCHEMA.empty_table()
    line_N = np.concatenate(line_blocks)
    check_uids(source, table["uid"], name, lambda rows: line_N[rows], what)
    counts = np.concatenate(count_blocks)
    query_P = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    label_P, value_P = np.concatenate(label_blocks), np.concatenate(value_blocks)
    pairs = Pairs(query_P, label_P, value_P, lambda p: line_N[query_P[p]], name, source.problems)
    return table, (name, lambda rows: line_N[rows]), pairs


def _targets(items: list[dict[str, Any]], lines: list[int], report: Report) -> tuple[list[Any], list[Any]]:
    """target_ind and target_rel of each item; those with a fault are reported and become empty."""
    ind: list[Any] = [item.get("target_ind") for item in items]
    ones = ([1.0] * len(own) if isinstance(own, list) else [] for own in ind)
    given = (item.get("target_rel") for item in items)
    rel: list[Any] = [one if own is None else own for own, one in zip(given, ones, strict=True)]
    if set(map(type, ind + rel)) <= {list} and list(map(len, ind)) == list(map(len, rel)):
        labels, values = list(chain.from_iterable(ind)), chain.from_iterable(rel)
        numbers = set(map(type, labels)) <= {int} and set(map(type, values)) <= {int, float}
        if numbers and all(map(_is_small, (max(labels, default=0), min(labels, default=0), *_whole(rel)))):
            return ind, rel
    for row, (item, line) in enumerate(zip(items, lines, strict=True)):
        fault = _fault(item, ind[row], rel[row])
        if fault:
            report(fault, line, "")
        if fault or not item:  # an empty item was reported before
            ind[row], rel[row] = [], []
    return ind, rel


def _whole(rows: list[list[Any]]) -> Iterator[int]:
    return (number for number in chain.from_iterable(rows) if type(number) is int)


def _fault(item: dict[str, Any], ind: Any, rel: Any) -> str:
    if not item:
        return ""
    if "target_ind" not in item:
        return "no target_ind (use [] for a query without labels)"
    if not isinstance(ind, list) or not all(map(_is_small, ind)):
        return "target_ind is not a list of whole numbers"
    if not isinstance(rel, list) or not all(type(number) is float or _is_small(number) for number in rel):
        return "target_rel is not a list of numbers"
    return "" if len(ind) == len(rel) else "target_ind and target_rel of different lengths"


def _is_small(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**62


def write(raw: RawData, out: Path) -> None:
    """Write the layout, byte-identically for the same data."""
    _write_lines(out / "lbl.json.gz", raw.labels, None)
    for split, file in FILES.items():
        if split in raw.queries:
            _write_lines(out / f"{file}.gz", raw.queries[split], raw.relevance[split])
    write_filters(raw, out)


def write_filters(raw: RawData, out: Path) -> None:
    """Write the filter files of train and test."""
    for split, names in FILTERS.items():
        if split in raw.filter_pairs:
            pairs = raw.filter_pairs[split].tocoo()
            np.savetxt(out / names[0], np.column_stack((pairs.row, pairs.col)), fmt="%d")


def _write_lines(path: Path, table: pa.Table, relevance: Any) -> None:
    with open(path, "wb") as packed, gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as file:
        for start in range(0, table.num_rows, CHUNK):
            lines = []
            for row, item in enumerate(table.slice(start, CHUNK).to_pylist(), start):
                if relevance is not None:
                    own = slice(relevance.indptr[row], relevance.indptr[row + 1])
                    item["target_ind"] = relevance.indices[own].tolist()
                    item["target_rel"] = relevance.data[own].tolist()
                lines.append(json.dumps(item, ensure_ascii=False) + "\n")
            file.write("".join(lines).encode())
