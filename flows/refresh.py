"""Update the champion to the current labels, without training.

Takes minutes instead of hours, between retrainings. Run `python -m flows.refresh`, or the
deployment `unidec-refresh/refresh`."""

from __future__ import annotations

if __name__ == "__main__":
    from flows.command import main

    raise SystemExit(main("refresh"))

from typing import Any

from prefect import flow

from flows import decide, lifecycle, publish, reproduce
from unidec import pipeline
from unidec.config import Params, load_params

DATA_STEPS = ("ingest", "validate", "propensity")  # what a refresh and the gate read


@flow(name="unidec-refresh", description=__doc__, persist_result=False)
def refresh(promote: bool | None = None) -> Any:
    """Fetches data, changes the champion's label set to that of the data, registers the result,
    runs the gate and promotes it.

    Args:
        promote: promote the refreshed version if it passes the gate. If unset, `retrain.promote`
            decides.

    Returns:
        {"added", "removed", "kept", "version", "gate", "promoted", "refused", or "skipped": why}.

    Raises:
        UnidecError: there is no champion, or the data fails validation.
    """
    with lifecycle.at_work():
        params = load_params("params.yaml")
        return lifecycle.finished(lifecycle.alone(lambda: _refresh(params, promote)))


def _refresh(params: Params, promote: bool | None) -> dict[str, Any]:
    reproduce.prepare_data(params, DATA_STEPS)
    refreshed = lifecycle.run("refresh labels", pipeline.refresh_labels, params)
    done = pipeline.plain(refreshed)
    if refreshed.bundle is None:
        publish.emit(params.tracking.model_name, "skipped", {"reason": refreshed.reason})
        return {**done, "skipped": refreshed.reason}
    lifecycle.say(refreshed.reason)
    registered = lifecycle.run("register", pipeline.register, params, refreshed.bundle, retry=True)
    done |= {"model": registered.model, "version": registered.version, "run_url": registered.run}
    done |= decide.decide(params, registered.version, promote)
    return done | decide.share(params, done)


def in_words(done: dict[str, Any]) -> str:
    """The result of a refresh, as lines for a terminal."""
    if "skipped" in done:
        return f"labels: no change, {done['skipped']}"
    return f"labels: {done['reason']}\n{decide.outcome(done)}"
