"""What a peer gets: sparse TF-IDF features, relevance and sizes, made once for a data set and kept on disk.

Shape legend: M training queries, n queries of a split that is predicted, L labels, F words.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from unidec.data.dataset import Split, Text, XMCDataset
from unidec.data.storage import read_manifest, write_folder, write_json
from unidec.errors import ArtifactError, DataError

KIND, VERSION = "peer_task", 1
K = 100  # labels that are left after filters


@dataclass(frozen=True)
class PeerTask:
    """A task on disk.

    Attributes:
        path: holds `X.train`, `Y.train`, `labels` and `X.<split>` as scipy .npz, float32 CSR.
        splits: those that are predicted. width: labels to predict, so that K are left after filters.
        facts: of the data. seconds: that the features took to make.
    """

    path: Path
    splits: tuple[str, ...]
    width: int
    facts: dict[str, Any]
    seconds: float

    def matrix(self, name: str) -> sp.csr_matrix:
        """One matrix, by the name of its file."""
        return sp.csr_matrix(sp.load_npz(self.path / f"{name}.npz"))


def training_rows(dataset: XMCDataset, train_on: str) -> NDArray[np.int64]:
    """Rows of "train" or "train+validation", ascending."""
    parts: list[Split] = ["train"] if train_on == "train" else ["train", "validation"]
    return np.sort(np.concatenate([dataset.rows(part) for part in parts]))


def predicted_splits(dataset: XMCDataset, train_on: str) -> tuple[Split, ...]:
    """The test split, and the validation split unless it was trained on or is empty."""
    also = train_on == "train" and dataset.rows("validation").size > 0
    return ("test", "validation") if also else ("test",)


def search_width(dataset: XMCDataset, train_on: str) -> int:
    """Labels to search for so that K are left after filters: int, at most L."""
    splits = predicted_splits(dataset, train_on)
    most = max(int(np.diff(dataset.filter_pairs[dataset.rows(split)].indptr).max(initial=0)) for split in splits)
    return min(K + most, dataset.num_labels)


def peer_task(dataset: XMCDataset, text: Text, train_on: str, folder: Path) -> PeerTask:
    """The task of this data set, text and training split; made where `folder` does not hold it.

    TF-IDF (sublinear, without English stop words) is fitted on the training queries' texts. Several processes may ask
    at once: one makes it, the others wait.

    Raises:
        DataError: no queries to train on or to predict, or texts without a single word.
    """
    from filelock import FileLock

    key = hashlib.sha256("\n".join([dataset.sha256, text, train_on, str(VERSION)]).encode()).hexdigest()[:16]
    path = folder / key
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{key}.lock"):
        try:
            meta = read_manifest(path, KIND, VERSION)["meta"]
        except ArtifactError:  # not there, or damaged
            start = time.perf_counter()
            meta = _write(dataset, text, train_on, path)
            write_json(folder / f"{key}.seconds.json", round(time.perf_counter() - start, 2))
    seconds = float((folder / f"{key}.seconds.json").read_text()) if (folder / f"{key}.seconds.json").is_file() else 0.0
    return PeerTask(path, tuple(meta["splits"]), int(meta["search_width"]), meta["facts"], seconds)


def _write(dataset: XMCDataset, text: Text, train_on: str, path: Path) -> dict[str, Any]:
    from unidec.evaluation.tfidf import fit_words

    train_rows = training_rows(dataset, train_on)
    splits = predicted_splits(dataset, train_on)
    sizes = [len(train_rows), *(dataset.rows(split).size for split in splits)]
    if not all(sizes):
        raise DataError("an empty split", where=str(dataset.path), got=f"{sizes} queries in train, {', '.join(splits)}")
    vectorizer, train_MF = fit_words(dataset.query_texts(train_rows, text), str(dataset.path))
    matrices = {
        "X.train": train_MF,
        "Y.train": (dataset.relevance[train_rows] > 0).astype(np.float32),
        "labels": vectorizer.transform(dataset.label_texts(None, text)),
    }
    for split in splits:
        matrices[f"X.{split}"] = vectorizer.transform(dataset.query_texts(dataset.rows(split), text))
    meta = {
        "splits": list(splits),
        "search_width": search_width(dataset, train_on),
        "facts": {
            "dataset": dataset.name,
            "dataset_sha256": dataset.sha256,
            "text": text,
            "train_on": train_on,
            "num_train": len(train_rows),
            "num_words": train_MF.shape[1],
        },
    }
    with write_folder(path, KIND, VERSION, meta) as out:
        for name, matrix in matrices.items():
            sp.save_npz(out.path / f"{name}.npz", sp.csr_matrix(matrix))
    return meta
