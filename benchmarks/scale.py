"""How time and memory grow with the number of queries N and labels L, on synthetic data; writes
benchmarks/results/.

    python benchmarks/scale.py step     # training steps from 10^4 to 10^7 labels at a fixed pool
    # ingest, tokens, propensities, label graph, clustering, mining
    python benchmarks/scale.py data
    # both: about 11 minutes on two cores, 12 GiB of memory, 6 GB of disk
    python benchmarks/scale.py all
    python benchmarks/scale.py step --labels 1e4,1e5 --rounds 3    # a quick look
    python benchmarks/scale.py show     # the tables of the results that are there

What a result file has already is measured again only with --again. Every size
runs in a process of its own, so that peak memory is its own. The sizes of `step` take turns, a few
steps each, and are compared with L = 10^5 within each turn: what disturbs the machine disturbs all
of them alike. A second process of 10^5 labels shows what the difference between two equal processes
is."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measure import machine

from unidec.data.storage import write_json
from unidec.progress import progress

HERE = Path(__file__).resolve().parent
REFERENCE = 100_000
CONTROL = "100000 again"
LABELS = (10_000, 100_000, 1_000_000, 10_000_000)
VARIANTS = {
    "bf16-adagrad": {"dtype": "bf16", "state": "adagrad"},
    "fp32-adam": {"dtype": "fp32", "state": "adam"},
    "bf16-adagrad-disk": {"dtype": "bf16", "state": "adagrad", "place": "disk"},
}
STEP_SIZE = {
    "train": 100_000,
    "batch": 256,
    "pool": 1500,
    "dim": 64,
    "kind": "bag",
    "hidden": 64,
    "layers": 1,
}
FROM_RAW = (
    "raw",
    "ingest",
    "tokens",
    "token_cache",
    "propensity",
    "label_graph",
    "sampler",
    "vectors",
    "cluster",
    "mine",
)
STORED = ("store", "token_cache", "propensity", "label_graph", "sampler", "vectors", "mine")
LARGEST_RAW = 1_000_000
MOST_QUERIES = 1_000_000


class Results:
    """Cells by name in one JSON file, written after each."""

    def __init__(self, path: Path, again: bool) -> None:
        self.path = path
        there = path.is_file() and not again
        self.cells: dict[str, Any] = (
            json.loads(path.read_text(encoding="utf-8"))["cells"] if there else {}
        )

    def add(self, cells: dict[str, Any]) -> None:
        self.cells |= cells
        write_json(self.path, {"machine": machine(), "cells": self.cells})


class Worker:
    """A process of `scale_step.py` that waits for its turn."""

    def __init__(self, folder: Path, size: dict[str, Any]) -> None:
        self.log = folder.with_suffix(".log")
        command = [sys.executable, str(HERE / "scale_step.py"), str(folder), json.dumps(size)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.started = self._answer()

    def run(self, steps: int) -> dict[str, Any]:
        return self._ask(f"run {steps}")

    def end(self) -> dict[str, Any]:
        facts = self._ask("end")
        self.process.wait()
        return facts

    def close(self) -> None:
        """End the process, however far it is; again is harmless."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise SystemExit(f"a worker ended early; the end of {self.log}:\n{_tail(self.log)}")
        return json.loads(line)


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])


