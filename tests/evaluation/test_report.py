"""The report: self-contained, every text escaped, parts left out where nothing is given."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers.html_page import Page

from unidec.evaluation.page import write_page
from unidec.evaluation.report import ReportInput, calibration_bins, render
from unidec.evaluation.significance import Comparison

HOSTILE = "</td></table><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\x00\ud800"
METRICS = (
    {"P@1": 45.125, "P@5": 21.0, "R@100": 71.0, "num_queries": 8088}
    | {
        f"{g}/{m}": v
        for g, v in (("tail", 1.5), ("torso", 2.5), ("head", 3.5))
        for m in ("P@1", "R@10", "coverage@1")
    }
    | {"coverage@1": 12.5, "coverage@100": 44.0}
)
BETTER = Comparison("model", "mix", "tail/R@10", 30.0, 20.0, 10.0, 4.25, 15.75, 0.0001, 0.0004, 99)
HISTORY = [
    {
        "step": s,
        "loss": 5 / s,
        "loss_de": 3 / s,
        "lr_heads": 1e-4,
        "grad_norm": 1.0,
        "pool_size": 3000,
        "positives_per_query": 3.5,
        "texts_per_s": 900,
    }
    for s in range(1, 900)
]
REFRESH = {
    "refresh_seconds": 9.0,
    "cluster_seconds": 2.0,
    "mine_seconds": 3.0,
    "mine_negative_score": 0.25,
}
ROUNDS = [
    {
        "round": r,
        "epoch": 5 * r,
        "seconds": 60.0,
        "refresh": REFRESH,
        "train_seconds": 50.0,
        "steps_per_s": 2.0,
        "memory": {"host_used_gib": 1.25},
        "validation": {"P@1": 30.0 + r, "R@100": 60.0},
    }
    for r in (1, 2, 3)
]

FUSION = {
    "objective": "nDCG@5",
    "by_tail": [{"tail": tail, "P@1": 50 - tail, "PSP@5": 30 + tail} for tail in (0.0, 0.5)],
}


def _example(text: str) -> dict:
    rows = [{"label": text, "title": text, "score": 1.0, "correct": c} for c in (True, False)]
    return {
        "query": text,
        "truth": [text] * 20,
        "predictions": rows,
        "missed": [text],
        "gain": 12.25,
    }


def _full(text: str = "some text") -> ReportInput:
    return ReportInput(
        title=text,
        date=text,
        dataset=text,
        model=text,
        metrics={"both": METRICS, "de": METRICS, text: METRICS},
        baselines={text: {"P@1": 50.0}},
        baseline_note=text,
        history=[*HISTORY, {"step": 901, f"lr_{text}": 1.0}],
        rounds=[{**r, "refresh": {**REFRESH, f"{text}_seconds": 1.0}} for r in ROUNDS],
        index={"recall@10": 99.5, text: text},
        widths=[{"width": 64, "P@1": 40.0, "PSP@5": 30.0}, {"width": 512, "P@1": 50.0}],
        fusion=FUSION | {"objective": text},
        calibration={
            "probability": np.linspace(0, 1, 200).reshape(40, 5),
            "correct": np.arange(200).reshape(40, 5) > 100,
        },
        gains=[_example(text)],
        losses=[_example(text)],
        gain_over=text,
        card={text: {text: text}},
        params={text: [text, 1]},
        lineage={text: text, "dirty": True},
        verdict=text,
        warnings=[text],
        comparison=[BETTER],
    )


@functools.cache
def _plain() -> str:
    return render(_full())


def test_every_text_is_escaped(tmp_path):
    write_page(tmp_path / "report.html", render(_full(HOSTILE)))
    plain = Page(_plain())
    hostile = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert hostile.open == [] and plain.open == []
    assert "script" not in hostile.tags
    assert all(value.startswith("data:") for name, value in hostile.attributes if name == "src")
    assert not [name for name, _ in hostile.attributes if name.startswith("on")]
    assert sorted(hostile.tags) == sorted(plain.tags)  # the texts change no element of the page
    assert hostile.words.count("alert(1)") > 20


def test_the_page_loads_nothing():
    html = _plain().replace('href="gate.html"', "", 1)  # a link to the page beside it loads nothing
    html = re.sub(r' xmlns(:\w+)?="http://www.w3.org/[^"]*"', "", html)  # names, not addresses
    assert not re.search(
        r"""(src|href)\s*=\s*["'](?!#)|url\((?!#)|@import|<link|<script|https?:""", html
    )
    assert "prefers-color-scheme:dark" in html and "@media print" in html
    assert "default-src 'none'" in html


