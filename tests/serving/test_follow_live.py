"""A real server under load while the alias moves: no request fails, and none is answered by a
mixture of versions.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from helpers import followed_server, served_bundle
from helpers.served_bundle import make_served_bundle

pytestmark = pytest.mark.slow

# back to the one before, new ones, and old ones fetched again
SWAPS = ["2", "1", "2", "3", "2", "1", "3", "1"]
NUM_TEXTS = 30


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return followed_server.FollowedRegistry(tmp_path_factory.mktemp("world"), make_served_bundle)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [served_bundle.text(row) for row in range(NUM_TEXTS)]


@pytest.fixture(scope="module")
def expected(registry: Any, texts: list[str]) -> dict[str, Any]:
    found = {
        registry.hashes[version]: followed_server.expected_of(registry.bundle(version), texts)
        for version in "123"
    }
    for text in texts[:5]:
        assert len({tuple(answers[text][1]) for answers in found.values()}) == 3, (
            "the versions answer alike"
        )
    return found


@pytest.mark.timeout(600)
def test_swaps_and_rollbacks_under_load(registry, expected, texts, capsys):
    registry.point("1")
    with registry.serving("serve.follow_seconds=0.2") as server:
        assert server.version() == "1"
        took = []
        at_rest = []
        with followed_server.Clients(server.port, expected, texts) as clients:
            time.sleep(1)
            for version in SWAPS:
                registry.point(version)
                took.append(server.until(lambda version=version: server.version() == version))
                time.sleep(0.5)
                at_rest.append(len(clients.seconds))
        follow = server.follow()
    assert not clients.wrong, clients.wrong[:5]
    assert sum(clients.answers.values()) == len(clients.seconds) > 100
    assert set(clients.answers) == {registry.hashes[version] for version in "123"}, (
        "each version answered some"
    )
    assert follow["swaps"] == 8
    assert not follow["refusals"]
    assert follow["problem"] is None
    assert at_rest == sorted(set(at_rest)), "answers came at all times"
    with capsys.disabled():
        print(
            f"\n{len(SWAPS)} swaps under load: {len(clients.seconds)} requests, none failed; p50 "
            f"{clients.percentile(0.5):.0f} ms, p99 {clients.percentile(0.99):.0f} ms, longest "
            f"{clients.percentile(1):.0f} ms; seconds to swap "
            f"{[round(seconds, 1) for seconds in took]}"
        )


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads /proc")
def test_twenty_swaps_leave_memory_where_it_was(tmp_path, capsys):
    """Each one loads: nothing is kept. A bundle of 60,000 labels takes some 20 MB; twenty of them
    would show.
    """
    registry = followed_server.FollowedRegistry(
        tmp_path, make_served_bundle, versions=2, num_labels=60_000
    )
    with registry.serving(
        "serve.follow_seconds=0.2", "serve.keep_previous=false", "serve.cache_queries=0"
    ) as server:
        sizes = []
        with followed_server.Clients(server.port, defaultdict(dict), ["redcar bluecar"], num=1):
            for turn in range(20):
                version = "21"[turn % 2]
                registry.point(version)
                server.until(lambda version=version: server.version() == version)
                time.sleep(1)
                sizes.append(server.memory()[0] / 1e6)
        follow = server.follow()
        assert not server.log.count("still held"), server.log
        assert follow["swaps"] == 20
        copies = [
            path for path in (tmp_path / "project" / "runs" / "bundles").iterdir() if path.is_dir()
        ]
        assert len(copies) <= 3, "copies on disk are those of the last two, and one that is fetched"
    with capsys.disabled():
        print(f"\nMB after each of 20 swaps: {[round(size) for size in sizes]}")
    early = sorted(sizes[4:8])[2]
    late = sorted(sizes[-4:])[2]
    assert late - early < 30, sizes
