"""Figures: their marks lie where the numbers are; the same bytes each time, which load nothing."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from unidec.evaluation.figures import (
    COLOURS,
    MUTED,
    PEER,
    Chart,
    Line,
    Range,
    bar_chart,
    line_chart,
    point_chart,
    range_chart,
)

NAN = math.nan
SVG = "{http://www.w3.org/2000/svg}"


def drawn(chart: Chart | None) -> str:
    assert chart is not None
    return str(chart.svg())


def paths(chart: Chart | None, style: str) -> list[list[tuple[float, float]]]:
    """Points of each path of a style that is no marker's."""
    root = ElementTree.fromstring(drawn(chart))
    markers = [path for defined in root.iter(f"{SVG}defs") for path in defined.iter(f"{SVG}path")]
    found = []
    for node in root.iter(f"{SVG}path"):
        if style in node.get("style", "") and node not in markers:
            numbers = [float(text) for text in re.findall(r"-?[\d.]+", node.get("d", ""))]
            found.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
    return found


def dots(chart: Chart | None, colour: str) -> list[tuple[float, float]]:
    nodes = ElementTree.fromstring(drawn(chart)).iter(f"{SVG}use")
    return [
        (float(node.get("x")), float(node.get("y")))
        for node in nodes
        if f"fill: {colour}" in node.get("style")
    ]


def test_lines_lie_where_their_numbers_are_and_break_at_gaps():
    chart = line_chart(
        "c", [Line("a", [0, 1, 2, 3, 4], [0, 10, NAN, 5, 5], dots=True)], "x", "y", y_from_zero=True
    )
    ((x0, y0), (x1, y1), (x3, y3), (x4, y4)) = paths(chart, COLOURS[0])[0]
    expected = 4 * (x1 - x0)
    assert x4 - x0 == pytest.approx(expected, abs=0.01)
    assert y1 < y3 == y4 < y0
    assert x3 - x1 == pytest.approx(2 * (x1 - x0), abs=0.01)
    assert y0 - y3 == pytest.approx((y0 - y1) / 2, abs=0.01)
    assert dots(chart, COLOURS[0]) == [(x0, y0), (x1, y1), (x3, y3), (x4, y4)]
    (long,) = paths(
        line_chart("c", [Line("a", list(range(5000)), [i % 50 for i in range(5000)])], "x", "y"),
        "#2463a6",
    )
    assert 100 < len(long) <= 300
    for y in (
        [3.0],
        [0.0, 0.0],
        [1e-9, 2e-9],
        [-5.0, 1e12],
    ):
        assert "<svg" in drawn(line_chart("c", [Line("a", list(range(len(y))), y)], "x", "y"))
    assert line_chart("c", [Line("a", [], [])], "x", "y") is None
    assert line_chart("c", [], "x", "y") is None


def test_muted_lines_are_grey_and_in_no_table():
    lines = [Line("a", [0, 1], [1, 2]), Line("b", [0, 2], [3, 4], muted=True)]
    chart = line_chart("c", lines, "x", "y")
    assert len(paths(chart, COLOURS[0])) == 1
    assert len(paths(chart, f"stroke: {MUTED}")) >= 1
    assert (
        list(chart.legend) == ["a"]
        and list(chart.table.header) == ["x", "a"]
        and len(chart.table.rows) == 2
    )


def test_points_lie_where_their_numbers_are_and_the_best_are_named():
    points = [
        ("low", 1.0, 1.0, False),
        ("left", 2.0, 9.0, False),
        ("right", 3.0, 5.0, True),
        ("none", NAN, 1.0, False),
    ]
    chart = point_chart("c", "x", "y", points)
    (x_low, y_low), (x_left, y_left) = dots(chart, COLOURS[0])
    ((x_right, y_right),) = dots(chart, COLOURS[PEER])
    expected = (x_right - x_low) / 2
    assert x_left - x_low == pytest.approx(expected, abs=0.01)
    assert y_low - y_right == pytest.approx((y_low - y_left) / 2, abs=0.01)
    assert [name for name in ("low", "left", "right") if f">{name}</text>" in drawn(chart)] == [
        "left",
        "right",
    ]
    assert point_chart("c", "x", "y", points[3:]) is None
    assert [row[0] for row in chart.table.rows] == ["right", "left", "low"]
    assert chart.table.rows[2] == ["low", "1", "1"]


