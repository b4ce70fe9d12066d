"""Updates the artifact locations of an SQLite store that was copied or moved with its project.

MLflow stores absolute locations. In a copied project they point to the original's folder, so the
copy would write there."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from pathlib import Path
from urllib.parse import unquote, urlsplit

ARTIFACTS = "artifacts"  # folder next to the database
_LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
_BUSY_SECONDS = 30.0


def artifacts_uri(database: Path) -> str:
    """Address of the folder in which a store keeps its runs' artifacts."""
    return (database.parent / ARTIFACTS).as_uri()


def follow_database(database: Path) -> bool:
    """Point the locations of a copied or moved store to the folder next to its database; returns
    whether they were changed.

    A manually chosen location is kept: a folder outside the project without a database beside it.
    A read-only database is not changed: MLflow cannot write to it either.
    """
    if not _is_writable(database) or _former_artifacts(database) is None:
        return False
    from filelock import FileLock

    with FileLock(f"{database}-lock"):
        former = _former_artifacts(database)
        if former is None:  # another process was first
            return False
        _own_copy(database)
        with _opened(database) as connection, connection:
            for where in _LOCATIONS:
                _replace_prefix(connection, where, former, artifacts_uri(database))
    return True


def _is_writable(database: Path) -> bool:
    """Whether SQLite can write to a database, and a journal next to it."""
    return os.access(database, os.W_OK) and os.access(database.parent, os.W_OK)


def _former_artifacts(database: Path) -> str | None:
    """The store's former artifact folder; None if it is the present one, or was chosen manually."""
    own = database.parent / ARTIFACTS
    for location in _experiment_locations(database):
        stem = location.removesuffix("/0")  # of the default experiment
        folder = _local_folder(stem)
        if folder is None or folder.name != ARTIFACTS:
            continue
        if _is_same(folder, own):
            return None
        has_database = (folder.parent / database.name).is_file()
        is_former = own.is_dir() or has_database or not folder.is_dir()
        return stem if is_former else None
    return None


def _experiment_locations(database: Path) -> list[str]:
    """Locations of the experiments, the oldest first; [] for a database without MLflow's tables."""
    order = "ORDER BY CAST(experiment_id AS INTEGER)"
    try:
        with _opened(database) as connection:
            rows = connection.execute(f"SELECT artifact_location FROM experiments {order}")
            return [str(location) for (location,) in rows if location]
    except sqlite3.Error:  # MLflow says what is wrong with it
        return []


def _local_folder(location: str) -> Path | None:
    """The folder of a location on this machine; None for any other location."""
    address = urlsplit(location)
    if address.scheme == "file" and address.netloc in ("", "localhost"):
        return Path(unquote(address.path))
    return Path(location) if location.startswith("/") else None


def _is_same(folder: Path, own: Path) -> bool:
    """Whether two paths are the same folder, e.g. through a bind mount."""
    return folder == own or (folder.exists() and own.exists() and folder.samefile(own))


def _replace_prefix(
    connection: sqlite3.Connection, where: tuple[str, str], old: str, new: str
) -> None:
    table, column = where
    columns = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
    if column not in columns:  # of an older schema
        return
    rest = f"substr({column}, {len(old) + 1})"
    begins = f"substr({column}, 1, {len(old)}) = :old"
    ends = f"({rest} = '' OR {rest} LIKE '/%')"
    change = f"UPDATE {table} SET {column} = :new || {rest} WHERE {begins} AND {ends}"
    connection.execute(change, {"old": old, "new": new})


def _own_copy(database: Path) -> None:
    """Replace a hard link to the original's database, as `cp -l` makes it, with a copy."""
    if database.stat().st_nlink == 1:
        return
    temporary = database.with_name(f"{database.name}-new")
    shutil.copy2(database, temporary)
    os.replace(temporary, database)


def _opened(database: Path) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(database, timeout=_BUSY_SECONDS))
