"""The gate's page: passed or refused, every reason, both systems side by side, in one file that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from unidec.evaluation.page import Shown, document, facts, figure, navigation, note, section, table
from unidec.evaluation.svg import Range, range_chart

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
    """The page as text. All texts of the verdict (what `outputs/gate.json` holds) are escaped."""
    challenger, champion = verdict["challenger"], verdict["champion"]
    title = f"Gate: version {challenger['version']} {'passed' if verdict['passed'] else 'refused'}"
    parts = {
        "reasons": ("Reasons", _reasons(verdict)),
        "quality": ("Quality", _quality(verdict)),
        "serving": ("Serving", _serving(verdict)),
        "lineage": ("What was compared", _compared(verdict)),
        "settings": ("Settings", facts(verdict.get("settings", {})) + note("Section `gate` of params.yaml.")),
    }
    sections = {anchor: section(anchor, heading, body) for anchor, (heading, body) in parts.items()}
    against = f"against the champion, version {champion['version']}" if champion else "there is no champion yet"
    if verdict.get("already"):
        against = "it is the champion already"
    about = " · ".join(escape(text) for text in (verdict["model"], against, verdict["data"]["name"], verdict["at"]))
    report = '<a href="report.html">report of the training</a>'
    top = f'<h1>{escape(title)}</h1><p class="muted">{about} · {report}</p>{_cards(verdict)}'
    links = navigation([(anchor, parts[anchor][0]) for anchor in sections if sections[anchor]])
    return document(title, [top + links, *sections.values()])


def _cards(verdict: Mapping[str, Any]) -> str:
    failed = [reason["check"] for reason in verdict["reasons"] if not reason["passed"]]
    kind = "right" if verdict["passed"] else "wrong"
    cards = [f'<div class="card"><b class="{kind}">{"passed" if verdict["passed"] else "refused"}</b><span>'
             f'{escape(", ".join(failed) or "every check")}</span></div>']  # fmt: skip
    compared = verdict.get("comparison")
    if compared:
        cards.append(_card(f"{compared['difference']:+.2f}", f"{compared['metric']}, points"))
        if compared["confidence"] is not None:
            cards.append(_card(f"{compared['confidence']:.1%}", "of the resamples ahead"))
        cards.append(_card(f"{compared['better']:,} : {compared['worse']:,}", "queries better : worse"))
    probe = verdict.get("probes", {}).get("challenger")
    if probe:
        cards.append(_card(f"{probe['p95_ms']:.1f} ms", "95 % of single queries"))
        cards.append(_card(f"{probe['megabytes']:.1f} MB", "on disk"))
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(value: str, name: str) -> str:
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def _reasons(verdict: Mapping[str, Any]) -> str:
    rows = [
        [
            reason["check"],
            reason["words"],
            Shown("pass", kind="right") if reason["passed"] else Shown("FAIL", kind="wrong"),
        ]
        for reason in sorted(verdict["reasons"], key=lambda reason: reason["passed"])
    ]
    return table(["check", "why", ""], rows, text_columns=2) + note("What failed stands first.")


def _quality(verdict: Mapping[str, Any]) -> str:
    compared, metrics = verdict.get("comparison"), verdict.get("metrics")
    if not compared or not metrics:
        return ""
    mine, its, intervals = metrics["challenger"], metrics["champion"], compared["intervals"]
    names = list(dict.fromkeys([compared["metric"], *verdict.get("settings", {}).get("guarded", ()), *_METRICS]))
    rows = []
    for name in (name for name in names if name in mine and name in its):
        if mine.get(f"{name.partition('/')[0]}/num_queries") == 0:
            continue  # a group that none of these queries has
        gap = mine[name] - its[name]
        small = "{:+.2f} to {:+.2f}".format(*intervals[name]) if name in intervals else ""
        rows.append([name, mine[name], its[name], Shown(f"{gap:+.2f}", gap, f"  {small}" if small else "")])
    chart = range_chart(
        [
            Range(name, mine[name] - its[name], colour=i, ends=(ends[0], ends[1]))
            for i, (name, ends) in enumerate(intervals.items())
        ],
        "challenger - champion, points, 95 % interval",
    )
    labels = verdict.get("labels", {})
    words = [
        f"The {who} does not know {held['unknown']:,} labels of this data set (a miss each time), "
        f"{held['removed']:,} of its labels are no more in it (taken out of its answers)."
        for who, held in labels.items()
        if held["unknown"] or held["removed"]
    ]
    about = f"{compared['num_queries']:,} test queries, ranked from their texts by both; intervals by paired bootstrap."
    shown = table(["metric", "challenger", "champion", "difference"], rows, caption="Test split, percent")
    return f'<div class="pair"><div>{shown}</div>{figure("Differences", chart)}</div>' + note(" ".join([about, *words]))


def _serving(verdict: Mapping[str, Any]) -> str:
    probes = verdict.get("probes") or {}
    if not probes:
        return ""
    rows = [[words, *(probe.get(name) for probe in probes.values())] for name, words in _PROBES.items()]
    about = "Each bundle in a fresh process of its own, one query at a time, the better of two turns of each query."
    return table(["", *probes], rows) + note(about)


def _compared(verdict: Mapping[str, Any]) -> str:
    found = {who: verdict[who] for who in ("challenger", "champion") if verdict[who]}
    return facts({**found, "data set": verdict["data"]})
