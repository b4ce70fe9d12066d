"""InceptionXML's layers: one vector from the token embeddings of a short text (Kharbanda et al.
2023, InceptionXML).

The order of a short text's words carries little information: convolutions run along the embedding
dimension, with the tokens as channels.

Legend: B texts, T tokens read from each text (also the number of channels), D width of an
embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STRIDE = 4
WINDOWS = (4, 8, 16)  # kernel sizes, along the embedding dimension
DROPOUT = 0.25


class Inception(nn.Module):
    """The layers in order: attention across tokens, then across features, both without a softmax
    and with gates gamma that start at 0; a mix of tokens to channels; parallel convolutions of
    three kernel sizes; max-pooling; a bottleneck of two layers, whose output starts at 0 and is
    added to the sum of the embeddings, scaled to unit length.

    Args:
        num_tokens: T. width: D, at least `STRIDE`.
    """

    def __init__(self, num_tokens: int, width: int):
        super().__init__()
        self.tokens, self.features = (
            nn.Linear(size, size, bias=False) for size in (num_tokens, width)
        )
        self.gamma = nn.Parameter(torch.zeros(2))
        self.channels = nn.Conv1d(num_tokens, num_tokens, 1)
        # with circular padding each convolution returns D / STRIDE features
        self.convolutions = nn.ModuleList(
            nn.Conv1d(
                num_tokens,
                num_tokens,
                window,
                STRIDE,
                (window - STRIDE) // 2,
                padding_mode="circular",
            )
            for window in WINDOWS
        )
        self.norms = nn.ModuleList(
            nn.GroupNorm(1, count * num_tokens) for count in (1, len(WINDOWS))
        )
        self.pooled = min(STRIDE, width // STRIDE)
        last = nn.Linear(width, width)
        pooled_width = len(WINDOWS) * num_tokens * (width // STRIDE // self.pooled)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.bottleneck = nn.Sequential(nn.Linear(pooled_width, width), nn.GELU(), last)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Vectors [B, D] of weighted token embeddings, padded with zeros."""
        sum_BD = x_BTD.sum(1)
        x_BTD = x_BTD * x_BTD.square().mean((1, 2), keepdim=True).clamp_min(1e-12).rsqrt()
        # x + gamma x x^T W x, first of x [T, D], then of its transpose
        x_BTD = x_BTD + self.gamma[0] * (x_BTD @ x_BTD.transpose(1, 2) @ self.tokens.weight @ x_BTD)
        x_BTD = x_BTD + self.gamma[1] * (self.features(x_BTD) @ x_BTD.transpose(1, 2) @ x_BTD)
        h_BTD = self.dropout(self.norms[0](F.gelu(self.channels(x_BTD))))
        h_BTD = torch.cat([convolution(h_BTD) for convolution in self.convolutions], dim=1)
        h_BTD = F.max_pool1d(self.dropout(self.norms[1](F.gelu(h_BTD))), self.pooled)
        return F.normalize(sum_BD, dim=-1) + self.bottleneck(h_BTD.flatten(1))
