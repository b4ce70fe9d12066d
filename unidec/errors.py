"""User-facing errors: what, where, got, expected and fix."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from unidec.addresses import without_credentials

MAX_CHARS = 200  # of the error of a library


class UnidecError(Exception):
    """Base of every error meant for a user; the command line prints it without a traceback and
    without credentials.

    Args:
        what: what is wrong, in one sentence.
        where: `file:line`, a key path, or the path of a file or folder.
        got: the invalid value, or the error of a library, which is cut.
        expected: description of valid values.
        fix: how to fix it.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        got: object = None,
        expected: object = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.got = str(got)[:MAX_CHARS] if isinstance(got, Exception) else got
        self.expected = expected
        self.fix = fix
        super().__init__(self._message())

    def _message(self) -> str:
        facts = {"got": self.got, "expected": self.expected, "fix": self.fix or None}
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        lines += [f"  {name}: {fact}" for name, fact in facts.items() if fact is not None]
        return without_credentials("\n".join(lines))

    def seen_from_above(self, folder: Path) -> None:
        """Change `where`, if it is a relative path of a file in `folder`, to its path from outside
        of the folder.
        """
        file = (self.where or "").partition(":")[0]
        if file and not Path(file).is_absolute() and (folder / file).exists():
            self.where = str(folder / str(self.where))
            self.args = (self._message(),)


class ConfigError(UnidecError):
    """A parameter is unknown, of the wrong type or out of range, or parameters conflict."""

    exit_code = 2


class DataError(UnidecError):
    """Data cannot be read, or its validation failed."""

    exit_code = 3


class ArtifactError(UnidecError):
    """A stored artifact (data set, cache, checkpoint, model, bundle) is missing, damaged or of
    another version.
    """

    exit_code = 4


class TrainingError(UnidecError):
    """Training cannot continue: a loss or gradient is not finite, or there is not enough memory."""

    exit_code = 5


class Refused(UnidecError):
    """A rule forbids the action: promoting a version that failed the gate, or a rollback without a
    predecessor.
    """

    exit_code = 6


class Stopped(UnidecError):
    """A signal stopped the work cleanly; `exit_code` is 130 for SIGINT and 143 for SIGTERM, as in
    shells.
    """

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


_OWNER = "run as the owner of the project's folder, or give the folder to this user (chown -R)"
_SYSTEM_FIXES = {
    errno.EACCES: _OWNER,
    errno.EPERM: _OWNER,
    errno.EROFS: "use a folder of a file system that can be written",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota",
}


def system_error(error: OSError) -> UnidecError | None:
    """A refusal of the operating system (permissions, full or read-only disk) with its path and
    fix; None: another error, or one that names no file.
    """
    fix = _SYSTEM_FIXES.get(error.errno or 0)
    if fix is None or error.filename is None:
        return None
    place = os.path.abspath(os.fsdecode(error.filename))
    got = f"user id {os.getuid()}" if fix == _OWNER else None
    return ArtifactError(str(error.strerror), where=place, got=got, fix=fix)


_LONGEST_MESSAGE = 600
_SURROUNDINGS = (
    "mlflow",
    "sqlalchemy",
    "sqlite3",
    "requests",
    "urllib3",
    "httpx",
    "prefect",
    "filelock",
    "pydantic_core",
)


def in_one_message(error: Exception, how: str) -> tuple[str, int] | None:
    """What a program prints of an error, and its exit code; None: a bug, which has a traceback.

    Args:
        how: the command that shows more of an error of the system, a server or a database.
    """
    found: Exception | None = error
    if isinstance(error, ModuleNotFoundError):
        found = missing_package(error)
    elif isinstance(error, OSError):
        found = system_error(error)
    if isinstance(found, Stopped):
        return str(found), found.exit_code
    if isinstance(found, UnidecError):
        return f"error: {found}", found.exit_code
    package = type(error).__module__.partition(".")[0]
    if package not in _SURROUNDINGS and not isinstance(error, OSError):
        return None
    message = without_credentials(" ".join(str(error).split()))[:_LONGEST_MESSAGE]
    kind = type(error).__name__
    return f"error: {kind}: {message or 'no message'}\n  fix: {how} shows where it happened", 1


_EXTRAS = {
    "cpu": "faiss",
    "lora": "peft",
    "pipeline": "dvc great_expectations matplotlib prefect sklearn sqlalchemy",
    "registry": "mlflow",
    "serve": "cachetools fastapi httptools orjson prometheus_client starlette uvicorn",
}


def missing_package(error: ModuleNotFoundError) -> Exception:
    """A failed import as an error that names the extra to install; `error` itself if no extra has
    the package.
    """
    name = (error.name or "").partition(".")[0]
    for extra, packages in _EXTRAS.items():
        if name in packages.split():
            return UnidecError(
                f"the package {name} is not installed",
                fix=f"pip install 'unidec-xmc[{extra}]', or make setup",
            )
    return error
