"""A bundle on the data set's test split as it is now: ranked from texts with its own tokenizer, labels mapped by uid.

Rankings are kept in runs/rankings by bundle, data set and code: a champion is ranked once for each version of the data.

Legend: N test queries, K places, L labels of the data set, B labels of a bundle.
"""

from __future__ import annotations

import functools
import hashlib
import io
from dataclasses import dataclass

import numpy as np

from unidec.data.dataset import XMCDataset
from unidec.data.storage import load_array, write_bytes_atomic
from unidec.errors import ArtifactError
from unidec.evaluation.metrics import moved_up
from unidec.pipeline import paths
from unidec.pipeline.ranking import K
from unidec.progress import progress
from unidec.retrieval.bundle import Bundle
from unidec.version import PACKAGE

RANKINGS = paths.RUNS / "rankings"
_AT_ONCE = 1024  # queries between two steps of the progress line
_MOST_REMOVED = 3 * K  # labels that the data set has no more: so many places are searched beyond K at most
_ENOUGH = 30  # rankings kept


@dataclass(frozen=True)
class Contestant:
    """A bundle's answers to the test queries.

    Attributes:
        labels: int32 [N, K], rows of the data set's labels, best first, -1 = none.
        unknown: labels of the data set that the bundle does not know. removed: labels of it that the data set lacks.
    """

    labels: np.ndarray
    unknown: int
    removed: int


def contestant(bundle: Bundle, dataset: XMCDataset) -> Contestant:
    """The bundle's first `K` labels for each test query, filtered pairs left out; from the cache where it is there."""
    row_of = {uid: row for row, uid in enumerate(dataset.label_uids())}
    row_of_B = np.array([row_of.get(uid, -1) for uid in bundle.uids.to_pylist()], dtype=np.int64)
    removed = int((row_of_B < 0).sum())
    unknown = dataset.num_labels - (len(row_of_B) - removed)
    rows = dataset.rows("test")
    path = RANKINGS / f"{bundle.sha256[:16]}-{dataset.sha256[:16]}-{_code_sha256()[:8]}.npy"
    try:
        labels = load_array(path, np.int32, ndim=2, mmap=False)
        if labels.shape == (len(rows), K):
            return Contestant(labels, unknown, removed)
    except ArtifactError:
        pass  # not there, or damaged: computed again
    labels = ranked(bundle, dataset, rows, row_of_B, removed)
    buffer = io.BytesIO()
    np.save(buffer, labels, allow_pickle=False)
    RANKINGS.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, buffer.getvalue())
    _purge()
    return Contestant(labels, unknown, removed)


def own_texts(bundle: Bundle, dataset: XMCDataset, rows: np.ndarray) -> list[str]:
    """Queries as the bundle's model was trained to read them."""
    return dataset.query_texts(rows, "title+content" if bundle.info.text == "title+content" else "title")


def ranked(bundle: Bundle, dataset: XMCDataset, rows: np.ndarray, row_of_B: np.ndarray, removed: int) -> np.ndarray:
    """The first `K` labels of some queries, int32 [N, K] as in `Contestant`; `row_of_B`: the data set's row of each."""
    texts = own_texts(bundle, dataset, rows)
    filtered, uids = dataset.filter_pairs[rows], dataset.labels["uid"]
    width = K + min(removed, _MOST_REMOVED)
    parts = [np.zeros((0, K), dtype=np.int32)]
    with progress(total=len(texts), desc=f"queries by {bundle.sha256[:8]}", unit="query") as bar:
        for start in range(0, len(texts), _AT_ONCE):
            some = texts[start : start + _AT_ONCE]
            exclude = [
                uids.take(filtered.indices[filtered.indptr[i] : filtered.indptr[i + 1]]).to_pylist()
                for i in range(start, start + len(some))
            ]
            found = bundle.predict_arrays(some, width, exclude)
            mapped_NK = np.where(found.rows >= 0, row_of_B[np.maximum(found.rows, 0)], -1)
            parts.append(moved_up(mapped_NK, K).astype(np.int32))
            bar.update(len(some))
    return np.concatenate(parts)


def _purge() -> None:
    """The newest rankings stay."""
    files = sorted(RANKINGS.glob("*.npy"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[_ENOUGH:]:
        file.unlink(missing_ok=True)


@functools.cache  # what this process runs, also when a file is edited meanwhile
def _code_sha256() -> str:
    """Of the modules that decide what a bundle answers."""
    root = PACKAGE
    digest = hashlib.sha256()
    for file in sorted(file for name in ("data", "model", "retrieval") for file in (root / name).rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
