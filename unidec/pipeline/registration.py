"""Stage `register`: the bundle becomes a version of the registered model, with tags that say what it was made of."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from unidec.config import Params
from unidec.data.storage import folder_sha256
from unidec.errors import ConfigError
from unidec.pipeline import paths
from unidec.pipeline.ranking import headline
from unidec.pipeline.runs import tracker_of_model
from unidec.pipeline.start import start_tags
from unidec.retrieval.bundle_folder import BundleInfo, read_info
from unidec.tracking import provenance
from unidec.tracking.registry import check_artifacts, checked_sha256, find_version
from unidec.tracking.registry import register as register_bundle
from unidec.tracking.run import Tracker, run_tags
from unidec.tracking.store import open_client, tracking_uri


@dataclass(frozen=True)
class Registration:
    """A version of the registered model; `run`: its page's address, None while no server shows it."""

    model: str
    version: int
    alias: str
    run: str | None


def register(params: Params, bundle: str | os.PathLike[str] = paths.BUNDLE) -> Registration:
    """Register a bundle under the alias `challenger`; the same bundle again keeps its version.

    What the version's tags say of DVC's artifacts is read now: so after `dvc commit`.

    Args:
        params: all parameters.
        bundle: outputs/bundle, in the run that trained it; or a folder of `refresh_labels` or `change_labels`, in a run
            of its own.

    Raises:
        ConfigError: a folder that is neither, or whose origin is not registered.
        ArtifactError: the bundle is damaged, or the tracking store keeps its files in a folder that is gone.
    """
    path, name = Path(bundle), params.tracking.model_name
    info = read_info(path)
    relabelled = "refreshed" in info.card
    if not relabelled and path.resolve() != paths.BUNDLE.resolve():
        raise ConfigError(
            "no record of how this bundle was trained", where=str(path),
            expected="outputs/bundle, or a folder of `unidec labels refresh` or `unidec labels`",
            fix="register it in the project that made it",
        )  # fmt: skip
    prefect = {key: tag for key, tag in run_tags().items() if key.startswith("prefect.")}
    # a bundle with other labels has the parameters of its parent, which its own tags say all of
    tags = provenance.code_tags(made_with=None if relabelled else info.params) | prefect
    tags |= {f"dataset.{key}": str(info.dataset.get(key, "")) for key in ("name", "sha256")}
    uri, facts = tracking_uri(), {"data set": info.dataset.get("name"), "labels": info.num_labels}
    client = open_client(uri)
    check_artifacts(client.get_experiment_by_name(params.tracking.experiment), uri)
    if relabelled:
        tracker, more = _relabelled(params, path, info, tags)
        tags |= more
        facts |= {"labels of version": more["start.version"], **_counts(info)}
    else:
        tracker = tracker_of_model()
        metrics = json.loads(paths.METRICS.read_text(encoding="utf-8")) if paths.METRICS.is_file() else {}
        facts["metrics"] = {"test": headline(metrics.get("test", {}))}
        if find_version(client, name, folder_sha256(paths.BUNDLE)) is None:
            # a version keeps the records it was made with
            made_of = provenance.artifact_tags(params.data.path) | start_tags()
            lock = provenance.lock_sha256()
            tracker.set_tags(made_of | ({"dvc.lock.sha256": lock} if lock else {}))
            tracker.log_files(provenance.RECORDS, provenance.RECORDS_FOLDER)
            tags |= made_of
    version = register_bundle(path, tracker.run_id, name, card=facts, tags=tags)
    return Registration(name, version, "challenger", tracker.url)


def parent_version(params: Params, sha256: str, where: str) -> str:
    """The version that a bundle with other labels comes from, by its hash.

    Raises:
        ConfigError: it is not registered: the origin of the model would be unknown.
    """
    version = find_version(open_client(tracking_uri()), params.tracking.model_name, sha256)
    if version is None:
        raise ConfigError(
            "the bundle whose labels were changed is not registered: the origin of its model would be unknown",
            where=where, got=f"no version with the hash {sha256[:12]}",
            expected=f"a version of {params.tracking.model_name}",
            fix="register that bundle first, or change the labels of models:/NAME@ALIAS",
        )  # fmt: skip
    return str(version.version)


def _counts(info: BundleInfo) -> dict[str, int]:
    return {key: info.card["refreshed"][key] for key in ("added", "removed", "renamed", "kept")}


def _relabelled(params: Params, path: Path, info: BundleInfo, tags: dict[str, str]) -> tuple[Tracker, dict[str, str]]:
    """Of a bundle whose labels alone are new: a run of its own, and tags of what it was made of.

    Labels of the data as it is now: the data set is all that is new of DVC's artifacts. Labels by hand
    (`change_labels`): none of them is."""
    refreshed, name = info.card["refreshed"], info.dataset.get("name")
    by_hand = "version" not in refreshed
    version = parent_version(params, refreshed["parent"], str(path)) if by_hand else refreshed["version"]
    more = {
        "start.kind": "refresh", "start.model": params.tracking.model_name, "start.version": version,
        "start.bundle.sha256": refreshed["parent"], "labels": "by hand" if by_hand else "of the data",
    }  # fmt: skip
    if not by_hand:
        more |= provenance.artifact_tags(params.data.path, only=("data/dataset", "data/validation"))
    tracker = Tracker(params.tracking.experiment)
    dataset = {"name": name, "digest": info.dataset.get("sha256"), "path": str(paths.DATASET)}
    folder = paths.RUNS / f"labels-{checked_sha256(path)[:16]}"
    tracker.start(folder, {}, tags | more, dataset, f"{name} labels of version {version}{', by hand' * by_hand}")
    tracker.log_files(provenance.RECORDS, provenance.RECORDS_FOLDER)
    tracker.log_final({f"labels/{key}": value for key, value in _counts(info).items()})
    tracker.finish()
    return tracker, more
