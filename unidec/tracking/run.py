"""One MLflow run for one training, shared by every process that works on it.

`Tracker.start(run_dir, ...)` writes `run_dir/tracking.json`; later processes continue with `Tracker.resume(run_dir)`.
What is logged goes to the run's outbox on disk first (see `unidec.tracking.outbox`) and from there to the store.
Nothing here ever stops training: while the store is away entries wait, for this process or the next one; after an
attempt that took some seconds, the store is left alone for a hundred times as long: 1% of the time, at most.

    tracker = Tracker("unidec")
    tracker.start(run_dir, flatten(params), tags=code_tags("."), dataset={"name": ..., "digest": ..., "path": ...})
    with tracker.live(), tracker.system_metrics():  # a thread sends every 10 s
        tracker.log(step, {"loss": 0.3})
    tracker.log_final({"test/P@1": 45.0}); tracker.log_files(["outputs/report.html"], "report")
    tracker.finish("FINISHED")
"""

from __future__ import annotations

import contextlib
import functools
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
from unidec.tracking.lock_holder import is_alive, this_process
from unidec.tracking.outbox import Outbox
from unidec.tracking.store import (
    StoreHealth,
    UnlessMissing,
    experiment_id,
    listens,
    open_client,
    present_uri,
    tracking_uri,
    ui_url,
    with_credentials,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

Status = Literal["FINISHED", "FAILED", "KILLED"]

STATE = "tracking.json"
RUN_TAGS = "UNIDEC_RUN_TAGS"
"""Environment variable: tags (JSON) of every run begun in this process, set by the process that started it:
`mlflow.parentRunId` puts the run below another one; `mlflow.runName` is its name."""
_PARAMS_A_BATCH, _METRICS_A_BATCH, _VALUE_LIMIT, _DIGEST_LIMIT = 100, 1000, 6000, 36  # MLflow's limits
_KEY_TAG = "unidec.run_key"
_PATIENCE = 2.0  # seconds that a training waits while entries are sent: a long outage's may take minutes
_AT_LAST = 30.0  # seconds that a run's end waits for an attempt that is under way

log = logging.getLogger(__name__)


class Tracker:
    """An MLflow run that outlives its processes and never raises into training.

    Args:
        experiment: MLflow experiment, created where there is none.
        uri: tracking store; default: see `store.tracking_uri`.
    """

    def __init__(self, experiment: str = "unidec", uri: str | None = None) -> None:
        self.experiment = experiment
        self.uri = uri or tracking_uri()
        self.shown_uri = without_credentials(self.uri)
        self._health = StoreHealth.of(self.shown_uri)
        self._state: dict[str, Any] = {}
        self._client: MlflowClient | None = None
        self._newest: dict[str, tuple[int, float]] = {}  # step and value of each metric that the store has

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
        """Begin the run of `run_dir`, or continue the one that was begun there.

        Args:
            run_dir: the training's folder; it keeps the run's id.
            params_flat: every parameter, dotted keys.
            tags: see `code_tags`.
            dataset: {"name", "digest" (cut to 36 characters), "path" (relative)}, and any figures: its profile.
            run_name: default: the folder's name.
            run_id: a run that a checkpoint names; it counts where the folder has lost its own note of it.

        Returns:
            the run's id, or None while the store cannot be reached (a later flush tries again).
        """
        self._run_dir, self._outbox = Path(run_dir), Outbox(Path(run_dir))
        self._run_dir.mkdir(parents=True, exist_ok=True)
        outer = {key: without_credentials(str(tag)) for key, tag in json.loads(os.environ.get(RUN_TAGS, "{}")).items()}
        run_name = outer.pop("mlflow.runName", run_name)
        old = _read_state(self._run_dir)
        same = old.get("uri") == self.shown_uri and old.get("experiment") == self.experiment
        self._note(
            uri=self.shown_uri,
            experiment=self.experiment,
            run_name=run_name or self._run_dir.name,
            run_key=old["run_key"] if same else uuid.uuid4().hex,
            run_id=old.get("run_id") if same else None if old else run_id,
            experiment_id=old.get("experiment_id") if same else None,
            params={key: str(value)[:_VALUE_LIMIT] for key, value in params_flat.items()},
            tags={**(tags or {}), **outer},
            dataset=dict(dataset) if dataset else None,
            begun=old.get("begun", _now_ms()) if same else _now_ms(),
            status=None,
            holder=this_process(),
        )
        self.flush(force=True)
        return self.run_id

    @classmethod
    def resume(cls, run_dir: Path | str) -> Tracker:
        """Continue the run that was begun in `run_dir`; a tracker that does nothing where none was begun."""
        state = _read_state(Path(run_dir))
        if not state:
            return cls()
        tracker = cls(state["experiment"], with_credentials(state["uri"]))
        tracker._run_dir, tracker._outbox, tracker._state = Path(run_dir), Outbox(Path(run_dir)), state
        return tracker

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id, once it has one."""
        return self._state.get("run_id")

    @property
    def status(self) -> str | None:
        """How the run ended, None while it has not."""
        return self._state.get("status")

    @property
    def url(self) -> str | None:
        """Address of the run's page; None while no server shows it."""
        return ui_url(self.uri, self._state["experiment_id"], self.run_id) if self.run_id else None

    def finish(self, status: Status = "FINISHED") -> None:
        """Send everything that waits and end the run."""
        if self._state:
            self._note(status=status)
            self._queue({"status": status})
            self._send(_AT_LAST)  # worth an attempt, whatever it costs

    # -- what is logged ----------------------------------------------------------------------------------------------

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue figures of one step, in order of steps; a resumed training that repeats a step does not double it."""
        self._queue({"step": int(step), "metrics": _named(metrics)})

    def catch_up(self, records: Iterable[Mapping[str, float]]) -> None:
        """Queue those of a training's own records (each with "step") that neither store nor outbox has.

        A power failure takes lines of the outbox that had not reached the disk.
        """
        if not self._state:
            return
        self.flush()
        known = {name: step for name, (step, _) in self._newest.items()}
        for entry in self._outbox.read()[0]:
            known |= {name: max(entry["step"], known.get(name, -1)) for name in entry.get("metrics", {})}
        for record in records:
            step, metrics = int(record["step"]), _named({key: value for key, value in record.items() if key != "step"})
            if missing := {name: value for name, value in metrics.items() if step > known.get(name, -1)}:
                self.log(step, missing)

    def log_final(self, metrics: Mapping[str, float]) -> None:
        """Send figures that have no step (a test split's); the newest value is the one that is shown."""
        self._queue({"final": _named(metrics)})
        self.flush(force=True)

    def log_files(self, paths: Iterable[Path | str], folder: str | None = None) -> None:
        """Send files and folders that exist, as they are now, to the run's artifacts, below `folder`."""
        if self._state:
            for path in paths:
                if Path(path).exists():
                    self._outbox.add_files(Path(path), folder)
            self.flush(force=True)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        self._queue({"tags": {key: str(value) for key, value in tags.items()}})
        self.flush(force=True)

    def _queue(self, entry: dict[str, Any]) -> None:
        if self._state:
            self._outbox.add(entry | {"at": _now_ms()})

    @contextlib.contextmanager
    def live(self, seconds: float = 10.0) -> Iterator[None]:
        """Inside, a thread sends every so many seconds what was logged."""
        with _every(seconds, lambda: self._health.may_ask() and self._send(_PATIENCE)):
            yield

    @contextlib.contextmanager
    def system_metrics(self) -> Iterator[None]:
        """Sample processor, memory, disk, network and GPU inside the block, by seconds since the run began.

        Every `MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL` seconds, else every 10. MLflow's own monitor would end with the
        first outage.
        """
        begun = self._state.get("begun", 0)
        seconds = float(os.environ.get("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL") or 10.0)
        with _every(seconds, lambda: self.log((_now_ms() - begun) // 1000, _sample_system())):
            yield

    # -- sending -----------------------------------------------------------------------------------------------------

    def flush(self, force: bool = False) -> bool:
        """Send what waits; False where the store has not got all of it: it stays on disk and is sent later.

        Args:
            force: wait until the store has answered; else for two seconds at most: the attempt then continues in its
                thread.
        """
        if not self._state:
            return True
        if not self._health.may_ask():
            return False
        if force:
            return self._send(_PATIENCE)
        done: list[bool] = []
        thread = threading.Thread(target=lambda: done.append(self._send(_PATIENCE)), name="flush", daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        if thread.is_alive():
            self._health.failed(_PATIENCE)
        return done == [True]

    def _send(self, patience: float) -> bool:
        """One attempt, after waiting `patience` seconds at most for another thread's."""
        if not self._health.asking.acquire(timeout=patience):
            self._health.failed(patience)
            return False
        begin = time.monotonic()
        try:
            if not listens(self.uri):
                raise ConnectionError("nothing listens there")
            self._connect()
            self._send_outbox()
        except Exception as error:  # whatever MLflow, its database or the network throws: training is worth more
            self._client = None  # how much of it arrived is looked up by the next attempt
            if self._health.failed(time.monotonic() - begin):
                log.warning("%s is away; what is logged waits in %s: %s", self.shown_uri, self._run_dir, _line(error))
            return False
        finally:
            self._health.asking.release()
        if seconds := self._health.worked():
            log.info("%s is back after %.0f s: everything that waited was sent", self.shown_uri, seconds)
        return True

    def _connect(self) -> None:
        if self._client is not None:
            return
        client = open_client(self.uri)
        run = self._find_run(client)
        if run is None:
            place = experiment_id(client, self.uri, self.experiment)
            tags = {**self._state["tags"], _KEY_TAG: self._state["run_key"]}
            run = client.create_run(place, self._state["begun"], tags, self._state["run_name"])
        self._note(run_id=run.info.run_id, experiment_id=run.info.experiment_id)
        self._describe(client, run)
        # the store keeps each metric's newest step beside the run: its whole history need not be read
        self._newest = {metric.key: (metric.step, metric.value) for metric in run.data.to_proto().metrics}
        self._client = client

    def _find_run(self, client: MlflowClient) -> Run | None:
        """The run begun before: by its id, or by the key it was created with when the answer got lost."""
        if self.run_id:
            with UnlessMissing():
                run = client.get_run(self.run_id)
                return run if run.info.lifecycle_stage == "active" else None
            log.warning("MLflow run %s is gone from %s: a new one replaces it", self.run_id, self.shown_uri)
            return None
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
        if self._state["dataset"] and not (run.inputs and run.inputs.dataset_inputs):
            about = dict(self._state["dataset"])
            source = json.dumps({"uri": str(about.pop("path", ""))})
            name, digest = str(about.pop("name", "dataset")), str(about.pop("digest", ""))[:_DIGEST_LIMIT]
            entity = Dataset(name, digest, "local", source, profile=json.dumps(about))
            client.log_inputs(run_id, [DatasetInput(entity, [InputTag("mlflow.data.context", "training")])])
        if self.status is None and run.info.status != "RUNNING":
            client.update_run(run_id, status="RUNNING")

    def _send_outbox(self) -> None:
        from mlflow.entities import Metric, RunTag

        entries, num_bytes = self._outbox.read()
        if not num_bytes:
            return
        assert self._client is not None and self.run_id is not None
        newest = dict(self._newest)
        metrics: list[Metric] = []
        final: dict[str, Metric] = {}
        tags: dict[str, str] = {}
        ended: dict[str, Any] = {}
        for entry in entries:
            for name, value in entry.get("metrics", {}).items():
                if entry["step"] > newest.get(name, (-1, 0.0))[0]:
                    metrics.append(Metric(name, value, entry["at"], entry["step"]))
                    newest[name] = (entry["step"], value)
            final |= {name: Metric(name, value, entry["at"], 0) for name, value in entry.get("final", {}).items()}
            tags |= entry.get("tags", {})
            ended = entry if "status" in entry else ended
        for name, metric in final.items():
            if name not in newest or newest[name][1] != metric.value:
                metrics.append(metric)
                newest[name] = (0, metric.value)
        for start in range(0, len(metrics), _METRICS_A_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _METRICS_A_BATCH])
        if tags:
            self._client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])
        for entry in entries:
            if "files" in entry:
                path = self._outbox.file(entry["files"])
                send = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
                send(self.run_id, str(path), entry["folder"])
        if ended and ended["status"] == self.status:  # else the training was resumed since
            self._client.set_terminated(self.run_id, status=ended["status"], end_time=ended["at"])
        self._newest = newest
        self._outbox.drop(entries, num_bytes)

    def _note(self, **changes: Any) -> None:
        """Into the folder's note, beside what other trackers of this run wrote meanwhile."""
        self._state = self._state | tracking_state(self._run_dir) | changes
        write_json(self._run_dir / STATE, self._state, mode=0o600)


def metric_name(name: str) -> str:
    """MLflow allows no "@" in a name: "P@1" -> "P_at_1"."""
    return name.replace("@", "_at_")


def tracking_state(run_dir: Path) -> dict[str, Any]:
    """What `tracking.json` of a training folder holds; {} where there is none, or it is damaged."""
    try:
        state = json.loads((run_dir / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def has_died(run_dir: Path) -> bool:
    """Whether the MLflow run of a training folder was never ended although the process that held it is gone."""
    state = tracking_state(run_dir)
    return "holder" in state and state.get("status") is None and is_alive(state["holder"]) is False


def reconcile_runs(run_dirs: Iterable[Path]) -> list[str]:
    """End the runs whose process died as KILLED, and send what other ended runs have in their outbox.

    Args:
        run_dirs: training folders, also such that never tracked anything.

    Returns:
        names of the folders whose run was ended; what a store that is away did not take waits on.
    """
    ended = []
    for run_dir in run_dirs:
        if has_died(run_dir):
            Tracker.resume(run_dir).finish("KILLED")
            ended.append(run_dir.name)
        elif Outbox(run_dir) and tracking_state(run_dir).get("status"):
            Tracker.resume(run_dir).flush(force=True)
    return ended


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    return {metric_name(name): float(value) for name, value in metrics.items()}


def _now_ms() -> int:
    return int(time.time() * 1000)


@contextlib.contextmanager
def _every(seconds: float, work: Callable[[], object]) -> Iterator[None]:
    """Inside, a thread works every so many seconds; a failure ends it with a warning, and nothing else."""
    done = threading.Event()

    def repeat() -> None:
        try:
            while not done.wait(seconds):
                work()
        except Exception as error:  # a sensor that fails must not end a training
            log.warning("system metrics are off: %s", error)

    # a daemon: a store that does not answer must not keep the process from its end
    thread = threading.Thread(target=repeat, name="tracking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_PATIENCE)


@functools.cache
def _collectors() -> list[Any]:
    """MLflow's collectors of system metrics."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    found = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    with contextlib.suppress(Exception):  # no GPU, or none that its library can read
        found.append(GPUMonitor())
    return found


def _sample_system() -> dict[str, float]:
    figures: dict[str, float] = {}
    for collector in _collectors():
        collector.collect_metrics()
        figures |= collector.aggregate_metrics()
        collector.clear_metrics()
    return {f"system/{name}": float(value) for name, value in figures.items()}


def _line(error: BaseException) -> str:
    return (without_credentials(str(error)).splitlines() or [""])[0][:300] or type(error).__name__


def _read_state(run_dir: Path) -> dict[str, Any]:
    """The folder's note of its MLflow run, with the store's address as it is now."""
    state = tracking_state(run_dir)
    if isinstance(state.get("uri"), str):
        return state | {"uri": present_uri(without_credentials(state["uri"]))}
    if (run_dir / STATE).exists():
        log.warning("%s is damaged: a new MLflow run is begun", run_dir / STATE)
    return {}
