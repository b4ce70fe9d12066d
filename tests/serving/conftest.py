"""What tests of the server share."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.served_bundle import make_served_bundle


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of 400 labels whose training queries vote. Read-only."""
    return make_served_bundle(tmp_path_factory.mktemp("served"))