def test_bars_are_as_high_as_their_numbers():
    def heights(chart: Chart | None, colour: str) -> list[float]:
        return [
            max(y for _, y in path) - min(y for _, y in path)
            for path in paths(chart, f"fill: {colour}")
        ]

    chart = bar_chart("c", ["g", "h"], [("a", [10.0, 5.0]), ("b", [-3.0, NAN])], "y")
    first, second = heights(chart, COLOURS[0])
    assert first == pytest.approx(2 * second)
    assert heights(chart, COLOURS[1]) == [0, 0]
    assert all(f">{text}<" in drawn(chart) for text in ("10.0", "5.0", "0.0", "g", "h"))
    stacked = bar_chart("c", ["g"], [("a", [1.0]), ("b", [3.0])], "y", stacked=True)
    of_low, of_high = (heights(stacked, colour)[0] for colour in COLOURS[:2])
    assert of_high == pytest.approx(3 * of_low)
    low, high = (paths(stacked, f"fill: {colour}")[0] for colour in COLOURS[:2])
    bottom = max(y for _, y in high)
    top = min(y for _, y in low)
    assert bottom == pytest.approx(top)
    assert bar_chart("c", [], [], "y") is None


def test_ranges_lie_where_their_numbers_are():
    rows = [
        Range("a", 10.0, 1.0, [9.0, 11.0]),
        Range("b", 20.0, colour=5),
        Range("c", NAN),
    ]
    chart = range_chart("c", rows, "x")
    ((left, _), (right, _)) = paths(chart, f"stroke: {COLOURS[0]}")[0]
    assert [x for x, _ in dots(chart, COLOURS[1])] == [left, right]
    ((mean, y),) = dots(chart, COLOURS[0])
    ((other, below),) = dots(chart, COLOURS[5])
    expected = 5 * (right - left)
    assert other - mean == pytest.approx(expected, abs=0.01)
    assert below > y
    assert chart.about == "x; a 10.00; b 20.00"
    assert range_chart("c", [], "x") is None
    assert "a very long name a very lon…" in drawn(
        range_chart("c", [Range("a very long name " * 5, 1.0)], "x")
    )


def test_each_figure_has_a_table_behind_it():
    lines = [Line("loss", [1, 2, 3], [0.5, NAN, 0.25]), Line("<b>", [2], [1234567.0], dots=True)]
    chart = line_chart("c", lines, "step", "y")
    assert chart is not None
    assert chart.table.header == ["step", "loss", "<b>"]
    assert chart.table.rows == [["1", "0.5", "–"], ["2", "–", "1,234,567"], ["3", "0.25", "–"]]
    bars = bar_chart("c", ["g", "h"], [("a", [10.0, 5.0]), ("b", [3.0, NAN])], "y", x_label="x")
    assert bars is not None
    expected = [["g", "10", "3"], ["h", "5", "0"]]
    assert bars.table.rows == expected
    ranges = range_chart("c", [Range("a", 10.0, 1.0), Range("b", 20.0)], "x")
    assert ranges is not None
    assert ranges.table.rows == [["a", "10.00, 9.00 to 11.00"], ["b", "20.00"]]
    long = line_chart("c", [Line("a", range(1000), range(1000))], "x", "y")
    assert long is not None and len(long.table.rows) == 40


@pytest.mark.parametrize(
    ("label", "most"), [("percent, test split", 100.0), ("percentage points", 105.0)]
)
def test_an_axis_in_percent_ends_at_a_hundred(label, most):
    chart = bar_chart("c", ["g"], [("a", [100.0])], label)
    assert chart is not None
    seen: list[Any] = []

    def draw(axes: Any) -> None:
        chart.draw(axes)
        seen.append(axes)

    dataclasses.replace(chart, draw=draw).svg()
    expected = pytest.approx((0.0, most))
    assert seen[0].get_ylim() == expected
    assert seen[0].get_xlim() == (-0.5, 0.5)


def test_the_same_bytes_whatever_the_texts_hold():
    chart = bar_chart("c", ["$a$_b", "\ud800\x00😀\n<i>"], [("$a$_b", [1.0, 2.0])], "y & y")
    svg = drawn(chart)
    assert (
        svg == drawn(chart)
        and "$a$_b" in svg
        and not re.search(r'(src|href)="(?!#)|<style|\bid="figure', svg)
    )
    assert "width=" not in svg.split(">")[0]
    assert "&lt;i&gt;" in svg
    assert "y &amp; y" in svg
