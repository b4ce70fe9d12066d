"""From a registered version to a champion, or to the reasons why not; and the notifications about it."""

from __future__ import annotations

from typing import Any

from flows import artifacts, lifecycle, publish, reproduce, source, steps
from flows.summary import program
from unidec import pipeline
from unidec.config import Params
from unidec.errors import Refused, UnidecError


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
    if not always and not pipeline.needs_gate(params, str(version)):
        return {}
    verdict = steps.gate(params, str(version))
    artifacts.show_gate(verdict)
    done: dict[str, Any] = {"gate": verdict}
    name = params.tracking.model_name
    if not verdict["passed"]:
        failed = {reason["check"]: reason["words"] for reason in verdict["reasons"] if not reason["passed"]}
        words = "; ".join(f"{check}: {why}" for check, why in failed.items())
        # a bundle that is damaged or cannot answer is trained again; a limit can be overruled
        command = f"{program()} models promote {version} --force"
        if failed.keys() & {"hash", "loads", "answers"}:
            command = "make train ARGS=--force"
        return done | _refused(params, version, verdict, words, command)
    if verdict.get("already"):
        return done
    if not (params.retrain.promote if promote is None else promote):
        lifecycle.say(f"version {version} of {name} passed the gate; it is not promoted: `unidec models promote` does")
        return done
    try:
        done["promoted"] = steps.promote(params, str(version))
    except Refused as error:
        return done | _refused(params, version, verdict, str(error), f"{program()} models promote {version}")
    previous = done["promoted"].get("previous")
    before = f"; `unidec models rollback` returns to version {previous}" if previous else ""
    lifecycle.say(f"version {version} of {name} is the champion{before}")
    figures = verdict.get("metrics", {}).get("challenger", {})
    payload = {"version": str(version), "previous": previous, "metrics": figures}
    lines = [f"{key} {value:.2f}" for key, value in figures.items() if isinstance(value, float)][:6]
    publish.tell(params, "promoted", f"version {version} is the champion", payload, lines)
    return done


def _refused(params: Params, version: Any, verdict: dict[str, Any], words: str, command: str) -> dict[str, Any]:
    lifecycle.say(f"version {version} of {params.tracking.model_name} is not promoted: {words}")
    payload = {"version": str(version), "champion": verdict.get("champion"), "reasons": verdict["reasons"]}
    publish.tell(params, "refused", f"version {version} is refused", payload, [words])
    if verdict.get("champion") is not None:
        return {"refused": words}
    return {"refused": words, "no_champion": {"version": str(version), "reason": words, "command": command}}


def share(params: Params, version: Any, done: dict[str, Any]) -> dict[str, Any]:
    """`dvc push`, and the commit in git, as section `retrain` asks; a failure is logged, and stops nothing."""
    shared: dict[str, Any] = {}
    verdict = "champion" if "promoted" in done else "refused" if "refused" in done else "registered"
    extra = [str(source.dvc_file(params.source))] if params.source.kind == "dvc" else []
    if params.retrain.push:
        try:
            shared["push"] = steps.push(params)
        except (reproduce.CommandError, UnidecError) as error:
            shared["push"] = f"failed: {error}"
    if params.retrain.commit != "none":
        try:
            shared |= steps.commit_in_git(params, version, params.retrain.commit, verdict, extra)
        except UnidecError as error:
            shared["commit"] = f"failed: {error}"
    for what, words in shared.items():
        lifecycle.say(f"{what}: {words}")
    return {"shared": shared} if shared else {}
