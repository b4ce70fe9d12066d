"""Warm start: a training that goes on from an earlier model, the classifier's rows mapped by label uid.

Legend: L labels, K labels of the start, D width of a head, W width of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from unidec.config import Params
from unidec.data.storage import load_array
from unidec.data.tensor_file import TensorFile, open_tensors
from unidec.errors import ArtifactError
from unidec.model.arrays import CLASSIFIER, WEIGHTS
from unidec.model.row_table import RowTable
from unidec.model.unidec import START_BLOCK, UniDEC
from unidec.model.weights import take_start
from unidec.progress import progress

FIX = "retrain.start: cold"
ROWS, BIASES = CLASSIFIER


@dataclass(frozen=True)
class Start:
    """What a training goes on from.

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

    def compared(self, uids: pa.Array | pa.ChunkedArray) -> dict[str, int]:
        """How many labels are {"kept", "new", "removed"}."""
        kept = int((self.rows_of(uids) >= 0).sum())
        return {"kept": kept, "new": len(uids) - kept, "removed": len(self.uids) - kept}


def warm_params(params: Params) -> Params:
    """What a warm start trains with: section `warm` takes the place of the schedule and scales every learning rate.

    Applied to its own result it changes nothing: that one's `warm.lr_scale` is 1.
    """
    warm, optim = params.warm, params.optim
    rates = {key: value * warm.lr_scale for key, value in optim.model_dump().items() if key.startswith("lr_")}
    schedule = {"epochs": warm.epochs, "warmup_epochs": warm.warmup_epochs}
    return params.model_copy(
        update={
            "optim": optim.model_copy(update=schedule | rates),
            "warm": warm.model_copy(update={"lr_scale": 1.0}),
        }
    )


def take_model(model: UniDEC, start: Start) -> None:
    """Give a new model the start's encoder, heads and (where they are learnt) temperatures.

    Raises:
        ArtifactError: the start is damaged.
        ConfigError: it has another tokenizer, encoder or width.
    """
    take_start(model, start.model, where="data/start.json", fix=FIX)
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
    model, at unit length or the mean length of the kept rows, whichever is shorter (longer, and labels that nobody has
    seen would push out those that were learnt). A label that the start does not have begins as its text alone,
    whatever `model.clf_init` says; biases likewise, with their mean in place of the text. A residual classifier's free
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
    with open_tensors(start.model / WEIGHTS) as tensors:
        file = tensors if ROWS in tensors.names else _Arrays(start.vectors)
        if ROWS in file.names:  # else a dual encoder alone
            source_L = start.rows_of(uids)
            length, bias = _take_kept(model, start, file, source_L, keep)
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


class _Arrays:
    """A bundle's classifier, read like the tensors of a model's file."""

    def __init__(self, folder: Path | None) -> None:
        given = {ROWS: ("clf.npy", 2), BIASES: ("bias.npy", 1)} if folder is not None else {}
        places = {name: (Path(folder or "", file), ndim) for name, (file, ndim) in given.items()}
        found = {name: place for name, place in places.items() if place[0].is_file()}
        self._arrays = {name: load_array(path, np.float32, ndim) for name, (path, ndim) in found.items()}
        self.names = list(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].shape

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Some rows, float32 [n, D]; of biases [n, 1]."""
        rows = np.array(self._arrays[name][begin:end])
        return torch.from_numpy(rows.reshape(len(rows), -1))


def _take_kept(
    model: UniDEC, start: Start, file: TensorFile | _Arrays, source_L: np.ndarray, keep: float
) -> tuple[float, float]:
    """Add `keep` of the rows and biases that are held here; length and bias of a new label, the same on every rank."""
    table, biased = model.table, model.bias is not None and BIASES in file.names
    assert table is not None
    if file.shape(ROWS)[0] != len(start.uids):
        raise ArtifactError(
            "a start whose labels and classifier rows differ in number", where=str(start.model), fix=FIX,
            got=f"{file.shape(ROWS)[0]} rows", expected=f"{len(start.uids)}, one a label",
        )  # fmt: skip
    order = np.argsort(source_L, kind="stable")  # labels in the order of the start's rows: each block is read once
    lengths, biases, kept = 0.0, 0.0, int((source_L >= 0).sum())
    for begin in progress(range(0, len(start.uids), START_BLOCK), desc="rows of the start", unit="block"):
        end = min(begin + START_BLOCK, len(start.uids))
        labels = order[slice(*np.searchsorted(source_L, [begin, end], sorter=order))]
        mine = torch.from_numpy((labels >= table.first_row) & (labels < table.first_row + table.own_rows))
        at = torch.from_numpy(source_L[labels] - begin)
        rows_BD = file.read(ROWS, begin, end)[at].float()
        lengths += float(rows_BD.norm(dim=1).double().sum())
        _add(table, labels[mine.numpy()], keep * rows_BD[mine])
        if biased:
            bias_B1 = file.read(BIASES, begin, end)[at].float()
            biases += float(bias_B1.double().sum())
            assert model.bias is not None
            _add(model.bias, labels[mine.numpy()], keep * bias_B1[mine])
    return (min(1.0, lengths / kept), biases / kept) if kept else (1.0, 0.0)


def _add(table: RowTable, labels: np.ndarray, values: Tensor) -> None:
    local = torch.from_numpy(labels - table.first_row).to(table.weight.device)
    table.weight[local] = (table.weight[local].float() + values.to(table.weight.device)).to(table.weight.dtype)
