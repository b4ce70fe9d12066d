"""Valid requests beside cheap attacks (fault 36): the quick version of
`benchmarks/hostile_load.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn")

# each took far longer before it was bounded: 20 s, 90 s, 250 ms, no answer at all
ATTACKS = ["query parameters", "long parameter", "one-byte chunks", "idle connections"]


def test_valid_requests_are_answered_as_fast_beside_an_attack(benchmark_module, tmp_path):
    load = benchmark_module("hostile_load")
    served = benchmark_module("served")
    bundle = load.small_bundle(tmp_path)
    with served.Served(bundle, "serve.threads=1", folder=tmp_path) as server:
        rows = load.measure(server, server.port, ATTACKS, rate=30.0, seconds=1.0)
    for row in rows:
        assert not row["not_200"], row
        assert row["p50"] < 5 * row["p50_alone"] + 30, row  # loose: the machine has other work
        assert row["server_cpu"] < 1, row


def test_a_row_says_whether_the_goal_is_met(benchmark_module):
    load = benchmark_module("hostile_load")

    def found(milliseconds: float, refused: int = 0) -> SimpleNamespace:
        return SimpleNamespace(
            latencies_ms=[milliseconds] * 10,
            statuses={200: 10, 503: refused} if refused else {200: 10},
        )

    alone = load.percentiles([10.0] * 10)
    assert load.facts("x", found(20.0), alone)["within_goal"]
    assert not load.facts("x", found(21.0), alone)["within_goal"]
    assert not load.facts("x", found(10.0, refused=1), alone)["within_goal"]


def test_each_attack_is_bounded(benchmark_module):
    for attack in benchmark_module("hostile_load").attacks().values():
        assert len(attack.data) <= 10_001_000 and attack.connections <= 1200
