"""Checks whether a stored data set is fit for training: one Great Expectations checkpoint over
queries, labels, pairs.

Invalid data (an index out of range, a relevance that is not a positive number, a duplicate pair,
text that is not UTF-8, differing row counts) is rejected at ingest with `file:line`, and opening a
data set checks its indices. Here uids and pairs are checked again, as other software may have
written them. Valid but suspicious data is compared with the limits in section `validation` of the
parameters. A failed `critical` expectation fails the validation; a failed `warning` is only
reported."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from unidec.config import Validation
from unidec.data.dataset import XMCDataset
from unidec.data.storage import swap_folder, write_json
from unidec.evaluation.page import render
from unidec.validation.checkpoint_run import MAX_SAMPLES, run_checkpoint, severity_of
from unidec.validation.distributions import distributions
from unidec.validation.frames import (
    TITLES,
    Reading,
    label_frame,
    pair_frame,
    query_frame,
    text_counts,
)

MEAN = "expect_column_mean_to_be_between"
MULTILINGUAL = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
SHOWN_CHARS = 200  # length to which the text of a sample is cut
LARGEST_RELEVANCE = float(np.finfo(np.float32).max)
Places = dict[str, str]
"""`file:line` by uid."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check for suspicious rows: those whose value in a column is below `minimum` or above
    `maximum`.

    Attributes:
        key: key in section `validation` with the allowed share of such rows, and its severity.
        what: description of such rows.
        warned_share: with severity "error", a share above this one is already a warning.
        mean: the column itself holds shares, and their mean is compared.
    """

    key: str
    table: str
    column: str
    what: str
    minimum: float | None = None
    maximum: float | None = None
    warned_share: float = 0.0
    mean: bool = False


CHECKS = (
    Check(
        key="empty_texts",
        table="queries",
        column="text_length",
        what="empty texts",
        minimum=1,
    ),
    Check(
        key="test_texts_in_train",
        table="queries",
        column="text_in_train",
        what="test queries with the text of a training query (leak)",
        minimum=0,
        maximum=0,
    ),
    Check(
        key="queries_without_positives",
        table="queries",
        column="num_positives",
        what="queries without positives",
        minimum=1,
    ),
    Check(
        key="empty_texts",
        table="labels",
        column="text_length",
        what="empty texts",
        minimum=1,
    ),
    Check(
        key="labels_without_training_points",
        table="labels",
        column="num_train_queries",
        what="labels without training queries",
        minimum=1,
        warned_share=0.1,
    ),
    Check(
        key="label_texts_given_twice",
        table="labels",
        column="labels_with_this_text",
        what="labels with the text of another label",
        minimum=1,
        maximum=1,
        warned_share=0.01,
    ),
    Check(
        key="label_texts_given_twice",
        table="labels",
        column="labels_with_these_tokens",
        what="labels with another text, but the same tokens, as another label",
        minimum=0,
        maximum=0,
        warned_share=0.01,
    ),
    Check(
        key="unknown_tokens",
        table="queries",
        column="unknown_tokens",
        what="tokens of a query that the tokenizer does not know",
        warned_share=0.01,
        mean=True,
    ),
    Check(
        key="unknown_tokens",
        table="labels",
        column="unknown_tokens",
        what="tokens of a label that the tokenizer does not know",
        warned_share=0.01,
        mean=True,
    ),
    Check(
        key="filtered_positives",
        table="pairs",
        column="filtered",
        what="positives that are also filter pairs",
        minimum=0,
        maximum=0,
        warned_share=0.01,
    ),
)


def validate_dataset(
    dataset_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    docs: bool = True,
    limits: Validation | None = None,
    find: Callable[[list[str], list[str]], tuple[Places, Places]] | None = None,
    reading: Reading = TITLES,
) -> dict[str, Any]:
    """Check a stored data set and write the verdict.

    Args:
        out_path: folder for result.json (the verdict; the same bytes for the same data), index.html
            (the verdict as a page) and, with `docs`, docs/ (Great Expectations' Data Docs, which
            contain run times).
        docs: also write Data Docs.
        limits: section `validation` of the parameters; None: the defaults.
        find: maps uids of queries and uids of labels to their places in the raw files; None:
            samples have only their row in the data set. Called only for critical failures, because
            it reads all raw files again.
        reading: how the model reads the texts; empty, duplicate and leaked texts are those that it
        reads as such.

    Returns:
        {"success" (no critical expectation failed), "name", "dataset_sha256", "text"
        (`tokens.text`), "rows", "failed", "warnings", "expectations"}. An expectation has at most
        20 samples {"row", "uid", "value"} (pairs: "query" and "label" instead of "row"), with "at"
        (`file:line`) if `find` located it.

    Raises:
        ArtifactError: the data set is missing or damaged. A failed check raises no error.
    """
    dataset = XMCDataset.open(dataset_path)
    queries = query_frame(dataset, reading)
    labels = label_frame(dataset, reading)
    tables = {"queries": queries, "labels": labels, "pairs": pair_frame(dataset)}
    with swap_folder(out_path) as out:
        fixes = advice(labels, reading)
        suites = partial(_expectations, limits or Validation(), tables, fixes)
        checked = run_checkpoint("dataset", tables, suites, out / "docs" if docs else None)
        results = [_result(table, item, dataset, tables[table]) for table, item in checked]
        failing = [result for result in results if not result["success"]]
        failed = [result for result in failing if result["severity"] == "critical"]
        warned = [result for result in failing if result["severity"] != "critical"]
        if find is not None:
            _add_places(failed, find)
        verdict = {
            "success": not failed,
            "name": dataset.name,
            "dataset_sha256": dataset.sha256,
            "text": reading.text,
            "rows": {name: len(frame) for name, frame in tables.items()},
            "failed": [_sentence(result) for result in failed],
            "warnings": [_sentence(result) for result in warned],
            "expectations": results,
        }
        write_json(out / "result.json", verdict)
        page = render(
            "validation",
            verdict=verdict,
            docs=docs,
            texts=_texts(results, dataset, reading),
            charts=distributions(tables),
            facts=text_counts(dataset, reading, queries, labels),
        )
        (out / "index.html").write_text(page, encoding="utf-8")
    return verdict


def _add_places(
    failed: list[dict[str, Any]],
    find: Callable[[list[str], list[str]], tuple[Places, Places]],
) -> None:
    """Add `file:line` to the samples that are found in the raw files."""
    queries: dict[str, list[dict[str, Any]]] = {}
    labels: dict[str, list[dict[str, Any]]] = {}
    for result in failed:
        by_uid = labels if result["table"] == "labels" else queries
        for sample in result["samples"]:
            by_uid.setdefault(sample["uid"], []).append(sample)
    if not queries and not labels:
        return
    places = find(list(queries), list(labels))
    for by_uid, place_by_uid in zip((queries, labels), places, strict=True):
        for uid, place in place_by_uid.items():
            for sample in by_uid[uid]:
                sample["at"] = place


def _texts(
    results: list[dict[str, Any]], dataset: XMCDataset, reading: Reading
) -> dict[tuple[str, Any, Any], str]:
    """Texts of the samples by (table, row, label); of a pair, row is the query and the text "query
    → label".
    """
    found = {}
    for result in results:
        table = result["table"]
        texts_of = dataset.label_texts if table == "labels" else dataset.query_texts
        for sample in result["samples"]:
            row = sample.get("row", sample.get("query"))
            label = sample.get("label")
            parts = texts_of([row], reading.text)
            if label is not None:
                parts += dataset.label_texts([label], reading.text)
            found[table, row, label] = " → ".join(part[:SHOWN_CHARS] for part in parts)
    return found


def advice(labels: pd.DataFrame, reading: Reading) -> dict[str, str]:
    """What to do about each column of tokens, by the column's name."""
    if reading.tokenizer is None:
        return {}
    unknown = (
        f"the tokenizer of encoder.name: {reading.encoder} does not fit these texts; use an "
        f"encoder of their language, or a multilingual one such as {MULTILINGUAL}; with "
        "encoder.kind: bag, only its tokenizer is used"
    )
    equal = labels[labels["labels_with_these_tokens"] > 0]
    num_unknown = (equal["unknown_tokens"] > 0).sum()
    num_cut = equal["cut"].sum()
    if num_unknown == num_cut == 0:
        same = (
            "the tokenizer ignores what these texts differ in, such as case or accents: reword "
            "them, or use another"
        )
    elif num_unknown >= num_cut:
        same = unknown
    else:
        same = f"raise tokens.max_length above {reading.max_length}: these texts are cut"
    return {"unknown_tokens": unknown, "labels_with_these_tokens": same}


