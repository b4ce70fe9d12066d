"""Samples of processor, memory, disk, network and GPU by MLflow's own collectors.

MLflow's monitor sends each sample itself and ends with the first outage; these are logged like every other figure.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

_WAIT = 5.0  # seconds that the end waits for a sample that is being taken

log = logging.getLogger(__name__)


@contextlib.contextmanager
def sampled(log_sample: Callable[[dict[str, float]], None]) -> Iterator[None]:
    """Inside, a thread calls `log_sample` with figures named `system/...`; without psutil nothing is sampled.

    Every `MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL` seconds, else every 10.
    """
    seconds = float(os.environ.get("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL") or 10.0)
    done = threading.Event()

    def sample() -> None:
        try:
            collectors = _collectors()
            while not done.wait(seconds):
                figures: dict[str, float] = {}
                for collector in collectors:
                    collector.collect_metrics()
                    figures |= collector.aggregate_metrics()
                    collector.clear_metrics()
                log_sample({f"system/{name}": float(value) for name, value in figures.items()})
        except Exception as error:  # a sensor that fails must not end a training
            log.warning("system metrics are off: %s", error)

    thread = threading.Thread(target=sample, name="system-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_WAIT)


def _collectors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    found = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    with contextlib.suppress(Exception):  # no GPU, or none that its library can read
        found.append(GPUMonitor())
    return found
