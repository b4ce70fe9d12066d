"""Registered bundle -> folder: fetches `models:/name@alias` or `models:/name/version` and checks
its hash.

The version that an address named last is recorded beside the copies, and used while the registry
does not answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidec.addresses import without_credentials
from unidec.data.file_lock import lock_file
from unidec.data.json_file import read_json_object, time_now
from unidec.data.storage import text_sha256, write_json
from unidec.errors import ArtifactError, ConfigError, UnidecError
from unidec.tracking.promotion import known_version, version_of
from unidec.tracking.registry import (
    bundle_hash,
    checked_sha256,
    download,
    find_version,
    tracking_to,
)
from unidec.tracking.store import (
    open_client,
    sqlite_path,
    tracking_uri,
)

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

COPIES = Path("runs/bundles")  # of registered bundles, by hash; may be deleted at any time
LOCK_SECONDS = 5.0  # how long another program may lock an SQLite registry
_LONGEST_REASON = 300
log = logging.getLogger(__name__)
_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")
_SCHEME = re.compile(r"[A-Za-z]\w+:")  # two letters or more: not a drive of Windows


class RegistryAway(ArtifactError):
    """The registry does not answer, or its answer cannot be read; it may be back later."""


@dataclass(frozen=True)
class Address:
    """`models:/name@alias` or `models:/name/version`; one of the two is None."""

    name: str
    alias: str | None
    version: str | None

    @property
    def which(self) -> str:
        return self.alias or self.version or ""


def parse_address(text: str) -> Address | None:
    """A registry address in parts; None for a folder's path.

    Raises:
        ConfigError: it looks like an address, but is neither a valid one nor a folder.
    """
    found = _URI.fullmatch(text)
    if found is None:
        if not _SCHEME.match(text) or Path(text).exists():
            return None
        raise ConfigError(
            "not an address of a bundle",
            where="bundle",
            got=text,
            expected="a folder, models:/name@alias or models:/name/version",
        )
    return Address(found["name"], found["alias"], found["version"])


def fetch_bundle(source: str | os.PathLike[str], uri: str | None = None) -> Path:
    """The folder of a bundle: `source` itself, or the copy of a registered bundle in `COPIES`,
    named by its hash. An intact copy is not fetched again.

    Args:
        source: a folder, `models:/name@alias` or `models:/name/version`.
        uri: tracking store; default: see `store.tracking_uri`.

    Raises:
        ConfigError: not a valid address, or no such name, alias or version in the registry.
        ArtifactError: the registry's files are damaged, or belong to another bundle.
        MlflowException: the registry does not answer.
    """
    address = parse_address(os.fspath(source))
    if address is None:
        return Path(source)
    uri = uri or tracking_uri()
    version = known_version(open_client(uri), address.name, address.which)
    return _fetch(version, uri)


def bundle_folder(source: str) -> Path:
    """`fetch_bundle` for commands and `unidec.load`: while the registry does not answer, uses the
    version that this address named last, with a warning.
    """
    address = parse_address(source)
    if address is None:
        return Path(source)
    uri = tracking_uri()
    try:
        version = registered_version(uri, address)
        with _errors_of(uri):
            found = _fetch(version, uri)
    except RegistryAway as error:
        noted = last_known(uri, source)
        if noted is None:
            raise
        found = copy_of(noted["sha256"])
        if not _is_whole(found, noted["sha256"]):
            raise
        log.warning("%s; using %s", on_a_line(error), words_of(noted, source))
        return found
    facts = {
        "sha256": bundle_hash(version),
        "name": address.name,
        "version": str(version.version),
        "alias": address.alias,
    }
    with contextlib.suppress(ArtifactError, OSError):  # a read-only folder
        note_known(uri, source, facts)
    return found


def registered_version(uri: str, address: Address) -> ModelVersion:
    """The version that an address names now.

    Raises:
        ConfigError: there is no such model, version or alias. RegistryAway: no answer, or an
        unreadable one.
    """
    with _errors_of(uri):
        _read_database(uri)
        try:
            client = open_client(uri)
        except ArtifactError as error:  # of another version of MLflow
            raise RegistryAway(error.what, where=error.where, fix=error.fix) from error
        return known_version(client, address.name, address.which)


@contextlib.contextmanager
def _errors_of(uri: str) -> Iterator[None]:
    """Turn any error that an unavailable or damaged registry causes in MLflow, its database or a
    parser into a RegistryAway.
    """
    try:
        yield
    except UnidecError:
        raise
    except Exception as error:
        first, *_ = without_credentials(f"{type(error).__name__}: {error}").splitlines()
        raise RegistryAway(
            "the registry does not answer",
            where=without_credentials(uri),
            got=first[:_LONGEST_REASON],
            fix="check MLFLOW_TRACKING_URI and the server, or restore the database; a bundle's "
            "folder needs no registry",
        ) from error


def _read_database(uri: str) -> None:
    """Read an SQLite store within `LOCK_SECONDS`: MLflow would retry for a minute if it cannot."""
    database = sqlite_path(uri)
    if database is None or not database.is_file():  # a server; or nothing was registered yet
        return
    read_only = f"{database.as_uri()}?mode=ro"
    connection = sqlite3.connect(read_only, timeout=LOCK_SECONDS, uri=True)
    with contextlib.closing(connection) as opened:
        opened.execute("SELECT name FROM sqlite_master").fetchall()


def _note(uri: str, source: str) -> Path:
    digest = text_sha256(f"{uri} {source}")
    return COPIES / f".served-{digest[:12]}.json"


def note_known(uri: str, source: str, facts: Mapping[str, Any]) -> None:
    """Record which version an address names: "sha256", "version" and further facts.

    Raises:
        ArtifactError, OSError: it cannot be written.
    """
    write_json(_note(uri, source), {**facts, "at": time_now()})


def last_known(uri: str, source: str) -> dict[str, Any] | None:
    """The last record of `note_known`, if the bundle's copy exists; its files are not checked."""
    noted = read_json_object(_note(uri, source))
    sha256 = str(noted.get("sha256"))
    is_there = re.fullmatch("[0-9a-f]+", sha256) and copy_of(sha256).is_dir()
    return noted if is_there else None


