"""Registered bundle -> folder: what `models:/name@alias` or `models:/name/version` stands for, hash checked."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from unidec.data.storage import MANIFEST
from unidec.errors import ArtifactError, ConfigError
from unidec.ops.registry import HASH_TAG, checked_sha256, tracking_to
from unidec.ops.tracking_store import open_client, tracking_uri

_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")


def fetch_bundle(
    source: str | os.PathLike[str], folder: str | os.PathLike[str], *, uri: str | None = None, root: Path | str = "."
) -> Path:
    """The folder of a bundle: `source` itself, or a registered one's copy in `folder`, named by its hash.

    Args:
        source: a folder, `models:/name@alias` or `models:/name/version`.
        folder: where copies are kept; one that is there is not fetched again.
        uri, root: tracking store; default: see `tracking_store.tracking_uri`.

    Raises:
        ConfigError: not such an address, or the registry has none of this name, alias or version.
        ArtifactError: what the registry gives is damaged or another bundle.
    """
    text = os.fspath(source)
    if not text.startswith("models:"):
        return Path(text)
    found = _URI.fullmatch(text)
    if found is None:
        expected = "a folder, models:/name@alias or models:/name/version"
        raise ConfigError("not an address of a bundle", where="bundle", got=text, expected=expected)
    from mlflow.exceptions import MlflowException

    uri = uri or tracking_uri(root)
    client = open_client(uri)
    with tracking_to(uri) as mlflow:
        try:
            if found["alias"]:
                version = client.get_model_version_by_alias(found["name"], found["alias"])
            else:
                version = client.get_model_version(found["name"], found["version"])
        except MlflowException as error:
            fix = "`unidec register` registers outputs/bundle"
            raise ConfigError("not in the registry", where=uri, got=f"{text}: {error}", fix=fix) from error
        sha256 = version.tags.get(HASH_TAG, "")
        target = Path(folder) / (sha256[:16] or f"{found['name']}-{version.version}")
        if target.is_dir() and checked_sha256(target) == sha256:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            address = f"models:/{version.name}/{version.version}"
            path = mlflow.artifacts.download_artifacts(address, dst_path=scratch)
            stored = sorted(Path(path).glob(f"artifacts/*/{MANIFEST}"))
            if len(stored) != 1 or (got := checked_sha256(stored[0].parent)) != sha256:
                held = "no bundle" if len(stored) != 1 else got
                raise ArtifactError(f"{text} holds another bundle", where=uri, got=held, expected=sha256)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(stored[0].parent, target)
    return target
