"""What a person sees of a run in Prefect: progress, figures, links. Showing it never stops a run."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.context import FlowRunContext

log = logging.getLogger("unidec.flows")

_STARTS_PAGES = (
    "make ui",
    "mlflow server --backend-store-uri sqlite:///mlflow/mlflow.db",
)  # the latter without a Makefile

_RESULT_PAGES = {
    "report": "outputs/report.html",
    "metrics": "outputs/metrics.json",
    "bundle": "outputs/bundle",
    "gate": "outputs/gate.html",
}
_DATA_PAGES = {
    "data validation": "data/validation/index.html",
    "Data Docs": "data/validation/docs/index.html",
    "data change": "data/change/index.html",
    "Data Docs of the change": "data/change/docs/index.html",
}


def _harmless(function: Callable[..., Any]) -> Callable[..., Any]:
    """Does nothing outside a flow run; a failure is a warning."""

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        if FlowRunContext.get() is None:
            return None
        try:
            return function(*args, **options)
        except Exception as error:
            log.warning("the run's page in Prefect lacks something: %s", error)
            return None

    return wrapper


@_harmless
def begin_progress(epoch: int, epochs: int) -> UUID:
    """A bar of the epochs done."""
    return create_progress_artifact(100 * epoch / epochs, key="epochs", description=f"{epoch} of {epochs} epochs")


@_harmless
def show_progress(artifact: UUID | None, epoch: int, epochs: int) -> None:
    """Moves the bar."""
    if artifact is not None:
        update_progress_artifact(artifact, 100 * epoch / epochs, description=f"{epoch} of {epochs} epochs")


@_harmless
def show_round(number: int, figures: Mapping[str, Any]) -> None:
    """One round's figures on the validation split."""
    rows = _rows(figures)
    if rows:
        create_table_artifact(rows, key="validation", description=f"validation split after round {number}")


_OF_REFRESH = {
    "clusters": {
        "encode_queries_seconds": "seconds to encode the queries",
        "cluster_seconds": "seconds to cluster them",
        "clusters": "clusters",
        "cluster_cosine": "cosine within clusters",
    },
    "hard-negatives": {
        "encode_labels_seconds": "seconds to encode the labels",
        "mine_seconds": "seconds to mine",
        "mine_positive_found": "queries with a positive in their shortlist, share",
        "mine_positive_rank": "rank of the first positive, mean",
        "mine_negative_score": "score of the negatives (hardness), mean",
    },
}


@_harmless
def show_refresh(part: str, number: int, report: Mapping[str, Any]) -> None:
    """One half of a round's refresh, "clusters" or "hard-negatives": how long it took and how good it is."""
    rows = [
        {"figure": words, "value": round(report[key], 4)} for key, words in _OF_REFRESH[part].items() if key in report
    ]
    if rows:
        create_table_artifact(rows, key=part, description=f"{part.replace('-', ' ')} of round {number}")


@_harmless
def show_metrics(figures: Mapping[str, Any]) -> None:
    """The test split's figures."""
    rows = _rows(figures)
    if rows:
        create_table_artifact(rows, key="metrics", description="held-out queries, percent")


@_harmless
def show_links(run_url: str | None, version: Any = None, model_name: str | None = None) -> None:
    """Where everything of this run lies."""
    lines = ["| what | where |", "|---|---|"]
    no_page = f"no server shows it now: `{_STARTS_PAGES[not Path('Makefile').is_file()]}` starts one"
    lines.append(f"| MLflow run | {f'[{run_url}]({run_url})' if run_url else no_page} |")
    if version is not None:
        lines.append(f"| registered model | `models:/{model_name}/{version}` |")
    lines += _paths({**_RESULT_PAGES, **_DATA_PAGES})
    create_markdown_artifact("\n".join(lines), key="links", description="results of this run")


@_harmless
def show_data_pages() -> None:
    """Where to read why data is not trained on."""
    lines = ["| what | where |", "|---|---|", *_paths(_DATA_PAGES)]
    create_markdown_artifact("\n".join(lines), key="links", description="what is wrong with the data")


def _paths(pages: Mapping[str, str]) -> list[str]:
    """Rows for those that are there."""
    return [f"| {name} | `{Path(path).resolve()}` |" for name, path in pages.items() if Path(path).exists()]


@_harmless
def show_skip(reason: str) -> None:
    """Why nothing was trained."""
    create_markdown_artifact(f"Training was skipped: {reason}.", key="skipped", description="why nothing was trained")


@_harmless
def show_change(change: Mapping[str, Any]) -> None:
    """How the data moved from what the champion was trained on."""
    accepted = change.get("accepted")
    if not accepted:
        lines = [f"Nothing was compared: {change.get('reason') or 'there is no champion'}."]
    else:
        lines = [f"Compared with the data of version {accepted['version']} of {accepted['model']}.", ""]
        lines += [f"- **{line}**" for line in change["stops"]] + [f"- {line}" for line in change["warnings"]]
        if not change["stops"] and not change["warnings"]:
            lines.append("Nothing moved beyond its limits.")
        lines += ["", f"Page: `{Path(change['page']).resolve()}`"]
    create_markdown_artifact("\n".join(lines), key="data-change", description="data against the champion's")


@_harmless
def show_gate(verdict: Mapping[str, Any]) -> None:
    """Every check of the gate, passed or failed."""
    rows = [
        {
            "check": reason["check"],
            "passed": "yes" if reason["passed"] else "NO",
            "got": _short(reason.get("got")),
            "limit": _short(reason.get("limit")),
            "in words": reason["words"],
        }
        for reason in verdict["reasons"]
    ]
    against = f"against champion {verdict['champion']}" if verdict.get("champion") else "there is no champion"
    words = f"version {verdict['challenger']} {'passed' if verdict['passed'] else 'is REFUSED'}; {against}"
    create_table_artifact(rows, key="gate", description=words)


@_harmless
def show_findings(result: Mapping[str, Any]) -> None:
    """What a window of live queries shows."""
    rows = [
        {"figure": finding["name"], "drifted": "YES" if finding["drifted"] else "no", "in words": finding["words"]}
        for finding in result["findings"]
    ]
    words = f"{result['queries']} queries; page: {Path(result['page']).resolve()}"
    create_table_artifact(rows, key="drift", description=words)


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _rows(figures: Mapping[str, Any], prefix: str = "") -> list[dict[str, Any]]:
    """Nested figures as rows of one table."""
    rows: list[dict[str, Any]] = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            rows += _rows(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            rows.append({"metric": f"{prefix}{name}", "value": round(value, 3)})
    return rows
