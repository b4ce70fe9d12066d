"""A bundle's label set changed without training: new labels answer from their text, removed ones leave.

Legend: L labels of the new bundle, S those of them whose text is encoded, M training queries, D width of a head.

A new label's dual-encoder vector is that of its text; its classifier row is its text through the classifier's own head
at unit length, as `model.clf_init: label_embedding` starts a row before training, and its bias the mean of the others
(docs/label-refresh.md has what other rows are worth). Of a label that was there before, everything is kept as it is,
above all its trained row; only where its text may be another one is its dual-encoder vector made anew.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from unidec.data.storage import read_manifest, write_folder
from unidec.data.tensor_file import open_tensors, write_tensors
from unidec.data.tokens import encode_texts
from unidec.errors import DataError
from unidec.model.weights import KIND, VERSION
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import write_bundle
from unidec.retrieval.index import LabelIndex
from unidec.retrieval.neighbours import Neighbours
from unidec.retrieval.space import label_vectors, unit_rows

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_TABLE, _BIAS = "table.weight", "bias.weight"
ROWS_AT_ONCE = 1 << 16  # rows copied at once


@dataclass(frozen=True)
class LabelChange:
    """How a label set differs from a bundle's.

    Attributes:
        uids, texts, titles: of the L labels, in their new order; the text is what is encoded, the title what is shown.
        source_L: int64 [L], each label's row in the bundle; -1: it is new.
        encoded_S: int64 [S], rows whose text is encoded: new ones, and those whose text is or may be another.
        added, removed, renamed: uids of new labels, of those that leave, and of those that show another title.
    """

    uids: list[str]
    texts: list[str]
    titles: list[str]
    source_L: Rows
    encoded_S: Rows
    added: list[str]
    removed: list[str]
    renamed: list[str]

    @classmethod
    def of(
        cls, bundle: Bundle, uids: Sequence[str], texts: Sequence[str], titles: Sequence[str] | None = None
    ) -> LabelChange:
        """Compare a bundle's labels with these.

        Args:
            bundle: what answers now.
            uids: of all labels of the new set, each once.
            texts: what is encoded; for a model of long texts title and content joined by a space. A bundle knows its
                labels' titles only: for such a model every text is encoded again, else those of another title.
            titles: what is shown; None: the texts.

        Raises:
            DataError: no label, a uid twice, or lists of different lengths.
        """
        uids, texts, titles = list(uids), list(texts), list(texts if titles is None else titles)
        if not uids or not len(uids) == len(texts) == len(titles):
            got = f"{len(uids)} uids, {len(texts)} texts, {len(titles)} titles"
            raise DataError("labels need a uid, a text and a title each, and there must be one", got=got)
        known = set(uids)
        if len(known) != len(uids):
            twice = Counter(uids).most_common(1)[0][0]
            raise DataError("a label uid stands twice", got=twice, fix="give each label a uid of its own")
        source_L = np.fromiter((bundle.row_of.get(uid, -1) for uid in uids), dtype=np.int64, count=len(uids))
        before = bundle.titles.take(_indices(np.maximum(source_L, 0))).to_pylist()
        differs_L = np.fromiter((a != b for a, b in zip(before, titles, strict=True)), dtype=bool, count=len(uids))
        is_new_L, renamed_L = source_L < 0, differs_L & (source_L >= 0)
        encoded_L = np.ones(len(uids), dtype=bool) if bundle.info.text != "title" else is_new_L | renamed_L
        return cls(
            uids, texts, titles, source_L, np.flatnonzero(encoded_L),
            added=[uids[row] for row in np.flatnonzero(is_new_L)],
            removed=[uid for uid in bundle.uids.to_pylist() if uid not in known],
            renamed=[uids[row] for row in np.flatnonzero(renamed_L)],
        )  # fmt: skip

    def __bool__(self) -> bool:
        """Whether anything differs, the order included."""
        return bool(self.added or self.removed or self.renamed or (np.diff(self.source_L) < 0).any())

    @property
    def kept(self) -> int:
        """Labels that were there before."""
        return len(self.uids) - len(self.added)


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
    """Write a bundle with another label set: same model, same blend, new index. The same input gives the same bytes.

    Args:
        bundle: what answers now; it is not touched, and may answer meanwhile.
        path: the new bundle's folder, of another name than the old one's.
        change: of `LabelChange.of` with this bundle.
        neighbours: training queries that vote, with the labels of the new set; None: those of the bundle, without the
            labels that leave, and without the queries that had no others. A new label gets no votes then.
        dataset, metrics, card: of bundle.json; None: the data set and card of the old one, and no metrics.
        batch_size: texts encoded at once.

    Returns:
        The folder's path.

    Raises:
        ValueError: neighbours of other labels, or where none vote in the bundle.
        ArtifactError: the bundle's folder is damaged by now, or the new one cannot be written.
    """
    path, info = Path(path), bundle.info
    de_SD, clf_SD = _encoded(bundle, change, batch_size)
    de_LD = _kept_rows(bundle.vectors["de"], change.source_L) if "de" in bundle.vectors else None
    if de_LD is not None and de_SD is not None:
        de_LD[change.encoded_S] = de_SD
    votes = info.knn
    if votes is None and neighbours is not None:
        raise ValueError("no training queries vote in this bundle: it has no weight for them")
    if votes is not None and neighbours is None:
        neighbours = _remapped(bundle.neighbours, change.source_L)
    settings = info.params.get("index", {})
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-model-") as scratch:
        tables = _tables(bundle, change, clf_SD)
        _write_model(bundle.path / "model", Path(scratch) / "model", tables, len(change.uids))
        clf_LD = tables[_TABLE].float().numpy() if _TABLE in tables else None
        bias_L = tables[_BIAS].float().numpy()[:, 0] if _BIAS in tables else None
        index = LabelIndex.build(
            label_vectors(de_LD, clf_LD, bias_L, info.space, info.clf_normalize), info.index_kind,
            links=settings.get("hnsw_links", 32), build=settings.get("hnsw_build", 200), search=info.index_search,
        )  # fmt: skip
        return write_bundle(
            path, Path(scratch) / "model", index, de_LD=de_LD, clf_LD=clf_LD, bias_L=bias_L, uids=change.uids,
            titles=change.titles, space=info.space, clf_weight=info.clf_weight, clf_normalize=info.clf_normalize,
            neighbours=neighbours, knn_weight=votes.weight if votes and neighbours else 0.0,
            knn_neighbours=votes.neighbours if votes else 100, text=info.text,
            dataset=info.dataset if dataset is None else dataset, metrics=metrics, params=info.params,
            card=info.card if card is None else card,
        )  # fmt: skip


def _encoded(bundle: Bundle, change: LabelChange, batch_size: int) -> tuple[Floats | None, Floats | None]:
    """(Phi_D, Phi_C) float32 [S, D] of the texts to encode; None for a head that is not there."""
    texts = [change.texts[row] for row in change.encoded_S]
    model = bundle.model
    tokens = encode_texts(texts, model.tokenizer_folder, model.max_length)
    return model.vectors("labels", tokens, batch_size=batch_size, desc="labels" if len(texts) > batch_size else None)


def _kept_rows(before: Floats, source_L: Rows) -> Floats:
    """Rows of the labels that were there, in the new order; those of new ones are to be filled in."""
    rows_LD = np.zeros((len(source_L), *before.shape[1:]), dtype=np.float32)
    kept = np.flatnonzero(source_L >= 0)
    for begin in range(0, len(kept), ROWS_AT_ONCE):
        some = kept[begin : begin + ROWS_AT_ONCE]
        rows_LD[some] = before[source_L[some]]
    return rows_LD


def _tables(bundle: Bundle, change: LabelChange, clf_SD: Floats | None) -> dict[str, Tensor]:
    """The classifier's tables by their names in the model's file, in its number format."""
    if clf_SD is None:
        return {}
    new = np.flatnonzero(change.source_L < 0)
    rows_LD = _kept_rows(bundle.vectors["clf"], change.source_L)
    rows_LD[new] = unit_rows(clf_SD[np.searchsorted(change.encoded_S, new)])
    tables = {_TABLE: torch.from_numpy(rows_LD).to(bundle.model.table.weight.dtype)}
    if "bias" in bundle.vectors:
        bias_L = _kept_rows(bundle.vectors["bias"], change.source_L)
        bias_L[new] = np.mean(bundle.vectors["bias"], dtype=np.float64)
        tables[_BIAS] = torch.from_numpy(bias_L)[:, None]
    return tables


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
    uids, titles = (column.take(_indices(stay)) for column in (neighbours.uids, neighbours.titles))
    own = neighbours
    return Neighbours(own.vectors_MD[stay], labels_ML[stay], uids, titles, own.vote, own.words)


def _write_model(source: Path, target: Path, tables: Mapping[str, Tensor], num_labels: int) -> None:
    """A copy of an exported model whose classifier has other rows."""
    manifest = read_manifest(source, KIND, VERSION)
    with write_folder(target, KIND, VERSION, manifest["meta"]) as out:
        for name in manifest["files"]:
            (out.path / name).parent.mkdir(parents=True, exist_ok=True)
            if name not in (_WEIGHTS, _CONFIG):
                shutil.copyfile(source / name, out.path / name)
        with open_tensors(source / _WEIGHTS) as file:
            dense = {name: file.read(name) for name in file.names if name not in (_TABLE, _BIAS)}
        write_tensors(out.path / _WEIGHTS, dense | dict(tables))
        config = json.loads((source / _CONFIG).read_text(encoding="utf-8")) | {"num_labels": num_labels}
        (out.path / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _indices(rows: Rows) -> pa.Array:
    return pa.array(rows, pa.int64())
