"""User-facing errors: what, where, got, expected and fix."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"(?<=://)[^\s/?#'\"<>]*@")
_SECRET_VALUE = re.compile(
    r"(?i)(?<=[?&])([^\s=&]*(?:password|passwd|secret|token|signature|api_?key)[^\s=&]*=)[^\s&'\"<>]+"
)


def without_credentials(text: str) -> str:
    """The text without the users, passwords and secret parameters of URLs, so that it can be shown and stored."""
    return _SECRET_VALUE.sub(r"\1***", _USER_INFO.sub("", text))


class UnidecError(Exception):
    """Base of every error meant for a user; the command line prints it without a traceback and without credentials.

    Args:
        what: what is wrong, in one sentence.
        where: `file:line`, a key path or a folder.
        got: the invalid value.
        expected: description of valid values.
        fix: how to fix it.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: object = None,
        expected: object = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.where, self.got, self.expected, self.fix = what, where, got, expected, fix
        facts = {"got": got, "expected": expected, "fix": fix or None}
        lines = [f"{where}: {what}" if where else what]
        lines += [f"  {name}: {fact}" for name, fact in facts.items() if fact is not None]
        super().__init__(without_credentials("\n".join(lines)))


class ConfigError(UnidecError):
    """A parameter is unknown, of the wrong type or out of range, or parameters conflict."""

    exit_code = 2


class DataError(UnidecError):
    """Data cannot be read, or its validation failed."""

    exit_code = 3


class ArtifactError(UnidecError):
    """A stored artifact (data set, cache, checkpoint, model, bundle) is missing, damaged or of another version."""

    exit_code = 4


class TrainingError(UnidecError):
    """Training cannot continue: a loss or gradient is not finite, or there is not enough memory."""

    exit_code = 5


class Refused(UnidecError):
    """A rule forbids the action: promoting a version that failed the gate, or a rollback without a predecessor."""

    exit_code = 6


class Stopped(UnidecError):
    """A signal stopped the work cleanly; `exit_code` is 130 for SIGINT and 143 for SIGTERM, as in shells."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


_EXTRAS = {
    "pipeline": "dvc great_expectations matplotlib prefect sklearn sqlalchemy",
    "registry": "mlflow",
    "serve": "cachetools fastapi orjson prometheus_client starlette uvicorn",
}


def missing_package(error: ModuleNotFoundError) -> Exception:
    """A failed import as an error that names the extra to install; `error` itself if no extra has the package."""
    name = (error.name or "").partition(".")[0]
    extra = next((extra for extra, packages in _EXTRAS.items() if name in packages.split()), None)
    if extra is None:
        return error
    return UnidecError(f"the package {name} is not installed", fix=f"pip install 'unidec-xmc[{extra}]', or make setup")
