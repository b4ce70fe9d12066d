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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unidec.config import Validation, packaged
from unidec.data.database import Database, database, one_row
from unidec.data.dataset import XMCDataset
from unidec.data.raw import SPLITS
from unidec.data.storage import swap_folder, write_json
from unidec.evaluation.page import render
from unidec.validation.checkpoint_run import Expectation, run_checkpoint
from unidec.validation.distributions import distributions
from unidec.validation.facts import (
    TITLES,
    Reading,
    collect_facts,
    space_needed,
    text_counts,
)

MAX_SAMPLES = 20
MULTILINGUAL = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
SHOWN_CHARS = 200  # length to which the text of a sample is cut
TABLES = ("queries", "labels", "pairs")
Places = dict[str, str]
"""`file:line` by uid."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check of a table.

    Attributes:
        table: "queries", "labels" or "pairs".
        column: the column that is checked, whose value samples show.
        what: description of the rows that are sought.
        bad: SQL expression: 1 for these rows, 0 for others; or a share, whose mean is compared.
        key: key in section `validation` with the allowed share of such rows, and its severity; "":
        none are allowed, and severity is critical.
        mean: `bad` is a share.
        warned_share: with severity "error", a share above this one is already a warning.
    """

    table: str
    column: str
    what: str
    bad: str
    key: str = ""
    mean: bool = False
    warned_share: float = 0.0


CHECKS = [Check(**check) for check in packaged("validation/checks.yaml")]
OF_TOKENS = ("unknown_tokens", "labels_with_these_tokens")  # columns that need a tokenizer


def validate_dataset(
    dataset_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    docs: bool = True,
    limits: Validation | None = None,
    find: Callable[[list[str], list[str]], tuple[Places, Places]] | None = None,
    reading: Reading = TITLES,
) -> dict[str, Any]:
    """Check a stored data set and write the verdict.

    Facts are counted in a database on disk (`unidec.validation.facts`); Great Expectations judges
    the counts.

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
    num_bytes = space_needed(dataset)
    with swap_folder(out_path, num_bytes=num_bytes) as out:
        with database(out) as tables:
            collect_facts(tables, dataset, reading, Path(f"{out_path}-tokens"))
            results = list(_count(tables, dataset, limits or Validation(), reading))
            charts = distributions(tables)
            facts = text_counts(tables, reading)
        passed = run_checkpoint("dataset", results, out / "docs" if docs else None)
        failed: list[Expectation] = []
        warned: list[Expectation] = []
        for result, success in zip(results, passed, strict=True):
            result.success = success
            if success:
                result.samples = []
            else:
                (failed if result.severity == "critical" else warned).append(result)
        if find is not None:
            _add_places(failed, find)
        num_rows = (dataset.num_queries, dataset.num_labels, dataset.relevance.nnz)
        verdict = {
            "success": not failed,
            "name": dataset.name,
            "dataset_sha256": dataset.sha256,
            "text": reading.text,
            "rows": dict(zip(TABLES, num_rows, strict=True)),
            "failed": list(map(_sentence, failed)),
            "warnings": list(map(_sentence, warned)),
            "expectations": list(map(asdict, results)),
        }
        write_json(out / "result.json", verdict)
        page = render(
            "validation",
            verdict=verdict,
            docs=docs,
            texts=_texts(results, dataset, reading),
            charts=charts,
            facts=facts,
        )
        (out / "index.html").write_text(page, encoding="utf-8")
    return verdict


def _add_places(
    failed: list[Expectation],
    find: Callable[[list[str], list[str]], tuple[Places, Places]],
) -> None:
    """Add `file:line` to the samples that are found in the raw files."""
    queries: dict[str, list[dict[str, Any]]] = {}
    labels: dict[str, list[dict[str, Any]]] = {}
    for result in failed:
        by_uid = labels if result.table == "labels" else queries
        for sample in result.samples:
            by_uid.setdefault(sample["uid"], []).append(sample)
    if not queries and not labels:
        return
    places = find(list(queries), list(labels))
    for by_uid, place_by_uid in zip((queries, labels), places, strict=True):
        for uid, place in place_by_uid.items():
            for sample in by_uid[uid]:
                sample["at"] = place


def _texts(
    results: list[Expectation], dataset: XMCDataset, reading: Reading
) -> dict[tuple[str, Any, Any], str]:
    """Texts of the samples by (table, row, label); of a pair, row is the query and the text "query
    → label".
    """
    found = {}
    for result in results:
        table = result.table
        texts_of = dataset.label_texts if table == "labels" else dataset.query_texts
        for sample in result.samples:
            row: Any = sample.get("row", sample.get("query"))
            label = sample.get("label")
            parts = texts_of([row], reading.text)
            if label is not None:
                parts += dataset.label_texts([label], reading.text)
            found[table, row, label] = " → ".join(part[:SHOWN_CHARS] for part in parts)
    return found


def advice(tables: Database, reading: Reading) -> dict[str, str]:
    """What to do about each column of tokens, by the column's name."""
    if reading.tokenizer is None:
        return {}
    unknown = (
        f"the tokenizer of encoder.name: {reading.encoder} does not fit these texts; use an "
        f"encoder of their language, or a multilingual one such as {MULTILINGUAL}; with "
        "encoder.kind: bag, only its tokenizer is used"
    )
    num_unknown, num_cut = one_row(
        tables,
        "SELECT count(*) FILTER (unknown_tokens > 0), count(*) FILTER (is_cut) FROM labels "
        "WHERE labels_with_these_tokens > 0",
    )
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


