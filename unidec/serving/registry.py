"""The version that an address of MLflow's registry names, and its bundle as a folder, within a bound of size."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from unidec.errors import ArtifactError, ConfigError, UnidecError
from unidec.serving.engine import Identity
from unidec.tracking.fetch import Address, fetch_bundle
from unidec.tracking.store import quiet_mlflow

if TYPE_CHECKING:
    from mlflow import MlflowClient

_MAX_REASON = 600  # characters


class RegistryAway(UnidecError):
    """The registry did not answer, or not in time; it may later."""


class Registry:
    """MLflow's registry; used by one thread. MLflow itself gives up after 20 s, three times (`tracking.store`).

    Args:
        address: what is followed. copies: folder of fetched bundles, by hash. uri: tracking store.
    """

    def __init__(self, address: Address, copies: Path, uri: str) -> None:
        self.address, self.copies, self.uri = address, copies, uri
        self._client: MlflowClient | None = None
        quiet_mlflow()  # before its first import, which takes seconds: in `find`, not here

    def find(self) -> Identity:
        """The version that the address names.

        Raises:
            ConfigError: there is no such model, alias or version; it lists those that exist.
            RegistryAway: no answer.
        """
        from mlflow.exceptions import MlflowException

        from unidec.tracking.promotion import known_version
        from unidec.tracking.registry import HASH_TAG
        from unidec.tracking.store import open_client

        try:
            self._client = self._client or open_client(self.uri)
            found = known_version(self._client, self.address.name, self.address.alias or self.address.version or "")
        except (MlflowException, OSError) as error:
            got = f"{type(error).__name__}: {error}"[:_MAX_REASON]
            raise RegistryAway("the registry does not answer", where=self.uri, got=got) from error
        sha256, data = found.tags.get(HASH_TAG, ""), found.tags.get("dataset.sha256")
        return Identity(sha256, self.address.name, str(found.version), self.address.alias, data)

    def fetch(self, version: Identity, max_bytes: int) -> Path:
        """The folder of a version's bundle, with every file's hash checked.

        Raises:
            ArtifactError: it holds more than `max_bytes`, is damaged, or is not what its tag names.
            RegistryAway: no answer.
        """
        from mlflow.exceptions import MlflowException

        from unidec.tracking.registry import tracking_to

        address = f"models:/{self.address.name}/{version.version}"
        try:
            with tracking_to(self.uri):
                stored = stored_bytes(address, max_bytes)
            if stored > max_bytes:
                raise ArtifactError(
                    "the version is too large for the available memory", where=address,
                    got=f"{stored / 1e6:,.0f} MB", expected=f"at most {max_bytes / 1e6:,.0f} MB",
                )  # fmt: skip
            return fetch_bundle(address, self.copies, uri=self.uri).resolve()
        except (MlflowException, OSError) as error:
            with contextlib.suppress(ConfigError):
                self.find()  # raises where the registry is the cause, not this version
            got = f"{type(error).__name__}: {error}"[:_MAX_REASON]
            raise ArtifactError("the version cannot be fetched", where=address, got=got) from error


def stored_bytes(address: str, enough: int) -> int:
    """Size of all files that the registry lists for a version, or of a part of them that is more than `enough`."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    repository, folders, total = get_artifact_repository(address), [""], 0
    while folders and total <= enough:
        for entry in repository.list_artifacts(folders.pop() or None):
            if entry.is_dir:
                folders.append(entry.path)
            else:
                total += entry.file_size or 0
    return total
