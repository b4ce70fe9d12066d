"""The comparison's page: means, spreads, marks, differences; hostile, missing and odd input."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.html_page import Page

from unidec.evaluation.comparison_page import (
    Cell,
    ComparisonInput,
    Run,
    Task,
    _curve,
    difference_to,
    ranked,
    render_comparison,
    summary,
    write_comparison,
)
from unidec.evaluation.significance import Comparison

HOSTILE = "</td></table><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\x00\ud800"
METRICS = ("P@1", "P@5", "nDCG@5", "PSP@5", "R@10", "R@100", "coverage@5")
SEEDS = (0, 1, 2)
GRID = {"tail": 1.5, "torso": 2.5, "head": 3.5}


def _run(seed: int, level: float, text: str = "x", peer: bool = False) -> Run:
    metrics = {name: level + seed / 10 + i for i, name in enumerate(METRICS)}
    metrics |= {
        f"{g}/{m}": v + level
        for g, v in GRID.items()
        for m in ("P@5", "PSP@5", "R@10", "coverage@5")
    }
    costs = {
        "train_seconds": 100.0 + level,
        "total_seconds": 200.0,
        "peak_memory_bytes": 5e8,
        "work_seconds": 90.0 + level,
        "search_ms": 0.25,
        "parameters": 123456,
        text: 1.0,
    }
    if peer:
        return Run(
            seed, metrics, validation={"P@1": level, "PSP@5": level, "R@100": level}, costs=costs
        )
    curve = [
        {
            "round": r,
            "train_seconds": 60.0,
            "refresh": {"refresh_seconds": 30.0},
            "work_seconds": 90.0 * r,
            "validation": {"P@1": level * r / 3, "PSP@5": level, "R@100": level},
        }
        for r in (1, 2, 3)
    ]
    return Run(seed, metrics, costs=costs, curve=curve)


def _full(text: str = "some text", tasks: int = 2) -> ComparisonInput:
    names = [f"{text} {t}" for t in range(tasks)]
    cells = []
    for t, task in enumerate(names):
        for i, name in enumerate((f"{text} a", f"{text} b", f"{text} c")):
            runs = [_run(seed, 40.0 + i + t, text) for seed in SEEDS[: 3 - t]]
            cells.append(Cell(task, name, "recipe", text, text, {text: text}, runs))
        cells.append(
            Cell(task, f"{text} peer", "peer", text, runs=[_run(0, 41.5, text, peer=True)])
        )
        cells.append(Cell(task, f"{text} failed", "recipe"))
    return ComparisonInput(
        title=text,
        date=text,
        about=text,
        notes=[text],
        tasks=[Task(name, text, {text: {text: 1}}) for name in names],
        cells=cells,
        contrasts={
            names[0]: [
                Comparison(
                    f"{text} {one}", f"{text} {other}", "P@1", 0.0, 0.0, *figures, num_queries=9
                )
                for one, other, *figures in (
                    ("c", "peer", 0.6, 0.1, 1.1, 0.01, 0.01),
                    ("a", "peer", -1.4, -2.0, -1.0, 0.0001, 0.0001),
                    ("b", "peer", -0.4, -1.0, 0.2, 0.4, 0.4),
                    ("b", "a", 1.0, 0.5, 1.5, 0.02, 0.02),
                )
            ]
        },
        contrast_note=text,
        groups=[
            {
                "title": text,
                "base": f"{text} a",
                "cells": [f"{text} b", f"{text} c", "no such cell"],
                "about": text,
            }
        ],
        failures=[
            {
                "task": names[0],
                "cell": f"{text} failed",
                "seed": 1,
                "state": "failed",
                "reason": text,
                "log": text,
            }
        ],
        common={text: text},
        lineage={text: text},
    )


def _section(html: str, anchor: str) -> str:
    return re.search(rf'<section id="{anchor}">.*?</section>', html, re.S).group()


def test_every_text_is_escaped(tmp_path):
    write_comparison(tmp_path / "c.html", _full(HOSTILE))
    html = (tmp_path / "c.html").read_text(encoding="utf-8")
    plain_html = render_comparison(_full())
    plain = Page(plain_html)
    hostile = Page(html)
    assert hostile.open == [] and plain.open == []
    assert "script" not in hostile.tags
    assert all(value.startswith("data:") for name, value in hostile.attributes if name == "src")
    assert not [name for name, _ in hostile.attributes if name.startswith("on")]
    assert set(hostile.tags) == set(plain.tags)
    # names decide how many ticks fit
    outside = [
        sorted(Page(re.sub(r"<svg.*?</svg>", "", page, flags=re.S)).tags)
        for page in (html, plain_html)
    ]
    assert outside[0] == outside[1]
    assert "alert(1)" in html and "default-src 'none'" in html
    html = re.sub(r' xmlns(:\w+)?="http://www.w3.org/[^"]*"', "", html)  # names, not addresses
    assert not re.search(
        r"""(src|href)\s*=\s*["'](?!#)|url\((?!#)|@import|<link|<script|https?:""", html
    )


