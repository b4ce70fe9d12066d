"""One MLflow run for one training, shared by every process that works on it.

`Tracker.start(run_dir, ...)` writes `run_dir/tracking.json`; later processes continue with
`Tracker.resume(run_dir)`. Everything is first written to `run_dir/tracking.jsonl`; `flush` sends
the lines that the store has not confirmed. An unreachable store does not stop a training: the next
flush, of this process or a later one, sends the missing lines. After a failed attempt, the store is
not tried again for a hundred times as long as the attempt took: at most 1% of the time is lost."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unidec.addresses import without_credentials
from unidec.data.json_file import json_object, read_json_object
from unidec.data.storage import write_json
from unidec.metric_names import without_at
from unidec.tracking.once import create_once
from unidec.tracking.process_alive import is_alive, this_process
from unidec.tracking.store import (
    answers,
    experiment_id,
    open_client,
    tracking_uri,
    ui_url,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

Status = Literal["FINISHED", "FAILED", "KILLED"]

STATE = "tracking.json"
LOGGED = "tracking.jsonl"
UNSENT = "tracking-files"
RUN_TAGS = "UNIDEC_RUN_TAGS"
"""Environment variable with tags (JSON) of every run started in this process, set by its parent
process: `mlflow.parentRunId` nests the run below another one; `mlflow.runName` names it.
"""
TRIAL_TAG = "trial"
"""Tag of a training whose parameters differ from params.yaml; it lists them: optim.epochs=3."""
# MLflow's limits
_VALUE_LIMIT = 6000
_DIGEST_LIMIT = 36
_KEY_TAG = "unidec.run_key"
_EVERY = 10.0  # seconds between two flushes of a training
_LONGEST_WARNING = 400
_TIMES = 100  # a failed attempt is repeated after this multiple of its duration

_ask_again: dict[str, float] = {}  # unreachable store -> when it may be tried again

log = logging.getLogger(__name__)


class Tracker:
    """An MLflow run, in the store of `store.tracking_uri`, that outlives its processes and never
    raises into training.

    Args:
        experiment: MLflow experiment, created if missing.
    """

    def __init__(self, experiment: str = "unidec") -> None:
        self.experiment = experiment
        self.uri = tracking_uri()
        self._state: dict[str, Any] = {}
        self._client: MlflowClient | None = None
        # last step and value of each metric in the store
        self._newest: dict[str, tuple[int, float]] = {}
        self._flushed = time.monotonic()

    def start(
        self,
        run_dir: Path | str,
        params_flat: Mapping[str, Any],
        tags: Mapping[str, str] | None = None,
        dataset: Mapping[str, Any] | None = None,
        run_name: str | None = None,
    ) -> str | None:
        """Start the run of `run_dir`, or continue the one that was started there.

        Args:
            run_dir: the training's folder; it keeps the run's id.
            params_flat: every parameter, dotted keys. tags: see `code_tags`. run_name: default: the
            folder's name.
            dataset: {"name", "digest", "path" (relative)}; further figures become its profile.

        Returns:
            the run's id, or None while the store cannot be reached (a later flush retries).
        """
        self._run_dir = Path(run_dir)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        all_tags = dict(tags or {}) | run_tags()
        name = all_tags.pop("mlflow.runName", None) or run_name or self._run_dir.name
        params = _without_credentials(params_flat)
        # of a new run; `_note` keeps those of the run that was started in this folder
        self._state = {"run_key": uuid.uuid4().hex, "begun": _now_ms()}
        self._note(
            experiment=self.experiment,
            run_name=name,
            params={key: value[:_VALUE_LIMIT] for key, value in params.items()},
            tags=_without_credentials(all_tags),
            dataset=dict(dataset or {}),
            status=None,
            holder=this_process(),
        )
        self.flush()
        return self.run_id

    @classmethod
    def resume(cls, run_dir: Path | str) -> Tracker:
        """Continue the run that was started in `run_dir`; if there is none, the tracker does
        nothing.
        """
        state = tracking_state(Path(run_dir))
        tracker = cls(state.get("experiment", ""))
        tracker._run_dir = Path(run_dir)
        tracker._state = state if "run_key" in state else {}
        return tracker

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id, once it has one."""
        return self._state.get("run_id")

    @property
    def run_name(self) -> str:
        """The MLflow run's name, "" if none was started."""
        return str(self._state.get("run_name", ""))

    @property
    def status(self) -> str | None:
        """How the run ended; None while it has not ended."""
        return self._state.get("status")

    @property
    def url(self) -> str | None:
        """Address of the run's page; None while no server shows it."""
        place = self._state.get("experiment_id")
        return ui_url(self.uri, place, self.run_id) if place and self.run_id else None

    def finish(self, status: Status = "FINISHED") -> None:
        """Send everything that is pending and end the run."""
        if self._state:
            self._note(status=status)
            self._add(status=status)
            _ask_again.pop(self.uri, None)  # always try
            self.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of one step, in order of steps; a resumed training that repeats a step does
        not duplicate them.

        They are sent every ten seconds, together with metrics of processor, memory, disk, network
        and GPU."""
        self._add(step=int(step), metrics=_named(metrics))
        if self._state and time.monotonic() - self._flushed > _EVERY:
            if self._client is not None:  # creating MLflow's collectors asks the store
                self._add(step=int(step), metrics=_system_figures(self.uri))
            self.flush()

    def log_final(self, metrics: Mapping[str, float]) -> None:
        """Send metrics without a step (of a test split); the newest value is shown."""
        self._add(step=0, metrics=_named(metrics))
        self.flush()

    def log_files(self, paths: Iterable[Path | str], folder: str | None = None) -> None:
        """Send files and contents of folders, if they exist, to the run's artifacts below `folder`.

        They are copied first, as the originals may change while the store is unreachable.
        """
        if not self._state:
            return
        target = self._run_dir / UNSENT / (folder or "")
        for path in filter(Path.exists, map(Path, paths)):
            with _warned():
                target.mkdir(parents=True, exist_ok=True)
                if path.is_dir():
                    shutil.copytree(path, target, dirs_exist_ok=True)
                else:
                    shutil.copyfile(path, target / path.name)
        self.flush()

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        self._add(tags=_without_credentials(tags))
        self.flush()

    def _add(self, **entry: Any) -> None:
        """Append a line: one write, about 30 microseconds. On a full disk the line is lost, with a
        warning.
        """
        if not self._state:
            return
        # the line break comes first: a line truncated by a kill does not damage the next
        line = f"\n{json.dumps(entry | {'at': _now_ms()})}".encode()
        path = self._run_dir / LOGGED
        with _warned():
            path.touch(0o600)
            with open(path, "ab", buffering=0) as file:
                file.write(line)

    def flush(self) -> bool:
        """Send entries that the store has not confirmed; False if some remain for a later flush."""
        uri = self.uri
        begin = self._flushed = time.monotonic()
        if not self._state:
            return True
        if begin < _ask_again.get(uri, 0.0):
            return False
        try:
            if self._client is None:
                self._connect()
            elif not answers(uri):
                raise ConnectionError("no answer")
            self._send()
        # no error of MLflow, its database or the network may end a training
        except Exception as error:
            self._client = None  # the next attempt looks up how much arrived
            self._flushed = time.monotonic()
            if uri not in _ask_again:
                words = without_credentials(
                    f"{uri} is unreachable; logs wait in {self._run_dir}: "
                    f"{type(error).__name__}: {error}"
                )
                log.warning("%s", words.splitlines()[0][:_LONGEST_WARNING])
            _ask_again[uri] = self._flushed + _TIMES * (self._flushed - begin)
            return False
        if _ask_again.pop(uri, None) is not None:
            log.info("%s is back: all pending logs were sent", without_credentials(uri))
        return True

    def _connect(self) -> None:
        client = open_client(self.uri)
        place = experiment_id(client, self.uri, self.experiment)
        state = self._state
        tags = state["tags"] | {_KEY_TAG: state["run_key"]}
        run = create_once(
            lambda: self._find_run(client, place),
            lambda: client.create_run(place, state["begun"], tags, state["run_name"]),
        )
        if run.info.run_id != self.run_id:  # another store gets the whole history
            self._note(sent=0)
        self._note(run_id=run.info.run_id, experiment_id=place)
        self._describe(client, run)
        # the store keeps each metric's newest step beside the run: its history need not be read
        stored = run.data.to_proto().metrics
        self._newest = {metric.key: (metric.step, metric.value) for metric in stored}
        self._client = client

    def _find_run(self, client: MlflowClient, place: str) -> Run | None:
        """The run that was started before, found by its key, even if the reply to its creation was
        lost.
        """
        wanted = f"tags.`{_KEY_TAG}` = '{self._state['run_key']}'"
        return next(iter(client.search_runs([place], wanted)), None)

    def _describe(self, client: MlflowClient, run: Run) -> None:
        """Send parameters, tags and data set that the run does not have yet (MLflow's parameters
        never change).
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

        state = self._state
        run_id = run.info.run_id
        given = state["params"]
        params = [Param(key, given[key]) for key in sorted(given.keys() - run.data.params)]
        tags = [RunTag(*tag) for tag in state["tags"].items()]
        client.log_batch(run_id, params=params, tags=tags)
        about = dict(state["dataset"])
        if about and not (run.inputs and run.inputs.dataset_inputs):
            name = str(about.pop("name"))
            digest = str(about.pop("digest"))[:_DIGEST_LIMIT]
            source = json.dumps({"uri": about.pop("path")})
            entity = Dataset(name, digest, "local", source, profile=json.dumps(about))
            context = InputTag("mlflow.data.context", "training")
            client.log_inputs(run_id, [DatasetInput(entity, [context])])
        if self.status is None:
            client.update_run(run_id, status="RUNNING")

    def _send(self) -> None:
        from mlflow.entities import Metric, RunTag

        assert self._client is not None and self.run_id is not None
        entries, sent = self._unconfirmed()
        newest = dict(self._newest)
        metrics: list[Metric] = []
        tags: dict[str, str] = {}
        ended: dict[str, Any] = {}
        for entry in entries:
            for name, value in entry.get("metrics", {}).items():
                step = entry["step"]
                known, known_value = newest.get(name, (-1, None))
                is_changed = step == known == 0 and value != known_value  # of `log_final`
                if step > known or is_changed:
                    metrics.append(Metric(name, value, entry["at"], step))
                    newest[name] = (step, value)
            tags |= entry.get("tags", {})
            if "status" in entry:
                ended = entry
        run_tags = [RunTag(*tag) for tag in tags.items()]
        self._client.log_batch(self.run_id, metrics, tags=run_tags)
        unsent = self._run_dir / UNSENT
        if unsent.is_dir():
            self._client.log_artifacts(self.run_id, str(unsent))
            shutil.rmtree(unsent)
        if ended and ended["status"] == self.status:  # else the training has been resumed since
            self._client.set_terminated(self.run_id, status=ended["status"], end_time=ended["at"])
        self._newest = newest
        if entries:
            self._note(sent=sent)

    def _unconfirmed(self) -> tuple[list[dict[str, Any]], int]:
        """Logged entries that are not confirmed, oldest first, and their end position
        in the file.
        """
        path = self._run_dir / LOGGED
        sent = self._state.get("sent", 0)
        data = path.read_bytes()[sent:] if path.exists() else b""
        entries = []
        for line in filter(None, data.splitlines()):
            try:
                entries.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                log.warning("%s: skipped a truncated line", path)
        return entries, sent + len(data)

    def _note(self, **changes: Any) -> None:
        """Update the folder's tracking.json, keeping what other trackers of this run wrote
        meanwhile.
        """
        self._state = self._state | tracking_state(self._run_dir) | changes
        write_json(self._run_dir / STATE, self._state, mode=0o600)


