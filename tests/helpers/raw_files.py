"""Raw files of every layout, as a user may have them: what the readers are tested with."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from scipy.sparse import csr_matrix, save_npz

from unidec.data.raw import RawData

SHORT = {"train": "trn", "test": "tst"}
QRELS = {"train": "train", "validation": "dev", "test": "test"}


def write_raw(raw: RawData, folder: Path | str, layout: str, kind: str = "csv") -> None:
    """Write raw data in a layout; "tables" (of this kind) and "beir" have a validation split;
    "beir" has no filters.
    """
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    if layout == "tables":
        _tables(raw, out, kind)
    elif layout == "beir":
        _beir(raw, out)
    else:
        {"xmc-json": _xmc_json, "xmc-text": _xmc_text, "pecos": _pecos}[layout](raw, out)
        for split, pairs in raw.filter_pairs.items():
            coo = pairs.tocoo()
            lines = [f"{q} {label}\n" for q, label in zip(coo.row, coo.col, strict=True)]
            (out / f"filter_labels_{split}.txt").write_text("".join(lines))


def as_beir_has_it(raw: RawData) -> RawData:
    """Without filter pairs, and without the queries that have no pair."""
    judged = raw.take(
        {split: np.flatnonzero(np.diff(pairs.indptr)) for split, pairs in raw.relevance.items()}
    )
    none = {
        split: csr_matrix(pairs.shape, dtype=bool) for split, pairs in judged.filter_pairs.items()
    }
    return replace(judged, filter_pairs=none)


def write_objects(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
    data = b"".join(json.dumps(item, ensure_ascii=False).encode() + b"\n" for item in items)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def write_table(table: pa.Table, path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".jsonl":
        write_objects(path, table.to_pylist())
    else:
        rows = zip(
            *(pc.cast(column, pa.large_string()).to_pylist() for column in table.columns),
            strict=True,
        )
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(
                file, delimiter="\t" if path.suffix == ".tsv" else ",", lineterminator="\n"
            )
            writer.writerows([table.column_names, *rows])


def _pair_table(
    matrix: csr_matrix, queries: pa.Table, labels: pa.Table, names: tuple[str, ...]
) -> pa.Table:
    coo = matrix.tocoo()
    uids = [
        table["uid"].combine_chunks().take(pa.array(at))
        for table, at in ((queries, coo.row), (labels, coo.col))
    ]
    return pa.table(dict(zip(names, [*uids, pa.array(coo.data.astype(float))], strict=False)))


def _tables(raw: RawData, out: Path, kind: str) -> None:
    names = ("query_id", "label_id", "relevance")
    queries = []
    pairs = []
    filters = []
    for split, table in raw.queries.items():
        named = table.rename_columns(["id", "text", "content"])
        queries.append(named.append_column("split", pa.array([split] * table.num_rows)))
        pairs.append(_pair_table(raw.relevance[split], table, raw.labels, names))
        filters.append(_pair_table(raw.filter_pairs[split], table, raw.labels, names[:2]))
    for name, parts in (
        ("queries", queries),
        ("pairs", pairs),
        ("filters", filters),
    ):
        write_table(pa.concat_tables(parts), out / f"{name}.{kind}")
    write_table(raw.labels.rename_columns(["id", "text", "content"]), out / f"labels.{kind}")


def _beir(raw: RawData, out: Path) -> None:
    names = ("query-id", "corpus-id", "score")
    corpus = [
        {"_id": row["uid"], "title": row["title"], "text": row["content"]}
        for row in raw.labels.to_pylist()
    ]
    write_objects(out / "corpus.jsonl", corpus)
    (out / "qrels").mkdir(exist_ok=True)
    items = []
    for split, table in raw.queries.items():
        items += [
            {"_id": row["uid"], "title": row["title"], "text": row["content"]}
            for row in table.to_pylist()
        ]
        write_table(
            _pair_table(raw.relevance[split], table, raw.labels, names),
            out / "qrels" / f"{QRELS[split]}.tsv",
        )
    write_objects(out / "queries.jsonl", items)


def _xmc_json(raw: RawData, out: Path) -> None:
    write_objects(out / "lbl.json.gz", raw.labels.to_pylist())
    for split, table in raw.queries.items():
        rows = zip(table.to_pylist(), raw.relevance[split], strict=True)
        items = [
            row | {"target_ind": own.indices.tolist(), "target_rel": own.data.tolist()}
            for row, own in rows
        ]
        write_objects(out / f"{SHORT[split]}.json.gz", items)


def _write_texts(path: Path, table: pa.Table) -> None:
    path.write_bytes("".join(f"{title}\n" for title in table["title"].to_pylist()).encode())


def _xmc_text(raw: RawData, out: Path) -> None:
    _write_texts(out / "Y.txt", raw.labels)
    for split, table in raw.queries.items():
        _write_texts(out / f"{SHORT[split]}_X.txt", table)
        matrix = raw.relevance[split]
        pairs = [
            [f"{i}:{v:.9g}" for i, v in zip(own.indices, own.data, strict=True)] for own in matrix
        ]
        text = "".join(" ".join(row) + "\n" for row in pairs)
        (out / f"{SHORT[split]}_X_Y.txt").write_text(f"{matrix.shape[0]} {matrix.shape[1]}\n{text}")


def _pecos(raw: RawData, out: Path) -> None:
    _write_texts(out / "output-items.txt", raw.labels)
    for split, table in raw.queries.items():
        _write_texts(out / f"X.{SHORT[split]}.txt", table)
        save_npz(out / f"Y.{SHORT[split]}.npz", raw.relevance[split])
