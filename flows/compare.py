"""Compare every system of a comparison file on the same data and seeds, and report
(docs/comparing.md).

`unidec compare FILE` starts `python -m flows.compare FILE`. Each data set and each (data set,
system, seed) is a task that runs in its own process and writes its result to a folder named by the
hash of its inputs: finished tasks are not run again, and a training that was stopped resumes from
its checkpoint. A failure stops only tasks that depend on it.

examples:
  unidec compare comparison/small.yaml
  unidec compare comparison/fair.yaml --tune --jobs 2
  unidec compare comparison/fair.yaml --only "lf-debian titles/unidec/0" --jobs 2
"""

from __future__ import annotations

if __name__ == "__main__":
    from flows.command import main

    raise SystemExit(main("compare"))

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import Task, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, as_completed
from prefect.task_runners import ThreadPoolTaskRunner

from flows import lifecycle
from unidec.comparison import results
from unidec.comparison.cell import run_step
from unidec.comparison.chosen import write_chosen
from unidec.comparison.tune import subject_of, tune_cell
from unidec.comparison.workspace import Comparison, Step, load_comparison, matching, select
from unidec.cores import num_threads
from unidec.errors import UnidecError
from unidec.progress import Progress, progress
from unidec.tracking.run import RUN_TAGS, run_tags
from unidec.tracking.store import tracking_uri

make = task(
    run_step, name="cell", task_run_name="{step.name}", cache_policy=NO_CACHE, persist_result=False
)
search = task(
    tune_cell,
    name="search",
    task_run_name="{subject.name}",
    cache_policy=NO_CACHE,
    persist_result=False,
)


@flow(name="unidec-compare", description=__doc__, persist_result=False, validate_parameters=False)
def compare(
    file: str,
    only: Sequence[str] = (),
    overrides: dict[str, Any] | None = None,
    jobs: int = 1,
    folder: str | None = None,
    metrics: str | None = None,
    tune: bool = False,
    keep_results: bool = False,
) -> dict[str, Any]:
    """Runs the tasks that have no result yet, and writes report.html.

    Args:
        file: the comparison file.
        only: cell, data/cell or data/cell/seed, with wildcards; may be repeated; empty: all.
        overrides: override a parameter of all cells; may be repeated.
        jobs: parallel runs; times are comparable only with 1.
        folder: folder of the workspace, instead of runs/compare/<name>.
        metrics: JSON file to write the metrics of the last requested run to.
        tune: search the ranges of the file's `tuning` instead, and write the best settings of each
            cell.
        keep_results: do not rebuild results that another version of the code made.

    Returns:
        {"report": its path, or "chosen": the file of the tuning; "runs": names of the requested
        runs}.

    Raises:
        UnidecError: the file is invalid, or some runs have no result; the others are in the report.
    """
    with lifecycle.at_work():
        comparison = load_comparison(file, overrides, folder, tune, keep_results)
        tags = {"comparison": comparison.file.name}
        if tune:
            searched = [key for key in comparison.jobs if key in matching(comparison, only)]
            chosen = tune_cells(comparison, searched, jobs)
            return lifecycle.finished({"chosen": str(chosen), "runs": searched})
        steps = select(comparison, only)
        outcomes = run_steps(steps, jobs, tags)
        runs = [step.name for step in steps if step.name in comparison.jobs]
        page = results.write_report(comparison)
        print(results.table(comparison), flush=True)
        if metrics is not None and not outcomes[steps[-1].name]:
            results.write_metrics(Path(metrics), steps[-1])
        failures = [f"{name}: {reason}" for name, reason in outcomes.items() if reason]
        _check_failures(failures, f"{len(outcomes)} steps", f"report: {page}")
        return lifecycle.finished({"report": str(page), "runs": runs})


def prepare(options: dict[str, Any]) -> None:
    """Report errors in the options and in the file before Prefect starts."""
    comparison = load_comparison(options["file"], options["overrides"], tune=options["tune"])
    select(comparison, options["only"])


