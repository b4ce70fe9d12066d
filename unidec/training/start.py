"""What a model begins from: its data, or for a warm start an earlier model, the classifier's rows mapped by label uid.

Legend: L labels, K labels of the start, D width of a head, W width of the encoder, V tokens of the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from unidec.data.storage import load_array
from unidec.data.tensor_file import open_tensors
from unidec.data.tokens import Tokens
from unidec.errors import ArtifactError
from unidec.model.arrays import CLASSIFIER, WEIGHTS
from unidec.model.row_table import RowTable
from unidec.model.unidec import START_BLOCK, UniDEC
from unidec.model.weights import take_start
from unidec.progress import progress

ROWS, BIASES = CLASSIFIER
TEXTS_AT_ONCE = 1 << 16  # of which document frequencies are counted
_FIX = "retrain.start: cold"
Features = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]  # BagEncoder.features
Read = Callable[[int, int], Tensor]  # rows begin to end


@dataclass(frozen=True)
class Start:
    """An earlier model that a training starts from.

    Attributes:
        model: folder of an exported model.
        uids: Arrow strings [K], the uid of each row of its classifier.
        sha256: of the bundle that holds both: part of a run's identity.
        vectors: folder of a bundle's arrays: its model has no classifier of its own, clf.npy and bias.npy are it.
    """

    model: Path
    uids: pa.Array
    sha256: str
    vectors: Path | None = None

    def rows_of(self, uids: pa.Array | pa.ChunkedArray) -> np.ndarray:
        """The start's row of each label: int64 [L], -1 for one that it does not have."""
        found = pc.fill_null(pc.index_in(uids, value_set=self.uids.cast(uids.type)), -1)
        return np.asarray(found, dtype=np.int64)


def start_bag(model: UniDEC, parts: Sequence[tuple[str, Tokens, np.ndarray]]) -> None:
    """Weigh the bag's tokens by how many training texts have them; nothing without a bag, or with another's weights.

    Draws no random numbers and gives the same weights each time, so that a resumed run may begin with it too. `parts`
    are (source, tokens, rows int64) of all training texts.
    """
    bag = model.encoder.bag
    if bag is None or model.encoder_settings.start:
        return
    frequency_V = np.zeros(bag.embedding.num_rows, dtype=np.int64)
    for _, tokens, rows in parts:
        frequency_V += document_frequency(tokens, rows, len(frequency_V), bag.features)
    bag.start_weights(frequency_V, sum(len(rows) for _, _, rows in parts))


def document_frequency(tokens: Tokens, rows: np.ndarray, vocab: int, features: Features) -> np.ndarray:
    """Texts that have each of the features of their tokens, int64 [V]."""
    frequency_V = np.zeros(vocab, dtype=np.int64)
    for begin in range(0, len(rows), TEXTS_AT_ONCE):
        flat, offsets = tokens.ragged(rows[begin : begin + TEXTS_AT_ONCE])
        flat, lengths = features(flat, np.diff(offsets))
        text = np.repeat(np.arange(len(lengths)), lengths)
        frequency_V += np.bincount(np.unique(text * vocab + flat) % vocab, minlength=vocab)
    return frequency_V


def take_model(model: UniDEC, start: Start) -> None:
    """Give a new model the start's encoder, heads and (where they are learnt) temperatures.

    Raises ArtifactError: the start is damaged; ConfigError: it has another tokenizer, encoder or width.
    """
    take_start(model, start.model, where="data/start.json", fix=_FIX)
    if model.settings.learn_temperature:
        with torch.no_grad(), open_tensors(start.model / WEIGHTS) as file:
            model.log_scale.copy_(file.read("log_scale"))