def _count(
    tables: Database, dataset: XMCDataset, limits: Validation, reading: Reading
) -> Iterator[Expectation]:
    """What the checks count, table by table."""
    fixes = advice(tables, reading)
    for table in TABLES:
        yield _rows(tables, table, f"the table of {table} is not empty", "critical")
        if table == "queries":
            for number, split in enumerate(SPLITS):
                severity = "warning" if number else "critical"
                what = f"the {split} split has queries"
                yield _rows(tables, f"{table} WHERE split = {number}", what, severity)
        for check in CHECKS:
            if check.table != table or (check.column in OF_TOKENS and reading.tokenizer is None):
                continue
            yield from _graded(tables, dataset, check, limits, fixes.get(check.column, ""))


def _rows(tables: Database, source: str, description: str, severity: str) -> Expectation:
    """Expects at least one row."""
    return Expectation(
        table=source.partition(" ")[0],
        description=description,
        minimum=1,
        severity=severity,
        observed=one_row(tables, f"SELECT count(*) FROM {source}")[0],
    )


def _graded(
    tables: Database, dataset: XMCDataset, check: Check, limits: Validation, fix: str
) -> Iterator[Expectation]:
    """The check with its allowed share; with severity "error" also with the lower share that is a
    warning.
    """
    levels = [(0.0, "critical")]
    if check.key:
        limit, severity = limits.limit(check.key)
        if severity == "off":
            return
        levels = [(limit, "critical" if severity == "error" else "warning")]
        if severity == "error" and check.warned_share < limit:
            levels.append((check.warned_share, "warning"))
    table = check.table
    column = check.column
    order = "query, label" if table == "pairs" else "row"
    facts = f"(SELECT *, ({check.bad})::DOUBLE AS bad FROM {table} WHERE {column} IS NOT NULL)"
    counts = f"SELECT coalesce(avg(bad), 0), count(*) FILTER (bad > 0), count(*) FROM {facts}"
    value, count, of = one_row(tables, counts)
    select = f"SELECT * FROM {facts} WHERE bad > 0 ORDER BY bad DESC, {order} LIMIT {MAX_SAMPLES}"
    rows = tables.sql(select).to_arrow_table().to_pylist() if count else []
    for share, level in levels:
        yield Expectation(
            table=table,
            column=column,
            description=f"{check.what}: {_at_most(share)}{' on average' * check.mean}",
            key=f"validation.{check.key}" if check.key else None,
            fix=fix,
            maximum=share,
            severity=level,
            unexpected_count=0 if check.mean else count,
            element_count=0 if check.mean else of,
            observed=value,
            samples=[_sample(row, column, dataset) for row in rows],
        )


def _at_most(share: float) -> str:
    if not share:
        return "none allowed"
    if share < 0.001:
        return f"at most {share:.3g} of all"
    return f"at most {share:.1%}"


def _sample(record: dict[str, Any], column: str, dataset: XMCDataset) -> dict[str, Any]:
    """A bad row with its uid."""
    value = record[column]
    if "uid" in record:
        return {"row": record["row"], "uid": record["uid"], "value": value}
    query = record["query"]
    uid = dataset.query_uids([query])[0]
    return {"query": query, "label": record["label"], "uid": uid, "value": value}


def _sentence(result: Expectation) -> str:
    found = "found none"
    if count := result.unexpected_count:
        found = f"found {count:,} of {result.element_count:,}"
    elif result.column:
        found = f"found {result.observed:.1%}"
    parts = [f"{result.table}: {result.description}", found]
    if result.samples:
        places = map(_place, result.samples[:3])
        parts.append(f"for example {', '.join(places)}")
    if result.fix:
        parts.append(result.fix)
    if result.key:
        parts.append(f"bound: {result.key}")
    return "; ".join(parts)


def _place(sample: dict[str, Any]) -> str:
    place = "query {query}, label {label}"
    if "row" in sample:
        place = "row {row} ({uid})"
    if "at" in sample:
        place = f"{{at}}, {place}"
    return place.format(**sample)
