"""Samples of processor, memory, disk, network and GPU, by MLflow's own collectors, handed to whoever keeps them.

MLflow's monitor asks its server before each sample and ends at the first answer that does not come; these go the way of
every other figure.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

_SECONDS = 10.0
_WAIT = 5.0  # seconds that the end waits for a sample that is being taken

log = logging.getLogger(__name__)


@contextlib.contextmanager
def sampled(keep: Callable[[dict[str, float]], None], seconds: float | None = None) -> Iterator[None]:
    """Inside, a thread gives `keep` a sample every so many seconds, named `system/...`; without psutil it does nothing.

    Args:
        keep: is given each sample, in the thread.
        seconds: between two; default: `MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL`, else 10.
    """
    every = seconds or float(os.environ.get("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL") or _SECONDS)
    done = threading.Event()
    thread = None
    try:
        collectors = _collectors()
        thread = threading.Thread(target=_sample, args=(collectors, keep, every, done), name="system", daemon=True)
        thread.start()
    except Exception as error:
        log.warning("system metrics are off: %s", error)
    try:
        yield
    finally:
        done.set()
        if thread is not None and thread.is_alive():
            thread.join(_WAIT)


def _collectors() -> list[Any]:
    """MLflow's, those of this machine."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    found = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    with contextlib.suppress(Exception):  # no GPU, or none that its library can read
        found.append(GPUMonitor())
    return found


def _sample(
    collectors: list[Any], keep: Callable[[dict[str, float]], None], every: float, done: threading.Event
) -> None:
    while not done.wait(every):
        try:
            sample: dict[str, float] = {}
            for collector in collectors:
                collector.collect_metrics()
                sample |= collector.aggregate_metrics()
                collector.clear_metrics()
            keep({f"system/{name}": float(value) for name, value in sample.items()})
        except Exception as error:  # a sensor that fails must not end a training
            log.warning("system metrics end: %s", error)
            return
