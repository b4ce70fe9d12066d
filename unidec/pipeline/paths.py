"""Paths that the stages read and write, and functions that open their artifacts."""

from __future__ import annotations

from pathlib import Path

from scipy.sparse import csr_matrix

from unidec.config import Params
from unidec.data import dataset
from unidec.data.dataset import XMCDataset
from unidec.data.label_graph import load_label_graph
from unidec.data.propensity import Propensity, load_propensity
from unidec.data.storage import read_manifest
from unidec.data.tokens import TokenCache
from unidec.errors import ArtifactError
from unidec.tracking.fetch import COPIES
from unidec.tracking.store import project_folder

DATASET = Path("data/dataset")
VALIDATION = Path("data/validation")
CHANGE = Path("data/change")  # comparison with the champion's training data; not tracked by DVC
TOKENS = Path("data/tokens")
PROPENSITY = Path("data/propensity")
LABEL_GRAPH = Path("data/label_graph")
CACHE = project_folder() / "data" / "cache"  # shared by all experiments of a DVC queue
RUNS = Path("runs")
BUNDLES = COPIES
DRIFT = Path("runs/drift")
MONITOR = Path("runs/monitor")
MODEL = Path("outputs/model")
BUNDLE = Path("outputs/bundle")
REFRESHED = Path("outputs/refreshed")  # a champion with other labels; not tracked by DVC
METRICS = Path("outputs/metrics.json")
PLOTS = Path("outputs/plots")
PREDICTIONS = Path("outputs/predictions.parquet")
REPORT = Path("outputs/report.html")


def open_dataset(verify: bool = True) -> XMCDataset:
    """The ingested data set. Like all artifacts below, it is verified once per process."""
    return XMCDataset.open(DATASET, verify)


def open_tokens(which: str, verify: bool = True) -> TokenCache:
    """Token cache of "queries" or "labels".

    Raises:
        ArtifactError: it is damaged, or has another number of texts than the data set.
    """
    cache = TokenCache.open(TOKENS / which, verify)
    _check_rows(len(cache), which, TOKENS / which, "tokens")
    return cache


def open_propensity() -> Propensity:
    """Propensities of the labels; raises as `open_tokens`."""
    propensity = load_propensity(PROPENSITY)
    _check_rows(len(propensity.inverse_L), "labels", PROPENSITY, "propensity")
    return propensity


def open_label_graph(params: Params, verify: bool = True) -> csr_matrix | None:
    """The label graph; None if training does not use it; raises as `open_tokens`."""
    if not params.reads_label_graph:
        return None
    graph = load_label_graph(LABEL_GRAPH, verify)
    _check_rows(graph.shape[0], "labels", LABEL_GRAPH, "label-graph")
    return graph


def _check_rows(num_rows: int, which: str, path: Path, command: str) -> None:
    expected = read_manifest(DATASET, dataset.KIND, dataset.VERSION, verify=False)["meta"].get(f"num_{which}")
    if num_rows != expected:
        raise ArtifactError(
            "built from another data set", where=str(path), got=f"{num_rows} {which}",
            expected=f"{expected}, as in {DATASET}", fix=f"run `unidec data {command}` again",
        )  # fmt: skip
