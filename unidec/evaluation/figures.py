"""Figures by matplotlib, as SVG images within a page, whose style inverts them on a dark screen.

matplotlib is imported when a figure is drawn: it takes half a second.
"""

from __future__ import annotations

import base64
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COLOURS = ("#2463a6", "#c8610a", "#2c8a57", "#7d4bb5", "#b83a5e", "#64748b", "#0e8a94", "#8a6d1a")
TEXT, MUTED, RULE = "#1c2430", "#5b6675", "#dde2e9"
MAX_POINTS = 300
LONGEST_NAME = 28  # characters of a name in `range_chart`

_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "unidec", "text.parse_math": False, "font.size": 8.5, "text.color": MUTED,
    "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "axes.edgecolor": MUTED, "grid.color": RULE,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "axes.spines.left": False, "xtick.major.size": 0, "ytick.major.size": 0,
    "lines.linewidth": 1.6, "lines.markersize": 4.5,
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One line of a chart: x and y of the same length; a y that is not finite leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False


@dataclass(frozen=True)
class Range:
    """A row of `range_chart`: a mean, the ends of its interval (None: none), the values behind it, its colour."""

    name: str
    mean: float
    ends: tuple[float, float] | None = None
    values: Sequence[float] = ()
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """A figure that is drawn when a page asks for it.

    Attributes:
        caption: above it. about: what it shows, read aloud. legend: names of its lines or bars, in their order.
        draw: draws on matplotlib's axes. height: inches.
    """

    caption: str
    about: str
    legend: Sequence[str]
    draw: Callable[[Any], None]
    height: float = 3.2

    def image(self) -> str:
        """As an address for `<img>` that holds the whole image: the same bytes for the same input."""
        import matplotlib
        from matplotlib.figure import Figure

        buffer = io.BytesIO()
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # that the font lacks; a browser has other fonts
            figure = Figure(figsize=(5.6, self.height), layout="constrained")
            self.draw(figure.add_subplot())
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def line_chart(
    caption: str, lines: Sequence[Line], x_label: str, y_label: str, *, y_from_zero: bool = False,
    x_from_zero: bool = False,
) -> Chart | None:  # fmt: skip
    """Lines over a common x, or None without a point; more than 300 points of a line are means of neighbours."""
    if not any(math.isfinite(y) for line in lines for y in line.y):
        return None

    def draw(axes: Any) -> None:
        for i, line in enumerate(lines):
            marker = "o" if line.dots else None
            axes.plot(_thinned(line.x), _thinned(line.y), color=COLOURS[i % len(COLOURS)], marker=marker)
        axes.set(xlabel=_clean(x_label), ylabel=_clean(y_label))
        axes.margins(x=0.02)
        axes.set_xlim(left=0 if x_from_zero else None)
        axes.set_ylim(bottom=0 if y_from_zero else None)

    return Chart(caption, f"{y_label} by {x_label}", [line.name for line in lines], draw)


def bar_chart(
    caption: str, groups: Sequence[str], bars: Sequence[tuple[str, Sequence[float]]], y_label: str, *,
    x_label: str = "", stacked: bool = False,
) -> Chart | None:  # fmt: skip
    """Bars beside or upon each other: `bars` holds (name, a value for each group); below zero is drawn as zero."""
    if not groups or not bars:
        return None
    columns = np.nan_to_num(np.maximum([values for _, values in bars], 0.0))

    def draw(axes: Any) -> None:
        width = (0.72 if len(groups) < 20 else 0.86) / (1 if stacked else len(bars))
        base = np.zeros(len(groups))
        for i, column in enumerate(columns):
            place = np.arange(len(groups)) + (0 if stacked else width * (i - (len(bars) - 1) / 2))
            drawn = axes.bar(place, column, width, base, color=COLOURS[i % len(COLOURS)])
            base = base + column if stacked else base
            if not stacked and width / len(groups) > 0.055:
                axes.bar_label(drawn, fmt="{:.1f}", fontsize=7.5, color=TEXT, padding=1)
        every = max(1, math.ceil(len(groups) / 12))
        axes.set_xticks(range(0, len(groups), every), [_clean(group) for group in groups[::every]])
        axes.set(xlabel=_clean(x_label), ylabel=_clean(y_label), xlim=(-0.5, len(groups) - 0.5))

    about = f"{y_label} by {x_label}" if x_label else y_label
    return Chart(caption, about, [name for name, _ in bars], draw)


def range_chart(caption: str, rows: Sequence[Range], x_label: str) -> Chart | None:
    """Means with their intervals, a row each; one without a finite mean is left out."""
    rows = [row for row in rows if math.isfinite(row.mean)]
    if not rows:
        return None
    names = [_clean(row.name) for row in rows]
    names = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names]

    def draw(axes: Any) -> None:
        for y, row in enumerate(rows):
            colour = COLOURS[row.colour % len(COLOURS)]
            axes.plot(row.ends or (), [y, y] if row.ends else (), color=colour)
            axes.plot(row.values, [y] * len(row.values), "o", color=COLOURS[1], markersize=3.5)
            axes.plot(row.mean, y, "o", color=colour, markersize=6.5)
            place = axes.get_yaxis_transform()
            axes.text(1.02, y, f"{row.mean:.2f}", va="center", fontsize=8, color=TEXT, transform=place)
        axes.set_yticks(range(len(rows)), names, color=TEXT)
        axes.set(xlabel=_clean(x_label), ylim=(len(rows) - 0.5, -0.5))
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")

    about = "; ".join([x_label, *(f"{row.name} {row.mean:.2f}" for row in rows)])
    return Chart(caption, about, (), draw, 0.8 + 0.22 * len(rows))


def _thinned(values: Sequence[float]) -> list[float]:
    parts = np.array_split(np.asarray(values, dtype=np.float64), max(min(len(values), MAX_POINTS), 1))
    return [float(part[np.isfinite(part)].mean()) if np.isfinite(part).any() else math.nan for part in parts]


def _clean(text: str) -> str:
    """Text that a font can be asked for: no lone surrogates, nothing but white space below a blank."""
    return re.sub(r"[\x00-\x1f]", " ", str(text).encode("utf-8", "replace").decode())
