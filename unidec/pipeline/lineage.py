"""From a model back to what made it, from data to its models, and an old version's project restored."""

from __future__ import annotations

from typing import Any

from unidec.config import Params
from unidec.tracking import lineage as registry
from unidec.tracking.restore import restore as restore_version


def lineage(params: Params, source: str | None = None) -> dict[str, Any]:
    """What a model was made of; see `unidec.tracking.lineage.lineage`. None: the champion."""
    name = params.tracking.model_name
    return registry.lineage(source or f"models:/{name}@champion", model_name=name)


def models_of_data(params: Params, prefix: str) -> list[dict[str, Any]]:
    """The versions that data went into, by its hash; see `unidec.tracking.lineage.models_of_data`."""
    return registry.models_of_data(prefix, model_name=params.tracking.model_name)


def restore(params: Params, folder: str, source: str | None = None) -> dict[str, Any]:
    """An old version's code, parameters and lock file in a new folder; see `unidec.tracking.restore.restore`."""
    return restore_version(lineage(params, source), folder)