def words_of(noted: Mapping[str, Any], source: str) -> str:
    """The recorded version in words: its number, and when the registry named it."""
    at = noted.get("at", "an unknown time")
    return f"version {noted.get('version')}, which {source} named at {at}"


def copy_of(sha256: str) -> Path:
    """Folder of the copy of the registered bundle with this hash."""
    return COPIES / sha256[:16]


def on_a_line(error: object) -> str:
    """An error's message without line breaks."""
    return "; ".join(line.strip() for line in str(error).splitlines())


def fetch_by_hash(model_name: str, sha256: str) -> Path:
    """The folder of the registered bundle with this hash; an intact local copy is used without
    asking the registry.

    Raises:
        ArtifactError: the registry does not have it, or its files are damaged.
        MlflowException: the registry does not answer.
    """
    target = copy_of(sha256)
    if _is_whole(target, sha256):
        return target
    uri = tracking_uri()
    found = find_version(open_client(uri), model_name, sha256)
    if found is None:
        raise ArtifactError(
            f"no version of {model_name} holds this bundle",
            where=uri,
            got=sha256,
            fix="set MLFLOW_TRACKING_URI to the registry that it was registered in",
        )
    return _fetch(found, uri)


def find_alias(model_name: str, alias: str) -> ModelVersion | None:
    """The version that an alias names; None if there is no such model or alias."""
    return version_of(open_client(), model_name, alias)


def _fetch(version: ModelVersion, uri: str) -> Path:
    """A version's bundle, from its local copy or the registry; several processes may call it at
    once.
    """
    sha256 = bundle_hash(version)
    target = COPIES / (sha256[:16] or f"{version.name}-{version.version}")
    if _is_whole(target, sha256):  # without a lock: the folder may be read-only
        return target
    address = f"models:/{version.name}/{version.version}"
    with lock_file(COPIES / f".{target.name}.lock"):
        if _is_whole(target, sha256):  # another process was first
            return target
        with tempfile.TemporaryDirectory(dir=COPIES, prefix=".fetch-") as scratch, tracking_to(uri):
            stored = download(address, sha256, scratch)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(stored, target)
    return target


def _is_whole(folder: Path, sha256: str) -> bool:
    """Whether a copy exists and no file in it is damaged."""
    try:
        return folder.is_dir() and checked_sha256(folder) == sha256
    except ArtifactError:
        return False
