"""Label changes without training: write a bundle with other labels (default: outputs/refreshed)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import read_info
from unidec.bundle.label_change import LabelChange, is_estimated, with_labels
from unidec.bundle.label_file import LabelText
from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.evaluation.metrics import truth_of
from unidec.pipeline import paths
from unidec.pipeline.gating import own_texts
from unidec.pipeline.ranking import NeighboursBy, training_neighbours
from unidec.pipeline.registration import Registration, parent_version
from unidec.pipeline.registration import register as register_bundle
from unidec.ranking.neighbours import Neighbours
from unidec.tracking.fetch import fetch_bundle
from unidec.tracking.promotion import known_version
from unidec.tracking.store import open_client
from unidec.training.precision import choose_device

MOST_EXAMPLES = 16  # of a label; measured: benchmarks/results/label-changes.md


@dataclass(frozen=True, kw_only=True)
class ChangedLabels:
    """Result of a label change.

    Attributes:
        changed: whether any label differs. bundle: the new bundle's folder; None: nothing was
        written.
        added, removed, renamed, kept: numbers of labels.
        parent, reason: by `refresh_labels`: the refreshed version, and a sentence on what changed
        or why nothing did.
        labels, estimated: by `change_labels`: numbers of all labels, and of those whose classifier
        rows are estimates.
        registered: by `change_labels`: the new version.
    """

    changed: bool
    bundle: str | None
    parent: str | None = None
    labels: int | None = None
    added: int | None = None
    removed: int | None = None
    renamed: int | None = None
    kept: int | None = None
    estimated: int | None = None
    reason: str | None = None
    registered: Registration | None = None


def change_labels(
    params: Params,
    source: str | os.PathLike[str],
    *,
    add: Sequence[LabelText] = (),
    remove: Sequence[str] = (),
    update: Sequence[LabelText] = (),
    examples: Sequence[LabelText] = (),
    out: str | os.PathLike[str] | None = None,
    register: bool = False,
    dry_run: bool = False,
) -> ChangedLabels:
    """Write a bundle in which labels were added, removed or updated; predictions of other labels do
    not change.

    Args:
        params: all parameters; only the device and the registry's settings are used.
        source: a bundle's folder, models:/name@alias or models:/name/version; it is not changed.
        add, remove, update, examples: see `LabelChange.edit`.
        out: folder of the new bundle; None: outputs/refreshed.
        register: register it as challenger; the source bundle must be registered.
        dry_run: report what would change, and write nothing.

    Raises:
        DataError: labels that do not fit the bundle's; nothing was written.
        ConfigError: no such bundle or version, `out` is the bundle itself, or the source is not
        registered.
        ArtifactError: the bundle is damaged, or the new one cannot be written.
    """
    out = paths.REFRESHED if out is None else Path(out)
    # writing the new bundle checks the hashes of the source
    bundle = _open(f"{source}", params, verify=dry_run)
    if register and not dry_run:
        # report an unregistered source before doing any work
        parent_version(params, bundle.sha256, bundle.path)
    change = LabelChange.edit(bundle, add, remove, update, examples)
    counts: Any = change.counts
    result = ChangedLabels(changed=bool(change), bundle=None, labels=len(change.uids), **counts)
    if dry_run or not change:
        return result
    card = bundle.info.card | {"refreshed": {"parent": bundle.sha256, **counts}}
    info = read_info(with_labels(bundle, out, change, card=card))
    estimated = sum(end - start for start, end in info.estimated)
    registered = register_bundle(params, out) if register else None
    return replace(result, bundle=str(out), estimated=estimated, registered=registered)


def _open(address: str, params: Params, verify: bool = True) -> Bundle:
    device = choose_device(params.device).type
    return Bundle.load(fetch_bundle(address), verify=verify, device=device)


def refresh_labels(params: Params, version: str | int = "champion") -> ChangedLabels:
    """Give a registered bundle the label set of data/dataset and, if training queries vote in it,
    the current training queries. Training queries of labels without a trained classifier row are
    their example queries.

    Args:
        params: all parameters.
        version: number or alias of the version to refresh.

    Raises:
        ConfigError: no such version. ArtifactError: its bundle is damaged. DataError: the data set
        has no labels.
    """
    parent = known_version(open_client(), params.tracking.model_name, version)
    bundle = _open(f"models:/{parent.name}/{parent.version}", params)
    dataset = paths.open_dataset()
    change = LabelChange.of(
        bundle,
        dataset.label_uids(),
        dataset.label_texts(text=bundle.info.text),
        dataset.label_texts(),
        _examples(bundle, dataset),
    )
    same_data = bundle.info.dataset.get("sha256") == dataset.sha256
    number = str(parent.version)
    counts: Any = change.counts
    if same_data or not (change or bundle.neighbours is not None):
        reason = f"version {number} already has {'this data set' if same_data else 'these labels'}"
        return ChangedLabels(changed=False, bundle=None, parent=number, reason=reason)
    refreshed = {"parent": bundle.sha256, "version": number, **counts}
    with_labels(
        bundle,
        paths.REFRESHED,
        change,
        neighbours=_voters(bundle, dataset),
        dataset={"name": dataset.name, "sha256": dataset.sha256},
        card=bundle.info.card | {"refreshed": refreshed},
    )
    reason = (
        f"{counts['added']} labels added, {counts['removed']} removed, {counts['renamed']} renamed"
    )
    return ChangedLabels(
        changed=True, bundle=str(paths.REFRESHED), parent=number, **counts, reason=reason
    )


def _examples(bundle: Bundle, dataset: XMCDataset) -> list[LabelText]:
    """The first `MOST_EXAMPLES` training queries of each label of the data set whose classifier row
    is an estimate, or will be.
    """
    trained = bundle.uids.filter(pa.array(~is_estimated(bundle.info)))
    uids = pa.array(dataset.label_uids(), bundle.uids.type)
    labels = np.flatnonzero(pc.invert(pc.is_in(uids, trained)))
    rows = dataset.rows("train")
    truth_NL = truth_of(dataset, rows)
    queries_of_label = truth_NL[:, labels].T.tocsr()
    label_P, query_P = queries_of_label.nonzero()
    first_P = queries_of_label.indptr[label_P]
    kept = np.flatnonzero(np.arange(len(label_P)) - first_P < MOST_EXAMPLES)
    texts = own_texts(bundle, dataset, rows[query_P[kept]])
    uid_E = uids.take(labels[label_P[kept]]).to_pylist()
    return list(map(LabelText, uid_E, texts))


def _voters(bundle: Bundle, dataset: XMCDataset) -> Neighbours | None:
    """The data set's training queries as voters, compared in the same way as in the bundle; None if
    the bundle has no votes.
    """
    rows = dataset.rows("train")
    knn = bundle.info.knn
    if bundle.neighbours is None or knn is None or not len(rows):
        return None
    of_queries = bundle.model.tokens(own_texts(bundle, dataset, rows), "queries")
    label_texts = dataset.label_texts(text=bundle.info.text)
    of_labels = bundle.model.tokens(label_texts, "labels")
    by: NeighboursBy = "model" if bundle.words is None else "words"
    return training_neighbours(
        bundle.model, dataset, "fp32", by, (of_queries, of_labels), knn.word_head
    )
