"""One MLflow run for one training, shared by every process that works on it.

`Tracker.start(run_dir, ...)` writes `run_dir/tracking.json`; later processes go on with `Tracker.resume(run_dir)`.
Nothing here ever stops training: what cannot be sent is kept (in memory, `pending-metrics.jsonl` and `tracking.json`)
and sent at a later flush.

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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unidec.data.storage import write_bytes_atomic, write_json
from unidec.ops.holder import this_process
from unidec.ops.tracking_store import open_client, tracking_uri, ui_url

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

Status = Literal["FINISHED", "FAILED", "KILLED"]
Point = tuple[str, float, int, int]  # name, value, step, milliseconds since 1970

_STATE, _PENDING = "tracking.json", "pending-metrics.jsonl"
_PARAMS_A_BATCH, _METRICS_A_BATCH, _VALUE_LIMIT, _DIGEST_LIMIT = 100, 1000, 6000, 36  # MLflow's limits
_KEY_TAG = "unidec.run_key"
RUN_TAGS = "UNIDEC_RUN_TAGS"
"""Environment variable: tags (JSON) of every run begun in this process, set by who started it: `mlflow.parentRunId`
puts it below another run; `mlflow.runName` is what people see."""
_WAIT = 5.0  # seconds that a flush waits for one that another thread is at

log = logging.getLogger(__name__)


def metric_name(name: str) -> str:
    """MLflow allows no "@" in a name: "P@1" -> "P_at_1"."""
    return name.replace("@", "_at_")


class Tracker:
    """An MLflow run that outlives its processes and never raises into training.

    Args:
        experiment: MLflow experiment, created when there is none.
        root: repository root; the default store is below it.
        uri: tracking store; default: `MLFLOW_TRACKING_URI`, else SQLite in `<root>/mlflow/`.
        flush_seconds: `log` sends what it holds at most this often.
        retry_seconds: pause after a failed attempt, so that a server that is down costs training nothing.
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
        self.run_dir: Path | None = None
        self._flush_seconds, self._retry_seconds = flush_seconds, retry_seconds
        self._state: dict[str, Any] = {}
        self._points: list[Point] = []  # what the store may not have yet; `_guard` for every look at it
        self._last_step: dict[str, int] = {}  # newest step of each metric that the store has: nothing is sent twice
        self._guard, self._sending = threading.Lock(), threading.RLock()
        self._is_live = False
        self._client: MlflowClient | None = None
        self._connected = False
        self._last_flush = self._retry_at = 0.0

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
        outer = json.loads(os.environ.get(RUN_TAGS, "{}"))
        run_name = outer.pop("mlflow.runName", run_name)
        old = _read_json(self.run_dir / _STATE)
        same = old.get("uri") == self.uri and old.get("experiment") == self.experiment
        self._state = {
            "uri": self.uri,
            "experiment": self.experiment,
            "run_name": run_name or self.run_dir.name,
            "run_key": old["run_key"] if same else uuid.uuid4().hex,
            "run_id": old.get("run_id") if same else None if old else run_id,
            "experiment_id": old.get("experiment_id") if same else None,
            "params": {key: str(value)[:_VALUE_LIMIT] for key, value in params_flat.items()},
            "tags": {**(tags or {}), **outer},
            "dataset": dict(dataset) if dataset else None,
            "files": old.get("files", []) if same else [],
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
        state = _read_json(Path(run_dir) / _STATE)
        tracker = cls(state.get("experiment", "unidec"), uri=state.get("uri"), **options)
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
        """Address of the run's page."""
        return ui_url(self.uri, self._state["experiment_id"], self.run_id) if self.run_id else None

    def finish(self, status: Status = "FINISHED") -> None:
        """Sends everything that is left and ends the run."""
        if self._state:
            self._state["status"] = status
            self._save_state()
            self.flush(force=True)

    # -- what is logged ----------------------------------------------------------------------------------------------

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps figures of one step, in order of steps; a resumed training that repeats a step does not double it.

        What is only in memory dies with the process: `catch_up` has it sent from the training's own records.
        """
        self._keep(_points(step, metrics))
        if not self._is_live and time.monotonic() - self._last_flush >= self._flush_seconds:
            self.flush()

    def catch_up(self, records: Iterable[Mapping[str, float]]) -> None:
        """Keeps those of a training's records (each with "step") that were never sent: a kill took them from memory."""
        with self._guard:
            known = dict(self._last_step)
            for name, _, step, _ in self._points:
                known[name] = max(step, known.get(name, -1))
        for record in records:
            points = _points(int(record["step"]), {name: value for name, value in record.items() if name != "step"})
            self._keep([point for point in points if point[2] > known.get(point[0], -1)])

    @contextlib.contextmanager
    def live(self, seconds: float = 10.0) -> Iterator[None]:
        """Inside, a thread of its own sends every so many seconds, and `log` costs its caller nothing: a store takes
        20 ms for a batch, one that is away a minute for its refusal."""
        done = threading.Event()

        def send() -> None:
            while not done.wait(seconds):
                self.flush()

        # a daemon: a store that does not answer must not keep the process from its end
        thread = threading.Thread(target=send, name="tracking", daemon=True)
        self._is_live = True
        thread.start()
        try:
            yield
        finally:
            self._is_live = False
            done.set()
            thread.join(_WAIT)

    def _keep(self, points: list[Point]) -> None:
        with self._guard:
            self._points += points

    def log_final(self, metrics: Mapping[str, float]) -> None:
        """Sends figures that have no step (a test split's); the newest value is the one that is shown."""
        self._keep(_points(-1, metrics))
        self.flush(force=True)

    def log_files(self, paths: Iterable[Path | str], folder: str | None = None) -> None:
        """Copies files and folders that exist to the run's artifacts, below `folder`."""
        if not self._state:
            return
        found = [[str(path), folder] for path in paths if Path(path).exists()]
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
        """Samples processor, memory, disk, network and GPU inside the block; without psutil it does nothing."""
        monitor = None
        try:
            if self._state and self._connect():
                from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

                monitor = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=self.uri)
                monitor.start()
        except Exception as error:
            log.warning("system metrics are off: %s", error)
        try:
            yield
        finally:
            if monitor is not None:
                monitor.finish()

    # -- sending -----------------------------------------------------------------------------------------------------

    def flush(self, force: bool = False) -> bool:
        """Sends what is kept; False (with a warning, and all of it kept) when the store cannot be reached."""
        if not self._state:
            self._points = []
            return True
        now = time.monotonic()
        if not force and now < self._retry_at:
            return False
        if not self._sending.acquire(timeout=_WAIT if force else 0):
            self._write_pending()
            return False
        try:
            self._last_flush = now
            self._connect()
            self._send_points()
            self._send_rest()
        except Exception as error:  # whatever MLflow, its database or the network throws: training is worth more
            self._retry_at = time.monotonic() + self._retry_seconds
            self._write_pending()
            log.warning("tracking is behind, %d figures kept for later: %s", len(self._points), _first_line(error))
            return False
        finally:
            self._sending.release()
        self._write_pending()
        return True

    def _connect(self) -> bool:
        if self._connected:
            return True
        self._client = client = open_client(self.uri)
        run = self._find_run(client)
        if run is None:
            experiment_id = _experiment_id(client, self.uri, self.experiment)
            tags = {**self._state["tags"], _KEY_TAG: self._state["run_key"]}
            run = client.create_run(experiment_id, tags=tags, run_name=self._state["run_name"])
        self._state |= {"run_id": run.info.run_id, "experiment_id": run.info.experiment_id}
        self._save_state()
        self._describe(client, run)
        self._last_step = {
            # the store keeps each metric's newest step beside the run: its whole history need not be read
            metric.key: metric.step
            for metric in run.data.to_proto().metrics
            if not metric.key.startswith("system/")
        }
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
                log.warning("MLflow run %s is gone from %s: a new one takes its place", self.run_id, self.uri)
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
        if self._state["status"] is None and run.info.status != "RUNNING":
            client.update_run(run_id, status="RUNNING")

    def _send_points(self) -> None:
        from mlflow.entities import Metric

        assert self._client is not None and self.run_id is not None
        with self._guard:
            points = list(self._points)
        for start in range(0, len(points), _METRICS_A_BATCH):
            batch = points[start : start + _METRICS_A_BATCH]
            newest, fresh = dict(self._last_step), []
            for name, value, step, at in batch:
                if step < 0 or step > newest.get(name, -1):
                    fresh.append(Metric(name, value, at, max(step, 0)))
                    newest[name] = max(step, newest.get(name, -1))
            if fresh:
                self._client.log_batch(self.run_id, metrics=fresh)
            with self._guard:  # others only ever add behind these
                self._last_step = newest
                del self._points[: len(batch)]

    def _send_rest(self) -> None:
        assert self._client is not None and self.run_id is not None
        if not self._state.get("tags_sent", True):
            for key, value in self._state["tags"].items():
                self._client.set_tag(self.run_id, key, value)
            self._state["tags_sent"] = True
            self._save_state()
        while self._state["files"]:
            path, folder = self._state["files"][0]
            if Path(path).is_dir():
                self._client.log_artifacts(self.run_id, path, folder)
            elif Path(path).is_file():
                self._client.log_artifact(self.run_id, path, folder)
            self._state["files"].pop(0)
            self._save_state()
        if self._state["status"]:
            self._client.set_terminated(self.run_id, status=self._state["status"])

    # -- what survives a process ---------------------------------------------------------------------------------------

    def _save_state(self) -> None:
        assert self.run_dir is not None
        write_json(self.run_dir / _STATE, self._state)

    def _read_pending(self) -> None:
        assert self.run_dir is not None
        path = self.run_dir / _PENDING
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        with self._guard:
            self._points = [tuple(json.loads(line)) for line in lines] + self._points

    def _write_pending(self) -> None:
        assert self.run_dir is not None
        path = self.run_dir / _PENDING
        with self._guard:
            points = list(self._points)
        if points:
            write_bytes_atomic(path, "".join(json.dumps(point) + "\n" for point in points).encode())
        else:
            path.unlink(missing_ok=True)


def _points(step: int, metrics: Mapping[str, float]) -> list[Point]:
    now = int(time.time() * 1000)
    return [(metric_name(name), float(value), int(step), now) for name, value in metrics.items()]


def _experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    """The experiment's id; created with artifacts beside an SQLite store."""
    from mlflow.exceptions import MlflowException

    from unidec.ops.tracking_store import artifact_location

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name, artifact_location=artifact_location(uri))
        except MlflowException:  # another process was first
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    return experiment.experiment_id


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        log.warning("%s is damaged: a new MLflow run is begun", path)
        return {}
