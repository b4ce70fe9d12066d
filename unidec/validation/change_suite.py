"""The Great Expectations suite whose thresholds are learnt from the data that the accepted model was trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from unidec.evaluation.drift_checks import Bounds, Check, within
from unidec.validation.checkpoint import raised, run_checkpoint

TABLE = "data_change"


def run_change_suite(checks: Sequence[Check], docs: Path | None = None) -> list[dict[str, Any]]:
    """Every check as one or two expectations over a table of the later data set's figures (a row, a column each).

    Args:
        docs: folder for Data Docs; None: none are built.

    Returns:
        {"key", "severity" ("critical" stops, "warning" warns), "success", "minimum", "maximum", "observed"} each.
    """
    frame = pd.DataFrame({check.key: [float(check.new)] for check in checks})
    found = run_checkpoint(TABLE, {TABLE: frame}, lambda: {TABLE: _suite(checks)}, docs)
    return [_result(item, frame) for _, item in found]


def _suite(checks: Sequence[Check]) -> list[Any]:
    import great_expectations.expectations as gxe

    # Great Expectations takes a figure that is no number for a missing one, which no bound minds
    numbers = [
        gxe.ExpectColumnValuesToNotBeNull(column=check.key, severity="critical", description=f"{check.name}: a number")
        for check in checks
        if math.isnan(check.new)
    ]
    levels = [(check, bounds, level) for check in checks for bounds, level in _levels(check)]
    return numbers + [_expectation(check, bounds, level) for check, bounds, level in levels]


def _levels(check: Check) -> list[tuple[Bounds, str]]:
    both = [(check.stop, "critical"), (check.warn, "warning")]
    return [(bounds, level) for bounds, level in both if bounds != (None, None)]


def _expectation(check: Check, bounds: Bounds, severity: str) -> Any:
    import great_expectations.expectations as gxe

    return gxe.ExpectColumnValuesToBeBetween(
        column=check.key, min_value=bounds[0], max_value=bounds[1], severity=severity,
        description=f"{check.name}: {within(bounds, check.unit)}",
    )  # fmt: skip


def _result(item: Any, frame: pd.DataFrame) -> dict[str, Any]:
    config = item.expectation_config
    key = config.kwargs["column"]
    return {
        "key": key,
        "severity": str(getattr(config.severity, "value", config.severity)),
        "success": bool(item.success),
        "minimum": config.kwargs.get("min_value"),
        "maximum": config.kwargs.get("max_value"),
        "observed": raised(item) or float(frame[key].iloc[0]),
    }
