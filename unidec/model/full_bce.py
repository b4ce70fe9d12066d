"""Binary cross entropy of a classifier over all labels, in chunks of labels, without B x L logits
in memory.

Legend: B queries, L labels, C labels of a chunk, D width of a head, P positive pairs, F ignored
pairs, E pairs of a block.

Source: Renee (Jain et al. 2023). The gradient `sigmoid(x) - y` has a closed form: the forward pass
computes it together with the loss in one pass over the labels, and keeps it for the backward pass,
which can run once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from unidec.data.chunks import blocks
from unidec.model.pairs import Pairs, PoolTargets, entry_targets

CHUNK = 8192  # labels at once


@dataclass(frozen=True, kw_only=True)
class _Terms:
    """Terms of the loss: its pairs, an additional coefficient of each positive term, and the
    queries that count.

    Attributes:
        chunk: labels in a chunk. grad: whether gradients are computed.
    """

    pairs: Pairs
    extra_P: Tensor
    active_B: Tensor
    chunk: int
    grad: bool


class _Sums:
    """The sum of a loss over entries with logits `scale * (query . row + bias)`, and its gradients
    with regard to query, row, bias and scale, as far as `wanted`.
    """

    def __init__(
        self,
        query_BD: Tensor,
        row_LD: Tensor,
        bias_L1: Tensor | None,
        scale: Tensor,
        wanted: Sequence[bool],
    ):
        self.query_BD = query_BD
        self.row_LD = row_LD
        self.bias_L1 = bias_L1
        self.scale = scale
        self.loss = query_BD.new_zeros(())
        self.grads: list[Tensor | None] = [None] * 4
        for number, x in enumerate((query_BD, row_LD, bias_L1, scale)):
            if x is not None and wanted[number]:
                self.grads[number] = torch.zeros_like(x, dtype=query_BD.dtype)

    def add_chunk(self, chunk: slice, active_B: Tensor) -> None:
        """Add softplus(x), a negative's loss, of some labels' entries with active queries."""
        row_CD = self.row_LD[chunk].to(self.query_BD.dtype)
        # under autocast the product has its type
        score_BC = (self.query_BD @ row_CD.T).to(self.query_BD.dtype)
        if self.bias_L1 is not None:
            score_BC += self.bias_L1[chunk].T
        logit_BC = score_BC * self.scale
        loss_B = F.softplus(logit_BC).sum(1)
        self.loss += (loss_B * active_B).sum()
        slope_BC = logit_BC.sigmoid_().mul_(active_B.unsqueeze(1))
        query_BD, row_LD, bias_L1, scale = self.grads
        if scale is not None:
            scale += torch.linalg.vecdot(slope_BC.flatten(), score_BC.flatten())
        slope_BC.mul_(self.scale)
        if query_BD is not None:
            query_BD += slope_BC @ row_CD
        if row_LD is not None:
            row_LD[chunk] = slope_BC.T @ self.query_BD
        if bias_L1 is not None:
            bias_L1[chunk, 0] = slope_BC.sum(0)

    def add_pairs(
        self, row_E: Tensor, col_E: Tensor, softplus_E: Tensor, target_E: Tensor, extra_E: Tensor
    ) -> None:
        """Add `softplus_E * softplus(x) - target_E * x + extra_E * softplus(-x)` for some pairs."""
        query_ED = self.query_BD[row_E]
        label_ED = self.row_LD[col_E].to(self.query_BD.dtype)
        score_E = torch.linalg.vecdot(query_ED, label_ED)
        if self.bias_L1 is not None:
            score_E = score_E + self.bias_L1[col_E, 0]
        x_E = score_E * self.scale
        of_negative_E = softplus_E * F.softplus(x_E)
        of_extra_E = extra_E * F.softplus(-x_E)
        self.loss += (of_negative_E - target_E * x_E + of_extra_E).sum()
        slope_of_extra_E = extra_E * torch.sigmoid(-x_E)
        slope_E = softplus_E * x_E.sigmoid() - target_E - slope_of_extra_E
        query_BD, row_LD, bias_L1, scale = self.grads
        if scale is not None:
            scale += torch.linalg.vecdot(slope_E, score_E)
        slope_E = slope_E * self.scale
        if query_BD is not None:
            query_BD.index_add_(0, row_E, slope_E.unsqueeze(1) * label_ED)
        if row_LD is not None:
            row_LD.index_add_(0, col_E, slope_E.unsqueeze(1) * query_ED)
        if bias_L1 is not None:
            bias_L1[:, 0].index_add_(0, col_E, slope_E)


class _FullBCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_BD: Tensor,
        row_LD: Tensor,
        bias_L1: Tensor | None,
        scale: Tensor,
        terms: _Terms,
    ) -> Tensor:
        pairs = terms.pairs
        num_queries, width = query_BD.shape
        wanted = [terms.grad and need for need in ctx.needs_input_grad]
        sums = _Sums(query_BD, row_LD, bias_L1, scale, wanted)
        for chunk in blocks(len(row_LD), terms.chunk):
            sums.add_chunk(chunk, terms.active_B)
        # a block of pairs takes no more memory than a chunk of labels
        block = max(1, terms.chunk * num_queries // (2 * width))
        zero = query_BD.new_zeros(())
        positive = (pairs.row_P, pairs.col_P, pairs.weight_P, terms.extra_P)
        for row_E, col_E, target_E, extra_E in _split(positive, block):
            sums.add_pairs(row_E, col_E, zero, target_E, extra_E)
        for row_E, col_E in _split((pairs.row_F, pairs.col_F), block):
            sums.add_pairs(row_E, col_E, -terms.active_B[row_E], zero, zero)
        ctx.grads = sums.grads
        return sums.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # not kept after use: the gradient of the rows is as large as the table
        grads = ctx.grads
        ctx.grads = None
        return *(None if x is None else x.mul_(grad) for x in grads), None


def _split(arrays: Sequence[Tensor], size: int) -> zip[tuple[Tensor, ...]]:
    """Arrays of the same length in blocks of at most `size`."""
    return zip(*(x.split(size) for x in arrays), strict=True)


def full_bce(
    query_BD: Tensor,
    row_LD: Tensor,
    bias_L1: Tensor | None,
    scale: Tensor,
    targets: PoolTargets,
    *,
    normalise: str = "rows",
    chunk: int = CHUNK,
) -> Tensor:
    """`symmetric_loss("bce", scale * (query_BD @ row_LD.T + bias), targets, ...)` without its B x L
    logits.

    Equal to it in value and in all gradients. Memory: a few [B, chunk] tensors and the gradients,
    among them [L, D] of the rows. Nothing waits for the device. Under autocast products have its
    type, as in `symmetric_loss`.

    Args:
        query_BD: float32 or float64 [B, D], the classifier head's vectors.
        row_LD: float [L, D], rows of all labels (of `targets.columns`); bfloat16 is converted to
            the queries' type.
        scale: 0-d, 1 / tau.
        targets: pairs whose columns are label ids; relevances and `normalise` have the meaning of
            `unidec.model.losses.bce`.
        chunk: labels in a chunk.

    Returns:
        0-d, of the queries' dtype; backward can run through it once.
    """
    columns = targets.columns
    num_columns = columns.total(len(row_LD))
    given = targets.pairs(targets.relevance_P)
    pairs, active_B, count = entry_targets(given, query_BD, num_columns, normalise)
    extra_P = torch.zeros_like(pairs.weight_P)
    if targets.importance_P is not None:
        importance_P = targets.importance_P.to(extra_P.dtype)
        extra_P = (importance_P - 1) * pairs.weight_P
    terms = _Terms(
        pairs=columns.own(pairs),
        extra_P=columns.own_values(extra_P),
        active_B=active_B,
        chunk=chunk,
        grad=torch.is_grad_enabled(),
    )
    total: Tensor = _FullBCE.apply(query_BD, row_LD, bias_L1, scale, terms)
    return columns.sum(total) / count
