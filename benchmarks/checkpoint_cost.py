"""What checkpoints cost on the default job: how long a save holds training up, and how soon a killed run steps again.

    python benchmarks/checkpoint_cost.py
    python benchmarks/checkpoint_cost.py --set encoder.kind=bag --saves 5

Prints a table and writes JSON. The trainer is the real one on the ingested data set and its token caches, with clusters
and hard negatives from token embeddings (`step_cost.py`). A save's processor time hardly depends on what else the
machine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import machine
from step_cost import open_trainer

from unidec.config import Params, load_params, parse_overrides, recipe_names
from unidec.data.storage import write_json
from unidec.pipeline import paths
from unidec.training.checkpoint import checkpoint_folders
from unidec.training.refresh import Refresh
from unidec.training.trainer import Trainer, TrainingData


def endless(trainer: Trainer) -> Iterator[float]:
    """Seconds of one step after the other, for as long as somebody asks."""
    steps = trainer.steps(10**9)
    while True:
        begin = time.perf_counter()
        next(steps)
        yield time.perf_counter() - begin


def measure_saves(trainer: Trainer, num_saves: int, num_steps: int) -> dict[str, Any]:
    """Seconds of steps, and of saves between them."""
    steps = endless(trainer)
    for _ in range(3):
        next(steps)
    alone: list[float] = []
    held, processor = [], []
    for _ in range(num_saves):
        alone += [next(steps) for _ in range(num_steps)]
        begin, used = time.perf_counter(), time.process_time()
        trainer.save()
        held.append(time.perf_counter() - begin)
        processor.append(time.process_time() - used)
    return {"step_seconds": statistics.median(alone), "held_seconds": held, "processor_seconds": processor}


def measure_resume(params: Params, run_dir: Path) -> dict[str, float]:
    """Seconds from opening the data to the end of the first step, in a process that has imported everything."""
    begin = time.perf_counter()
    tokens = (paths.open_tokens("queries"), paths.open_tokens("labels"))
    trainer = Trainer(params.training, TrainingData(paths.open_dataset(), *tokens), run_dir, paths.CACHE)
    opened = time.perf_counter() - begin
    assert trainer.at.step > 0
    trainer.made = Refresh.load(run_dir / "refresh" / "epoch-00000", 0)
    trainer.model.train()
    next(endless(trainer))
    return {"open_seconds": opened, "to_first_step_seconds": time.perf_counter() - begin}


def table(result: dict[str, Any], minutes: float) -> str:
    """The result as people read it."""
    held, processor = (statistics.median(result[key]) for key in ("held_seconds", "processor_seconds"))
    rows = [
        ("size of a checkpoint", f"{result['bytes'] / 1e6:.0f} MB"),
        ("a step", f"{1000 * result['step_seconds']:.0f} ms"),
        ("save holds training up", f"{held:.2f} s"),
        ("the same in processor time", f"{processor:.2f} s"),
        (f"share of training time, one every {minutes:g} minutes", f"{100 * held / (60 * minutes):.2f}%"),
        ("resume: data, model and checkpoint open", f"{result['resume']['open_seconds']:.2f} s"),
        ("resume: first step done", f"{result['resume']['to_first_step_seconds']:.2f} s"),
    ]
    return "\n".join(f"{name:52} {value:>10}" for name, value in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=recipe_names(), default="unidec")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="other parameters")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps between two saves")
    parser.add_argument("--folder", type=Path, help="where the run is written (default: the system's temporary one)")
    parser.add_argument("--output", type=Path, help="JSON (benchmarks/results/checkpoint-cost-<recipe>.json)")
    arguments = parser.parse_args()
    overrides = parse_overrides(arguments.set)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        file = Path(folder) / "params.yaml"
        file.write_text(f"recipe: {arguments.recipe}\n", encoding="utf-8")
        params = load_params(file, overrides)
        run_dir = Path(folder) / "run"
        trainer = open_trainer(params, run_dir)
        trainer.made.save(run_dir / "refresh" / "epoch-00000", 0)
        trainer.made = Refresh.load(run_dir / "refresh" / "epoch-00000", 0)
        result = measure_saves(trainer, arguments.saves, arguments.steps)
        result["bytes"] = sum(path.stat().st_size for path in checkpoint_folders(run_dir)[0].iterdir())
        del trainer
        result["resume"] = measure_resume(params, run_dir)
    facts = {"recipe": arguments.recipe, "overrides": overrides, "load": os.getloadavg()[0], **machine()}
    output = arguments.output or Path(__file__).parent / "results" / f"checkpoint-cost-{arguments.recipe}.json"
    write_json(output, {"facts": facts, "result": result})
    print(table(result, params.run.checkpoint_minutes))


if __name__ == "__main__":
    main()
