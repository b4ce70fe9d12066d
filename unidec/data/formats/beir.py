"""BEIR: corpus.jsonl (labels), queries.jsonl, qrels/{train,dev,test}.tsv.

Two additions of ours, read where they are there: `"metadata": {"split": ...}` of a query without judgements, which
BEIR would leave out, and filters.tsv (query-id, corpus-id).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_matrix

from unidec.data.formats.files import Source
from unidec.data.formats.ids import Pairs, look_up, split_pairs
from unidec.data.formats.problems import check_uids, lines_of, showing
from unidec.data.raw import RawData, text_table
from unidec.errors import DataError

EXPECTED = "corpus.jsonl, queries.jsonl, qrels/train.tsv (and qrels/dev.tsv, qrels/test.tsv)"
KEEPS_VALIDATION = True
QRELS = {"train": "train", "validation": "dev", "test": "test"}


def fits(source: Source) -> bool:
    return bool(source.find("corpus.jsonl") and source.find("queries.jsonl"))


def read(source: Source) -> RawData:
    """Read the layout; faults are noted in `source.problems`. A score of 0 means judged and not relevant: left out."""
    problems = source.problems
    corpus, corpus_line_L, _ = _read_objects(source, source.need("corpus.jsonl"), "corpus")
    source.labels_at = (source.name(source.need("corpus.jsonl")), lines_of(corpus_line_L))
    queries, line_N, named_split_N = _read_objects(source, source.need("queries.jsonl"), "query")
    name = source.name(source.need("queries.jsonl"))
    judged = {}
    for split, stem in QRELS.items():
        path = source.need(f"qrels/{stem}.tsv") if split == "train" else source.find(f"qrels/{stem}.tsv")
        if path is not None:
            pairs = read_tsv(source, path, ("query-id", "corpus-id", "score"))
            judged[split] = (pairs, *look_up(pairs, queries, corpus, problems))
    split_N = named_split_N
    for split, (_, query_P, _) in judged.items():
        own = np.unique(query_P[query_P >= 0])
        other = own[(split_N[own] != "") & (split_N[own] != split)]
        problems.add_rows(
            f"query of another split again in {split} (leak)",
            name,
            other,
            lines_of(line_N),
            showing(split_N),
        )
        split_N[own] = split
    rows_by_split = {split: np.flatnonzero(split_N == split) for split in QRELS}
    rows_by_split = {split: rows for split, rows in rows_by_split.items() if rows.size or split in judged}
    shape = (queries.num_rows, corpus.num_rows)
    relevance = {}
    for split, rows in rows_by_split.items():
        relevance[split] = csr_matrix((rows.size, shape[1]), dtype=np.float32)
        if split in judged:
            pairs, query_P, label_P = judged[split]
            relevance[split] = _positive(pairs, query_P, label_P, split, rows, shape, source)
        source.queries_at[split] = (name, lines_of(line_N, rows))
    return RawData(
        source.root.name,
        {split: queries.take(rows) for split, rows in rows_by_split.items()},
        corpus,
        relevance,
        read_filters(source, queries, corpus, rows_by_split),
    )


def _positive(
    pairs: Pairs,
    query_P: np.ndarray,
    label_P: np.ndarray,
    split: str,
    rows: np.ndarray,
    shape: tuple[int, int],
    source: Source,
) -> csr_matrix:
    kept = np.flatnonzero(pairs.relevance != 0)
    some = Pairs(pairs.file, pairs.query, pairs.label, pairs.relevance[kept], lambda p: pairs.lines(kept[p]))
    return split_pairs(some, query_P[kept], label_P[kept], {split: rows}, shape, source.problems)[split]


def read_filters(
    source: Source, queries: pa.Table, labels: pa.Table, rows_by_split: dict[str, np.ndarray]
) -> dict[str, csr_matrix]:
    """filters.tsv by split; no file, no pairs."""
    path = source.find("filters.tsv")
    shape = (queries.num_rows, labels.num_rows)
    if path is None:
        return {split: csr_matrix((rows.size, shape[1]), dtype=bool) for split, rows in rows_by_split.items()}
    pairs = read_tsv(source, path, ("query-id", "corpus-id"))
    query_P, label_P = look_up(pairs, queries, labels, source.problems)
    return split_pairs(pairs, query_P, label_P, rows_by_split, shape, source.problems, filters=True)


def read_tsv(source: Source, path: Path, header: tuple[str, ...]) -> Pairs:
    """A headed TSV of uids and, as a third column, scores."""
    columns: list[list[str]] = [[] for _ in header]
    numbers = []
    for number, line in source.lines(path):
        text = source.decode(line, path, number)
        if text is None or not text.strip():
            continue
        cells = text.split("\t")
        if len(cells) != len(header):
            source.problems.add(f"not {len(header)} columns", source.name(path), number, f"{len(cells)}: {text[:60]}")
        elif number > 1 or tuple(cells) != header:
            numbers.append(number)
            for column, cell in zip(columns, cells, strict=True):
                column.append(cell)
    score = to_numbers(pa.array(columns[2], pa.string())) if len(header) > 2 else np.ones(len(numbers))
    line_P = np.asarray(numbers, dtype=np.int64)
    strings = [pa.array(column, pa.large_string()) for column in columns[:2]]
    return Pairs(source.name(path), strings[0], strings[1], score, lines_of(line_P))


def to_numbers(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Strings to float64; NaN where one is not a number."""
    import pandas as pd

    return pd.to_numeric(column.to_pandas(), errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)


