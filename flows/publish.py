"""Publish the results of a retraining: tables and events in Prefect, a git commit. A failure here
fails no run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.runtime import flow_run as current_flow_run

from flows import server
from unidec import pipeline
from unidec.addresses import without_credentials
from unidec.cli.commands import values_of
from unidec.config import Params
from unidec.errors import UnidecError
from unidec.text_page import render_text
from unidec.tracking.provenance import LOCK_COMMIT_TAG
from unidec.tracking.repository import ask
from unidec.tracking.store import open_client

MOST_ROWS = 60  # of a task's table
RECORDED = ("dvc.lock", "data/start.json", "outputs/metrics.json", "outputs/plots")
PAGES = (
    "report.html",
    "bundle",
    "gate.html",
    "../data/validation/index.html",
    "../data/change/index.html",
)
_NOT_IN_KEY = re.compile(r"( of)?( version| round)? \d.*|[^a-z]+")
log = logging.getLogger("unidec.flows")
_git = functools.partial(ask, ".")


@contextlib.contextmanager
def harmless(what: str) -> Iterator[None]:
    """Log an error in the block, or in the decorated function, as a warning."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s", what, error)


def _prefect_records() -> bool:
    """Whether this is a flow run whose server answers: calls of a lost one are retried for half a
    minute.
    """
    return FlowRunContext.get() is not None and not server.lost.is_set()


@harmless("a task's result could not be shown in Prefect")
def show_task(name: str, result: Any) -> None:
    """Show a task's result as a table in Prefect; the key has no round or version, so that Prefect
    shows a history.
    """
    shown = pipeline.plain(result)
    if shown is None or not _prefect_records():
        return
    facts = shown if isinstance(shown, dict) else {"result": shown}
    rows = []
    for what, value in values_of(facts).items():
        rows.append({"what": what, "value": without_credentials(value)[:1000]})
    key = _NOT_IN_KEY.sub("-", name.lower()).strip("-")
    create_table_artifact(rows[:MOST_ROWS], key=key, description=name)


@harmless("the run's result could not be shown in Prefect")
def show_result(done: Mapping[str, Any]) -> None:
    """Show every check of the gate, the version, and links to the MLflow run and to
    existing pages.
    """
    if not _prefect_records():
        return
    text = render_text("retrained.md", done=done, pages=[Path("outputs", page) for page in PAGES])
    create_markdown_artifact(without_credentials(text), key="result")


def commit(params: Params, version: Any, verdict: str, extra: Sequence[str] = ()) -> dict[str, str]:
    """Commit the files that a retraining records, and no others, not even staged ones; with
    `retrain.commit: tag`, tag the commit. If nothing changed, no commit is made.

    Args:
        verdict: for the commit message. extra: further files, such as the source's .dvc file.

    Returns:
        {"commit": hash} and, with `retrain.commit: tag`, {"tag": name}.

    Raises:
        UnidecError: no branch is checked out, or git failed (it refuses while a merge is under
            way).
    """
    name = params.tracking.model_name
    if not _git("branch", "--show-current"):
        raise UnidecError(
            "no branch is checked out: the commit would be lost",
            where="git",
            fix="git switch <branch>",
        )
    paths = [path for path in (*RECORDED, *extra) if Path(path).exists()]
    _git("add", "--intent-to-add", "--", *paths)
    message = f"Retrain: version {version} of {name}, {verdict}"
    if _git("status", "--porcelain", "--", *paths):
        # without hooks, which check code
        how = ("--quiet", "--no-verify", f"--message={message}", "--only")
        _git("commit", *how, "--", *paths)
    done = {"commit": _git("rev-parse", "HEAD")}
    with harmless("the commit could not be recorded with the version"):
        open_client().set_model_version_tag(name, str(version), LOCK_COMMIT_TAG, done["commit"])
    if params.retrain.commit == "tag":
        done["tag"] = f"{name}-v{version}".replace(" ", "-")
        if not _git("tag", "--list", done["tag"]):
            _git("tag", "--annotate", done["tag"], f"--message={message}")
    return done


@harmless("an event could not be sent to Prefect")
def emit(model_name: str, event: str, payload: Mapping[str, Any]) -> None:
    """Send the event `unidec.<event>` (skipped, refused, promoted or drift) about
    `unidec.model.<name>`, for automations; only inside a flow run.
    """
    if not current_flow_run.id:
        return
    emit_event(
        event=f"unidec.{event}",
        resource={
            "prefect.resource.id": f"unidec.model.{model_name}",
            "prefect.resource.name": model_name,
        },
        payload=dict(payload),
    )