@contextlib.contextmanager
def work_folder(given: Path | None) -> Iterator[Path]:
    """The given folder, kept; else a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="unidec-scale-") as folder:
        yield Path(folder)


# -- steps
# --------------------------------------------------------------------------------------------------


def measure_steps(options: argparse.Namespace) -> None:
    """Interleaved steps of all sizes, a variant after the other."""
    results = Results(options.output / "scale_step.json", options.again)
    labels = (
        [int(float(number)) for number in options.labels.split(",")]
        if options.labels
        else list(LABELS)
    )
    with work_folder(options.work) as work:
        for variant in options.variants.split(","):
            names = {f"{variant}/{count}": count for count in labels}
            names |= {f"{variant}/{CONTROL}": REFERENCE} if REFERENCE in labels else {}
            if names.keys() <= results.cells.keys():
                continue
            sizes = {
                name: STEP_SIZE | VARIANTS[variant] | {"labels": count, "threads": options.threads}
                for name, count in names.items()
            }
            results.add(
                _interleaved(work, sizes, options.rounds, options.steps, options.warm_up, variant)
            )
    print(step_table(results.cells))


def _interleaved(
    work: Path, sizes: dict[str, Any], rounds: int, steps: int, warm_up: int, variant: str
) -> dict[str, Any]:
    workers: dict[str, Worker] = {}
    try:
        for name, size in progress(list(sizes.items()), desc=f"start {variant}", unit="size"):
            workers[name] = Worker(work / f"labels-{size['labels']}", size)
            workers[name].run(warm_up)
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
        for turn in progress(range(rounds), desc=f"steps {variant}", unit="round"):
            names = list(workers)
            # none is always the first
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                answers[name].append(workers[name].run(steps))
        cells = {}
        for name, worker in workers.items():
            step_ms = [float(np.median(answer["step_ms"])) for answer in answers[name]]
            prepare_ms = [float(np.median(answer["prepare_ms"])) for answer in answers[name]]
            cells[name] = {
                **sizes[name],
                **worker.started,
                **worker.end(),
                "rounds": rounds,
                "steps_a_round": steps,
                "warm_up": warm_up,
                "pool_labels": answers[name][-1]["pool"],
                "step_ms": round(statistics.median(step_ms), 2),
                "prepare_ms": round(statistics.median(prepare_ms), 2),
                "step_ms_by_round": [round(x, 2) for x in step_ms],
            }
    finally:
        for worker in workers.values():
            worker.close()
    reference = cells.get(f"{variant}/{REFERENCE}")
    for cell in cells.values() if reference else ():
        pairs = zip(cell["step_ms_by_round"], reference["step_ms_by_round"], strict=True)
        ratios = [own / other for own, other in pairs]
        cell["ratio"] = round(statistics.median(ratios), 3)
        cell["ratio_quartiles"] = [round(float(q), 3) for q in np.quantile(ratios, (0.25, 0.75))]
    return cells


def step_table(cells: dict[str, Any]) -> str:
    """As people read it; ratios are to L = 10^5 of the same turn, with their quartiles."""
    head = (
        "variant",
        "labels",
        "ms a step",
        "of it prepare",
        "ratio to 1e5",
        "quartiles",
        "table+state MiB",
        "anonymous MiB",
        "peak MiB",
        "start s",
    )
    rows = []
    for name, cell in cells.items():
        variant, _, labels = name.partition("/")
        shown = labels if labels == CONTROL else f"{int(labels):,}"
        quartiles = " - ".join(f"{q:.2f}" for q in cell.get("ratio_quartiles", ()))
        ratio = f"{cell['ratio']:.3f}" if "ratio" in cell else ""
        rows.append(
            (
                variant,
                shown,
                f"{cell['step_ms']:.1f}",
                f"{cell['prepare_ms']:.1f}",
                ratio,
                quartiles,
                f"{cell['table_and_state_mib']:,.0f}",
                f"{cell['anonymous_mib']:,.0f}",
                f"{cell['peak_mib']:,.0f}",
                f"{cell['start_seconds']:.0f}",
            )
        )
    return table(head, rows)


# -- data
# --------------------------------------------------------------------------------------------------


def measure_data(options: argparse.Namespace) -> None:
    """Every stage at every size, each in a process of its own."""
    results = Results(options.output / "scale_data.json", options.again)
    labels = (
        [int(float(number)) for number in options.labels.split(",")]
        if options.labels
        else list(LABELS)
    )
    cells = [(stage, count) for count in labels for stage in _stages(count, options.stages)]
    with (
        work_folder(options.work) as work,
        progress(total=len(cells), desc="data", unit="cell") as bar,
    ):
        for stage, count in cells:
            name = f"{stage}/{count}"
            bar.note(name)
            # what makes the data runs whenever its folder is not there; the others where they are
            # not measured yet
            needed = {
                "raw": "raw",
                "store": "dataset",
                "ingest": "dataset",
                "tokens": "tokens",
            }.get(stage)
            missing = needed is not None and not (work / f"data-{count}" / needed).exists()
            vectors = stage == "vectors" and not (work / f"data-{count}" / "labels.npy").exists()
            if name not in results.cells or missing or vectors:
                size = {
                    "train": min(count, MOST_QUERIES),
                    "labels": count,
                    "threads": options.threads,
                }
                results.add({name: size | _stage(stage, work / f"data-{count}", size)})
            bar.update(1)
    print(data_table(results.cells))


def _stages(count: int, wanted: str | None) -> list[str]:
    stages = FROM_RAW if count <= LARGEST_RAW else STORED
    return [stage for stage in stages if wanted is None or stage in wanted.split(",")]


def _stage(stage: str, folder: Path, size: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "scale_data.py"), stage, str(folder), json.dumps(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{stage} at {size['labels']:,} labels failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def data_table(cells: dict[str, Any]) -> str:
    """As people read it; memory is what came on top of the imported libraries."""
    head = (
        "stage",
        "queries",
        "labels",
        "s",
        "us a row",
        "peak MiB",
        "anonymous MiB",
        "bytes a row",
        "remarks",
    )
    plain = {"seconds", "before_mib", "peak_mib", "anonymous_mib", "train", "labels", "threads"}
    rows = []
    for name, cell in sorted(cells.items(), key=lambda item: (_order(item[0]), item[1]["labels"])):
        per_row = cell["anonymous_mib"] * 2**20 / (cell["train"] + cell["labels"])
        count = cell["queries"] if name.startswith("mine") else cell["train"] + cell["labels"]
        remarks = ", ".join(
            f"{key} {_number(value)}" for key, value in cell.items() if key not in plain
        )
        rows.append(
            (
                name.partition("/")[0],
                f"{cell['train']:,}",
                f"{cell['labels']:,}",
                f"{cell['seconds']:.2f}",
                f"{1e6 * cell['seconds'] / count:.2f}",
                f"{cell['peak_mib']:,.0f}",
                f"{cell['anonymous_mib']:,.0f}",
                f"{per_row:,.0f}",
                remarks,
            )
        )
    return table(head, rows)


def _order(name: str) -> int:
    stage = name.partition("/")[0]
    known = [*dict.fromkeys((*FROM_RAW, *STORED))]
    # a stage of an older version comes last
    return known.index(stage) if stage in known else len(known)


def _number(value: float) -> str:
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}"


# -- all
# --------------------------------------------------------------------------------------------------


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(value) for value in line) + " |" for line in lines)


def show(options: argparse.Namespace) -> None:
    """The tables of the results that are there."""
    for name, make in (("step", step_table), ("data", data_table)):
        path = options.output / f"scale_{name}.json"
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            print(f"## {name}: {found['machine']}\n\n{make(found['cells'])}\n")


def measure_all(options: argparse.Namespace) -> None:
    """Steps, then data."""
    measure_steps(options)
    measure_data(options)


COMMANDS = {"step": measure_steps, "data": measure_data, "all": measure_all, "show": show}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=list(COMMANDS))
    parser.add_argument("--labels", help="sizes, such as 1e4,1e6 (10^4 to 10^7)")
    parser.add_argument(
        "--variants", default=",".join(VARIANTS), help=f"step: of {', '.join(VARIANTS)}"
    )
    parser.add_argument("--rounds", type=int, default=10, help="step: turns of each size (10)")
    parser.add_argument("--steps", type=int, default=10, help="step: steps a turn (10)")
    parser.add_argument(
        "--warm-up", type=int, default=50, help="step: steps before the clock starts (50)"
    )
    parser.add_argument("--stages", help="data: some of the stages, such as propensity,mine")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch (all cores)")
    parser.add_argument(
        "--work", type=Path, help="folder for the data, kept for the next time (a temporary one)"
    )
    parser.add_argument(
        "--output", type=Path, default=HERE / "results", help="folder of the JSON files"
    )
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    options = parser.parse_args()
    COMMANDS[options.what](options)


if __name__ == "__main__":
    main()
