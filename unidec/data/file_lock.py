"""File locks, which the operating system releases when their process ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from unidec.data.storage import storage_error
from unidec.errors import ArtifactError


@contextlib.contextmanager
def lock_file(path: Path, timeout: float = -1) -> Iterator[None]:
    """Hold a lock on a file, whose folder is created if necessary. The operating system releases
    the lock when the process ends.

    Args:
        timeout: seconds to wait for another process; below 0: no limit.

    Raises:
        ArtifactError: the file cannot be written, or its file system has no locks.
        filelock.Timeout: another process holds it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=timeout)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise
    except OSError as error:
        raise storage_error(path, error) from error
    except NotImplementedError as error:  # raised by filelock
        raise ArtifactError(
            "the file system has no locks",
            where=path,
            got=error,
            fix="use a folder on another file system",
        ) from error
    try:
        yield
    finally:
        lock.release()