def read_objects(source: Source, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line of a JSON lines file; faults are noted and passed over."""
    for number, line in source.lines(path):
        text = source.decode(line, path, number) if line.strip() else None
        if text is None:
            continue
        try:
            item = json.loads(text)
            text.encode()
        except (ValueError, RecursionError) as error:
            source.problems.add("not a JSON object", source.name(path), number, error)
            continue
        if isinstance(item, dict):
            yield number, item
        else:
            source.problems.add("not a JSON object", source.name(path), number, type(item).__name__)


def _read_objects(source: Source, path: Path, what: str) -> tuple[pa.Table, np.ndarray, np.ndarray]:
    """Texts, line of each row, and the split a query names for itself ("" if none)."""
    uids, titles, contents, numbers, splits = [], [], [], [], []
    for number, item in read_objects(source, path):
        title, text = item.get("title") or "", item.get("text") or ""
        metadata = item.get("metadata") or {}
        if (
            "_id" not in item
            or not isinstance(title, str)
            or not isinstance(text, str)
            or not isinstance(metadata, dict)
        ):
            source.problems.add("not an object with _id, text (and title)", source.name(path), number, str(item)[:80])
            continue
        alone = what == "query" and "title" not in item
        uids.append(str(item["_id"]))
        titles.append(text if alone else title)
        contents.append("" if alone else text)
        numbers.append(number)
        split = str(metadata.get("split", ""))
        splits.append(split if split in QRELS else "")
    line_N = np.asarray(numbers, dtype=np.int64)
    if not any(titles):  # BEIR's corpora of short texts leave every title empty
        titles, contents = contents, titles
    check_uids(uids, source.problems, source.name(path), lines_of(line_N), what)
    try:
        return text_table(uids, titles, contents), line_N, np.asarray(splits, dtype=object)
    except UnicodeEncodeError as error:
        raise DataError("a lone surrogate in a text", where=str(path), got=str(error), fix="remove it") from error


def write(raw: RawData, out: Path) -> None:
    """Write the layout, with the two additions where they are needed."""
    _write_objects(
        out / "corpus.jsonl",
        [{"_id": r["uid"], "title": r["title"], "text": r["content"]} for r in raw.labels.to_pylist()],
    )
    (out / "qrels").mkdir()
    items: list[dict[str, Any]] = []
    filters = ["query-id\tcorpus-id\n"]
    label_uids = raw.labels["uid"].to_pylist()
    for split, table in raw.queries.items():
        matrix, uids = raw.relevance[split].tocoo(), table["uid"].to_pylist()
        judged = np.diff(raw.relevance[split].indptr) > 0
        for row, known in zip(table.to_pylist(), judged.tolist(), strict=True):
            texts = {"title": row["title"], "text": row["content"]} if row["content"] else {"text": row["title"]}
            items.append({"_id": row["uid"], **texts, "metadata": {} if known else {"split": split}})
        rows = zip(matrix.row.tolist(), matrix.col.tolist(), matrix.data.tolist(), strict=True)
        lines = [f"{uids[q]}\t{label_uids[label]}\t{score:.9g}\n" for q, label, score in rows]
        text = "".join(["query-id\tcorpus-id\tscore\n", *lines])
        (out / "qrels" / f"{QRELS[split]}.tsv").write_bytes(text.encode())
        pairs = raw.filter_pairs[split].tocoo()
        filters += [
            f"{uids[q]}\t{label_uids[label]}\n" for q, label in zip(pairs.row.tolist(), pairs.col.tolist(), strict=True)
        ]
    _write_objects(out / "queries.jsonl", items)
    if len(filters) > 1:
        (out / "filters.tsv").write_bytes("".join(filters).encode())


def _write_objects(path: Path, items: list[dict[str, Any]]) -> None:
    path.write_bytes("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items).encode())
