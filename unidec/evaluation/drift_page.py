"""What changed, as one page: every check with its bounds, and the distributions beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unidec.data.profile import LENGTH_EDGES
from unidec.evaluation import page
from unidec.evaluation.drift_checks import Bounds, Check, order, shown, within
from unidec.evaluation.figures import Chart, Line, bar_chart, line_chart
from unidec.evaluation.page import Shown, Table

MOVED_WORDS = 15
_STATES = {"stop": ("stops", "wrong"), "warning": ("warns", "wrong"), "ok": ("ok", "right")}
_CURVE = 21  # points of a curve of top scores


@dataclass(frozen=True)
class DriftReport:
    """What the page shows.

    Attributes:
        verdict: one sentence below the title. judged: False where too little was there to judge.
        names: what the earlier and the later side are called. checks: in any order.
        old, new: `Measured.summary` of both sides' queries, labels: of their labels; empty where there are none.
        scores: top scores of both sides: quantiles at evenly spaced shares. links: (address, words).
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
    """The page as text."""
    states: list[str] = [check.state for check in report.checks]
    stops = any(check.stop != (None, None) for check in report.checks)
    counted = (("stop", "stop"), ("warning", "warn"), ("ok", "as expected"))
    more, less = _words(report)
    return page.render(
        "drift",
        report=report,
        kind="wrong" if set(states) - {"ok"} else "right" if report.judged and states else "muted",
        head_cards=[(states.count(s), words, "") for s, words in counted if states and (s != "stop" or stops)],
        checks=_checks(report, stops),
        distributions=_charts(report),
        more=more,
        less=less,
    )


def _checks(report: DriftReport, stops: bool) -> Table:
    header = ["", "verdict", *report.names, "change", "warns unless", *(["stops unless"] if stops else []), "chance"]
    rows = []
    for check in order(report.checks):
        words, kind = _STATES[check.state]
        figures = [shown(check.old, check.unit), shown(check.new, check.unit), _change(check)]
        limits: list[Bounds] = [check.warn, *([check.stop] if stops else [])]
        bounds = ["" if limit == (None, None) else within(limit, check.unit) for limit in limits]
        noise = "" if check.noise is None else shown(check.noise, check.unit)
        rows.append([check.name, Shown(words, kind=kind), *figures, *bounds, noise])
    return Table(header, rows, caption="Stops and warnings first", dense=True)


def _change(check: Check) -> str:
    if check.old is None:
        return ""
    if check.unit in ("count", "mean") and check.old:
        return f"{check.new / check.old - 1:+.1%}"
    if check.unit == "share":
        return f"{100 * (check.new - check.old):+.2f} pp"
    return f"{check.new - check.old:+.2f}"


def _charts(report: DriftReport) -> list[Chart | None]:
    if not report.old or not report.new:
        return []
    sides = (("queries", report.old, report.new), ("labels", *report.labels))
    lengths = [_length_chart(f"Length of {name}", report.names, old, new) for name, old, new in sides if old and new]
    shares = [100 * i / (_CURVE - 1) for i in range(_CURVE)]
    curves = [
        Line(name, shares, [float(values[round(share / 100 * (len(values) - 1))]) for share in shares])
        for name, values in zip(report.names, report.scores, strict=True)
        if len(values)
    ]
    caption = "Score of the best label"
    score = line_chart(caption, curves, "percent of queries", "top score at most") if len(curves) == 2 else None
    return [*lengths, score]


def _length_chart(
    caption: str, names: tuple[str, str], old: Mapping[str, Any], new: Mapping[str, Any]
) -> Chart | None:  # fmt: skip
    counts = [side["length"]["histogram"] for side in (old, new)]
    sides = [[100 * count / max(sum(side), 1) for count in side] for side in counts]
    filled = [i for i, pair in enumerate(zip(*sides, strict=True)) if max(pair) > 0]
    if not filled:
        return None
    some = slice(filled[0], filled[-1] + 1)
    bars = [(name, side[some]) for name, side in zip(names, sides, strict=True)]
    return bar_chart(caption, [str(edge) for edge in LENGTH_EDGES[some]], bars, "percent", x_label="characters from")


def _words(report: DriftReport) -> tuple[Table, Table]:
    """Words whose share of all words rose and fell the most; only the commonest of each side are known."""
    shares: list[dict[str, float]] = [
        {word: 100 * count / max(side["words"]["count"], 1) for word, count in side["words"]["top"].items()}
        for side in (report.old, report.new)
        if report.old and report.new
    ] or [{}, {}]
    least = [min(side.values(), default=0.0) for side in shares]
    moved = []
    for word in set(shares[0]) | set(shares[1]):
        before, now = (side.get(word) for side in shares)
        # a word that is not among a side's commonest has at most the share of the rarest of them
        change = (least[1] if now is None else now) - (least[0] if before is None else before)
        if not ((now is None and change > 0) or (before is None and change < 0)):
            cells = [f"below {low:.2f}%" if share is None else f"{share:.2f}%"
                     for share, low in zip((before, now), least, strict=True)]  # fmt: skip
            moved.append((change, [word, *cells]))
    moved.sort(key=lambda row: (-abs(row[0]), row[1]))
    more, less = ([row for change, row in moved if change * sign > 0][:MOVED_WORDS] for sign in (1, -1))
    header = ["word", *report.names]
    return Table(header, more, caption="More often"), Table(header, less, caption="Less often")
