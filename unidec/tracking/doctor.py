"""What may be wrong with the tracking store and the environment; read-only, until somebody asks for a safe repair."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlparse

from unidec.errors import without_credentials
from unidec.tracking.lock_holder import left_running, tracking_state
from unidec.tracking.promotion import all_versions
from unidec.tracking.run import Tracker
from unidec.tracking.spool import FILES, PENDING
from unidec.tracking.store import open_client, sqlite_path, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

Severity = Literal["note", "warning", "broken"]

_FEWEST_FILES = 1024  # MLflow, Prefect and memory-mapped shards hold some hundred at a time
_MUST_FIT = ("fastapi", "sqlalchemy")  # with others Prefect's schedules silently never fire
_QUIET = {"DO_NOT_TRACK": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
          "DVC_NO_ANALYTICS": "1"}  # fmt: skip


@dataclass
class Finding:
    """One thing that is not as it should be.

    Attributes:
        what: one sentence.
        where: path, run or variable.
        severity: "note" (worth knowing), "warning" (something is lost or in the way), "broken" (something will fail).
        fix: what to do.
        mend: does it, where that cannot lose data; says what was done.
        done: what `mend` said.
    """

    what: str
    where: str
    severity: Severity
    fix: str
    mend: Callable[[], str] | None = None
    done: str | None = None


# -- tracking ---------------------------------------------------------------------------------------


def tracking_findings(run_dirs: Collection[Path], root: Path = Path("."), at_work: bool = False) -> Iterator[Finding]:
    """Runs that never ended, figures that were never sent, models that are gone.

    Args:
        run_dirs: the project's training folders.
        root: of the project; says where its store is.
        at_work: a training holds the project's lock: what nobody claims may be its.
    """
    yield from _of_folders(run_dirs, at_work)
    uri = tracking_uri(root)
    path = sqlite_path(uri, root)
    if path is not None and not path.is_file():
        return
    try:
        client = open_client(uri)
        yield from _of_store(client, {tracking_state(run_dir).get("run_id") for run_dir in run_dirs})
        yield from _of_registry(client)
    except Exception as error:  # whatever MLflow, its database or the network throws
        yield Finding(
            f"the tracking store cannot be read: {(without_credentials(str(error)).splitlines() or [''])[0][:200]}",
            without_credentials(uri), "warning",
            "start its server, or correct MLFLOW_TRACKING_URI; training goes on without it",
        )  # fmt: skip


def _of_folders(run_dirs: Collection[Path], at_work: bool) -> Iterator[Finding]:
    left = set(left_running(run_dirs))
    for run_dir in run_dirs:
        state = tracking_state(run_dir)
        if not state:
            if (run_dir / "tracking.json").exists():
                yield Finding("a damaged note of the MLflow run", str(run_dir / "tracking.json"), "warning",
                              "delete it: the next start finds the run by its checkpoint")  # fmt: skip
            continue
        unclaimed = state.get("status") is None and not state.get("holder") and not at_work and state.get("run_id")
        if run_dir in left or unclaimed:
            yield Finding(
                f"MLflow run {state.get('run_id')} is RUNNING, but its process is gone", str(run_dir), "warning",
                "close it as KILLED; a training that goes on opens it again", partial(_close, run_dir),
            )  # fmt: skip
        elif (run_dir / PENDING).is_file() or (run_dir / FILES).is_dir():
            count = len((run_dir / PENDING).read_bytes().splitlines()) if (run_dir / PENDING).is_file() else 0
            what = f"{count} figures" if count else "files"
            where = run_dir / (PENDING if count else FILES)
            yield Finding(
                f"{what} were not sent to the tracking store", str(where), "warning",
                "send them", None if _is_held(state) else partial(_send, run_dir),
            )  # fmt: skip


def _is_held(state: dict[str, Any]) -> bool:
    return state.get("status") is None


def _close(run_dir: Path) -> str:
    tracker = Tracker.resume(run_dir)
    tracker.finish("KILLED")
    sent = not (run_dir / PENDING).exists() and tracker.flush(force=True)
    return "closed as KILLED" if sent else "noted as KILLED; the store is away and will be told later"


def _send(run_dir: Path) -> str:
    return "sent" if Tracker.resume(run_dir).flush(force=True) else "the store is away: they are kept"


def _of_store(client: MlflowClient, known: Collection[str | None]) -> Iterator[Finding]:
    """Runs of ours that the store shows as RUNNING and that no folder here knows."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    running = client.search_runs(experiments, "attributes.status = 'RUNNING'") if experiments else []
    for run in running:
        folder = run.data.tags.get("run.folder")
        if folder and run.info.run_id not in known:
            yield Finding(
                f"MLflow run {run.info.run_id} is RUNNING, but no folder here is its training's", f"runs/{folder}",
                "warning", "if it is not of another machine: end or delete it on MLflow's page",
            )  # fmt: skip


