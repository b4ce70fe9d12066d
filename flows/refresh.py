"""The flow `unidec-refresh`: the champion with the labels of today; nothing is trained.

Minutes instead of hours, between two retrainings: `python -m flows.refresh`, or a run of the deployment
`unidec-refresh/refresh`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import flows  # noqa: F401  sets Prefect's home and quiets it, before it is imported

# isort: split
from prefect import flow

from flows import artifacts, decide, lifecycle, publish, source, steps, summary
from unidec import pipeline
from unidec.config import Params, load_params

DATA_STEPS = ("ingest", "validate", "propensity")  # what a refresh reads, and the gate


@flow(
    name="unidec-refresh",
    description=__doc__,
    persist_result=False,
    on_failure=[publish.failed],
    on_crashed=[publish.failed],
)
def refresh(promote: bool | None = None) -> Any:
    """Fetches data, changes the champion's label set to that of the data, registers, judges and promotes the result.

    Args:
        promote: whether a refreshed champion that passes the gate takes its place. Empty: as `retrain.promote` sets.

    Returns:
        {"added", "removed", "kept", "version", "gate", "promoted", "refused", or "skipped": why}.

    Raises:
        UnidecError: there is no champion, or the data is not fit.
    """
    with lifecycle.at_work():
        params = load_params("params.yaml")
        return lifecycle.alone(lambda: _refresh(params, promote))


def _refresh(params: Params, promote: bool | None) -> dict[str, Any]:
    source.prepare_data(params, DATA_STEPS)
    done = steps.run("refresh labels", pipeline.refresh_labels, params)
    if not done["changed"]:
        artifacts.show_text("skipped", [f"Nothing was changed: {done['reason']}."], "why nothing was changed")
        publish.emit(params.tracking.model_name, "skipped", {"reason": done["reason"]})
        return {**done, "skipped": done["reason"]}
    lifecycle.say(done["reason"])
    registered = steps.run("register", pipeline.register, params, done["bundle"], retry=True)
    done |= {"model": params.tracking.model_name, "version": registered["version"], "run_url": registered.get("run")}
    done |= decide.decide(params, done["version"], promote)
    artifacts.show_result(done["run_url"], done["version"], params.tracking.model_name)
    return done | decide.share(params, done["version"], done)


def in_words(done: dict[str, Any]) -> str:
    """What came of a refresh, in plain lines for a terminal."""
    if "skipped" in done:
        return f"labels: no change, {done['skipped']}"
    return f"labels: {done['reason']}\n{summary.outcome(done)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m flows.refresh`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.refresh", description="The champion with the labels of today; nothing is trained."
    )
    parser.add_argument("--no-promote", action="store_true", help="the champion stays, whatever the gate decides")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(arguments)

    def run() -> Any:
        load_params("params.yaml")  # mistakes show before Prefect starts
        return refresh(promote=False if options.no_promote else None)

    show = lifecycle.as_json if options.json else in_words
    return lifecycle.on_command_line(run, "stopped: nothing was changed; run again", show)


if __name__ == "__main__":
    sys.exit(main())
