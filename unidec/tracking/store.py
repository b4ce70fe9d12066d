"""Where MLflow keeps runs and models: its address, a safe first start, and a client with short
timeouts.

Default store: SQLite in `mlflow/mlflow.db`, artifacts in `mlflow/artifacts`;
`MLFLOW_TRACKING_URI` names any other. A DVC experiment in a temporary copy of the checkout uses the
checkout's store.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import socket
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from unidec.addresses import parse, without_credentials
from unidec.data.file_lock import lock_file
from unidec.errors import ArtifactError, ConfigError, UnidecError, missing_package
from unidec.metric_names import shown, without_at
from unidec.surroundings import reach_local_servers
from unidec.tracking.relocation import ARTIFACTS, artifacts_uri, follow_database

if TYPE_CHECKING:
    from mlflow import MlflowClient

_SQLITE = "sqlite:///"
_SCHEMES = frozenset(
    ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks", "databricks-uc", "uc")
)
_DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306}
_DATABASE_ATTEMPTS = 3  # MLflow's own 10 take minutes
_LONGEST_REASON = 400
VIEW = "unidec"
"""A shared view of the table of runs: MLflow shows it at `.../runs?viewStateShareKey=unidec`."""

# MLflow's own defaults would block training for minutes when its server is down; it accepts only
# 'true', no other word
_QUIET = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}


log = logging.getLogger(__name__)


def _view_state() -> dict[str, Any]:
    """State of the shared view of the table of runs."""
    names = [*(f"test/{name}" for name in shown("drawn")), "training/minutes"]
    return {
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "selectedColumns": [without_at(f"metrics.`{name}`") for name in names],
    }


def quiet_mlflow() -> None:
    """Turn off telemetry, long retries and migration logs; call it before the first `import
    mlflow`.

    Raises:
        UnidecError: MLflow is not installed; the project's own folder mlflow/ is not a package.
    """
    if (found := importlib.util.find_spec("mlflow")) is None or found.origin is None:
        raise missing_package(ModuleNotFoundError(name="mlflow"))
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    reach_local_servers()
    for name in ("alembic", "mlflow.system_metrics", "mlflow.pyfunc"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.ERROR)  # a line for each attempt


def import_mlflow() -> Any:
    """Import mlflow with its pyfunc flavour; takes two seconds."""
    quiet_mlflow()
    with warnings.catch_warnings():  # about MLflow's own modules
        warnings.simplefilter("ignore")
        import mlflow.pyfunc
    return mlflow


def tracking_uri() -> str:
    """The tracking store's address: `MLFLOW_TRACKING_URI`, else SQLite in `mlflow/`; SQLite paths
    absolute.

    User and password in a server's address are moved to MLflow's environment variables, so that
    its messages do not show them. In a database address they are kept: see `without_credentials`.

    Raises:
        ConfigError: not the address of a store.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"{_SQLITE}mlflow/mlflow.db"
    address = parse(uri)
    if address.scheme in ("http", "https") and address.user:
        os.environ.setdefault("MLFLOW_TRACKING_USERNAME", address.user)
        os.environ.setdefault("MLFLOW_TRACKING_PASSWORD", address.password)
        os.environ["MLFLOW_TRACKING_URI"] = uri = address.without_user()
    is_known = address.scheme.partition("+")[0] in _SCHEMES | _plugins()
    if not is_known and "MLFLOW_ALLOW_FILE_STORE" not in os.environ:
        raise ConfigError(
            "not the address of a tracking store",
            where="MLFLOW_TRACKING_URI",
            got=uri,
            expected="http://127.0.0.1:5000, postgresql://..., or sqlite:///mlflow/mlflow.db",
            fix="correct it, or unset it to use mlflow/mlflow.db",
        )
    path = sqlite_path(uri)
    return uri if path is None else f"{_SQLITE}{path}"


@functools.cache
def _plugins() -> set[str]:
    """Address schemes added by plugins of MLflow."""
    return importlib.metadata.entry_points(group="mlflow.tracking_store").names


def project_folder() -> Path:
    """The working folder; in a temporary copy made by `dvc exp run --temp` or `dvc queue`, the
    checkout itself.

    DVC sets DVC_ROOT to the checkout, and keeps its copies below `.dvc/tmp` there.
    """
    checkout = Path(os.environ.get("DVC_ROOT", ""))
    copies = (checkout / ".dvc" / "tmp").resolve()
    return checkout if Path.cwd().is_relative_to(copies) else Path()


def sqlite_path(uri: str) -> Path | None:
    """The database file of a `sqlite:///` address, absolute; None for any other address."""
    if not uri.startswith(_SQLITE) or ":memory:" in uri:
        return None
    return (project_folder() / uri.removeprefix(_SQLITE)).resolve()


