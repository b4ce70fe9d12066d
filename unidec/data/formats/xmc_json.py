"""XMC raw JSON lines: {trn,tst,lbl}.json[.gz] with uid, title, content, target_ind, target_rel; filter files beside."""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Source, joined, read_filter_text
from unidec.data.formats.problems import check_uids, filter_matrix, pair_matrix, sorted_csr
from unidec.data.raw import TEXT_SCHEMA, RawData, text_table

CHUNK = 16_384
FILTERS = {
    "train": ("filter_labels_train.txt", "trn_filter_labels.txt"),
    "test": ("filter_labels_test.txt", "tst_filter_labels.txt"),
}
FILES = {"train": "trn.json", "test": "tst.json"}


def fits(source: Source) -> bool:
    return bool(source.find("trn.json") and source.find("lbl.json"))


EXPECTED = "trn.json, lbl.json (and tst.json)"


def read(source: Source) -> RawData:
    """Read the layout; faults are noted in `source.problems`."""
    label_objects = _Objects(source, source.need("lbl.json"), targets=False, offset=0)
    labels, source.labels_at = label_objects.table, (label_objects.name, label_objects.lines)
    queries, relevance, filters = {}, {}, {}
    offset = 0
    for split, file in FILES.items():
        path = source.need(file) if split == "train" else source.find(file)
        if path is None:
            continue
        objects = _Objects(source, path, targets=True, offset=offset)
        shape = (objects.table.num_rows, labels.num_rows)
        queries[split] = objects.table
        source.queries_at[split] = (objects.name, objects.lines)
        relevance[split] = objects.relevance(shape)
        filters[split] = read_filters(source, split, shape)
        offset += shape[0]
    return RawData(source.root.name, queries, labels, relevance, filters)


def read_filters(source: Source, split: str, shape: tuple[int, int]) -> csr_matrix:
    """The split's filter file as bool CSR [queries, labels]; no file, no pairs."""
    path = source.find(*FILTERS[split]) if split in FILTERS else None
    if path is None:
        none = np.zeros(0, dtype=np.int64)
        return sorted_csr(none, none, np.zeros(0, dtype=bool), shape)
    query_P, label_P, lines = read_filter_text(source, path)
    return filter_matrix(query_P, label_P, shape, problems=source.problems, file=source.name(path), lines=lines)


