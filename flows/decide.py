"""The last steps of a retraining: gate and promotion of a version, sharing and printing of the
result.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows import lifecycle, publish, reproduce
from unidec import pipeline
from unidec.config import Params
from unidec.errors import Refused
from unidec.metric_names import BASELINES, of_all_labels
from unidec.pipeline import paths
from unidec.text_page import render_text

log = logging.getLogger("unidec.flows")


def decide(
    params: Params, version: Any, promote: bool | None, always: bool = True
) -> dict[str, Any]:
    """Judge a version by the gate, and promote it if it passes.

    Args:
        promote: whether to promote; None: `retrain.promote` decides.
        always: False: skip a version that the gate already compared with the current champion.

    Returns:
        {"gate": the verdict, and "promoted": the promotion, or "refused": the reasons}; {} if the
        version was skipped. After a refusal without a champion also {"no_champion": {"version",
        "reason", "command": how to get one}}.
    """
    version = str(version)
    name = params.tracking.model_name
    if not always and not pipeline.needs_gate(params, version):
        return {}
    verdict = lifecycle.run(
        f"gate of version {version}", pipeline.gate, params, version, retry=True
    )
    done = {"gate": pipeline.plain(verdict)}
    failed = {check.check: check.words for check in verdict.reasons if not check.passed}
    if not verdict.passed:
        done["refused"] = "; ".join(f"{check}: {why}" for check, why in failed.items())
    elif not verdict.already and (params.retrain.promote if promote is None else promote):
        task = f"promote version {version}"
        try:
            promoted = lifecycle.run(
                task, pipeline.promote, params, version, retry=True, reason="retraining"
            )
            done["promoted"] = pipeline.plain(promoted)
        except Refused as error:
            done["refused"] = str(error)
    lifecycle.say(outcome({"version": version, "model": name, **done}))
    if "promoted" in done:
        metrics = verdict.metrics.get("challenger", {})
        previous = done["promoted"]["previous"]
        event = {"version": version, "previous": previous, "metrics": metrics}
        publish.emit(name, "promoted", event)
    if "refused" in done:
        reasons = done["gate"]["reasons"]
        event = {"version": version, "champion": verdict.champion, "reasons": reasons}
        publish.emit(name, "refused", event)
        if verdict.champion is None:
            # a damaged bundle has to be trained again; other checks can be overruled
            command = f"{_program()} models promote {version}{' --force' if failed else ''}"
            if failed.keys() & {"hash", "loads"}:
                command = "make train ARGS=--force"
            missing = {"version": version, "reason": done["refused"], "command": command}
            done["no_champion"] = missing
    return done


def share(params: Params, done: dict[str, Any]) -> dict[str, Any]:
    """Show the result in Prefect, and run `dvc push` and commit to git as section `retrain` sets. A
    failure is only logged as a warning.
    """
    shared: dict[str, Any] = {}
    publish.show_result(done)
    source = params.source
    if params.retrain.push:
        with publish.harmless("dvc push failed"):
            reproduce.push(source)
            shared["push"] = "done"
    if params.retrain.commit != "none":
        with publish.harmless("nothing was committed, so commit by hand"):
            extra = [str(reproduce.dvc_file(source))] if source.kind == "dvc" else []
            verdict = "refused" if "refused" in done else "registered"
            verdict = "champion" if "promoted" in done else verdict
            shared |= lifecycle.run(
                "commit", publish.commit, params, done["version"], verdict, extra
            )
    return {"shared": shared} if shared else {}


def outcome(done: Mapping[str, Any]) -> str:
    """One line that tells what became of the model."""
    return render_text("outcome.txt", done=done)


def summary(done: Mapping[str, Any]) -> str:
    """The printed result of a training: metrics of the model, the champion and the baselines, and
    commands to try.
    """
    if "metrics" not in done and "version" not in done:
        return f"done: {', '.join(done['steps'])}"
    report = Path(done.get("report", "outputs/report.html"))
    return render_text(
        "trained.txt",
        done=done,
        metrics=of_all_labels(),
        baselines=BASELINES,
        report=_shown(report),
        program=_program(),
        bundle=_shown(report.with_name("bundle")),
        default=str(paths.BUNDLE),
        has_makefile=Path("Makefile").is_file(),
    )


def _program() -> str:
    """The path of the command `unidec`."""
    return _shown(Path(sys.executable).parent / "unidec")


def _shown(path: Path) -> str:
    """The path, relative to the current folder if it is inside it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
