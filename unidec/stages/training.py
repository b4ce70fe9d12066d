"""Stages of training: begin or resume, refresh, a round, export."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from unidec.config import Params, flatten
from unidec.data.storage import write_bytes_atomic, write_folder, write_json
from unidec.model.unidec import KIND, VERSION
from unidec.ops.provenance import code_tags, dvc_hash
from unidec.ops.tracking import Tracker
from unidec.stages import paths
from unidec.stages.ranking import Ranking, headline, validation_metrics
from unidec.training.trainer import Trainer


def open_trainer(params: Params, run_dir: str | Path) -> Trainer:
    """The run's trainer, at its newest checkpoint."""
    return Trainer(
        params,
        paths.open_dataset(),
        paths.open_tokens("queries"),
        paths.open_tokens("labels"),
        Path(run_dir),
        paths.CACHE,
    )


def start_run(params: Params) -> dict[str, Any]:
    """Find or begin the run of these parameters and this data, and open its MLflow run.

    Returns:
        {"run_dir", "epoch", "finished"}: where it goes on.
    """
    run_dir = paths.run_folder(params)
    trainer = open_trainer(params, run_dir)
    dataset = trainer.dataset
    meta = dataset.manifest["meta"]
    facts = {key: meta[key] for key in ("num_queries", "num_labels", "num_pairs")}
    digest = dvc_hash(str(paths.DATASET)) or dataset.sha256
    tags = code_tags() | {"dataset.sha256": dataset.sha256, "run.folder": run_dir.name}
    about = {"name": dataset.name, "digest": digest, "path": str(paths.DATASET), **facts}
    tracker = Tracker(params.tracking.experiment)
    name = f"{dataset.name} {params.preset or params.model.heads} {run_dir.name[:6]}"
    tracker.start(run_dir, flatten(params), tags, about, run_name=name)
    tracker.log_files([paths.VALIDATION / "index.html"], "validation")
    return {"run_dir": str(run_dir), "epoch": trainer.epoch, "finished": trainer.finished,
            "rounds": -(-params.optim.epochs // params.pool.refresh)}  # fmt: skip


def refresh(params: Params, run_dir: str) -> dict[str, Any]:
    """Cluster the training queries and mine hard negatives for the coming round."""
    trainer = open_trainer(params, run_dir)
    report = {"epoch": trainer.epoch, **trainer.refresh()}
    write_json(Path(run_dir) / "refresh.json", report)
    Tracker.resume(run_dir).log(trainer.step, {f"refresh/{k}": v for k, v in report.items() if _is_number(v)})
    return report


def train_round(params: Params, run_dir: str) -> dict[str, Any]:
    """Train until the next refresh is due, then measure the validation split.

    Returns:
        {"epoch", "finished", "round", "validation", ...}.
    """
    trainer = open_trainer(params, run_dir)
    tracker = Tracker.resume(run_dir)
    first_step = trainer.step
    with tracker.system_metrics():
        report = trainer.train_round()
    begin = time.perf_counter()
    metrics = validation_metrics(
        Ranking.of_model(trainer.model, trainer.dataset, "validation", params.optim.precision), params
    )
    report |= {"round": -(-trainer.epoch // params.pool.refresh), "validation": metrics}
    report["validation_seconds"] = time.perf_counter() - begin
    report["refresh"] = json.loads((Path(run_dir) / "refresh.json").read_text(encoding="utf-8"))
    report["seconds"] = report["train_seconds"] + report["validation_seconds"]
    _append(Path(run_dir) / "rounds.jsonl", report, "epoch")
    for line in _lines(Path(run_dir) / "history.jsonl"):
        if line["step"] >= first_step:
            tracker.log(line["step"], {k: v for k, v in line.items() if k != "step"})
    tracker.log(trainer.step, {f"validation/{name}": value for name, value in headline(metrics).items()})
    tracker.flush(force=True)
    return report


def export(params: Params, run_dir: str) -> dict[str, Any]:
    """The run's model -> outputs/model, with the records of its training."""
    trainer = open_trainer(params, run_dir)
    run = Path(run_dir)
    records = ("history.jsonl", "rounds.jsonl")
    with write_folder(paths.MODEL, KIND, VERSION, {"run": run.name}) as out:
        trainer.model.save_into(out)
        for name in records:
            if (run / name).is_file():
                shutil.copyfile(run / name, out.path / name)
    return {"model": str(paths.MODEL), "epoch": trainer.epoch, "steps": trainer.step}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _append(path: Path, record: dict[str, Any], key: str) -> None:
    """Add a record; one of the same epoch or a later one is of a run that was cut off, and is replaced."""
    kept = [line for line in _lines(path) if line[key] < record[key]]
    write_bytes_atomic(path, "".join(json.dumps(line) + "\n" for line in [*kept, record]).encode())
