"""A bundle's label set changed without training: new labels answer from their text, removed ones leave.

Legend: L labels of the new bundle, S those of them whose text is encoded, M training queries, D width of a head.

A new label's dual-encoder vector is that of its text; its classifier row is an estimate (`new_rows.py`), its bias the
mean of the trained ones. Of a label that was there before, everything is kept as it is, above all its trained row; only
where its text may be another one is its dual-encoder vector made anew, and its row where that was an estimate too.

Nothing that stays is computed again: the index is changed, not built (`LabelIndex.changed`), the model's files and
whatever else has the same bytes are links to the old bundle's. Arrays pass through memory block by block.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.sparse import csr_matrix

from unidec.data.array_file import write_array
from unidec.data.storage import load_array, read_manifest
from unidec.data.tokens import encode_texts
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import KIND, VERSION, Ready, write_bundle
from unidec.retrieval.label_change import LabelChange, LabelText
from unidec.retrieval.label_rows import LabelRows
from unidec.retrieval.neighbours import FILES as NEIGHBOURS
from unidec.retrieval.neighbours import Neighbours
from unidec.retrieval.new_rows import estimated_rows

__all__ = ["LabelChange", "LabelText", "with_labels"]

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


def with_labels(
    bundle: Bundle,
    path: str | os.PathLike[str],
    change: LabelChange,
    *,
    neighbours: Neighbours | None = None,
    dataset: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    card: Mapping[str, Any] | None = None,
    batch_size: int = 1024,
) -> Path:
    """Write a bundle with another label set: same model, same blend, the index changed. The same input gives the same
    bytes.

    Args:
        bundle: what answers now; it is not touched, and may answer meanwhile. Files that stay as they are become links
            to its own, where the file system has links.
        path: the new bundle's folder, of another name than the old one's.
        change: of `LabelChange` with this bundle.
        neighbours: training queries that vote, with the labels of the new set; None: those of the bundle, without the
            labels that leave, and without the queries that had no others. A new label gets no votes then.
        dataset, metrics, card: of bundle.json; None: the data set and card of the old one, and no metrics.
        batch_size: texts encoded at once.

    Returns:
        The folder's path.

    Raises:
        ValueError: neighbours of other labels, or where none vote in the bundle.
        ArtifactError: the bundle's folder is damaged, or the new one cannot be written.
    """
    path, info = Path(path), bundle.info
    if info.knn is None and neighbours is not None:
        raise ValueError("no training queries vote in this bundle: it has no weight for them")
    hashes = {
        name: entry["sha256"] for name, entry in read_manifest(bundle.path, KIND, VERSION, verify=True)["files"].items()
    }
    ready: dict[str, Ready] = {}
    votes: dict[str, Any] = {}
    if info.knn is not None:
        if neighbours is None and _only_more(change.source_L, bundle.num_labels):
            ready |= {name: (bundle.path / name, hashes[name]) for name in hashes if name in NEIGHBOURS}
            votes = {"knn": info.knn}
        elif (voters := neighbours or _remapped(bundle.neighbours, change.source_L)) is not None:
            votes = {"neighbours": voters, "knn_weight": info.knn.weight, "knn_neighbours": info.knn.neighbours}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        arrays, estimated_L = _arrays(bundle, change, batch_size)
        for name, array in arrays.items():
            file = Path(scratch) / f"{name}.npy"
            ready[f"vectors/{name}.npy"] = (file, write_array(file, array))
        vectors = {
            name: load_array(Path(scratch) / f"{name}.npy", np.float32, len(arrays[name].shape)) for name in arrays
        }
        rows = LabelRows(vectors, info.space, info.clf_normalize)
        index = bundle.index.changed(change.source_L, rows, change.encoded_S)
        return write_bundle(
            path, bundle.path / "model", index,
            de_LD=vectors.get("de"), clf_LD=vectors.get("clf"), bias_L=vectors.get("bias"), uids=change.uids,
            titles=change.titles, space=info.space, clf_weight=info.clf_weight, clf_normalize=info.clf_normalize,
            **votes, estimated=_ranges(estimated_L), ready=ready, text=info.text,
            dataset=info.dataset if dataset is None else dataset, metrics=metrics, params=info.params,
            card=info.card if card is None else card,
        )  # fmt: skip


@dataclass(frozen=True)
class _Gathered:
    """An array's rows in another order, some of them replaced: computed block by block.

    Attributes:
        before: [K, ...]. source_L: int64 [L], rows of `before`; -1: replaced. at: int64 [S] ascending, the rows that
            are replaced; values: [S, ...].
    """

    before: Floats
    source_L: Rows
    at: Rows
    values: Floats

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.source_L), *self.before.shape[1:])

    def __getitem__(self, rows: slice) -> Floats:
        begin, end, _ = rows.indices(len(self.source_L))
        block = np.asarray(self.before[np.maximum(self.source_L[begin:end], 0)], dtype=np.float32)
        some = slice(*np.searchsorted(self.at, (begin, end)))
        block[self.at[some] - begin] = self.values[some]
        return block


def _arrays(bundle: Bundle, change: LabelChange, batch_size: int) -> tuple[dict[str, _Gathered], npt.NDArray[np.bool_]]:
    """The new bundle's arrays by name, and which labels' classifier rows are estimates, bool [L]."""
    source_L, vectors = change.source_L, bundle.vectors
    before_K = _mask(bundle.info.estimated, bundle.num_labels)
    de_SD, clf_SD = _encoded(bundle, change.texts_S, batch_size)
    estimated_L = (source_L < 0) | before_K[source_L]
    found: dict[str, _Gathered] = {}
    if de_SD is not None:
        found["de"] = _Gathered(vectors["de"], source_L, change.encoded_S, de_SD)
    if clf_SD is not None:
        own = estimated_L[change.encoded_S]  # the others keep their trained rows, whatever their text
        at = change.encoded_S[own]
        trained = np.flatnonzero(~before_K[:-1])
        rows_SD, bias = estimated_rows(
            vectors, trained, clf_SD[own], None if de_SD is None else de_SD[own], bundle.info.clf_normalize
        )
        found["clf"] = _Gathered(vectors["clf"], source_L, at, rows_SD)
        if "bias" in vectors:
            found["bias"] = _Gathered(vectors["bias"], source_L, at, np.full(len(at), bias, dtype=np.float32))
    return found, estimated_L if clf_SD is not None else np.zeros(len(source_L), dtype=bool)


def _encoded(bundle: Bundle, texts: Sequence[str], batch_size: int) -> tuple[Floats | None, Floats | None]:
    """(Phi_D, Phi_C) float32 [S, D] of the texts to encode; None for a head that is not there."""
    model = bundle.model
    tokens = encode_texts(texts, model.tokenizer_folder, model.max_length)
    return model.vectors("labels", tokens, batch_size=batch_size, desc="labels" if len(texts) > batch_size else None)


def _remapped(neighbours: Neighbours | None, source_L: Rows) -> Neighbours | None:
    """The same training queries with the labels of the new set; without those whose labels all leave, None without any
    query."""
    if neighbours is None:
        return None
    kept = np.flatnonzero(source_L >= 0)
    shape = (neighbours.num_labels, len(source_L))
    place = csr_matrix((np.ones(len(kept), dtype=np.float32), (source_L[kept], kept)), shape=shape)
    labels_ML = csr_matrix(neighbours.labels_ML @ place)
    lost_M = (np.diff(labels_ML.indptr) == 0) & (np.diff(neighbours.labels_ML.indptr) > 0)
    stay = np.flatnonzero(~lost_M)
    if not len(stay):
        return None
    uids, titles = (column.take(pa.array(stay)) for column in (neighbours.uids, neighbours.titles))
    own = neighbours
    return Neighbours(own.vectors_MD[stay], labels_ML[stay], uids, titles, own.vote, own.words)


def _only_more(source_L: Rows, num_before: int) -> bool:
    """Whether every label has the row it had, and new ones come after them."""
    same = len(source_L) >= num_before and np.array_equal(source_L[:num_before], np.arange(num_before))
    return bool(same and (source_L[num_before:] < 0).all())


def _mask(ranges: Sequence[tuple[int, int]], count: int) -> npt.NDArray[np.bool_]:
    """True in the ranges, bool [count + 1]: the last, for row -1, is False."""
    mask = np.zeros(count + 1, dtype=bool)
    for begin, end in ranges:
        mask[begin : min(end, count)] = True
    return mask


def _ranges(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The ranges [begin, end) in which a mask is true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]
