"""The weights of a transformer encoder by what they do, whatever its library calls them.

Legend: V tokens of the vocabulary, P places, D width, F width between the two layers of a block's feed-forward part.

Source: Devlin et al. 2018 (BERT), whose blocks RoBERTa and DistilBERT have too: attention, add, norm, feed-forward,
add, norm.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def transformer_parts(config: Mapping[str, Any], state: Mapping[str, NDArray[Any]]) -> TransformerParts:
    """A transformer's weights; views of its own where they need no change.

    Args:
        config: of a BERT, RoBERTa, XLM-RoBERTa or DistilBERT model of the library transformers: its config.json.
        state: its weights by the library's names, float32.

    Raises:
        UnsupportedModel: another architecture, or a variant of these that computes something else.
        KeyError, ValueError: weights that are missing, or of shapes that do not fit together.
    """
    kind = config.get("model_type")
    names, stack = _KINDS.get(str(kind), (None, ""))
    if names is None:
        raise UnsupportedModel(
            "the weights of this transformer are not known by their names", got=kind, expected=", ".join(_KINDS)
        )
    activation = _given(config, "hidden_act", "activation")
    refused = {
        "its activation": activation if activation not in ACTIVATIONS else None,
        "its places": _unless(config.get("position_embedding_type") or "absolute", "absolute"),
        "its attention": "is_decoder" if config.get("is_decoder") else None,
        "its weights": next((name for name in state if name.startswith("pooler.")), None),
    }
    for what, got in refused.items():
        if got is not None:
            raise UnsupportedModel(f"{what} cannot be written as a graph here", got=got)
    num_heads = int(_given(config, "num_attention_heads", "n_heads"))  # the second is DistilBERT's
    num_blocks = int(_given(config, "num_hidden_layers", "n_layers"))
    if num_heads < 1:
        raise ValueError(f"{num_heads} heads of attention")
    blocks = tuple(_block(state, f"{stack}.{layer}.", names, num_heads) for layer in range(num_blocks))
    words, places = (state[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position"))
    if "embeddings.token_type_embeddings.weight" in state:
        places = places + state["embeddings.token_type_embeddings.weight"][0]
    pad_id = int(_given(config, "pad_token_id")) if kind in ("roberta", "xlm-roberta") else -1
    epsilon = 1e-12 if kind == "distilbert" else float(_given(config, "layer_norm_eps"))
    parts = TransformerParts(
        words, places, pad_id + 1 if pad_id >= 0 else 0, pad_id, _norm(state, "embeddings.LayerNorm"), blocks,
        num_heads, epsilon, activation,
    )  # fmt: skip
    _check_shapes(parts)
    return parts


def _given(config: Mapping[str, Any], *names: str) -> Any:
    """What a configuration says under one of some names: what the library would take instead is not known here."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise UnsupportedModel("the transformer's config.json does not say", where=names[0])


def _check_shapes(parts: TransformerParts) -> None:
    """Raises ValueError where the weights do not fit each other."""
    width = parts.words_VD.shape[1]
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {"places": (parts.places_PD.shape[1:], (width,))}
    norms = {"embeddings": parts.norm}
    for layer, block in enumerate(parts.blocks):
        norms |= {f"{layer} attention": block.norm, f"{layer} last": block.last_norm}
        inner = block.up.weight_IO.shape[1]
        for name, part, shape in (
            ("qkv", block.qkv, (width, 3 * width)), ("out", block.out, (width, width)),
            ("up", block.up, (width, inner)), ("down", block.down, (inner, width)),
        ):  # fmt: skip
            found[f"layer {layer} {name}"] = (part.weight_IO.shape + part.bias_O.shape, (*shape, shape[1]))
    found |= {f"norm {name}": (norm.gain_D.shape + norm.shift_D.shape, (width, width)) for name, norm in norms.items()}
    if width % parts.num_heads:
        raise ValueError(f"{parts.num_heads} heads of attention in a width of {width}")
    for name, (got, expected) in found.items():
        if got != expected:
            raise ValueError(f"{name}: shape {list(got)} instead of {list(expected)}")


def _unless(value: str, fine: str) -> str | None:
    return None if value == fine else value


def _norm(state: Mapping[str, Floats], name: str) -> Norm:
    return Norm(state[f"{name}.weight"], state[f"{name}.bias"])


def _linear(state: Mapping[str, Floats], name: str) -> Linear:
    return Linear(state[f"{name}.weight"].T, state[f"{name}.bias"])


def _block(state: Mapping[str, Floats], prefix: str, names: dict[str, str], num_heads: int) -> Block:
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
