"""Where shards run: the setting `runner`, and the Prefect task runner that it stands for."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
import re
import signal
import threading
from typing import Any

import flows  # noqa: F401  sets Prefect's home and quiets it, before it is imported

# isort: split
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from unidec.errors import ConfigError

VARIABLE = "UNIDEC_RUNNER"
SYNTAX = "processes, threads, dask or ray, also with :N workers, or dask://host:port, ray://host:port"
_EXTRAS = {"dask": ("prefect_dask", "DaskTaskRunner"), "ray": ("prefect_ray", "RayTaskRunner")}


@dataclasses.dataclass(frozen=True)
class Runner:
    """The setting, taken apart.

    Attributes:
        kind: "processes", "threads", "dask" or "ray".
        address: of a cluster that is there; None: this machine.
        workers: on this machine.
    """

    kind: str
    address: str | None = None
    workers: int = 0

    @classmethod
    def parse(cls, text: str | None) -> Runner:
        """`text`, else the environment's UNIDEC_RUNNER, else processes.

        Raises:
            ConfigError: neither of the forms above.
        """
        text = text or os.environ.get(VARIABLE) or "processes"
        if found := re.fullmatch(r"(dask|ray)://(\S+:\d+)", text):
            return cls(found[1], ("tcp://" if found[1] == "dask" else "ray://") + found[2])
        if found := re.fullmatch(r"(processes|threads|dask|ray)(?::([1-9]\d{0,3}))?", text):
            return cls(found[1], workers=int(found[2] or cores()))
        raise ConfigError("no such runner", where=f"runner (or {VARIABLE})", got=text, expected=SYNTAX)

    @property
    def threads(self) -> int:
        """Cores for each worker; 0 where the cluster decides."""
        return 0 if self.address else max(1, cores() // self.workers)

    def task_runner(self) -> TaskRunner[Any]:
        """Prefect's runner, on loopback and without dashboards where it is started here.

        Raises:
            ConfigError: its package is not installed.
        """
        if self.kind == "processes":
            return ProcessPoolTaskRunner(max_workers=self.workers, initializer=_begin_worker)
        if self.kind == "threads":
            return ThreadPoolTaskRunner(max_workers=self.workers)
        package, name = _EXTRAS[self.kind]
        try:
            made = getattr(importlib.import_module(package), name)
        except ImportError as error:
            fix = f'pip install -c constraints.txt -e ".[{self.kind}]"'
            raise ConfigError(f"{package} is needed", where="runner", got=str(error), fix=fix) from error
        if self.address:
            return made(address=self.address)
        if self.kind == "dask":
            cluster = {
                "n_workers": self.workers, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None,
                "scheduler_kwargs": {"dashboard_address": "127.0.0.1:0"},  # its plain page: any port that is free
                "memory_limit": None,  # a shard's memory is bounded; Dask would count mapped files too
            }  # fmt: skip
            return made(cluster_kwargs=cluster)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        return made(init_kwargs={"num_cpus": self.workers, "include_dashboard": False})


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin_worker() -> None:
    """Ctrl-C is the parent's to handle; a worker whose parent was killed ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, name="follow-parent", daemon=True).start()