def _expectations(
    limits: Validation, tables: Mapping[str, pd.DataFrame], fixes: Mapping[str, str]
) -> dict[str, list[Any]]:
    """Expectations for each table."""
    import great_expectations.expectations as gxe

    def critical(kind: str, what: str, **bounds: Any) -> Any:
        return getattr(gxe, f"Expect{kind}")(description=what, severity="critical", **bounds)

    found = {}
    for table in tables:
        what = f"the table of {table} is not empty"
        found[table] = [critical("TableRowCountToBeBetween", what, min_value=1)]
    for table in ("queries", "labels"):
        found[table] += [
            critical("ColumnValueLengthsToBeBetween", "no uid is empty", column="uid", min_value=1),
            critical("ColumnValuesToBeUnique", "no uid occurs twice", column="uid"),
        ]
    for split in ("train", "validation", "test"):
        has_queries = gxe.ExpectColumnDistinctValuesToContainSet(
            column="split",
            value_set=[split],
            description=f"the {split} split has queries",
            severity="critical" if split == "train" else "warning",
        )
        found["queries"].append(has_queries)
    found["pairs"] += [
        critical("ColumnValuesToNotBeNull", "no relevance is NaN", column="relevance"),
        critical(
            "ColumnValuesToBeBetween",
            "relevance is positive and finite",
            column="relevance",
            min_value=0,
            strict_min=True,
            max_value=LARGEST_RELEVANCE,
        ),
        critical(
            "CompoundColumnsToBeUnique", "no pair occurs twice", column_list=["query", "label"]
        ),
    ]
    for check in CHECKS:
        if check.column in tables[check.table]:
            found[check.table] += _graded(check, limits, fixes.get(check.column, ""))
    return found


