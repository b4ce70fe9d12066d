"""Charts drawn by matplotlib as inline SVG; the page's style inverts them on a dark screen.

Each mark has its numbers as a title, which browsers show as a tooltip, and each chart has a table.
Percent axes end at
100. matplotlib is imported only when a chart is drawn, because the import takes half a second.
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
MAX_POINTS = 300
# most points of a line with a title and a row in the table; of longer lines means of neighbours
MAX_TITLES = 40
# a separator that occurs in no text
_SVG = "http://www.w3.org/2000/svg"
_TITLES = "titles:"
_BETWEEN = " \u2063"
LONGEST_NAME = 28  # most characters of a name in `range_chart` and `point_chart`
PEER = 5  # index of the peers' colour

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
    """A row of `range_chart`: a mean, the ends of its interval (None: no interval), the single
    values, and the colour's index.
    """

    name: str
    mean: float
    ends: tuple[float, float] | None = None
    values: Sequence[float] = ()
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """A chart that is drawn when the page is rendered.

    Attributes:
        caption: shown above it. about: description for screen readers. legend: names of its lines
        or bars, in order.
        draw: draws on matplotlib's axes; an artist's gid holds the titles of its marks. table: the
        drawn values.
        height: in inches.
    """

    caption: str
    about: str
    legend: Sequence[str]
    draw: Callable[[Any], None]
    table: Table
    height: float = 2.9

    def svg(self) -> Any:
        """The chart as SVG markup, which depends only on the input; matplotlib escapes
        its texts.
        """
        import matplotlib
        from matplotlib.figure import Figure

        buffer = io.BytesIO()
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            # missing from the font here, but not in browsers
            warnings.filterwarnings("ignore", "Glyph")
            figure = Figure(figsize=(5.0, self.height), layout="constrained")
            axes = figure.add_subplot()
            self.draw(axes)
            for limits, set_limits, label in (
                (axes.get_xlim, axes.set_xlim, axes.get_xlabel()),
                (axes.get_ylim, axes.set_ylim, axes.get_ylabel()),
            ):
                if re.search(r"\bpercent\b", label):
                    set_limits(*np.clip(limits(), 0, 100).tolist())
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        return _inline(buffer.getvalue(), self.about)


def line_chart(
    caption: str,
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    y_from_zero: bool = False,
    x_from_zero: bool = False,
) -> Chart | None:
    """Lines over a common x; None if there are no points. Lines of more than `MAX_POINTS` points
    are thinned to means of neighbours.
    """
    if not any(math.isfinite(y) for line in lines for y in line.y):
        return None
    points = [
        list(zip(_thinned(line.x, MAX_TITLES), _thinned(line.y, MAX_TITLES), strict=True))
        for line in lines
    ]
    shown = [own for line, own in zip(lines, points, strict=True) if not line.muted]
    places = sorted({x for own in shown for x, y in own if math.isfinite(y)})
    rows = [[_short(x), *(_short(dict(own).get(x, math.nan)) for own in shown)] for x in places]

    def draw(axes: Any) -> None:
        for i, (line, own) in enumerate(zip(lines, points, strict=True)):
            marker = "o" if line.dots else None
            colour = MUTED if line.muted else COLOURS[i % len(COLOURS)]
            style = (
                {"alpha": 0.35, "linewidth": 0.8, "markersize": 2, "zorder": 1}
                if line.muted
                else {}
            )
            axes.plot(
                _thinned(line.x),
                _thinned(line.y),
                color=colour,
                marker=marker,
                clip_on=not line.dots,
                **style,
            )
            shown = [(x, y) for x, y in own if math.isfinite(x) and math.isfinite(y)]
            titles = [f"{line.name}: {_short(y)}; {x_label}: {_short(x)}" for x, y in shown]
            # invisible marks for the tooltips, larger than the visible ones, so that they are easy
            # to point at
            x, y = np.reshape(shown, (-1, 2)).T
            axes.plot(
                x, y, "o", color=colour, markersize=11, alpha=0, gid=_titles(titles), clip_on=False
            )
        axes.set(xlabel=_clean(x_label), ylabel=_clean(y_label))
        axes.margins(x=0.02)
        axes.set_xlim(left=0 if x_from_zero else None)
        axes.set_ylim(bottom=0 if y_from_zero else None)

    names = [line.name for line in lines if not line.muted]
    return Chart(caption, f"{y_label} by {x_label}", names, draw, Table([x_label, *names], rows))


def point_chart(
    caption: str, x_label: str, y_label: str, points: Sequence[tuple[str, float, float, bool]]
) -> Chart | None:
    """Points (name, x, y, whether it is grey). Those on the Pareto front are labelled. None if
    there are no points.
    """
    points = [point for point in points if math.isfinite(point[1]) and math.isfinite(point[2])]
    if not points:
        return None

    middle = (min(x for _, x, _, _ in points) + max(x for _, x, _, _ in points)) / 2

    def draw(axes: Any) -> None:
        for name, x, y, grey in points:
            best = not any(a >= x and b >= y and (a, b) != (x, y) for _, a, b, _ in points)
            titles = _titles([f"{name}: {x_label} {_short(x)}, {y_label} {_short(y)}"])
            axes.plot(x, y, "o", color=COLOURS[PEER if grey else 0], markersize=5.5, gid=titles)
            if best:
                label = _clean(
                    name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
                )
                left = x < middle
                place = {"textcoords": "offset points", "ha": "left" if x < middle else "right"}
                text = axes.annotate(
                    label, (x, y), (5 if left else -5, 4), color=TEXT, fontsize=7.5, **place
                )
                text.set_in_layout(False)  # names take no room from the axes
        axes.set(xlabel=_clean(x_label), ylabel=_clean(y_label))
        axes.margins(0.08)
        axes.grid(visible=True, axis="both")

    rows = [
        [name, _short(x), _short(y)]
        for name, x, y, _ in sorted(points, key=lambda point: -point[1])
    ]
    return Chart(
        caption, f"{y_label} by {x_label}", (), draw, Table(["system", x_label, y_label], rows), 3.6
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

    def draw(axes: Any) -> None:
        width = (0.72 if len(groups) < 20 else 0.86) / (1 if stacked else len(bars))
        base = np.zeros(len(groups))
        for i, column in enumerate(columns):
            place = np.arange(len(groups)) + (0 if stacked else width * (i - (len(bars) - 1) / 2))
            drawn = axes.bar(place, column, width, base, color=COLOURS[i % len(COLOURS)])
            for patch, group, value in zip(drawn, groups, column, strict=True):
                patch.set_gid(_titles([f"{bars[i][0]}, {group}: {_short(value)}"]))
            base = base + column if stacked else base
            if not stacked and width / len(groups) > 0.055:
                axes.bar_label(drawn, fmt="{:.1f}", fontsize=7.5, color=TEXT, padding=1)
        every = max(1, math.ceil(len(groups) / 12))
        axes.set_xticks(range(0, len(groups), every), [_clean(group) for group in groups[::every]])
        axes.set(xlabel=_clean(x_label), ylabel=_clean(y_label), xlim=(-0.5, len(groups) - 0.5))

    about = f"{y_label} by {x_label}" if x_label else y_label
    names = [name for name, _ in bars]
    rows = [
        [group, *map(_short, own)] for group, own in zip(groups, columns.T.tolist(), strict=True)
    ]
    return Chart(caption, about, names, draw, Table([x_label, *names], rows))


def range_chart(caption: str, rows: Sequence[Range], x_label: str) -> Chart | None:
    """Means with their intervals, one per row; rows without a finite mean are omitted."""
    rows = [row for row in rows if math.isfinite(row.mean)]
    if not rows:
        return None
    names = [_clean(row.name) for row in rows]
    texts = [
        [
            row.name,
            f"{row.mean:.2f}" + (f", {row.ends[0]:.2f} to {row.ends[1]:.2f}" if row.ends else ""),
        ]
        for row in rows
    ]
    names = [
        name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names
    ]

    def draw(axes: Any) -> None:
        for y, row in enumerate(rows):
            colour = COLOURS[row.colour % len(COLOURS)]
            axes.plot(row.ends or (), [y, y] if row.ends else (), color=colour)
            axes.plot(row.values, [y] * len(row.values), "o", color=COLOURS[1], markersize=3.5)
            axes.plot(
                row.mean, y, "o", color=colour, markersize=6.5, gid=_titles([": ".join(texts[y])])
            )
            place = axes.get_yaxis_transform()
            axes.text(
                1.02, y, f"{row.mean:.2f}", va="center", fontsize=8, color=TEXT, transform=place
            )
        axes.set_yticks(range(len(rows)), names, color=TEXT)
        axes.set(xlabel=_clean(x_label), ylim=(len(rows) - 0.5, -0.5))
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")

    about = "; ".join([x_label, *(f"{row.name} {row.mean:.2f}" for row in rows)])
    return Chart(caption, about, (), draw, Table(["", x_label], texts), 0.8 + 0.22 * len(rows))


def _inline(svg: bytes, about: str) -> Any:
    """matplotlib's SVG for use inside a page: without styles and ids that would affect the page,
    and with titles.
    """
    from markupsafe import Markup

    for prefix, name in (("", _SVG), ("xlink", "http://www.w3.org/1999/xlink")):
        ElementTree.register_namespace(prefix, name)
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
        name = parent.get("id", "")
        if parent.tag == f"{{{_SVG}}}g":
            parent.attrib.pop("id", None)
        if name.startswith(_TITLES):
            marks = [node for node in parent.iter() if node.tag == f"{{{_SVG}}}use"] or [parent]
            texts = name.removeprefix(_TITLES).split(_BETWEEN)
            for mark, text in zip(marks, texts, strict=True) if len(marks) == len(texts) else ():
                ElementTree.SubElement(mark, f"{{{_SVG}}}title").text = text
    del root.attrib["width"], root.attrib["height"]
    root.attrib |= {"role": "img", "aria-label": about}
    return Markup(ElementTree.tostring(root, "unicode"))


def _titles(texts: Sequence[str]) -> str:
    return _TITLES + _BETWEEN.join(map(_clean, texts))


def _short(value: float) -> str:
    """A number with four significant digits, a whole number with all digits."""
    return (
        number(int(value))
        if float(value).is_integer()
        else f"{value:,.4g}"
        if math.isfinite(value)
        else "–"
    )


def _thinned(values: Sequence[float], most: int = MAX_POINTS) -> list[float]:
    """At most `most` values, each the mean of the finite values of a group of neighbours."""
    parts = np.array_split(np.asarray(values, dtype=np.float64), max(min(len(values), most), 1))
    return [
        float(part[np.isfinite(part)].mean()) if np.isfinite(part).any() else math.nan
        for part in parts
    ]


def _clean(text: str) -> str:
    """Text that matplotlib can draw: without lone surrogates, and with spaces instead of control
    characters.
    """
    return re.sub(r"[\x00-\x1f]", " ", str(text).encode("utf-8", "replace").decode())
