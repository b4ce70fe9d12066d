"""What changed, as one page: every check with its bounds, and the distributions beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from unidec.data.profile import LENGTH_EDGES
from unidec.evaluation import page
from unidec.evaluation.drift_checks import Bounds, Check, Unit, order, shown, within
from unidec.evaluation.svg import Line, bar_chart, line_chart

MOVED_WORDS = 15
_KINDS = {"stop": "wrong", "warning": "wrong", "ok": "right"}
_CURVE = 21  # points of a curve of top scores


@dataclass(frozen=True)
class DriftReport:
    """What the page shows.

    Attributes:
        title: its heading. verdict: one sentence below it. judged: False where too little was there to judge.
        names: what the earlier and the later side are called.
        checks: in any order.
        old, new: `Measured.summary` of both sides' queries; empty where there is none. labels: of their labels.
        scores: top scores of both sides: quantiles at evenly spaced shares; empty where there are none.
        facts: what was compared. links: (address, words).
    """

    title: str
    verdict: str
    judged: bool
    names: tuple[str, str]
    checks: Sequence[Check]
    old: Mapping[str, Any] = field(default_factory=dict)
    new: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[Mapping[str, Any], Mapping[str, Any]] = field(default_factory=lambda: ({}, {}))
    scores: tuple[Sequence[float], Sequence[float]] = ((), ())
    facts: Mapping[str, Any] = field(default_factory=dict)
    links: Sequence[tuple[str, str]] = ()


def render(report: DriftReport) -> str:
    """The page: no script, nothing loaded, light and dark."""
    states: list[str] = [check.state for check in report.checks]
    kind = "wrong" if set(states) - {"ok"} else "right" if report.judged and states else "muted"
    cards = "".join(
        f'<div class="card"><b>{states.count(state)}</b><span>{words}</span></div>'
        for state, words in (("stop", "stop"), ("warning", "warn"), ("ok", "as expected"))
        if state != "stop" or any(check.stop != (None, None) for check in report.checks)
    )
    links = ", ".join(f'<a href="{escape(address, quote=True)}">{escape(words)}</a>' for address, words in report.links)
    head = (
        f"<header><h1>{escape(report.title)}</h1>"
        f'<p class="{kind}">{escape(report.verdict)}</p>'
        + (f'<div class="cards">{cards}</div>' if report.checks else "")
        + (f'<p class="note">{links}</p>' if links else "")
        + "</header>"
    )
    sections = [
        page.section("checks", "Checks", _checks(report), _explained() if report.checks else ""),
        page.section("distributions", "Distributions", _charts(report)),
        page.section("words", "Words that moved", _words(report)),
        page.section("facts", "What was compared", page.facts(report.facts)),
    ]
    return page.document(report.title, [head, *sections])


def _checks(report: DriftReport) -> str:
    stops = any(check.stop != (None, None) for check in report.checks)
    header = ["", "verdict", *report.names, "change", "warns unless", *(["stops unless"] if stops else []), "chance"]
    rows = []
    for check in order(report.checks):
        limits = [check.warn, *([check.stop] if stops else [])]
        rows.append(
            [
                check.name,
                page.Shown({"ok": "ok", "warning": "warns", "stop": "stops"}[check.state], kind=_KINDS[check.state]),
                page.Shown(shown(check.old, check.unit)),
                page.Shown(shown(check.new, check.unit)),
                page.Shown(_change(check)),
                *(page.Shown(_bounds(limit, check.unit)) for limit in limits),
                page.Shown("" if check.noise is None else shown(check.noise, check.unit)),
            ]
        )
    return page.table(header, rows, caption="What stops or warns first", dense=True)


def _explained() -> str:
    return page.note(
        "Distributions are compared by their Jensen-Shannon distance: 0 the same, 1 nothing in common. A shift is "
        "counted in standard deviations of single queries. Chance: what 99 of 100 windows of this size stay below "
        "although nothing changed; a limit is never below it."
    )


def _change(check: Check) -> str:
    if check.old is None:
        return ""
    if check.unit in ("count", "mean") and check.old:
        return f"{check.new / check.old - 1:+.1%}"
    if check.unit == "share":
        return f"{100 * (check.new - check.old):+.2f} pp"
    return f"{check.new - check.old:+.2f}"


def _bounds(bounds: Bounds, unit: Unit) -> str:
    return "" if bounds == (None, None) else within(bounds, unit)


def _charts(report: DriftReport) -> str:
    if not report.old or not report.new:
        return ""
    lengths = [
        page.figure(f"Length of {name}", _length_chart(report.names, old, new))
        for name, old, new in (("queries", report.old, report.new), ("labels", *report.labels))
        if old and new
    ]
    curves = [
        Line(name, [100 * i / (_CURVE - 1) for i in range(_CURVE)], _thinned(values))
        for name, values in zip(report.names, report.scores, strict=True)
        if len(values)
    ]
    score = line_chart(curves, "percent of queries", "top score at most") if len(curves) == 2 else ""
    return page.charts(*lengths, page.figure("Score of the best label", score))


def _length_chart(names: tuple[str, str], old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    counts = [side["length"]["histogram"] for side in (old, new)]
    sides = [[100 * count / max(sum(side), 1) for count in side] for side in counts]
    filled = [i for i, pair in enumerate(zip(*sides, strict=True)) if max(pair) > 0]
    if not filled:
        return ""
    some = slice(filled[0], filled[-1] + 1)
    bars = [(name, side[some]) for name, side in zip(names, sides, strict=True)]
    return bar_chart([str(edge) for edge in LENGTH_EDGES[some]], bars, "percent", x_label="characters from")


def _thinned(values: Sequence[float]) -> list[float]:
    return [float(values[round(i * (len(values) - 1) / (_CURVE - 1))]) for i in range(_CURVE)]


def _words(report: DriftReport) -> str:
    """Words whose share of all words changed the most; only the commonest of each side are known."""
    if not report.old or not report.new:
        return ""
    shares = [
        {word: 100 * count / max(side["words"]["count"], 1) for word, count in side["words"]["top"].items()}
        for side in (report.old, report.new)
    ]
    least = [min(side.values(), default=0.0) for side in shares]
    moved = []
    for word in set(shares[0]) | set(shares[1]):
        before, now = (side.get(word) for side in shares)
        # a word that is not among a side's commonest has at most the share of the rarest of them
        change = (least[1] if now is None else now) - (least[0] if before is None else before)
        if (now is None and change > 0) or (before is None and change < 0):
            continue
        moved.append((change, word, before, now))
    moved.sort(key=lambda row: (-abs(row[0]), row[1]))

    def cell(share: float | None, bound: float) -> page.Shown:
        return page.Shown(f"below {bound:.2f}%" if share is None else f"{share:.2f}%")

    tables = [
        page.table(
            ["word", *report.names],
            [[word, cell(before, least[0]), cell(now, least[1])] for _, word, before, now in rows[:MOVED_WORDS]],
            caption=caption,
        )
        for caption, rows in (
            ("More often", [row for row in moved if row[0] > 0]),
            ("Less often", [row for row in moved if row[0] < 0]),
        )
    ]
    return f'<div class="pair">{"".join(f"<div>{table}</div>" for table in tables)}</div>' if any(tables) else ""
