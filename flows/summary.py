"""What came of a training: one line for the log; on a terminal figures beside the champion's and baselines', too."""

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
    measured = done
    if "metrics" not in done and _STORED.is_file():  # a run that trains nothing: what the last evaluation wrote
        stored = json.loads(_STORED.read_text(encoding="utf-8"))
        measured = stored | {"metrics": stored["test"]}
    lines = [*_table(done, measured), *(f"warning: {words}" for words in measured.get("warnings", ()))]
    lines += [outcome(done), f"report: {_shown(measured.get('report', _REPORT))}"]
    lines += [f"MLflow run: {done['run_url']}"] if done.get("run_url") else []
    return "\n".join([*lines, *_next(done)])


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


def outcome(done: Mapping[str, Any]) -> str:
    """What became of the model, in one line."""
    if done.get("version") is None:
        return "not registered: a trial, or some of the steps alone"
    version, gate = f"version {done['version']} of {done['model']}", done.get("gate", {})
    if "promoted" in done:
        previous = done["promoted"].get("previous")
        before = f"; `unidec models rollback` returns to version {previous}" if previous else ""
        return f"{version} is the champion{before}"
    if "refused" in done:
        return f"{version} is not promoted, see outputs/gate.html: {' '.join(done['refused'].split())}"
    if gate.get("passed") and not gate.get("already"):
        return f"{version} passed the gate and is not promoted: `unidec models promote` promotes it"
    if "skipped" in done:
        return f"nothing to train: {done['skipped']}; it is {version}"
    return f"{version} is {'the champion already' if gate.get('already') else 'registered'}"


def _next(done: Mapping[str, Any]) -> list[str]:
    """Commands to try, as they are typed in this folder."""
    bundle = _shown(Path(str(done.get("report", _REPORT))).with_name("bundle"))
    trial = done.get("version") is None
    served = bundle if trial or "no_champion" in done else f"models:/{done['model']}@champion"
    # `make ui` serves the pages of runs: where a server shows this run already, the line above links to it
    third = "make ui" if Path("Makefile").is_file() and not done.get("run_url") else f"{program()} models list"
    predict = f'{program()} predict "some text" -k 5{f" --bundle {bundle}" if trial else ""}'
    return ["next:", f"  {predict}", f"  {program()} serve {served}", f"  {third}"]


def program() -> str:
    """The command `unidec` as it is typed in this folder."""
    return _shown(Path(sys.executable).parent / "unidec")


def _shown(path: str | Path) -> str:
    """Relative where the path is in this folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
