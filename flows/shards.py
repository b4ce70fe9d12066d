"""Batch work in shards, mapped over processes of this machine, over Dask or over Ray; one setting chooses which.

    runner      where shards are written
    processes   this machine, a process for each core; `processes:4` for four (the default)
    threads     threads of this process
    dask        a Dask cluster that is started here for the run; `dask:2` for two workers
    dask://host:8786    a Dask cluster that is there
    ray, ray://host:10001   the same with Ray

Given as a parameter, or in the environment as UNIDEC_RUNNER. Workers are told a folder and a number: they need this
package, and must see the same folders. What is written is whole, so whatever dies, the same command goes on with what
is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flows  # noqa: F401  sets Prefect's home and quiets it, before it is imported

# isort: split
from prefect import flow, task, unmapped
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.futures import as_completed
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import endings
from flows.runners import SYNTAX, VARIABLE, Runner
from unidec.config import load_params, parse_overrides
from unidec.errors import ArtifactError, ConfigError, TrainingError, UnidecError
from unidec.pipeline import shards as work
from unidec.progress import Progress, progress

ROUNDS = 3  # attempts: a pool that broke because a worker died is started again
_FAREWELL = "stopped: the same command goes on with the shards that are missing"
log = logging.getLogger("unidec.flows")


# -- the tasks --------------------------------------------------------------------------------------------------------


def worth_retrying(_task: Any, _task_run: Any, state: Any) -> bool:
    """An error that names its fix stays one however often it is tried."""
    return not isinstance(state.result(raise_on_failure=False), UnidecError)


@task(
    name="shard",
    task_run_name="shard {number}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=2,
    retry_delay_seconds=[1, 10],
    retry_condition_fn=worth_retrying,
)
def shard(folder: str, number: int, threads: int = 0) -> dict[str, Any]:
    """Writes one shard, unless it is there."""
    return work.run_shard(folder, number, threads)


@task(name="merge", task_run_name="merge", cache_policy=NO_CACHE, persist_result=False)
def merge(folder: str) -> dict[str, Any]:
    """Writes the result of all shards."""
    return work.merge(folder)


def write_shards(folder: str | os.PathLike[str], runner: str | None = None) -> int:
    """Writes all shards of a plan that are missing, and returns how many those were.

    Raises:
        UnidecError: what a shard raised, naming the shard and its rows.
    """
    folder, where = os.path.abspath(folder), Runner.parse(runner)
    first: list[int] | None = None
    errors: dict[int, BaseException] = {}
    for _ in range(ROUNDS):
        plan = work.describe(folder)
        missing = plan["missing"]
        first = missing if first is None else first
        if not missing:
            return len(first)
        if errors:
            log.warning("%s; %d shards are tried again", _named(plan, errors), len(missing))
        elif len(missing) < plan["shards"]:
            log.info("%d of %d shards are there already", plan["shards"] - len(missing), plan["shards"])
        errors = _round(folder, plan, where)
        for number, error in sorted(errors.items()):
            if isinstance(error, UnidecError):
                raise type(error)(f"{plan['names'][number]} failed\n{error}") from error
    plan = work.describe(folder)
    if not plan["missing"]:
        return len(first or [])
    if errors:
        raise TrainingError(
            _named(plan, errors), where=folder, fix="run the same command again: it goes on with the missing shards"
        ) from next(iter(errors.values()))
    raise ArtifactError(
        "workers wrote shards that are not seen here",
        where=folder,
        got=plan["names"][plan["missing"][0]],
        fix="input, output and bundle must lie in a folder that all machines share under the same path",
    )


def _named(plan: dict[str, Any], errors: dict[int, BaseException]) -> str:
    number = min(errors)
    error = errors[number]
    return f"{len(errors)} of {plan['shards']} shards failed, first {plan['names'][number]}: {error or repr(error)}"


def _round(folder: str, plan: dict[str, Any], where: Runner) -> dict[int, BaseException]:
    """Every missing shard once, retries included; returns what those that failed raised."""
    missing, sizes = plan["missing"], plan["sizes"]
    errors: dict[int, BaseException] = {}
    bar: Progress[None] = progress(total=sum(sizes[number] for number in missing), desc=plan["kind"], unit="row")
    if len(missing) == 1 and where.address is None:  # a pool would take longer to start
        with bar:
            shard(folder, missing[0])
            bar.update(sizes[missing[0]])
        return errors
    where = where if where.address else dataclasses.replace(where, workers=min(where.workers, len(missing)))
    with bar, _one_server(), _threads(where.threads), where.task_runner() as pool, _no_orphans(where):
        told = {"folder": unmapped(folder), "number": missing, "threads": unmapped(where.threads)}
        futures = pool.map(shard, told)
        number_of = {future.task_run_id: number for future, number in zip(futures, missing, strict=True)}
        for done, future in enumerate(as_completed(list(futures)), 1):
            number = number_of[future.task_run_id]
            try:
                future.result()
            except Exception as error:
                errors[number] = error
            bar.note(f"{done}/{len(missing)} shards")
            bar.update(sizes[number])
    return errors


@contextlib.contextmanager
def _one_server() -> Iterator[None]:
    """Workers report to this run's server, also when it is Prefect's temporary one: else each would start its own."""
    context = FlowRunContext.get()
    if context is None or PREFECT_API_URL.value():
        yield
        return
    with temporary_settings({PREFECT_API_URL: str(context.client.api_url).rstrip("/")}):
        yield


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    """Processes that start inside inherit this many threads: OpenMP reads it once, when it is loaded."""
    before = os.environ.get("OMP_NUM_THREADS")
    if number:
        os.environ["OMP_NUM_THREADS"] = str(number)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before


@contextlib.contextmanager
def _no_orphans(where: Runner) -> Iterator[None]:
    """Cancelled, the pool would wait for the shards at work: end its processes first. A shard is whole or not there."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        if where.kind == "processes":
            for child in set(multiprocessing.active_children()) - before:
                child.kill()
        raise


