"""Charts as inline SVG: lines, bars and ranges whose colours follow the page (light, dark, print).

Colours are CSS variables `--s0` to `--s7` of the page; from the ninth on they come again with broken strokes. Nothing
here needs a script or a network.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 44
NAME_WIDTH, CHARACTER = 215, 7.6  # of the names in `range_chart`: at most, and of a letter
ROW = 20  # height of a row of `range_chart`
MAX_POINTS = 300
NUM_COLOURS = 8


@dataclass(frozen=True)
class Line:
    """One line of a chart: x and y of the same length; a y that is not finite leaves a gap; dashed lines are
    references.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    dots: bool = False


def line_chart(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    y_from_zero: bool = False,
    x_from_zero: bool = False,
    y_range: tuple[float, float] | None = None,
    x_range: tuple[float, float] | None = None,
) -> str:
    """Lines over a common x; more than 300 points of a line are drawn as means of neighbours."""
    lines = [_thinned(line) for line in lines]
    points = [(x, y) for line in lines for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_axis = _Axis(*(x_range or (0.0 if x_from_zero else min(xs), max(xs))), LEFT, WIDTH - RIGHT, tight=True)
    low, high = y_range or (0.0 if y_from_zero else min(ys), max(ys))
    y_axis = _Axis(low, high, HEIGHT - BOTTOM, TOP, tight=y_range is not None)
    body = [_frame(x_axis, y_axis, x_label, y_label)]
    for i, line in enumerate(lines):
        dashes = " dashed" if line.dashed else _again(i)
        style = f'class="line{dashes}" style="stroke:var(--s{i % NUM_COLOURS})"'
        body.extend(f'<polyline {style} points="{run}"/>' for run in _runs(line, x_axis, y_axis))
        if line.dots:
            body.extend(_dots(line, i, x_axis, y_axis))
    return _figure(body, [line.name for line in lines], f"{y_label} by {x_label}")


def bar_chart(
    groups: Sequence[str],
    bars: Sequence[tuple[str, Sequence[float]]],
    y_label: str,
    *,
    x_label: str = "",
    stacked: bool = False,
    digits: int = 1,
) -> str:
    """Bars beside or upon each other: `bars` holds (name, a value for each group); values below zero are drawn as
    zero.
    """
    if not groups or not bars:
        return ""
    columns = [[max(0.0, v) if math.isfinite(v) else 0.0 for v in values] for _, values in bars]
    totals = [sum(column[g] for column in columns) for g in range(len(groups))]
    top = max(totals) if stacked else max(max(column) for column in columns)
    y_axis = _Axis(0.0, top or 1.0, HEIGHT - BOTTOM, TOP)
    slot = (WIDTH - LEFT - RIGHT) / len(groups)
    body = [_grid(y_axis, y_label), _x_title(x_label)]
    inner = slot * (0.7 if len(groups) < 20 else 0.86)
    each = inner if stacked else inner / len(bars)
    every = max(1, math.ceil(len(groups) / 12))
    for g, group in enumerate(groups):
        left, base = LEFT + slot * g + (slot - inner) / 2, 0.0
        last = g == len(groups) - 1 and 2 * (g % every) >= every
        if g % every == 0 or last:
            body.append(_text("tick", LEFT + slot * (g + 0.5), HEIGHT - BOTTOM + 16, group))
        for i, (name, _) in enumerate(bars):
            value = columns[i][g]
            low, high = y_axis.at(base), y_axis.at(base + value)
            x = left if stacked else left + each * i
            tip = f"{group}, {name}: {value:.{digits}f}"
            body.append(_bar(i, x, high, each, max(0.0, low - high), tip))
            if not stacked and each >= 24:
                body.append(_text("value", x + each / 2, high - 3, f"{value:.{digits}f}"))
            base += value if stacked else 0.0
    return _figure(body, [name for name, _ in bars], f"{y_label} by {x_label}" if x_label else y_label)


@dataclass(frozen=True)
class Range:
    """A row of `range_chart`: a mean, its spread to both sides (NaN: none), the values behind it, its colour; `ends`
    instead of a spread where the sides differ."""

    name: str
    mean: float
    spread: float = math.nan
    values: Sequence[float] = ()
    colour: int = 0
    ends: tuple[float, float] | None = None


def range_chart(rows: Sequence[Range], x_label: str) -> str:
    """Means with their spreads, a row each; one without a finite mean is left out."""
    rows = [row for row in rows if math.isfinite(row.mean)]
    if not rows:
        return ""
    ends = [v for row in rows for v in (*row.values, row.mean, *_ends(row)) if math.isfinite(v)]
    name_width = min(NAME_WIDTH, 16 + math.ceil(max(len(row.name) for row in rows) * CHARACTER))
    most = int((NAME_WIDTH - 16) / CHARACTER)
    x_axis = _Axis(min(ends), max(ends), name_width, WIDTH - RIGHT - 40)
    bottom = TOP + ROW * len(rows)
    body = []
    for tick in x_axis.ticks:
        x = x_axis.at(tick)
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        body.append(_text("tick", x, bottom + 16, x_axis.label(tick)))
    for r, row in enumerate(rows):
        y = TOP + ROW * (r + 0.5)
        shown = row.name if len(row.name) <= most else row.name[: most - 1] + "…"
        body.append(_text("name", name_width - 10, y + 4, shown, "end"))
        if math.isfinite(sum(_ends(row))):
            low, high = (x_axis.at(end) for end in _ends(row))
            line = f'x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
            body.append(f'<line class="spread" style="stroke:var(--s{row.colour % NUM_COLOURS})" {line}/>')
        body += [_dot(1, x_axis.at(v), y, 2.5, f"{row.name}: {v:.2f}") for v in row.values if math.isfinite(v)]
        tip = f"{row.name}: {row.mean:.2f}" + (f" ± {row.spread:.2f}" if math.isfinite(row.spread) else "")
        tip += f" ({row.ends[0]:.2f} to {row.ends[1]:.2f})" if row.ends else ""
        body.append(_dot(row.colour, x_axis.at(row.mean), y, 4.5, tip))
        body.append(_text("value", x_axis.end + 8, y + 4, f"{row.mean:.2f}", "start"))
    body.append(_text("axis", (x_axis.start + x_axis.end) / 2, bottom + 34, x_label))
    named = [f"{row.name} {row.mean:.2f}" for row in rows]
    return _figure(body, named, x_label, height=bottom + 40, legend=False)


def _ends(row: Range) -> tuple[float, float]:
    return row.ends or (row.mean - row.spread, row.mean + row.spread)


class _Axis:
    """Values to pixels, with round ticks; `tight` keeps the ends as they are."""

    def __init__(self, low: float, high: float, start: float, end: float, tight: bool = False) -> None:
        if high <= low:
            pad = abs(low) * 0.1 or 1.0
            low, high = (low - pad, high + pad) if not tight else (low, low + pad)
        step = _round_step((high - low) / 5)
        if not tight:
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step * 1.02 - 1e-9) * step
        self.low, self.high, self.start, self.end = low, high, start, end
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        self.ticks = [i * step for i in range(first, last + 1)]
        power = math.floor(math.log10(step) + 1e-9)
        self.digits = max(0, -power + (abs(step / 10.0**power - 2.5) < 1e-6))  # a step of 2.5 wants one more

    def at(self, value: float) -> float:
        """Pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def label(self, value: float) -> str:
        """Text of a tick."""
        if self.digits > 3:
            mantissa, _, power = f"{value:.1e}".partition("e")
            return "0" if abs(value) < 1e-12 else f"{mantissa.removesuffix('.0')}e{int(power)}"
        if abs(value) >= 100_000:
            return f"{value / 1000:,.0f}k"
        return f"{value:,.{self.digits}f}"


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= raw * 0.999)


def _thinned(line: Line) -> Line:
    size = len(line.x)
    if size <= MAX_POINTS:
        return line
    cuts = [size * i // MAX_POINTS for i in range(MAX_POINTS + 1)]
    spans = list(itertools.pairwise(cuts))

    def means(values: Sequence[float]) -> list[float]:
        out = []
        for begin, end in spans:
            finite = [v for v in values[begin:end] if math.isfinite(v)]
            out.append(sum(finite) / len(finite) if finite else math.nan)
        return out

    return Line(line.name, means(line.x), means(line.y), line.dashed, line.dots)


def _runs(line: Line, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    """Points of each unbroken piece of a line."""
    runs: list[list[str]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if math.isfinite(y):
            runs[-1].append(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}")
        elif runs[-1]:
            runs.append([])
    return [" ".join(run) for run in runs if run]


def _dots(line: Line, i: int, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    return [
        _dot(i, x_axis.at(x), y_axis.at(y), 3, f"{line.name}: {y:.4g} at {x:.4g}")
        for x, y in zip(line.x, line.y, strict=True)
        if math.isfinite(y)
    ]


def _dot(colour: int, x: float, y: float, radius: float, tip: str) -> str:
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"'
    return f'<circle style="fill:var(--s{colour % NUM_COLOURS})" {place}><title>{escape(tip)}</title></circle>'


def _again(i: int) -> str:
    """Class of strokes whose colour has been used before."""
    return f" again{min(i // NUM_COLOURS, 2)}" if i >= NUM_COLOURS else ""


def _text(kind: str, x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _bar(colour: int, x: float, y: float, width: float, height: float, tip: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect style="fill:var(--s{colour % NUM_COLOURS})" {place}><title>{escape(tip)}</title></rect>'


def _rule(kind: str, y: float) -> str:
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _grid(y_axis: _Axis, y_label: str) -> str:
    parts = []
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        parts += [_rule("grid", y), _text("tick", LEFT - 7, y + 4, y_axis.label(tick), "end")]
    turned = f'transform="translate(12 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)"'
    parts.append(f'<text class="axis" text-anchor="middle" {turned}>{escape(y_label)}</text>')
    return "".join([*parts, _rule("base", HEIGHT - BOTTOM)])


def _frame(x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str) -> str:
    ticks = [_text("tick", x_axis.at(t), HEIGHT - BOTTOM + 16, x_axis.label(t)) for t in x_axis.ticks]
    return _grid(y_axis, y_label) + "".join(ticks) + _x_title(x_label)


def _x_title(text: str) -> str:
    return _text("axis", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, text)


def _figure(body: Sequence[str], names: Sequence[str], about: str, height: int = HEIGHT, legend: bool = True) -> str:
    """The chart with its legend; `about` and the names are what is read aloud."""
    keys = "".join(
        f'<span><i class="key{_again(i)}" style="--c:var(--s{i % NUM_COLOURS})"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    above = f'<div class="legend">{keys}</div>' if legend and len(names) > 1 else ""
    spoken = escape(f"{about}: {', '.join(names)}", quote=True)
    return f'{above}<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{spoken}">{"".join(body)}</svg>'
