"""Layouts of the XMC repository and of PECOS: JSON lines, or one text per line with pairs as sparse
text or npz.

In files with one text per line, the line is the title, the row number is the uid, and the content
is empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, Field, ValidationError
from scipy.sparse import csr_matrix

from unidec.data.formats.files import (
    Layout,
    Pairs,
    Places,
    Source,
    places_in,
    read_filter_text,
    read_npz,
    read_sparse_text,
)
from unidec.data.formats.table_reader import read_table
from unidec.data.formats.tables import check_uids
from unidec.data.raw import TEXT_SCHEMA, RawData, text_table
from unidec.errors import DataError

SHORT = {"train": "trn", "test": "tst"}
PAIR = np.dtype([("query", np.int32), ("label", np.int64), ("value", np.float64)])
Queries = tuple[pa.Table, Places, Pairs]
"""Texts of a split, their places, and their pairs."""


def _read(
    source: Source,
    labels: pa.Table,
    files: Sequence[str],
    read_split: Callable[[Path, str, int], Queries],
    pairs: Sequence[str] = (),
) -> RawData:
    """Training and test queries, with their pairs and filter pairs.

    Args:
        files: possible names of the query files, with {} for trn or tst.
        read_split: reads the queries of a split; called with the path of its file, the split's
            short name and the number of queries in earlier splits.
        pairs: possible names of the pair files, with {}, if the query files do not hold the pairs.

    Raises:
        DataError: the file of training queries is missing, or a split has pairs but no queries.
    """
    raw = RawData(source.root.name, {}, labels, {}, {})
    first = 0
    for split, short in SHORT.items():
        names = _named(files, short)
        filter_names = (f"filter_labels_{split}.txt", f"{short}_filter_labels.txt")
        path = source.need(*names) if split == "train" else source.find(*names)
        if path is None:
            _check_no_pairs(source, names, [*filter_names, *_named(pairs, short)])
            continue
        raw.queries[split], source.queries_at[split], positives = read_split(path, short, first)
        shape = (raw.queries[split].num_rows, labels.num_rows)
        raw.relevance[split] = positives.matrix(shape)
        path = source.find(*filter_names)
        raw.filter_pairs[split] = (
            read_filter_text(source, path).matrix(shape) if path else csr_matrix(shape, dtype=bool)
        )
        first += shape[0]
    return raw


def _check_no_pairs(source: Source, queries: Sequence[str], pairs: Sequence[str]) -> None:
    """Raise a DataError if a file of pairs exists although these query files do not."""
    for name in pairs:
        if path := source.find(name):
            raise DataError(
                "pairs of queries that are missing",
                where=path,
                expected=" or ".join(queries),
                fix="add the queries, or remove this file",
            )


def _named(patterns: Sequence[str], short: str) -> list[str]:
    return [pattern.format(short) for pattern in patterns]


def _read_json(source: Source) -> RawData:
    """Read {trn,tst,lbl}.json[.gz] with the keys uid, title, content, target_ind, target_rel."""
    labels, source.labels_at, _ = _read_objects(source, source.need("lbl.json"), "label", 0)
    return _read(
        source,
        labels,
        ["{}.json"],
        lambda path, _, first: _read_objects(source, path, "query", first),
    )


def _read_objects(source: Source, path: Path, what: str, first: int) -> Queries:
    """Read texts, and targets of queries. A row without a uid gets its row number plus `first`."""
    report = source.report(path)
    targets = source.numbers(PAIR)
    rows = itertools.count()

    def add_targets(item: dict[str, Any], line: int) -> None:
        row = next(rows)
        if what == "query" and item:  # the error of an empty row is already recorded
            try:
                targets.extend((row, label, value) for label, value in _targets(item))
            except ValueError as error:
                report(str(error), line, "")
        if item.get("uid") in (None, ""):
            item["uid"] = first + row

    table = read_table(source, [path], (), ("uid", "title", "content"), add_targets)
    uids, titles, contents = (table.columns.get(name) for name in TEXT_SCHEMA.names)
    texts = text_table(uids or [], titles, contents)
    check_uids(source, texts["uid"], table.at, what)
    pair_P = targets.array()
    pairs = Pairs(
        source=source,
        at=lambda rows: table.at(pair_P["query"][rows]),
        query_P=pair_P["query"],
        label_P=pair_P["label"],
        value_P=pair_P["value"],
    )
    return texts, table.at, pairs


class _Targets(BaseModel, strict=True):
    """The pairs of a query: label rows, and their relevance; None: all 1."""

    target_ind: list[Annotated[int, Field(gt=-(2**62), lt=2**62)]]
    target_rel: list[float] | None = None


def _targets(item: dict[str, Any]) -> Sequence[tuple[int, float]]:
    """Label row and relevance of each pair of an object. Raises ValueError: they are invalid."""
    try:
        found = _Targets.model_validate(item)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "missing":
            raise ValueError("no target_ind (use [] for a query without labels)") from error
        key = first["loc"][0]
        kind = "whole numbers" if key == "target_ind" else "numbers"
        raise ValueError(f"{key} is not a list of {kind}") from error
    labels = found.target_ind
    values = [1.0] * len(labels) if found.target_rel is None else found.target_rel
    if len(labels) != len(values):
        raise ValueError("target_ind and target_rel have different lengths")
    return list(zip(labels, values, strict=True))


def _read_lines(
    source: Source, labels: Sequence[str], queries: Sequence[str], pairs: Sequence[str]
) -> RawData:
    """Read files with these possible names; features (X.*.npz) are not read."""

    def texts(path: Path, first: int) -> tuple[pa.Table, Places]:
        return source.texts(path, first), places_in(source.name(path))

    def read_split(path: Path, short: str, first: int) -> Queries:
        table, at = texts(path, first)
        path = source.need(*_named(pairs, short))
        read_pairs = read_npz if path.suffix == ".npz" else read_sparse_text
        return table, at, read_pairs(source, path, (table.num_rows, label_texts.num_rows))

    label_texts, source.labels_at = texts(source.need(*labels), 0)
    return _read(source, label_texts, queries, read_split, pairs)


def _text_layout(
    expected: str, labels: Sequence[str], queries: Sequence[str], pairs: Sequence[str]
) -> Layout:
    needs = (labels, _named([*queries, *pairs], "trn"))
    return Layout(
        expected, needs, partial(_read_lines, labels=labels, queries=queries, pairs=pairs)
    )


LAYOUTS = {
    "xmc-json": Layout(
        "trn.json, lbl.json (and tst.json)", (["trn.json"], ["lbl.json"]), _read_json
    ),
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
