"""Checks whether a stored data set is fit for training: one Great Expectations checkpoint over
queries, labels, pairs.

Invalid data (an index out of range, a relevance that is not a positive number, a duplicate pair,
text that is not UTF-8, differing row counts) is rejected at ingest with `file:line`, and opening a
data set checks its indices. Here uids and pairs are checked again, as other software may have
written them. Valid but suspicious data is compared with the limits in section `validation` of the
parameters. A failed `critical` expectation fails the validation; a failed `warning` is only
reported."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from unidec.config import Validation
from unidec.data.dataset import XMCDataset
from unidec.data.profile import spaced
from unidec.data.storage import swap_folder, write_json
from unidec.evaluation.drift import Check as DriftCheck
from unidec.evaluation.figures import Chart, bar_chart
from unidec.evaluation.page import render
from unidec.validation.frames import (
    TITLES,
    Reading,
    label_frame,
    pair_frame,
    query_frame,
    text_counts,
)

CHANGE_TABLE = "data_change"
MAX_SAMPLES = 20
MEAN = "expect_column_mean_to_be_between"
MULTILINGUAL = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
SHOWN_CHARS = 200  # length to which the text of a sample is cut
CHARACTER_TEXTS = 20_000  # number of evenly spaced texts whose characters are counted
_EXTERNAL = re.compile(r"<(script|style|footer)\b.*?</\1>|<(link|img)\b[^>]*>", re.DOTALL)
Find = Callable[[list[str], list[str]], tuple[dict[str, str], dict[str, str]]]
"""Maps (uids of queries, uids of labels) to two dicts {uid: `file:line`}, of the queries and of the
labels.
"""


@dataclass(frozen=True)
class Check:
    """A check for suspicious rows: those whose value in a column is below `minimum` or above
    `maximum`.

    Attributes:
        key: key in section `validation` with the allowed share of such rows; `<key>_severity` is
            the severity of a larger share.
        what: description of such rows.
        warned_share: with severity "error", a share above this one is already a warning.
        mean: the column itself holds shares, and their mean is compared.
    """

    key: str
    table: str
    column: str
    minimum: float | None
    maximum: float | None
    what: str
    warned_share: float = 0.0
    mean: bool = False


CHECKS = (
    Check("empty_texts", "queries", "text_length", 1, None, "empty texts"),
    Check(
        "test_texts_in_train",
        "queries",
        "text_in_train",
        0,
        0,
        "test queries with the text of a training query (leak)",
    ),
    Check(
        "queries_without_positives",
        "queries",
        "num_positives",
        1,
        None,
        "queries without positives",
    ),
    Check("empty_texts", "labels", "text_length", 1, None, "empty texts"),
    Check(
        "labels_without_training_points",
        "labels",
        "num_train_queries",
        1,
        None,
        "labels without training queries",
        warned_share=0.1,
    ),
    Check(
        "label_texts_given_twice",
        "labels",
        "labels_with_this_text",
        1,
        1,
        "labels with the text of another label",
        warned_share=0.01,
    ),
    Check(
        "label_texts_given_twice",
        "labels",
        "labels_with_these_tokens",
        0,
        0,
        "labels with another text, but the same tokens, as another label",
        warned_share=0.01,
    ),
    Check(
        "unknown_tokens",
        "queries",
        "unknown_tokens",
        None,
        None,
        "tokens of a query that the tokenizer does not know",
        warned_share=0.01,
        mean=True,
    ),
    Check(
        "unknown_tokens",
        "labels",
        "unknown_tokens",
        None,
        None,
        "tokens of a label that the tokenizer does not know",
        warned_share=0.01,
        mean=True,
    ),
    Check(
        "filtered_positives",
        "pairs",
        "filtered",
        0,
        0,
        "positives that are also filter pairs",
        warned_share=0.01,
    ),
)


def validate_dataset(
    dataset_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    docs: bool = True,
    limits: Validation | None = None,
    find: Find | None = None,
    change: Mapping[str, Any] | None = None,
    reading: Reading = TITLES,
) -> dict[str, Any]:
    """Check a stored data set and write the verdict.

    Args:
        out_path: folder for result.json (the verdict; the same bytes for the same data), index.html
            (the verdict as a page) and, with `docs`, docs/ (Great Expectations' Data Docs, which
            contain run times).
        docs: also write Data Docs.
        limits: section `validation` of the parameters; None: the defaults.
        find: locates rows in the raw files; None: samples have only their row in the data set.
            Called only for critical failures, because it reads all raw files again.
        change: change since the champion's data, for index.html; see
        `pipeline.drift_check.champion_change`.
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
        checks = [check for check in CHECKS if check.column in tables[check.table]]
        suites = partial(_expectations, limits or Validation(), checks, advice(labels, reading))
        checked = run_checkpoint("dataset", tables, suites, out / "docs" if docs else None)
        results = [_result(table, item, dataset, tables[table]) for table, item in checked]
        rows = {name: len(frame) for name, frame in tables.items()}
        if find is not None:
            _add_places(results, find)
        facts = {
            "name": dataset.name,
            "dataset_sha256": dataset.sha256,
            "text": reading.text,
            "rows": rows,
        }
        verdict = _verdict(facts, results)
        write_json(out / "result.json", verdict)
        shown = {
            "texts": _texts(results, dataset, reading),
            "charts": distributions(dataset, tables, reading),
            "facts": text_counts(dataset, reading, queries, labels),
            "change": change,
        }
        (out / "index.html").write_text(
            render("validation", verdict=verdict, docs=docs, **shown), encoding="utf-8"
        )
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


