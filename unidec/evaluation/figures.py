"""Figures by matplotlib, as inline SVG whose colours follow the page (light, dark, print).

matplotlib is imported when a figure is drawn: it takes half a second. A figure is drawn in the colours of the light
page, which then become the page's CSS variables.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

COLOURS = ("#2463a6", "#c8610a", "#2c8a57", "#7d4bb5", "#b83a5e", "#64748b", "#0e8a94", "#8a6d1a")
TEXT, MUTED, RULE = "#1c2430", "#5b6675", "#dde2e9"
MAX_POINTS = 300
LONGEST_NAME = 28  # characters of a name in `range_chart`

_VARIABLES = {TEXT: "var(--fg)", MUTED: "var(--muted)", RULE: "var(--rule)"}
_VARIABLES |= {colour: f"var(--s{i})" for i, colour in enumerate(COLOURS)}
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "unidec", "text.parse_math": False, "font.size": 8.5, "text.color": MUTED,
    "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "axes.edgecolor": MUTED, "grid.color": RULE,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "axes.spines.left": False, "xtick.major.size": 0, "ytick.major.size": 0,
    "xtick.minor.size": 0, "ytick.minor.size": 0, "lines.linewidth": 1.6,
}  # fmt: skip
# left out of an SVG in a page: namespaces, style of its own, clip paths and ids, which only the first figure could have
_DROPPED = re.compile(
    r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>|<clipPath.*?</clipPath>|<g/>|(?<=>)\s+(?=<)"
    r'| clip-path="[^"]*"| xmlns(?::\w+)?="[^"]*"| (?:width|height)="[\d.]+pt"| id="(?!tip-)[^"]*"'
    r'| font-family: [^;]*;| transform="rotate\(-0 [^"]*"',
    re.S,
)
Tip = Callable[[Any, str], None]


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
        size: inches. left: the share of the width that the axis' own texts take.
    """

    caption: str
    about: str
    legend: Sequence[str]
    draw: Callable[[Any, Tip], None]
    size: tuple[float, float] = (5.6, 3.2)
    left: float = 0.12
    right: float = 0.98

    def svg(self) -> str:
        """For a page: no script, nothing loaded, the same bytes for the same input."""
        tips: list[str] = []

        def tip(artist: Any, text: str) -> None:
            artist.set_gid(f"tip-{len(tips)}")
            tips.append(text)

        text = self._drawn(tip)
        text = _DROPPED.sub("", text[text.index("<svg") :])
        text = re.sub("#[0-9a-f]{6}", lambda found: _VARIABLES.get(found[0], found[0]), text)
        text = re.sub(r'<g id="tip-(\d+)">', lambda found: f"<g><title>{escape(tips[int(found[1])])}</title>", text)
        label = escape(f"{self.about}: {', '.join(self.legend)}" if self.legend else self.about, quote=True)
        return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)

    def _drawn(self, tip: Tip) -> str:
        import matplotlib
        from matplotlib.figure import Figure

        buffer = io.StringIO()
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # that the font lacks; a browser has other fonts
            figure = Figure(figsize=self.size)
            bottom = 0.48 / self.size[1]
            axes = figure.add_axes((self.left, bottom, self.right - self.left, 0.96 - bottom))
            self.draw(axes, tip)
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # the default has the date in it
            figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
        return buffer.getvalue()


def line_chart(
    caption: str, lines: Sequence[Line], x_label: str, y_label: str, *, y_from_zero: bool = False,
    x_from_zero: bool = False,
) -> Chart | None:  # fmt: skip
    """Lines over a common x, or None without a point; more than 300 points of a line are means of neighbours."""
    if not any(math.isfinite(y) for line in lines for y in line.y):
        return None

    def draw(axes: Any, tip: Tip) -> None:
        for i, line in enumerate(lines):
            colour = COLOURS[i % len(COLOURS)]
            axes.plot(_thinned(line.x), _thinned(line.y), color=colour)
            for x, y in zip(line.x, line.y, strict=True) if line.dots else ():
                if math.isfinite(y):
                    tip(_dot(axes, x, y, 2.3, colour), f"{_clean(line.name)}: {y:.4g} at {x:.4g}")
        axes.set(xlabel=_clean(x_label), ylabel=_clean(y_label))
        axes.margins(x=0.02)
        axes.set_xlim(left=0 if x_from_zero else None)
        axes.set_ylim(bottom=0 if y_from_zero else None)

    return Chart(caption, f"{y_label} by {x_label}", [line.name for line in lines], draw)


