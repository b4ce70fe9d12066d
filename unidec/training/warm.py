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
from unidec.data.tensor_file import TensorFile, open_tensors
from unidec.errors import ArtifactError
from unidec.model.row_table import RowTable
from unidec.model.unidec import START_BLOCK, UniDEC
from unidec.model.weights import take_start
from unidec.progress import progress

FIX = "retrain.start: cold"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Start:
    """What a training goes on from.

    Attributes:
        model: folder of an exported model.
        uids: Arrow strings [K], the uid of each row of its classifier.
        sha256: of the bundle that holds both: part of a run's identity.
    """

    model: Path
    uids: pa.Array
    sha256: str

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
    model: UniDEC, start: Start, uids: pa.Array | pa.ChunkedArray, encode: Callable[[np.ndarray], Tensor]
) -> None:
    """Give the classifier the start's rows and biases, by label uid; block by block, wherever the table lives.

    A label that the start does not have begins as its own text, whatever `model.clf_init` says: as its embedding
    through the started model, at unit length or the mean length of the kept rows, whichever is shorter (longer, and
    labels that nobody has seen would push out those that were learnt), with the mean of their biases. A residual
    classifier's free vectors are what is left of the whole rows without their texts.

    Args:
        model: with the start's encoder and heads (`take_model`).
        uids: of the L labels.
        encode: gives the encoder's outputs [n, W] of the labels at some rows, int64 [n].

    Raises:
        ArtifactError: the start's rows and uids differ in number.
    """
    if model.table is None:
        return
    was_training = model.training
    model.eval()
    with open_tensors(start.model / WEIGHTS) as file:
        if "table.weight" not in file.names:  # a dual encoder alone
            length, bias = 1.0, 0.0
            source_L = np.full(len(uids), -1, dtype=np.int64)
        else:
            source_L = start.rows_of(uids)
            length, bias = _take_kept(model, start, file, source_L, encode)
    first, table = model.table.first_row, model.table
    new = first + np.flatnonzero(source_L[first : first + table.own_rows] < 0)
    for begin in range(0, len(new), START_BLOCK):
        rows = new[begin : begin + START_BLOCK]
        texts_BD = model.text_rows(encode(rows))
        _put(table, rows, (length - model.settings.clf_residual) * texts_BD)
    if model.bias is not None:
        _put(model.bias, new, torch.full((len(new), 1), bias))
    model.train(was_training)


def _take_kept(
    model: UniDEC, start: Start, file: TensorFile, source_L: np.ndarray, encode: Callable[[np.ndarray], Tensor]
) -> tuple[float, float]:
    """Copy the rows that are held here; the length and the bias of a new label's row, the same on every rank."""
    table, biased = model.table, model.bias is not None and "bias.weight" in file.names
    assert table is not None
    if file.shape("table.weight")[0] != len(start.uids):
        raise ArtifactError(
            "a start whose labels and classifier rows differ in number", where=str(start.model), fix=FIX,
            got=f"{file.shape('table.weight')[0]} rows", expected=f"{len(start.uids)}, one a label",
        )  # fmt: skip
    order = np.argsort(source_L, kind="stable")  # labels in the order of the start's rows: each block is read once
    lengths, biases, kept = 0.0, 0.0, int((source_L >= 0).sum())
    blocks = range(0, len(start.uids), START_BLOCK)
    for begin in progress(blocks, desc="rows of the start", unit="block") if len(blocks) > 1 else blocks:
        end = min(begin + START_BLOCK, len(start.uids))
        labels = order[slice(*np.searchsorted(source_L, [begin, end], sorter=order))]
        mine = (labels >= table.first_row) & (labels < table.first_row + table.own_rows)
        at = torch.from_numpy(source_L[labels] - begin)
        rows_BD = file.read("table.weight", begin, end)[at].float()
        lengths += float(rows_BD.norm(dim=1).double().sum())
        if biased:
            bias_B1 = file.read("bias.weight", begin, end)[at].float()
            biases += float(bias_B1.double().sum())
            assert model.bias is not None
            _put(model.bias, labels[mine], bias_B1[torch.from_numpy(mine)])
        own_BD = rows_BD[torch.from_numpy(mine)]
        if model.settings.clf_residual and mine.any():
            own_BD = own_BD - model.text_rows(encode(labels[mine])).cpu()
        _put(table, labels[mine], own_BD)
    return (min(1.0, lengths / kept), biases / kept) if kept else (1.0, 0.0)


def _put(table: RowTable, labels: np.ndarray, values: Tensor) -> None:
    local = torch.from_numpy(labels - table.first_row).to(table.weight.device)
    table.weight[local] = values.to(table.weight.device, table.weight.dtype)
