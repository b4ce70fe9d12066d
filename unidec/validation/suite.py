"""Is a stored data set fit to train on? One Great Expectations checkpoint over queries, labels and pairs.

What cannot be stored at all (an index out of range, a relevance that is not a positive number, a pair given twice, text
that is not UTF-8, row counts that differ) stops at ingest with `file:line`; here the stored data is checked once more,
and what is legal but may be a fault is judged by section `validation` of the parameters. `critical` fails the gate,
`warning` is reported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from unidec.data.dataset import XMCDataset
from unidec.data.raw import SPLITS
from unidec.data.storage import swap_folder, write_json
from unidec.evaluation.page import render
from unidec.sections import Validation
from unidec.validation.checkpoint import raised, run_checkpoint

_SMALL = 1_000_000  # pairs of data that is read again within seconds
FLOAT32_MAX = float(np.finfo(np.float32).max)


Find = Callable[[list[str], list[str]], tuple[dict[str, str], dict[str, str]]]
"""uids of queries, uids of labels -> `file:line` by uid, of both."""


@dataclass(frozen=True)
class Check:
    """What may be a fault in some rows: values of a column outside of minimum and maximum.

    Attributes:
        key: in section `validation`: the share of rows that is allowed; `<key>_severity`: what a larger one means.
        noted: share above which an allowed one is a warning.
    """

    key: str
    table: str
    column: str
    minimum: float | None
    maximum: float | None
    what: str
    noted: float = 0.0


CHECKS = (
    Check("empty_texts", "queries", "text_length", 1, None, "empty texts"),
    Check("test_texts_in_train", "queries", "text_in_train", 0, 0,
          "test queries whose text is also a training query's (leak)"),
    Check("queries_without_positives", "queries", "num_positives", 1, None, "queries without positives"),
    Check("empty_texts", "labels", "text_length", 1, None, "empty texts"),
    Check("labels_without_training_points", "labels", "num_train_points", 1, None, "labels without training points",
          noted=0.1),
    Check("label_texts_given_twice", "labels", "labels_with_this_text", 1, 1, "labels whose text another label has",
          noted=0.01),
    Check("filtered_positives", "pairs", "filtered", 0, 0, "positives that are also filter pairs", noted=0.01),
)  # fmt: skip


def validate_dataset(
    dataset_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    docs: bool = True,
    limits: Validation | None = None,
    find: Find | None = None,
) -> dict[str, Any]:
    """Check a stored data set and write the verdict.

    Args:
        out_path: folder for result.json (the verdict; the same bytes for the same data), index.html (the same, to be
            read) and docs/ (Great Expectations' Data Docs, which hold run times; not without `docs`).
        find: finds rows in the raw files; None: they are named by their place in the data set. Called only for faults,
            and for warnings where the data is small: it may read all the files again.

    Returns:
        {"success" (no critical expectation failed), "name", "dataset_sha256", "rows", "failed", "warnings",
        "expectations"}. An expectation has at most 20 samples {"row", "uid", "value"} (pairs: query and label instead
        of row), with "at" (`file:line`) where it was found, which result.json leaves out.

    Raises:
        ArtifactError: the data set is missing or damaged. A failed check raises nothing: the caller decides.
    """
    dataset = XMCDataset.open(dataset_path)
    tables = {"queries": _query_frame(dataset), "labels": _label_frame(dataset), "pairs": _pair_frame(dataset)}
    with swap_folder(out_path) as out:
        suites = partial(_expectations, dataset, limits or Validation())
        raw = run_checkpoint("dataset", tables, suites, out / "docs" if docs else None)
        results = [_result(table, item, dataset, tables[table]) for table, item in raw]
        rows = {name: len(frame) for name, frame in tables.items()}
        facts = {"name": dataset.name, "dataset_sha256": dataset.sha256, "rows": rows}
        write_json(out / "result.json", _verdict(facts, results))
        if find is not None:
            _add_places(results, find, len(tables["pairs"]))
        verdict = _verdict(facts, results)
        (out / "index.html").write_text(render("validation", verdict=verdict, docs=docs), encoding="utf-8")
    return verdict


def _verdict(facts: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    failing = [result for result in results if not result["success"]]
    return {
        "success": not any(result["severity"] == "critical" for result in failing),
        **facts,
        "failed": [_sentence(result) for result in failing if result["severity"] == "critical"],
        "warnings": [_sentence(result) for result in failing if result["severity"] != "critical"],
        "expectations": results,
    }


def _add_places(results: list[dict[str, Any]], find: Find, num_pairs: int) -> None:
    """`file:line` of the samples, where the raw files still have them."""
    shown = [r for r in results if r["severity"] == "critical" or num_pairs < _SMALL]
    samples = [[one for r in shown if (r["table"] == "labels") == of_labels for one in r["samples"] if one["uid"]]
               for of_labels in (False, True)]  # fmt: skip
    if any(samples):
        found = find(*([one["uid"] for one in some] for some in samples))
        for some, places in zip(samples, found, strict=True):
            for one in some:
                if one["uid"] in places:
                    one["at"] = places[one["uid"]]


def _query_frame(dataset: XMCDataset) -> pd.DataFrame:
    length_N, text_N = _text_facts(dataset.queries)
    split_N = np.asarray(dataset.split_N)
    in_train_N = np.isin(text_N, text_N[split_N == SPLITS.index("train")])
    tested_N = (split_N == SPLITS.index("test")) & (length_N > 0)  # empty texts are counted by text_length
    return pd.DataFrame({
        "uid": dataset.queries["uid"].to_pandas(),
        "split": np.asarray(SPLITS, dtype=object)[np.minimum(split_N, len(SPLITS) - 1)],
        "text_length": length_N,
        "num_positives": np.diff(dataset.relevance.indptr),
        "text_in_train": np.where(tested_N, in_train_N.astype(np.float64), np.nan),
    })  # fmt: skip


def _label_frame(dataset: XMCDataset) -> pd.DataFrame:
    length_L, text_L = _text_facts(dataset.labels)
    _, first_L, count_L = np.unique(text_L, return_inverse=True, return_counts=True)
    return pd.DataFrame({
        "uid": dataset.labels["uid"].to_pandas(),
        "text_length": length_L,
        "num_train_points": np.bincount(dataset.relevance[dataset.rows("train")].indices, minlength=dataset.num_labels),
        "labels_with_this_text": np.where(length_L > 0, count_L[first_L], 1),
    })  # fmt: skip


def _pair_frame(dataset: XMCDataset) -> pd.DataFrame:
    filters, matrix = dataset.filter_pairs, dataset.relevance
    rows_of = [np.repeat(np.arange(dataset.num_queries), np.diff(m.indptr)) for m in (matrix, filters)]
    query_P, label_P = rows_of[0], np.asarray(matrix.indices, dtype=np.int64)
    filtered_P = np.isin(query_P * dataset.num_labels + label_P, rows_of[1] * dataset.num_labels + filters.indices)
    relevance_P = np.asarray(matrix.data, dtype=np.float64)
    facts = {"query": query_P, "label": label_P, "relevance": relevance_P, "filtered": filtered_P.astype(np.int64)}
    return pd.DataFrame(facts)


def _text_facts(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Characters of title and content without outer white space, and a 64-bit hash of both: a batch at a time."""
    lengths, hashes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.uint64)]
    for batch in table.to_batches():
        parts = [pc.utf8_trim_whitespace(batch.column(name)) for name in ("title", "content")]
        lengths.append(pc.add(pc.utf8_length(parts[0]), pc.utf8_length(parts[1])).to_numpy(zero_copy_only=False))
        joined = pc.binary_join_element_wise(*parts, pa.scalar("\n", pa.large_string()))
        texts = joined.to_numpy(zero_copy_only=False)
        hashes.append(pd.util.hash_array(texts, categorize=False))
    return np.concatenate(lengths).astype(np.int64), np.concatenate(hashes)