def test_all_parts_are_there():
    page = Page(_plain())
    content = "content"
    anchors = re.findall(r'<section id="([^"]*)"', _plain())
    assert anchors == [
        "metrics",
        "groups",
        "training",
        "rounds",
        "index",
        "widths",
        "fusion",
        "calibration",
        "examples",
        "data",
        "parameters",
        "lineage",
    ]
    links = [value for name, value in page.attributes if name == "href"]
    assert ("id", content) in page.attributes
    assert links == [f"#{content}", "gate.html", *(f"#{anchor}" for anchor in anchors)]
    for text in (
        "45.12",
        "8,088 queries",
        "99.5",
        "and 8 more",
        "both heads",
        "dual encoder alone",
        "tail (< 10 queries)",
        "R@10 within",
        "+12.2 points against some text",
        "peak memory, GiB",
        "1.25",
    ):
        assert text in page.words, text
    # groups; validation, loss, rates, norm, two of pools; rounds; widths; tail; calibration
    assert page.tags.count("svg") == page.tags.count("figure")
    assert page.tags.count("figure") == 1 + 6 + 1 + 1 + 1 + 1


@pytest.mark.parametrize("missing", [f.name for f in dataclasses.fields(ReportInput)])
def test_a_missing_part_is_left_out(missing, undrawn):
    default = ReportInput()
    assert getattr(_full(), missing) != getattr(default, missing)
    report = dataclasses.replace(_full(), **{missing: getattr(default, missing)})
    html = render(report)
    assert Page(html).open == []
    section = {
        "rounds": "rounds",
        "index": "index",
        "widths": "widths",
        "fusion": "fusion",
        "calibration": "calibration",
        "params": "parameters",
        "lineage": "lineage",
    }.get(missing)
    if section:
        assert f'id="{section}"' not in html


def test_a_keyboard_reaches_all():
    page = Page(_plain())
    assert ("class", "skip") in page.attributes and ("href", "#content") in page.attributes
    wide = [value for name, value in page.attributes if name == "class" and value == "wide"]
    assert (
        len(wide)
        == page.attributes.count(("tabindex", "0"))
        == page.attributes.count(("role", "region"))
    )
    assert (
        page.tags.count("summary") == page.tags.count("details") == 1 + page.tags.count("figure")
    )  # parameters
    assert page.attributes.count(("scope", "row")) > 20
    assert ("lang", "en") in page.attributes
    words = [value for name, value in page.attributes if name in ("aria-label", "alt")]
    assert {"right", "wrong", "sections", "loss by step"} <= set(words)
    assert all(words)


def test_long_lists_are_folded():
    assert "<details open" not in _plain()
    assert "all parameters" in Page(_plain()).words


@pytest.mark.parametrize(
    ("kind", "words"),
    [("both", "MiniLM and a bag of tokens"), ("bag", "bag of tokens"), ("transformer", "MiniLM")],
)
def test_the_encoder_is_named_in_plain_words(kind, words):
    page = Page(render(ReportInput(date="today", model="MiniLM", params={"encoder.kind": kind})))
    assert f"\n{words} · today" in page.words


def test_an_empty_report_is_a_page():
    page = Page(render(ReportInput()))
    assert page.open == []
    assert "section" not in page.tags
    assert "svg" not in page.tags


def test_the_same_input_gives_the_same_bytes(tmp_path):
    write_page(tmp_path / "a", render(_full()))
    assert (tmp_path / "a").read_bytes() == _plain().encode()


def test_contributions_of_groups_stand_beside_the_metric_within_each(undrawn):
    groups = {
        "tail": (50, 1.0),
        "torso": (20, 2.0),
        "head": (100, 0.0),
    }
    metrics = {"num_queries": 200.0}
    for group, (queries, added) in groups.items():
        metrics |= {
            f"{group}/num_queries": float(queries),
            f"{group}/P@5": added,
            f"{group}/R@10": 5.0,
        }
    page = Page(render(ReportInput(metrics={"both": metrics})))
    head = page.row("system, group")
    assert (
        head[1:3] == ["contributes to P@5", "P@5 within"]
        and head[-1] == "queries with such a label"
    )
    # 200 queries, 2 percent of 1000 places: 20 hits, which are 20 of the 100 places of the 20
    # queries with such a label
    expected = ["2.00", "20.00", "5.00", "20"]
    assert page.row("both heads, torso")[1:] == expected


