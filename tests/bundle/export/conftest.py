"""A bundle of a real model, for tests of what is exported of it."""

from __future__ import annotations

import pytest
from helpers.real_model import real_bundle


@pytest.fixture
def make_bundle(tmp_path, tiny_bert, tiny_distilbert):
    """`make_bundle(source="bert", **of real_bundle)`: a loaded bundle."""

    def make(source: str = "bert", **options):
        return real_bundle(
            tmp_path, {"bert": tiny_bert, "distilbert": tiny_distilbert}[source], **options
        )

    return make
