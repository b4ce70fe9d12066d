"""Names of folders and files that are being written, and the removal of those whose writer is gone."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path

_ours: set[str] = set()  # names of what this process is writing, or wrote


def temporary_beside(final: Path) -> Path:
    """A new name beside a folder or file that is to be written: host, process and a random number."""
    path = final.parent / f".{final.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    _ours.add(path.name)
    return path


def remove_stale(folder: str | os.PathLike[str], name: str = "*", hours: float = 24) -> list[str]:
    """Remove what processes that are gone (killed) left half-written in a folder.

    Args:
        folder: where things were to be written.
        name: of what was to be written (a pattern).
        hours: what was written on another machine counts as left when nothing was added to it for so long.

    Returns:
        names of what was removed.
    """
    removed = []
    for left in sorted(Path(folder).glob(f".{name}.*.tmp")):
        with contextlib.suppress(OSError):  # another process may remove it at the same time
            if is_stale(left, hours):
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
                removed.append(left.name)
    return removed


def is_stale(left: Path, hours: float = 24) -> bool:
    """Whether the writer of a temporary folder or file is gone; of another machine's: nothing changed for so long."""
    named = re.search(r"\.(\d+)\.[0-9a-f]{8}\.tmp$", left.name)
    if named is None:
        return False
    if not left.name[: named.start()].endswith(f".{socket.gethostname()}"):
        return time.time() - left.lstat().st_mtime > 3600 * hours
    pid = int(named[1])
    # in a container the one that was killed often had the number of the one that runs now
    return left.name not in _ours if pid == os.getpid() else not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
