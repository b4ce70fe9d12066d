"""The weights of a transformer encoder by what they do, whatever its library calls them.

Legend: V tokens of the vocabulary, P places, D width, F width between the two layers of a block's feed-forward part.

Source: Devlin et al. 2018 (BERT), whose blocks RoBERTa and DistilBERT have too: attention, add, norm, feed-forward,
add, norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unidec.errors import ConfigError

Floats = NDArray[np.float32]
ACTIVATIONS = ("gelu", "relu")


class UnsupportedModel(ConfigError):
    """A model that the parts here do not describe."""


@dataclass(frozen=True)
class Linear:
    """y = x W + b: weight_IO float32 [in, out], bias_O float32 [out]."""

    weight_IO: Floats
    bias_O: Floats


@dataclass(frozen=True)
class Norm:
    """A layer norm's gain and shift, float32 [D] each."""

    gain_D: Floats
    shift_D: Floats


@dataclass(frozen=True)
class Block:
    """One layer: `qkv` gives queries (scaled by 1 / sqrt(width of a head)), keys and values side by side."""

    qkv: Linear
    out: Linear
    norm: Norm
    up: Linear
    down: Linear
    last_norm: Norm


@dataclass(frozen=True)
class TransformerParts:
    """All of a transformer.

    Attributes:
        words_VD: embeddings of the tokens. places_PD: of their places, with that of the one token type added.
        first_place: row of the first token's place. pad_id: RoBERTa's padding token, which stands in no place; else -1.
        norm: of the embeddings. blocks: from below.
        num_heads: of attention. epsilon: of all norms. activation: "gelu" (exact) or "relu".
    """

    words_VD: Floats
    places_PD: Floats
    first_place: int
    pad_id: int
    norm: Norm
    blocks: tuple[Block, ...]
    num_heads: int
    epsilon: float
    activation: str

    def hidden(self, ids_BT: NDArray[np.int64]) -> Floats:
        """Embeddings of tokens and places before the norm, float32 [B, T, D]."""
        if self.pad_id < 0:
            return self.words_VD[ids_BT] + self.places_PD[self.first_place : self.first_place + ids_BT.shape[1]]
        is_token_BT = ids_BT != self.pad_id
        return self.words_VD[ids_BT] + self.places_PD[np.cumsum(is_token_BT, axis=1) * is_token_BT + self.pad_id]


_BERT = {
    "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
    "out": "attention.output.dense", "norm": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense", "last_norm": "output.LayerNorm",
}  # fmt: skip
_DISTILBERT = {
    "query": "attention.q_lin", "key": "attention.k_lin", "value": "attention.v_lin", "out": "attention.out_lin",
    "norm": "sa_layer_norm", "up": "ffn.lin1", "down": "ffn.lin2", "last_norm": "output_layer_norm",
}  # fmt: skip
_KINDS = {
    "bert": (_BERT, "encoder.layer"), "roberta": (_BERT, "encoder.layer"), "xlm-roberta": (_BERT, "encoder.layer"),
    "distilbert": (_DISTILBERT, "transformer.layer"),
}  # fmt: skip


def transformer_parts(transformer: Any) -> TransformerParts:
    """A transformer's weights; views of its own where they need no change.

    Args:
        transformer: a BERT, RoBERTa, XLM-RoBERTa or DistilBERT model of the library transformers, on the CPU.

    Raises:
        UnsupportedModel: another architecture, or a variant of these that computes something else.
    """
    config = transformer.config
    names, stack = _KINDS.get(config.model_type, (None, ""))
    if names is None:
        raise UnsupportedModel(
            "the weights of this transformer are not known by their names", got=config.model_type,
            expected=", ".join(_KINDS),
        )  # fmt: skip
    state = {name: value.detach().float().numpy() for name, value in transformer.state_dict().items()}
    activation = getattr(config, "hidden_act", None) or config.activation
    refused = {
        "its activation": activation if activation not in ACTIVATIONS else None,
        "its places": _unless(getattr(config, "position_embedding_type", "absolute") or "absolute", "absolute"),
        "its attention": "is_decoder" if getattr(config, "is_decoder", False) else None,
        "its weights": next((name for name in state if name.startswith("pooler.")), None),
    }
    for what, got in refused.items():
        if got is not None:
            raise UnsupportedModel(f"{what} cannot be written as a graph here", got=got)
    num_heads = config.num_attention_heads
    num_blocks = config.num_hidden_layers
    blocks = tuple(_block(state, f"{stack}.{layer}.", names, num_heads) for layer in range(num_blocks))
    places = state["embeddings.position_embeddings.weight"]
    if "embeddings.token_type_embeddings.weight" in state:
        places = places + state["embeddings.token_type_embeddings.weight"][0]
    pad_id = int(config.pad_token_id) if config.model_type in ("roberta", "xlm-roberta") else -1
    return TransformerParts(
        state["embeddings.word_embeddings.weight"], places, pad_id + 1 if pad_id >= 0 else 0, pad_id,
        _norm(state, "embeddings.LayerNorm"), blocks, num_heads, float(getattr(config, "layer_norm_eps", 1e-12)),
        activation,
    )  # fmt: skip


def _unless(value: str, fine: str) -> str | None:
    return None if value == fine else value


def _norm(state: dict[str, Floats], name: str) -> Norm:
    return Norm(state[f"{name}.weight"], state[f"{name}.bias"])


def _linear(state: dict[str, Floats], name: str) -> Linear:
    return Linear(state[f"{name}.weight"].T, state[f"{name}.bias"])


def _block(state: dict[str, Floats], prefix: str, names: dict[str, str], num_heads: int) -> Block:
    query, key, value = (_linear(state, prefix + names[part]) for part in ("query", "key", "value"))
    scale = np.float32(
        1 / np.sqrt(query.weight_IO.shape[1] / num_heads)
    )  # in the weights: one step less for each query
    qkv = Linear(
        np.concatenate([query.weight_IO * scale, key.weight_IO, value.weight_IO], axis=1),
        np.concatenate([query.bias_O * scale, key.bias_O, value.bias_O]),
    )
    out, up, down = (_linear(state, prefix + names[part]) for part in ("out", "up", "down"))
    norm, last_norm = (_norm(state, prefix + names[part]) for part in ("norm", "last_norm"))
    return Block(qkv, out, norm, up, down, last_norm)