def _of_registry(client: MlflowClient) -> Iterator[Finding]:
    """Versions of registered models whose files are gone."""
    for model in client.search_registered_models():
        named: dict[str, list[str]] = {}
        for alias, number in model.aliases.items():
            named.setdefault(str(number), []).append(alias)
        for version in all_versions(client, model.name):
            where = client.get_model_version_download_uri(model.name, version.version)
            path = _local_path(where)
            if path is None or (path / "MLmodel").is_file():
                continue
            aliases = named.get(str(version.version), [])
            yield Finding(
                f"version {version.version} of model {model.name} has lost its files"
                + (f" and serves as {', '.join(aliases)}" if aliases else ""),
                str(path), "broken" if aliases else "warning",
                "unidec models register makes a new version of outputs/bundle; delete this one on MLflow's page",
            )  # fmt: skip


def _local_path(uri: str) -> Path | None:
    parsed = urlparse(uri)
    if parsed.scheme in ("", "file"):
        return Path(unquote(parsed.path))
    return None


# -- environment ------------------------------------------------------------------------------------


def environment_findings(root: Path = Path(".")) -> Iterator[Finding]:
    """Packages that exclude each other, versions other than the tested ones, limits, telemetry."""
    installed = {dist.metadata["Name"].lower(): dist.version for dist in metadata.distributions() if dist.metadata}
    if {"faiss-cpu", "faiss-gpu"} <= installed.keys():
        yield Finding("faiss-cpu and faiss-gpu are installed over each other", "faiss", "broken",
                      "pip uninstall both, then install one extra: .[cpu] or .[gpu]")  # fmt: skip
    yield from _versions(installed, root / "constraints.txt")
    if Path("/proc/driver/nvidia/version").exists() and "+cpu" in installed.get("torch", ""):
        yield Finding("there is a GPU, but torch is built for the CPU alone", f"torch {installed['torch']}", "warning",
                      "install torch for CUDA")  # fmt: skip
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        yield Finding("waiting threads spin: up to 20 times slower where cores are shared", "OMP_WAIT_POLICY", "note",
                      "export OMP_WAIT_POLICY=PASSIVE (make does)")  # fmt: skip
    loud = [f"{name}={value}" for name, value in _QUIET.items() if os.environ.get(name, "").lower() != value]
    if loud:
        yield Finding("telemetry is not switched off by the environment", ", ".join(n.split("=")[0] for n in loud),
                      "note", "export " + " ".join(loud) + " (make and the flow do)")  # fmt: skip
    if platform.system() != "Windows":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < _FEWEST_FILES:
            yield Finding(f"a process may open only {soft} files", "ulimit -n", "warning",
                          f"ulimit -n {min(hard, 4096) if hard > 0 else 4096}")  # fmt: skip


def _versions(installed: dict[str, str], constraints: Path) -> Iterator[Finding]:
    if not constraints.is_file():
        return
    other: list[str] = []
    for line in constraints.read_text(encoding="utf-8").splitlines():
        found = re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line.strip())
        if not found or found[1].lower() not in installed:
            continue
        name, wanted, got = found[1].lower(), found[2], installed[found[1].lower()].partition("+")[0]
        if got != wanted and name in _MUST_FIT:
            yield Finding(f"{name} {got} is not the version that works with Prefect", name, "warning",
                          f"pip install {name}=={wanted}")  # fmt: skip
        elif got != wanted:
            other.append(f"{name} {got} (tested: {wanted})")
    if other:
        yield Finding(f"{len(other)} packages are of other versions than the tested ones", "constraints.txt", "note",
                      "make setup; " + ", ".join(other[:8]))  # fmt: skip
