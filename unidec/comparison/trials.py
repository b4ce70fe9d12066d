"""A search for the best validation metric: Optuna draws trials, each a training in its own process.

    <folder>/
      study.db                   Optuna's records: trials, and their metric after each round
      trials.md                  all trials; written after each
      best.yaml                  the best parameters (`unidec tune`)
    <workspace>/                 the same folder (`unidec tune`), or the comparison's (`unidec
    compare --tune`)
      shared/                    data set, tokens and vectors of frozen encoders, computed once
      cells/<data>/<cell>/       a folder per training, named by its parameters

Re-run the command to resume after a kill or a stop. Finished trials are kept. The interrupted trial
is drawn again: it depends only on the seed and earlier trials, so it has the same folder, where its
training resumes.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unidec.comparison.cell import remove_checkpoints, run_step, seconds_of
from unidec.comparison.chosen import Trials
from unidec.comparison.jobs import Job, in_words
from unidec.comparison.tuning_space import (
    applied,
    distributions,
    import_optuna,
    unchanged,
)
from unidec.comparison.workspace import Step, steps_of, with_needed
from unidec.config import (
    Params,
    fingerprint,
    keys_deciding,
    to_yaml,
)
from unidec.data.dataset import XMCDataset
from unidec.data.json_file import read_json_lines
from unidec.data.storage import write_bytes_atomic
from unidec.errors import ArtifactError, ConfigError, TrainingError, UnidecError
from unidec.interrupt import stop_signals
from unidec.progress import Progress, progress
from unidec.text_page import render_text
from unidec.tracking.provenance import code_tags
from unidec.tracking.run import RUN_TAGS, Tracker, run_tags
from unidec.tracking.store import tracking_uri

STUDY = "study.db"
TABLE = "trials.md"
BEST = "best.yaml"


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The best trial.

    Attributes:
        trial: its number. metric: in percent, on the validation split, after the last epoch.
        settings: its values.
        trials: number of trials. best, table: files with its parameters and with all trials.
    """

    trial: int
    metric: float
    settings: Mapping[str, Any]
    trials: int
    best: str
    table: str


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A training, and the ranges in which its parameters are searched.

    Attributes:
        job: the unchanged training. ranges: see `unidec.comparison.tuning_space`.
        root: folder of the search. workspace: folder of data sets and trainings. name: of its
        MLflow runs.
        jobs: trainings by key that `job` may start from. kept: keys that no trial changes.
        environment: variables of the trainings' processes. tags: of its MLflow runs.
        asked: parameters on which best.yaml is based; None: best.yaml is not written.
    """

    job: Job
    ranges: Mapping[str, Any]
    metric: str
    root: Path
    workspace: Path
    name: str
    jobs: Mapping[str, Job] = field(default_factory=dict)
    kept: Collection[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    asked: Params | None = None


class Search:
    """A search in its folder. Optuna draws and prunes; the comparison's engine trains
    (`unidec.comparison.cell`).

    Optuna's records are read and written within `stop_signals`: a signal in the middle of a
    transaction would leave them locked.
    """

    def __init__(self, subject: Subject, stopping: threading.Event | None) -> None:
        self.optuna = import_optuna()
        self.states = self.optuna.trial.TrialState
        self.subject = subject
        self.stopping = stopping or threading.Event()
        self.params = subject.job.params
        self.root = subject.root
        self.metric = subject.metric
        self.space = distributions(subject.ranges)
        self.unchanged = unchanged(subject.ranges, self.params)
        self.needed, first = self._steps(self.unchanged)
        self.data = self.needed[0]  # of the tuning, which all its trainings share
        decide = keys_deciding("tokens", "label_graph", "training", "index")
        about = {
            "ranges": {key: str(ranged) for key, ranged in self.space.items()},
            "metric": self.metric,
            "data": self.data.key,
            "code": first.spec["code"],
            "parameters": fingerprint(self.params, *decide),
        }
        self._open(about)
        self.tracker = Tracker(self.params.tracking.experiment)
        facts = {"metric": self.metric, **about["ranges"]}
        self.tracker.start(self.root, facts, code_tags(), None, f"tune {subject.name}")

    def _open(self, about: Mapping[str, Any]) -> None:
        """Open or create Optuna's records; records of another search are refused."""
        from sqlalchemy.exc import DatabaseError

        place = str(self.root / STUDY)
        try:
            self.storage = self.optuna.storages.RDBStorage(f"sqlite:///{place}")
            self.study = self.optuna.create_study(
                storage=self.storage,
                study_name="tune",
                direction="maximize",
                load_if_exists=True,
                pruner=self.optuna.pruners.MedianPruner(),
            )
        except (DatabaseError, RuntimeError, self.optuna.exceptions.OptunaError) as error:
            raise ArtifactError(
                "the search's records cannot be read",
                where=place,
                got=error,
                fix="remove the folder, or name another with --out",
            ) from error
        known = self.study.user_attrs.get("about", about)
        if others := [name for name in about if known.get(name) != about[name]]:
            self.close()
            raise ConfigError(
                "folder of another search",
                where=self.root,
                got=f"other {', '.join(others)}",
                fix="another folder with --out, or remove this one",
            )
        self.study.set_user_attr("about", about)

    def close(self) -> None:
        """Close Optuna's records."""
        self.storage.remove_session()
        self.storage.engine.dispose()

    @property
    def ended(self) -> list[Any]:
        """Trials that count: trained, pruned, or failed without being interrupted; oldest first."""
        with stop_signals():
            trials = self.study.get_trials(deepcopy=False)
        counted = (self.states.COMPLETE, self.states.PRUNED)
        return [one for one in trials if one.state in counted or "failed" in one.user_attrs]

    def run(self, trials: int) -> Tuned | None:
        """Run trials until there are `trials` in total.

        Returns:
            The best trial; None: no trial ran or finished, or the subject has no best.yaml.
        """
        for step in self.needed:
            self._train(step, "data" if step is self.data else step.name)
        folder = self.data.folder / "data" / "dataset"
        dataset = XMCDataset.open(folder, verify=False)
        if not len(dataset.rows("validation")):
            raise ConfigError(
                "there is no validation split to tune on",
                where="data.validation_share",
                got=self.params.data.validation_share,
                fix="--set data.validation_share=0.05",
            )
        with stop_signals():
            for trial in self.study.get_trials(deepcopy=False, states=(self.states.RUNNING,)):
                # interrupted: it is drawn again
                self.study.tell(trial.number, state=self.states.FAIL)
        left = range(len(self.ended), trials)
        epochs = self.params.optim.epochs
        best: Tuned | None = None
        with progress(total=len(left) * epochs, desc="tune", unit="epoch") as bar:
            for number in left:
                done = self._try(number, bar)
                # it was pruned, or its epochs are tuned
                bar.total = (bar.total or 0) + done - epochs
                best = self._record()
        return best

    def _try(self, number: int, bar: Progress[Any]) -> int:
        """Draw a trial and train it to its end, or to the round after which Optuna prunes it;
        returns its epochs.
        """
        trial = self._draw(number)
        name = f"trial {number}"
        lines: list[dict[str, Any]] = []  # of the rounds that Optuna knows
        state = self.states.COMPLETE
        failed = ""

        def is_pruned() -> bool:
            """Report new rounds to Optuna until it prunes the trial."""
            for line in _rounds(step)[len(lines) :]:
                epoch = line["epoch"]
                bar.update(epoch - _last_epoch(lines))
                lines.append(line)
                value = line["validation"][self.metric]
                bar.note(
                    f"{self.subject.name}, {name}: {self.metric} {value:.2f} after epoch {epoch}"
                )
                if self._prunes(trial, value, line):
                    return True
            return False

        try:
            _, step = self._steps(trial.params)
            if self._train(step, name, is_pruned):
                state = self.states.PRUNED
                self._end_pruned(step, len(lines))
        except UnidecError as error:
            if self.stopping.is_set() or (number == 0 and self._starts_unchanged):
                raise  # not caused by the tuned values: repeated when the search is resumed
            state = self.states.FAIL
            failed = str(error)
        with stop_signals():
            trial.set_user_attr("seconds", seconds_of(lines))
            trial.set_user_attr("rounds", len(lines))
            if failed:
                trial.set_user_attr("failed", failed)
            is_complete = state == self.states.COMPLETE
            value = lines[-1]["validation"][self.metric] if is_complete else None
            self.study.tell(trial, value, state)
        return _last_epoch(lines)

    def _prunes(self, trial: Any, value: float, line: Mapping[str, Any]) -> bool:
        """Report a round to Optuna; returns whether Optuna ends the trial after it."""
        with stop_signals():
            trial.report(value, line["epoch"])
            return not line["finished"] and trial.should_prune()

    @property
    def _starts_unchanged(self) -> bool:
        """Whether the first trial is the unchanged training: only if it lies in the ranges."""
        return len(self.unchanged) == len(self.space)

    def _draw(self, number: int) -> Any:
        """Draw the trial with this number; reproducible, given the same earlier trials."""
        seed = random.Random(f"{self.params.seed}/{number}").getrandbits(32)
        with stop_signals():
            self.study.sampler = self.optuna.samplers.TPESampler(seed=seed)
            waiting = self.study.get_trials(deepcopy=False, states=(self.states.WAITING,))
            if number == 0 and self._starts_unchanged and not waiting:
                self.study.enqueue_trial(self.unchanged)
            return self.study.ask(self.space)

    def changed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that differ from the unchanged training."""
        return {
            key: value for key, value in settings.items() if self.unchanged.get(key, ...) != value
        }

    def _steps(self, settings: Mapping[str, Any]) -> tuple[list[Step], Step]:
        """The steps that the training with these settings needs, in order, and its own step.

        Raises:
            ParamsError: the settings conflict with each other.
        """
        job = self.subject.job
        if changed := self.changed(settings):
            params = applied(self.params, settings, self.subject.kept)
            job = replace(job, params=params, settings=changed, trial=in_words(changed))
        jobs = {**self.subject.jobs, job.key: job}
        steps = with_needed(steps_of(jobs, self.subject.workspace), [job.key])
        return steps[:-1], steps[-1]

    def _train(self, step: Step, name: str, is_enough: Callable[[], bool] = lambda: False) -> bool:
        """Run a step in a child process, if it has no result yet. Returns whether `is_enough` ended
        it, by what it has written so far.
        """
        subject = self.subject
        tags = run_tags() | {"tuning": subject.name, "mlflow.runName": f"{subject.name} {name}"}
        if self.tracker.run_id:
            tags["mlflow.parentRunId"] = self.tracker.run_id
        environment = {
            "MLFLOW_TRACKING_URI": tracking_uri(),
            **subject.environment,
            RUN_TAGS: json.dumps({**tags, **subject.tags}),
        }
        if not step.is_done() and run_step(step, environment, self.stopping, is_enough):
            return True
        return is_enough()

    def _end_pruned(self, step: Step, number: int) -> None:
        """End the MLflow run of a pruned trial as FINISHED; its training is not resumed."""
        for run_dir in step.folder.glob("runs/*"):
            tracker = Tracker.resume(run_dir)
            tracker.set_tags({"tuning.pruned": f"after round {number}"})
            tracker.finish("FINISHED")
        remove_checkpoints(step.folder)

    def _record(self) -> Tuned | None:
        """After a trial: write trials.md and best.yaml, and log the metric to the parent's MLflow
        run. None: best.yaml was not requested, or no trial has finished.
        """
        ended = self.ended
        table = render_text("trials.md", metric=self.metric, keys=list(self.space), trials=ended)
        write_bytes_atomic(self.root / TABLE, f"{table}\n".encode())
        last = ended[-1].value
        if last is not None:
            self.tracker.log(len(ended), {f"validation/{self.metric}": last})
        asked = self.subject.asked
        return self.write_best(asked) if asked and self._finished() else None

    def _finished(self) -> list[tuple[int, Any]]:
        """Number and record of each trial that finished."""
        finished = self.states.COMPLETE
        return [(number, one) for number, one in enumerate(self.ended) if one.state == finished]

    def best(self) -> tuple[int, Any]:
        """Number and record of the best trial; on ties the first.

        Raises:
            TrainingError: no trial has finished.
        """
        finished = self._finished()
        if not finished:
            raise TrainingError(
                "no trial has finished",
                where=self.root / TABLE,
                fix="narrower ranges, or more trials",
            )
        return max(finished, key=lambda numbered: numbered[1].value)

    def figures(self) -> Trials:
        """Changed settings and metric of each trial that ended."""
        finished = self.states.COMPLETE
        return [
            (self.changed(trial.params), trial.value if trial.state == finished else None)
            for trial in self.ended
        ]

    def write_best(self, params: Params) -> Tuned:
        """Write best.yaml: `params` with the values of the best trial.

        Raises:
            TrainingError: no trial has finished.
        """
        path = self.root / BEST
        table = self.root / TABLE
        number, trial = self.best()
        settings = {key: trial.params[key] for key in self.space}
        best = applied(params, settings, source=path)
        words = [f"--set {key}={json.dumps(chosen)}" for key, chosen in settings.items()]
        count = len(self.ended)
        head = (
            f"# trial {number} of {count}, the best by "
            f"{self.metric} of the validation split: {trial.value:.2f}\n"
            f"# unidec train --params {path}\n"
            f"# make train ARGS='{' '.join(words)}'\n"
        )
        write_bytes_atomic(path, (head + to_yaml(best)).encode())
        self.tracker.log_final({f"best/{self.metric}": trial.value})
        self.tracker.log_files([path, table])
        return Tuned(
            trial=number,
            metric=trial.value,
            settings=settings,
            trials=count,
            best=str(path),
            table=str(table),
        )


def _last_epoch(lines: Sequence[Mapping[str, Any]]) -> int:
    """The epoch of the last of these records of rounds; 0 without any."""
    return lines[-1]["epoch"] if lines else 0


def _rounds(step: Step) -> list[dict[str, Any]]:
    """Records of the rounds of a training, also of an interrupted attempt."""
    files = step.folder.glob("runs/*/rounds.jsonl")
    return [line for file in files for line in read_json_lines(file)]
