"""From a registered version to a champion, or to the reasons why not; and the notifications about it."""

from __future__ import annotations

import logging
from typing import Any

from flows import artifacts, lifecycle, publish, reproduce, source, steps
from flows.summary import outcome, program
from unidec import pipeline
from unidec.config import Params
from unidec.errors import Refused, UnidecError

log = logging.getLogger("unidec.flows")


def decide(params: Params, version: Any, promote: bool | None, always: bool = True) -> dict[str, Any]:
    """The gate, and promotion of what passes it.

    Args:
        params: all parameters.
        version: of the registered model.
        promote: None: `retrain.promote` decides.
        always: False: what was judged against the present champion before is not judged again.

    Returns:
        {"gate": its result, "promoted": ... or "refused": words}; {} where there was nothing to judge. Where a refusal
        leaves the model without a champion also {"no_champion": {"version", "reason", "command": what changes it}}.
    """
    version = str(version)
    if not always and not pipeline.needs_gate(params, version):
        return {}
    verdict = steps.run(f"gate of version {version}", pipeline.gate, params, version, retry=True)
    artifacts.show_gate(verdict)
    done: dict[str, Any] = {"gate": verdict}
    failed = {reason["check"]: reason["words"] for reason in verdict["reasons"] if not reason["passed"]}
    if not verdict["passed"]:
        done["refused"] = "; ".join(f"{check}: {why}" for check, why in failed.items())
    elif not verdict.get("already") and (params.retrain.promote if promote is None else promote):
        try:
            name = f"promote version {version}"
            done["promoted"] = steps.run(name, pipeline.promote, params, version, retry=True, reason="retraining")
        except Refused as error:
            done["refused"] = str(error)
    model = params.tracking.model_name
    lifecycle.say(outcome({"version": version, "model": model, **done}))
    if "promoted" in done:
        figures = verdict.get("metrics", {}).get("challenger", {})
        payload = {"version": version, "previous": done["promoted"].get("previous"), "metrics": figures}
        lines = [f"{key} {value:.2f}" for key, value in figures.items() if isinstance(value, float)][:6]
        publish.tell(params, "promoted", f"version {version} is the champion", payload, lines)
    if "refused" in done:
        payload = {"version": version, "champion": verdict.get("champion"), "reasons": verdict["reasons"]}
        publish.tell(params, "refused", f"version {version} is refused", payload, [done["refused"]])
        if verdict.get("champion") is None:
            # a bundle that is damaged or cannot answer is trained again; a limit can be overruled
            command = f"{program()} models promote {version}{' --force' if failed else ''}"
            if failed.keys() & {"hash", "loads", "answers"}:
                command = "make train ARGS=--force"
            done["no_champion"] = {"version": version, "reason": done["refused"], "command": command}
    return done


def share(params: Params, version: Any, done: dict[str, Any]) -> dict[str, Any]:
    """`dvc push`, and the commit in git, as section `retrain` asks; a failure is logged, and stops nothing."""
    shared: dict[str, Any] = {}
    verdict = "champion" if "promoted" in done else "refused" if "refused" in done else "registered"
    extra = [str(source.dvc_file(params.source))] if params.source.kind == "dvc" else []
    if params.retrain.push:
        try:
            shared["push"] = steps.run("dvc push", _push, params, retry=True)
        except (reproduce.CommandError, UnidecError) as error:
            shared["push"] = f"failed: {error}"
    if params.retrain.commit != "none":
        try:
            shared |= steps.run("commit", publish.commit, params, version, verdict, extra)
        except UnidecError as error:
            shared["commit"] = f"failed: {error}"
    for what, words in shared.items():
        lifecycle.say(f"{what}: {words}")
    return {"shared": shared} if shared else {}


def _push(params: Params) -> str:
    """`dvc push`; returns DVC's last words."""
    output = reproduce.dvc(["push"], log.info, source.secret_values(params.source.secrets))
    return (output.strip().splitlines() or ["done"])[-1]