def _add_places(results: list[dict[str, Any]], find: Find) -> None:
    """Add `file:line` to the samples of critical failures that are found in the raw files."""
    queries: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    for result in results:
        if result["severity"] == "critical":
            samples = labels if result["table"] == "labels" else queries
            samples += [sample for sample in result["samples"] if sample["uid"]]
    if queries or labels:
        places = find([sample["uid"] for sample in queries], [sample["uid"] for sample in labels])
        for samples, place_by_uid in zip((queries, labels), places, strict=True):
            for sample in samples:
                if sample["uid"] in place_by_uid:
                    sample["at"] = place_by_uid[sample["uid"]]


def distributions(
    dataset: XMCDataset, tables: dict[str, pd.DataFrame], reading: Reading = TITLES
) -> list[Chart | None]:
    """Charts in percent: text lengths, labels per query, queries per label, characters
    by script.
    """
    queries = tables["queries"]
    labels = tables["labels"]
    rows = {"queries": np.arange(len(queries)), "labels": np.arange(len(labels))}
    texts = {"queries": dataset.query_texts, "labels": dataset.label_texts}
    scripts = {
        which: _scripts("".join(texts[which](spaced(rows[which], CHARACTER_TEXTS), reading.text)))
        for which in texts
    }
    names = sorted(
        {name for share in scripts.values() for name in share},
        key=lambda n: -scripts["queries"].get(n, 0),
    )
    columns = [
        (which, [share.get(name, 0.0) for name in names]) for which, share in scripts.items()
    ]
    lengths = {"queries": queries["text_length"], "labels": labels["text_length"]}
    return [
        _histogram("Text length", lengths, "characters per text"),
        _histogram("Labels per query", {"queries": queries["num_positives"]}, "labels per query"),
        _histogram(
            "Label frequency", {"labels": labels["num_train_queries"]}, "training queries per label"
        ),
        bar_chart(
            "Characters by script",
            names,
            columns,
            "percent of the characters",
            x_label="white space not counted",
        ),
    ]


def _histogram(caption: str, columns: dict[str, pd.Series], unit: str) -> Chart | None:
    """Histogram in percent over bins of doubling width (0, 1, 2 to 3, 4 to 7, ...), named by their
    lower bound.
    """
    bins = {
        name: np.frexp(values.to_numpy(dtype=np.float64))[1] for name, values in columns.items()
    }
    num_bins = max((int(bin_N.max()) for bin_N in bins.values() if len(bin_N)), default=0) + 1
    names = ["0", *(f"{2**b:,}" for b in range(num_bins - 1))]
    shares = [
        (name, (100 * np.bincount(bin_N, minlength=num_bins) / max(len(bin_N), 1)).tolist())
        for name, bin_N in bins.items()
    ]
    return bar_chart(
        caption, names, shares, "percent", x_label=f"{unit}; a bar covers its number up to the next"
    )


def _scripts(text: str) -> dict[str, float]:
    """Percent of the characters, without white space, by script (the first word of the Unicode
    name: Latin, Cyrillic,
    ...), with "digits" and "other signs"; the 8 most frequent.
    """
    found: Counter[str] = Counter()
    for character, count in Counter(text).items():
        kind = unicodedata.category(character)[0]
        script = (
            unicodedata.name(character, "other").split()[0].capitalize()
            if kind == "L"
            else "other signs"
        )
        found["digits" if kind == "N" else script] += 0 if character.isspace() else count
    return {
        name: 100 * count / max(found.total(), 1) for name, count in found.most_common(8) if count
    }


