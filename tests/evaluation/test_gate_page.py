"""The gate's page: whatever the verdict holds, it is one page that loads nothing and hides no
reason.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from helpers.html_page import Page

from unidec.bundle.probe import Probe
from unidec.config import Gate
from unidec.evaluation.page import render
from unidec.pipeline.gating import resource_checks

HOSTILE = "<script>alert('x')</script>"


def verdict(**more: Any) -> dict[str, Any]:
    reasons = [
        {"check": "loads", "passed": True, "got": None, "limit": None, "words": "it loads"},
        {
            "check": "nDCG@5",
            "passed": False,
            "got": -1.0,
            "limit": 0.0,
            "words": f"worse {HOSTILE}",
        },
    ]
    about = {
        "version": "7",
        "bundle sha256": "ab" * 32,
        "commit": HOSTILE,
        "uncommitted changes": True,
    }
    base = {
        "model": "unidec",
        "passed": False,
        "at": "2026-11-21T12:00:00+00:00",
        "reasons": reasons,
        "challenger": about,
        "champion": {**about, "version": "5"},
        "data": {"name": HOSTILE, "sha256": "cd" * 32},
        "settings": {"metric": "nDCG@5", "guarded": ["P@1"]},
    }
    return base | more


def test_every_reason_what_failed_first_and_nothing_is_run() -> None:
    page = render("gate", verdict=verdict())
    assert "<script" not in page and "&lt;script&gt;" in page and "default-src 'none'" in page
    assert page.index("worse &lt;script") < page.index("it loads")
    assert "Gate: version 7 refused" in page and "against the champion, version 5" in page
    assert 'href="report.html"' in page and "http" not in page.replace("http-equiv", "")
    assert 'id="quality"' not in page and 'id="serving"' not in page  # nothing was compared


@pytest.mark.parametrize(
    ("check", "shown", "to_do"),
    [
        ("latency ratio", "p95 latency, times the champion's", "unidec models gate"),
        ("code", "code in git", "Commit the files that are named"),
        ("nDCG@5", "nDCG@5", "--force --start cold"),
        ("tail/R@10", "tail/R@10", "gate.tolerance accepts the loss"),
    ],
)
def test_a_failed_check_says_what_to_do(check: str, shown: str, to_do: str) -> None:
    reasons = [
        {"check": check, "passed": False, "words": "why"},
        {"check": "loads", "passed": True, "words": "it loads"},
    ]
    page = Page(render("gate", verdict=verdict(reasons=reasons)))
    assert page.row("check") == ["check", "", "why, and what to do"]
    _name, state, why = page.row(shown)
    assert state == "FAIL" and why.startswith("why") and to_do in why
    assert page.row("loads and answers")[1:] == ["pass", "it loads"]
    passed = Page(render("gate", verdict=verdict(reasons=reasons[1:], passed=True)))
    assert passed.row("check") == ["check", "", "why"]
    assert "--force" not in passed.words


def test_every_check_of_the_gate_has_its_advice() -> None:
    probe = Probe(**dict.fromkeys((f.name for f in dataclasses.fields(Probe)), 1.0))  # type: ignore[arg-type]
    rules = Gate(max_load="2x, 0.1 s", max_latency="2x, 0.1 ms", max_size="1.5x, 0.1 MB")
    found = resource_checks({"challenger": probe, "champion": probe}, rules)
    assert len(found) == 6
    for one in found:
        reasons = [{"check": one.check, "passed": False, "words": one.words}]
        assert "guarded metric" not in render("gate", verdict=verdict(reasons=reasons)), one.check


def test_figures_of_both_sides_and_their_difference() -> None:
    metrics = {
        "nDCG@5": 30.0,
        "P@1": 40.0,
        "tail/R@10": 1.0,
        "tail/num_queries": 9.0,
        "head/R@10": 0.0,
        "head/num_queries": 0.0,
    }
    compared = {
        "metric": "nDCG@5",
        "difference": -1.5,
        "confidence": 0.123,
        "num_queries": 6000,
        "better": 10,
        "worse": 1234,
        "intervals": {"nDCG@5": [-2.0, -1.0]},
    }
    probe = {
        "load_seconds": 3.0,
        "p50_ms": 4.0,
        "p95_ms": 5.25,
        "peak_megabytes": 300.0,
        "megabytes": 12.0,
    }
    page = render(
        "gate",
        verdict=verdict(
            metrics={"challenger": metrics, "champion": metrics | {"nDCG@5": 31.5}},
            comparison=compared,
            probes={"challenger": probe},
            labels={"champion": {"unknown": 1200, "removed": 3}},
        ),
    )
    for shown in (
        "-1.50",
        "12.3%",
        "10 : 1,234",
        "5.2 ms",
        "p95 latency",
        "-2.00 to -1.00",
        "does not know 1,200 labels",
        "6,000",
    ):
        assert shown in page, shown
    assert "tail/R@10" in page and "head/R@10" not in page


def test_nobody_to_compare_with() -> None:
    page = render("gate", verdict=verdict(champion=None, passed=True))
    assert "there is no champion yet" in page and "version 7 passed" in page
