"""The reference of attention within packed texts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def one_by_one(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, _most: int) -> Tensor:
    """Attention text by text."""
    lengths = bounds.diff().tolist()
    parts = []
    for text in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        q_HTD, k_HTD, v_HTD = (x_THD.transpose(0, 1) for x_THD in text)
        parts.append(F.scaled_dot_product_attention(q_HTD, k_HTD, v_HTD).transpose(0, 1))
    return torch.cat(parts)
