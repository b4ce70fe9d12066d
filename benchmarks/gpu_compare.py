"""Runs of a comparison file on a machine with a GPU and nothing else: without Prefect, MLflow or a network.

    python benchmarks/gpu_compare.py comparison/minilm.yaml --only "lf-debian titles/*/0" --jobs 4 --minutes 10

Several runs share the GPU, so only their quality is comparable. After the given minutes, unfinished runs are stopped.
The folder runs/compare/<name> is as `unidec compare` leaves it: copied to another machine,
`unidec compare FILE --keep-results --report-only` writes the page.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from unidec.comparison import cell
from unidec.comparison.results import contrasts, gather
from unidec.comparison.workspace import Step, load_comparison, select
from unidec.config import parse_overrides
from unidec.cores import num_threads
from unidec.errors import TrainingError


def run_steps(steps: Sequence[Step], jobs: int, seconds: float) -> None:
    """Run the steps that have no result, several at a time, each after those that it needs."""
    stopping, done = threading.Event(), {step.name: threading.Event() for step in steps}
    begin, cell.COMMAND = time.monotonic(), (sys.executable, os.path.abspath(__file__), "--cell")
    timer = threading.Timer(seconds, stopping.set)
    timer.daemon = True
    timer.start()
    environment = {"OMP_NUM_THREADS": str(max(1, num_threads() // jobs))}

    def work(step: Step) -> None:
        for need in step.needs:
            done[need].wait()
        try:
            if not step.is_done():
                cell.run_step(step, environment, stopping)
            metrics = (step.result() or {}).get("metrics", {})
            shown = {name: round(metrics[name], 1) for name in ("P@1", "nDCG@5", "PSP@5", "R@100") if name in metrics}
            print(f"{time.monotonic() - begin:5.0f} s  {step.name}  {shown}", flush=True)
        except TrainingError as error:
            print(f"{time.monotonic() - begin:5.0f} s  {step.name}: {error}", flush=True)
        finally:
            done[step.name].set()

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for _ in pool.map(work, steps):
                pass
        finally:
            stopping.set()  # after Ctrl-C, the running ones end too


def main() -> None:
    if sys.argv[1] == "--cell":
        from unidec import pipeline
        from unidec.comparison.peers import running

        pipeline.train = functools.partial(pipeline.train, track=False)
        path = f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"
        running.start_command = lambda script: ["env", path, sys.executable, str(script)]
        sys.exit(cell.main(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the comparison file")
    parser.add_argument("--only", action="append", default=[], help="cell, data/cell or data/cell/seed, with wildcards")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a parameter of all cells")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (1)")
    parser.add_argument("--minutes", type=float, default=600.0, help="unfinished runs are stopped then (600)")
    options = parser.parse_args()
    comparison = load_comparison(options.file, parse_overrides(options.set))
    run_steps(select(comparison, options.only), options.jobs, 60 * options.minutes)
    contrasts(comparison, gather(comparison))  # writes scores.npz of each run


if __name__ == "__main__":
    main()
