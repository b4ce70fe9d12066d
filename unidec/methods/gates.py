"""Gates of a residual classifier's rows (DECAF: Mittal et al. 2021): one per dimension for the
label's text, and one for the free vector.

Legend: S labels, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NAME = "gates"


def new_gates(dim: int) -> nn.Parameter:
    """Gates [2 D], the text's first; with 0 a row is the plain sum of text and free vector."""
    return nn.Parameter(torch.zeros(2 * dim))


def gated(gates_2D: Tensor, text_SD: Tensor, free_SD: Tensor) -> tuple[Tensor, Tensor]:
    """Text and free vectors, each times its gate 2 sigmoid(g) (the paper: sigmoid(g))."""
    text_gate_D, free_gate_D = (2 * torch.sigmoid(gates_2D)).chunk(2)
    return text_gate_D * text_SD, free_gate_D * free_SD
