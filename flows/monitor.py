"""Compare a window of live queries with the champion's training data; `unidec models monitor` does
so without Prefect.

Writes a page and an MLflow run; drift emits the event `unidec.drift`, which starts a retraining
(prefect.yaml, `triggers`). Run `python -m flows.monitor queries.parquet`, or the deployment
`unidec-monitor/monitor`."""

from __future__ import annotations

if __name__ == "__main__":
    from flows.command import main

    raise SystemExit(main("monitor"))

import glob
import os
from typing import Any

from prefect import flow

from flows import lifecycle, publish
from unidec import pipeline
from unidec.config import load_params
from unidec.errors import DataError
from unidec.text_page import render_text


@flow(name="unidec-monitor", description=__doc__, persist_result=False)
def monitor(queries: str, column: str | None = None, bundle: str | None = None) -> Any:
    """Compares a file of queries with the training data of the champion.

    Args:
        queries: .csv, .tsv, .jsonl (also with .gz) or .parquet; with `*` the newest matching file.
            If a column `labels` holds the relevant labels, metrics are measured.
        column: column of the texts; default: `query` or `text`.
        bundle: a folder, or models:/name/version; default: the champion.

    Returns:
        {"drifted", "findings", "queries", "page", "run_url"}.

    Raises:
        UnidecError: no such file, or there is no champion to compare with.
    """
    with lifecycle.at_work():
        params = load_params("params.yaml")
        drift = lifecycle.run(
            "monitor", pipeline.monitor, params, newest(queries), column=column, bundle=bundle
        )
        result = pipeline.plain(drift)
        lifecycle.say(in_words(result))
        if result["drifted"]:
            found = [str(finding["words"]) for finding in result["findings"] if finding["drifted"]]
            payload = {"findings": found, "page": result["page"], "queries": result["queries"]}
            publish.emit(params.tracking.model_name, "drift", payload)
        return lifecycle.finished(result)


def newest(pattern: str) -> str:
    """The most recently written file that matches a pattern; a DataError if there is none."""
    paths = [pattern, *glob.glob(pattern, recursive=True)]
    found = [path for path in paths if os.path.isfile(path)]
    if not found:
        raise DataError("no such file", where=pattern, fix="export recent queries to it")
    return max(found, key=os.path.getmtime)


def in_words(result: dict[str, Any]) -> str:
    """The findings, as lines of text."""
    return render_text("monitored.txt", **result)