def run_steps(steps: Sequence[Step], jobs: int, tags: dict[str, str]) -> dict[str, str]:
    """Runs the steps that have no result yet, `jobs` at a time, and waits for all of them.

    Args:
        steps: ordered so that each step comes after the steps that it needs. tags: tags of the
            MLflow runs.

    Returns:
        step -> "", or the reason why it has no result: "failed: ..." or "not run: ...".

    Raises:
        KeyboardInterrupt, TerminationSignal: after the children have written their checkpoints and
            ended.
    """
    todo = [step for step in steps if not step.is_done()]
    needed = {need for step in todo for need in step.needs}
    # no unused data sets
    todo = [step for step in todo if step.spec["kind"] != "data" or step.name in needed]
    outcomes = {step.name: "" for step in steps}
    shared = _environment(jobs)
    tags = run_tags() | tags
    inputs = {}
    for step in todo:
        environment = shared | {RUN_TAGS: json.dumps(tags | {"mlflow.runName": step.name})}
        inputs[step.name] = {"step": step, "environment": environment}
    with progress(total=len(todo), desc="compare", unit="run") as bar:
        futures = _submitted(make, inputs, jobs, {step.name: step.needs for step in todo}, bar)
    for step in todo:
        if failed := [need for need in step.needs if outcomes[need]]:
            outcomes[step.name] = f"not run: needs {failed[0]}, which has no result"
        elif isinstance(error := futures[step.name].result(raise_on_failure=False), BaseException):
            outcomes[step.name] = f"failed: {error}"
    return outcomes


def tune_cells(comparison: Comparison, searched: Sequence[str], jobs: int) -> Path:
    """Searches the settings of cells, `jobs` at a time, and writes the best of each.

    Args:
        searched: keys of the cells' jobs.

    Raises:
        UnidecError: searches failed; the best settings of the others are written.
        KeyboardInterrupt, TerminationSignal: after the trainings have written their checkpoints and
            ended.
    """
    tuning = comparison.file.tuning
    assert tuning is not None
    shared = _environment(jobs)
    inputs = {
        key: {"subject": subject_of(comparison, key, shared), "trials": tuning.trials}
        for key in searched
    }
    with progress(total=len(searched), desc="tune", unit="cell") as bar:
        futures = _submitted(search, inputs, jobs, {}, bar)
    failures: list[str] = []
    found = {}
    for key, future in futures.items():
        trials = future.result(raise_on_failure=False)
        if isinstance(trials, BaseException):
            failures.append(f"{key}: {trials}")
        else:
            found[comparison.jobs[key].cell] = trials
    path = write_chosen(comparison.path, comparison.file, found)
    _check_failures(failures, f"{len(searched)} searches", f"chosen: {path}")
    return path


def _check_failures(failures: Sequence[str], steps: str, written: str) -> None:
    """Raise an UnidecError with these failures, if there are any, and with what was written."""
    if failures:
        head = f"{len(failures)} of {steps} have no result"
        raise UnidecError("\n".join([head, *failures, written]))


def _environment(jobs: int) -> dict[str, str]:
    """Of the processes of `jobs` trainings at a time: threads, and where MLflow's store is."""
    threads = str(max(1, num_threads() // max(1, jobs)))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "MLFLOW_TRACKING_URI": tracking_uri(),
    }


def _submitted(
    work: Task[Any, Any],
    inputs: dict[str, dict[str, Any]],
    jobs: int,
    needs: dict[str, tuple[str, ...]],
    bar: Progress[Any],
) -> dict[str, PrefectFuture[Any]]:
    """Runs a task for each inputs, `jobs` at a time, each after those it needs; waits for all.
    Tasks get `stopping`.
    """
    stopping = threading.Event()
    futures: dict[str, PrefectFuture[Any]] = {}
    with ThreadPoolTaskRunner(max_workers=max(1, jobs)) as pool:
        try:
            for name, given in inputs.items():
                before = [futures[need] for need in needs.get(name, ()) if need in futures]
                futures[name] = pool.submit(work, {**given, "stopping": stopping}, wait_for=before)
            for _ in as_completed(list(futures.values())):
                bar.update(1)
        except BaseException:
            stopping.set()
            raise
    return futures


def in_words(done: dict[str, Any]) -> str:
    """The path of the report, or of the chosen settings."""
    name = "chosen" if "chosen" in done else "report"
    return f"{name}: {done[name]}"
