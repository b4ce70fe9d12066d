"""Static vectors of tokens in place of a transformer: a folder of model2vec (Tulkens and van
Dongen, 2024), whose model.safetensors has a vector of each token, distilled from a transformer.

A text's vector is the mean of its tokens' vectors, without special and unknown tokens: their
vectors are set to 0, which does not change the direction.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from unidec.data.tensor_file import open_tensors, read_tensors
from unidec.data.tokens import load_tokenizer
from unidec.errors import ArtifactError
from unidec.model.sources import STATIC

_FILE = "model.safetensors"
_STORED = "encoder.transformer.transformer.embedding.weight"  # in a trained model's file
_MOST_SPECIALS = 64  # more tokens than any tokenizer puts around a text


class StaticVectors(nn.Module):
    """Has the interface of a model of transformers; its hidden states are the tokens' vectors.

    Args:
        weight_VD: vectors of the tokens.
    """

    def __init__(self, weight_VD: Tensor) -> None:
        super().__init__()
        num_tokens, width = weight_VD.shape
        self.embedding = nn.Embedding(num_tokens, width, _weight=weight_VD)
        self.config = SimpleNamespace(
            model_type=STATIC,
            vocab_size=num_tokens,
            hidden_size=width,
            num_hidden_layers=0,
            num_attention_heads=1,
            is_encoder_decoder=False,
            _attn_implementation="eager",
        )

    def get_input_embeddings(self) -> nn.Embedding:
        """The tokens' vectors."""
        return self.embedding

    def set_attn_implementation(self, name: str) -> None:
        """Does nothing: there is no attention."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))


def load_static(folder: Path) -> StaticVectors:
    """The vectors of a model2vec folder, float32, with their weights.

    Raises ArtifactError: vectors are missing, or do not fit the tokenizer.
    """
    tensors = read_tensors(folder / _FILE)
    tokenizer = load_tokenizer(folder, _MOST_SPECIALS)
    try:
        weight_VD = tensors["embeddings"].float()
        if "mapping" in tensors:  # tokens may share a vector
            weight_VD = weight_VD[tensors["mapping"].long()]
        if "weights" in tensors:
            weight_VD = weight_VD * tensors["weights"].float()[:, None]
        if len(weight_VD) < tokenizer.vocab_size:
            raise ValueError(f"{len(weight_VD)} vectors of {tokenizer.vocab_size} tokens")
    except (KeyError, ValueError, IndexError, RuntimeError) as error:
        raise ArtifactError(
            "not the vectors of a model2vec folder",
            where=folder / _FILE,
            got=f"{error}; tensors: {', '.join(tensors)}",
            expected="embeddings of all tokens of tokenizer.json",
            fix="save it again with StaticModel.save_pretrained",
        ) from error
    around_text, _ = tokenizer.encode([""])
    unknown = [tokenizer.unknown_id] if tokenizer.unknown_id >= 0 else []
    weight_VD = weight_VD.clone()
    weight_VD[[*around_text.tolist(), *unknown]] = 0
    return StaticVectors(weight_VD)


def empty_static(config_folder: Path) -> StaticVectors:
    """Static vectors of 0, as many as in the folder's file or in the trained model around it."""
    file, name = config_folder / _FILE, "embeddings"
    if not file.is_file():
        file, name = config_folder.parent / _FILE, _STORED
    with open_tensors(file) as tensors:
        mapped = "mapping" if name != _STORED and "mapping" in tensors.names else name
        shape: Any = (tensors.shape(mapped)[0], tensors.shape(name)[1])
    return StaticVectors(torch.zeros(shape))
