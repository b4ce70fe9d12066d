"""Stage `refresh_labels`: the champion with the labels of today -> outputs/refreshed; nothing is trained.

Legend: n queries of a split, L labels, K places.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import scipy.sparse as sp

from unidec.config import Params
from unidec.data.dataset import Text, XMCDataset
from unidec.data.propensity import frequency_group, inverse_propensity, label_counts
from unidec.data.raw import SPLITS
from unidec.data.tokens import encode_texts
from unidec.evaluation.metrics import evaluate, filtered_truth
from unidec.pipeline import paths
from unidec.pipeline.ranking import K, NeighboursBy, headline, pair_keys, training_neighbours
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.neighbours import Neighbours
from unidec.retrieval.relabel import LabelChange, with_labels
from unidec.tracking.fetch import fetch_bundle
from unidec.tracking.promotion import known_version
from unidec.tracking.store import open_client, tracking_uri
from unidec.training.precision import choose_device

_NEW_AT = (10, 100)
_TEXTS_AT_ONCE = 256  # they are encoded in one go


def refresh_labels(params: Params, version: str | int = "champion") -> dict[str, Any]:
    """Give a registered bundle the label set of data/dataset: new labels answer from their text, removed ones leave.

    Where training queries vote, today's do: also a new label has votes then. Model and blend stay as they are.

    Args:
        params: all parameters.
        version: number or alias of the version that is refreshed.

    Returns:
        {"changed", "bundle", "parent": version, "added", "removed", "renamed", "kept", "reason", "validation": metrics,
        "new_labels": {"R@10", "R@100", "positives"} of the validation split}; without a change only the first three,
        "bundle" None, and the reason.

    Raises:
        ConfigError: no such version. ArtifactError: its bundle is damaged. DataError: no labels.
    """
    parent = known_version(open_client(tracking_uri()), params.tracking.model_name, version)
    device = str(choose_device(params.device))
    bundle = Bundle.load(fetch_bundle(f"models:/{parent.name}/{parent.version}", paths.BUNDLES), device=device)
    dataset = paths.open_dataset()
    texts = dataset.label_texts(text=cast(Text, bundle.info.text))
    change = LabelChange.of(bundle, dataset.label_uids(), texts, dataset.label_texts())
    same_data = bundle.info.dataset.get("sha256") == dataset.sha256
    said: dict[str, Any] = {"changed": False, "bundle": None, "parent": str(parent.version)}
    if same_data or not (change or bundle.neighbours is not None):
        return said | {"reason": f"version {parent.version} has {'this data set' if same_data else 'these labels'}"}
    counts = change.counts
    facts: dict[str, Any] = {
        "neighbours": _voters(bundle, dataset), "dataset": {"name": dataset.name, "sha256": dataset.sha256},
        "card": bundle.info.card | {"refreshed": {"parent": bundle.sha256, "version": str(parent.version), **counts}},
    }  # fmt: skip
    after = Bundle.load(with_labels(bundle, paths.REFRESHED, change, **facts), verify=False, device=device)
    metrics = _measured(after, dataset, change, params)
    if metrics:  # once more: the bundle says what it is worth
        with_labels(bundle, paths.REFRESHED, change, **facts, metrics=metrics)
    reason = f"{counts['added']} labels are new, {counts['removed']} gone, {counts['renamed']} renamed"
    return said | counts | {"changed": True, "bundle": str(paths.REFRESHED), "reason": reason} | {
        name: metrics.get(name, {}) for name in ("validation", "new_labels")
    }  # fmt: skip


def _voters(bundle: Bundle, dataset: XMCDataset) -> Neighbours | None:
    """Today's training queries, compared as in the bundle, where any vote there."""
    rows, knn = dataset.rows("train"), bundle.info.knn
    if bundle.neighbours is None or knn is None or not len(rows):
        return None
    texts = dataset.query_texts(rows, cast(Text, bundle.info.text))
    tokens = encode_texts(texts, bundle.model.tokenizer_folder, bundle.model.max_length)
    by: NeighboursBy = "model" if bundle.words is None else "words"
    return training_neighbours(bundle.model, dataset, "fp32", knn.vote, by, tokens)


def _measured(bundle: Bundle, dataset: XMCDataset, change: LabelChange, params: Params) -> dict[str, dict[str, float]]:
    """What the bundle is worth on the validation split, and its new labels among all others; {} without such a split.

    Returns:
        {"validation": the headline, "new_labels": {"positives", "R@10", "R@100"}}: recall of new labels alone, over
        all their positives.
    """
    rows = dataset.rows("validation")
    if not len(rows):
        return {}
    filters = dataset.filter_pairs[rows]
    truth = filtered_truth(dataset.relevance[rows], filters)
    labels = _answers(bundle, dataset, rows, filters)
    counted = np.flatnonzero(dataset.split_N != SPLITS.index("test"))
    counts_L = label_counts(dataset.relevance, counted)
    inverse_L = inverse_propensity(counts_L, len(counted), params.data.propensity_a, params.data.propensity_b)
    found = {"validation": headline(evaluate(labels, truth, inverse_L, frequency_group(counts_L)))}
    new = np.flatnonzero(change.source_L < 0)
    wanted = sp.csr_matrix(truth[:, new] > 0)
    if wanted.nnz:
        place_L = np.full(dataset.num_labels, -1)
        place_L[new] = np.arange(len(new))
        at_NK = np.where(labels >= 0, place_L[labels], -1)
        query, rank = np.nonzero(at_NK >= 0)
        hit_P = np.asarray(wanted[query, at_NK[query, rank]]).ravel().astype(bool)
        recalls = {f"R@{k}": 100.0 * float(hit_P[rank < k].sum()) / wanted.nnz for k in _NEW_AT}
        found["new_labels"] = {"positives": float(wanted.nnz), **recalls}
    return found


def _answers(bundle: Bundle, dataset: XMCDataset, rows: np.ndarray, filters: sp.csr_matrix) -> np.ndarray:
    """The first `K` labels of each query without filtered pairs, int64 [n, K], -1 where there are none."""
    parts = []
    for begin in range(0, len(rows), _TEXTS_AT_ONCE):
        some = slice(begin, begin + _TEXTS_AT_ONCE)
        asked = bundle.encode(dataset.query_texts(rows[some], cast(Text, bundle.info.text)))
        parts.append(bundle.rank(asked.de_BD, asked.clf_BD, K, pair_keys(filters[some]), asked.words_BF).rows)
    return np.concatenate(parts)
