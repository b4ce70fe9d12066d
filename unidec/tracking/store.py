"""Where MLflow keeps runs and models: its address, a safe first start, and a client that gives up soon.

Default store: SQLite in `<root>/mlflow/mlflow.db`, artifacts in `<root>/mlflow/artifacts`; `MLFLOW_TRACKING_URI` names
any other. A DVC experiment in a temporary copy of the checkout uses the checkout's store.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import socket
import threading
import time
import warnings
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote, unquote, urlsplit
from urllib.request import ProxyHandler, build_opener, getproxies, proxy_bypass

from unidec.errors import ArtifactError, without_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient

_SQLITE = "sqlite:///"
_TIMES = 100  # a failed attempt is repeated after so many times as long as it took

# MLflow's own defaults would hold training for minutes when its server is down; 'true' because it accepts nothing else.
_QUIET = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}


def quiet_mlflow() -> None:
    """Turns telemetry, long retries and migration logs off; call it before the first `import mlflow`."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "mlflow.store.db.utils", "mlflow.system_metrics", "mlflow.pyfunc"):
        logging.getLogger(name).setLevel(logging.WARNING)


def import_mlflow() -> Any:
    """The module, with its pyfunc flavour; takes two seconds."""
    quiet_mlflow()
    with warnings.catch_warnings():  # about MLflow's own modules
        warnings.simplefilter("ignore")
        import mlflow.pyfunc
    return mlflow


def tracking_uri(root: Path | str = ".") -> str:
    """The tracking store's address: `MLFLOW_TRACKING_URI`, else SQLite in `<root>/mlflow/`; SQLite paths absolute.

    User and password of a server's address move to the variables that MLflow has for them, so that no message of its
    own shows them. Those of a database stay: see `without_credentials`.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"{_SQLITE}mlflow/mlflow.db"
    address = urlsplit(uri)
    if address.scheme in ("http", "https") and address.username:
        os.environ.setdefault("MLFLOW_TRACKING_USERNAME", unquote(address.username))
        os.environ.setdefault("MLFLOW_TRACKING_PASSWORD", unquote(address.password or ""))
        os.environ["MLFLOW_TRACKING_URI"] = uri = without_credentials(uri)
    path = sqlite_path(uri, root)
    return uri if path is None else f"{_SQLITE}{path}"


def with_credentials(stored: str) -> str:
    """A stored address with the credentials of `MLFLOW_TRACKING_URI`, where that names the same store."""
    known = tracking_uri()
    return known if without_credentials(known) == stored else stored


def present_uri(stored: str) -> str:
    """A stored address of a store as it is now: an SQLite file that is gone moved with the project's folder."""
    path, own = sqlite_path(stored), sqlite_path(tracking_uri())
    if path is None or path.is_file() or own is None or not own.is_file():
        return stored
    return tracking_uri()


def project_folder() -> Path:
    """The working folder; in a temporary copy made by `dvc exp run --temp` or `dvc queue`, the checkout itself.

    DVC names that in DVC_ROOT, and keeps its copies below `.dvc/tmp` there.
    """
    checkout = Path(os.environ.get("DVC_ROOT", ""))
    return checkout if Path.cwd().is_relative_to((checkout / ".dvc" / "tmp").resolve()) else Path()


def sqlite_path(uri: str, root: Path | str = ".") -> Path | None:
    """The database file of a `sqlite:///` address, made absolute from `root`; None for any other address."""
    if not uri.startswith(_SQLITE) or ":memory:" in uri:
        return None
    base = project_folder() if Path(root) == Path() else Path(root)
    return (base / uri.removeprefix(_SQLITE)).resolve()


def artifact_location(uri: str) -> str | None:
    """Where a new experiment's artifacts go: beside an SQLite file; None leaves it to the server."""
    path = sqlite_path(uri)
    return None if path is None else (path.parent / "artifacts").as_uri()


def ui_url(uri: str, experiment_id: str, run_id: str) -> str | None:
    """Address of a run's page; None while no server shows it.

    Pages are served at `UNIDEC_MLFLOW_UI` (not checked: this process may not reach it), else by the tracking server,
    else at the address that `make ui` noted beside the store, else at MLflow's usual port, if that server has the run.
    """
    base = os.environ.get("UNIDEC_MLFLOW_UI")
    if not base and uri.startswith("http"):
        base = uri if listens(uri) else None
    elif not base:
        noted = ui_note(uri)
        known = [noted.read_text(encoding="utf-8").strip()] if noted and noted.is_file() else []
        base = next((address for address in [*known, "http://127.0.0.1:5000"] if _shows(address, run_id)), None)
    if not base:
        return None
    return f"{without_credentials(base).rstrip('/')}/#/experiments/{quote(experiment_id)}/runs/{quote(run_id)}"


