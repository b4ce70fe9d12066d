"""Runs the shards of a work (`unidec.data.shards`) as tasks: over processes or threads of this
machine, or a Dask or Ray cluster.

Workers receive a folder and a number, import this module by its name, and must see the same
folders.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

from prefect import task, unmapped
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from flows import lifecycle
from unidec.cores import num_threads
from unidec.data.shards import Work, dividing
from unidec.errors import ConfigError, TrainingError, UnidecError
from unidec.pipeline.parent_watch import watch
from unidec.pipeline.shard_jobs import run_shard
from unidec.progress import progress, silence

VARIABLE = "UNIDEC_RUNNER"
SYNTAX = "processes or threads, also with :N workers, or dask://host:8786, ray://host:10001"


class Runner(NamedTuple):
    """A parsed runner: "processes" or "threads" with a number of workers, or "dask" or "ray" with
    an address.
    """

    kind: str
    workers: int = 0
    address: str = ""


def parse_runner(text: str | None) -> Runner:
    """Parse `text`, by default UNIDEC_RUNNER or else "processes"; a ConfigError if it does not
    match `SYNTAX`.
    """
    text = text or os.environ.get(VARIABLE) or "processes"
    if found := re.fullmatch(r"(dask|ray)://\S+:\d+", text):
        return Runner(found[1], address=text.replace("dask:", "tcp:"))
    if found := re.fullmatch(r"(processes|threads)(?::([1-9]\d{0,3}))?", text):
        return Runner(found[1], int(found[2] or num_threads()))
    raise ConfigError("no such runner", where=f"runner (or {VARIABLE})", got=text, expected=SYNTAX)


def _task_runner(runner: Runner) -> TaskRunner[Any]:
    if runner.kind == "processes":
        return ProcessPoolTaskRunner(max_workers=runner.workers, initializer=_begin_worker)
    if runner.kind == "threads":
        return ThreadPoolTaskRunner(max_workers=runner.workers)
    try:
        package = importlib.import_module(f"prefect_{runner.kind}")
    except ImportError as error:
        raise ConfigError(
            "a package is not installed",
            where="runner",
            got=str(error),
            fix=f'pip install -c constraints.txt -e ".[{runner.kind}]"',
        ) from error
    return getattr(package, f"{runner.kind.capitalize()}TaskRunner")(address=runner.address)


def _begin_worker() -> None:
    """Initialise a worker process: its parent handles Ctrl-C and shows the progress, and if the
    parent is killed, the worker ends.
    """
    silence()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent: Any = multiprocessing.parent_process()
    watch(parent.pid)


@task(
    name="shard",
    task_run_name="shard {number}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=2,
    retry_delay_seconds=[1, 10],
    retry_condition_fn=lifecycle.worth_retrying,
)
def shard(folder: str, number: int, threads: int = 0) -> None:
    """Writes one shard, unless it exists."""
    run_shard(folder, number, threads)


def write_shards(work: Work, runner: str | None = None) -> None:
    """Writes all missing shards; each is tried three times.

    Raises:
        UnidecError: a shard's error, with the shard and its rows; TrainingError: its worker died.
    """
    where = parse_runner(runner)
    missing = work.missing()
    if not missing:
        return
    if not where.address:  # for a single shard a process pool would take longer to start
        where = Runner(
            "threads" if len(missing) == 1 else where.kind, min(where.workers, len(missing))
        )
    threads = 0 if where.address else max(1, num_threads() // where.workers)
    errors: dict[int, Exception] = {}
    bar = progress(total=sum(map(work.size, missing)), desc=work.job.title, unit=work.job.unit)
    # must be set before the workers start: OpenMP reads it only once
    cores = lifecycle.environment("OMP_NUM_THREADS", str(threads or num_threads()))
    with bar, cores, _task_runner(where) as pool, _no_orphans():
        given = {
            "folder": unmapped(str(work.folder)),
            "number": missing,
            "threads": unmapped(threads),
        }
        for number, future in zip(missing, pool.map(shard, given), strict=True):
            try:
                future.result()
            except Exception as error:
                errors[number] = error
            bar.update(work.size(number))
    if errors:
        number, first = min(errors.items())
        if isinstance(first, UnidecError):
            raise type(first)(f"{work.name(number)} failed\n{first}") from first
        raise TrainingError(
            f"{len(errors)} of {work.num_shards} shards failed, first {work.name(number)}: "
            f"{first!r}",
            where=work.folder,
            fix="re-run the command: it resumes with the missing shards",
        ) from first


@contextlib.contextmanager
def _no_orphans() -> Any:
    """On cancellation, kill the pool's processes, because the pool would wait for the shards in
    progress.
    """
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
        raise


@contextlib.contextmanager
def stages_in_shards(runner: str | None) -> Iterator[None]:
    """Inside the block, stages of a training divide large work among the workers of a runner, if
    `runner` or UNIDEC_RUNNER names one.

    Raises:
        ConfigError: as `parse_runner`.
    """
    text = runner or os.environ.get(VARIABLE)
    if not text:
        yield
        return
    parse_runner(text)
    # the flow's: a stage's task, which workers do not need, may not be copied to them
    context = contextvars.copy_context()

    def write(work: Work) -> None:
        context.copy().run(write_shards, work, text)

    with dividing(write):
        yield
