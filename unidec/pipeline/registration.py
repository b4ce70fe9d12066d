"""Stage `register`: register the bundle as a new version of the model, with tags that record its
origin.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidec.bundle.bundle_folder import read_info
from unidec.bundle.bundle_info import BundleInfo
from unidec.config import Params
from unidec.data.storage import folder_sha256, read_json
from unidec.errors import ConfigError
from unidec.metric_names import headline
from unidec.pipeline import paths
from unidec.pipeline.encoders import encoder_facts
from unidec.pipeline.runs import tracker_of_model
from unidec.pipeline.start import start_tags
from unidec.tracking import provenance
from unidec.tracking.registry import check_artifacts, checked_sha256, find_version
from unidec.tracking.registry import register as register_bundle
from unidec.tracking.run import Tracker, run_tags
from unidec.tracking.store import open_client, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


@dataclass(frozen=True)
class Registration:
    """A version of the registered model, with its alias and the address of its run's page (None
    without a server).
    """

    model: str
    version: int
    alias: str
    run: str | None


def register(params: Params, bundle: str | os.PathLike[str] | None = None) -> Registration:
    """Register a bundle with the alias `challenger`. A bundle that is already registered keeps its
    version.

    The version's tags about DVC's artifacts are read from dvc.lock now, so call this after `dvc
    commit`.

    Args:
        params: all parameters.
        bundle: None: outputs/bundle, which is added to the MLflow run that trained it; or a folder
            of `refresh_labels` or `change_labels`, which gets a separate run.

    Raises:
        ConfigError: another folder, or a bundle with other labels whose source is not registered.
        ArtifactError: the bundle is damaged, or the tracking store's artifact folder is gone.
    """
    path = Path(bundle or paths.BUNDLE)
    info = read_info(path)
    relabelled = "refreshed" in info.card
    if not relabelled and path.resolve() != paths.BUNDLE.resolve():
        raise ConfigError(
            "no record of how this bundle was trained",
            where=path,
            expected="outputs/bundle, or a folder that a command of `unidec labels` wrote",
            fix="register it in the project that trained it",
        )
    prefect = {key: tag for key, tag in run_tags().items() if key.startswith("prefect.")}
    # a bundle with other labels has its parent's parameters, and the parent's tags record whether
    # these were committed
    tags = provenance.code_tags(made_with=None if relabelled else info.params) | prefect
    tags |= {f"dataset.{key}": str(info.dataset.get(key, "")) for key in ("name", "sha256")}
    uri = tracking_uri()
    facts: dict[str, Any] = {"data set": info.dataset.get("name"), "labels": info.num_labels}
    facts |= encoder_facts(path)
    name = params.tracking.model_name
    client = open_client(uri)
    check_artifacts(client.get_experiment_by_name(params.tracking.experiment), uri)
    if relabelled:
        tracker, origin = _relabelled(params, path, info, tags)
        tags |= origin
        facts |= {"labels of version": origin["start.version"], **_counts(info)}
    else:
        tracker = tracker_of_model()
        metrics = {}
        if paths.METRICS.is_file():
            metrics = headline(read_json(paths.METRICS)["test"])
        facts["metrics"] = {"test": metrics}
        known = find_version(client, name, folder_sha256(path))
        if known is None:
            # only for a new version: an existing one keeps the records of its training
            origin = provenance.artifact_tags(params.data.path) | start_tags()
            locked = {key: tag for key, tag in tags.items() if key == provenance.LOCK_TAG}
            tracker.set_tags(origin | locked)
            tracker.log_files(provenance.RECORDS, provenance.RECORDS_FOLDER)
            tags |= origin
        elif provenance.unknown_code(known.tags) and not provenance.unknown_code(tags):
            record_code(client, known, tags)  # it was unknown so far, and git now answers
    version = register_bundle(path, tracker.run_id, name, card=facts, tags=tags)
    return Registration(name, version, "challenger", tracker.url)


def parent_version(params: Params, sha256: str, where: Path) -> str:
    """The version with the source bundle of a label change, found by the bundle's hash.

    Raises:
        ConfigError: the source is not registered, so the origin of the model would be unknown.
    """
    version = find_version(open_client(), params.tracking.model_name, sha256)
    if version is None:
        raise ConfigError(
            "the bundle whose labels were changed is not registered: the origin of its model "
            "would be unknown",
            where=where,
            got=f"no version with the hash {sha256[:12]}",
            expected=f"a version of {params.tracking.model_name}",
            fix="register that bundle first, or change the labels of models:/NAME@ALIAS",
        )
    return str(version.version)


def record_code(client: MlflowClient, version: ModelVersion, tags: Mapping[str, str]) -> None:
    """Replace the tags about the code that made a version by those in `tags`."""
    for key in provenance.CODE_TAGS:
        if key in tags:
            client.set_model_version_tag(version.name, version.version, key, tags[key])
        elif key in version.tags:
            client.delete_model_version_tag(version.name, version.version, key)


def _counts(info: BundleInfo) -> dict[str, int]:
    return {key: info.card["refreshed"][key] for key in ("added", "removed", "renamed", "kept")}


def _relabelled(
    params: Params, path: Path, info: BundleInfo, tags: dict[str, str]
) -> tuple[Tracker, dict[str, str]]:
    """The MLflow run of a bundle with other labels, and tags that record the bundle's origin.

    Among DVC's artifacts, only the data set is new after `refresh_labels`, and none is new after
    `change_labels` ("by hand").
    """
    refreshed = info.card["refreshed"]
    name = info.dataset.get("name")
    by_hand = "version" not in refreshed
    parent = refreshed["parent"]
    version = parent_version(params, parent, path) if by_hand else refreshed["version"]
    origin = {
        "start.kind": "refresh",
        "start.model": params.tracking.model_name,
        "start.version": version,
        "start.bundle.sha256": parent,
        "labels": "by hand" if by_hand else "of the data",
    }
    if not by_hand:
        origin |= provenance.artifact_tags(
            params.data.path, only=("data/dataset", "data/validation")
        )
    tracker = Tracker(params.tracking.experiment)
    dataset = {"name": name, "digest": info.dataset.get("sha256"), "path": str(paths.DATASET)}
    tracker.start(
        paths.RUNS / f"labels-{checked_sha256(path)[:16]}",
        {},
        tags | origin,
        dataset,
        f"{name} labels of version {version}{', by hand' * by_hand}",
    )
    tracker.log_files(provenance.RECORDS, provenance.RECORDS_FOLDER)
    tracker.log_final({f"labels/{key}": value for key, value in _counts(info).items()})
    tracker.finish()
    return tracker, origin
