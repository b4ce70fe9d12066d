"""`unidec tune`: search parameters by a validation metric; each trial is a training in its own process and folder.

    runs/tune/<name>/
      study.db                   Optuna's records: trials, and their metric after each round
      shared/                    data set, tokens and vectors of frozen encoders, computed once
      cells/<data>/trial/        a folder per training, named by its parameters
      trials.md, best.yaml       all trials, and the best parameters; written after each trial

Re-run the command to resume after a kill or a stop. Finished trials are kept. The interrupted one is drawn again: seed
and earlier trials determine it, so it has the same folder, where its training resumes.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidec.comparison.cell import POLL_S, remove_checkpoints, run_step
from unidec.comparison.plan import DataEntry, Job
from unidec.comparison.tuning_space import holds, import_optuna, read_space
from unidec.comparison.workspace import Step, steps_of
from unidec.config import Params, build_params, fingerprint, keys_deciding, leaves, nearest, to_yaml
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

ROOT, EXPERIMENT = Path("runs/tune"), "unidec-tune"
STUDY, TABLE, BEST = "study.db", "trials.md", "best.yaml"


@dataclass(frozen=True)
class Tuned:
    """The best trial.

    Attributes:
        trial: its number. metric: in percent, on the validation split, after the last epoch. settings: its values.
        trials: number of trials. best, table: files with its parameters and with all trials.
    """

    trial: int
    metric: float
    settings: Mapping[str, Any]
    trials: int
    best: str
    table: str


def tune(
    params: Params, file: str | Path, trials: int = 20, metric: str = "nDCG@5", folder: str | Path | None = None
) -> Tuned:
    """Search the parameters that a file gives ranges for, with Optuna's TPE; its median rule prunes bad trials.

    The first trial uses the unchanged parameters, if these lie in the ranges.

    Args:
        params: all other parameters, and the seed of the search.
        file: see `read_space`.
        trials: total number; a resumed search adds the missing ones.
        metric: on the validation split, by the heads alone, after a trial's last epoch.
        folder: folder of the search; None: runs/tune/<name of the file>.

    Raises:
        Stopped: by SIGINT or SIGTERM, after the running trial's checkpoint was written.
        ConfigError: wrong file or metric, no validation split, a folder of another search, Optuna is missing.
        TrainingError: another process works on it, the first trial fails with unchanged parameters, or all fail.
    """
    if metric not in metric_names():
        near = nearest(metric, metric_names())
        raise ConfigError("no such metric", where="--metric", got=metric, expected="nDCG@5, PSP@5, tail/R@100, ...",
                          fix=near and f"--metric {near}")  # fmt: skip
    space, root = read_space(file, params), Path(folder or ROOT / Path(file).stem)
    if root.is_dir() and not (root / STUDY).exists() and any(path.name[0] != "." for path in root.iterdir()):
        raise ConfigError("not the folder of a search", where=str(root), fix="another folder with --out")
    again, farewell = "re-run the command to resume", "stopped at once; finished trials are kept"
    with (
        signals_raise(again, farewell),
        one_at_a_time(root),
        contextlib.closing(Search(params, space, metric, root)) as search,
    ):
        return search.run(trials)


class Search:
    """A search in its folder. Optuna draws and prunes; the comparison's engine trains (`unidec.comparison.cell`).

    Optuna's records are read and written within `stop_signals`: a signal in the middle of a transaction would leave
    them locked.
    """

    def __init__(self, params: Params, space: Mapping[str, Any], metric: str, root: Path) -> None:
        self.optuna = import_optuna()
        self.states = self.optuna.trial.TrialState
        self.params, self.space, self.metric, self.root = params, space, metric, root
        values = dict(leaves(params))
        self.unchanged = {key: values[key] for key, ranged in space.items() if holds(ranged, values[key])}
        self.data, trial = self._steps({})
        about = {
            "ranges": {key: str(ranged) for key, ranged in space.items()},
            "metric": metric, "data": self.data.key, "code": trial.spec["code"],
            "parameters": fingerprint(params, *keys_deciding("tokens", "label_graph", "training", "index")),
        }  # fmt: skip
        self._open(about)
        self.tracker = Tracker(EXPERIMENT)
        self.tracker.start(root, {"metric": metric, **about["ranges"]}, code_tags(), None, f"tune {root.name}")

    def _open(self, about: Mapping[str, Any]) -> None:
        """Open or create Optuna's records; those of another search are refused."""
        from sqlalchemy.exc import DatabaseError

        place = str(self.root / STUDY)
        try:
            self.storage = self.optuna.storages.RDBStorage(f"sqlite:///{place}")
            self.study = self.optuna.create_study(
                storage=self.storage, study_name="tune", direction="maximize", load_if_exists=True,
                pruner=self.optuna.pruners.MedianPruner(),
            )  # fmt: skip
        except (DatabaseError, RuntimeError, self.optuna.exceptions.OptunaError) as error:
            fix = "remove the folder, or name another with --out"
            raise ArtifactError("the search's records cannot be read", where=place, got=error, fix=fix) from error
        known = self.study.user_attrs.get("about", about)
        if others := [name for name in about if known.get(name) != about[name]]:
            self.close()
            raise ConfigError("folder of another search", where=str(self.root), got=f"other {', '.join(others)}",
                              fix="another folder with --out, or remove this one")  # fmt: skip
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
        return [trial for trial in trials if trial.state.name in ("COMPLETE", "PRUNED") or "failed" in trial.user_attrs]

    def run(self, trials: int) -> Tuned:
        """Run trials until there are `trials` in total; returns the best."""
        with tracked(self.root):
            for _ in self._rounds(self.data, "data"):
                pass
            dataset = XMCDataset.open(self.data.folder / "data" / "dataset", verify=False)
            if not len(dataset.rows("validation")):
                share = self.params.data.validation_share
                raise ConfigError("there is no validation split to tune on", where="data.validation_share", got=share,
                                  fix="--set data.validation_share=0.05")  # fmt: skip
            with stop_signals():
                for trial in self.study.get_trials(deepcopy=False):
                    if trial.state.name == "RUNNING":  # interrupted: it is drawn again
                        self.study.tell(trial.number, state=self.states.FAIL)
            left, epochs, best = range(len(self.ended), trials), self.params.optim.epochs, None
            with progress(total=len(left) * epochs, desc="tune", unit="epoch") as bar:
                for number in left:
                    done = self._try(number, bar)
                    bar.total = (bar.total or 0) + done - epochs  # it was pruned, or its epochs are tuned
                    best = self._record()
            return best or self._write_best()

    def _try(self, number: int, bar: Progress[Any]) -> int:
        """Draw a trial and train it to its end, or to the round after which it is pruned; returns its epochs."""
        trial, line, state = self._draw(number), dict[str, Any](), self.states.COMPLETE
        seconds, failed = 0.0, ""
        try:
            _, step = self._steps(trial.params)
            with contextlib.closing(self._rounds(step, f"trial {number}")) as rounds:
                for new in rounds:
                    value, epoch = new["validation"][self.metric], new["epoch"]
                    seconds += new["seconds"] + new.get("refresh", {}).get("refresh_seconds", 0.0)
                    with stop_signals():
                        trial.report(value, epoch)
                        prune = not new["finished"] and trial.should_prune()
                    bar.note(f"trial {number}: {self.metric} {value:.2f} after epoch {epoch}")
                    bar.update(epoch - line.get("epoch", 0))
                    line = new
                    if prune:
                        state = self.states.PRUNED
                        break
            if state == self.states.PRUNED:
                self._end_pruned(step, line["round"])
        except UnidecError as error:
            if number == 0 and len(self.unchanged) == len(self.space):
                raise  # not caused by the tuned values: repeated when the search is resumed
            state, failed = self.states.FAIL, str(error)
        with stop_signals():
            trial.set_user_attr("seconds", seconds)
            trial.set_user_attr("rounds", line.get("round", 0))
            if failed:
                trial.set_user_attr("failed", failed)
            self.study.tell(trial, line["validation"][self.metric] if state == self.states.COMPLETE else None, state)
        return line.get("epoch", 0)

    def _draw(self, number: int) -> Any:
        """Draw the trial with this number; the same in every attempt, given the same trials before it."""
        seed = random.Random(f"{self.params.seed}/{number}").getrandbits(32)
        with stop_signals():
            self.study.sampler = self.optuna.samplers.TPESampler(seed=seed)
            waiting = self.study.get_trials(deepcopy=False, states=(self.states.WAITING,))
            if number == 0 and len(self.unchanged) == len(self.space) and not waiting:
                self.study.enqueue_trial(self.unchanged)
            return self.study.ask(self.space)

    def _steps(self, settings: Mapping[str, Any]) -> tuple[Step, Step]:
        """The step that makes the data set, and the training with these settings.

        Raises:
            ParamsError: the settings conflict with each other.
        """
        values = dict(leaves(self.params)) | dict(settings) | {"tracking.experiment": EXPERIMENT}
        start = values["encoder.start"]  # for a process in another folder
        params = build_params(values | {"encoder.start": start and str(Path(start).resolve())}, {}, "trial")
        data = DataEntry(path=params.data.path, text=params.tokens.text, max_length=params.tokens.max_length)
        job = Job(Path(data.path).name, "trial", params.seed, "trial", params, data, settings)
        made, training = steps_of({job.key: job}, self.root).values()
        return made, training

    def _rounds(self, step: Step, name: str) -> Generator[dict[str, Any], None, None]:
        """Run a step in a child process, and yield the record of each round as soon as it is written; those of an
        interrupted attempt first. Closing the generator early stops the child, which writes a checkpoint."""
        parent = {"mlflow.parentRunId": self.tracker.run_id} if self.tracker.run_id else {}
        tags = run_tags() | parent | {"tuning": self.root.name, "mlflow.runName": f"{self.root.name} {name}"}
        environment = {"MLFLOW_TRACKING_URI": tracking_uri("."), RUN_TAGS: json.dumps(tags)}
        stopping, seen = threading.Event(), 0
        with ThreadPoolExecutor(1) as pool:
            try:
                work = None if step.is_done() else pool.submit(run_step, step, environment, stopping)
                while True:
                    ended = work is None or work.done()  # before the last look at the records
                    lines = [line for file in step.folder.glob("runs/*/rounds.jsonl") for line in read_json_lines(file)]
                    yield from lines[seen:]
                    seen = max(seen, len(lines))
                    if ended:
                        break
                    time.sleep(POLL_S)
                if work is not None:
                    work.result()
            finally:
                stopping.set()

    def _end_pruned(self, step: Step, number: int) -> None:
        """End the MLflow run of a pruned trial as FINISHED; its training is not resumed."""
        for run_dir in step.folder.glob("runs/*"):
            tracker = Tracker.resume(run_dir)
            tracker.set_tags({"tuning.pruned": f"after round {number}"})
            tracker.finish("FINISHED")
        remove_checkpoints(step.folder)

    def _record(self) -> Tuned | None:
        """After a trial: write trials.md and best.yaml (None: no trial has finished), and log the metric to the
        parent's MLflow run."""
        rows = [["trial", "state", self.metric, "seconds", *self.space]]
        rows.append(["---"] * len(rows[0]))
        ended = self.ended
        for number, trial in enumerate(ended):
            noted, value = trial.user_attrs, "" if trial.value is None else f"{trial.value:.2f}"
            state = f"pruned after round {noted['rounds']}" if trial.state == self.states.PRUNED else "trained"
            if "failed" in noted:
                state = f"failed: {noted['failed'].splitlines()[0]}".replace("|", "/")
            chosen = [trial.params[key] for key in self.space]
            settings = [f"{one:.4g}" if isinstance(one, float) else str(one) for one in chosen]
            rows.append([str(number), state, value, f"{noted['seconds']:.0f}", *settings])
        write_bytes_atomic(self.root / TABLE, "".join(f"| {' | '.join(row)} |\n" for row in rows).encode())
        if ended[-1].value is not None:
            self.tracker.log(len(ended), {f"validation/{self.metric}": ended[-1].value})
        return self._write_best() if any(trial.state == self.states.COMPLETE for trial in ended) else None

    def _write_best(self) -> Tuned:
        """best.yaml: all parameters, with those of the best trial.

        Raises:
            TrainingError: no trial has finished.
        """
        ended, path, table = self.ended, self.root / BEST, self.root / TABLE
        trained = [(trial.value, -number) for number, trial in enumerate(ended) if trial.state == self.states.COMPLETE]
        if not trained:
            raise TrainingError("no trial has finished", where=str(table), fix="narrower ranges, or more --trials")
        value, number = max(trained)[0], -max(trained)[1]
        settings = {key: ended[number].params[key] for key in self.space}
        best = build_params(dict(leaves(self.params)) | settings, {}, str(path))
        words = " ".join(f"--set {key}={json.dumps(chosen)}" for key, chosen in settings.items())
        head = [
            f"trial {number} of {len(ended)}, the best by {self.metric} of the validation split: {value:.2f}",
            f"unidec train --params {path}", f"make train ARGS='{words}'",
        ]  # fmt: skip
        write_bytes_atomic(path, ("".join(f"# {line}\n" for line in head) + to_yaml(best)).encode())
        self.tracker.log_final({f"best/{self.metric}": value})
        self.tracker.log_files([path, table])
        return Tuned(number, value, settings, len(ended), str(path), str(table))
