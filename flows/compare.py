"""Compare every system of a comparison file on the same data and seeds, and report (docs/comparing.md).

`unidec compare FILE` starts `python -m flows.compare FILE`. Each data set and each (data set, system, seed) is a task
that runs in its own process and writes its result to a folder named by the hash of its inputs: finished tasks are not
run again, and a training that was stopped resumes from its checkpoint. A failure stops only tasks that depend on it.

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
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, as_completed
from prefect.task_runners import ThreadPoolTaskRunner

from flows import lifecycle
from unidec.comparison import results
from unidec.comparison.cell import run_step
from unidec.comparison.workspace import Step, load_comparison, select
from unidec.cores import num_threads
from unidec.errors import UnidecError
from unidec.progress import progress
from unidec.tracking.run import RUN_TAGS
from unidec.tracking.store import tracking_uri

make = task(run_step, name="cell", task_run_name="{step.name}", cache_policy=NO_CACHE, persist_result=False)


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
        tune: run the trials of the file's `tuning` instead, and write the best for each cell.
        keep_results: do not rebuild results that another version of the code made.

    Returns:
        {"report": its path, or "chosen": the file of the tuning; "runs": names of the requested runs}.

    Raises:
        UnidecError: the file is invalid, or some runs have no result; the others are in the report.
    """
    with lifecycle.at_work():
        comparison = load_comparison(file, overrides, folder, tune, keep_results)
        steps = select(comparison, only)
        outcomes = run_steps(steps, jobs, {"comparison": comparison.file.name} | ({"tuning": "trial"} if tune else {}))
        runs = [step.name for step in steps if step.name in comparison.jobs]
        if tune:
            chosen = results.write_chosen(comparison, steps, outcomes)
            return lifecycle.finished({"chosen": str(chosen), "runs": runs})
        page = results.write_report(comparison)
        print("\n".join("\t".join(row) for row in results.table(comparison)), flush=True)
        if metrics is not None and not outcomes[steps[-1].name]:
            results.write_metrics(Path(metrics), steps[-1])
        failures = [f"{name}: {reason}" for name, reason in outcomes.items() if reason]
        if failures:
            head = f"{len(failures)} of {len(outcomes)} steps have no result"
            raise UnidecError("\n".join([head, *failures, f"report: {page}"]))
        return lifecycle.finished({"report": str(page), "runs": runs})


def prepare(options: dict[str, Any]) -> None:
    """Report errors in the options and in the file before Prefect starts."""
    comparison = load_comparison(options["file"], options["overrides"], tune=options["tune"])
    select(comparison, options["only"])


def run_steps(steps: Sequence[Step], jobs: int, tags: dict[str, str]) -> dict[str, str]:
    """Runs the steps that have no result yet, `jobs` at a time, and waits for all of them.

    Args:
        steps: ordered so that each step comes after the steps that it needs. tags: tags of the MLflow runs.

    Returns:
        step -> "", or the reason why it has no result: "failed: ..." or "not run: ...".

    Raises:
        KeyboardInterrupt, TerminationSignal: after the children have written their checkpoints and ended.
    """
    jobs = max(1, jobs)
    todo = [step for step in steps if not step.is_done()]
    needed = {need for step in todo for need in step.needs}
    todo = [step for step in todo if step.spec["kind"] != "data" or step.name in needed]  # no unused data sets
    outcomes = {step.name: "" for step in steps}
    threads = str(max(1, num_threads() // jobs))
    shared = {
        "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "MLFLOW_TRACKING_URI": tracking_uri("."),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }  # fmt: skip
    tags = json.loads(os.environ.get(RUN_TAGS, "{}")) | tags
    stopping = threading.Event()
    futures: dict[str, PrefectFuture[None]] = {}
    bar = progress(total=len(todo), desc="compare", unit="run")
    with bar, ThreadPoolTaskRunner(max_workers=jobs) as pool:
        try:
            for step in todo:
                environment = shared | {RUN_TAGS: json.dumps(tags | {"mlflow.runName": step.name})}
                inputs = {"step": step, "environment": environment, "stopping": stopping}
                before = [futures[name] for name in step.needs if name in futures]
                futures[step.name] = pool.submit(make, inputs, wait_for=before)
            for _ in as_completed(list(futures.values())):
                bar.update(1)
        except BaseException:
            stopping.set()
            raise
    for step in todo:
        if failed := [need for need in step.needs if outcomes[need]]:
            outcomes[step.name] = f"not run: needs {failed[0]}, which has no result"
        elif isinstance(error := futures[step.name].result(raise_on_failure=False), BaseException):
            outcomes[step.name] = f"failed: {error}"
    return outcomes


def in_words(done: dict[str, Any]) -> str:
    """The path of the report, or of the chosen settings."""
    name = "chosen" if "chosen" in done else "report"
    return f"{name}: {done[name]}"
