"""How long a training takes with fewer cores than the machine has, against its fair time there.

    python benchmarks/quota.py --small
    python benchmarks/quota.py --project . --output benchmarks/results/quota.json

Three runs of one training: alone; in a control group (container) of `--cores` cores; and beside
`--busy` processes that never wait. By default it is `make train` in a project, each time with
another seed, so that nothing is reused; `--small` is `unidec.fit` on 1,200 queries. The fair time
is the processor time of the run alone, divided by the cores that it can have, or its wall time if
that is longer. Beside busy processes, a training of as many threads as cores has its share of them.
Requires root, or a control group that may be written."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST = 2.0  # allowed multiple of the fair time
GROUPS = Path("/sys/fs/cgroup")
NAME = f"unidec-quota-{os.getpid()}"
PERIOD_US = 100_000
JOIN = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
BUSY = "while True: pass"
FIT = """
import sys, unidec
kinds, parts = 60, ("wheel", "brake", "chain", "pedal", "frame", "saddle", "fork")
labels = [f"{part} for bicycle {kind}" for kind in range(kinds) for part in parts]
queries = [f"new {labels[place % len(labels)]} in shop {place % 37}" for place in range(1200)]
pairs = [(place, place % len(labels)) for place in range(1200)]
with unidec.fit(queries, labels, pairs, params={"seed": int(sys.argv[1])}) as model:
    print(model)
"""


@contextlib.contextmanager
def control_group(cores: float) -> Iterator[Path]:
    """A new control group of so many cores, of version 2 or 1."""
    is_v2 = (GROUPS / "cgroup.controllers").is_file()
    folder = GROUPS / NAME if is_v2 else GROUPS / "cpu" / NAME
    quota = int(cores * PERIOD_US)
    folder.mkdir()
    try:
        if is_v2:
            (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
        yield folder
    finally:
        folder.rmdir()


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(project: Path | None, seed: int, prefix: tuple[str, ...] = ()) -> dict[str, float]:
    """Wall and processor seconds of a training; `prefix` begins its command."""
    command = [sys.executable, "-c", FIT, str(seed)]
    if project is not None:
        command = ["make", "train", f"ARGS=--set seed={seed}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    subprocess.run([*prefix, *command], cwd=project, check=True)
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall, 1), "processor_s": round(used, 1)}


def compared(run: dict[str, float], alone: dict[str, float], cores: float) -> dict[str, float]:
    """A run with its fair time and the ratio to it."""
    fair = max(alone["wall_s"], alone["processor_s"] / cores)
    return run | {
        "cores": round(cores, 2),
        "fair_s": round(fair, 1),
        "ratio": round(run["wall_s"] / fair, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--project", type=Path, default=Path(), help="folder in which `make train` works"
    )
    parser.add_argument(
        "--small", action="store_true", help="unidec.fit on 1,200 queries, in place of make train"
    )
    parser.add_argument("--cores", type=float, default=1.5)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    project = None if given.small else given.project.absolute()
    num_cores = len(os.sched_getaffinity(0))
    seed = int(time.time())
    alone = measure(project, seed)
    found: dict[str, Any] = {
        "machine_cores": num_cores,
        "load_before": round(os.getloadavg()[0], 1),
        "alone": alone,
    }
    with control_group(given.cores) as folder:
        limited = measure(project, seed + 1, ("sh", "-c", JOIN, "sh", str(folder)))
    found["control group"] = compared(limited, alone, min(given.cores, num_cores))
    with busy_processes(given.busy):
        beside = measure(project, seed + 2)
    share = num_cores * num_cores / (num_cores + given.busy)
    found["beside busy processes"] = compared(beside, alone, share)
    text = json.dumps(found, indent=2)
    print(text)
    if given.output:
        given.output.write_text(text + "\n", encoding="utf-8")
    ratios = [found[name]["ratio"] for name in ("control group", "beside busy processes")]
    return int(max(ratios) > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
