"""Bundle -> registered MLflow model: one version per bundle hash, and an alias that moves only to
verified versions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from unidec.addresses import without_credentials
from unidec.data.file_lock import lock_file
from unidec.data.storage import MANIFEST, check_space, manifest_sha256, read_manifest
from unidec.errors import ArtifactError
from unidec.text_page import render_text
from unidec.tracking.once import create_once
from unidec.tracking.relocation import ARTIFACTS
from unidec.tracking.store import import_mlflow, open_client, sqlite_path, tracking_uri
from unidec.version import PACKAGE, __version__

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, LoggedModel, Run
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import ModelSignature

HASH_TAG = "bundle.sha256"
# our dependencies that a loaded bundle needs; versions come from the distribution's metadata
_SERVING = (
    "torch transformers safetensors numpy scipy pandas pyarrow pydantic pyyaml tqdm mlflow "
    "faiss-cpu onnx onnxruntime"
)

# variables that would lead MLflow's fluent calls to another store, experiment or run
_DIVERTING = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_REGISTRY_URI",
    "MLFLOW_RUN_ID",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_ACTIVE_MODEL_ID",
)
_DESCRIPTION = "UniDEC bundles: encoder, heads, classifier, label index"
_FIX = "delete that version in the MLflow UI and register again; no alias has moved"


def register(
    bundle_path: Path | str,
    run_id: str | None,
    model_name: str,
    card: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
) -> int:
    """Log a bundle as a pyfunc model and register it as `challenger`; registering it again changes
    nothing.

    A kill at any point leaves the alias where it was, and the next call creates or finds the
    version.

    Args:
        run_id: the MLflow run that trained it; None: a new run.
        card: contents of the description: {"metrics": {split: {name: value}}, and any facts}.
        tags: further tags of the version (data set hash, git commit).

    Returns:
        the version's number.

    Raises:
        ArtifactError: the bundle is damaged, the registry holds another bundle under its hash, or
            the store's artifact folder no longer exists.
    """
    from mlflow.exceptions import MlflowException

    bundle_path = Path(bundle_path).absolute()
    uri = tracking_uri()
    sha256 = checked_sha256(bundle_path)
    client = open_client(uri)
    with lock_file(bundle_path.parent / f".{bundle_path.name}.register.lock"), tracking_to(uri):
        with contextlib.suppress(MlflowException):  # it exists; any other error comes again
            client.create_registered_model(model_name, description=_DESCRIPTION)
        version = find_version(client, model_name, sha256)
        if version is None:
            all_tags = {HASH_TAG: sha256, "unidec.version": __version__}
            all_tags |= {key: without_credentials(tag) for key, tag in (tags or {}).items()}
            run = client.get_run(run_id) if run_id else None
            model_id, run_id = _log_model(client, bundle_path, run, all_tags)
            create = functools.partial(
                client.create_model_version,
                model_name,
                source=f"models:/{model_id}",
                run_id=run_id,
                tags=all_tags | {"run_id": run_id},
                description=model_card(card or {}, sha256),
                model_id=model_id,
            )
            version = create_once(lambda: find_version(client, model_name, sha256), create)
        number = str(version.version)
        verify_version(model_name, number, sha256)
        client.set_registered_model_alias(model_name, "challenger", number)
    return int(number)


def find_version(client: MlflowClient, model_name: str, sha256: str) -> ModelVersion | None:
    """The version that holds the bundle with this hash, or None."""
    wanted = f"name = '{model_name}' and tags.`{HASH_TAG}` = '{sha256}'"
    found = client.search_model_versions(wanted)
    return min(found, key=lambda version: int(version.version), default=None)


def bundle_hash(version: ModelVersion) -> str:
    """The hash of a version's bundle, from its tags; "" without one."""
    return version.tags.get(HASH_TAG, "")


def checked_sha256(bundle_path: Path) -> str:
    """The bundle's hash, after checking every file against its manifest; raises ArtifactError if a
    file is missing or damaged.
    """
    return manifest_sha256(read_manifest(bundle_path, "bundle"))


