"""The learnt suite: Great Expectations says of every check what the check says of itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unidec.evaluation.drift import Check
from unidec.validation.checkpoint_run import run_change_suite


def stated(results: list[dict]) -> dict[str, str]:
    """ok, warning or stop of each key."""
    worst: dict[str, str] = {}
    for result in results:
        level = (
            {"critical": "stop", "warning": "warning"}[result["severity"]]
            if not result["success"]
            else "ok"
        )
        worst[result["key"]] = max(
            worst.get(result["key"], "ok"), level, key=("ok", "warning", "stop").index
        )
    return worst


def test_great_expectations_agrees_with_the_checks_also_on_the_bounds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    checks = []
    for number in range(30):
        warn = sorted(rng.random(2))
        stop = sorted(rng.random(2) * 2)
        value = rng.choice([*warn, *stop, *rng.random(3) * 2, 0.0, -1.0])
        bounds = [
            ((low, high), (None, high), (low, None))[number % 3] for low, high in (warn, stop)
        ]
        checks.append(
            Check(f"c{number}", "a figure", "mean", 1.0, float(value), bounds[0], bounds[1])
        )
    checks += [
        Check("only_warn", "x", "share", None, 0.9, (None, 0.5)),
        Check("count", "x", "count", 3, 3, (3, 3), (2, 4)),
        Check("one", "x", "share", 1 / 3, 1 / 3, (None, 1 / 3), (None, 1 / 3)),
        Check("free", "x", "count", 0, 5, (None, None)),
    ]
    results = run_change_suite(checks, tmp_path / "docs")
    assert {"ok", "warning", "stop"} == {check.state for check in checks}
    assert stated(results) == {check.key: check.state for check in checks if check.key != "free"}
    expected = 2 * 30 + 1 + 2 + 2
    assert len(results) == expected
    assert (tmp_path / "docs" / "index.html").is_file()
    page = next((tmp_path / "docs" / "validations").rglob("*.html")).read_text()
    assert "only_warn" in page


def test_a_figure_that_is_no_number_does_not_pass() -> None:
    check = Check("x", "x", "mean", 1.0, float("nan"), (0.9, 1.1), (0.5, 1.5))
    assert check.state == "stop"
    assert stated(run_change_suite([check])) == {"x": "stop"}
