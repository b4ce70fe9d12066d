"""A bundle on the data set's test split as it is now: ranked from texts with its own tokenizer, labels mapped by uid.

Legend: N test queries, K places, L labels of the data set, B labels of a bundle.
"""

from __future__ import annotations

import numpy as np

from unidec.data.dataset import XMCDataset
from unidec.evaluation.metrics import moved_up
from unidec.pipeline.ranking import K
from unidec.progress import progress
from unidec.retrieval.bundle import Bundle

_AT_ONCE = 1024  # queries between two steps of the progress line
_MOST_REMOVED = 3 * K  # labels that the data set has no more: so many places are searched beyond K at most


def rank_test_split(bundle: Bundle, dataset: XMCDataset) -> tuple[np.ndarray, dict[str, int]]:
    """The bundle's first `K` labels for each test query, as `ranked` has them, and {"unknown": labels of the data set
    that the bundle does not know, "removed": labels of the bundle that the data set lacks}."""
    row_of = {uid: row for row, uid in enumerate(dataset.label_uids())}
    row_of_B = np.array([row_of.get(uid, -1) for uid in bundle.uids.to_pylist()], dtype=np.int64)
    removed = int((row_of_B < 0).sum())
    unknown = dataset.num_labels - (len(row_of_B) - removed)
    return ranked(bundle, dataset, dataset.rows("test"), row_of_B), {"unknown": unknown, "removed": removed}


def own_texts(bundle: Bundle, dataset: XMCDataset, rows: np.ndarray) -> list[str]:
    """Queries as the bundle's model was trained to read them."""
    return dataset.query_texts(rows, "title+content" if bundle.info.text == "title+content" else "title")


def ranked(bundle: Bundle, dataset: XMCDataset, rows: np.ndarray, row_of_B: np.ndarray) -> np.ndarray:
    """The first `K` labels of some queries without filtered pairs: int32 [N, K], rows of the data set's labels, best
    first, -1 = none; `row_of_B`: the data set's row of each of the bundle's labels, -1 = it has none."""
    texts = own_texts(bundle, dataset, rows)
    filtered, uids = dataset.filter_pairs[rows], dataset.labels["uid"]
    width = K + min(int((row_of_B < 0).sum()), _MOST_REMOVED)
    parts = [np.zeros((0, K), dtype=np.int32)]
    with progress(total=len(texts), desc=f"queries by {bundle.sha256[:8]}", unit="query") as bar:
        for start in range(0, len(texts), _AT_ONCE):
            some = texts[start : start + _AT_ONCE]
            exclude = [uids.take(filtered[i].indices).to_pylist() for i in range(start, start + len(some))]
            found = bundle.predict_arrays(some, width, exclude).rows
            mapped_NK = np.where(found >= 0, row_of_B[np.maximum(found, 0)], -1)
            parts.append(moved_up(mapped_NK, K).astype(np.int32))
            bar.update(len(some))
    return np.concatenate(parts)