def _texts(
    results: list[dict[str, Any]], dataset: XMCDataset, reading: Reading
) -> dict[tuple[str, Any, Any], str]:
    """Texts of the samples by (table, row, label); of a pair, row is the query and the text "query
    → label".
    """
    found = {}
    for table, sample in (
        (result["table"], sample) for result in results for sample in result["samples"]
    ):
        row = sample.get("row", sample.get("query"))
        label = sample.get("label")
        texts_of = dataset.label_texts if table == "labels" else dataset.query_texts
        parts = texts_of([row], reading.text)
        parts = parts + (dataset.label_texts([label], reading.text) if label is not None else [])
        found[table, row, label] = " → ".join(part[:SHOWN_CHARS] for part in parts)
    return found


def advice(labels: pd.DataFrame, reading: Reading) -> dict[str, str]:
    """What to do about each column of tokens, by the column's name."""
    if reading.tokenizer is None:
        return {}
    unknown = (
        f"the tokenizer of encoder.name: {reading.encoder} does not fit these texts; use an "
        "encoder of their language, "
        f"or a multilingual one such as {MULTILINGUAL}; with encoder.kind: bag, only its "
        "tokenizer is used"
    )
    equal = labels[labels["labels_with_these_tokens"] > 0]
    causes = {
        unknown: int((equal["unknown_tokens"] > 0).sum()),
        f"raise tokens.max_length above {reading.max_length}: these texts are cut": int(
            equal["cut"].sum()
        ),
    }
    cause, count = max(causes.items(), key=lambda item: item[1])
    if not count:
        cause = (
            "the tokenizer ignores what these texts differ in, such as case or accents: reword "
            "them, or use another"
        )
    return {"unknown_tokens": unknown, "labels_with_these_tokens": cause}


def _expectations(
    limits: Validation, checks: Sequence[Check], fixes: Mapping[str, str]
) -> dict[str, list[Any]]:
    import great_expectations.expectations as gxe

    def rule(kind: str, what: str, severity: str = "critical", **bounds: Any) -> Any:
        return getattr(gxe, f"Expect{kind}")(description=what, severity=severity, **bounds)

    def graded(check: Check) -> list[Any]:
        """An expectation for the allowed share; with severity "error" also one that warns about a
        lower share.
        """
        severity = getattr(limits, f"{check.key}_severity")
        bound = getattr(limits, check.key)
        levels = {"error": [(bound, "critical")], "warn": [(bound, "warning")], "off": []}[severity]
        if severity == "error" and check.warned_share < bound:
            levels.append((check.warned_share, "warning"))
        meta = {"key": f"validation.{check.key}", "fix": fixes.get(check.column, "")}
        return [limited(check, share, level, meta) for share, level in levels]

    def limited(check: Check, share: float, level: str, meta: dict[str, str]) -> Any:
        options = {"column": check.column, "meta": meta}
        if check.mean:
            what = f"{check.what}: {_at_most(share)} on average"
            return rule("ColumnMeanToBeBetween", what, level, max_value=share, **options)
        what = f"{check.what}: {_at_most(share)}"
        bounds = {"min_value": check.minimum, "max_value": check.maximum, "mostly": 1 - share}
        return rule("ColumnValuesToBeBetween", what, level, **bounds, **options)

    def uids() -> list[Any]:
        return [
            rule("ColumnValueLengthsToBeBetween", "no uid is empty", column="uid", min_value=1),
            rule("ColumnValuesToBeUnique", "no uid occurs twice", column="uid"),
        ]

    splits = [
        rule(
            "ColumnDistinctValuesToContainSet",
            f"the {split} split has queries",
            severity,
            column="split",
            value_set=[split],
        )
        for split, severity in (
            ("train", "critical"),
            ("validation", "warning"),
            ("test", "warning"),
        )
    ]
    pairs = [
        rule("ColumnValuesToNotBeNull", "no relevance is NaN", column="relevance"),
        rule(
            "ColumnValuesToBeBetween",
            "relevance is positive and finite",
            column="relevance",
            min_value=0,
            strict_min=True,
            max_value=float(np.finfo(np.float32).max),
        ),
        rule("CompoundColumnsToBeUnique", "no pair occurs twice", column_list=["query", "label"]),
    ]
    rules_by_table = {"queries": [*uids(), *splits], "labels": uids(), "pairs": pairs}
    return {
        table: [
            rule("TableRowCountToBeBetween", f"the table of {table} is not empty", min_value=1),
            *rules,
            *(one for check in checks if check.table == table for one in graded(check)),
        ]
        for table, rules in rules_by_table.items()
    }


