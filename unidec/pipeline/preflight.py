"""Checks before any work: settings and environment on which a run would otherwise fail minutes or
hours later.

Nothing is written, and no network is used.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from unidec.config import Params
from unidec.data.formats import check_folder
from unidec.data.storage import read_manifest
from unidec.errors import ArtifactError, DataError, UnidecError, missing_package
from unidec.model.sources import is_known_here
from unidec.pipeline import paths
from unidec.pipeline.data_stages import checked_encoder, source_files
from unidec.tracking.store import sqlite_path, tracking_uri
from unidec.user import check_writable

ALL_STEPS = ("ingest", "tokens", "train", "index", "evaluate")
# packages that a stage imports and `pip install unidec-xmc` alone does not install
_PACKAGES = {
    "validate": ("great_expectations",),
    "train": ("mlflow",),
    "index": ("faiss",),
    "evaluate": ("sklearn", "matplotlib"),
    "register": ("mlflow",),
}
_WRITTEN = (Path("data"), paths.RUNS, Path("outputs"), Path(".prefect"), Path(".dvc"))
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def check_before_work(params: Params, steps: Collection[str] = ALL_STEPS) -> None:
    """Check everything that these steps need and that can be checked in advance.

    Raises:
        UnidecError: lists every problem; class and exit code are those of the first problem.
    """
    checks: list[Callable[[Params], None]] = [partial(_check_packages, steps), _check_written]
    if "ingest" in steps:
        checks.append(check_source)
    if "tokens" in steps:
        checks.append(_check_encoder)
    if "train" in steps:
        checks += [_check_start, _check_devices]
    found: list[UnidecError] = []
    for check in checks:
        try:
            check(params)
        except UnidecError as error:
            found.append(error)
    if len(found) == 1:
        raise found[0]
    if found:
        listed = "\n".join(map(str, found))
        raise type(found[0])(f"{len(found)} problems\n{listed}")


def check_source(params: Params) -> None:
    """Check that the raw files exist where section `source`, or else `data.path`, says. Raises
    DataError: they are missing, or this user cannot read them.
    """
    if params.source.kind == "none":
        check_folder(params.data.path)
        return
    for path in source_files(params.source).values():
        if not os.access(path, os.R_OK):
            raise DataError(
                "cannot be read",
                where=path,
                got=f"user id {os.getuid()}",
                fix="mount or export it, or correct section source",
            )


def _check_encoder(params: Params) -> None:
    name = params.encoder.name
    is_on_hub = not is_known_here(name) and _HUB_NAME.fullmatch(name)
    if is_on_hub and os.environ.get("HF_HUB_OFFLINE") != "1":
        return  # the stage `tokens` downloads it
    folder = checked_encoder(params)
    lora = params.encoder.lora
    if lora.get("rank"):
        from unidec.model.lora import check_targets  # imports torch

        check_targets(folder, lora.get("targets", []))


def _check_start(params: Params) -> None:
    from unidec.pipeline.start import effective

    effective(params)  # reads data/start.json
    if start := params.encoder.start:
        try:
            read_manifest(start, "model", verify=False)
        except ArtifactError as error:
            raise ArtifactError(
                "no model to start from",
                where="encoder.start",
                got=start,
                expected=error.what,
                fix='give the folder of an exported model, or encoder.start: ""',
            ) from error


def _check_devices(params: Params) -> None:
    if params.device != "cuda" and params.run.devices == 1:
        return  # importing torch takes seconds
    from unidec.pipeline.launch import check_devices

    check_devices(params)


def _check_packages(steps: Collection[str], params: Params) -> None:
    needed = [name for step in steps for name in _PACKAGES.get(step, ())]
    if "train" in steps and params.encoder.lora.get("rank"):
        needed.append("peft")
    for name in needed:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a mere folder of this name is not a package
            raise missing_package(ModuleNotFoundError(name=name))


def _check_written(_: Params) -> None:
    database = sqlite_path(tracking_uri())
    check_writable([*_WRITTEN, *([database.parent] if database else [])])
