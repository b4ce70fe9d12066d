"""A search by a validation metric: Optuna draws trials, each is a training in its own process and
folder.

    <folder>/
      study.db                   Optuna's records: trials, and their metric after each round
      trials.md                  all trials; written after each
      best.yaml                  the best parameters (`unidec tune`)
    <workspace>/                 the same folder (`unidec tune`), or the comparison's (`unidec
    compare --tune`)
      shared/                    data set, tokens and vectors of frozen encoders, computed once
      cells/<data>/<cell>/       a folder per training, named by its parameters

Re-run the command to resume after a kill or a stop. Finished trials are kept. The interrupted one
is drawn again: seed and earlier trials determine it, so it has the same folder, where its training
resumes."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Collection, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unidec.comparison.cell import POLL_S, remove_checkpoints, run_step
from unidec.comparison.chosen import Trials
from unidec.comparison.plan import DataEntry, Job, in_words, slug
from unidec.comparison.tuning_space import (
    applied,
    distributions,
    import_optuna,
    read_space,
    unchanged,
)
from unidec.comparison.workspace import Comparison, Step, steps_of, with_needed
from unidec.config import (
    Params,
    build_params,
    fingerprint,
    keys_deciding,
    leaves,
    nearest,
    to_yaml,
)
from unidec.data.dataset import XMCDataset
from unidec.data.storage import read_json_lines, write_bytes_atomic
from unidec.errors import ArtifactError, ConfigError, TrainingError, UnidecError
from unidec.interrupt import signals_raise, stop_signals
from unidec.metric_names import metric_names
from unidec.pipeline.lock import one_at_a_time
from unidec.pipeline.runs import tracked
from unidec.progress import Progress, progress
from unidec.tracking.provenance import code_tags
from unidec.tracking.run import RUN_TAGS, Tracker, run_tags
from unidec.tracking.store import tracking_uri
from unidec.training.stopping import METRIC

ROOT = Path("runs/tune")
EXPERIMENT = "unidec-tune"
STUDY = "study.db"
TABLE = "trials.md"
BEST = "best.yaml"


@dataclass(frozen=True)
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
    """What is searched.

    Attributes:
        job: the training as it is. ranges: see `unidec.comparison.tuning_space`.
        root: folder of the search. workspace: folder of data sets and trainings. name: of its
        MLflow runs.
        jobs: trainings by key that `job` may start from. kept: keys that no trial changes.
        environment: variables of the trainings' processes. tags: of its MLflow runs.
        asked: what best.yaml starts from; None: none is written.
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


def tune(
    params: Params,
    file: str | Path,
    trials: int = 20,
    metric: str = METRIC,
    folder: str | Path | None = None,
) -> Tuned:
    """Search the parameters that a file gives ranges for, with Optuna's TPE; its median rule prunes
    bad trials.

    The first trial uses the unchanged parameters, if these lie in the ranges.

    Args:
        params: all other parameters, and the seed of the search.
        file: see `read_space`.
        trials: total number; a resumed search adds the missing ones.
        metric: on the validation split, by the heads alone, after a trial's last epoch.
        folder: folder of the search; None: runs/tune/<name of the file>.

    Raises:
        Stopped: by SIGINT or SIGTERM, after the running trial's checkpoint was written.
        ConfigError: wrong file or metric, no validation split, a folder of another search, Optuna
        is missing.
        TrainingError: another process works on it, the first trial fails with unchanged parameters,
        or all fail.
    """
    if metric not in metric_names():
        near = nearest(metric, metric_names())
        raise ConfigError(
            "no such metric",
            where="--metric",
            got=metric,
            expected="nDCG@5, PSP@5, tail/R@100, ...",
            fix=near and f"--metric {near}",
        )
    ranges = read_space(file, params)
    root = Path(folder or ROOT / Path(file).stem)
    if (
        root.is_dir()
        and not (root / STUDY).exists()
        and any(path.name[0] != "." for path in root.iterdir())
    ):
        raise ConfigError(
            "not the folder of a search", where=str(root), fix="another folder with --out"
        )
    job = _job_of(params)
    subject = Subject(
        job=job,
        ranges=ranges,
        metric=metric,
        root=root,
        workspace=root,
        name=root.name,
        asked=params,
    )
    again = "re-run the command to resume"
    farewell = "stopped at once; finished trials are kept"
    with (
        signals_raise(again, farewell),
        one_at_a_time(root),
        contextlib.closing(Search(subject)) as search,
        tracked(root),
    ):
        return search.run(trials) or search.write_best(params)


