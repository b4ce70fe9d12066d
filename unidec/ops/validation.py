"""Is a stored data set fit to train on? One Great Expectations checkpoint over queries, labels and pairs.

What cannot be stored at all (an index out of range, a relevance that is not a positive number, a pair given twice, text
that is not UTF-8, row counts that differ) stops at ingest with `file:line`; here the stored data is checked once more,
and what may be legal but may be a fault is judged by thresholds. `critical` fails the gate, `warning` is reported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from unidec.data.dataset import XMCDataset
from unidec.data.raw import SPLITS
from unidec.data.storage import swap_folder, write_json
from unidec.ops.checkpoint import MAX_SAMPLES, raised, run_checkpoint
from unidec.ops.validation_page import render_page

FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Thresholds:
    """Shares from 0 to 1. Above `max_...` the gate fails, above `warn_...` it warns."""

    max_empty_texts: float = 0.001
    warn_empty_texts: float = 0.0
    max_test_texts_in_train: float = 0.01
    warn_test_texts_in_train: float = 0.0
    max_queries_without_positives: float = 0.5
    warn_queries_without_positives: float = 0.0
    max_labels_without_training_points: float = 0.5
    warn_labels_without_training_points: float = 0.1
    max_label_texts_given_twice: float = 0.2
    warn_label_texts_given_twice: float = 0.01
    warn_filtered_positives: float = 0.01


def validate_dataset(
    dataset_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    docs: bool = True,
    thresholds: Thresholds | None = None,
) -> dict[str, Any]:
    """Check a stored data set and write the verdict.

    Args:
        dataset_path: a folder written by `write_dataset`.
        out_path: folder for result.json (the verdict; the same bytes for the same data), index.html (the same, to be
            read) and docs/ (Great Expectations' Data Docs, which hold run times).
        docs: also build Data Docs.

    Returns:
        {"success", "name", "dataset_sha256", "rows", "failed", "warnings", "expectations"}; an expectation is {"table",
        "type", "description", "kwargs", "severity", "success", "unexpected_count", "element_count", "observed",
        "samples"} with at most 20 samples {"row", "uid", "value"} (pairs: query and label instead of row). `success` is
        false if a critical one failed.

    Raises:
        ArtifactError: the data set is missing or damaged. A failed check raises nothing: the caller decides.
    """
    dataset = XMCDataset.open(dataset_path)
    tables = {"queries": _query_frame(dataset), "labels": _label_frame(dataset), "pairs": _pair_frame(dataset)}
    with swap_folder(out_path) as out:
        limits = thresholds or Thresholds()
        raw = run_checkpoint("dataset", tables, lambda: _expectations(dataset, limits), out / "docs" if docs else None)
        results = [_result(table, item, dataset, tables[table]) for table, item in raw]
        failing = [r for r in results if not r["success"]]
        verdict = {
            "success": not any(r["severity"] == "critical" for r in failing),
            "name": dataset.name,
            "dataset_sha256": dataset.sha256,
            "rows": {name: len(frame) for name, frame in tables.items()},
            "failed": [_sentence(r) for r in failing if r["severity"] == "critical"],
            "warnings": [_sentence(r) for r in failing if r["severity"] != "critical"],
            "expectations": results,
        }
        write_json(out / "result.json", verdict)
        (out / "index.html").write_text(render_page(verdict, docs=docs), encoding="utf-8")
    return verdict


def _query_frame(dataset: XMCDataset) -> pd.DataFrame:
    length_N, text_N = _text_facts(dataset.queries)
    split_N = np.asarray(dataset.split_N)
    test_N = split_N == SPLITS.index("test")
    in_train_N = np.isin(text_N, text_N[split_N == SPLITS.index("train")])
    return pd.DataFrame(
        {
            "row": np.arange(dataset.num_queries),
            "uid": dataset.queries["uid"].to_pandas(),
            "split": np.asarray(SPLITS, dtype=object)[np.minimum(split_N, len(SPLITS) - 1)],
            "text_length": length_N,
            "num_positives": np.diff(dataset.relevance.indptr),
            # of test queries only; empty texts are counted by text_length
            "text_in_train": np.where(test_N & (length_N > 0), in_train_N.astype(np.float64), np.nan),
        }
    )


def _label_frame(dataset: XMCDataset) -> pd.DataFrame:
    length_L, text_L = _text_facts(dataset.labels)
    _, first_L, count_L = np.unique(text_L, return_inverse=True, return_counts=True)
    train_N = np.asarray(dataset.split_N) == SPLITS.index("train")
    in_train_P = np.repeat(train_N, np.diff(dataset.relevance.indptr))
    points_L = np.bincount(dataset.relevance.indices[in_train_P], minlength=dataset.num_labels)
    return pd.DataFrame(
        {
            "row": np.arange(dataset.num_labels),
            "uid": dataset.labels["uid"].to_pandas(),
            "text_length": length_L,
            "num_train_points": points_L,
            "labels_with_this_text": np.where(length_L > 0, count_L[first_L], 1),
        }
    )


def _pair_frame(dataset: XMCDataset) -> pd.DataFrame:
    query_P = np.repeat(np.arange(dataset.num_queries), np.diff(dataset.relevance.indptr))
    label_P = np.asarray(dataset.relevance.indices, dtype=np.int64)
    filter_query = np.repeat(np.arange(dataset.num_queries), np.diff(dataset.filter_pairs.indptr))
    filter_key = filter_query * dataset.num_labels + np.asarray(dataset.filter_pairs.indices, dtype=np.int64)
    return pd.DataFrame(
        {
            "query": query_P,
            "label": label_P,
            "relevance": np.asarray(dataset.relevance.data, dtype=np.float64),
            "filtered": np.isin(query_P * dataset.num_labels + label_P, filter_key).astype(np.int64),
        }
    )


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


def _expectations(dataset: XMCDataset, limits: Thresholds) -> dict[str, list[Any]]:
    import great_expectations.expectations as gxe

    leak = (limits.max_test_texts_in_train, limits.warn_test_texts_in_train)
    bare = (limits.max_queries_without_positives, limits.warn_queries_without_positives)
    cold = (limits.max_labels_without_training_points, limits.warn_labels_without_training_points)
    twins = (limits.max_label_texts_given_twice, limits.warn_label_texts_given_twice)
    needed = (("train", "critical"), ("validation", "warning"), ("test", "warning"))
    return {
        "queries": [
            *_text_expectations("queries", limits),
            gxe.ExpectColumnValuesToBeInSet(
                column="split",
                value_set=list(SPLITS),
                severity="critical",
                description="every query is in a known split",
            ),
            *(
                gxe.ExpectColumnDistinctValuesToContainSet(
                    column="split", value_set=[split], severity=severity, description=f"there are {split} queries"
                )
                for split, severity in needed
            ),
            *_graded("text_in_train", 0, 0, "test queries whose text is also a training query's (leak)", *leak),
            *_graded("num_positives", 1, None, "queries without positives", *bare),
        ],
        "labels": [
            *_text_expectations("labels", limits),
            *_graded("num_train_points", 1, None, "labels without training points", *cold),
            *_graded("labels_with_this_text", 1, 1, "labels whose text another label has", *twins),
        ],
        "pairs": _pair_expectations(dataset, limits),
    }


def _text_expectations(what: str, limits: Thresholds) -> list[Any]:
    import great_expectations.expectations as gxe

    return [
        gxe.ExpectTableRowCountToBeBetween(min_value=1, severity="critical", description=f"there are {what}"),
        gxe.ExpectColumnValueLengthsToBeBetween(
            column="uid", min_value=1, severity="critical", description="every uid is there"
        ),
        gxe.ExpectColumnValuesToBeUnique(column="uid", severity="critical", description="every uid is there once"),
        *_graded("text_length", 1, None, "empty texts", limits.max_empty_texts, limits.warn_empty_texts),
    ]


def _pair_expectations(dataset: XMCDataset, limits: Thresholds) -> list[Any]:
    import great_expectations.expectations as gxe

    filtered = f"positives that are also filter pairs: {_at_most(limits.warn_filtered_positives)}"
    return [
        gxe.ExpectTableRowCountToBeBetween(min_value=1, severity="critical", description="there are pairs"),
        _between("query", 0, dataset.num_queries - 1, "query rows are in range", "critical"),
        _between("label", 0, dataset.num_labels - 1, "label indices are in range", "critical"),
        gxe.ExpectColumnValuesToNotBeNull(column="relevance", severity="critical", description="no relevance is NaN"),
        gxe.ExpectColumnValuesToBeBetween(
            column="relevance",
            min_value=0,
            strict_min=True,
            max_value=FLOAT32_MAX,
            severity="critical",
            description="relevance is positive and finite",
        ),
        gxe.ExpectCompoundColumnsToBeUnique(
            column_list=["query", "label"], severity="critical", description="every pair is there once"
        ),
        _between("filtered", 0, 0, filtered, "warning", limits.warn_filtered_positives),
    ]


def _between(column: str, minimum: float, maximum: float | None, what: str, severity: str, share: float = 0.0) -> Any:
    """All values in range but for a share of them."""
    import great_expectations.expectations as gxe

    return gxe.ExpectColumnValuesToBeBetween(
        column=column, min_value=minimum, max_value=maximum, mostly=1 - share, severity=severity, description=what
    )


def _graded(column: str, minimum: float, maximum: float | None, what: str, limit: float, warn: float) -> list[Any]:
    """The same expectation twice: the gate's limit, and the warning's."""
    return [
        _between(column, minimum, maximum, f"{what}: {_at_most(share)}", severity, share)
        for share, severity in ((limit, "critical"), (warn, "warning"))
    ]


def _at_most(share: float) -> str:
    return f"at most {share:.3g} of all" if 0 < share < 0.001 else f"at most {share:.1%}" if share else "none"


def _result(table: str, item: Any, dataset: XMCDataset, frame: pd.DataFrame) -> dict[str, Any]:
    config, found = item.expectation_config, item.result
    kwargs = {key: value for key, value in config.kwargs.items() if key not in ("batch_id", "result_format")}
    return {
        "table": table,
        "type": config.type,
        "description": config.description or config.type,
        "kwargs": kwargs,
        "severity": str(getattr(config.severity, "value", config.severity)),
        "success": bool(item.success),
        "unexpected_count": int(found.get("unexpected_count") or 0),
        "element_count": int(found.get("element_count") or 0) - int(found.get("missing_count") or 0),
        "observed": raised(item) or found.get("observed_value"),
        "samples": [] if item.success else _samples(table, config.type, kwargs, dataset, frame),
    }


def _samples(
    table: str, kind: str, kwargs: dict[str, Any], dataset: XMCDataset, frame: pd.DataFrame
) -> list[dict[str, Any]]:
    """The first unexpected rows: Great Expectations names values; rows and uids are what a person needs."""
    column = kwargs.get("column")
    if kind == "expect_compound_columns_to_be_unique":
        unexpected = frame.duplicated(kwargs["column_list"], keep=False)
    elif column is None or "distinct" in kind:
        return []
    elif kind == "expect_column_values_to_be_unique":
        unexpected = frame[column].duplicated(keep=False)
    elif kind == "expect_column_values_to_be_in_set":
        unexpected = ~frame[column].isin(kwargs["value_set"])
    elif kind == "expect_column_values_to_not_be_null":
        unexpected = frame[column].isna()
    else:
        values = frame[column].str.len() if "lengths" in kind else frame[column]
        low, high = kwargs.get("min_value"), kwargs.get("max_value")
        unexpected = pd.Series(False, index=frame.index)
        if low is not None:
            unexpected |= (values <= low) if kwargs.get("strict_min") else (values < low)
        if high is not None:
            unexpected |= values > high
    rows = np.flatnonzero(unexpected.to_numpy())[:MAX_SAMPLES]
    samples = []
    for record in frame.iloc[rows].to_dict("records"):
        value = record.get(column) if column else None
        if table == "pairs":
            inside = 0 <= record["query"] < dataset.num_queries
            uid = dataset.query_uids([record["query"]])[0] if inside else None
            samples.append({"query": record["query"], "label": record["label"], "uid": uid, "value": value})
        else:
            samples.append({"row": record["row"], "uid": record["uid"], "value": value})
    return samples


def _sentence(result: dict[str, Any]) -> str:
    text = f"{result['table']}: {result['description']}"
    if result["unexpected_count"]:
        text += f"; found {result['unexpected_count']:,} of {result['element_count']:,}"
    elif result["observed"] is not None:
        text += f"; found {result['observed']}"
    if result["samples"]:
        places = [
            f"row {s['row']} ({s['uid']})" if "row" in s else f"query {s['query']}, label {s['label']}"
            for s in result["samples"]
        ]
        text += f"; for example {', '.join(places[:3])}"
    return text
