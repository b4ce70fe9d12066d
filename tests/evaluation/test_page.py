"""Tables and numbers of a page."""

from __future__ import annotations

import re

from helpers.html_page import Page

from unidec.evaluation.page import Shown, Table, _environment, number


def shown(table: Table) -> str:
    return str(_environment().get_template("parts.html.jinja").module.show(table))


def test_cells_of_a_table():
    rows = [
        ["a", Shown("1.50", 1.5, " ± 0.1", "right"), 7.0],
        ["<b>", Shown("–"), 3.0],
        ["c", 1.25, None],
    ]
    html = shown(
        Table(
            ["name", "up", "more"],
            rows,
            best=True,
            kinds=["base"],
            caption="cap<",
        )
    )
    assert re.findall(r'<b class="best">([^<]*)</b>', html) == ["1.50", "7.00"]
    assert (
        '<tr class="base">' in html
        and "cap&lt;" in html
        and "<b>" not in html
        and "<small> ± 0.1</small>" in html
    )
    assert Page(html).open == []
    assert shown(Table(["a"], [])).strip() == ""


def test_of_equals_none_is_the_best():
    html = shown(Table(["name", "same", "one"], [["a", 1.0, None], ["b", 1.0, 2.0]], best=True))
    assert re.findall(r'<b class="best">([^<]*)</b>', html) == ["2.00"]


def test_numbers_as_people_read_them():
    values = [None, float("nan"), True, 1234, 1234.5, [1, 2.0], "text"]
    assert [number(value) for value in values] == [
        "–",
        "–",
        "yes",
        "1,234",
        "1,234.50",
        "1, 2.00",
        "text",
    ]
    assert [number(value, exact=True) for value in values[3:6]] == ["1234", "1234.5", "1, 2"]
