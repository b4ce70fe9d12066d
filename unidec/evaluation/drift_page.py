"""What changed, as one page: every check with its bounds, and the distributions beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unidec.data.profile import LENGTH_EDGES
from unidec.evaluation import page
from unidec.evaluation.drift_checks import Check, order
from unidec.evaluation.figures import Chart, Line, bar_chart, line_chart
from unidec.evaluation.page import Table

MOVED_WORDS = 15
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
    more, less = _words(report) if report.old and report.new else ([], [])
    header = ["word", *report.names]
    return page.render(
        "drift",
        report=report,
        kind="wrong" if set(states) - {"ok"} else "right" if report.judged and states else "muted",
        head_cards=[(states.count(s), words, "") for s, words in counted if states and (s != "stop" or stops)],
        checks=order(report.checks),
        stops=stops,
        distributions=_charts(report) if report.old and report.new else [],
        more=Table(header, more, caption="More often"),
        less=Table(header, less, caption="Less often"),
    )


def _charts(report: DriftReport) -> list[Chart | None]:
    sides = (("queries", report.old, report.new), ("labels", *report.labels))
    charts = [_length_chart(f"Length of {name}", report.names, old, new) for name, old, new in sides if old and new]
    if all(map(len, report.scores)):
        shares = [100 * i / (_CURVE - 1) for i in range(_CURVE)]
        curves = [
            Line(name, shares, [float(values[round(share / 100 * (len(values) - 1))]) for share in shares])
            for name, values in zip(report.names, report.scores, strict=True)
        ]
        charts.append(line_chart("Score of the best label", curves, "percent of queries", "top score at most"))
    return charts


def _length_chart(
    caption: str, names: tuple[str, str], old: Mapping[str, Any], new: Mapping[str, Any]
) -> Chart | None:  # fmt: skip
    counts = [side["length"]["histogram"] for side in (old, new)]
    filled = [i for i, pair in enumerate(zip(*counts, strict=True)) if max(pair) > 0]
    some = slice(filled[0], filled[-1] + 1) if filled else slice(0)
    bars = [(name, [100 * count / max(sum(side), 1) for count in side[some]])
            for name, side in zip(names, counts, strict=True)]  # fmt: skip
    return bar_chart(caption, [str(edge) for edge in LENGTH_EDGES[some]], bars, "percent", x_label="characters from")


def _words(report: DriftReport) -> tuple[list[list[str]], list[list[str]]]:
    """Words whose share of all words rose and fell the most; only the commonest of each side are known."""
    old, new = (
        {word: 100 * count / max(side["words"]["count"], 1) for word, count in side["words"]["top"].items()}
        for side in (report.old, report.new)
    )
    # a word that is not among a side's commonest has at most the share of the rarest of them
    least_old, least_new = min(old.values(), default=0.0), min(new.values(), default=0.0)
    moved = []
    for word in set(old) | set(new):
        change = new.get(word, least_new) - old.get(word, least_old)
        if not ((word not in new and change > 0) or (word not in old and change < 0)):
            before = f"{old[word]:.2f}%" if word in old else f"below {least_old:.2f}%"
            now = f"{new[word]:.2f}%" if word in new else f"below {least_new:.2f}%"
            moved.append((change, [word, before, now]))
    moved.sort(key=lambda row: (-abs(row[0]), row[1]))
    more, less = ([row for change, row in moved if change * sign > 0][:MOVED_WORDS] for sign in (1, -1))
    return more, less