def test_all_parts_are_there(undrawn):
    page = Page(render_comparison(_full()))
    content, *anchors = [value for name, value in page.attributes if name == "id"]
    assert anchors == [
        "results",
        "time",
        "costs",
        "frequency",
        "ablations",
        "tests",
        "failures",
        "settings",
        "data",
        "lineage",
    ]
    assert [v for n, v in page.attributes if n == "href"] == [
        f"#{anchor}" for anchor in (content, *anchors)
    ]
    # ranges of 3 metrics and of 3 groups, P@1 against PSP@5, curves of the 3 metrics that the
    # rounds have; each task
    expected = 2 * (3 + 3 + 1 + 3)
    assert page.tags.count("svg") == expected


def test_the_headline_table(undrawn):
    page = Page(_section(render_comparison(_full(tasks=1)), "results"))
    values = [42.0, 42.1, 42.2]
    mean = statistics.fmean(values)
    spread = statistics.stdev(values)
    row = page.row("some text c", "3")
    expected = f"{mean:.2f} ± {spread:.2f} ▲"
    assert row[2] == expected
    assert page.row("some text a", "3")[2].endswith("▼")
    assert page.row("some text b", "3")[2].endswith("0.10")
    assert page.row("some text peer peer", "1")[2] == "41.50"
    order = [row[0].split()[2] for row in page.rows if row[1] in ("1", "3")]
    assert order == ["c", "peer", "b", "a"]  # by P@1; what failed is not in it
    tested = Page(_section(render_comparison(_full(tasks=1)), "tests")).row(
        "some text 0", "some text c"
    )
    assert tested[2:] == ["some text peer", "P@1", "+0.60", "+0.10 to +1.10", "0.010"]
    bold = re.findall(
        r'<b class="best">([^<]*)</b>', _section(render_comparison(_full(tasks=1)), "results")
    )
    assert bold[0] == f"{mean:.2f}"
    assert "recipe" not in bold
    assert len(bold) == len(METRICS)


def test_ablations_are_differences_to_the_base(undrawn):
    page = Page(_section(render_comparison(_full(tasks=1)), "ablations"))
    assert page.row("some text a", "3")[2] == "40.10 ± 0.10"
    assert page.row("some text b", "3")[2:4] == ["+1.00 ± 0.00 ▲", "+1.00 ± 0.00"]
    assert page.row("some text c", "3")[2] == "+2.00 ± 0.00"
    assert "no such cell" not in page.words


def test_differences_seed_by_seed():
    base = Cell("t", "base", runs=[Run(s, {"m": v}) for s, v in ((0, 10.0), (1, 20.0))])
    same = Cell("t", "same", runs=[Run(s, {"m": v}) for s, v in ((1, 23.0), (0, 11.0))])
    other = Cell("t", "other", runs=[Run(7, {"m": 30.0})])
    of = difference_to(same, base, "m")
    assert (of.mean, of.count) == (2.0, 2)
    expected = statistics.stdev([1.0, 3.0])
    assert of.spread == pytest.approx(expected)
    of = difference_to(other, base, "m")
    assert of.mean == 15.0 and math.isnan(of.spread)
    assert math.isnan(difference_to(Cell("t", "none"), base, "m").mean)


def test_costs_and_curves(undrawn):
    full = _full(tasks=1)
    row = Page(_section(render_comparison(full), "costs")).row("some text a")
    assert row[1:] == ["140", "130", "200", "0.25", "500", "123,456"]
    curves = {cell.name: _curve(cell, "P@1") for cell in full.cells}
    assert curves["some text a"].x == [1.5, 3.0, 4.5]
    expected = pytest.approx([13.333, 26.667, 40.0], abs=0.001)
    assert curves["some text a"].y == expected
    assert curves["some text peer"].x == [131.5 / 60]
    assert curves["some text peer"].y == [41.5]


