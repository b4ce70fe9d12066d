"""`UniDEC` on a tiny transformer, untrained, and what it makes of texts."""

from __future__ import annotations

from pathlib import Path

import torch

from unidec.config import Params
from unidec.data.tokens import encode_texts
from unidec.methods.assembly import additions
from unidec.model.unidec import UniDEC

TEXTS = ["river query w3", "bread bread", "music label w10 w11 planet"]


def create_model(folder: Path, params: Params, seed: int) -> UniDEC:
    """With the methods that the parameters choose and seven labels."""
    torch.manual_seed(seed)
    everything = params.model_dump()
    return UniDEC.create(params.encoder, params.model, 7, folder, 0, everything, add=additions)


def encode(model: UniDEC, texts: list[str] = TEXTS) -> torch.Tensor:
    """Queries, by the encoder."""
    return torch.from_numpy(
        model.encode("queries", encode_texts(texts, model.tokenizer_folder, 16))
    )
