"""The MLflow run of a training: its name, tags and parameters."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from unidec.config import RESULTS, Params, flatten, keys_deciding
from unidec.pipeline import paths
from unidec.pipeline.start import read_start, start_tags
from unidec.tracking.provenance import DVC_TAG, code_tags, dvc_hash, unknown_code
from unidec.tracking.run import TRIAL_TAG, Tracker, run_tags


def model_params(
    flat: Mapping[str, str | int | float], is_warm: bool
) -> dict[str, str | int | float]:
    """The parameters (by dotted keys) that determine a result, and the recipe's name; those of
    section `warm` only for a warm start.
    """
    return {key: flat[key] for key in ["recipe", *keys_deciding(*RESULTS, warm=is_warm)]}


def begin_tracking(params: Params, folder: Path, accepted: Collection[str]) -> list[str]:
    """Start or resume the MLflow run of the training in `folder`; returns messages for the user."""
    dataset = paths.open_dataset()
    experiment = os.environ.get("DVC_EXP_NAME", "")  # set by `dvc exp run` and `dvc queue`
    tags = (
        code_tags()
        | start_tags()
        | {
            "dataset.sha256": dataset.sha256,
            "run.folder": folder.name,
            "accepted": "; ".join(accepted)[:5000],
            "dvc_experiment": experiment,
            f"{DVC_TAG}{paths.DATASET}": dvc_hash(str(paths.DATASET)) or "",
        }
    )
    data = {"name": dataset.name, "digest": dataset.sha256, "path": str(paths.DATASET)}
    data |= {
        key: dataset.manifest["meta"][key] for key in ("num_queries", "num_labels", "num_pairs")
    }
    recipe = params.recipe or params.model.heads
    name = f"{dataset.name} {recipe} {_how(experiment, folder)}"
    logged = model_params(flatten(params), read_start() is not None)
    tags = {key: tag for key, tag in tags.items() if tag}
    Tracker(params.tracking.experiment).start(folder, logged, tags, data, name)
    reason = unknown_code(tags)
    return [f"git does not answer, so the gate will refuse the model: {reason}"] if reason else []


def _how(experiment: str, folder: Path) -> str:
    """Suffix of an MLflow run's name: the DVC experiment; or else the trial or `dvc repro`, if any,
    and the run.
    """
    run = folder.name[:6]
    if experiment:
        return experiment
    if trial := run_tags().get(TRIAL_TAG):
        return f"trial {trial[:200]} {run}"
    return f"dvc repro {run}" if os.environ.get("DVC_STAGE") else run