def _at_most(share: float) -> str:
    return (
        f"at most {share:.3g} of all"
        if 0 < share < 0.001
        else f"at most {share:.1%}"
        if share
        else "none allowed"
    )


def _result(table: str, item: Any, dataset: XMCDataset, frame: pd.DataFrame) -> dict[str, Any]:
    config = item.expectation_config
    found = item.result
    kwargs = {
        key: value
        for key, value in config.kwargs.items()
        if key not in ("batch_id", "result_format")
    }
    rows = found.get("partial_unexpected_index_list") or []
    if config.type == MEAN:  # Great Expectations names no rows: the worst ones
        worst = frame[kwargs["column"]].nlargest(MAX_SAMPLES)
        rows = worst[worst > 0].index.tolist()
    return {
        "table": table,
        "type": config.type,
        "description": config.description or config.type,
        "key": (config.meta or {}).get("key"),
        "fix": (config.meta or {}).get("fix") or "",
        "kwargs": kwargs,
        "severity": str(getattr(config.severity, "value", config.severity)),
        "success": bool(item.success),
        "unexpected_count": int(found.get("unexpected_count") or 0),
        "element_count": int(found.get("element_count") or 0)
        - int(found.get("missing_count") or 0),
        "observed": found.get("observed_value"),
        "samples": []
        if item.success
        else _samples(table, kwargs.get("column"), rows, dataset, frame),
    }


def _samples(
    table: str, column: str | None, rows: list[int], dataset: XMCDataset, frame: pd.DataFrame
) -> list[dict[str, Any]]:
    """Samples of failing rows with their uids, because Great Expectations returns only
    row numbers.
    """
    samples = []
    for row, record in zip(rows, frame.iloc[rows].to_dict("records"), strict=True):
        place = (
            {"query": record["query"], "label": record["label"]}
            if table == "pairs"
            else {"row": int(row)}
        )
        uid = record["uid"] if table != "pairs" else dataset.query_uids([record["query"]])[0]
        samples.append({**place, "uid": uid, "value": record.get(column) if column else None})
    return samples


def _sentence(result: dict[str, Any]) -> str:
    text = f"{result['table']}: {result['description']}"
    if result["unexpected_count"]:
        text += f"; found {result['unexpected_count']:,} of {result['element_count']:,}"
    elif result["type"] == MEAN and result["observed"] is not None:
        text += f"; found {result['observed']:.1%}"
    elif result["observed"] is not None:
        text += f"; found {result['observed']}"
    if result["samples"]:
        text += f"; for example {', '.join(map(_place, result['samples'][:3]))}"
    text += f"; {result['fix']}" if result["fix"] else ""
    return text + (f"; bound: {result['key']}" if result["key"] else "")


def _place(sample: dict[str, Any]) -> str:
    place = f"row {sample['row']} ({sample['uid']})" if "row" in sample else ""
    place = place or f"query {sample['query']}, label {sample['label']}"
    return f"{sample['at']}, {place}" if "at" in sample else place


