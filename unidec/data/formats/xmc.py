"""Layouts of the XMC repository and of PECOS: JSON lines, or a text a line with pairs as sparse text or npz.

A text a line has no uid and no content: the text is the title, the row number the uid.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.formats.files import (
    Layout,
    Lines,
    Pairs,
    Source,
    next_line,
    read_filter_text,
    read_npz,
    read_sparse_text,
)  # fmt: skip
from unidec.data.formats.tables import check_uids, read_table
from unidec.data.raw import RawData, row_uids, text_table

SHORT = {"train": "trn", "test": "tst"}
Queries = tuple[pa.Table, tuple[str, Lines], Pairs]
"""Texts of a split, where they are, and their pairs."""


def _read(source: Source, labels: pa.Table, files: Sequence[str], one: Callable[[Path, str, int], Queries]) -> RawData:
    """Training and test queries of files with these names ({}: trn or tst), with their pairs and filter pairs; `one`
    reads a split's queries, from its file, its short name and the number of queries before."""
    queries, relevance, filters, first = {}, {}, {}, 0
    for split, short in SHORT.items():
        names = _named(files, short)
        path = source.need(*names) if split == "train" else source.find(*names)
        if path is None:
            continue
        queries[split], source.queries_at[split], pairs = one(path, short, first)
        shape = (queries[split].num_rows, labels.num_rows)
        relevance[split] = pairs.matrix(shape)
        path = source.find(f"filter_labels_{split}.txt", f"{short}_filter_labels.txt")
        filters[split] = read_filter_text(source, path).matrix(shape) if path else csr_matrix(shape, dtype=bool)
        first += shape[0]
    return RawData(source.root.name, queries, labels, relevance, filters)


def _named(patterns: Sequence[str], short: str) -> list[str]:
    return [pattern.format(short) for pattern in patterns]


def _read_json(source: Source) -> RawData:
    """{trn,tst,lbl}.json[.gz] with uid, title, content, target_ind, target_rel."""
    labels, source.labels_at, _ = _read_objects(source, source.need("lbl.json"), "label", 0)
    return _read(source, labels, ["{}.json"], lambda path, _, first: _read_objects(source, path, "query", first))


def _read_objects(source: Source, path: Path, what: str, first: int) -> Queries:
    """Texts, and the targets of queries; a row without a uid has its number from `first` on."""
    report, counts, labels, values = source.report(path), array("q"), array("q"), array("d")

    def add_targets(item: dict[str, Any], line: int) -> None:
        fault, ind, rel = _targets(item) if what == "query" else ("", [], [])
        if fault:
            report(fault, line, "")
        counts.append(len(ind))
        labels.extend(ind)
        values.extend(rel)

    found = read_table(source, path, (), ("uid", "title", "content"), add_targets)
    numbers = row_uids(first, found.num_rows)
    uids = found.columns.get("uid", numbers)
    uids = pc.if_else(pc.equal(uids, ""), numbers, uids)
    texts = text_table(uids, found.columns.get("title"), found.columns.get("content"))
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


def _read_lines(source: Source, labels: Sequence[str], queries: Sequence[str], pairs: Sequence[str]) -> RawData:
    """Files with these names; features (X.*.npz) are not read."""

    def texts(path: Path, first: int) -> tuple[pa.Table, tuple[str, Lines]]:
        column = source.texts(path)
        return text_table(row_uids(first, len(column)), column), (source.name(path), next_line)

    def one(path: Path, short: str, first: int) -> Queries:
        table, at = texts(path, first)
        path = source.need(*_named(pairs, short))
        read_pairs = read_npz if path.suffix == ".npz" else read_sparse_text
        return table, at, read_pairs(source, path, (table.num_rows, label_texts.num_rows))

    label_texts, source.labels_at = texts(source.need(*labels), 0)
    return _read(source, label_texts, queries, one)


def _text_layout(expected: str, labels: Sequence[str], queries: Sequence[str], pairs: Sequence[str]) -> Layout:
    needs = (labels, _named([*queries, *pairs], "trn"))
    return Layout(expected, needs, partial(_read_lines, labels=labels, queries=queries, pairs=pairs))


LAYOUTS = {
    "xmc-json": Layout("trn.json, lbl.json (and tst.json)", (["trn.json"], ["lbl.json"]), _read_json),
    "xmc-text": _text_layout(
        "trn_X.txt, Y.txt (also in raw/), trn_X_Y.txt or Y.trn.npz (and the same with tst)",
        ["Y.txt", "raw/Y.txt"],
        ["{}_X.txt", "raw/{}_X.txt"],
        ["{}_X_Y.txt", "raw/{}_X_Y.txt", "Y.{}.npz"],
    ),
    "pecos": _text_layout(
        "X.trn.txt, Y.trn.npz, output-items.txt (and the same with tst)",
        ["output-items.txt"],
        ["X.{}.txt"],
        ["Y.{}.npz"],
    ),
}
