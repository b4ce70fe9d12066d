"""Stage `train`: start or resume the run, train its rounds (`unidec.training.fit`), record them,
export the model.

A training that was killed resumes from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unidec.config import Params
from unidec.data.json_file import read_json_lines, write_json_lines
from unidec.data.storage import (
    files_sha256,
    read_json,
    write_folder,
    write_json,
)
from unidec.interrupt import signals_raise
from unidec.machine import memory_used
from unidec.metric_names import headline
from unidec.model.unidec import KIND, VERSION
from unidec.pipeline import launch, paths, runs
from unidec.pipeline.launch import LAUNCHER, Job, Launcher
from unidec.pipeline.lock import one_at_a_time
from unidec.pipeline.memory_plan import check_fits
from unidec.pipeline.ranking import Ranking, validation_metrics
from unidec.pipeline.seen import write_record
from unidec.pipeline.start import (
    check_start,
    earlier_models,
    effective,
    open_start,
    read_start,
    run_identity,
)
from unidec.pipeline.teaching import open_teacher
from unidec.pipeline.training_record import begin_tracking
from unidec.progress import say
from unidec.tracking.run import Tracker, reconcile_runs
from unidec.training.checkpoint import newest_state
from unidec.training.distributed import ALONE, Ranks
from unidec.training.fit import Figures, Report, RoundReport, fit
from unidec.training.identity import check_same, differences
from unidec.training.stopping import ROUNDS, Stopping
from unidec.training.trainer import Trainer, TrainingData

REFRESH = "refresh.json"
HISTORY = "history.jsonl"
_RESUME_HINT = "run the same command again to resume from the last checkpoint"
_STOPPED_AT_ONCE = "stopped at once; the last complete checkpoint is kept"
_REFRESH_METRICS = {  # key of the refresh report -> name in MLflow
    "refresh_seconds": "seconds",
    "cluster_cosine": "cluster_cosine",
    "mine_negative_score": "negative_score",
    "mine_positives_found": "positives_found",
    "mine_recall": "recall",
    "mine_exact": "exact",
}


def open_trainer(
    params: Params, run_dir: str | Path, accept: Collection[str] = (), ranks: Ranks = ALONE
) -> Trainer:
    """The run's trainer, at its newest checkpoint.

    On each machine, one process verifies the artifacts. Workers of `launch` do not, because the
    launching process has done so.
    """
    verify = ranks.is_first_here and LAUNCHER not in os.environ
    return Trainer(
        params.training,
        TrainingData(
            paths.open_dataset(verify),
            paths.open_tokens("queries", verify),
            paths.open_tokens("labels", verify),
            paths.open_label_graph(params, verify),
            open_teacher(params),
        ),
        Path(run_dir),
        paths.CACHE,
        accept=accept,
        ranks=ranks,
        start=open_start(),
    )


class Run:
    """A training run that `unidec.training.fit.fit` drives, with its records and its MLflow run.

    With several ranks, the launcher runs each phase on all of them; validation and export run in
    this process, with a trainer that is opened at the newest checkpoint.

    Attributes:
        folder: the run's folder.
        epoch, epoch_step, step: finished epochs, steps of the epoch in progress, and total steps,
            as of when the run was opened or last trained.
        epochs, num_rounds: of the whole training; upper limits if `optim.patience` is set.
        epochs_a_round: epochs from one refresh to the next.
        lines: messages for the user: where training resumes, which differences were accepted, which
        runs had crashed.
    """

    def __init__(
        self,
        params: Params,
        folder: Path,
        accept: Collection[str],
        state: dict[str, Any],
        launcher: Launcher | None,
    ):
        self.params = params
        self.folder = folder
        self.accept = tuple(accept)
        self.launcher = launcher
        self.epoch, self.epoch_step, self.step = (
            int(state.get(key, 0)) for key in ("epoch", "epoch_step", "step")
        )
        self.epochs = params.optim.epochs
        self.epochs_a_round = params.pool.refresh
        self.num_rounds = -(-self.epochs // self.epochs_a_round)
        self.stopping = Stopping(
            self.epochs, self.epochs_a_round, params.optim.patience, params.optim.budget_minutes
        )
        self.lines: list[str] = []
        self._trainer: Trainer | None = None
        self._trained = RoundReport()

    @property
    def finished(self) -> bool:
        """Whether the last round was trained."""
        return self.epoch >= self.stopping.read(self.folder, self.epoch)[1]

    @property
    def round_number(self) -> int:
        """Number of the round in progress, or of the next one; from 1."""
        return self.epoch // self.epochs_a_round + 1

    @property
    def trainer(self) -> Trainer:
        """The run's trainer, opened at the newest checkpoint on first use."""
        if self._trainer is None:
            self._trainer = open_trainer(self.params, self.folder, self.accept)
        return self._trainer

    def cluster(self) -> Figures:
        """Cluster the training queries for the next round; {} if the round has begun or its refresh
        is done.

        With several ranks this is the whole refresh, in a single launch that encodes the queries
        only once.
        """
        return self._work("mine" if self.launcher else "cluster")

    def mine(self) -> Figures:
        """Mine hard negatives for the next round; if they are mined already, returns the report in
        the run's folder.
        """
        if self.launcher is not None:  # `cluster` ran the whole refresh
            return _refresh_report(self.folder, self.epoch - self.epoch % self.epochs_a_round)
        return self._work("mine")

    def train_round(self) -> RoundReport:
        """Train the rest of the round, until the next refresh is due."""
        self._trained = self._work("train_round")
        self.epoch = self._trained.epoch
        self.epoch_step = 0
        self.step = self._trained.step
        return self._trained

    @property
    def lacks_validation(self) -> bool:
        """Whether the process was killed between the training of a round and its validation."""
        if self.step == 0 or self.epoch_step > 0:
            return False
        if self.epoch % self.epochs_a_round and not self.finished:
            return False
        validated = [line["epoch"] for line in read_json_lines(self.folder / ROUNDS)]
        return self.epoch not in validated

    def validate(self) -> RoundReport:
        """Compute metrics on the validation split, or without one on `data.validation_sample`
        training queries, and add the round's line to rounds.jsonl.

        The steps and seconds of an interrupted round are summed over its parts.
        """
        begin = time.perf_counter()
        trainer = self.trainer
        dataset = trainer.dataset
        data = self.params.data
        rows = dataset.rows("validation")
        if not len(rows):
            trained = dataset.rows("train")
            size = min(data.validation_sample, len(trained))
            random = np.random.default_rng(data.split_seed)
            rows = np.sort(random.choice(trained, size, replace=False))
        precision = self.params.optim.precision
        ranking = Ranking.of_model(trainer.model, dataset, rows, precision, trainer.label_vectors())
        metrics = validation_metrics(ranking, self.params)
        validation_seconds = time.perf_counter() - begin
        before = [
            line for line in read_json_lines(self.folder / ROUNDS) if line["epoch"] < self.epoch
        ]
        last = before[-1] if before else {}
        steps = self.step - int(last.get("step", 0))
        seconds = max(
            self._trained.train_seconds, trainer.at.seconds - last.get("trained_seconds", 0.0)
        )
        round_begin = (self.epoch - 1) // self.epochs_a_round * self.epochs_a_round
        refresh = _refresh_report(self.folder, round_begin)
        refreshes = [*(line.get("refresh", {}) for line in before), refresh]
        work = sum(report.get("work_seconds", 0.0) for report in refreshes)
        report = replace(
            self._trained,
            epoch=self.epoch,
            finished=self.finished,
            step=self.step,
            steps=steps,
            train_seconds=seconds,
            trained_seconds=trainer.at.seconds,
            steps_per_s=steps / max(seconds, 1e-9),
            round=-(-self.epoch // self.epochs_a_round),
            validation=metrics,
            validation_seconds=validation_seconds,
            refresh=refresh,
            seconds=seconds + validation_seconds,
            work_seconds=trainer.at.work_seconds + work,
        )
        tracker = Tracker.resume(self.folder)
        tracker.log(
            self.step, {f"validation/{name}": value for name, value in headline(metrics).items()}
        )
        tracker.flush()
        record = {name: value for name, value in asdict(report).items() if value is not None}
        write_json_lines(self.folder / ROUNDS, [*before, record])
        return report

    def export(self) -> str:
        """Write the model and the records of its training to outputs/model, and release the
        trainer's memory.
        """
        start = read_start()
        trainer = self.trainer
        earlier = earlier_models(self.params).values()
        with write_folder(paths.MODEL, KIND, VERSION, {"run": self.folder.name}) as out:
            trainer.export(out, {"start": start.model_dump()} if start else None)
            write_record(out, paths.open_dataset(False), self.params.tokens.text, earlier)
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
            self.close()  # the trainer's state is outdated once the ranks have trained
            return self.launcher(name, self.params, self.folder, self.accept)
        return work(name, self.trainer)


def start_run(
    params: Params,
    resume: str | None = None,
    accept: Collection[str] = (),
    launcher: Launcher | None = None,
    track: bool = True,
) -> Run:
    """Open the run for these parameters and data, or begin a new one, and open its MLflow run.

    Args:
        params: all parameters, as in params.yaml; training uses `effective` of them.
        resume: name of a run to resume instead of the run of these parameters; "": the newest
        unfinished one.
        accept: keys of the run's identity that may differ from its newest checkpoint's.
        launcher: runs phases on several ranks; None: torchrun if `run.devices` is above 1, else
        this process.
        track: log to MLflow; if False, records are written only to the run's folder.

    Raises:
        ConfigError: the training does not fit into memory or on the disk, or the run to resume was
            started with other data, parameters, tokenizer or code: all keys that differ are listed.
    """
    params = effective(params)
    start = read_start()
    leak = check_start(params)  # also reports a model that is missing or damaged
    identity = run_identity(params)
    folder = (
        runs.choose_run(resume) if resume is not None else paths.RUNS / files_sha256(identity)[:16]
    )
    checkpoint, state, _ = newest_state(folder)
    begun_with = state.get("identity") or identity
    check_same(begun_with, identity, accept, str(folder))
    accepted = differences(begun_with, identity)
    # verifies the last artifact that training reads; `run_identity` has verified the others
    paths.open_propensity()
    run = Run(
        params,
        folder,
        accept,
        state,
        launcher or (launch.torchrun if params.run.devices > 1 else None),
    )
    if not run.finished:
        check_fits(params)
    ended = reconcile_runs(path for path in runs.run_folders() if path != folder)
    if start:
        run.lines.append(
            f"starts from {start.model} version {start.version}, warm start number "
            f"{start.generation}"
        )
    run.lines += [
        *(f"accepted: {line}" for line in [*accepted, *leak]),
        _progress_line(run, checkpoint),
        *(f"MLflow run of {name} ended as KILLED: its process is gone" for name in ended),
    ]
    if run.lacks_validation:
        run.validate()
        run.lines.append(
            f"epoch {run.epoch} was trained but not validated before the kill: validated now"
        )
    if track:
        run.lines += begin_tracking(run.params, run.folder, accepted)
    return run


@dataclass(frozen=True)
class Trained:
    """A finished training: the folders of the run and of the model, epochs and total steps (`step`
    and `steps`).
    """

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
    say: Callable[[str], None] = say,
    track: bool = True,
) -> Trained | None:
    """Train to the last epoch and export the model; after a kill or stop, the same call resumes
    from the checkpoint.

    Args:
        params, resume, accept, track: see `start_run`.
        say: receives `Run.lines`.

    Returns:
        None on other ranks than the first (under torchrun).

    Raises:
        Stopped: by SIGINT or SIGTERM, after a checkpoint was written and the MLflow run ended as
        KILLED.
        UnidecError: an error in parameters, data, artifacts or training.
    """
    signals = signals_raise(_RESUME_HINT, _STOPPED_AT_ONCE)
    with signals, launch.torchrun_ranks(params, work_on_rank) as (leads, launcher):
        if not leads:
            return None
        with one_at_a_time():
            run = start_run(params, resume, accept, launcher, track)
            for line in run.lines:
                say(line)
            with runs.tracked(run.folder):
                fit(run)
                return Trained(
                    str(run.folder), run.finished, run.step, run.export(), run.epoch, run.step
                )


