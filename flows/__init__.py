"""Orchestration with Prefect: when the library's stages run, what is shown of them, retries,
cancellation; no tensors.

Prefect reads its settings when it is imported, so the settings of this project are set here, before
that."""

from __future__ import annotations

# first, before slow imports: from here on Ctrl-C prints one line
from unidec import interrupt, surroundings

if interrupt.IS_PROGRAM:
    surroundings.settle()

# isort: split
import importlib.util
import os
import sys
from pathlib import Path

from unidec.addresses import parse
from unidec.errors import missing_package
from unidec.tracking.store import project_folder
from unidec.user import name_user

name_user()  # before Prefect asks for the user's home

if importlib.util.find_spec("prefect") is None:
    sys.exit(f"error: {missing_package(ModuleNotFoundError(name='prefect'))}")


def _project() -> Path:
    """The project: the working folder, or else the checkout of this code, which may be that of
    another project.
    """
    folder = project_folder()
    checkout = Path(__file__).resolve().parents[1]
    is_inside = folder != Path() or Path("prefect.toml").is_file()
    return checkout if not is_inside and (checkout / "prefect.toml").is_file() else folder


# the same as in prefect.toml, for runs that start in another folder
_DEFAULTS = {
    "PREFECT_HOME": str(_project().resolve() / ".prefect"),
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "unidec",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # the library also logs outside of runs
    "DO_NOT_TRACK": "true",
}
for _name, _value in _DEFAULTS.items():
    os.environ.setdefault(_name, _value)

# Prefect prints its address, so user and password move to the variable that Prefect has for them
_API = parse(os.environ.get("PREFECT_API_URL", ""))
if _API.user:
    os.environ.setdefault("PREFECT_API_AUTH_STRING", f"{_API.user}:{_API.password}")
    os.environ["PREFECT_API_URL"] = _API.without_user()
