"""The Great Expectations suite whose thresholds are learnt from the data that the accepted model was trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from unidec.evaluation.drift import Check
from unidec.validation.suite import raised, run_checkpoint

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
    results = []
    for _, item in found:
        config = item.expectation_config
        key, kwargs = config.kwargs["column"], config.kwargs
        results.append({
            "key": key, "severity": str(getattr(config.severity, "value", config.severity)),
            "success": bool(item.success), "minimum": kwargs.get("min_value"), "maximum": kwargs.get("max_value"),
            "observed": raised(item) or float(frame[key].iloc[0]),
        })  # fmt: skip
    return results


def _suite(checks: Sequence[Check]) -> list[Any]:
    import great_expectations.expectations as gxe

    # Great Expectations takes a figure that is no number for a missing one, which no bound minds
    numbers = [
        gxe.ExpectColumnValuesToNotBeNull(column=check.key, severity="critical", description=f"{check.name}: a number")
        for check in checks
        if math.isnan(check.new)
    ]
    return numbers + [
        gxe.ExpectColumnValuesToBeBetween(
            column=check.key, min_value=bounds[0], max_value=bounds[1], severity=severity,
            description=f"{check.name}: {check.within(bounds)}",
        )
        for check in checks
        for bounds, severity in ((check.stop, "critical"), (check.warn, "warning"))
        if bounds != (None, None)
    ]  # fmt: skip
