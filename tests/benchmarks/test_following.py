"""The benchmark of swaps: its two versions are one bundle under two hashes, and it tells swaps from rest."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tiny_bundle import write_tiny_bundle

from unidec.bundle.bundle_folder import KIND, VERSION
from unidec.data.storage import read_manifest
from unidec.tracking.store import open_client


@pytest.fixture(scope="module")
def following(benchmark_module):
    return benchmark_module("following")


def test_one_bundle_under_two_hashes(following, tmp_path):
    bundle = tmp_path / "bundle"
    write_tiny_bundle(bundle, np.random.default_rng(0))
    client = open_client(following.two_versions(bundle, tmp_path))
    tags = [client.get_model_version(following.NAME, number).tags["bundle.sha256"] for number in "12"]
    assert len(set(tags)) == 2 and client.get_model_version_by_alias(following.NAME, "champion").version == 1
    one, two = (
        read_manifest(tmp_path / f"stored-{number}" / "artifacts" / "bundle", KIND, VERSION)["files"] for number in "12"
    )
    assert {name for name in one if one[name] != two[name]} == {"bundle.json"}


def test_requests_in_swaps_and_at_rest(following):
    load = following.Load.__new__(following.Load)
    load.seen = [(at, 10.0 * at, 200) for at in range(1, 11)] + [(5.5, 900.0, 503)]
    spans = [(2.0, 3.0), (5.0, 6.0)]
    assert load.between(spans, inside=True) == [20.0, 30.0, 50.0, 60.0, 900.0]
    assert load.between(spans, inside=False) == [10.0, 40.0, 70.0, 80.0, 90.0, 100.0]
    memory = [{"RssAnon": 5_000_000, "VmHWM": 9_000_000}]
    found = following.summary(SimpleNamespace(ready_seconds=1.0), load, spans, memory)
    assert found["failed"] == 1 and found["requests"] == 11 and found["swap_seconds"] == [1.0, 1.0]
    assert found["in_swaps"]["p100_ms"] == 900.0 and found["at_rest"]["p50_ms"] == 70.0
    assert found["peak_megabytes"] == 9
