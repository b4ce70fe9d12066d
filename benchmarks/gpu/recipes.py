"""Cells of a comparison one after the other, on a machine without Prefect, MLflow or a network.

The folder runs/compare/<name> is as `unidec compare` leaves it: finished cells are kept, so that a
run on a later card resumes. Copied to another machine, `unidec compare FILE --keep-results
--report-only` writes the page.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import RESULTS, machine, table

from unidec.comparison import cell
from unidec.comparison.workspace import Comparison, Step, load_comparison, select, steps_of
from unidec.config import parse_overrides, with_settings
from unidec.data.json_file import read_json_lines
from unidec.data.storage import write_bytes_atomic
from unidec.errors import TrainingError

FILE = "comparison/minilm.yaml"
BUNDLE = "outputs/bundle"
METRICS = ("P@1", "nDCG@5", "PSP@5", "R@100")
COSTS = ("train_seconds", "refresh_seconds", "total_seconds")


def run_steps(steps: Sequence[Step], seconds: float, out: Path) -> None:
    """Run the steps that have no result, until the time is over; a stopped training leaves its
    checkpoint. Writes the table after each.
    """
    stopping = threading.Event()
    timer = threading.Timer(seconds, stopping.set)
    timer.daemon = True
    timer.start()
    cell.COMMAND = (sys.executable, os.path.abspath(__file__), "--cell")
    for step in steps:
        try:
            if not step.is_done():
                cell.run_step(step, {}, stopping)
        except TrainingError as error:
            print(f"{step.name}: {error}", flush=True)
        write_bytes_atomic(out, report(steps, out.stem).encode())
    timer.cancel()


def report(steps: Sequence[Step], title: str) -> str:
    """What the steps' results say: metrics of the test split, validation curves, costs."""
    rows = []
    for step in steps:
        if step.spec["kind"] == "data":
            continue
        rounds = sorted(step.folder.glob("runs/*/rounds.jsonl"))  # of a stopped training, too
        lines = [line for file in rounds for line in read_json_lines(file)]
        result = step.result() or {"metrics": {}, "costs": {}, "curve": lines}
        curve = [line["validation"]["nDCG@5"] for line in result["curve"] if "validation" in line]
        values = [result["metrics"].get(name) for name in METRICS]
        seconds = [result["costs"].get(name) for name in COSTS]
        numbers = ["" if x is None else f"{x:.1f}" for x in (*values, *seconds)]
        rows.append((step.name, " ".join(f"{x:.1f}" for x in curve), *numbers, step.failure()))
    where = ", ".join(f"{key}: {value}" for key, value in machine().items())
    head = ("run", "validation nDCG@5, heads alone", *METRICS, *COSTS, "failure")
    return f"# {title}\n\n{where}\n\n{table(head, rows)}\n"


def with_student(comparison: Comparison, steps: Sequence[Step], taught: str) -> list[Step]:
    """The steps, whose first run keeps its bundle, and once more the run `taught`, which has this
    bundle as its teacher.
    """
    data, first, *others = steps
    first = replace(first, spec={**first.spec, "keep": True})
    job = comparison.jobs[taught]
    bundle = str((first.folder / BUNDLE).resolve())
    params = with_settings(job.params, {"teacher.bundle": bundle})
    assert params is not None
    student = steps_of({taught: replace(job, params=params)}, comparison.root)[taught]
    return [data, first, *others, replace(student, name=f"{taught}, taught by {first.name}")]


def main(name: str, only: Sequence[str], minutes: float, taught: str = "") -> int:
    """The command line of a run.

    Args:
        taught: a cell that runs once more, with the bundle of the first one as its teacher.
    """
    parser = argparse.ArgumentParser(description=f"run {name}")
    parser.add_argument("--only", action="append", help="cell, data/cell or data/cell/seed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--minutes", type=float, default=minutes, help=f"{minutes:g}")
    parser.add_argument("--file", default=FILE, help=FILE)
    options = parser.parse_args()
    comparison = load_comparison(options.file, parse_overrides(options.set))
    begin = time.monotonic()
    steps = select(comparison, options.only or list(only))
    if taught and not options.only:
        steps = with_student(comparison, steps, taught)
    out = RESULTS / f"gpu-{name}.md"
    run_steps(steps, 60 * options.minutes, out)
    print(report(steps, out.stem), f"{time.monotonic() - begin:.0f} s")
    return 0


def run_cell(folder: str) -> int:
    """One cell, in a process of its own."""
    from unidec import pipeline
    from unidec.comparison.peers import running

    pipeline.train = functools.partial(pipeline.train, track=False)
    path = f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"
    running.start_command = lambda script: ["env", path, sys.executable, str(script)]
    return cell.main(folder)


if __name__ == "__main__":
    raise SystemExit(run_cell(sys.argv[2]))
