"""Warm start: a training that goes on from an earlier model, the classifier's rows mapped by label uid.

Legend: L labels, K labels of the start, D width of a head, W width of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from unidec.data.storage import load_array
from unidec.data.tensor_file import TensorFile, open_tensors
from unidec.errors import ArtifactError
from unidec.model.arrays import CLASSIFIER, WEIGHTS
from unidec.model.row_table import RowTable
from unidec.model.unidec import START_BLOCK, UniDEC
from unidec.model.weights import take_start
from unidec.progress import progress
from unidec.training.warm_start import FIX, Start

ROWS, BIASES = CLASSIFIER


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
