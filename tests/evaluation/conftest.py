"""Charts are drawn here, but for tests of a page's words."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def charts_of_these_tests(request: pytest.FixtureRequest) -> None:
    """Drawn, unless a test is `undrawn`."""
    if "undrawn" not in request.fixturenames:
        request.getfixturevalue("drawn")


@pytest.fixture
def undrawn() -> None:
    """Pages without the time that their figures take."""
