"""Orchestration with Prefect: when the library's stages run, what is shown of them, retries, cancellation; no tensors.

Prefect reads its settings when it is imported, so the settings of this project are set here, before that.
"""

from __future__ import annotations

import unidec.interrupt  # noqa: F401  first, before slow imports: from here on Ctrl-C prints one line, no traceback

# isort: split
import importlib.util
import os
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from unidec.errors import missing_package, without_credentials
from unidec.tracking.store import project_folder

if importlib.util.find_spec("prefect") is None:
    sys.exit(f"error: {missing_package(ModuleNotFoundError(name='prefect'))}")

_CHECKOUT = Path(__file__).resolve().parents[1]  # not a project if this is an installed package
_FOLDER = _CHECKOUT if (_CHECKOUT / "prefect.toml").is_file() and project_folder() == Path() else project_folder()

# the same as in prefect.toml, for runs that start in another folder
_DEFAULTS = {
    "PREFECT_HOME": str(_FOLDER.resolve() / ".prefect"),
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "unidec",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # the library also logs outside of runs
    "DO_NOT_TRACK": "true",
}
for _name, _value in _DEFAULTS.items():
    os.environ.setdefault(_name, _value)

# Prefect prints its address, so user and password move to the variable that Prefect has for them
_API = urlsplit(os.environ.get("PREFECT_API_URL", ""))
if _API.username:
    os.environ.setdefault("PREFECT_API_AUTH_STRING", f"{unquote(_API.username)}:{unquote(_API.password or '')}")
    os.environ["PREFECT_API_URL"] = without_credentials(_API.geturl())
