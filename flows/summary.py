"""The last lines of a training on a terminal: figures beside the champion and the baselines, and what to do next."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unidec.metric_names import BASELINES

METRICS = ("P@1", "P@5", "nDCG@5", "PSP@5", "R@100")
_STORED, _REPORT = Path("outputs/metrics.json"), Path("outputs/report.html")
_WIDTH = 30  # of the column of names


def summary(done: Mapping[str, Any]) -> str:
    """About ten lines of what the flow `unidec` returns."""
    if "metrics" not in done and "version" not in done:
        return f"done: {', '.join(done['steps'])}"
    measured = done if "metrics" in done else _stored()
    lines = [*_table(done, measured), *(f"warning: {words}" for words in measured.get("warnings", ()))]
    lines += [_outcome(done), f"report: {_shown(measured.get('report', _REPORT))}"]
    lines += [f"MLflow run: {done['run_url']}"] if done.get("run_url") else []
    return "\n".join([*lines, *_next(done)])


def _stored() -> dict[str, Any]:
    """What the last evaluation wrote, for a run that trains nothing."""
    if not _STORED.is_file():
        return {}
    stored = json.loads(_STORED.read_text(encoding="utf-8"))
    return {"metrics": stored["test"], **{key: stored[key] for key in ("baselines", "warnings") if key in stored}}


def _table(done: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    """This model, the champion it was compared with, and the baselines; percent."""
    if "metrics" not in measured:
        return []
    rows = {f"version {done['version']}" if done.get("version") else "this model": measured["metrics"]}
    gate = done.get("gate", {})
    if champion := gate.get("metrics", {}).get("champion"):
        rows[f"{'former ' if 'promoted' in done else ''}champion, version {gate['champion']}"] = champion
    rows |= {BASELINES[name]: figures for name, figures in measured.get("baselines", {}).items()}
    cells = {name: [f"{row[key]:.1f}" if key in row else "-" for key in METRICS] for name, row in rows.items()}
    head = {"test split, percent": METRICS}
    return [f"{name:<{_WIDTH}}" + "".join(f"{cell:>8}" for cell in row) for name, row in (head | cells).items()]


def _outcome(done: Mapping[str, Any]) -> str:
    """What became of the model."""
    if done.get("version") is None:
        return "not registered: a trial, or some of the steps alone"
    version, model = done["version"], done["model"]
    gate = done.get("gate", {})
    if "promoted" in done:
        previous = done["promoted"].get("previous")
        before = f"; `unidec models rollback` returns to version {previous}" if previous else ""
        return f"version {version} of {model} is the champion{before}"
    if "refused" in done:
        why = " ".join(done["refused"].split())
        return f"version {version} of {model} is not promoted, see outputs/gate.html: {why}"
    if gate.get("passed") and not gate.get("already"):
        return f"version {version} of {model} passed the gate and is not promoted: `unidec models promote` promotes it"
    if "skipped" in done:
        return f"nothing to train: {done['skipped']}; it is version {version} of {model}"
    if gate.get("already"):
        return f"version {version} of {model} is the champion already"
    return f"version {version} of {model} is registered"


def _next(done: Mapping[str, Any]) -> list[str]:
    """Commands to try, as they are typed in this folder."""
    bundle = Path(str(done.get("report", _REPORT))).with_name("bundle")
    trial = done.get("version") is None
    source = f" --bundle {_shown(bundle)}" if trial else ""
    served = _shown(bundle) if trial or "no_champion" in done else f"models:/{done['model']}@champion"
    # `make ui` serves the pages of runs: where a server shows this run already, the line above links to it
    third = "make ui" if Path("Makefile").is_file() and not done.get("run_url") else f"{program()} models list"
    return ["next:", f'  {program()} predict "some text" -k 5{source}', f"  {program()} serve {served}", f"  {third}"]


def program() -> str:
    """The command `unidec` as it is typed in this folder."""
    return _shown(Path(sys.executable).parent / "unidec")


def _shown(path: str | Path) -> str:
    """Relative where the path is in this folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