def ui_note(uri: str) -> Path | None:
    """The file in which `make ui` keeps the address where it serves an SQLite store; None for any other store."""
    path = sqlite_path(uri)
    return path and path.with_name(".ui-address")


def _shows(address: str, run_id: str) -> bool:
    """Whether an MLflow server on this machine has the run."""
    direct = build_opener(ProxyHandler({}))
    try:
        with direct.open(f"{address}/api/2.0/mlflow/runs/get?run_id={quote(run_id)}", timeout=2):
            return True
    except (OSError, HTTPException, ValueError):
        return False


def listens(uri: str, seconds: float = 1.0) -> bool:
    """Whether anything takes connections where the store is: a look that costs about a millisecond.

    MLflow itself needs seconds to say no: it asks a server again and again, a database ten times. True where a look
    is no evidence: a file, or a server behind a proxy.
    """
    address = urlsplit(uri)
    usual = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306}.get(address.scheme.partition("+")[0])
    if not address.hostname or not usual or (address.scheme in getproxies() and not proxy_bypass(address.hostname)):
        return True
    try:
        port = address.port or usual
        socket.create_connection((address.hostname, port), seconds).close()
    except (OSError, ValueError):
        return False
    return True


class StoreHealth:
    """What all trackers of this process know of a store: when it may be asked again, and who is asking it.

    After an attempt that failed it is left alone for a hundred times as long as the attempt took: asking costs a caller
    at most 1% of its time.

    Attributes:
        asking: held by the thread whose attempt is under way.
    """

    _known: ClassVar[dict[str, StoreHealth]] = {}

    def __init__(self) -> None:
        self.asking = threading.Lock()
        self._away_since: float | None = None
        self._ask_again = 0.0

    @classmethod
    def of(cls, uri: str) -> StoreHealth:
        """The one of a store."""
        return cls._known.setdefault(uri, cls())

    def may_ask(self) -> bool:
        """Whether another attempt is due."""
        return time.monotonic() >= self._ask_again

    def failed(self, seconds: float) -> bool:
        """Note an attempt that failed after so many seconds; whether the store answered before."""
        now, is_news = time.monotonic(), self._away_since is None
        self._away_since = now if self._away_since is None else self._away_since
        self._ask_again = now + _TIMES * seconds
        return is_news

    def worked(self) -> float:
        """Note an attempt that succeeded; how many seconds the store was away, 0.0 where it was not."""
        since, self._away_since, self._ask_again = self._away_since, None, 0.0
        return 0.0 if since is None else time.monotonic() - since


def prepare_store(uri: str | None = None) -> str:
    """Creates an SQLite store once, whoever comes first; returns the absolute address.

    MLflow's first start is a race (several processes migrate the same empty file, and a kill half way leaves one that
    no later start can use), so it happens under a file lock, on a temporary file that is renamed when it is whole.
    """
    uri = uri or tracking_uri()
    path = sqlite_path(uri)
    if path is None or (path.is_file() and path.stat().st_size > 0):
        return uri
    from filelock import FileLock

    quiet_mlflow()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}-lock"):  # released by the system when its holder dies: nothing to remove by hand
        if not (path.is_file() and path.stat().st_size > 0):
            temporary = path.with_name(f"{path.name}-new")
            temporary.unlink(missing_ok=True)
            SqlAlchemyStore(f"{_SQLITE}{temporary}", (path.parent / "artifacts").as_uri()).engine.dispose()
            os.replace(temporary, path)
    return f"{_SQLITE}{path}"


def open_client(uri: str) -> MlflowClient:
    """A client of the store at `uri`, which is created first where that is ours to do.

    Raises:
        ArtifactError: the database belongs to another version of MLflow.
    """
    quiet_mlflow()
    prepare_store(uri)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except MlflowException as error:
        if "out-of-date database schema" not in str(error):
            raise
        raise ArtifactError(
            "the tracking database was written by another version of MLflow",
            where=str(sqlite_path(uri) or uri),
            fix=f"copy it, then run: mlflow db upgrade {uri}",
        ) from error


class UnlessMissing:
    """`with UnlessMissing():` ends quietly where MLflow answers that there is no such thing."""

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        return getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST"


def user() -> str:
    """The user's name; in a container without one the number."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    """The experiment's id; created with artifacts beside an SQLite store."""
    from mlflow.exceptions import MlflowException

    with contextlib.suppress(MlflowException):  # it exists, or another process was first
        return client.create_experiment(name, artifact_location=artifact_location(uri))
    return client.get_experiment_by_name(name).experiment_id
