"""The page of changes: every figure with its bounds, nothing loaded, nothing unescaped, also where there is nothing."""

from __future__ import annotations

from typing import Any

from html_page import Page

from unidec.data.profile import LENGTH_EDGES
from unidec.evaluation.drift_checks import Check
from unidec.evaluation.drift_page import DriftReport, render

CHECKS = [
    Check("fine", "a share", "share", 0.05, 0.06, (None, 0.1), (None, 0.2), 0.01),
    Check("worse", "queries <b>", "count", 1000, 1200, (900, 1100), (500, 1500)),
    Check("bad", "lengths", "distance", None, 0.7, (None, 0.1), (None, 0.5), 0.02),
]


def side(words: dict[str, int], first: int) -> dict[str, Any]:
    histogram = [0] * len(LENGTH_EDGES)
    histogram[first] = 10
    return {"length": {"histogram": histogram}, "words": {"count": 100, "top": words}}


def page(**changes: Any) -> Page:
    values: dict[str, Any] = {"title": "Change", "verdict": "1 stops", "judged": True, "names": ("before", "now")}
    html = render(DriftReport(**(values | {"checks": CHECKS} | changes)))
    assert "<script" not in html and "http:" not in html and "https:" not in html
    return Page(html)


def test_what_stops_comes_first_with_its_bounds() -> None:
    shown = page(old=side({"red": 10, "old": 4}, 3), new=side({"red": 2, "<i>new</i>": 9}, 5),
                 links=[("docs/index.html", "Data Docs")], facts={"sha": "<x>"})  # fmt: skip
    assert shown.open == []
    rows = [row for row in shown.rows if row and row[0] in ("a share", "queries <b>", "lengths")]
    assert [row[0] for row in rows] == ["lengths", "queries <b>", "a share"]
    assert rows[0][1:] == ["stops", "–", "0.700", "", "at most 0.100", "at most 0.500", "0.020"]
    assert rows[1][1:] == ["warns", "1,000", "1,200", "+20.0%", "900 to 1,100", "500 to 1,500", ""]
    assert rows[2][1:] == ["ok", "5.00%", "6.00%", "+1.00 pp", "at most 10.0%", "at most 20.0%", "1.00%"]
    assert shown.row("<i>new</i>") == ["<i>new</i>", "below 4.00%", "9.00%"]
    assert shown.row("red") == ["red", "10.00%", "2.00%"]
    assert ("href", "docs/index.html") in shown.attributes and shown.tags.count("svg") == 1


def test_a_word_that_may_have_moved_either_way_is_left_out() -> None:
    """ "rare" has at most 3% now, 2% before: it cannot be said that it became rarer."""
    shown = page(old=side({"a": 50, "rare": 2}, 0), new=side({"a": 40, "b": 3}, 0))
    assert not [row for row in shown.rows if row[0] == "rare"]
    assert shown.row("a") == ["a", "50.00%", "40.00%"]


def test_a_window_has_no_stops_and_nothing_to_compare_is_a_page_too() -> None:
    shown = page(checks=[Check("x", "a window's", "share", None, 0.3, (None, 0.2))])
    assert "stops unless" not in shown.words and "warns unless" in shown.words
    shown = page(checks=[], judged=False, verdict="no champion yet")
    assert "no champion yet" in shown.words and shown.tags.count("table") == 0


def test_two_charts_of_lengths_and_one_of_scores() -> None:
    both = side({}, 1), side({}, 2)
    shown = page(old=both[0], new=both[1], labels=both, scores=([0.0, 1.0], [0.2, 0.5, 0.9]))
    assert shown.tags.count("svg") == 3