def ui_url(uri: str, experiment_id: str, run_id: str) -> str | None:
    """Address of a run's page: on `UNIDEC_MLFLOW_UI`, else the tracking server; None if there is
    neither.
    """
    base = parse(os.environ.get("UNIDEC_MLFLOW_UI") or uri).without_user().rstrip("/")
    if not base.startswith("http"):
        return None
    return f"{base}/#/experiments/{quote(experiment_id)}/runs/{quote(run_id)}"


def answers(uri: str, seconds: float = 2.0) -> bool:
    """Whether a store answers: MLflow itself retries for minutes before it gives up.

    A server must answer a request, with any status; a database must accept a connection; a file
    always counts as answering."""
    import requests

    address = parse(uri)
    port = address.port or _DATABASE_PORTS.get(address.scheme.partition("+")[0])
    try:
        if address.scheme in ("http", "https"):
            with contextlib.suppress(requests.exceptions.SSLError):  # MLflow may accept it
                requests.head(uri, timeout=seconds)
        elif address.host and port:
            socket.create_connection((address.host, port), seconds).close()
    except (OSError, ValueError):
        return False
    return True


def prepare_store(uri: str | None = None) -> str:
    """Create an SQLite store if it does not exist, safely from several processes; returns the
    absolute address.

    A store that was copied or moved with its project is first separated from the original's files.

    MLflow's first start is a race (several processes migrate the same empty file, and a kill
    half-way leaves one that no later start can use), so it happens under a file lock, on a
    temporary file that is renamed when complete."""
    uri = uri or tracking_uri()
    path = sqlite_path(uri)
    if path is None:
        return uri
    if _is_there(path):
        if follow_database(path):
            words = "%s was copied or moved: its files are now in %s; copy them too if missing"
            log.warning(words, path, path.parent / ARTIFACTS)
        return uri
    # the system releases it if its process dies, so it never becomes stale
    with lock_file(Path(f"{path}-lock")):
        if not _is_there(path):
            temporary = path.with_name(f"{path.name}-new")
            temporary.unlink(missing_ok=True)
            create_store(temporary, artifacts_uri(path))
            os.replace(temporary, path)
    return f"{_SQLITE}{path}"


def _is_there(database: Path) -> bool:
    return database.is_file() and database.stat().st_size > 0


def create_store(database: Path, artifacts: str) -> None:
    """Create an empty store by running all of MLflow's migrations."""
    quiet_mlflow()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(f"{_SQLITE}{database}", artifacts).engine.dispose()


def open_client(uri: str = "") -> MlflowClient:
    """A client of the store at `uri` (default: `tracking_uri()`); an SQLite store is created first.

    Raises:
        ArtifactError: the database belongs to another version of MLflow. MlflowException: the store
        does not answer.
    """
    uri = uri or tracking_uri()
    quiet_mlflow()
    prepare_store(uri)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from mlflow.store.db import utils

    utils.MAX_RETRY_COUNT = _DATABASE_ATTEMPTS
    if not answers(uri):
        shown = without_credentials(uri)
        raise MlflowException(f"{shown} does not answer: check MLFLOW_TRACKING_URI")
    try:
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except MlflowException as error:
        if "out-of-date database schema" not in str(error):
            raise
        raise ArtifactError(
            "the tracking database was written by another version of MLflow",
            where=sqlite_path(uri) or uri,
            fix=f"copy it, then: mlflow db upgrade {uri}",
        ) from error


def check_store() -> None:
    """Check the tracking store before long work whose result is to be stored there.

    Raises:
        ConfigError: the store does not answer, or not as MLflow's server does.
    """
    uri = tracking_uri()
    try:
        open_client(uri).search_experiments(max_results=1)
    except UnidecError:
        raise
    except Exception as error:  # of MLflow, a database or the network
        raise ConfigError(
            "the tracking store cannot be used",
            where=uri,
            got=" ".join(str(error).split())[:_LONGEST_REASON],
            fix="start the server, or correct MLFLOW_TRACKING_URI; unset, it is mlflow/mlflow.db",
        ) from error


class UnlessMissing:
    """`with UnlessMissing():` suppresses MLflow's error that something does not exist."""

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        return getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST"


def experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    """The experiment's id; a new experiment keeps artifacts next to an SQLite store, else where the
    server puts them.
    """
    from mlflow.exceptions import MlflowException

    path = sqlite_path(uri)
    if found := client.get_experiment_by_name(name):
        return found.experiment_id
    with contextlib.suppress(MlflowException):  # another process was first
        tags = {f"mlflow.sharedViewState.{VIEW}": json.dumps(_view_state())}
        return client.create_experiment(name, path and artifacts_uri(path), tags)
    return client.get_experiment_by_name(name).experiment_id
