"""Updates the artifact locations of an SQLite store that was copied or moved with its project.

MLflow stores absolute locations. In a copied project they point to the original's folder, so the
copy would write there."""

from __future__ import annotations

import contextlib
import os
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
        places = {"old": former, "new": artifacts_uri(database)}
        with _opened(database) as connection, connection:
            for table, column in _LOCATIONS:
                connection.execute(
                    f"UPDATE {table} SET {column} = :new || substr({column}, length(:old) + 1) "
                    f"WHERE substr({column} || '/', 1, length(:old) + 1) = :old || '/'",
                    places,
                )
    return True


def _is_writable(database: Path) -> bool:
    """Whether SQLite can write to a database, and a journal next to it."""
    return os.access(database, os.W_OK) and os.access(database.parent, os.W_OK)


def _former_artifacts(database: Path) -> str | None:
    """The store's former artifact folder; None if it is the present one, or was chosen manually."""
    own = database.parent / ARTIFACTS
    former = _first_location(database).removesuffix("/0")  # of the default experiment
    folder = Path(unquote(urlsplit(former).path))
    if not former.startswith("file:") or folder.name != ARTIFACTS or _is_same(folder, own):
        return None
    has_database = (folder.parent / database.name).is_file()
    return former if own.is_dir() or has_database or not folder.is_dir() else None


def _first_location(database: Path) -> str:
    """Location of the oldest experiment; "" for a database without MLflow's tables."""
    query = "SELECT artifact_location FROM experiments ORDER BY experiment_id LIMIT 1"
    try:
        with _opened(database) as connection:
            row = connection.execute(query).fetchone()
            return row[0] if row else ""
    except sqlite3.Error:  # MLflow says what is wrong with it
        return ""


def _is_same(folder: Path, own: Path) -> bool:
    """Whether two paths are the same folder, e.g. through a bind mount."""
    return folder == own or (folder.exists() and own.exists() and folder.samefile(own))


def _opened(database: Path) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(database, timeout=_BUSY_SECONDS))
