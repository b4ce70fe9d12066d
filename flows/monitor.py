"""The flow `unidec-monitor`: a window of live queries against what the champion was trained on.

Drift becomes a page, an MLflow run, and the event `unidec.drift`, which starts a retraining (prefect.yaml, `triggers`):
`python -m flows.monitor queries.parquet`, or a run of the deployment `unidec-monitor/monitor`.
"""

from __future__ import annotations

import argparse
import glob
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flows  # noqa: F401  sets Prefect's home and quiets it, before it is imported

# isort: split
from prefect import flow

from flows import artifacts, lifecycle, publish, steps
from unidec import pipeline
from unidec.config import load_params
from unidec.errors import DataError


@flow(
    name="unidec-monitor",
    description=__doc__,
    persist_result=False,
    on_failure=[publish.failed],
    on_crashed=[publish.failed],
)
def monitor(
    queries: str,
    column: str | None = None,
    labels_column: str | None = None,
    bundle: str | None = None,
) -> Any:
    """Compares a file of queries with the training data of the champion.

    Args:
        queries: .csv, .tsv, .jsonl (also with .gz) or .parquet; with `*` the newest file that fits.
        column: of the texts, if not `query` or `text`.
        labels_column: of the labels that were right, if known and not named `labels`: metrics are measured then.
        bundle: a folder, or models:/name/version; default: the champion.

    Returns:
        {"drifted", "findings", "queries", "page", "run_url"}.

    Raises:
        UnidecError: no such file, or there is no champion to compare with.
    """
    with lifecycle.at_work():
        params = load_params("params.yaml")
        options = {"column": column, "labels_column": labels_column, "bundle": bundle}
        result = steps.run("monitor", pipeline.monitor, params, newest(queries), **options)
        rows = [
            {"drifted": "YES" if found["drifted"] else "no", "in words": found["words"]} for found in result["findings"]
        ]
        artifacts.show_table("drift", rows, f"{result['queries']} queries; page: {Path(result['page']).resolve()}")
        lifecycle.say(in_words(result))
        if result["drifted"]:
            found = [str(finding["words"]) for finding in result["findings"] if finding["drifted"]]
            payload = {"findings": found, "page": result["page"], "queries": result["queries"]}
            publish.tell(params, "drift", "live queries have drifted", payload, found)
        return result


def newest(pattern: str) -> str:
    """The file, or of those that a pattern fits the one last written to.

    Raises:
        DataError: there is none.
    """
    if Path(pattern).exists():
        return pattern
    found = [path for path in glob.glob(pattern, recursive=True) if Path(path).is_file()]
    if not found:
        raise DataError("no such file", where=pattern, fix="export the queries that were asked lately")
    return max(found, key=lambda path: Path(path).stat().st_mtime)


def in_words(result: dict[str, Any]) -> str:
    """What a comparison found, in plain lines."""
    verdict = "drifted" if result["drifted"] else "no drift"
    if not result["judged"]:
        verdict = "too few to judge (drift.min_window)"
    found = [f"  {finding['words']}" for finding in result["findings"] if finding["drifted"]]
    return "\n".join([f"{result['queries']:,} queries: {verdict}", *found, f"report: {result['page']}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m flows.monitor`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.monitor",
        description="Compare a window of live queries with what the champion was trained on; `unidec models monitor` "
        "does the same without Prefect.",
    )
    parser.add_argument("queries", help=".csv, .tsv, .jsonl (also .gz) or .parquet; with *: the newest that fits")
    parser.add_argument("--column", help="of the texts, if not `query` or `text`")
    parser.add_argument("--labels-column", help="of the labels that were right, if known")
    parser.add_argument("--bundle", help="folder or models:/name/version (default: the champion)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = vars(parser.parse_args(arguments))
    show = lifecycle.as_json if options.pop("json") else in_words
    return lifecycle.on_command_line(lambda: monitor(**options), "stopped: run again", show)


if __name__ == "__main__":
    sys.exit(main())
