"""What a person sees of a run in Prefect: tables of figures, and where pages are. Showing it never stops a run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.context import FlowRunContext

log = logging.getLogger("unidec.flows")

DATA_PAGES = {
    "data validation": "data/validation/index.html",
    "Data Docs": "data/validation/docs/index.html",
    "data change": "data/change/index.html",
    "Data Docs of the change": "data/change/docs/index.html",
}
PAGES = {
    "report": "outputs/report.html",
    "metrics": "outputs/metrics.json",
    "bundle": "outputs/bundle",
    "gate": "outputs/gate.html",
    **DATA_PAGES,
}
_OF_PHASE = {"cluster": "clusters", "mine": "hard-negatives", "validate": "validation"}


@contextlib.contextmanager
def harmless(what: str) -> Iterator[None]:
    """A failure inside, or of the function that this decorates, is a warning."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s", what, error)


@harmless("the run's page in Prefect lacks something")
def show_table(key: str, rows: Sequence[dict[str, Any]], description: str) -> None:
    """A table; none where there are no rows or no flow runs."""
    if rows and FlowRunContext.get() is not None:
        create_table_artifact(list(rows), key=key, description=description)


@harmless("the run's page in Prefect lacks something")
def show_text(key: str, lines: Sequence[str], description: str) -> None:
    """Lines of markdown."""
    if FlowRunContext.get() is not None:
        create_markdown_artifact("\n".join(lines), key=key, description=description)


def show_phase(name: str, number: int, report: Mapping[str, Any]) -> None:
    """The figures of a phase of a round: of the validation split, or how long its refresh took and how good it is."""
    if name in _OF_PHASE:
        show_table(_OF_PHASE[name], rows_of(report.get("validation", report)), f"{name}, round {number}")


def show_links(links: Mapping[str, str], pages: Mapping[str, str] = PAGES) -> None:
    """Where everything of this run is: links, and those pages that exist."""
    found = {name: f"`{Path(path).resolve()}`" for name, path in pages.items() if Path(path).exists()}
    rows = [f"| {name} | {where} |" for name, where in {**links, **found}.items()]
    show_text("links", ["| what | where |", "|---|---|", *rows], "results of this run")


def show_result(run_url: str | None, version: Any = None, model_name: str = "") -> None:
    """The links of a run that came to its end."""
    start = "make ui" if Path("Makefile").is_file() else "mlflow server --backend-store-uri sqlite:///mlflow/mlflow.db"
    links = {"MLflow run": f"[{run_url}]({run_url})" if run_url else f"no server shows it now: `{start}` starts one"}
    if version is not None:
        links["registered model"] = f"`models:/{model_name}/{version}`"
    show_links(links)


def show_change(change: Mapping[str, Any]) -> None:
    """How the data moved from what the champion was trained on."""
    if accepted := change.get("accepted"):
        lines = [f"Compared with the data of version {accepted['version']} of {accepted['model']}.", ""]
        moved = [f"- **{line}**" for line in change["stops"]] + [f"- {line}" for line in change["warnings"]]
        lines += [*(moved or ["Nothing moved beyond its limits."]), "", f"Page: `{Path(change['page']).resolve()}`"]
    else:
        lines = [f"Nothing was compared: {change.get('reason') or 'there is no champion'}."]
    show_text("data-change", lines, "data against the champion's")


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
    outcome = "passed" if verdict["passed"] else "is REFUSED"
    show_table("gate", rows, f"version {verdict['challenger']} {outcome}; {against}")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def rows_of(figures: Mapping[str, Any], prefix: str = "") -> list[dict[str, Any]]:
    """Nested figures as rows of one table."""
    rows: list[dict[str, Any]] = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            rows += rows_of(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            rows.append({"metric": f"{prefix}{name}", "value": round(value, 4)})
    return rows
