"""Transformers that the encoder's tests run with."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["bert", "distilbert"])
def folder(request: pytest.FixtureRequest) -> Path:
    """A folder of each kind of transformer."""
    return request.getfixturevalue(f"tiny_{request.param}")
