"""Charts drawn by matplotlib as inline SVG; the page's style inverts them on a dark screen.

Each chart has a table of its numbers. Percent axes end at 100. matplotlib is imported only when a
chart is drawn, because the import takes half a second.
"""

from __future__ import annotations

import io
import math
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unidec.evaluation.page import Table, number

COLOURS = ("#2463a6", "#c8610a", "#2c8a57", "#7d4bb5", "#b83a5e", "#64748b", "#0e8a94", "#8a6d1a")
TEXT = "#1c2430"
MUTED = "#5b6675"
RULE = "#dde2e9"
MAX_POINTS = 300  # per drawn line; in longer lines, neighbouring points are averaged
MAX_ROWS = 40  # per line in the table
LONGEST_NAME = 28  # maximum characters of a name in `range_chart` and `point_chart`
PEER = 5  # index of the peers' colour
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "unidec",
    "text.parse_math": False,
    "font.size": 8,
    "text.color": MUTED,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.edgecolor": MUTED,
    "grid.color": RULE,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}


@dataclass(frozen=True)
class Line:
    """One line of a chart: x and y of the same length; a y that is not finite leaves a gap. `muted`
    lines are grey and have no column in the table; they come after the coloured ones.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False
    muted: bool = False


@dataclass(frozen=True)
class Range:
    """A row of `range_chart`: a mean, the half width of its interval (NaN: no interval), the single
    values, and the colour's index.
    """

    name: str
    mean: float
    spread: float = math.nan
    values: Sequence[float] = ()
    colour: int = 0

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval."""
        return self.mean - self.spread, self.mean + self.spread

    @property
    def figure(self) -> str:
        """The mean as displayed."""
        return f"{self.mean:.2f}"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart that is drawn when the page is rendered.

    Attributes:
        caption: shown above the chart. about: description for screen readers; "": the labels.
        legend: names of its lines or bars, in order.
        draw: draws on matplotlib's axes.
        table: the drawn values.
        height: in inches.
    """

    caption: str
    x_label: str
    y_label: str = ""
    about: str = ""
    legend: Sequence[str] = ()
    draw: Callable[[Any], None]
    table: Table
    height: float = 2.9

    def svg(self) -> Any:
        """The chart as SVG markup, which depends only on the input; all texts are escaped."""
        import matplotlib
        from matplotlib.figure import Figure

        buffer = io.BytesIO()
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            # glyphs that are missing from this font, but not in browsers
            warnings.filterwarnings("ignore", "Glyph")
            figure = Figure(figsize=(5.0, self.height), layout="constrained")
            axes = figure.add_subplot()
            self.draw(axes)
            for axis, label in ((axes.xaxis, self.x_label), (axes.yaxis, self.y_label)):
                axis.set_label_text(_clean(label))
                if re.search(r"\bpercent\b", label):
                    low, high = np.clip(axis.get_view_interval(), 0, 100)
                    axis.set_view_interval(low, high, ignore=True)
            figure.savefig(buffer, format="svg", transparent=True)
        labels = filter(None, (self.y_label, self.x_label))
        return _inline(buffer.getvalue(), self.about or " by ".join(labels))


def line_chart(
    caption: str,
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    y_from_zero: bool = False,
    x_from_zero: bool = False,
) -> Chart | None:
    """Lines over a common x; None if there are no points."""
    if not any(math.isfinite(y) for line in lines for y in line.y):
        return None

    def draw(axes: Any) -> None:
        for i, line in enumerate(lines):
            style: dict[str, Any] = {"color": _colour(i)}
            if line.muted:
                style = {"color": MUTED, "alpha": 0.35, "linewidth": 0.8, "markersize": 2}
                style |= {"zorder": 1}
            if line.dots:
                style |= {"marker": "o", "clip_on": False}
            axes.plot(_thinned(line.x), _thinned(line.y), **style)
        axes.margins(x=0.02)
        axes.set_xlim(left=0 if x_from_zero else None)
        axes.set_ylim(bottom=0 if y_from_zero else None)

    names = []
    columns = []
    for line in lines:
        if not line.muted:
            points = zip(_thinned(line.x, MAX_ROWS), _thinned(line.y, MAX_ROWS), strict=True)
            columns.append({x: y for x, y in points if math.isfinite(y)})
            names.append(line.name)
    rows = [
        [_short(x), *(_short(column.get(x)) for column in columns)]
        for x in sorted(set().union(*columns))
    ]
    return Chart(
        caption=caption,
        x_label=x_label,
        y_label=y_label,
        legend=names,
        draw=draw,
        table=Table([x_label, *names], rows),
    )


def point_chart(
    caption: str, x_label: str, y_label: str, points: Sequence[tuple[str, float, float, bool]]
) -> Chart | None:
    """A scatter chart of points (name, x, y, whether it is grey). Names are shown on the Pareto
    front only. None if there are no points.
    """
    points = [point for point in points if all(map(math.isfinite, point[1:3]))]
    if not points:
        return None
    xs = [x for _, x, _, _ in points]
    middle = (min(xs) + max(xs)) / 2

    def draw(axes: Any) -> None:
        for name, x, y, grey in points:
            colour = COLOURS[PEER if grey else 0]
            axes.plot(x, y, "o", color=colour, markersize=5.5)
            better = [(a, b) for _, a, b, _ in points if a >= x and b >= y]
            if set(better) != {(x, y)}:
                continue
            side, shift = ("left", 5) if x < middle else ("right", -5)
            text = axes.annotate(
                _abridged(name),
                xy=(x, y),
                xytext=(shift, 4),
                textcoords="offset points",
                ha=side,
                color=TEXT,
                fontsize=7.5,
            )
            text.set_in_layout(False)  # names take no room from the axes
        axes.margins(0.08)
        axes.grid(visible=True, axis="both")

    falling = sorted(points, key=lambda point: -point[1])
    rows = [[name, _short(x), _short(y)] for name, x, y, _ in falling]
    return Chart(
        caption=caption,
        x_label=x_label,
        y_label=y_label,
        draw=draw,
        table=Table(["system", x_label, y_label], rows),
        height=3.6,
    )


def bar_chart(
    caption: str,
    groups: Sequence[str],
    bars: Sequence[tuple[str, Sequence[float]]],
    y_label: str,
    *,
    x_label: str = "",
    stacked: bool = False,
) -> Chart | None:
    """Grouped or stacked bars: `bars` holds (name, a value for each group). Negative values are
    drawn as 0.
    """
    if not groups or not bars:
        return None
    columns = np.nan_to_num(np.maximum([values for _, values in bars], 0.0))
    num_groups = len(groups)

    def draw(axes: Any) -> None:
        width = 0.72 if num_groups < 20 else 0.86
        place = np.arange(num_groups, dtype=np.float64)
        if not stacked:
            width /= len(bars)
            place -= width * (len(bars) - 1) / 2
        base = np.zeros(num_groups)
        for i, column in enumerate(columns):
            drawn = axes.bar(place, column, width, base, color=_colour(i))
            if stacked:
                base = base + column
                continue
            place = place + width
            if width / num_groups > 0.055:
                axes.bar_label(drawn, fmt="{:.1f}", fontsize=7.5, color=TEXT, padding=1)
        every = math.ceil(num_groups / 12)
        axes.set_xticks(range(0, num_groups, every), map(_clean, groups[::every]))
        axes.set_xlim(-0.5, num_groups - 0.5)

    names = [name for name, _ in bars]
    cells = zip(groups, columns.T.tolist(), strict=True)
    return Chart(
        caption=caption,
        x_label=x_label,
        y_label=y_label,
        legend=names,
        draw=draw,
        table=Table([x_label, *names], [[group, *map(_short, values)] for group, values in cells]),
    )


def range_chart(caption: str, rows: Sequence[Range], x_label: str) -> Chart | None:
    """Means with their intervals, one per row; rows without a finite mean are omitted."""
    rows = [row for row in rows if math.isfinite(row.mean)]
    if not rows:
        return None

    def draw(axes: Any) -> None:
        beside = axes.get_yaxis_transform()
        for y, row in enumerate(rows):
            colour = _colour(row.colour)
            axes.plot(row.ends, [y, y], color=colour)
            places = [y] * len(row.values)
            axes.plot(row.values, places, "o", color=COLOURS[1], markersize=3.5)
            axes.plot(row.mean, y, "o", color=colour, markersize=6.5)
            axes.text(1.02, y, row.figure, va="center", fontsize=8, color=TEXT, transform=beside)
        names = [_abridged(row.name) for row in rows]
        axes.set_yticks(range(len(rows)), names, color=TEXT)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")

    texts = []
    for row in rows:
        text = row.figure
        if math.isfinite(row.spread):
            text += ", {:.2f} to {:.2f}".format(*row.ends)
        texts.append([row.name, text])
    means = [f"{row.name} {row.figure}" for row in rows]
    return Chart(
        caption=caption,
        x_label=x_label,
        about="; ".join([x_label, *means]),
        draw=draw,
        table=Table(["", x_label], texts),
        height=0.8 + 0.22 * len(rows),
    )


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _inline(svg: bytes, about: str) -> Any:
    """matplotlib's SVG for use inside a page: without styles and ids that would affect the page."""
    from markupsafe import Markup

    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(svg)
    for group in root.iter(f"{{{_SVG}}}g"):
        group.attrib.pop("id", None)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    del root.attrib["width"], root.attrib["height"]
    root.attrib |= {"role": "img", "aria-label": about}
    return Markup(ElementTree.tostring(root, "unicode"))


def _short(value: float | None) -> str:
    """A number with four significant digits; an integer with all digits."""
    if value is None or not math.isfinite(value):
        return number(None)
    if float(value).is_integer():
        return number(int(value))
    return f"{value:,.4g}"


def _thinned(values: Sequence[float], most: int = MAX_POINTS) -> list[float]:
    """At most `most` values, each the mean of the finite values of a group of neighbours."""
    if len(values) <= most:
        return [float(value) for value in values]
    thinned = []
    for part in np.array_split(np.asarray(values, dtype=np.float64), most):
        finite = part[np.isfinite(part)]
        thinned.append(float(finite.mean()) if len(finite) else math.nan)
    return thinned


def _abridged(name: str) -> str:
    name = _clean(name)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _clean(text: str) -> str:
    """Text that matplotlib can draw: without lone surrogates and control characters."""
    drawable = str(text).encode("utf-8", "replace").decode()
    return re.sub(r"[\x00-\x1f]", " ", drawable)
