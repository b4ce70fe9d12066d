"""Where the stages read and write, and what opens their artifacts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import unidec
from unidec.config import Params, fingerprint
from unidec.data.dataset import XMCDataset
from unidec.data.storage import files_sha256, read_manifest
from unidec.data.tokens import TokenCache

DATASET = Path("data/dataset")
VALIDATION = Path("data/validation")
TOKENS = Path("data/tokens")
PROPENSITY = Path("data/propensity")
LABEL_GRAPH = Path("data/label_graph")
CACHE = Path("data/cache")
RUNS = Path("runs")
MODEL = Path("outputs/model")
BUNDLE = Path("outputs/bundle")
METRICS = Path("outputs/metrics.json")
PLOTS = Path("outputs/plots")
PREDICTIONS = Path("outputs/predictions.parquet")
REPORT = Path("outputs/report.html")


def open_dataset() -> XMCDataset:
    """The ingested data set; hashes were checked when it was written and are not read again here."""
    return XMCDataset.open(DATASET, verify=False)


def open_tokens(which: str) -> TokenCache:
    """Token cache of "queries" or "labels"."""
    return TokenCache.open(TOKENS / which, verify=False)


def run_folder(params: Params) -> Path:
    """The folder of the training that these parameters, this data and this code make.

    What only says where it runs or is shown (`device`, `tracking`, `index`) leaves the name as it is.
    """
    parts = {
        "params": fingerprint(params, "seed", "tokens", "encoder", "model", "pool", "loss", "optim"),
        "dataset": open_dataset().sha256,
        "code": _code_sha256(),
    }
    for which in ("queries", "labels"):
        files = read_manifest(TOKENS / which, "tokens", 1, verify=False)["files"]
        parts[which] = files_sha256({name: entry["sha256"] for name, entry in files.items()})
    return RUNS / files_sha256(parts)[:16]


def _code_sha256() -> str:
    """Of the modules that decide what a training becomes."""
    root = Path(unidec.__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*(root / "model").glob("*.py"), *(root / "training").glob("*.py")]):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
