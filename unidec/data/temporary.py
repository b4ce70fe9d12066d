"""Temporary names for folders and files that are being written, and removal of those that killed
processes left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path

import psutil

_STALE_S = 86_400.0  # a day
_SUFFIX = re.compile(r"\.(\d+)\.[0-9a-f]{8}\.tmp$")
_written_names: set[str] = set()  # by this process


def temporary_path(final: Path) -> Path:
    """Temporary path for writing a folder or file: contains host name, process id and a random
    number.
    """
    owner = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    path = final.with_name(f".{final.name}.{owner}.tmp")
    _written_names.add(path.name)
    return path


def remove(path: Path) -> None:
    """Remove a folder (as much of it as possible), a file or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder; it is renamed first, so that no partial folder has its name. Raises OSError:
    no permission.
    """
    temporary = temporary_path(Path(os.path.abspath(path)))
    os.rename(path, temporary)
    remove(temporary)


def remove_stale(folder: str | os.PathLike[str], name: str = "*") -> None:
    """Remove incomplete temporary files and folders of killed processes from a folder.

    Args:
        name: glob pattern of the final names.
    """
    for temporary in Path(folder).glob(f".{name}.*.tmp"):
        with contextlib.suppress(OSError):  # another process may remove it at the same time
            if is_stale(temporary):
                remove(temporary)


def is_stale(temporary: Path) -> bool:
    """Whether the process that wrote a temporary folder or file has ended; if it ran on another
    machine: whether the path has not changed for a day.
    """
    suffix = _SUFFIX.search(temporary.name)
    if suffix is None:
        return False
    is_ours = temporary.name[: suffix.start()].endswith(f".{socket.gethostname()}")
    if not is_ours:
        return time.time() - temporary.lstat().st_mtime > _STALE_S
    process = int(suffix[1])
    # in a container, a killed process often had the same id as the current one
    if process == os.getpid():
        return temporary.name not in _written_names
    return not psutil.pid_exists(process)