def run_checkpoint(
    name: str,
    tables: dict[str, pd.DataFrame],
    suites: Callable[[], dict[str, list[Any]]],
    docs: Path | None,
) -> list[tuple[str, Any]]:
    """Run all suites as one checkpoint.

    Args:
        suites: returns each table's expectations. It is called when Great Expectations can be
            imported without warnings.
        docs: folder for Data Docs; None: no Data Docs.

    Returns:
        (table, Great Expectations' result) of each expectation, in the order of the suites.
    """
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # Great Expectations imports modules that Python deprecates
        import great_expectations as gx
        from great_expectations.checkpoint import UpdateDataDocsAction
        from great_expectations.data_context.types.base import ProgressBarsConfig

        expectations = suites()
        context: Any = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = ProgressBarsConfig(globally=False)
        actions = []
        definitions = []
        if docs is not None:
            store = {
                "class_name": "TupleFilesystemStoreBackend",
                "base_directory": str(docs.resolve()),
            }
            index = {"class_name": "DefaultSiteIndexBuilder"}
            site = {
                "class_name": "SiteBuilder",
                "site_index_builder": index,
                "store_backend": store,
                "show_how_to_buttons": False,
            }
            context.add_data_docs_site("local", site)
            actions.append(UpdateDataDocsAction(name="docs", site_names=["local"]))
        source = context.data_sources.add_pandas(name)
        for table, frame in tables.items():
            # a checkpoint passes the same batch parameters to all definitions, so each frame is
            # read from its own file
            path = Path(folder, f"{table}.parquet")
            frame.to_parquet(path, index=False)
            batch = source.add_parquet_asset(table, path=path).add_batch_definition("all")
            suite = context.suites.add(
                gx.ExpectationSuite(name=table, expectations=expectations[table])
            )
            definition = gx.ValidationDefinition(name=table, data=batch, suite=suite)
            definitions.append(context.validation_definitions.add(definition))
        shown = {"result_format": "SUMMARY", "partial_unexpected_count": MAX_SAMPLES}
        checkpoint = gx.Checkpoint(
            name=name, validation_definitions=definitions, actions=actions, result_format=shown
        )
        run = context.checkpoints.add(checkpoint).run()
    by_table = {result.suite_name: result for result in run.run_results.values()}
    if docs is not None:
        _without_network(docs, {table: bool(result.success) for table, result in by_table.items()})
    return [(table, item) for table in tables for item in by_table[table].results]


def _without_network(docs: Path, passed: Mapping[str, bool]) -> None:
    """Replace the Data Docs pages by ones that load nothing: those of Great Expectations load
    scripts and styles from other hosts, and its index needs a script. Its 4 MB of fonts and
    pictures are removed.
    """
    shutil.rmtree(docs / "static", ignore_errors=True)
    index = docs / "index.html"
    pages = []
    index.unlink()
    for path in sorted(docs.rglob("*.html")):
        body = path.read_text(encoding="utf-8").partition("<body>")[2].partition("</body>")[0]
        kind, table = path.relative_to(docs).with_suffix("").parts[:2]
        name = f"{kind} of {table}"
        state = passed[table] if kind == "validations" else None
        path.write_text(
            render("docs", title=f"Data Docs: {name}", body=_EXTERNAL.sub("", body)),
            encoding="utf-8",
        )
        pages.append((name, path.relative_to(docs).as_posix(), state))
    index.write_text(
        render("docs", title="Data Docs", body="", pages=pages[::-1]), encoding="utf-8"
    )


def run_change_suite(
    checks: Sequence[DriftCheck], docs: Path | None = None
) -> list[dict[str, Any]]:
    """Run every drift check as one or two expectations over the new data's figures (one row, a
    column per check), with bounds from the data that the champion was trained on.

    Args:
        docs: folder for Data Docs; None: no Data Docs.

    Returns:
        for each expectation {"key", "severity" ("critical" stops, "warning" warns), "success",
        "minimum", "maximum", "observed"}.
    """
    frame = pd.DataFrame({check.key: [float(check.new)] for check in checks})
    found = run_checkpoint(
        CHANGE_TABLE,
        {CHANGE_TABLE: frame},
        lambda: {CHANGE_TABLE: _drift_expectations(checks)},
        docs,
    )
    results = []
    for _, item in found:
        config = item.expectation_config
        key = config.kwargs["column"]
        kwargs = config.kwargs
        results.append(
            {
                "key": key,
                "severity": str(getattr(config.severity, "value", config.severity)),
                "success": bool(item.success),
                "minimum": kwargs.get("min_value"),
                "maximum": kwargs.get("max_value"),
                "observed": float(frame[key].iloc[0]),
            }
        )
    return results


def _drift_expectations(checks: Sequence[DriftCheck]) -> list[Any]:
    import great_expectations.expectations as gxe

    # Great Expectations treats NaN as missing, and missing values pass every bound
    not_nan = [
        gxe.ExpectColumnValuesToNotBeNull(
            column=check.key, severity="critical", description=f"{check.name}: not NaN"
        )
        for check in checks
        if math.isnan(check.new)
    ]
    return not_nan + [
        gxe.ExpectColumnValuesToBeBetween(
            column=check.key,
            min_value=bounds[0],
            max_value=bounds[1],
            severity=severity,
            description=f"{check.name}: {check.within(bounds)}",
        )
        for check in checks
        for bounds, severity in ((check.stop, "critical"), (check.warn, "warning"))
        if bounds != (None, None)
    ]