def bar_chart(
    caption: str, groups: Sequence[str], bars: Sequence[tuple[str, Sequence[float]]], y_label: str, *,
    x_label: str = "", stacked: bool = False, digits: int = 1,
) -> Chart | None:  # fmt: skip
    """Bars beside or upon each other: `bars` holds (name, a value for each group); below zero is drawn as zero."""
    if not groups or not bars:
        return None
    columns = np.nan_to_num(np.maximum([values for _, values in bars], 0.0))

    def draw(axes: Any, tip: Tip) -> None:
        width = (0.72 if len(groups) < 20 else 0.86) / (1 if stacked else len(bars))
        base = np.zeros(len(groups))
        for i, ((name, _), column) in enumerate(zip(bars, columns, strict=True)):
            place = np.arange(len(groups)) + (0 if stacked else width * (i - (len(bars) - 1) / 2))
            drawn = axes.bar(place, column, width, base, color=COLOURS[i % len(COLOURS)])
            base = base + column if stacked else base
            for group, value, bar in zip(groups, column, drawn, strict=True):
                tip(bar, f"{_clean(group)}, {_clean(name)}: {value:.{digits}f}")
            if not stacked and width / len(groups) > 0.055:
                axes.bar_label(drawn, fmt=f"{{:.{digits}f}}", fontsize=7.5, color=TEXT, padding=1)
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

    def draw(axes: Any, tip: Tip) -> None:
        for y, row in enumerate(rows):
            colour, text = COLOURS[row.colour % len(COLOURS)], f"{_clean(row.name)}: {row.mean:.2f}"
            if row.ends is not None:
                axes.plot(row.ends, (y, y), color=colour)
                text += f" ({row.ends[0]:.2f} to {row.ends[1]:.2f})"
            for value in row.values:
                tip(_dot(axes, value, y, 1.9, COLOURS[1]), f"{_clean(row.name)}: {value:.2f}")
            tip(_dot(axes, row.mean, y, 3.3, colour), text)
            place = axes.get_yaxis_transform()
            axes.text(1.02, y, f"{row.mean:.2f}", va="center", fontsize=8, color=TEXT, transform=place)
        axes.set_yticks(range(len(rows)), names, color=TEXT)
        axes.set(xlabel=_clean(x_label), ylim=(len(rows) - 0.5, -0.5))
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")

    about = "; ".join([x_label, *(f"{row.name} {row.mean:.2f}" for row in rows)])
    left = 0.04 + 0.0125 * max(map(len, names))
    return Chart(caption, about, (), draw, (5.6, 0.8 + 0.22 * len(rows)), left, 0.9)


def _dot(axes: Any, x: float, y: float, points: float, colour: str) -> Any:
    """A dot of that radius as a path of its own: markers of lines share an id, which another figure could have too."""
    from matplotlib.patches import Circle
    from matplotlib.transforms import Affine2D, ScaledTranslation

    place = Affine2D().scale(points) + ScaledTranslation(x, y, axes.transData)
    axes.update_datalim([(x, y)])
    axes.autoscale_view()
    return axes.add_artist(Circle((0, 0), 1, facecolor=colour, transform=place, zorder=3))


def _thinned(values: Sequence[float]) -> list[float]:
    parts = np.array_split(np.asarray(values, dtype=np.float64), max(min(len(values), MAX_POINTS), 1))
    return [float(part[np.isfinite(part)].mean()) if np.isfinite(part).any() else math.nan for part in parts]


def _clean(text: str) -> str:
    """Text that a font can be asked for: no lone surrogates, nothing but white space below a blank."""
    return re.sub(r"[\x00-\x1f]", " ", str(text).encode("utf-8", "replace").decode())
