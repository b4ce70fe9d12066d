"""One MLflow run for one training, shared by every process that works on it.

`Tracker.start(run_dir, ...)` writes `run_dir/tracking.json`; later processes go on with `Tracker.resume(run_dir)`.
Nothing here ever stops training: what cannot be sent is kept (in memory, in `tracking.json` and beside it: see
`tracking_spool`) and sent at a later flush, by this process or another. A store that is away costs a look at its port;
one that hangs is asked again only when a hundred times as long has passed as its answer was waited for: 1%, at most.

    tracker = Tracker(experiment="unidec")
    tracker.start(run_dir, flatten(params), tags=code_tags("."), dataset={"name": ..., "digest": ..., "path": ...})
    tracker.log(step, {"loss": 0.3})                 # buffered; sent every `flush_seconds`
    with tracker.live(): ...                         # ... and by a thread while inside: `log` takes microseconds
    with tracker.system_metrics(): ...               # CPU, memory, disk, network, GPU while inside
    tracker.log_final({"test/P@1": 45.0}); tracker.log_files(["outputs/report.html"], "report")
    tracker.finish("FINISHED")
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unidec.data.storage import write_json
from unidec.errors import without_credentials
from unidec.tracking.lock_holder import this_process, tracking_state
from unidec.tracking.spool import Point, Spool, new_points, now_ms
from unidec.tracking.store import (
    Outage,
    experiment_id,
    listens,
    open_client,
    present_uri,
    tracking_uri,
    ui_url,
    with_credentials,
)
from unidec.tracking.system_metrics import sampled

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

Status = Literal["FINISHED", "FAILED", "KILLED"]

_STATE = "tracking.json"
_PARAMS_A_BATCH, _METRICS_A_BATCH, _VALUE_LIMIT, _DIGEST_LIMIT = 100, 1000, 6000, 36  # MLflow's limits
_KEY_TAG = "unidec.run_key"
RUN_TAGS = "UNIDEC_RUN_TAGS"
"""Environment variable: tags (JSON) of every run begun in this process, set by who started it: `mlflow.parentRunId`
puts it below another run; `mlflow.runName` is what people see."""
_AT_LAST = 30.0  # seconds that a run's end waits for an attempt which was left to itself
_PATIENCE = 2.0  # seconds that a training waits while figures are sent: what an outage left may take minutes

log = logging.getLogger(__name__)


class Tracker:
    """An MLflow run that outlives its processes and never raises into training.

    Args:
        experiment: MLflow experiment, created when there is none.
        root: repository root; the default store is below it.
        uri: tracking store; default: `MLFLOW_TRACKING_URI`, else SQLite in `<root>/mlflow/`.
        flush_seconds: `log` sends what it holds at most this often.
        retry_seconds: pause after a failed attempt.
    """

    def __init__(
        self,
        experiment: str = "unidec",
        *,
        root: Path | str = ".",
        uri: str | None = None,
        flush_seconds: float = 5.0,
        retry_seconds: float = 30.0,
    ) -> None:
        self.experiment = experiment
        self.uri = uri or tracking_uri(root)
        self.shown_uri = without_credentials(self.uri)
        self.run_dir: Path | None = None
        self._flush_seconds, self._retry_seconds = flush_seconds, retry_seconds
        self._state: dict[str, Any] = {}
        self._points: list[Point] = []  # what the store may not have yet; `_guard` for every look at it
        self._some_sent = False  # ... since they were last written to the spool
        self._last_step: dict[str, int] = {}  # newest step of each metric that the store has: nothing is sent twice
        self._last_value: dict[str, float] = {}  # ... and its value
        self._stored_status: str | None = None
        self._guard, self._sending = threading.Lock(), threading.RLock()
        self._is_live = False
        self._left: threading.Thread | None = None  # one that waits for an answer that does not come
        self._kept: Spool | None = None
        self._client: MlflowClient | None = None
        self._connected = False
        self._last_flush = 0.0

    # -- a run's life ------------------------------------------------------------------------------------------------

    def start(
        self,
        run_dir: Path | str,
        params_flat: Mapping[str, Any],
        tags: Mapping[str, str] | None = None,
        dataset: Mapping[str, Any] | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
    ) -> str | None:
        """Begins the run of `run_dir`, or goes on with the one begun there before.

        Args:
            run_dir: the training's folder; it keeps the run's id.
            params_flat: every parameter, dotted keys.
            tags: see `code_tags`.
            dataset: {"name", "digest" (cut to 36 characters), "path" (relative)}, and any figures: its profile.
            run_name: what people see; default: the folder's name.
            run_id: a run that a checkpoint names; it counts where the folder has lost its own note of it.

        Returns:
            the run's id, or None while the store cannot be reached (a later flush tries again).
        """
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        outer = _outer_tags()
        run_name = outer.pop("mlflow.runName", run_name)
        old = _read_state(self.run_dir)
        same = old.get("uri") == self.shown_uri and old.get("experiment") == self.experiment
        self._state = {
            "uri": self.shown_uri,
            "experiment": self.experiment,
            "run_name": run_name or self.run_dir.name,
            "run_key": old["run_key"] if same else uuid.uuid4().hex,
            "run_id": old.get("run_id") if same else None if old else run_id,
            "experiment_id": old.get("experiment_id") if same else None,
            "params": {key: str(value)[:_VALUE_LIMIT] for key, value in params_flat.items()},
            "tags": {**(tags or {}), **outer},
            "dataset": dict(dataset) if dataset else None,
            "files": old.get("files", []) if same else [],
            "begun": old.get("begun", now_ms()) if same else now_ms(),
            "status": None,
            "holder": this_process(),
        }
        self._save_state()
        self._read_pending()
        self.flush(force=True)
        return self.run_id

    @classmethod
    def resume(cls, run_dir: Path | str, **options: Any) -> Tracker:
        """Goes on with the run begun in `run_dir`; a tracker that does nothing where none was begun."""
        state = _read_state(Path(run_dir))
        if state:
            options["uri"] = with_credentials(state["uri"])
        tracker = cls(state.get("experiment", "unidec"), **options)
        if state:
            tracker.run_dir, tracker._state = Path(run_dir), state
            tracker._read_pending()
        return tracker

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id, once it has one."""
        return self._state.get("run_id")

    @property
    def status(self) -> str | None:
        """How the run ended, None while it goes on."""
        return self._state.get("status")

    @property
    def url(self) -> str | None:
        """Address of the run's page; None while no server shows it."""
        return ui_url(self.uri, self._state["experiment_id"], self.run_id) if self.run_id else None

    def finish(self, status: Status = "FINISHED") -> None:
        """Sends everything that is left and ends the run."""
        if self._state:
            self._state |= {"status": status, "ended": now_ms(), "status_sent": False}
            self._save_state()
            if self._left is not None:  # two attempts at a time would do no harm, but the second would find no place
                self._left.join(_AT_LAST)
            self._flush(Outage.is_over_at_last)

    # -- what is logged ----------------------------------------------------------------------------------------------

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps figures of one step, in order of steps; a resumed training that repeats a step does not double it.

        What is only in memory dies with the process: `catch_up` has it sent from the training's own records.
        """
        self._keep(new_points(step, metrics))
        if not self._is_live and time.monotonic() - self._last_flush >= self._flush_seconds:
            self.flush()

    def catch_up(self, records: Iterable[Mapping[str, float]]) -> None:
        """Keeps those of a training's records (each with "step") that were never sent: a kill took them from memory."""
        with self._guard:
            known = dict(self._last_step)
            for name, _, step, _ in self._points:
                known[name] = max(step, known.get(name, -1))
        for record in records:
            points = new_points(int(record["step"]), {name: value for name, value in record.items() if name != "step"})
            self._keep([point for point in points if point[2] > known.get(point[0], -1)])

    @contextlib.contextmanager
    def live(self, seconds: float = 10.0) -> Iterator[None]:
        """Inside, a thread of its own sends every so many seconds, and `log` costs its caller nothing: a store takes
        20 ms for a batch, one that is away a minute for its refusal."""
        done = threading.Event()

        def send() -> None:
            while not done.wait(seconds):
                self._flush(lambda outage: outage.may_be_over(self._retry_seconds))

        # a daemon: a store that does not answer must not keep the process from its end
        thread = threading.Thread(target=send, name="tracking", daemon=True)
        self._is_live = True
        thread.start()
        try:
            yield
        finally:
            self._is_live = False
            done.set()
            thread.join(_PATIENCE)
            if thread.is_alive():
                self._leave(thread)

    def _keep(self, points: list[Point]) -> None:
        with self._guard:
            self._points += points

    def log_final(self, metrics: Mapping[str, float]) -> None:
        """Sends figures that have no step (a test split's); the newest value is the one that is shown."""
        self._keep(new_points(-1, metrics))
        self.flush(force=True)

    def log_files(self, paths: Iterable[Path | str], folder: str | None = None) -> None:
        """Copies files and folders that exist to the run's artifacts, below `folder`: now, or as they are now later."""
        if not self._state:
            return
        found = [[str(Path(path).absolute()), folder] for path in paths if Path(path).exists()]
        self._state["files"] += [entry for entry in found if entry not in self._state["files"]]
        self._save_state()
        self.flush(force=True)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags of the run."""
        if self._state:
            self._state["tags"].update({key: str(value) for key, value in tags.items()})
            self._state["tags_sent"] = False
            self._save_state()
            self.flush(force=True)

    @contextlib.contextmanager
    def system_metrics(self) -> Iterator[None]:
        """Samples processor, memory, disk, network and GPU inside the block, by seconds since the run began."""
        if not self._state:
            yield
            return
        begun = self._state.setdefault("begun", now_ms())
        with sampled(lambda sample: self._keep(new_points((now_ms() - begun) // 1000, sample))):
            yield

    # -- sending -----------------------------------------------------------------------------------------------------

    def flush(self, force: bool = False) -> bool:
        """Sends what is kept; False when the store has not got all of it: the rest is on disk and is sent later.

        Args:
            force: now, although the store was away a moment ago, and however long it takes; else two seconds at most
                are waited for an attempt, which then goes on by itself.
        """
        if force:
            return self._flush(Outage.was_cheap)
        outage = Outage.of(self.shown_uri)
        if not self._state or (outage and not outage.is_due(self._retry_seconds)):
            return self._flush(lambda _: False)
        done: list[bool] = []
        thread = threading.Thread(target=lambda: done.append(self._flush(lambda _: True)), name="flush", daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        if not done:
            Outage.note(self.shown_uri, _PATIENCE)
            self._leave(thread)
        return done == [True]

    def _leave(self, thread: threading.Thread) -> None:
        """A thread that waits for an answer is left to itself: what it has is on disk, and others may send it, too."""
        self._left = None
        self._spool()
        self._left = thread

    def _flush(self, is_due: Callable[[Outage], bool]) -> bool:
        if not self._state:
            self._points = []
            return True
        self._last_flush = begin = time.monotonic()
        outage = Outage.of(self.shown_uri)
        if (outage and not is_due(outage)) or not self._sending.acquire(timeout=0 if self._is_live else _PATIENCE):
            self._spool()
            return False
        try:
            if not listens(self.uri):
                raise ConnectionError("nothing listens there")
            self._connect()
            self._send_points()
            self._send_rest()
        except Exception as error:  # whatever MLflow, its database or the network throws: training is worth more
            if Outage.note(self.shown_uri, time.monotonic() - begin):
                log.warning(
                    "%s is away; what is logged waits in %s: %s", self.shown_uri, self.run_dir, _first_line(error)
                )
            self._spool()
            return False
        finally:
            self._sending.release()
        if seconds := Outage.end(self.shown_uri):
            log.info("%s is back after %.0f s: everything kept meanwhile was sent", self.shown_uri, seconds)
        self._write_pending()
        return True

    def _connect(self) -> bool:
        if self._connected:
            return True
        self._client = client = open_client(self.uri)
        run = self._find_run(client)
        if run is None:
            place = experiment_id(client, self.uri, self.experiment)
            tags = {**self._state["tags"], _KEY_TAG: self._state["run_key"]}
            begun = self._state.get("begun")
            run = client.create_run(place, begun, tags, self._state["run_name"])
        self._state |= {"run_id": run.info.run_id, "experiment_id": run.info.experiment_id}
        self._save_state()
        self._describe(client, run)
        # the store keeps each metric's newest step beside the run: its whole history need not be read
        newest = run.data.to_proto().metrics
        self._last_step = {metric.key: metric.step for metric in newest}
        self._last_value = {metric.key: metric.value for metric in newest}
        self._connected = True
        return True

    def _find_run(self, client: MlflowClient) -> Run | None:
        """The run begun before: by its id, or by the key it was created with when the answer got lost."""
        from mlflow.exceptions import MlflowException

        if self.run_id:
            try:
                run = client.get_run(self.run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                log.warning("MLflow run %s is gone from %s: a new one takes its place", self.run_id, self.shown_uri)
                return None
            return run if run.info.lifecycle_stage == "active" else None
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            return None
        key = self._state["run_key"]
        found = client.search_runs([experiment.experiment_id], f"tags.`{_KEY_TAG}` = '{key}'", max_results=1)
        return found[0] if found else None

    def _describe(self, client: MlflowClient, run: Run) -> None:
        """Parameters, tags and data set: only what the run does not have yet (MLflow's parameters never change)."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

        run_id, known = run.info.run_id, run.data.params
        new = [Param(key, value) for key, value in self._state["params"].items() if key not in known]
        for start in range(0, len(new), _PARAMS_A_BATCH):
            client.log_batch(run_id, params=new[start : start + _PARAMS_A_BATCH])
        client.log_batch(run_id, tags=[RunTag(key, str(value)) for key, value in self._state["tags"].items()])
        self._state["tags_sent"] = True
        if self._state["dataset"] and not (run.inputs and run.inputs.dataset_inputs):
            about = dict(self._state["dataset"])
            source = json.dumps({"uri": str(about.pop("path", ""))})
            name, digest = str(about.pop("name", "dataset")), str(about.pop("digest", ""))[:_DIGEST_LIMIT]
            entity = Dataset(name, digest, "local", source, profile=json.dumps(about))
            client.log_inputs(run_id, [DatasetInput(entity, [InputTag("mlflow.data.context", "training")])])
        self._stored_status = run.info.status
        if self._state["status"] is None and run.info.status != "RUNNING":
            client.update_run(run_id, status="RUNNING")
            self._stored_status = "RUNNING"

    def _send_points(self) -> None:
        from mlflow.entities import Metric

        assert self._client is not None and self.run_id is not None
        with self._guard:
            points = list(self._points)
        final = {point[0]: index for index, point in enumerate(points) if point[2] < 0}  # the newest of each
        for start in range(0, len(points), _METRICS_A_BATCH):
            batch = points[start : start + _METRICS_A_BATCH]
            newest, values, fresh = dict(self._last_step), dict(self._last_value), []
            for index, (name, value, step, at) in enumerate(batch, start):
                again = values.get(name) == value or final[name] != index if step < 0 else step <= newest.get(name, -1)
                if not again:
                    fresh.append(Metric(name, value, at, max(step, 0)))
                    newest[name], values[name] = max(step, newest.get(name, -1)), value
            if fresh:
                self._client.log_batch(self.run_id, metrics=fresh)
            with self._guard:  # others only ever add behind these
                self._last_step, self._last_value, self._some_sent = newest, values, True
                del self._points[: len(batch)]

    def _send_rest(self) -> None:
        assert self._client is not None and self.run_id is not None
        if not self._state.get("tags_sent", True):
            for key, value in self._state["tags"].items():
                self._client.set_tag(self.run_id, key, value)
            self._state["tags_sent"] = True
            self._save_state()
        while self._state["files"]:
            name, folder = self._state["files"][0]
            path = self._disk.path / name
            if path.is_dir():
                self._client.log_artifacts(self.run_id, str(path), folder)
            elif path.is_file():
                self._client.log_artifact(self.run_id, str(path), folder)
            self._state["files"].pop(0)
            self._save_state()
            self._disk.drop_file(name)
        status = self._state["status"]
        if status and (self._stored_status != status or not self._state.get("status_sent", True)):
            self._client.set_terminated(self.run_id, status=status, end_time=self._state.get("ended"))
            self._stored_status = status
            self._state["status_sent"] = True
            self._save_state()

    # -- what survives a process ---------------------------------------------------------------------------------------

    @property
    def _disk(self) -> Spool:
        assert self.run_dir is not None
        if self._kept is None or self._kept.path != self.run_dir:
            self._kept = Spool(self.run_dir)
        return self._kept

    def _save_state(self) -> None:
        assert self.run_dir is not None
        if threading.current_thread() is not self._left:
            write_json(self.run_dir / _STATE, self._state, mode=0o600)

    def _read_pending(self) -> None:
        points = self._disk.read()
        with self._guard:
            self._points = points + self._points

    def _write_pending(self) -> None:
        if threading.current_thread() is self._left:
            return
        with self._guard:
            points, anew, self._some_sent = list(self._points), self._some_sent, False
        self._disk.write(points, anew)

    def _spool(self) -> None:
        """All that waits, onto the disk."""
        try:
            self._write_pending()
            files = self._state["files"]
            kept = [[self._disk.keep_file(path), folder] for path, folder in files]
            if kept != files:
                self._state["files"] = kept
                self._save_state()
        except OSError as error:
            log.warning("what tracking waits for cannot be kept on disk: %s", error)


def _outer_tags() -> dict[str, str]:
    try:
        return {
            key: without_credentials(str(value)) for key, value in json.loads(os.environ.get(RUN_TAGS) or "{}").items()
        }
    except (ValueError, AttributeError):
        log.warning("%s is no JSON object: it is passed over", RUN_TAGS)
        return {}


def _first_line(error: BaseException) -> str:
    return (without_credentials(str(error)).splitlines() or [""])[0][:300] or type(error).__name__


def _read_state(run_dir: Path) -> dict[str, Any]:
    """The folder's note of its MLflow run, with the store's address as it is now."""
    state = tracking_state(run_dir)
    if isinstance(state.get("uri"), str):
        return state | {"uri": present_uri(without_credentials(state["uri"]))}
    if (run_dir / _STATE).exists():
        log.warning("%s is damaged: a new MLflow run is begun", run_dir / _STATE)
    return {}