def _job_of(params: Params) -> Job:
    """The training of these parameters, for a process in another folder."""
    start = params.encoder.start
    values = dict(leaves(params)) | {"tracking.experiment": EXPERIMENT}
    params = build_params(
        values | {"encoder.start": start and str(Path(start).resolve())}, {}, "trial"
    )
    data = DataEntry(
        path=params.data.path, text=params.tokens.text, max_length=params.tokens.max_length
    )
    return Job(Path(data.path).name, "trial", params.seed, "trial", params, data, {})


def subject_of(comparison: Comparison, key: str, environment: Mapping[str, str]) -> Subject:
    """The search of a recipe cell in a comparison's `tuning`."""
    job = comparison.jobs[key]
    name = f"{comparison.file.name} {job.cell}"
    return Subject(
        job=job,
        ranges=job.ranges,
        metric=METRIC,
        root=comparison.root / "tuning" / slug(job.cell),
        workspace=comparison.root,
        name=name,
        jobs=comparison.jobs,
        kept=comparison.overrides,
        environment=environment,
        tags={"comparison": comparison.file.name},
    )


def tune_cell(subject: Subject, trials: int, stopping: threading.Event) -> Trials:
    """Search the settings of a comparison's cell.

    Args:
        stopping: ends the search after the running trial's checkpoint was written.

    Returns:
        Its trials.

    Raises:
        TrainingError: all trials failed, or the search is being stopped.
    """
    root = subject.root
    with (
        one_at_a_time(root),
        contextlib.closing(Search(subject, stopping)) as search,
        tracked(root),
    ):
        search.run(trials)
        search.best()
        return search.figures()