# -- flows of the data stages -----------------------------------------------------------------------------------------


@flow(name="unidec-tokens", persist_result=False)
def tokens(
    params_file: str = "params.yaml",
    overrides: dict[str, Any] | None = None,
    shards: int | None = None,
    runner: str | None = None,
) -> dict[str, Any]:
    """Writes the shards of both token caches; the stage `tokens` (`unidec data tokens`) then only joins them.

    Args:
        params_file, overrides: as the stage is run with.
        shards: for each cache; default: one for each million texts, and none below that.
        runner: where; see the top of this module.

    Raises:
        UnidecError: what a shard raised.
    """
    params = load_params(params_file, overrides)
    done: dict[str, Any] = {}
    for which in ("queries", "labels"):
        folder = work.token_shards_folder(which)
        with work.alone(folder):
            plan = work.tokens_in_shards(params, which, shards)
            small = shards is None and plan.num_shards == 1
            done[which] = {"texts": plan.num_rows, "shards": plan.num_shards}
            if small:
                plan.remove()  # the stage is done with it in seconds
                done[which]["shards"] = 0
            else:
                done[which]["written"] = write_shards(folder, runner)
    return done


@flow(name="unidec-encode", persist_result=False)
def encode(
    source: str,
    output: str,
    bundle: str = "outputs/bundle",
    side: str = "queries",
    dtype: str = "float32",
    column: str | None = None,
    shards: int | None = None,
    runner: str | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Vectors of texts by a bundle's model -> a folder of de.npy and clf.npy.

    Args:
        source: a token cache's folder, or a file of texts (.csv, .tsv, .jsonl, .parquet).
        output: the folder to write.
        bundle: a bundle's folder, or a model's.
        side: "queries" (both heads) or "labels" (label embeddings).
        dtype: "float32" or "float16".
        column: of the texts, if not `query` or `text`.
        shards: how many; default: one for each 65,536 texts.
        runner: where; see the top of this module.
        device: "cpu", "cuda" or "auto".

    Raises:
        UnidecError: what is wrong with model or texts.
    """
    for name, value, known in (("side", side, ("queries", "labels")), ("dtype", dtype, ("float32", "float16"))):
        if value not in known:
            raise ConfigError("unknown value", where=name, got=value, expected=" or ".join(known))
    folder = work.shards_folder(output)
    with work.alone(folder):
        work.begin_vectors(
            bundle, source, output, folder, side, dtype=dtype, column=column, shards=shards, device=device
        )  # fmt: skip
        write_shards(folder, runner)
        return merge(str(folder))


# -- command line -----------------------------------------------------------------------------------------------------


def on_command_line(run: Callable[[], Any]) -> int:
    """`endings.on_command_line`, with the words for shards."""
    return endings.on_command_line(run, _FAREWELL)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of everything that runs in shards."""
    parser.add_argument("--shards", type=int, metavar="N", help="how many (default: by the number of rows)")
    parser.add_argument("--runner", metavar="WHERE", help=f"{SYNTAX} (default: ${VARIABLE}, else processes)")


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m flows.shards`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.shards",
        description="Tokenise or encode millions of texts in shards.",
        epilog="examples:\n"
        "  python -m flows.shards tokens --runner dask://scheduler:8786      then: unidec data tokens\n"
        "  python -m flows.shards encode data/tokens/labels vectors --side labels --dtype float16\n"
        "  python -m flows.shards encode queries.parquet vectors --shards 8 --runner processes:4\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("tokens", help="the token caches of the data set")
    one.add_argument("--params", default="params.yaml", metavar="FILE", help="parameters (default: params.yaml)")
    one.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value for a parameter")
    add_options(one)
    one = commands.add_parser("encode", help="vectors of texts by a bundle's model")
    one.add_argument("source", help="a token cache's folder, or .csv, .tsv, .jsonl or .parquet")
    one.add_argument("output", help="the folder to write")
    one.add_argument("--bundle", default="outputs/bundle", metavar="FOLDER", help="a bundle's folder, or a model's")
    one.add_argument("--side", default="queries", choices=["queries", "labels"], help="labels: label embeddings only")
    one.add_argument("--dtype", default="float32", choices=["float32", "float16"])
    one.add_argument("--column", help="of the texts, if not `query` or `text`")
    one.add_argument("--device", default="cpu", choices=["cpu", "cuda", "auto"])
    add_options(one)
    told = vars(parser.parse_args(arguments))
    if told.pop("command") == "encode":
        return on_command_line(lambda: encode(**told))
    return on_command_line(
        lambda: tokens(told["params"], parse_overrides(told["set"]) or None, told["shards"], told["runner"])
    )


if __name__ == "__main__":
    from flows.shards import main as _main  # workers import this module by its name

    sys.exit(_main())
