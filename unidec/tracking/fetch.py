"""Registered bundle -> folder: fetches `models:/name@alias` or `models:/name/version` and checks its hash."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unidec.errors import ArtifactError, ConfigError
from unidec.tracking.promotion import CHAMPION, known_version, version_of
from unidec.tracking.registry import HASH_TAG, checked_sha256, download, find_version, tracking_to
from unidec.tracking.run import Tracker
from unidec.tracking.store import answers, open_client, quiet_mlflow, store_errors, tracking_uri

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion

COPIES = Path("runs/bundles")  # of registered bundles, by hash; may be deleted at any time
_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")
_SCHEME = re.compile(r"[A-Za-z]\w+:")  # two letters or more: not a drive of Windows


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
        expected = "a folder, models:/name@alias or models:/name/version"
        raise ConfigError("not an address of a bundle", where="bundle", got=text, expected=expected)
    return Address(found["name"], found["alias"], found["version"])


def fetch_bundle(source: str | os.PathLike[str], folder: str | os.PathLike[str], uri: str | None = None) -> Path:
    """The folder of a bundle: `source` itself, or a registered one's copy in `folder`, named by its hash.

    Args:
        source: a folder, `models:/name@alias` or `models:/name/version`.
        folder: where copies are kept; an intact copy is not fetched again.
        uri: tracking store; default: see `store.tracking_uri`.

    Raises:
        ConfigError: not a valid address, or no such name, alias or version in the registry.
        ArtifactError: the registry's files are damaged, or another bundle.
        MlflowException: the registry does not answer.
    """
    address = parse_address(os.fspath(source))
    if address is None:
        return Path(source)
    uri = uri or tracking_uri()
    return _fetch(known_version(open_client(uri), address.name, address.which), Path(folder), uri)


def bundle_folder(source: str, folder: str | os.PathLike[str] = COPIES) -> Path:
    """`fetch_bundle` for a command: a registry that does not answer is an ArtifactError with a fix."""
    if parse_address(source) is None:
        return Path(source)
    quiet_mlflow()
    from mlflow.exceptions import MlflowException

    try:
        return fetch_bundle(source, folder)
    except MlflowException as error:
        raise ArtifactError(
            "the registry does not answer", where=tracking_uri(), got=str(error).splitlines()[0][:300],
            fix=f"check MLFLOW_TRACKING_URI; bundles that were fetched before are in {folder}",
        ) from error  # fmt: skip


def fetch_by_hash(model_name: str, sha256: str, folder: Path) -> Path:
    """The folder of the registered bundle with this hash; an intact local copy is used without asking the registry.

    Raises:
        ArtifactError: the registry does not have it, or its files are damaged.
        MlflowException: the registry does not answer.
    """
    target = folder / sha256[:16]
    if _is_whole(target, sha256):
        return target
    uri = tracking_uri()
    found = find_version(open_client(uri), model_name, sha256)
    if found is None:
        fix = "set MLFLOW_TRACKING_URI to the registry that it was registered in"
        raise ArtifactError(f"no version of {model_name} holds this bundle", where=uri, got=sha256, fix=fix)
    return _fetch(found, folder, uri)


def find_alias(model_name: str, alias: str) -> ModelVersion | None:
    """The version that an alias names; None if there is no such model or alias."""
    return version_of(open_client(tracking_uri()), model_name, alias)


def measured_before(tracker: Tracker, model_name: str, dataset_sha256: str) -> dict[str, dict[str, float]]:
    """Test metrics in percent ({"P@1": ...}) of the champion's run and of the experiment's last other run with metrics,
    by the name of the run; {} for a run on another data set. No entries if the store does not answer."""
    if not tracker.run_id or not answers(tracker.uri):
        return {}
    with contextlib.suppress(*store_errors()):  # these metrics are optional: the report is written without them
        client = open_client(tracker.uri)
        place = client.get_run(tracker.run_id).info.experiment_id
        found = {tracker.run_id: "this run"}
        if champion := version_of(client, model_name, CHAMPION):
            found.setdefault(champion.run_id, f"the champion (version {champion.version})")
        last = client.search_runs([place], "metrics.`test/nDCG_at_5` >= 0", order_by=["start_time DESC"], max_results=3)
        other = next((run.info for run in last if run.info.run_id not in found), None)
        found |= {other.run_id: f"the last run ({other.run_name})"} if other else {}
        runs = {name: client.get_run(run_id) for run_id, name in found.items() if run_id != tracker.run_id}
        return {name: _test_metrics(run, dataset_sha256) for name, run in runs.items()}
    return {}


def _test_metrics(run: Run, dataset_sha256: str) -> dict[str, float]:
    """Test metrics of a run; {} if its data set is another one."""
    used = run.inputs.dataset_inputs if run.inputs else []
    if not any(dataset_sha256.startswith(one.dataset.digest) for one in used):
        return {}
    test = {key: value for key, value in run.data.metrics.items() if key.startswith("test/")}
    return {key.removeprefix("test/").replace("_at_", "@"): value for key, value in test.items()}


def _fetch(version: ModelVersion, folder: Path, uri: str) -> Path:
    """A version's bundle, from its local copy or the registry; safe from several processes at once."""
    from filelock import FileLock

    sha256 = version.tags.get(HASH_TAG, "")
    target = folder / (sha256[:16] or f"{version.name}-{version.version}")
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{target.name}.lock"):
        if not _is_whole(target, sha256):
            with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch, tracking_to(uri):
                stored = download(f"models:/{version.name}/{version.version}", sha256, scratch)
                shutil.rmtree(target, ignore_errors=True)
                os.replace(stored, target)
    return target


def _is_whole(folder: Path, sha256: str) -> bool:
    """Whether a copy exists and no file in it is damaged."""
    try:
        return folder.is_dir() and checked_sha256(folder) == sha256
    except ArtifactError:
        return False
