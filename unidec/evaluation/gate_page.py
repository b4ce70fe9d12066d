"""The gate's page: passed or refused, every reason, both systems side by side, in one file that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unidec.evaluation.page import Shown, Table, render

_METRICS = (
    "P@1", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@10", "R@100", "MRR", "coverage@5", "tail/P@5", "tail/R@10",
    "tail/R@100", "torso/R@10", "head/R@10",
)  # fmt: skip
_PROBES = {
    "load_seconds": "seconds from start to first answer", "load_cpu_seconds": "the same, processor time",
    "p50_ms": "ms a query, half of them", "p95_ms": "ms a query, 95 % of them",
    "p95_cpu_ms": "the same, processor time", "peak_megabytes": "MB of memory at most", "megabytes": "MB on disk",
}  # fmt: skip


def render_gate(verdict: Mapping[str, Any]) -> str:
    """The page as text, from what `outputs/gate.json` holds."""
    probes, compared = verdict.get("probes") or {}, verdict.get("comparison") or {}
    reasons = [
        [one["check"], one["words"], Shown("pass", kind="right") if one["passed"] else Shown("FAIL", kind="wrong")]
        for one in sorted(verdict["reasons"], key=lambda one: one["passed"])
    ]
    rows = [[words, *(probe.get(name) for probe in probes.values())] for name, words in _PROBES.items()]
    return render(
        "gate",
        verdict=verdict,
        title=f"Gate: version {verdict['challenger']['version']} {'passed' if verdict['passed'] else 'refused'}",
        comparison=compared,
        failed=[reason["check"] for reason in verdict["reasons"] if not reason["passed"]],
        probe=probes.get("challenger"),
        reasons=Table(["check", "why", ""], reasons, text_columns=2),
        quality=_compared(verdict, compared) if compared and verdict.get("metrics") else None,
        serving=Table(["", *probes], rows if probes else []),
    )


def _compared(verdict: Mapping[str, Any], compared: Mapping[str, Any]) -> Table:
    """Both systems' metrics, with the intervals of those that count."""
    mine, its, intervals = verdict["metrics"]["challenger"], verdict["metrics"]["champion"], compared["intervals"]
    rows = []
    for name in dict.fromkeys([compared["metric"], *verdict.get("settings", {}).get("guarded", ()), *_METRICS]):
        if name not in mine or name not in its or mine.get(f"{name.partition('/')[0]}/num_queries") == 0:
            continue  # not measured, or a group that none of these queries has
        gap = mine[name] - its[name]
        small = "  {:+.2f} to {:+.2f}".format(*intervals[name]) if name in intervals else ""
        rows.append([name, mine[name], its[name], Shown(f"{gap:+.2f}", gap, small)])
    return Table(["metric", "challenger", "champion", "difference, 95 % interval"], rows, caption="Test split, percent")
