"""The page and the JSON file of a comparison of two versions of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unidec.data.profile import LENGTH_EDGES
from unidec.data.storage import write_json
from unidec.evaluation.drift import Check
from unidec.evaluation.figures import Chart, Line, bar_chart, line_chart
from unidec.evaluation.page import Table, render

PAGE = "index.html"
FINDINGS = "drift.json"
_MOVED_WORDS = 15
# figures of one side, as `unidec.evaluation.drift.compare` takes them; empty: no comparison
Side = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two versions of the data, and the findings.

    Attributes:
        names: names of the earlier and the later side on the page.
        reason: why nothing was compared or judged, or "".
        facts: further facts for the page.
    """

    title: str
    names: tuple[str, str]
    old: Side
    new: Side
    checks: Sequence[Check]
    reason: str
    facts: Mapping[str, Any]

    @property
    def drifted(self) -> bool:
        """Whether any figure is outside its limits."""
        return any(check.drifted for check in self.checks)

    @property
    def charts(self) -> list[Chart | None]:
        """The lengths of queries and labels, and the scores of the best labels, of both sides."""
        old = self.old
        new = self.new
        both = [which for which in ("queries", "labels") if which in old and which in new]
        charts = [self._lengths(which) for which in both]
        if old.get("served") and new.get("served"):
            scores = [side["served"]["score_quantiles"] for side in (old, new)]
            lines = [
                Line(name, range(len(of_side)), of_side)
                for name, of_side in zip(self.names, scores, strict=True)
            ]
            title = "Score of the best label"
            charts.append(line_chart(title, lines, "percent of queries", "top score at most"))
        return charts

    def _lengths(self, which: str) -> Chart | None:
        counts = np.array([side[which]["length"]["histogram"] for side in (self.old, self.new)])
        filled = np.flatnonzero(counts.any(axis=0)).tolist() or [0]
        shown = slice(filled[0], filled[-1] + 1)
        totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
        percent = 100 * counts[:, shown] / totals
        bars = list(zip(self.names, percent.tolist(), strict=True))
        edges = [str(edge) for edge in LENGTH_EDGES[shown]]
        return bar_chart(f"Length of {which}", edges, bars, "percent", x_label="characters from")

    def write(self, folder: Path) -> dict[str, Any]:
        """Write drift.json and index.html to a folder; returns the findings."""
        moved = moved_words(self.old, self.new) if self.old and self.new else []
        html = render(
            "drift",
            title=self.title,
            names=self.names,
            checks=self.checks,
            facts_shown=self.facts,
            reason=self.reason,
            distributions=self.charts,
            words=Table(
                ["word", *self.names],
                moved,
                caption="Words that moved most, by share of all words",
            ),
        )
        found = {
            "drifted": self.drifted,
            "findings": [check.to_json() for check in self.checks],
            "judged": not self.reason,
            "reason": self.reason,
        }
        write_json(folder / FINDINGS, {**found, "facts": self.facts})
        (folder / PAGE).write_text(html, encoding="utf-8")
        return found


def moved_words(*sides: Side) -> list[list[str]]:
    """Table rows of the words whose share changed most.

    Each side stores only its most frequent words; the share of any other word is taken to be that
    of the rarest stored word.
    """
    import pandas as pd

    words = [side["queries"]["words"] for side in sides]
    columns = [pd.Series(one["top"], dtype=float) / max(one["count"], 1) for one in words]
    share = pd.concat(columns, axis=1).sort_index()
    old, new = share.fillna(share.min()).fillna(0.0).to_numpy().T
    moved = (-abs(new - old)).argsort(kind="stable")[:_MOVED_WORDS]
    cells = share.iloc[moved].map("{:.2%}".format, na_action="ignore").fillna("–")
    return cells.reset_index().to_numpy().tolist()
