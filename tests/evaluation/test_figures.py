"""Figures: their marks lie where the numbers are, in the page's colours, with tooltips; the same bytes each time."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from unidec.evaluation.figures import Chart, Line, Range, bar_chart, line_chart, range_chart

NAN = math.nan


def paths(chart: Chart | None, colour: str) -> list[list[tuple[float, float]]]:
    """Points of each path of a colour."""
    assert chart is not None
    found = []
    for node in ElementTree.fromstring(chart.svg()).iter("path"):
        if colour in node.get("style", ""):
            numbers = [float(text) for text in re.findall(r"-?[\d.]+", node.get("d", ""))]
            found.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
    return found


def tips(chart: Chart | None) -> dict[str, tuple[float, float]]:
    """Middle of each mark that has a tooltip."""
    assert chart is not None
    found = {}
    for node in ElementTree.fromstring(chart.svg()).iter("g"):
        title, path = node.find("title"), node.find(".//path")
        if title is not None and path is not None:
            numbers = [float(text) for text in re.findall(r"-?[\d.]+", path.get("d", ""))]
            x, y = numbers[::2], numbers[1::2]
            found[title.text or ""] = ((min(x) + max(x)) / 2, (min(y) + max(y)) / 2)
    return found


def test_lines_lie_where_their_numbers_are_and_break_at_gaps():
    chart = line_chart("c", [Line("a", [0, 1, 2, 3, 4], [0, 10, NAN, 5, 5])], "x", "y", y_from_zero=True)
    ((x0, y0), (x1, y1), (x3, y3), (x4, y4)) = paths(chart, "var(--s0)")[0]
    assert chart.svg().count("M ") and x4 - x0 == pytest.approx(4 * (x1 - x0), abs=0.01) and y1 < y3 == y4 < y0
    assert x3 - x1 == pytest.approx(2 * (x1 - x0), abs=0.01) and y0 - y3 == pytest.approx((y0 - y1) / 2, abs=0.01)
    (long,) = paths(line_chart("c", [Line("a", list(range(5000)), [i % 50 for i in range(5000)])], "x", "y"), "--s0")
    assert 100 < len(long) <= 300
    for y in ([3.0], [0.0, 0.0], [1e-9, 2e-9], [-5.0, 1e12]):
        assert "<svg" in line_chart("c", [Line("a", list(range(len(y))), y)], "x", "y").svg()
    assert line_chart("c", [Line("a", [], [])], "x", "y") is None and line_chart("c", [], "x", "y") is None


def test_dots_have_tooltips():
    found = tips(line_chart("c", [Line("a<b>", [0.0, 2.0, 3.0], [1.0, 5.0, NAN], dots=True)], "x", "y"))
    (first, low), (second, high) = found["a<b>: 1 at 0"], found["a<b>: 5 at 2"]
    assert first < second and low > high and len(found) == 2


def test_bars_are_as_high_as_their_numbers():
    def heights(chart: Chart | None, colour: str) -> list[float]:
        return [max(y for _, y in path) - min(y for _, y in path) for path in paths(chart, f"fill: {colour}")]

    chart = bar_chart("c", ["g", "h"], [("a", [10.0, 5.0]), ("b", [-3.0, NAN])], "y")
    first, second = heights(chart, "var(--s0)")
    assert first == pytest.approx(2 * second) and heights(chart, "var(--s1)") == [0, 0]
    assert list(tips(chart)) == ["g, a: 10.0", "h, a: 5.0", "g, b: 0.0", "h, b: 0.0"]
    stacked = bar_chart("c", ["g"], [("a", [1.0]), ("b", [3.0])], "y", stacked=True)
    assert heights(stacked, "var(--s1)")[0] == pytest.approx(3 * heights(stacked, "var(--s0)")[0])
    low, high = (paths(stacked, f"fill: var(--s{i})")[0] for i in (0, 1))
    assert max(y for _, y in high) == pytest.approx(min(y for _, y in low))
    assert bar_chart("c", [], [], "y") is None


def test_ranges_lie_where_their_numbers_are():
    rows = [Range("a", 10.0, (9.0, 11.0), [9.0, 11.0]), Range("b", 20.0, colour=5), Range("c", NAN)]
    chart = range_chart("c", rows, "x")
    at = tips(chart)
    ((left, _), (right, _)) = paths(chart, "fill: none; stroke: var(--s0)")[0]
    assert at["a: 9.00"][0] == pytest.approx(left) and at["a: 11.00"][0] == pytest.approx(right)
    mean = at["a: 10.00 (9.00 to 11.00)"]
    assert at["b: 20.00"][0] - mean[0] == pytest.approx(5 * (right - left)) and at["b: 20.00"][1] > mean[1]
    assert not [text for text in at if text.startswith("c")] and range_chart("c", [], "x") is None
    assert "a very long name a very lon…" in range_chart("c", [Range("a very long name " * 5, 1.0)], "x").svg()


def test_the_same_bytes_in_the_pages_colours_and_nothing_that_two_figures_would_share():
    chart = bar_chart("c", ["g"], [("$a$_b", [1.0]), ("\ud800\x00😀\n<i>", [2.0])], "y & y")
    svg = chart.svg()
    assert svg == chart.svg() and not re.search(r'#[0-9a-f]{6}|url\(|https?:|<style| id="|xlink|<metadata', svg)
    assert "$a$_b" in svg and "&lt;i&gt;" in svg and 'aria-label="y &amp; y: $a$_b' in svg


def test_ticks_name_the_values_that_they_stand_at():
    for high in (0.07, 12.5, 1234.0):
        svg = line_chart("c", [Line("a", [0, 1], [0.0, high])], "x", "y", y_from_zero=True).svg()
        ticks = re.findall(r'text-anchor: end[^>]* y="([\d.]+)"[^>]*>([\d.]+)<', svg)
        places, values = [float(place) for place, _ in ticks], [float(text) for _, text in ticks]
        steps = {round((b - a) / (d - c), 2) for (a, b), (c, d) in zip(pairwise(places), pairwise(values), strict=True)}
        assert len(values) >= 4 and len(steps) == 1