def _expectations(dataset: XMCDataset, limits: Validation) -> dict[str, list[Any]]:
    import great_expectations.expectations as gxe

    def rule(kind: str, what: str, severity: str = "critical", **bounds: Any) -> Any:
        return getattr(gxe, f"Expect{kind}")(description=what, severity=severity, **bounds)

    def graded(check: Check) -> list[Any]:
        """At the parameters' bound; where a larger share is an error, a second expectation warns below it."""
        severity, bound = getattr(limits, f"{check.key}_severity"), getattr(limits, check.key)
        levels = {"error": [(bound, "critical")], "warn": [(bound, "warning")], "off": []}[severity]
        if severity == "error" and check.noted < bound:
            levels.append((check.noted, "warning"))
        return [
            rule("ColumnValuesToBeBetween", f"{check.what}: {_at_most(share)}", level, column=check.column,
                 min_value=check.minimum, max_value=check.maximum, mostly=1 - share,
                 meta={"key": f"validation.{check.key}"})
            for share, level in levels
        ]  # fmt: skip

    def uids() -> list[Any]:
        return [
            rule("ColumnValueLengthsToBeBetween", "every uid is there", column="uid", min_value=1),
            rule("ColumnValuesToBeUnique", "every uid is there once", column="uid"),
        ]

    splits = [
        rule("ColumnValuesToBeInSet", "every query is in a known split", column="split", value_set=list(SPLITS)),
        *(rule("ColumnDistinctValuesToContainSet", f"there are {split} queries", severity, column="split",
               value_set=[split])
          for split, severity in (("train", "critical"), ("validation", "warning"), ("test", "warning"))),
    ]  # fmt: skip
    pairs = [
        rule("ColumnValuesToBeBetween", "query rows are in range", column="query", min_value=0,
             max_value=dataset.num_queries - 1),
        rule("ColumnValuesToBeBetween", "label indices are in range", column="label", min_value=0,
             max_value=dataset.num_labels - 1),
        rule("ColumnValuesToNotBeNull", "no relevance is NaN", column="relevance"),
        rule("ColumnValuesToBeBetween", "relevance is positive and finite", column="relevance", min_value=0,
             strict_min=True, max_value=FLOAT32_MAX),
        rule("CompoundColumnsToBeUnique", "every pair is there once", column_list=["query", "label"]),
    ]  # fmt: skip
    own = {"queries": [*uids(), *splits], "labels": uids(), "pairs": pairs}
    return {
        table: [
            rule("TableRowCountToBeBetween", f"there are {table}", min_value=1),
            *rules,
            *(one for check in CHECKS if check.table == table for one in graded(check)),
        ]
        for table, rules in own.items()
    }