def _graded(check: Check, limits: Validation, fix: str) -> list[Any]:
    """An expectation for the allowed share; with severity "error" also one that warns about a lower
    share.
    """
    import great_expectations.expectations as gxe

    limit, severity = limits.limit(check.key)
    levels: list[tuple[float, str]] = []
    if severity != "off":
        levels.append((limit, "critical" if severity == "error" else "warning"))
    if severity == "error" and check.warned_share < limit:
        levels.append((check.warned_share, "warning"))
    expectations: list[Any] = []
    for share, level in levels:
        options: dict[str, Any] = {
            "column": check.column,
            "severity": level,
            "meta": {"key": f"validation.{check.key}", "fix": fix},
        }
        what = f"{check.what}: {_at_most(share)}"
        if check.mean:
            mean = gxe.ExpectColumnMeanToBeBetween(
                description=f"{what} on average", max_value=share, **options
            )
            expectations.append(mean)
        else:
            values = gxe.ExpectColumnValuesToBeBetween(
                description=what,
                min_value=check.minimum,
                max_value=check.maximum,
                mostly=1 - share,
                **options,
            )
            expectations.append(values)
    return expectations


def _at_most(share: float) -> str:
    if not share:
        return "none allowed"
    if share < 0.001:
        return f"at most {share:.3g} of all"
    return f"at most {share:.1%}"


def _result(table: str, item: Any, dataset: XMCDataset, frame: pd.DataFrame) -> dict[str, Any]:
    config = item.expectation_config
    found = item.result
    meta = config.meta or {}
    kwargs = dict(config.kwargs)
    for name in ("batch_id", "result_format"):
        kwargs.pop(name, None)
    column = kwargs.get("column")
    if item.success:
        rows = []
    elif config.type == MEAN:  # Great Expectations names no rows: the worst ones
        worst = frame[column].nlargest(MAX_SAMPLES)
        rows = worst[worst > 0].index.tolist()
    else:
        rows = found.get("partial_unexpected_index_list") or []
    num_elements = found.get("element_count") or 0
    num_missing = found.get("missing_count") or 0
    return {
        "table": table,
        "type": config.type,
        "description": config.description,
        "key": meta.get("key"),
        "fix": meta.get("fix", ""),
        "kwargs": kwargs,
        "severity": severity_of(item),
        "success": bool(item.success),
        "unexpected_count": int(found.get("unexpected_count") or 0),
        "element_count": int(num_elements - num_missing),
        "observed": found.get("observed_value"),
        "samples": [_sample(row, frame, column, dataset) for row in rows],
    }


def _sample(
    row: int, frame: pd.DataFrame, column: str | None, dataset: XMCDataset
) -> dict[str, Any]:
    """A failing row with its uid, because Great Expectations returns only row numbers."""
    record = frame.iloc[[row]].to_dict("records")[0]
    value = None if column is None else record[column]
    if "uid" in record:
        return {"row": int(row), "uid": record["uid"], "value": value}
    query = record["query"]
    uid = dataset.query_uids([query])[0]
    return {"query": query, "label": record["label"], "uid": uid, "value": value}


def _sentence(result: dict[str, Any]) -> str:
    observed = result["observed"]
    parts = [f"{result['table']}: {result['description']}"]
    count = result["unexpected_count"]
    if count:
        parts.append(f"found {count:,} of {result['element_count']:,}")
    elif result["type"] == MEAN and observed is not None:
        parts.append(f"found {observed:.1%}")
    elif observed is not None:
        parts.append(f"found {observed}")
    if result["samples"]:
        places = map(_place, result["samples"][:3])
        parts.append(f"for example {', '.join(places)}")
    if result["fix"]:
        parts.append(result["fix"])
    if result["key"]:
        parts.append(f"bound: {result['key']}")
    return "; ".join(parts)


def _place(sample: dict[str, Any]) -> str:
    if "row" in sample:
        place = f"row {sample['row']} ({sample['uid']})"
    else:
        place = f"query {sample['query']}, label {sample['label']}"
    return f"{sample['at']}, {place}" if "at" in sample else place