def model_card(card: Mapping[str, Any], sha256: str) -> str:
    """A model's description in Markdown: metrics, facts, how to load it, the bundle's hash."""
    return without_credentials(render_text("model_card.md", card=card, sha256=sha256))


def signature() -> ModelSignature:
    """Input `query`, parameters of `answer.LabelQuery`, output rows.

    MLflow's list parameters cannot be unset: an empty `allow` counts as none.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    text = ColSpec("string", "query")
    found = {"rank": "long", "label": "string", "title": "string", "score": "double"}
    params = [
        ParamSpec("k", "long", 5),
        ParamSpec("allow", "string", [], (-1,)),
        ParamSpec("deny", "string", [], (-1,)),
        ParamSpec("min_score", "double", None),
        ParamSpec("head", "string", "both"),
    ]
    return ModelSignature(
        inputs=Schema([text]),
        outputs=Schema([text, *(ColSpec(kind, name) for name, kind in found.items())]),
        params=ParamSchema(params),
    )


def serving_requirements() -> list[str]:
    """Requirements of a served bundle, as our distribution declares them; without unidec, whose
    code is copied.
    """
    from packaging.requirements import Requirement

    kept = {}
    for line in importlib.metadata.requires("unidec-xmc") or []:
        need = Requirement(line)
        kept[need.name.lower()] = f"{need.name}{need.specifier}"
    return [kept[name] for name in _SERVING.split() if name in kept]


def check_artifacts(experiment: Experiment | None, uri: str) -> None:
    """Refuse to write to an experiment's artifact folder that no longer exists: MLflow would
    recreate it.

    Raises:
        ArtifactError: the experiment's files are not next to the store, but in a folder that no
        longer exists.
    """
    path = sqlite_path(uri)
    address = urlsplit(experiment.artifact_location if experiment else "")
    if path is None or address.scheme != "file":
        return
    folder = Path(unquote(address.path))
    # MLflow creates the folder itself on the first write
    if folder.is_relative_to(path.parent) or folder.parent.is_dir():
        return
    raise ArtifactError(
        "the experiment keeps its files in a folder that no longer exists",
        where=path,
        got=folder,
        expected=path.parent / ARTIFACTS,
        fix="mount or move it back, or replace its address in the database: docs/servers.md, "
        "'Moving a store'",
    )


def _log_model(
    client: MlflowClient, bundle_path: Path, run: Run | None, tags: Mapping[str, str]
) -> tuple[str, str]:
    """Log the model under its run, whose status does not change. Returns model id and run id."""
    sha256 = tags[HASH_TAG]
    own = run or create_once(
        lambda: _own_run(client, sha256),
        lambda: client.create_run("0", tags={HASH_TAG: sha256}, run_name="register"),
    )
    run_id = own.info.run_id
    place = own.info.experiment_id
    wanted = f"tags.`{HASH_TAG}` = '{sha256}' and source_run_id = '{run_id}'"

    def find() -> LoggedModel | None:
        return next(iter(client.search_logged_models([place], wanted)), None)

    def create() -> LoggedModel:
        return client.create_logged_model(place, "bundle", run_id, dict(tags), own.data.params)

    model = find()
    if model is None or model.status != "READY":
        if model is not None:  # of a killed attempt: MLflow cannot complete it
            client.delete_logged_model(model.model_id)
        model = create_once(find, create)
        try:
            _upload(bundle_path, own, model.model_id, sha256)
        finally:
            if run is not None:
                client.update_run(run_id, status=run.info.status)  # which MLflow changes
    _link_test_metrics(client, run_id, model.model_id)
    return model.model_id, run_id


def _upload(bundle_path: Path, run: Run, model_id: str, sha256: str) -> None:
    """Store the bundle, code and requirements of a logged model."""
    import mlflow

    logged = run.data.to_proto().metrics
    steps = [metric.step for metric in logged if metric.key.startswith("training/")]
    with warnings.catch_warnings(), mlflow.start_run(run_id=run.info.run_id):
        # MLflow's use of pandas, and its advice to write type hints
        warnings.simplefilter("ignore")
        mlflow.pyfunc.log_model(
            name="bundle",
            model_id=model_id,
            python_model=str(PACKAGE / "tracking" / "pyfunc.py"),
            artifacts={"bundle": str(bundle_path)},
            code_paths=[str(PACKAGE)],
            signature=signature(),
            # no input example: MLflow would load the whole model to run it, and the signature is
            # given
            model_config={"runtime": "auto", "threads": 0},
            pip_requirements=serving_requirements(),
            metadata={HASH_TAG: sha256},
            # its figures become the model's; those without a step: `_link_test_metrics`
            step=max([1, *steps]),
        )


def _own_run(client: MlflowClient, sha256: str) -> Run | None:
    """The run that was created for a bundle whose training run is unknown; None if none was."""
    wanted = f"tags.`{HASH_TAG}` = '{sha256}' and attributes.run_name = 'register'"
    return next(iter(client.search_runs(["0"], wanted)), None)


def _link_test_metrics(client: MlflowClient, run_id: str, model_id: str) -> None:
    """Link the run's test metrics to the model, with the run's data set, by which MLflow's Models
    tab groups. Timestamps and steps are kept, so that the run's history has each metric once.
    """
    from mlflow.entities import Metric

    run = client.get_run(run_id)
    data = {}
    if run.inputs and run.inputs.dataset_inputs:
        used = run.inputs.dataset_inputs[0].dataset
        data = {"dataset_name": used.name, "dataset_digest": used.digest}
    found = [metric for metric in run.data.to_proto().metrics if metric.key.startswith("test/")]
    linked = [Metric(m.key, m.value, m.timestamp, m.step, model_id, **data) for m in found]
    client.log_batch(run_id, linked)


def download(address: str, sha256: str, folder: Path | str | None) -> Path:
    """Download a registered version's bundle to a new folder below `folder`; None: use it in place
    if it is on this machine. Call it within `tracking_to`.

    Raises:
        ArtifactError: the bundle is missing, damaged, another one or larger than the free disk
        space. MlflowException: the registry does not answer.
    """
    import mlflow

    try:
        if folder is not None:
            _check_size(address, Path(folder))
        path = mlflow.artifacts.download_artifacts(address, dst_path=folder and str(folder))
    except OSError as error:
        raise _unreadable(address, error) from error
    stored = sorted(Path(path).glob(f"artifacts/*/{MANIFEST}"))
    got = checked_sha256(stored[0].parent) if len(stored) == 1 else "no bundle"
    if got != sha256:
        raise ArtifactError(
            "the registry holds another bundle", where=address, got=got, expected=sha256, fix=_FIX
        )
    return stored[0].parent


def _check_size(address: str, folder: Path) -> None:
    """Raise ArtifactError if a version's files, by the registry's list, do not fit on the disk."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    repository = get_artifact_repository(address)

    def size(path: str | None = None) -> int:
        entries = repository.list_artifacts(path)
        return sum(size(one.path) if one.is_dir else one.file_size or 0 for one in entries)

    check_space(folder, size())


def _unreadable(address: str, error: Exception) -> ArtifactError:
    return ArtifactError("the stored bundle cannot be read", where=address, got=error, fix=_FIX)


def verify_version(model_name: str, version: str | int, sha256: str) -> None:
    """Check a version's files as `download` does, without keeping them; raises ArtifactError also
    if files are missing.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    address = f"models:/{model_name}/{version}"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            stored = MlflowClient().get_model_version_download_uri(model_name, str(version))
            if urlsplit(stored).scheme == "file":
                download(stored, sha256, None)  # in place
            else:
                download(address, sha256, scratch)
        except (MlflowException, OSError) as error:
            raise _unreadable(address, error) from error


@contextlib.contextmanager
def tracking_to(uri: str) -> Iterator[Any]:
    """MLflow with its process-wide store set to `uri` (fluent calls use no other), and restored
    afterwards.
    """
    mlflow = import_mlflow()
    kept = {name: os.environ.pop(name) for name in _DIVERTING if name in os.environ}
    mlflow.set_tracking_uri(uri)
    try:
        yield mlflow
    finally:
        mlflow.set_tracking_uri(None)  # also removes the environment variable that it set
        os.environ.update(kept)