@contextlib.contextmanager
def _warned() -> Iterator[None]:
    """Turn a failure to write into a warning."""
    try:
        yield
    except OSError as error:
        log.warning("not recorded for the tracking store: %s", error)


def tracking_state(run_dir: Path) -> dict[str, Any]:
    """The contents of a training folder's `tracking.json`; {} if it is missing or damaged."""
    return read_json_object(run_dir / STATE)


def has_died(run_dir: Path) -> bool:
    """Whether the process of a training folder's MLflow run died without ending the run."""
    state = tracking_state(run_dir)
    return "holder" in state and state.get("status") is None and is_alive(state["holder"]) is False


def is_behind(run_dir: Path) -> bool:
    """Whether a run has ended, but the store has not confirmed everything that it logged."""
    state = tracking_state(run_dir)
    if not state.get("status"):
        return False
    logged = run_dir / LOGGED
    size = logged.stat().st_size if logged.exists() else 0
    return size > state.get("sent", 0) or (run_dir / UNSENT).exists()


def reconcile_runs(run_dirs: Iterable[Path]) -> list[str]:
    """End runs whose process died as KILLED, and send unconfirmed entries of other ended runs.

    Returns:
        names of the folders whose run was ended; if the store is unreachable, the entries stay
        pending.
    """
    ended = []
    for run_dir in run_dirs:
        if has_died(run_dir):
            Tracker.resume(run_dir).finish("KILLED")
            ended.append(run_dir.name)
        elif is_behind(run_dir):
            Tracker.resume(run_dir).flush()
    return ended


def run_tags() -> dict[str, str]:
    """The tags of every run started in this process; see `RUN_TAGS`."""
    return json_object(os.environ.get(RUN_TAGS, ""))


def _without_credentials(facts: Mapping[str, Any]) -> dict[str, str]:
    return {key: without_credentials(str(fact)) for key, fact in facts.items()}


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    return {without_at(name): float(value) for name, value in metrics.items()}


def _now_ms() -> int:
    return int(time.time() * 1000)


@functools.cache
def _system_monitor(uri: str) -> Any:
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    return SystemMetricsMonitor("", tracking_uri=uri)


def _system_figures(uri: str) -> dict[str, float]:
    try:
        monitor = _system_monitor(uri)
        monitor.collect_metrics()
        figures = monitor.aggregate_metrics()
        for collector in monitor.monitors:
            collector.clear_metrics()
        return {f"system/{name}": float(value) for name, value in figures.items()}
    except Exception as error:  # a sensor that fails must not end a training
        log.warning("no system metrics: %s", error)
        return {}
