"""Work in shards, mapped over processes or threads of this machine, Dask or Ray; one setting chooses (`SYNTAX`).

It is given as a parameter, or in the environment as UNIDEC_RUNNER; docs/scale.md has a table of its values. Workers
receive a folder and a number; they import this module by its name, and must see the same folders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import flows  # noqa: F401  sets Prefect's home and quiets it, before it is imported

# isort: split
from prefect import task, unmapped
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.futures import as_completed
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from flows.steps import worth_retrying
from unidec.data.shards import Work
from unidec.errors import ArtifactError, ConfigError, TrainingError, UnidecError
from unidec.pipeline.parent_watch import watch
from unidec.progress import Progress, progress
from unidec.retrieval import predict_file
from unidec.retrieval.query_encoder import usable_cores

VARIABLE = "UNIDEC_RUNNER"
SYNTAX = "processes, threads, dask or ray, also with :N workers, or dask://host:port, ray://host:port"
ROUNDS = 3  # attempts: a pool that broke because a worker died is started again
_EXTRAS = {"dask": ("prefect_dask", "DaskTaskRunner"), "ray": ("prefect_ray", "RayTaskRunner")}
log = logging.getLogger("unidec.flows")


@dataclasses.dataclass(frozen=True)
class Runner:
    """The setting, parsed.

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
        """`text`, else the environment's UNIDEC_RUNNER, else processes; a ConfigError for none of the forms above."""
        text = text or os.environ.get(VARIABLE) or "processes"
        if found := re.fullmatch(r"(dask|ray)://(\S+:\d+)", text):
            return cls(found[1], ("tcp://" if found[1] == "dask" else "ray://") + found[2])
        if found := re.fullmatch(r"(processes|threads|dask|ray)(?::([1-9]\d{0,3}))?", text):
            return cls(found[1], workers=int(found[2] or usable_cores()))
        raise ConfigError("no such runner", where=f"runner (or {VARIABLE})", got=text, expected=SYNTAX)

    @property
    def threads(self) -> int:
        """Cores for each worker; 0 where the cluster decides."""
        return 0 if self.address else max(1, usable_cores() // self.workers)

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


def _begin_worker() -> None:
    """Ctrl-C is the parent's to handle; a worker whose parent was killed ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        watch(parent.pid)


@task(
    name="shard",
    task_run_name="shard {number}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=2,
    retry_delay_seconds=[1, 10],
    retry_condition_fn=worth_retrying,
)
def shard(folder: str, number: int, threads: int = 0) -> None:
    """Writes one shard, unless it is there."""
    predict_file.run_shard(folder, number, threads)


@task(name="merge", task_run_name="merge", cache_policy=NO_CACHE, persist_result=False)
def merge(folder: str) -> str:
    """Writes the result of all shards; returns its path."""
    return str(predict_file.merge(Work.open(folder)))


def write_shards(work: Work, runner: str | None = None) -> None:
    """Writes all shards that are missing.

    Raises:
        UnidecError: what a shard raised, naming the shard and its rows.
        TrainingError: a shard failed `ROUNDS` times.
        ArtifactError: workers write into another folder than this one.
    """
    where, missing = Runner.parse(runner), work.missing()
    if len(missing) < work.num_shards:
        log.info("%d of %d shards are there already", work.num_shards - len(missing), work.num_shards)
    for attempt in range(1, ROUNDS + 1):
        errors = _round(work, missing, where) if missing else {}
        if not (missing := work.missing()):
            return
        if not errors:
            raise ArtifactError(
                "workers wrote shards that are not in this folder", where=str(work.folder), got=work.name(missing[0]),
                fix="input, output and bundle must be in a folder that all machines share under the same path",
            )  # fmt: skip
        for number, error in errors.items():
            if isinstance(error, UnidecError):
                raise type(error)(f"{work.name(number)} failed\n{error}") from error
        number, first = min(errors.items())
        words = f"{len(errors)} of {work.num_shards} shards failed, first {work.name(number)}: {first or repr(first)}"
        if attempt == ROUNDS:
            fix = "run the same command again: it resumes with the missing shards"
            raise TrainingError(words, where=str(work.folder), fix=fix) from first
        log.warning("%s; %d shards are tried again", words, len(missing))


def _round(work: Work, missing: list[int], where: Runner) -> dict[int, Exception]:
    """Every missing shard once, retries included; the errors of those that failed."""
    folder, errors = str(work.folder), {}
    bar: Progress[None] = progress(total=sum(map(work.size, missing)), desc="predict", unit="query")
    if len(missing) == 1 and where.address is None:  # a pool would take longer to start
        with bar:
            shard(folder, missing[0])
            bar.update(work.size(missing[0]))
        return {}
    where = where if where.address else dataclasses.replace(where, workers=min(where.workers, len(missing)))
    with bar, _environment(where.threads), where.task_runner() as pool, _no_orphans(where):
        given = {"folder": unmapped(folder), "number": missing, "threads": unmapped(where.threads)}
        futures = pool.map(shard, given)
        number_of = {future.task_run_id: number for future, number in zip(futures, missing, strict=True)}
        for done, future in enumerate(as_completed(list(futures)), 1):
            number = number_of[future.task_run_id]
            try:
                future.result()
            except Exception as error:
                errors[number] = error
            bar.note(f"{done}/{len(missing)} shards")
            bar.update(work.size(number))
    return errors


@contextlib.contextmanager
def _environment(threads: int) -> Iterator[None]:
    """Processes that start inside use so many threads (OpenMP reads it once, when it is loaded), and report to this
    run's server, also when it is Prefect's temporary one: else each would start its own."""
    context, before = FlowRunContext.get(), os.environ.get("OMP_NUM_THREADS")
    settings = {}
    if context is not None and not PREFECT_API_URL.value():
        settings = {PREFECT_API_URL: str(context.client.api_url).rstrip("/")}
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        with temporary_settings(settings):
            yield
    finally:
        os.environ.pop("OMP_NUM_THREADS", None)
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


@contextlib.contextmanager
def _no_orphans(where: Runner) -> Iterator[None]:
    """Cancelled, a pool would wait for the shards in progress: its processes are killed first."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for child in set(multiprocessing.active_children()) - before if where.kind == "processes" else ():
            child.kill()
        raise