def test_the_best_of_a_column_is_bold(undrawn):
    report = ReportInput(
        metrics={"both": {"P@1": 45.0, "P@5": 22.0}}, baselines={"XR": {"P@1": 46.0}}
    )
    html = render(report)
    assert re.findall(r"<b class=\"best\">([^<]*)</b>", html) == ["22.00", "46.00"]


@pytest.mark.parametrize(
    ("index", "shown"),
    [
        (
            {"space": "both", "clf_weight": 2.0, "knn_weight": 0.5},
            "score = DE + 2.00 × CLF + 0.50 × votes;",
        ),
        ({"space": "both", "clf_weight": 2.0, "knn_weight": 0.0}, "score = DE + 2.00 × CLF"),
        ({"space": "clf", "clf_weight": 2.0}, "score = CLF"),
        ({"clf_weight": 2.0}, ""),
    ],
)
def test_examples_say_how_a_score_comes_about(index, shown):
    fused = Page(
        render(
            ReportInput(
                index=index,
                fusion=FUSION,
                losses=[_example("text")],
            )
        )
    ).words
    assert "score = logit of the learnt fusion" in fused and "DE +" not in fused
    words = Page(render(ReportInput(index=index, losses=[_example("text")]))).words
    assert (
        shown in words
        and ("votes;" in words) == ("votes" in shown)
        and ("score = " in words) == bool(shown)
    )


def test_a_frequency_group_without_test_queries_is_left_out(undrawn):
    metrics = METRICS | {"head/num_queries": 0.0, "tail/num_queries": 5.0}
    words = Page(render(ReportInput(metrics={"both": metrics}))).words
    assert "both heads, tail" in words and "both heads, head" not in words


def test_numbers_that_are_not_finite_do_not_break_it():
    history = [
        {"step": 1, "loss": float("nan")},
        {"step": 2, "loss": 1.0},
        {"step": 3, "loss": None},
    ]
    report = ReportInput(
        metrics={"both": {"P@1": float("nan"), "P@3": 1.0}},
        history=history,
        rounds=[{"round": 1}],
        calibration={"probability": [-np.inf, np.nan], "correct": [0, 0]},
    )
    html = render(report)
    assert Page(html).open == []
    assert "nan" not in html.lower()
    assert 'id="calibration"' not in html


def test_calibration_against_a_loop():
    rng = np.random.default_rng(7)
    score = rng.random((53, 3)).round(2)
    correct = rng.random((53, 3)) < 0.3
    score[0, :2] = [-np.inf, np.nan]
    found = [(s, c) for s, c in zip(score.ravel(), correct.ravel(), strict=True) if np.isfinite(s)]
    pairs = sorted(found, key=lambda pair: pair[0])
    start = 0
    for i, (mean, precision, size) in enumerate(calibration_bins(score, correct)):
        part = pairs[start : start + (16 if i < 7 else 15)]  # 157 in 10 bins
        assert size == len(part)
        expected = sum(c for _, c in part) / size
        assert precision == pytest.approx(expected)
        assert mean == pytest.approx(sum(s for s, _ in part) / size)
        start += len(part)
    assert start == len(pairs) == 157
    assert len(calibration_bins([1.0, 2.0], [0, 1])) == 2
    assert calibration_bins([], []) == []


def test_probabilities_are_drawn_against_what_was_right(undrawn):
    rng = np.random.default_rng(8)
    probability = rng.random((41, 5)).round(2)
    correct = rng.random(probability.shape) < probability**2
    probability[3, 3:] = np.nan
    given = {"correct": correct, "probability": probability}
    page = Page(render(dataclasses.replace(_full(), calibration=given)))
    found = [(p, c) for p, c in zip(probability.ravel(), correct.ravel(), strict=True) if p == p]
    pairs = sorted(found, key=lambda pair: pair[0])
    distance = 0.0
    start = 0
    for i in range(10):
        part = pairs[start : start + (21 if i < 3 else 20)]  # 203 in 10 bins
        distance += abs(sum(p for p, _ in part) - sum(c for _, c in part))
        start += len(part)
    assert start == len(pairs) == 203 and distance > 10
    assert f"Expected calibration error: {100 * distance / 203:.2f} percentage points" in page.words
    assert "perfectly calibrated" in page.words
    nothing = {name: values[:0] for name, values in given.items()}
    assert 'id="calibration"' not in render(dataclasses.replace(_full(), calibration=nothing))


def test_nothing_heavy_is_imported_before_a_page_is_written():
    heavy = "[name for name in ('matplotlib', 'jinja2', 'torch', 'mlflow') if name in sys.modules]"
    code = f"import sys, unidec.evaluation.report; print({heavy})"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "[]"