class Search:
    """A search in its folder. Optuna draws and prunes; the comparison's engine trains
    (`unidec.comparison.cell`).

    Optuna's records are read and written within `stop_signals`: a signal in the middle of a
    transaction would leave them locked."""

    def __init__(self, subject: Subject, stopping: threading.Event | None = None) -> None:
        self.optuna = import_optuna()
        self.states = self.optuna.trial.TrialState
        self.subject = subject
        self.stopping = stopping or threading.Event()
        self.params = subject.job.params
        self.root = subject.root
        self.metric = subject.metric
        self.space = distributions(subject.ranges)
        self.unchanged = unchanged(subject.ranges, self.params)
        self.needed, self.first = self._steps(self.unchanged)
        about = {
            "ranges": {key: str(ranged) for key, ranged in self.space.items()},
            "metric": self.metric,
            "data": self._data.key,
            "code": self.first.spec["code"],
            "parameters": fingerprint(
                self.params, *keys_deciding("tokens", "label_graph", "training", "index")
            ),
        }
        self._open(about)
        self.tracker = Tracker(self.params.tracking.experiment)
        facts = {"metric": self.metric, **about["ranges"]}
        self.tracker.start(self.root, facts, code_tags(), None, f"tune {subject.name}")

    @property
    def _data(self) -> Step:
        """The step that makes the data set."""
        return next(step for step in self.needed if step.name == self.first.needs[0])

    def _open(self, about: Mapping[str, Any]) -> None:
        """Open or create Optuna's records; those of another search are refused."""
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
            fix = "remove the folder, or name another with --out"
            raise ArtifactError(
                "the search's records cannot be read", where=place, got=error, fix=fix
            ) from error
        known = self.study.user_attrs.get("about", about)
        if others := [name for name in about if known.get(name) != about[name]]:
            self.close()
            raise ConfigError(
                "folder of another search",
                where=str(self.root),
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
        """Trials that count: trained, pruned, or failed by themselves; oldest first."""
        with stop_signals():
            trials = self.study.get_trials(deepcopy=False)
        return [
            trial
            for trial in trials
            if trial.state.name in ("COMPLETE", "PRUNED") or "failed" in trial.user_attrs
        ]

    def run(self, trials: int) -> Tuned | None:
        """Run trials until there are `trials` in total.

        Returns:
            The best; None: no trial ran or finished, or the subject has no best.yaml.
        """
        for step in self.needed:
            for _ in self._rounds(step, "data" if step is self._data else step.name):
                pass
        dataset = XMCDataset.open(self._data.folder / "data" / "dataset", verify=False)
        if not len(dataset.rows("validation")):
            share = self.params.data.validation_share
            raise ConfigError(
                "there is no validation split to tune on",
                where="data.validation_share",
                got=share,
                fix="--set data.validation_share=0.05",
            )
        with stop_signals():
            for trial in self.study.get_trials(deepcopy=False):
                if trial.state.name == "RUNNING":  # interrupted: it is drawn again
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
        """Draw a trial and train it to its end, or to the round after which it is pruned; returns
        its epochs.
        """
        trial = self._draw(number)
        line = dict[str, Any]()
        state = self.states.COMPLETE
        seconds = 0.0
        failed = ""
        try:
            _, step = self._steps(trial.params)
            with contextlib.closing(self._rounds(step, f"trial {number}")) as rounds:
                for new in rounds:
                    value = new["validation"][self.metric]
                    epoch = new["epoch"]
                    seconds += new["seconds"] + new.get("refresh", {}).get("refresh_seconds", 0.0)
                    with stop_signals():
                        trial.report(value, epoch)
                        prune = not new["finished"] and trial.should_prune()
                    bar.note(
                        f"{self.subject.name}, trial {number}: {self.metric} {value:.2f} "
                        f"after epoch {epoch}"
                    )
                    bar.update(epoch - line.get("epoch", 0))
                    line = new
                    if prune:
                        state = self.states.PRUNED
                        break
            if state == self.states.PRUNED:
                self._end_pruned(step, line["round"])
        except UnidecError as error:
            if self.stopping.is_set() or (number == 0 and len(self.unchanged) == len(self.space)):
                raise  # not caused by the tuned values: repeated when the search is resumed
            state = self.states.FAIL
            failed = str(error)
        with stop_signals():
            trial.set_user_attr("seconds", seconds)
            trial.set_user_attr("rounds", line.get("round", 0))
            if failed:
                trial.set_user_attr("failed", failed)
            self.study.tell(
                trial,
                line["validation"][self.metric] if state == self.states.COMPLETE else None,
                state,
            )
        return line.get("epoch", 0)

    def _draw(self, number: int) -> Any:
        """Draw the trial with this number; the same in every attempt, given the same trials before
        it.
        """
        seed = random.Random(f"{self.params.seed}/{number}").getrandbits(32)
        with stop_signals():
            self.study.sampler = self.optuna.samplers.TPESampler(seed=seed)
            waiting = self.study.get_trials(deepcopy=False, states=(self.states.WAITING,))
            if number == 0 and len(self.unchanged) == len(self.space) and not waiting:
                self.study.enqueue_trial(self.unchanged)
            return self.study.ask(self.space)

    def changed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that differ from the training as it is."""
        return {
            key: value for key, value in settings.items() if self.unchanged.get(key, ...) != value
        }

    def _steps(self, settings: Mapping[str, Any]) -> tuple[list[Step], Step]:
        """What the training with these settings needs, in order, and that training.

        Raises:
            ParamsError: the settings conflict with each other.
        """
        job = self.subject.job
        if changed := self.changed(settings):
            params = applied(self.params, settings, self.subject.kept)
            job = replace(job, params=params, settings=changed, trial=in_words(changed))
        steps = with_needed(
            steps_of({**self.subject.jobs, job.key: job}, self.subject.workspace), [job.key]
        )
        return steps[:-1], steps[-1]

    def _rounds(self, step: Step, name: str) -> Generator[dict[str, Any], None, None]:
        """Run a step in a child process, and yield the record of each round as soon as it is
        written; those of an interrupted attempt first. Closing the generator early stops the child,
        which writes a checkpoint.
        """
        parent = {"mlflow.parentRunId": self.tracker.run_id} if self.tracker.run_id else {}
        own = {"tuning": self.subject.name, "mlflow.runName": f"{self.subject.name} {name}"}
        tags = {**run_tags(), **parent, **own, **self.subject.tags}
        uri = {"MLFLOW_TRACKING_URI": tracking_uri(".")}
        environment = {**uri, **self.subject.environment, RUN_TAGS: json.dumps(tags)}
        ending = threading.Event()
        seen = 0
        with ThreadPoolExecutor(1) as pool:
            try:
                work = None if step.is_done() else pool.submit(run_step, step, environment, ending)
                while True:
                    ended = work is None or work.done()  # before the last look at the records
                    lines = [
                        line
                        for file in step.folder.glob("runs/*/rounds.jsonl")
                        for line in read_json_lines(file)
                    ]
                    yield from lines[seen:]
                    seen = max(seen, len(lines))
                    if self.stopping.is_set():
                        fix = "run it again to resume"
                        raise TrainingError("the search is being stopped", where=step.name, fix=fix)
                    if ended:
                        break
                    time.sleep(POLL_S)
                if work is not None:
                    work.result()
            finally:
                ending.set()

    def _end_pruned(self, step: Step, number: int) -> None:
        """End the MLflow run of a pruned trial as FINISHED; its training is not resumed."""
        for run_dir in step.folder.glob("runs/*"):
            tracker = Tracker.resume(run_dir)
            tracker.set_tags({"tuning.pruned": f"after round {number}"})
            tracker.finish("FINISHED")
        remove_checkpoints(step.folder)

    def _record(self) -> Tuned | None:
        """After a trial: write trials.md and best.yaml (None: not asked for, or no trial has
        finished), and log the metric to the parent's MLflow run.
        """
        rows = [["trial", "state", self.metric, "seconds", *self.space]]
        rows.append(["---"] * len(rows[0]))
        ended = self.ended
        for number, trial in enumerate(ended):
            noted = trial.user_attrs
            value = "" if trial.value is None else f"{trial.value:.2f}"
            state = (
                f"pruned after round {noted['rounds']}"
                if trial.state == self.states.PRUNED
                else "trained"
            )
            if "failed" in noted:
                state = f"failed: {noted['failed'].splitlines()[0]}".replace("|", "/")
            chosen = [trial.params[key] for key in self.space]
            settings = [f"{one:.4g}" if isinstance(one, float) else str(one) for one in chosen]
            rows.append([str(number), state, value, f"{noted['seconds']:.0f}", *settings])
        write_bytes_atomic(
            self.root / TABLE, "".join(f"| {' | '.join(row)} |\n" for row in rows).encode()
        )
        if ended[-1].value is not None:
            self.tracker.log(len(ended), {f"validation/{self.metric}": ended[-1].value})
        has_finished = any(trial.state == self.states.COMPLETE for trial in ended)
        return self.write_best(self.subject.asked) if self.subject.asked and has_finished else None

    def best(self) -> tuple[int, Any]:
        """Number and record of the best trial.

        Raises:
            TrainingError: no trial has finished.
        """
        trained = [
            (n, trial) for n, trial in enumerate(self.ended) if trial.state == self.states.COMPLETE
        ]
        if not trained:
            table = str(self.root / TABLE)
            raise TrainingError(
                "no trial has finished", where=table, fix="narrower ranges, or more trials"
            )
        return max(trained, key=lambda one: (one[1].value, -one[0]))

    def figures(self) -> Trials:
        """Its trials that ended."""
        finished = self.states.COMPLETE
        return [
            (self.changed(one.params), one.value if one.state == finished else None)
            for one in self.ended
        ]

    def write_best(self, params: Params) -> Tuned:
        """best.yaml: `params` with the values of the best trial.

        Raises:
            TrainingError: no trial has finished.
        """
        path = self.root / BEST
        table = self.root / TABLE
        number, trial = self.best()
        settings = {key: trial.params[key] for key in self.space}
        best = applied(params, settings, source=str(path))
        words = " ".join(f"--set {key}={json.dumps(chosen)}" for key, chosen in settings.items())
        count = len(self.ended)
        head = [
            (
                f"trial {number} of {count}, the best by {self.metric} of the validation split: "
                f"{trial.value:.2f}"
            ),
            f"unidec train --params {path}",
            f"make train ARGS='{words}'",
        ]
        write_bytes_atomic(path, ("".join(f"# {line}\n" for line in head) + to_yaml(best)).encode())
        self.tracker.log_final({f"best/{self.metric}": trial.value})
        self.tracker.log_files([path, table])
        return Tuned(number, trial.value, settings, count, str(path), str(table))
