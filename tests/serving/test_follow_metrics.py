"""What following shows to Prometheus."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from unidec.sections import Serve
from unidec.serving.follow import Follower
from unidec.serving.follow_metrics import FollowCollector
from unidec.serving.service import Service


def shown(state: dict[str, Any]) -> dict[str, float]:
    registry = CollectorRegistry()
    follower: Any = SimpleNamespace(state=lambda: state)
    registry.register(FollowCollector(follower))
    lines = generate_latest(registry).decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}


def test_before_anything_happened():
    """The keys are those that a follower really has."""
    assert shown(Follower(Service(Serve()), "models:/m@champion", Serve(), uri="sqlite:///none.db").state()) == {
        "unidec_follow_swaps_total": 0, "unidec_follow_swaps_back_total": 0, "unidec_follow_refusals_total": 0,
        "unidec_follow_looks_total": 0, "unidec_follow_failed_looks_total": 0, "unidec_follow_registry_up": 0,
        "unidec_follow_refused": 0, "unidec_follow_busy": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("registry", "up"), [("up", 1), ("away", 0), ("not asked", 0)])
def test_what_happened(registry, up):
    counts = {"swaps": 3, "swaps_back": 1, "refusals": 2, "looks": 50, "failed_looks": 4}
    found = shown(
        {"registry": registry, "refused": {"version": "7"}, "busy": "loading", "last_swap_seconds": 2.5,
         "looked_seconds_ago": 0.4, **counts}
    )  # fmt: skip
    assert all(found[f"unidec_follow_{name}_total"] == number for name, number in counts.items())
    assert (
        found["unidec_follow_registry_up"] == up and found["unidec_follow_refused"] == found["unidec_follow_busy"] == 1
    )
    assert found["unidec_follow_last_swap_seconds"] == 2.5 and found["unidec_follow_look_age_seconds"] == 0.4
