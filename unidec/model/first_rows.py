"""The initial rows of a classifier's table: label embeddings, or random rows.

Legend: B labels of a block, L labels, D width of a head, W width of the encoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from unidec.data.chunks import blocks
from unidec.model.unidec import UniDEC

# rows of the table that are computed at once (a multiple of the encoder's batch size)
START_BLOCK = 1 << 15


@torch.no_grad()
def start_table(model: UniDEC, label_input: Callable[[np.ndarray], Tensor] | None = None) -> None:
    """Initialise Psi as `model.clf_init` says: from label embeddings, by Xavier, or from N(0, 0.02)
    (Renee).

    Works in blocks, so that no second table is in memory. Random rows are drawn for all labels from
    the default generator of the model's device: they do not depend on the table's device or on
    which rows this process holds.

    Args:
        label_input: needed for "label_embedding" only: returns encoder outputs [n, W] of label rows
            int64 [n].
    """
    table = model.table
    if table is None:
        return
    first = table.first_row
    last = first + table.own_rows
    if model.settings.clf_init == "label_embedding":
        assert label_input is not None
        own_L = np.arange(first, last)
        for some in blocks(len(own_L), START_BLOCK):
            table.weight[some] = _label_embeddings(model, label_input(own_L[some]))
        return
    for some in blocks(table.num_rows, START_BLOCK):
        rows_BD = _random_rows(model, table.num_rows, some.stop - some.start)
        begin = max(some.start, first)
        end = max(begin, min(some.stop, last))
        own_BD = rows_BD[begin - some.start : end - some.start]
        table.weight[begin - first : end - first] = own_BD


def _label_embeddings(model: UniDEC, x_BW: Tensor) -> Tensor:
    """Texts through the classifier head, scaled to unit length, float32 [B, D].

    If the encoder's vectors have no unit length (a transformer that trains alone), they are scaled
    to the inverse of their length, so that scores start as cosines: unit rows would give logits of
    several tens, and a softmax without a gradient.
    """
    assert model.head_clf is not None
    rows_BD = model.text_rows(x_BW, dropout=False)
    if model.encoder.unit_vectors:
        return rows_BD
    length_B1 = model.head_clf[0](x_BW).norm(dim=-1, keepdim=True)
    return rows_BD / length_B1.clamp_min(1.0)


def _random_rows(model: UniDEC, num_rows: int, count: int) -> Tensor:
    """Some of a table's `num_rows` rows, float32 [count, D], by Xavier or from N(0, 0.02)."""
    width = model.settings.dim
    rows_BD = torch.empty(count, width, device=model.device)
    if model.settings.clf_init == "normal":
        return rows_BD.normal_(std=0.02)
    bound = math.sqrt(3.0) * math.sqrt(2.0 / (num_rows + width))
    return rows_BD.uniform_(-bound, bound)
