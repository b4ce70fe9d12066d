"""Where the stages read and write, and what opens their artifacts."""

from __future__ import annotations

import os
from pathlib import Path

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.tokens import TokenCache
from unidec.ops.fetch import COPIES
from unidec.ops.tracking_store import project_folder
from unidec.stages.start_file import effective, read_start
from unidec.training import identity

DATASET = Path("data/dataset")
VALIDATION = Path("data/validation")
CHANGE = Path("data/change")  # against what the champion was trained on; DVC knows nothing of it
TOKENS = Path("data/tokens")
PROPENSITY = Path("data/propensity")
LABEL_GRAPH = Path("data/label_graph")
CACHE = project_folder() / "data" / "cache"  # shared by the experiments of a queue
RUNS = Path("runs")
BUNDLES = COPIES
DRIFT = Path("runs/drift")
MONITOR = Path("runs/monitor")
MODEL = Path("outputs/model")
BUNDLE = Path("outputs/bundle")
REFRESHED = Path("outputs/refreshed")  # a champion with other labels; DVC knows nothing of it
METRICS = Path("outputs/metrics.json")
PLOTS = Path("outputs/plots")
PREDICTIONS = Path("outputs/predictions.parquet")
REPORT = Path("outputs/report.html")


def from_project(path: str) -> str:
    """A path inside the project, relative to it, as every run logs it: a trial works in `runs/own/<fingerprint>/`."""
    here = Path.cwd()
    project = here.parents[2] if here.parts[-3:-1] == ("runs", "own") else here
    full = Path(os.path.abspath(path))
    return full.relative_to(project).as_posix() if full.is_relative_to(project) else str(full)


def open_dataset() -> XMCDataset:
    """The ingested data set; hashes were checked when it was written and are not read again here."""
    return XMCDataset.open(DATASET, verify=False)


def open_tokens(which: str) -> TokenCache:
    """Token cache of "queries" or "labels"."""
    return TokenCache.open(TOKENS / which, verify=False)


def run_identity(params: Params) -> dict[str, str]:
    """What decides the training that these parameters, this data, this code and this start make."""
    start = read_start().bundle_sha256 or None
    return identity.run_identity(
        effective(params), open_dataset(), open_tokens("queries"), open_tokens("labels"), start
    )


def run_folder(params: Params) -> Path:
    """The folder of that training.

    What only says where it runs or is shown (`device`, `run`, `tracking`, `index`) leaves the name as it is.
    """
    return RUNS / identity.identity_sha256(run_identity(params))[:16]
