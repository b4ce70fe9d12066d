"""Pages without figures."""

from __future__ import annotations

import pytest

from unidec.evaluation.figures import Chart


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the time that their figures take."""
    monkeypatch.setattr(Chart, "image", lambda self: "data:")
