"""What a `Follower` does, for Prometheus: read from its state when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unidec.serving.follow import Follower

_COUNTS = {
    "swaps": "versions that were loaded and put in place",
    "swaps_back": "returns to the version before",
    "refusals": "versions that were refused",
    "looks": "looks at the registry",
    "failed_looks": "looks that the registry did not answer",
}


class FollowCollector(Collector):
    """`registry.register(FollowCollector(follower))`: unidec_follow_*."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def describe(self) -> Iterator[Metric]:
        """Nothing is asked when this is registered."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The families, from one state."""
        state: dict[str, Any] = self._follower.state()
        for name, words in _COUNTS.items():
            yield CounterMetricFamily(f"unidec_follow_{name}", words, value=state[name])
        for name, words, value in (
            ("registry_up", "1: the registry answered the last look", state["registry"] == "up"),
            ("refused", "1: the version that the alias names was refused", state["refused"] is not None),
            ("busy", "1: a version is being fetched, tried or loaded", bool(state["busy"])),
            ("last_swap_seconds", "from seeing a version to answering with it", state["last_swap_seconds"]),
            ("look_age_seconds", "since the last look at the registry", state["looked_seconds_ago"]),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"unidec_follow_{name}", words, value=float(value))