def work_on_rank(ranks: Ranks, job: Job) -> Report:
    """Run a phase on one of several ranks, with a trainer that is opened at the newest
    checkpoint.
    """
    params = Params.model_validate(job["params"])
    return work(job["name"], open_trainer(params, job["run_dir"], tuple(job["accept"]), ranks))


def work(name: str, trainer: Trainer) -> Report:
    """Run a phase of training, "cluster", "mine" or "train_round", and return its report. Only
    the first rank writes records.
    """
    if name == "train_round":
        return _train(trainer)
    if not trainer.refresh_due:
        return {} if name == "cluster" else _refresh_report(trainer.run_dir, trainer.round_begin)
    if name == "cluster":
        return {"epoch": trainer.at.epoch, **trainer.cluster()}
    report = {"epoch": trainer.at.epoch, **trainer.mine()}
    if trainer.ranks.is_first:
        write_json(trainer.run_dir / REFRESH, report)
        figures = {
            f"refresh/{name}": float(report[key])
            for key, name in _REFRESH_METRICS.items()
            if key in report
        }
        Tracker.resume(trainer.run_dir).log(trainer.at.step, figures)
    return report


def _train(trainer: Trainer) -> RoundReport:
    """Train the rest of the round, and log its figures to MLflow."""
    if not trainer.ranks.is_first:
        return trainer.train_round()
    tracker = Tracker.resume(trainer.run_dir)
    report = trainer.train_round(lambda step, figures: tracker.log(step, step_figures(figures)))
    memory = memory_used()
    tracker.log(trainer.at.step, {f"memory/{name}": value for name, value in memory.items()})
    tracker.flush()
    return replace(report, memory=memory)


