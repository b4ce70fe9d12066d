"""Where the stages read and write, and what opens their artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

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

Made = TypeVar("Made")
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


def open_dataset(verify: bool = True) -> XMCDataset:
    """The ingested data set; as all that follow, its bytes are verified once in a process."""
    return XMCDataset.open(DATASET, verify)


def open_tokens(which: str, verify: bool = True) -> TokenCache:
    """Token cache of "queries" or "labels".

    Raises:
        ArtifactError: damaged, or made of another number of texts than the data set has.
    """
    cache = TokenCache.open(TOKENS / which, verify)
    return _made_of(cache, len(cache), which, TOKENS / which, "tokens")


def open_propensity() -> Propensity:
    """Propensities of the labels; raises as `open_tokens`."""
    propensity = load_propensity(PROPENSITY)
    return _made_of(propensity, len(propensity.inverse_L), "labels", PROPENSITY, "propensity")


def open_label_graph(params: Params, verify: bool = True) -> csr_matrix | None:
    """The label graph where training reads it; raises as `open_tokens`."""
    if not params.reads_label_graph:
        return None
    graph = load_label_graph(LABEL_GRAPH, verify)
    return _made_of(graph, graph.shape[0], "labels", LABEL_GRAPH, "label-graph")


def _made_of(made: Made, num_rows: int, which: str, path: Path, command: str) -> Made:
    expected = read_manifest(DATASET, dataset.KIND, dataset.VERSION, verify=False)["meta"].get(f"num_{which}")
    if num_rows != expected:
        raise ArtifactError(
            "made from another data set", where=str(path), got=f"{num_rows} {which}",
            expected=f"{expected}, as {DATASET} has", fix=f"run `unidec {command}` again",
        )  # fmt: skip
    return made
