"""InceptionXML's layers: one vector from the token embeddings of a short text (Kharbanda et al.
2023).

The order of a short text's words carries little information: convolutions run along the embedding
dimension, with the tokens as channels.

Legend: B texts, T tokens read from each text (also the number of channels), D width of an
embedding, C channels of all convolutions, F features of each.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unidec.config import Encoder
from unidec.model.dense import zero_linear
from unidec.model.dropout import Dropout
from unidec.model.encoder import TokenLayers

STRIDE = 4
WINDOWS = (4, 8, 16)  # kernel sizes, along the embedding dimension
DROPOUT = 0.25


def token_layers(settings: Encoder, width: int) -> Inception | None:
    """The layers of an encoder with `encoder.kind: inception`."""
    return Inception(settings.inception_tokens, width) if settings.kind == "inception" else None


class Inception(TokenLayers):
    """The layers in order: attention across tokens, then across features, both without a softmax
    and with gates gamma that start at 0; a mix of tokens to channels; parallel convolutions of
    three kernel sizes; max-pooling; a bottleneck of two layers, whose output starts at 0 and is
    added to the sum of the embeddings, scaled to unit length.

    Args:
        num_tokens: T. width: D, at least `STRIDE`.
    """

    name: ClassVar = "inception"

    def __init__(self, num_tokens: int, width: int):
        super().__init__()
        self.num_tokens = num_tokens
        self.tokens = nn.Linear(num_tokens, num_tokens, bias=False)
        self.features = nn.Linear(width, width, bias=False)
        self.gamma = nn.Parameter(torch.zeros(2))
        self.channels = nn.Conv1d(num_tokens, num_tokens, kernel_size=1)
        self.convolutions = nn.ModuleList()
        for window in WINDOWS:
            # with circular padding each convolution returns D / STRIDE features
            convolution = nn.Conv1d(
                num_tokens,
                num_tokens,
                kernel_size=window,
                stride=STRIDE,
                padding=(window - STRIDE) // 2,
                padding_mode="circular",
            )
            self.convolutions.append(convolution)
        num_features = width // STRIDE
        num_channels = len(WINDOWS) * num_tokens
        self.norms = nn.ModuleList(nn.GroupNorm(1, count) for count in (num_tokens, num_channels))
        self.pooled = min(STRIDE, num_features)
        last = zero_linear(width)
        first = nn.Linear(num_channels * (num_features // self.pooled), width)
        self.bottleneck = nn.Sequential(first, nn.GELU(), last)
        self.dropout = Dropout(DROPOUT)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Vectors [B, D] of weighted token embeddings, padded with zeros."""
        sum_BD = x_BTD.sum(1)
        mean_square_B11 = x_BTD.square().mean((1, 2), keepdim=True)
        x_BTD = x_BTD * mean_square_B11.clamp_min(1e-12).rsqrt()
        # x + gamma x x^T W x, first of x [T, D], then of its transpose
        gram_BTT = x_BTD @ x_BTD.transpose(1, 2)
        x_BTD = x_BTD + self.gamma[0] * (gram_BTT @ self.tokens.weight @ x_BTD)
        mixed_BTD = self.features(x_BTD)
        x_BTD = x_BTD + self.gamma[1] * (mixed_BTD @ x_BTD.transpose(1, 2) @ x_BTD)
        channel_BTD = F.gelu(self.channels(x_BTD))
        channel_BTD = self.dropout(self.norms[0](channel_BTD))
        windows = [convolution(channel_BTD) for convolution in self.convolutions]
        h_BCF = self.norms[1](F.gelu(torch.cat(windows, dim=1)))
        h_BCF = F.max_pool1d(self.dropout(h_BCF), self.pooled)
        return F.normalize(sum_BD, dim=-1) + self.bottleneck(h_BCF.flatten(1))