def test_curves_by_processor_time():
    html = _section(render_comparison(_full(tasks=1)), "time")
    assert "processor minutes of training" in html
    served = Cell(
        "t", "served", runs=[Run(0, {}, {"P@1": 3.0}, {"work_seconds": 90.0, "train_seconds": 7.0})]
    )
    assert _curve(served, "P@1").x == [1.5]


def test_a_system_has_one_colour_in_all_charts_of_curves():
    cells = [Cell("t", f"cell {i}", runs=[_run(0, 10.0 + i)]) for i in range(4)]
    odd = dataclasses.replace(
        _run(0, 50.0), curve=[{"work_seconds": 1.0, "validation": {"PSP@5": 1.0}}]
    )
    html = _section(
        render_comparison(ComparisonInput(cells=[*cells, Cell("t", "odd", runs=[odd])])), "time"
    )
    keys = re.findall(r'<div class="legend">(.*?)</div>', html)
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert keys[0].index("cell 3") < keys[0].index("cell 0")


@pytest.mark.parametrize("missing", [f.name for f in dataclasses.fields(ComparisonInput)])
def test_a_missing_part_is_left_out(missing, undrawn):
    default = ComparisonInput()
    full = _full()
    assert getattr(full, missing) != getattr(default, missing)
    html = render_comparison(dataclasses.replace(full, **{missing: getattr(default, missing)}))
    assert Page(html).open == []
    section = {
        "contrasts": "tests",
        "groups": "ablations",
        "failures": "failures",
        "lineage": "lineage",
    }.get(missing)
    if section:
        assert f'id="{section}"' not in html


def test_odd_input(undrawn):
    assert Page(render_comparison(ComparisonInput())).open == []
    nan = Run(
        0, {"P@1": math.nan, "P@5": 3.0}, costs={"train_seconds": math.nan}, curve=[{"round": 1}]
    )
    one = ComparisonInput(cells=[Cell("t", "only", runs=[nan]), Cell("t", "failed")])
    html = render_comparison(one)
    assert Page(html).open == []
    assert "nan" not in html.lower().replace("finance", "")
    many = [Cell("t", f"cell {i}", runs=[_run(0, 10.0 + i)]) for i in range(30)]
    html = render_comparison(ComparisonInput(cells=many))
    assert "The 8 best by P@1 have colours." in html


def test_groups_of_labels_that_the_test_does_not_have_are_left_out():
    run = Run(0, {"P@1": 5.0, "tail/P@5": 3.0, "torso/P@5": 0.0, "head/P@5": 0.0})
    other = Run(0, {"P@1": 6.0, "tail/P@5": 3.0, "torso/P@5": 1.0, "head/P@5": 0.0})
    cells = [Cell("t", "a", runs=[run]), Cell("t", "b", runs=[other])]
    html = _section(render_comparison(ComparisonInput(cells=cells)), "frequency")
    assert Page(html).rows[0] == ["system", "P@5 tail", "P@5 torso"]
    # in a column of equals none is best
    assert re.findall(r'<b class="best">([^<]*)</b>', html) == ["1.00"]


def test_the_program_in_the_documentation_runs(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "reports.md").read_text(encoding="utf-8")
    (program,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.S)
        if "write_comparison" in block
    ]
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
    assert "45.10" in (tmp_path / "comparison.html").read_text(encoding="utf-8")


def test_summaries():
    rng = np.random.default_rng(1)
    for count in (2, 3, 10):
        values = rng.normal(size=count).tolist()
        of = summary([*values, math.nan, math.inf])
        assert (of.mean, of.spread, of.count) == pytest.approx(
            (np.mean(values), np.std(values, ddof=1), count)
        )
    assert (
        math.isnan(summary([]).mean)
        and math.isnan(summary([1.0]).spread)
        and summary([1.0]).mean == 1.0
    )
    cells = [
        Cell("t", name, runs=[Run(0, {"m": v})] if v else ())
        for name, v in (("a", 1.0), ("b", None), ("c", 2.0))
    ]
    assert [cell.name for cell in ranked(cells, "m")] == ["c", "a", "b"]
