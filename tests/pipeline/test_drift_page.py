"""The page of changes: every figure with its bounds, nothing loaded, nothing unescaped, also where
there is nothing.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers.html_page import Page

from unidec.data.profile import LENGTH_EDGES
from unidec.evaluation.drift import Check
from unidec.pipeline.drift_page import Comparison

pytestmark = pytest.mark.usefixtures("drawn")
CHECKS = [
    Check("bad", "lengths", "distance", None, 0.7, (None, 0.1), (None, 0.5), 0.02),
    Check("worse", "queries <b>", "count", 1000, 1200, (900, 1100), (500, 1500)),
    Check("fine", "a share", "share", 0.05, 0.06, (None, 0.1), (None, 0.2), 0.01),
]


def side(words: dict[str, int], first: int, **more: Any) -> dict[str, Any]:
    histogram = [0] * len(LENGTH_EDGES)
    histogram[first] = 10
    return {
        "queries": {"length": {"histogram": histogram}, "words": {"count": 100, "top": words}}
    } | more


def page(**changes: Any) -> Page:
    values: dict[str, Any] = {
        "title": "Change",
        "names": ("before", "now"),
        "old": {},
        "new": {},
        "checks": CHECKS,
        "reason": "",
        "facts": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        Comparison(**(values | changes)).write(Path(folder))
        html = (Path(folder) / "index.html").read_text()
    html = re.sub(r' xmlns(:\w+)?="[^"]*"', "", html)  # names, not addresses
    assert "<script" not in html and "http:" not in html and "https:" not in html
    return Page(html)


def test_what_stops_comes_first_with_its_bounds() -> None:
    shown = page(
        old=side({"red": 10, "old": 4}, 3),
        new=side({"red": 2, "<i>new</i>": 9}, 5),
        facts={"sha": "<x>"},
    )
    assert shown.open == []
    rows = [row for row in shown.rows if row and row[0] in ("a share", "queries <b>", "lengths")]
    assert [row[0] for row in rows] == ["lengths", "queries <b>", "a share"]
    expected = ["stops", "–", "0.700", "at most 0.100", "at most 0.500", "0.020"]
    assert rows[0][1:] == expected
    assert rows[1][1:] == ["warns", "1,000", "1,200", "900 to 1,100", "500 to 1,500", ""]
    assert rows[2][1:] == ["ok", "5.00%", "6.00%", "at most 10.0%", "at most 20.0%", "1.00%"]
    assert shown.row("<i>new</i>") == ["<i>new</i>", "–", "9.00%"]
    assert shown.row("red") == ["red", "10.00%", "2.00%"]
    assert shown.tags.count("svg") == 1


def test_a_window_has_no_stops_and_nothing_to_compare_is_a_page_too() -> None:
    shown = page(checks=[Check("x", "a window's", "share", None, 0.3, (None, 0.2))])
    assert "stops unless" not in shown.words and "warns unless" in shown.words
    shown = page(checks=[], reason="no champion yet")
    assert "no champion yet" in shown.words
    assert shown.tags.count("table") == 0


def test_two_charts_of_lengths_and_one_of_scores() -> None:
    old, new = (
        side({}, i, labels=side({}, i)["queries"], served={"score_quantiles": [0.0, i]})
        for i in (1, 2)
    )
    assert page(old=old, new=new).tags.count("svg") == 3