def _at_most(share: float) -> str:
    return f"at most {share:.3g} of all" if 0 < share < 0.001 else f"at most {share:.1%}" if share else "none"


def _result(table: str, item: Any, dataset: XMCDataset, frame: pd.DataFrame) -> dict[str, Any]:
    config, found = item.expectation_config, item.result
    kwargs = {key: value for key, value in config.kwargs.items() if key not in ("batch_id", "result_format")}
    rows = found.get("partial_unexpected_index_list") or []
    return {
        "table": table,
        "type": config.type,
        "description": config.description or config.type,
        "key": (config.meta or {}).get("key"),
        "kwargs": kwargs,
        "severity": str(getattr(config.severity, "value", config.severity)),
        "success": bool(item.success),
        "unexpected_count": int(found.get("unexpected_count") or 0),
        "element_count": int(found.get("element_count") or 0) - int(found.get("missing_count") or 0),
        "observed": raised(item) or found.get("observed_value"),
        "samples": [] if item.success else _samples(table, kwargs.get("column"), rows, dataset, frame),
    }


def _samples(
    table: str, column: str | None, rows: list[int], dataset: XMCDataset, frame: pd.DataFrame
) -> list[dict[str, Any]]:
    """Great Expectations names rows; uids are what a person needs."""
    samples = []
    for row, record in zip(rows, frame.iloc[rows].to_dict("records"), strict=True):
        place = {"query": record["query"], "label": record["label"]} if table == "pairs" else {"row": int(row)}
        uid = record["uid"] if table != "pairs" else dataset.query_uids([record["query"]])[0]
        samples.append({**place, "uid": uid, "value": record.get(column) if column else None})
    return samples


def _sentence(result: dict[str, Any]) -> str:
    text = f"{result['table']}: {result['description']}"
    if result["unexpected_count"]:
        text += f"; found {result['unexpected_count']:,} of {result['element_count']:,}"
    elif result["observed"] is not None:
        text += f"; found {result['observed']}"
    if result["samples"]:
        text += f"; for example {', '.join(map(_place, result['samples'][:3]))}"
    return text + (f"; bound: {result['key']}" if result["key"] else "")


def _place(sample: dict[str, Any]) -> str:
    place = f"row {sample['row']} ({sample['uid']})" if "row" in sample else ""
    place = place or f"query {sample['query']}, label {sample['label']}"
    return f"{sample['at']}, {place}" if "at" in sample else place