@torch.no_grad()
def take_rows(
    model: UniDEC,
    start: Start,
    uids: pa.Array | pa.ChunkedArray,
    encode: Callable[[np.ndarray], Tensor],
    keep: float = 1.0,
) -> None:
    """Give the classifier the start's rows and biases, by label uid; block by block, wherever the table lives.

    A row begins as `keep` of what was learnt and the rest of the label's own text: its embedding through the started
    model, at unit length or the mean length of the kept rows, whichever is shorter (if longer, unseen labels
    would push out those that were learnt). A label that the start does not have begins as its text alone, whatever
    `model.clf_init` is; biases likewise, with their mean in place of the text. A residual classifier's free
    vectors are what is left of the whole rows without their texts.

    Source: shrinking what was learnt (Ash and Adams 2020, On Warm-Starting Neural Network Training), towards the text.

    Args:
        model: with the start's encoder and heads (`take_model`), its table at 0.
        uids: of the L labels.
        encode: gives the encoder's outputs [n, W] of the labels at some rows, int64 [n].
        keep: from 0 to 1.

    Raises:
        ArtifactError: the start's rows and uids differ in number.
    """
    table = model.table
    if table is None:
        return
    length, bias, source_L = 1.0, 0.0, np.full(len(uids), -1, dtype=np.int64)
    with open_tensors(start.model / WEIGHTS) as file:
        reads: dict[str, Read] = {name: functools.partial(file.read, name) for name in CLASSIFIER if name in file.names}
        num_rows = file.shape(ROWS)[0] if ROWS in reads else 0
        if ROWS not in reads and start.vectors is not None:
            for name, path, ndim in ((ROWS, start.vectors / "clf.npy", 2), (BIASES, start.vectors / "bias.npy", 1)):
                if path.is_file():
                    array = load_array(path, np.float32, ndim)
                    reads[name], num_rows = functools.partial(_read_array, array), len(array)
        if ROWS in reads:  # else a dual encoder alone
            if num_rows != len(start.uids):
                raise ArtifactError(
                    "a start whose labels and classifier rows differ in number", where=str(start.model), fix=_FIX,
                    got=f"{num_rows} rows", expected=f"{len(start.uids)}, one a label",
                )  # fmt: skip
            source_L = start.rows_of(uids)
            length, bias = _take_kept(model, num_rows, reads, source_L, keep)
    own = np.arange(table.first_row, table.first_row + table.own_rows)
    rest = np.where(source_L[own] >= 0, 1.0 - keep, 1.0)
    if model.bias is not None:
        _add(model.bias, own, torch.from_numpy(bias * rest)[:, None])
    share = length * rest - model.settings.clf_residual
    own, share = own[share != 0], share[share != 0]
    was_training = model.training
    model.eval()
    for begin in progress(range(0, len(own), START_BLOCK), desc="rows from texts", unit="block"):
        some = slice(begin, begin + START_BLOCK)
        texts_BD = model.text_rows(encode(own[some]))
        _add(table, own[some], torch.from_numpy(share[some])[:, None].to(texts_BD) * texts_BD)
    model.train(was_training)


def _read_array(array: np.ndarray, begin: int, end: int) -> Tensor:
    rows = np.array(array[begin:end])
    return torch.from_numpy(rows.reshape(len(rows), -1))


def _take_kept(
    model: UniDEC, num_rows: int, reads: dict[str, Read], source_L: np.ndarray, keep: float
) -> tuple[float, float]:
    """Add `keep` of the rows and biases that are held here; length and bias of a new label, the same on every rank."""
    tables: dict[str, RowTable | None] = {ROWS: model.table, BIASES: model.bias}
    order = np.argsort(source_L, kind="stable")  # labels in the order of the start's rows: each block is read once
    sums, kept = dict.fromkeys(CLASSIFIER, 0.0), int((source_L >= 0).sum())
    for begin in progress(range(0, num_rows, START_BLOCK), desc="rows of the start", unit="block"):
        end = min(begin + START_BLOCK, num_rows)
        labels = order[slice(*np.searchsorted(source_L, [begin, end], sorter=order))]
        at = torch.from_numpy(source_L[labels] - begin)
        for name, read in reads.items():
            table = tables[name]
            if table is not None:
                value_BD = read(begin, end)[at].float()
                sums[name] += float((value_BD.norm(dim=1) if name == ROWS else value_BD).double().sum())
                mine = (labels >= table.first_row) & (labels < table.first_row + table.own_rows)
                _add(table, labels[mine], keep * value_BD[torch.from_numpy(mine)])
    return (min(1.0, sums[ROWS] / kept), sums[BIASES] / kept) if kept else (1.0, 0.0)


def _add(table: RowTable, labels: np.ndarray, values: Tensor) -> None:
    local = torch.from_numpy(labels - table.first_row).to(table.weight.device)
    table.weight[local] = (table.weight[local].float() + values.to(table.weight.device)).to(table.weight.dtype)
