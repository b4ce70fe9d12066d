"""One of our recipes for `time_to_quality.py`: `time_to_quality_ours.py FOLDER`.

FOLDER is the working folder, FOLDER/asked.json holds the parameters. The stages of `make train` run as they are there;
in training the validation split is measured whenever a point of the curve is due. Seconds include tokens, the frozen
transformer's vectors of all texts, every refresh and checkpoint, and, as served, the export and the stage index with
its fusion. They do not include reading the raw files and measuring.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from measure import Clock

from unidec import pipeline
from unidec.config import Params
from unidec.data.dataset import write_dataset
from unidec.data.formats import read_section
from unidec.data.raw import make_slice
from unidec.data.storage import write_folder, write_json
from unidec.model.unidec import KIND, VERSION
from unidec.pipeline import paths
from unidec.pipeline.ranking import Ranking, headline, validation_metrics
from unidec.pipeline.training import open_trainer
from unidec.training.trainer import Trainer


class Curve:
    """Points of a training: {"seconds", "epochs", "nDCG@5", ...} of the validation split."""

    def __init__(self, params: Params, clock: Clock) -> None:
        self.params, self.clock, self.points = params, clock, list[dict[str, float]]()

    def add(self, trainer: Trainer) -> None:
        """Measure the heads as a round of training does (rounds.jsonl)."""
        with self.clock.paused() as seconds:
            precision = self.params.optim.precision
            ranking = Ranking.of_model(trainer.model, trainer.dataset, "validation", precision, trainer.label_vectors())
            metrics = headline(validation_metrics(ranking, self.params))
            epochs = trainer.at.step / trainer.steps_per_epoch
            self.points.append({"seconds": seconds, "steps": trainer.at.step, "epochs": epochs, **metrics})
            print(f"    {seconds:7.0f} s, epoch {epochs:.1f}, nDCG@5 {metrics['nDCG@5']:.2f}", flush=True)
            trainer.model.train()


def prepare(params: Params, num_queries: int) -> None:
    """The data set, or a slice of it (0: all), and its propensities; not timed."""
    data, raw = params.data, read_section(params.data, params.raw)
    if num_queries:
        raw = make_slice(raw, num_queries, num_queries)
    write_dataset(paths.DATASET, raw, validation_share=data.validation_share, split_seed=data.split_seed)
    pipeline.propensity(params)


def train(params: Params, every: float) -> dict[str, Any]:
    """Tokens, training, export, index; then, not timed, the test split.

    Returns:
        {"curve", "served": a point more, "test": metrics of the heads and as served, "parts": seconds by name,
        "trained", "frozen": numbers of parameters}.
    """
    clock = Clock(every)
    curve, ends = Curve(params, clock), {}
    pipeline.tokens(params)
    ends["tokens"] = clock.seconds
    if params.reads_label_graph:
        pipeline.label_graph(params)
    run_dir = paths.RUNS / params.recipe
    trainer = open_trainer(params, run_dir)
    ends["encoding once"] = clock.seconds
    while not trainer.finished:
        trainer.refresh()
        trainer.train_round(lambda _step, _figures: curve.add(trainer) if clock.is_due else None)
    curve.add(trainer)
    ends["training"] = clock.seconds
    with write_folder(paths.MODEL, KIND, VERSION, {"run": run_dir.name}) as out:
        trainer.export(out)
    validation = pipeline.index(params).validation
    ends["index and fusion"] = clock.seconds
    pipeline.evaluate(params)
    measured = json.loads(paths.METRICS.read_text(encoding="utf-8"))
    served, tables = measured["test"], trainer.model.tables().values()
    begins = dict(zip(ends, [0.0, *ends.values()]))
    weights = list(trainer.model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    trained += sum(table.weight.numel() for table in tables)  # not by autograd
    return {
        "curve": curve.points,
        "served": {"seconds": ends["index and fusion"], **validation},
        "test": {"heads": headline(measured.get("heads", served)), "served": headline(served)},
        "parts": {name: end - begins[name] for name, end in ends.items()},
        "trained": trained, "frozen": sum(weight.numel() for weight in weights) - trained,
    }  # fmt: skip


def main() -> None:
    os.chdir(sys.argv[1])
    asked = json.loads(Path("asked.json").read_text(encoding="utf-8"))
    params = Params.model_validate(asked["params"])
    prepare(params, asked["queries"])
    found = train(params, asked["every"])
    write_json("found.json", found | {"dataset": paths.open_dataset().sha256})


if __name__ == "__main__":
    main()
