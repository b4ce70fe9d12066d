"""Pages without figures."""

from __future__ import annotations

import pytest
from markupsafe import Markup, escape

from unidec.evaluation.figures import Chart


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the time that their figures take."""
    monkeypatch.setattr(
        Chart,
        "svg",
        lambda self: Markup(f'<svg role="img" aria-label="{escape(self.about)}"></svg>'),
    )
