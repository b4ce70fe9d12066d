"""A bundle of a real model, for tests of what is exported of it."""

from __future__ import annotations

import pytest


@pytest.fixture
def world(helper, tmp_path, tiny_bert, tiny_distilbert):
    """`world(source="bert", **of real_bundle)`: a loaded bundle; `.real`: its helper."""
    real = helper("bundle/export/real_model")

    def make(source: str = "bert", **options):
        return real.real_bundle(
            tmp_path, {"bert": tiny_bert, "distilbert": tiny_distilbert}[source], **options
        )

    make.real = real
    return make
