"""Paths that the stages read and write, and functions that open their artifacts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from scipy.sparse import csr_matrix

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.label_graph import load_label_graph
from unidec.data.propensity import Propensity, load_propensity
from unidec.data.tokens import TokenCache
from unidec.errors import ArtifactError
from unidec.tracking.fetch import COPIES
from unidec.tracking.store import project_folder

RELATIVE: dict[str, str | Path] = {
    "DATASET": "data/dataset",
    "VALIDATION": "data/validation",
    "CHANGE": "data/change",  # comparison with the champion's training data; not tracked by DVC
    "TOKENS": "data/tokens",
    "PROPENSITY": "data/propensity",
    "LABEL_GRAPH": "data/label_graph",
    "INPUTS": "data/inputs",
    "CACHE": "data/cache",
    "START": "data/start.json",
    "RUNS": "runs",
    "TRIALS": "runs/own",  # trainings with separate parameters, each in a project folder
    "BUNDLES": COPIES,
    "DRIFT": "runs/drift",
    "MONITOR": "runs/monitor",
    "MODEL": "outputs/model",
    "BUNDLE": "outputs/bundle",
    "REFRESHED": "outputs/refreshed",  # a champion with other labels; not tracked by DVC
    "METRICS": "outputs/metrics.json",
    "PLOTS": "outputs/plots",
    "PREDICTIONS": "outputs/predictions.parquet",
    "REPORT": "outputs/report.html",
}
_root: ContextVar[Path | None] = ContextVar("root", default=None)  # None: the working folder


def __getattr__(name: str) -> Path:
    """`paths.DATASET` and the other paths, below the root of this thread."""
    if name not in RELATIVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _path(name)


def _path(name: str) -> Path:
    root = _root.get()
    if name == "CACHE" and root is None:
        root = project_folder()  # shared by all experiments of a DVC queue
    return (root or Path()) / RELATIVE[name]


@contextlib.contextmanager
def root(folder: Path) -> Iterator[None]:
    """Inside the block, stages that this thread runs read and write below `folder` instead of the
    working folder.
    """
    token = _root.set(folder)
    try:
        yield
    finally:
        _root.reset(token)


def working_folder() -> Path:
    """The folder that the paths are relative to."""
    return _root.get() or Path()


def open_dataset(verify: bool = True) -> XMCDataset:
    """The ingested data set. Like all artifacts below, it is verified once per process."""
    return XMCDataset.open(_path("DATASET"), verify)


def open_tokens(which: str, verify: bool = True) -> TokenCache:
    """Token cache of "queries" or "labels".

    Raises:
        ArtifactError: it is damaged, or has another number of texts than the data set.
    """
    folder = _path("TOKENS") / which
    cache = TokenCache.open(folder, verify)
    _check_rows(len(cache), which, folder, "tokens")
    return cache


def open_propensity() -> Propensity:
    """Propensities of the labels; raises as `open_tokens`."""
    folder = _path("PROPENSITY")
    propensity = load_propensity(folder)
    _check_rows(len(propensity.inverse_L), "labels", folder, "propensity")
    return propensity


def open_label_graph(params: Params, verify: bool = True) -> csr_matrix | None:
    """The label graph; None if training does not use it; raises as `open_tokens`."""
    if not params.reads_label_graph:
        return None
    folder = _path("LABEL_GRAPH")
    graph = load_label_graph(folder, verify)
    _check_rows(graph.shape[0], "labels", folder, "label-graph")
    return graph


def _check_rows(num_rows: int, which: str, path: Path, command: str) -> None:
    dataset = open_dataset(verify=False)
    expected = getattr(dataset, f"num_{which}")
    if num_rows != expected:
        raise ArtifactError(
            "built from another data set",
            where=path,
            got=f"{num_rows} {which}",
            expected=f"{expected}, as in {dataset.path}",
            fix=f"run `unidec data {command}` again",
        )
