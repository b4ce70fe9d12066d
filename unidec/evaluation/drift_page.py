"""What changed, as one page: every check with its bounds, and the distributions beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unidec.data.profile import LENGTH_EDGES
from unidec.evaluation import page
from unidec.evaluation.drift import NO_LIMIT, Check
from unidec.evaluation.figures import Chart, Line, bar_chart, line_chart
from unidec.evaluation.page import Table

MOVED_WORDS = 15


@dataclass(frozen=True)
class DriftReport:
    """What the page shows.

    Attributes:
        names: what the earlier and the later side are called. checks: in their order.
        old, new: both sides as `compare` takes them; empty where nothing was compared.
        reason: why nothing was judged. docs: address of Data Docs.
    """

    title: str
    names: tuple[str, str]
    checks: Sequence[Check] = ()
    old: Mapping[str, Any] = field(default_factory=dict)
    new: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    docs: str = ""


def render(report: DriftReport) -> str:
    """The page as text."""
    sides = (report.old, report.new)
    charts = [_lengths(name, report) for name in ("queries", "labels") if all(name in side for side in sides)]
    if all(side.get("served") for side in sides):
        scores = [side["served"]["score_quantiles"] for side in sides]
        lines = [Line(name, range(len(of)), of) for name, of in zip(report.names, scores, strict=True)]
        charts.append(line_chart("Score of the best label", lines, "percent of queries", "top score at most"))
    return page.render(
        "drift",
        report=report,
        stops=any(check.stop != NO_LIMIT for check in report.checks),
        distributions=charts,
        words=Table(["word", *report.names], _words(report), caption="Words that moved most, by share of all words"),
    )


def _lengths(name: str, report: DriftReport) -> Chart | None:
    counts = [side[name]["length"]["histogram"] for side in (report.old, report.new)]
    filled = [i for i, pair in enumerate(zip(*counts, strict=True)) if any(pair)] or [0]
    some = slice(filled[0], filled[-1] + 1)
    bars = [(of, [100 * count / max(sum(side), 1) for count in side[some]])
            for of, side in zip(report.names, counts, strict=True)]  # fmt: skip
    edges = [str(edge) for edge in LENGTH_EDGES[some]]
    return bar_chart(f"Length of {name}", edges, bars, "percent", x_label="characters from")


def _words(report: DriftReport) -> list[list[str]]:
    """Only the commonest words of each side are known; of another the share counts as that of the rarest of them."""
    if not (report.old and report.new):
        return []
    words = [side["queries"]["words"] for side in (report.old, report.new)]
    old, new = ({word: count / max(of["count"], 1) for word, count in of["top"].items()} for of in words)
    least = [min(of.values(), default=0.0) for of in (old, new)]
    change = {word: abs(new.get(word, least[1]) - old.get(word, least[0])) for word in {**old, **new}}
    moved = sorted(change, key=lambda word: (-change[word], word))[:MOVED_WORDS]
    return [[word, *(f"{of[word]:.2%}" if word in of else "–" for of in (old, new))] for word in moved]
