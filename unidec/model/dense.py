"""The linear layers after the pooling of some transformers, such as EmbeddingGemma.

Legend: B texts, D width of a text's vector.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from unidec.model.encoder_folder import DenseLayer, read_encoder_folder


class Dense(nn.Module):
    """A linear layer after the pooling, and its activation."""

    def __init__(self, about: DenseLayer) -> None:
        super().__init__()
        self.about = about
        self.linear = nn.Linear(about.in_features, about.out_features, about.bias)
        self.activation: nn.Module = getattr(nn, about.activation)()

    def forward(self, vector_BD: Tensor) -> Tensor:
        vector_BD = vector_BD.to(self.linear.weight.dtype)
        return self.activation(self.linear(vector_BD))


def zero_linear(width: int) -> nn.Linear:
    """A linear layer whose output is 0 at first; draws as many random numbers as any other."""
    layer = nn.Linear(width, width)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def new_dense(folder: Path) -> list[Dense]:
    """The layers after the pooling of an encoder's folder, with random weights."""
    return [Dense(about) for about in read_encoder_folder(folder).dense]


def load_dense(folder: Path) -> list[Dense]:
    """The layers after the pooling of an encoder's folder."""
    from safetensors.torch import load_file

    layers = new_dense(folder)
    for layer in layers:
        weights = load_file(folder / layer.about.path / "model.safetensors")
        layer.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return layers