def _refresh_report(run_dir: Path, epoch: int) -> Figures:
    """The report of the refresh after `epoch` epochs; only {"epoch"} if the process was killed
    before writing it.
    """
    with contextlib.suppress(OSError, ValueError):
        report = read_json(run_dir / REFRESH)
        if report["epoch"] == epoch:
            return report
    return {"epoch": epoch}


def step_figures(figures: Mapping[str, float]) -> Figures:
    """The figures of a step by their MLflow names, such as "training/loss"; without the step
    number.
    """
    return {f"training/{name}": value for name, value in figures.items() if name != "step"}


def _progress_line(run: Run, checkpoint: Path | None) -> str:
    """Where the run begins or resumes, for the user."""
    if checkpoint is None:
        return f"run {run.folder.name} begins"
    if run.finished:
        return f"run {run.folder.name} is trained: {run.epoch} epochs, {run.step} steps"
    most = "at most " if run.params.optim.patience else ""
    inside = f" and {run.epoch_step} steps of the next" if run.epoch_step else ""
    age = runs.duration(runs.age(checkpoint))
    return (
        f"run {run.folder.name} resumes after epoch {run.epoch} of "
        f"{most}{run.epochs}{inside} (step {run.step}), "
        f"from the checkpoint of {age} ago"
    )


if __name__ == "__main__":
    sys.exit(launch.worker(Path(sys.argv[1]), work_on_rank))
