"""Training as a stage: find or begin the run, train its rounds (`unidec.training.fit`), record and export.

Killed anywhere and started again, it resumes there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unidec.config import Params, flatten
from unidec.data.storage import files_sha256, read_json_lines, write_bytes_atomic, write_folder, write_json
from unidec.interrupt import signals_raise
from unidec.machine import memory_used
from unidec.model.unidec import KIND, VERSION
from unidec.pipeline import launch, paths, runs
from unidec.pipeline.launch import LAUNCHER, Job, Launcher
from unidec.pipeline.lock import one_at_a_time
from unidec.pipeline.plan import check_fits
from unidec.pipeline.ranking import Ranking, headline, validation_metrics
from unidec.pipeline.start import effective, open_start, read_start, run_identity, start_tags
from unidec.tracking.provenance import DVC_TAG, code_tags, dvc_hash
from unidec.tracking.run import Tracker, reconcile_runs
from unidec.training.checkpoint import newest_state
from unidec.training.distributed import ALONE, Ranks
from unidec.training.fit import Figures, Report, RoundReport, fit
from unidec.training.identity import check_same, differences
from unidec.training.stopping import ROUNDS, Stopping
from unidec.training.trainer import Trainer, TrainingData

REFRESH, HISTORY = "refresh.json", "history.jsonl"
_AGAIN = "run the same command again to resume from the last checkpoint"
_FAREWELL = "stopped at once; the last whole checkpoint is kept"
_OF_REFRESH = {
    "refresh_seconds": "seconds", "cluster_cosine": "cluster_cosine", "mine_negative_score": "negative_score",
    "mine_positives_found": "positives_found", "mine_recall": "recall",
}  # fmt: skip
_NOT_THE_MODELS = ("raw", "validation", "run", "source", "retrain", "gate", "drift", "serve", "tracking")


def open_trainer(params: Params, run_dir: str | Path, accept: Collection[str] = (), ranks: Ranks = ALONE) -> Trainer:
    """The run's trainer, at its newest checkpoint; on each machine one process verifies what it reads.

    Where `launch` started this process, the one that called it did."""
    verify = ranks.is_first_here and LAUNCHER not in os.environ
    data = TrainingData(
        paths.open_dataset(verify),
        paths.open_tokens("queries", verify),
        paths.open_tokens("labels", verify),
        paths.open_label_graph(params, verify),
    )
    return Trainer(params.training, data, Path(run_dir), paths.CACHE, accept=accept, ranks=ranks, start=open_start())


class Run:
    """A training run in this process: what `unidec.training.fit.fit` drives, with its records and its MLflow run.

    Where training needs several processes, each phase starts them, or asks the ranks that follow; validation and the
    export are done here, by a trainer that is opened at the newest checkpoint.

    Attributes:
        folder: the run's folder.
        epoch, epoch_step, step: finished epochs, steps of the next one, steps in all when the run was opened or last
            trained.
        epochs: all epochs; a_round: epochs from one refresh to the next; num_rounds: of the whole training; with
            patience epochs and num_rounds are the most that there can be.
        lines: for people: where training resumes, and what was found on the way.
    """

    def __init__(
        self, params: Params, folder: Path, accept: Collection[str], state: dict[str, Any], launcher: Launcher | None
    ):
        self.params, self.folder, self.accept, self.launcher = params, folder, tuple(accept), launcher
        self.epoch, self.epoch_step, self.step = (int(state.get(key, 0)) for key in ("epoch", "epoch_step", "step"))
        self.epochs, self.a_round = params.optim.epochs, params.pool.refresh
        self.num_rounds = -(-self.epochs // self.a_round)
        self.stopping = Stopping(self.epochs, self.a_round, params.optim.patience, params.optim.budget_minutes)
        self.lines: list[str] = []
        self._trainer: Trainer | None = None
        self._trained = RoundReport()

    @property
    def finished(self) -> bool:
        """The last round is done."""
        return self.epoch >= self.stopping.read(self.folder, self.epoch)[1]

    @property
    def round_number(self) -> int:
        """Of the round in progress, or the next one; from 1."""
        return self.epoch // self.a_round + 1

    @property
    def trainer(self) -> Trainer:
        """Opened at the newest checkpoint when it is first used."""
        if self._trainer is None:
            self._trainer = open_trainer(self.params, self.folder, self.accept)
        return self._trainer

    def cluster(self) -> Figures:
        """Cluster the training queries for the coming round; {} inside a round, or where its refresh is made.

        Several processes make the whole refresh in one launch: the queries are encoded once."""
        return self._work("refresh" if self.launcher else "cluster")

    def mine(self) -> Figures:
        """Mine hard negatives for the coming round; where that is done, its report is read from the run's folder."""
        if self.launcher is not None:  # `cluster` made the whole refresh
            return _refresh_report(self.folder, self.epoch - self.epoch % self.a_round)
        return self._work("refresh")

    def train_round(self) -> RoundReport:
        """Train until the next refresh is due, from wherever in the round the run is."""
        self._trained = self._work("train_round")
        self.epoch, self.epoch_step, self.step = self._trained.epoch, 0, self._trained.step
        return self._trained

    @property
    def lacks_validation(self) -> bool:
        """A round was trained but not measured before a kill."""
        ended = self.step > 0 and self.epoch_step == 0 and (self.finished or self.epoch % self.a_round == 0)
        return ended and not any(line["epoch"] == self.epoch for line in read_json_lines(self.folder / ROUNDS))

    def validate(self) -> RoundReport:
        """Measure the validation split, or without one `data.validation_sample` training queries, and add the round's
        line to rounds.jsonl.

        A round that was cut off counts as a whole: its steps since the round before, the seconds of those steps."""
        begin, trainer = time.perf_counter(), self.trainer
        dataset, data = trainer.dataset, self.params.data
        rows = dataset.rows("validation")
        if not len(rows):  # a sample of queries that it was trained on
            known = dataset.rows("train")
            size = min(data.validation_sample, len(known))
            rows = np.sort(np.random.default_rng(data.split_seed).choice(known, size, replace=False))
        ranking = Ranking.of_model(trainer.model, dataset, rows, self.params.optim.precision)
        metrics = validation_metrics(ranking, self.params)
        validation_seconds = time.perf_counter() - begin
        before = [line for line in read_json_lines(self.folder / ROUNDS) if line["epoch"] < self.epoch]
        last = before[-1] if before else {}
        steps = self.step - int(last.get("step", 0))
        seconds = max(self._trained.train_seconds, trainer.seconds - last.get("trained_seconds", 0.0))
        # the refresh after as many epochs as were done when the round began
        refresh = _refresh_report(self.folder, (self.epoch - 1) // self.a_round * self.a_round)
        work = sum(line.get("refresh", {}).get("work_seconds", 0.0) for line in [*before, {"refresh": refresh}])
        report = replace(
            self._trained, epoch=self.epoch, finished=self.finished, step=self.step, steps=steps,
            train_seconds=seconds, trained_seconds=trainer.seconds, steps_per_s=steps / max(seconds, 1e-9),
            round=-(-self.epoch // self.a_round), validation=metrics, validation_seconds=validation_seconds,
            refresh=refresh, seconds=seconds + validation_seconds, work_seconds=trainer.work_seconds + work,
        )  # fmt: skip
        tracker = Tracker.resume(self.folder)
        tracker.log(self.step, {f"validation/{name}": value for name, value in headline(metrics).items()})
        tracker.flush()
        record = {name: value for name, value in asdict(report).items() if value is not None}
        lines = [json.dumps(line) for line in [*before, record]]
        write_bytes_atomic(self.folder / ROUNDS, "".join(f"{line}\n" for line in lines).encode())
        return report

    def export(self) -> str:
        """Write the model to outputs/model, with the records of its training, and release the trainer's memory."""
        start, trainer = read_start(), self.trainer
        with write_folder(paths.MODEL, KIND, VERSION, {"run": self.folder.name}) as out:
            trainer.model.save_into(out, {"start": start.model_dump()} if start else None)
            for name in (HISTORY, ROUNDS):
                if (self.folder / name).is_file():
                    shutil.copyfile(self.folder / name, out.path / name)
        self.close()
        return str(paths.MODEL)

    def close(self) -> None:
        """Release the trainer's memory."""
        self._trainer = None

    def _work(self, name: str) -> Any:
        if self.launcher is not None:
            self.close()  # the ranks write newer checkpoints
            return self.launcher(name, self.params, self.folder, self.accept)
        return work(name, self.trainer)


def start_run(
    params: Params,
    resume: str | None = None,
    accept: Collection[str] = (),
    launcher: Launcher | None = None,
    track: bool = True,
) -> Run:
    """Find or begin the run of these parameters and this data, and open its MLflow run.

    Args:
        params: all parameters, as params.yaml has them; what is trained with is `effective` of them.
        resume: a run to resume in place of the one that these parameters name; "": the newest unfinished one.
        accept: keys of the run's identity that may differ from its newest checkpoint's.
        launcher: runs phases on several ranks; None: as `run.devices` asks.
        track: log to MLflow; without it the run's records are in its folder only.

    Raises:
        ConfigError: it does not fit into memory, or the run to resume was begun with other data, parameters,
            tokenizer or code: every key that differs is listed.
    """
    params, start = effective(params), read_start()
    open_start()  # fetched now, or refused
    identity = run_identity(params)
    folder = runs.choose_run(resume) if resume is not None else paths.RUNS / files_sha256(identity)[:16]
    checkpoint, state, _ = newest_state(folder)
    begun = state.get("identity") or identity
    check_same(begun, identity, accept, str(folder))
    accepted = differences(begun, identity)
    paths.open_propensity()  # with what the identity read, all that this training reads is verified now
    run = Run(params, folder, accept, state, launcher or (launch.torchrun if params.run.devices > 1 else None))
    if not run.finished:
        check_fits(params)
    ended = reconcile_runs(path for path in runs.run_folders() if path != folder)
    origin = f"starts from {start.model} version {start.version}, its warm start {start.generation}" if start else ""
    run.lines = [
        *filter(None, [origin]),
        *(f"accepted: {line}" for line in accepted),
        _where_it_resumes(run, checkpoint),
        *(f"MLflow run of {name} ended as KILLED: its process is gone" for name in ended),
    ]
    if run.lacks_validation:
        run.validate()
        run.lines.append(f"epoch {run.epoch} was trained but not validated before the kill: validated now")
    if track:
        _begin_tracking(run, state.get("notes", {}).get("mlflow_run_id"), accepted)
    return run


@dataclass(frozen=True)
class Trained:
    """A training that came to its end: the run's folder, the model's, epochs, and steps in all."""

    run_dir: str
    finished: bool
    step: int
    model: str
    epoch: int
    steps: int


def train(
    params: Params,
    resume: str | None = None,
    accept: Collection[str] = (),
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    track: bool = True,
) -> Trained | None:
    """Train to the last epoch and export the model; killed or stopped, the same call resumes from the checkpoint.

    Args:
        params, resume, accept, track: as `start_run` takes them.
        say: receives lines for people: where training resumes.

    Returns:
        None on ranks that only follow (under torchrun).

    Raises:
        Stopped: by SIGINT or SIGTERM; a checkpoint is written and the MLflow run has ended as KILLED.
        UnidecError: parameters, data, artifacts or training are wrong.
    """
    with signals_raise(_AGAIN, _FAREWELL), launch.torchrun_ranks(params, work_on_rank) as (leads, launcher):
        if not leads:
            return None
        with one_at_a_time():
            run = start_run(params, resume, accept, launcher, track)
            for line in run.lines:
                say(line)
            with runs.tracked(run.folder):
                fit(run)
                return Trained(str(run.folder), run.finished, run.step, run.export(), run.epoch, run.step)


def work_on_rank(ranks: Ranks, job: Job) -> Report:
    """One phase, on one of several ranks: each opens its trainer at the newest checkpoint; the first one reports."""
    params = Params.model_validate(job["params"])
    return work(job["name"], open_trainer(params, job["run_dir"], tuple(job["accept"]), ranks))


def work(name: str, trainer: Trainer) -> Report:
    """A phase of training: "cluster", "refresh" or "train_round". Only the first rank writes records."""
    if name == "train_round":
        return _train(trainer)
    if not trainer.refresh_due:
        begin = trainer.epoch - trainer.epoch % trainer.settings.pool.refresh
        return {} if name == "cluster" else _refresh_report(trainer.run_dir, begin)
    if name == "cluster":
        return {"epoch": trainer.epoch, **trainer.cluster()}
    report = {"epoch": trainer.epoch, **trainer.refresh()}
    if trainer.ranks.is_first:
        write_json(trainer.run_dir / REFRESH, report)
        figures = {f"refresh/{name}": float(report[key]) for key, name in _OF_REFRESH.items() if key in report}
        Tracker.resume(trainer.run_dir).log(trainer.step, figures)
    return report


def _train(trainer: Trainer) -> RoundReport:
    """The rest of the round; its figures are sent to MLflow meanwhile."""
    if not trainer.ranks.is_first:
        return trainer.train_round()
    tracker = Tracker.resume(trainer.run_dir)
    # where the folder's own note is lost, the run continues in the same MLflow run
    trainer.notes |= {"mlflow_run_id": tracker.run_id}
    report = trainer.train_round(lambda step, figures: tracker.log(step, step_figures(figures)))
    memory = memory_used()
    tracker.log(trainer.step, {f"memory/{name}": value for name, value in memory.items()})
    tracker.flush()
    return replace(report, memory=memory)


def _refresh_report(run_dir: Path, epoch: int) -> Figures:
    """The report of the refresh after so many epochs; only {"epoch"} where a kill came before it was written."""
    with contextlib.suppress(OSError, ValueError):
        report = json.loads((run_dir / REFRESH).read_text(encoding="utf-8"))
        if report["epoch"] == epoch:
            return report
    return {"epoch": epoch}


def step_figures(figures: Mapping[str, float]) -> Figures:
    """A step's figures: "loss" -> "training/loss"; what it is the step of is no figure."""
    return {f"training/{name}": value for name, value in figures.items() if name != "step"}


def model_params(flat: Mapping[str, str | int | float], is_warm: bool) -> dict[str, str | int | float]:
    """Of all parameters (dotted keys), those that decide the model; `warm.` where it starts from another."""
    left_out = _NOT_THE_MODELS if is_warm else (*_NOT_THE_MODELS, "warm")
    return {key: value for key, value in flat.items() if key.partition(".")[0] not in left_out and key != "data.path"}


def _begin_tracking(run: Run, run_id: str | None, accepted: Collection[str]) -> None:
    """Begin or continue the MLflow run of this training."""
    params, dataset = run.params, paths.open_dataset()
    experiment = os.environ.get("DVC_EXP_NAME", "")  # set by `dvc exp run` and `dvc queue`
    tags = code_tags() | start_tags() | {
        "dataset.sha256": dataset.sha256, "run.folder": run.folder.name, "accepted": "; ".join(accepted)[:5000],
        "dvc_experiment": experiment, f"{DVC_TAG}{paths.DATASET}": dvc_hash(str(paths.DATASET)) or "",
    }  # fmt: skip
    about = {"name": dataset.name, "digest": dataset.sha256, "path": str(paths.DATASET)}
    about |= {key: dataset.manifest["meta"][key] for key in ("num_queries", "num_labels", "num_pairs")}
    name = f"{dataset.name} {params.recipe or params.model.heads} {experiment or run.folder.name[:6]}"
    kept = model_params(flatten(params), read_start() is not None)
    tags = {key: tag for key, tag in tags.items() if tag}
    Tracker(params.tracking.experiment).start(run.folder, kept, tags, about, name, run_id)


def _where_it_resumes(run: Run, checkpoint: Path | None) -> str:
    if checkpoint is None:
        return f"run {run.folder.name} begins"
    if run.finished:
        return f"run {run.folder.name} is trained: {run.epoch} epochs, {run.step} steps"
    most = "at most " if run.params.optim.patience else ""
    inside = f" and {run.epoch_step} steps of the next" if run.epoch_step else ""
    age = runs.in_words(runs.age(checkpoint))
    return (
        f"run {run.folder.name} resumes after epoch {run.epoch} of {most}{run.epochs}{inside} (step {run.step}), "
        f"from the checkpoint of {age} ago"
    )


if __name__ == "__main__":
    sys.exit(launch.worker(Path(sys.argv[1]), work_on_rank))
