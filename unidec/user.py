"""The user that runs this process: its name and home, and what it may write.

Containers often run with a user id that has no name. DVC, Prefect and other tools end with an error
when they ask for the name or the home: `name_user` is called at the start of each program, and
child processes inherit the result."""

from __future__ import annotations

import getpass
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from unidec.errors import ArtifactError

_MOST_SHOWN = 5


def name_user() -> None:
    """Set USER, LOGNAME and HOME if they are not set and the system has no entry for
    this user id.
    """
    try:
        getpass.getuser()
    except (OSError, KeyError):
        name = f"user-{os.getuid()}"
        os.environ |= {"USER": name, "LOGNAME": name}
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = _own_folder()


def _own_folder() -> str:
    """A folder of this user alone below the temporary folder, the same one each time if
    it is safe.
    """
    folder = Path(tempfile.gettempdir(), f"unidec-home-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return tempfile.gettempdir()  # cannot be written either; tools that only read work
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return str(folder) if is_own else tempfile.mkdtemp(prefix="unidec-home-")


def check_writable(folders: Sequence[Path]) -> None:
    """Check that this user may write these folders, which do not have to exist, and what is
    directly in them (but raw data). Raises ArtifactError: it may not.
    """
    refused = [path for folder in folders for path in _refused(folder)]
    if not refused:
        return
    owner = refused[0].stat().st_uid
    user = os.getuid()
    fix = f"run as user id {owner}, or: chown -R {user} {Path.cwd()}"
    if owner == user:
        fix = "allow writing (chmod u+w), or use a folder of a file system that can be written"
    raise ArtifactError(
        "cannot be written",
        where=", ".join(map(str, refused[:_MOST_SHOWN])),
        got=f"user id {user}; the owner is user id {owner}",
        fix=fix,
    )


def _refused(folder: Path) -> list[Path]:
    """The folder or its nearest existing parent, and entries of the folder, that this user cannot
    write.
    """
    if not folder.exists():
        parent = next(path for path in folder.absolute().parents if path.exists())
        return [] if os.access(parent, os.W_OK | os.X_OK) else [parent]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [folder]
    inside = [path for path in folder.iterdir() if path.name != "raw" and path.exists()]
    return [path for path in inside if not os.access(path, os.W_OK)]
