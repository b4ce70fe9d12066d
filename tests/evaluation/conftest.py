"""Tests are no packages (--import-mode=importlib): `from html_page import Page` finds the helper beside this file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from unidec.evaluation.figures import Chart

_spec = importlib.util.spec_from_file_location("html_page", Path(__file__).with_name("html_page.py"))
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["html_page"] = _module
_spec.loader.exec_module(_module)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the time that their figures take."""
    monkeypatch.setattr(Chart, "image", lambda self: "data:")
