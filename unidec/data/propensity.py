"""Inverse propensities and frequency groups of labels, computed from the training queries.

Shape legend: L labels.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unidec.data.chunks import blocks
from unidec.data.dataset import XMCDataset
from unidec.data.raw import SPLITS
from unidec.data.storage import REBUILD, load_array, read_manifest, verify_once, write_folder
from unidec.data.tokens import Ints
from unidec.errors import ArtifactError, DataError
from unidec.metric_names import GROUPS

KIND = "propensity"
VERSION = 1

# bounds of the frequency groups, in training queries of a label
_TORSO_FROM = 10
_HEAD_ABOVE = 100
_ROWS_AT_ONCE = 1 << 18  # rows whose pairs are copied at once


@dataclass(frozen=True)
class Propensity:
    """Inverse propensities and frequency groups of all labels, as stored by `build_propensity`.

    Attributes:
        inverse_L: float64 [L], inverse propensity of each label, at least 1.
        counts_L: int64 [L], number of training queries with the label.
        group_L: int8 [L], frequency group: 0 tail, 1 torso, 2 head.
        a, b: the data set's constants A and B.
    """

    inverse_L: NDArray[np.float64]
    counts_L: Ints
    group_L: NDArray[np.int8]
    a: float
    b: float

    @property
    def group_sizes(self) -> dict[str, int]:
        """Number of labels in each frequency group, by its name."""
        num_in_group = np.bincount(self.group_L, minlength=len(GROUPS)).tolist()
        return dict(zip(GROUPS, num_in_group, strict=True))


def inverse_propensity(
    label_counts_L: Any, num_train: int, a: float, b: float
) -> NDArray[np.float64]:
    """Inverse propensities `1 + C (N_l + B)^(-A)` with `C = (log N - 1)(B + 1)^A`, float64 [L].

    Every value is finite and at least 1: with fewer than three training queries C would be
    negative, and 0 is used; with B = 0 a label without training queries is treated as if it had
    one.

    Args:
        label_counts_L: N_l, number of training queries of each label [L], at least 0.
        num_train: N, number of training queries.
        a, b: A > 0 and B >= 0, properties of the data set (0.6, 2.6 Amazon; 0.5, 0.4 Wikipedia;
        0.55, 1.5 otherwise).

    Raises:
        DataError: a negative count, A <= 0 or B < 0.

    Source: Jain, Prabhu and Varma 2016, equation 2, as used by the extreme classification
    repository.
    """
    count_L = np.asarray(label_counts_L, dtype=np.float64)
    if not (count_L >= 0).all() or not a > 0 or not b >= 0:
        raise DataError(
            "propensities cannot be computed",
            got=(a, b),
            expected="label counts >= 0, A > 0 and B >= 0",
        )
    if b == 0:
        count_L = np.maximum(count_L, 1.0)
    log_queries = float(np.log(max(num_train, 1)))
    c = max(log_queries - 1.0, 0.0) * (b + 1.0) ** a
    return 1.0 + c * (count_L + b) ** -a


def frequency_group(label_counts_L: Any) -> NDArray[np.int8]:
    """Frequency group of each label, int8 [L]: 0 tail (below 10 training queries), 1 torso (10 to
    100), 2 head.
    """
    return np.digitize(label_counts_L, (_TORSO_FROM, _HEAD_ABOVE + 1)).astype(np.int8)


def label_counts(relevance: Any, rows: Ints) -> Ints:
    """For each label, the number of given rows of a CSR matrix [N, L] that have a value above 0 in
    its column: int64 [L].
    """
    count_L = np.zeros(relevance.shape[1], dtype=np.int64)
    for some in blocks(len(rows), _ROWS_AT_ONCE):
        block = relevance[rows[some]]
        count_L += np.bincount(block.indices[block.data > 0], minlength=len(count_L))
    return count_L


def training_counts(dataset: XMCDataset) -> Ints:
    """Number of queries of the training split with each label, int64 [L]; validation queries are
    not counted.
    """
    return label_counts(dataset.relevance, dataset.rows("train"))


def build_propensity(dataset: XMCDataset, a: float, b: float, out: str | os.PathLike[str]) -> Path:
    """Store label counts, inverse propensities and frequency groups in a folder, and return its
    path.

    Queries held out for validation are counted, so that figures are comparable with published ones;
    test queries are not.

    Raises:
        DataError: A or B is out of range (`inverse_propensity`).
        ArtifactError: the folder cannot be written.
    """
    train_rows = np.flatnonzero(dataset.split_N != SPLITS.index("test"))
    count_L = label_counts(dataset.relevance, train_rows)
    inverse_L = inverse_propensity(count_L, len(train_rows), a, b)
    meta = {"a": float(a), "b": float(b), "num_train": len(train_rows), "num_labels": len(count_L)}
    with write_folder(out, KIND, VERSION, meta) as folder:
        np.save(folder.path / "inverse_propensity.npy", inverse_L)
        np.save(folder.path / "label_counts.npy", count_L)
        np.save(folder.path / "group.npy", frequency_group(count_L))
    return Path(out)


def load_propensity(path: str | os.PathLike[str], verify: bool = True) -> Propensity:
    """Read a folder written by `build_propensity`.

    Raises:
        ArtifactError: the folder is missing or damaged, or its arrays have different lengths.
    """
    root = Path(path)
    with verify_once(root, verify) as needed:
        meta = read_manifest(root, KIND, VERSION, needed)["meta"]
    inverse_L = np.array(load_array(root / "inverse_propensity.npy", np.float64))
    count_L = np.array(load_array(root / "label_counts.npy", np.int64))
    group_L = np.array(load_array(root / "group.npy", np.int8))
    lengths = [len(inverse_L), len(count_L), len(group_L)]
    expected = meta.get("num_labels")
    if lengths != [expected] * 3:
        raise ArtifactError(
            "arrays of different lengths", where=root, got=lengths, expected=expected, fix=REBUILD
        )
    return Propensity(inverse_L, count_L, group_L, float(meta["a"]), float(meta["b"]))