class _Objects:
    """One JSON object a line, parsed a block at a time so that texts are held once, in Arrow."""

    def __init__(self, source: Source, path: Path, *, targets: bool, offset: int) -> None:
        self.source, self.path, self.targets = source, path, targets
        self.name = source.name(path)
        self.columns: dict[str, list[str]] = {"uid": [], "title": [], "content": []}
        self.chunks: list[pa.Table] = []
        self.labels: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.ind: list[int] = []
        self.rel: list[float] = []
        self.per_row = array("q")  # a list of numbers would take five times as much
        self.line_of_row = array("q")
        self.offset = offset
        for first, lines in source.blocks(path):
            self._add_all([(number, line) for number, line in enumerate(lines.split(b"\n"), first) if line.strip()])
        self.table = pa.concat_tables(self.chunks) if self.chunks else TEXT_SCHEMA.empty_table()
        self.line_N = np.asarray(self.line_of_row, dtype=np.int64)
        what = "query" if targets else "label"
        check_uids(self.table["uid"], source.problems, self.name, self.lines, what)

    def lines(self, rows: np.ndarray) -> np.ndarray:
        return self.line_N[rows]

    def relevance(self, shape: tuple[int, int]) -> csr_matrix:
        """The targets as float32 CSR."""
        query_P = np.repeat(np.arange(shape[0], dtype=np.int32), self.per_row)
        label_P, value_P = joined(self.labels, np.int64), joined(self.values, np.float64)
        return pair_matrix(
            query_P,
            label_P,
            value_P,
            shape,
            problems=self.source.problems,
            file=self.name,
            lines=lambda pairs: self.line_N[query_P[pairs]],
        )

    def _add_all(self, pending: list[tuple[int, bytes]]) -> None:
        if not self._add_sound(pending):
            for number, line in pending:
                self._add(number, line)
        self._flush()

    def _add_sound(self, pending: list[tuple[int, bytes]]) -> bool:
        """Parse many lines in one call; false, and nothing added, if one of them has any fault (or an unusual uid)."""
        try:
            items = json.loads("[" + ",".join([line.decode() for _, line in pending]) + "]")
        except (ValueError, RecursionError):
            return False
        if len(items) != len(pending) or not _types(items) <= {dict}:
            return False
        first = self.offset + len(self.line_of_row)
        uids = [item.get("uid", str(row)) for row, item in enumerate(items, first)]
        titles, contents = ([item.get(field) or "" for item in items] for field in ("title", "content"))
        if not _types(uids) | _types(titles) | _types(contents) <= {str}:
            return False
        if self.targets:
            ind = [item.get("target_ind") for item in items]
            if not _types(ind) <= {list}:
                return False
            rel = [
                item["target_rel"] if "target_rel" in item else [1.0] * len(i)
                for item, i in zip(items, ind, strict=True)
            ]
            if not _types(rel) <= {list} or list(map(len, ind)) != list(map(len, rel)):
                return False
            all_ind, all_rel = list(chain.from_iterable(ind)), list(chain.from_iterable(rel))
            if not _types(all_ind) <= {int} or not _types(all_rel) <= {int, float}:
                return False
            try:
                arrays = np.asarray(all_ind, dtype=np.int64), np.asarray(all_rel, dtype=np.float64)
            except OverflowError:
                return False
            self.labels.append(arrays[0])
            self.values.append(arrays[1])
            self.per_row.extend(map(len, ind))
        self.columns = {"uid": uids, "title": titles, "content": contents}
        self.line_of_row.extend(number for number, _ in pending)
        return True

    def _add(self, number: int, line: bytes) -> None:
        problems = self.source.problems
        text = self.source.decode(line, self.path, number)
        try:
            item: Any = json.loads(text) if text is not None else {}
        except (ValueError, RecursionError) as error:
            problems.add("not a JSON object", self.name, number, error)
            item = {}
        if not isinstance(item, dict):
            problems.add("not a JSON object", self.name, number, type(item).__name__)
            item = {}
        row = len(self.line_of_row)
        uid = item.get("uid", self.offset + row)
        self.columns["uid"].append(uid if isinstance(uid, str) else str(uid))
        for field in ("title", "content"):
            value = item.get(field) or ""
            if not isinstance(value, str):
                problems.add(f"{field} is not a text", self.name, number, type(value).__name__)
                value = ""
            self.columns[field].append(value)
        self.line_of_row.append(number)
        if self.targets:
            self._add_targets(item, number, good=text is not None and bool(item))

    def _add_targets(self, item: dict[str, Any], number: int, good: bool) -> None:
        ind = item.get("target_ind", [])
        rel = item.get("target_rel")
        fault = None
        if "target_ind" not in item:
            fault = "no target_ind (use [] for a query without labels)" if good else None
        elif not isinstance(ind, list) or not all(map(_is_small, ind)):
            fault, ind = "target_ind is not a list of whole numbers", []
        if rel is None:
            rel = [1.0] * len(ind)
        elif not isinstance(rel, list) or not all(type(r) is float or _is_small(r) for r in rel):
            fault, rel = fault or "target_rel is not a list of numbers", [1.0] * len(ind)
        elif len(rel) != len(ind):
            fault = fault or "target_ind and target_rel of different lengths"
            rel = [1.0] * len(ind)
        if fault:
            self.source.problems.add(fault, self.name, number)
        self.ind += ind
        self.rel += rel
        self.per_row.append(len(ind))

    def _flush(self) -> None:
        try:
            chunk = text_table(*self.columns.values())
        except UnicodeEncodeError:  # a lone surrogate written as \ud800 in the JSON: not a text in any encoding
            self._replace_surrogates()
            chunk = text_table(*self.columns.values())
        self.chunks.append(chunk)
        if self.ind:
            self.labels.append(np.asarray(self.ind, dtype=np.int64))
            self.values.append(np.asarray(self.rel, dtype=np.float64))
            self.ind, self.rel = [], []
        self.columns = {name: [] for name in self.columns}

    def _replace_surrogates(self) -> None:
        first = len(self.line_of_row) - len(self.columns["uid"])
        for field, column in self.columns.items():
            for row, text in enumerate(column):
                try:
                    text.encode()
                except UnicodeEncodeError:
                    self.source.problems.add(
                        "text that is not UTF-8", self.name, self.line_of_row[first + row], f"{field}: a lone surrogate"
                    )
                    column[row] = ""


def _is_small(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**62


def _types(values: Iterable[Any]) -> set[type]:
    return set(map(type, values))


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
