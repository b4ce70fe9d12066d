"""Predict a file of queries of any size, in shards; resumable; on this machine or on a cluster
(docs/scale.md).

Run `python -m flows.predict`, or the deployment `unidec-predict/predict`. `unidec predict` does the
same in a single process, without Prefect. Shards are tasks, mapped over processes or threads, or a
Dask or Ray cluster (`runner`, or UNIDEC_RUNNER); workers receive a folder and a number, import this
module by its name, and must see the same folders.

examples:
  python -m flows.predict --input queries.parquet --output predictions.parquet
  python -m flows.predict --input q.csv.gz --output p.parquet -k 10 --shards 64 --runner processes:8
  python -m flows.predict --input q.parquet --output p.parquet --bundle models:/unidec@champion \\
      --runner dask://scheduler:8786
"""

from __future__ import annotations

if __name__ == "__main__":
    from flows.command import main

    raise SystemExit(main("predict"))

import contextlib
import importlib
import multiprocessing
import os
import re
import signal
from typing import Any, Literal, NamedTuple

from prefect import flow, task, unmapped
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from flows import lifecycle
from unidec.bundle import predict_file
from unidec.config import RawBounds
from unidec.cores import num_threads
from unidec.data.shards import Work, alone, shards_folder
from unidec.errors import ConfigError, TrainingError, UnidecError
from unidec.pipeline.parent_watch import watch
from unidec.progress import progress
from unidec.tracking.fetch import fetch_bundle

VARIABLE = "UNIDEC_RUNNER"
SYNTAX = "processes or threads, also with :N workers, or dask://host:port, ray://host:port"


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
    if found := re.fullmatch(r"(dask|ray)://(\S+:\d+)", text):
        return Runner(found[1], address=("tcp://" if found[1] == "dask" else "ray://") + found[2])
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
    """Initialise a worker process: its parent handles Ctrl-C, and if the parent is killed, the
    worker ends.
    """
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
    retry_condition_fn=lifecycle.worth_retrying,
)
def shard(folder: str, number: int, threads: int = 0) -> None:
    """Writes one shard, unless it exists."""
    predict_file.run_shard(folder, number, threads)


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
    bar = progress(total=sum(map(work.size, missing)), desc="predict", unit="query")
    # must be set before the workers start: OpenMP reads it only once
    cores = (
        lifecycle.environment("OMP_NUM_THREADS", str(threads))
        if threads
        else contextlib.nullcontext()
    )
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
            f"{first or repr(first)}",
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


@flow(name="unidec-predict", description=__doc__, persist_result=False)
def predict(
    input: str,
    output: str,
    bundle: str = "outputs/bundle",
    k: int = 5,
    column: str | None = None,
    shards: int | None = None,
    runner: str | None = None,
    device: Literal["cpu", "cuda", "auto"] = "cpu",
    runtime: Literal["torch", "auto", "onnx", "onnx-int8"] = "auto",
    quotes: Literal["auto", "yes", "no"] = "auto",
) -> dict[str, Any]:
    """Predicts every query of a file; after a kill or cancellation, the same call resumes with the
    missing shards.

    Args:
        input: .csv, .tsv, .jsonl (also with .gz) or .parquet with a column of queries.
        output: .parquet, .csv, .tsv or .jsonl, a row per query and label, in the input's order.
        bundle: a bundle's folder, or a registered one: models:/unidec@champion.
        k: labels per query.
        column: column of the queries; default: `query` or `text`.
        shards: number of shards; default: one per 65,536 queries.
        runner: processes, threads (:N workers), dask://host:port or ray://host:port; default
            UNIDEC_RUNNER, processes.
        device: device that workers run the model on.
        runtime: runtime of the query encoder; auto: as in the server.
        quotes: whether quotes in a .csv or .tsv file enclose fields, as in `raw.quotes`.

    Returns:
        {"rows", "shards", "output"}.

    Raises:
        UnidecError: an error in the bundle, the input or a shard, which is named with its rows.
    """
    parse_runner(runner)  # reports a mistake before the input is read
    with lifecycle.at_work(), alone(shards_folder(output)):
        folder = str(fetch_bundle(bundle))
        request = predict_file.FileRequest(
            folder, input, output, k, column, device=device, runtime=runtime
        )
        work = predict_file.begin_predictions(request, shards, RawBounds(quotes=quotes))
        write_shards(work, runner)
        written = lifecycle.run("merge", predict_file.merge, work)
        done = {"rows": work.num_rows, "shards": work.num_shards, "output": str(written)}
        return lifecycle.finished(done)


def in_words(done: dict[str, Any]) -> str:
    """The result in one line."""
    return f"{done['rows']:,} rows in {done['shards']:,} shards -> {done['output']}"
