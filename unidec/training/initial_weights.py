"""Initial weights that depend on the data, or for a warm start on an earlier model, with classifier
rows by label uid.

Legend: L labels, n of them held here, K labels of the earlier model, D width of a head, W width of
the encoder, V features of the bag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from unidec.data.chunks import blocks, groups_of
from unidec.data.storage import load_array
from unidec.data.tensor_file import open_tensors
from unidec.data.tokens import Tokens
from unidec.errors import ArtifactError
from unidec.methods.label_clusters import LABEL_CLUSTER
from unidec.model.arrays import CLASSIFIER, WEIGHTS
from unidec.model.first_rows import START_BLOCK
from unidec.model.row_table import RowTable
from unidec.model.unidec import UniDEC
from unidec.model.weights import take_start
from unidec.progress import progress
from unidec.training.clustering import balanced_clusters
from unidec.training.distributed import Ranks

TEXTS_AT_ONCE = 1 << 16  # texts whose features are counted at once
_FIX = "retrain.start: cold"
Features = Callable[..., tuple[np.ndarray, np.ndarray]]  # `BagEncoder.features`


@dataclass(frozen=True)
class Start:
    """An earlier model from which a training starts.

    Attributes:
        model: folder of the exported model.
        uids: Arrow strings [K], the uid of each row of its classifier.
        sha256: hash of the bundle that contains both; part of a run's identity.
        vectors: folder of a bundle's arrays; its clf.npy and bias.npy are the classifier if the
        model's file has none.
    """

    model: Path
    uids: pa.Array
    sha256: str
    vectors: Path | None = None

    def rows_of(self, uids: pa.Array | pa.ChunkedArray) -> np.ndarray:
        """Row of each label in the earlier model, int64 [L]; -1 if that lacks the label."""
        rows = pc.index_in(uids, value_set=self.uids.cast(uids.type))
        return np.asarray(pc.fill_null(rows, -1), dtype=np.int64)


def start_bag(model: UniDEC, parts: Sequence[tuple[str, Tokens, np.ndarray]]) -> None:
    """Set the bag's initial token weights from document frequencies in the training texts, given as
    (source, tokens, rows int64). Does nothing without a bag, or with `encoder.start`. Draws no
    random numbers, since a resumed run calls it too.
    """
    bag = model.encoder.bag
    if bag is None or model.encoder_settings.start:
        return
    vocab = bag.embedding.num_rows
    frequency_V = np.zeros(vocab, dtype=np.int64)
    num_texts = 0
    for _, tokens, rows in parts:
        frequency_V += document_frequency(tokens, rows, vocab, bag.features)
        num_texts += len(rows)
    bag.start_weights(frequency_V, num_texts)


def document_frequency(
    tokens: Tokens, rows: np.ndarray, vocab: int, features: Features
) -> np.ndarray:
    """Number of texts that have each feature, int64 [V]; `features` is `BagEncoder.features`."""
    frequency_V = np.zeros(vocab, dtype=np.int64)
    for some in blocks(len(rows), TEXTS_AT_ONCE):
        flat, offsets = tokens.ragged(rows[some])
        flat, lengths = features(flat, np.diff(offsets))
        text = groups_of(lengths)
        once = np.unique(text * vocab + flat)  # each feature of a text once
        frequency_V += np.bincount(once % vocab, minlength=vocab)
    return frequency_V


def take_model(model: UniDEC, start: Start) -> None:
    """Copy the start's encoder, heads and, if they are learnt, temperatures into a new model.

    Raises ArtifactError: the start is damaged; ConfigError: its tokenizer, encoder or width
    differs.
    """
    take_start(model, start.model, where="data/start.json", fix=_FIX)
    if model.settings.learn_temperature:
        with torch.no_grad(), open_tensors(start.model / WEIGHTS) as file:
            model.log_scale.copy_(file.read("log_scale"))


@torch.no_grad()
def cluster_labels(model: UniDEC, label_LD: np.ndarray, size: int, seed: int, ranks: Ranks) -> None:
    """Set the model's `label_cluster` by clustering label vectors, float32 [L, D], into clusters of
    at most `size`.
    """
    made = balanced_clusters(label_LD, size, seed, model.device, ranks)
    cluster_L = np.empty(len(label_LD), dtype=np.int64)
    cluster_L[made.order_N] = groups_of(np.diff(made.offsets))
    model.get_buffer(LABEL_CLUSTER).copy_(torch.from_numpy(cluster_L))


@torch.no_grad()
def take_rows(
    model: UniDEC,
    start: Start,
    uids: pa.Array | pa.ChunkedArray,
    encode: Callable[[np.ndarray], Tensor],
    *,
    keep: float = 1.0,
    holds_text: bool = False,
) -> None:
    """Initialise the classifier's rows and biases from the start's, by label uid.

    A row becomes `keep` times the start's row plus (1 - `keep`) times the embedding of the label's
    text in the model. The embedding is scaled to unit length, or to the mean length of the reused
    rows if that is shorter: longer rows of new labels would outrank learnt ones. A label that the
    start does not have begins with its embedding alone, whatever `model.clf_init` is. Biases are
    mixed likewise, with the mean of the reused biases in place of the embedding. The computation
    runs in blocks, wherever the table lives.

    Source: shrinking learnt weights (Ash and Adams 2020, On Warm-Starting Neural Network Training),
    here towards the label's text instead of random weights.

    Args:
        model: with the start's encoder and heads (`take_model`), and a table of zeros.
        uids: uids of the L labels.
        encode: returns the encoder's outputs [n, W] of label rows, int64 [n].
        keep: share of the start's rows.
        holds_text: whether a row contains its label's embedding, which its row of the table then
        lacks.

    Raises:
        ArtifactError: the start's rows and uids differ in number.
    """
    table = model.table
    if table is None:
        return
    length = 1.0
    bias = 0.0
    own = np.arange(table.first_row, table.first_row + table.own_rows)
    source_n = np.full(len(own), -1, dtype=np.int64)
    rows_KD, bias_K1 = _classifier_of(start)
    if rows_KD is not None:  # the start has a classifier
        if len(rows_KD) != len(start.uids):
            raise ArtifactError(
                "the start's classifier must have one row for each of its labels",
                where=start.model,
                fix=_FIX,
                got=f"{len(rows_KD)} rows",
                expected=f"{len(start.uids)} rows",
            )
        source_L = start.rows_of(uids)
        source_n = source_L[own]
        reused = source_L[source_L >= 0]
        if len(reused):  # means over the labels of all ranks, so that all ranks have the same
            length = min(1.0, _mean(rows_KD.norm(dim=1)[reused]))
            if bias_K1 is not None:
                bias = _mean(bias_K1[reused])
        for some in _blocks(np.flatnonzero(source_n >= 0)):
            source = source_n[some]
            _add(table, own[some], keep * rows_KD[source])
            if model.bias is not None and bias_K1 is not None:
                _add(model.bias, own[some], keep * bias_K1[source])
    rest_n = np.where(source_n >= 0, 1.0 - keep, 1.0)
    if model.bias is not None:
        _add(model.bias, own, torch.from_numpy(bias * rest_n).unsqueeze(1))
    share_n = length * rest_n - holds_text
    was_training = model.training
    model.eval()
    parts = _blocks(np.flatnonzero(share_n))
    for some in progress(parts, desc="classifier rows from label texts", unit="block"):
        texts_BD = model.text_rows(encode(own[some]))
        share_B1 = torch.from_numpy(share_n[some]).unsqueeze(1)
        _add(table, own[some], share_B1.to(texts_BD) * texts_BD)
    model.train(was_training)


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _blocks(places: np.ndarray) -> list[np.ndarray]:
    """Split an array into blocks of `START_BLOCK`."""
    return [places[some] for some in blocks(len(places), START_BLOCK)]


def _classifier_of(start: Start) -> tuple[Tensor | None, Tensor | None]:
    """Rows float32 [K, D] and biases [K, 1] of the start's classifier; None for those that it
    lacks.
    """
    rows_name, bias_name = CLASSIFIER
    bias = None
    with open_tensors(start.model / WEIGHTS) as file:
        if rows_name in file.names:
            rows = file.read(rows_name).float()
            if bias_name in file.names:
                bias = file.read(bias_name).float()
            return rows, bias
    if start.vectors is None or not (start.vectors / "clf.npy").is_file():
        return None, None
    rows = _array(start.vectors / "clf.npy", 2)
    if (start.vectors / "bias.npy").is_file():
        bias = _array(start.vectors / "bias.npy", 1).unsqueeze(1)
    return rows, bias


def _array(path: Path, ndim: int) -> Tensor:
    return torch.from_numpy(np.array(load_array(path, np.float32, ndim)))


def _add(table: RowTable, labels: np.ndarray, values: Tensor) -> None:
    """Add values to the rows of some labels, which must be held here."""
    weight = table.weight
    local = torch.from_numpy(labels - table.first_row).to(weight.device)
    rows = weight[local].float() + values.to(weight.device)
    weight[local] = rows.to(weight.dtype)
