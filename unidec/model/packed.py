"""Texts as a transformer reads them: padded to the longest, or packed one after the other.

A packed sequence has no padding, and each operator is launched once for all its texts: attention
gets the bounds of the texts (`torch.nn.attention.varlen`). It is used on GPUs that multiply
bfloat16; elsewhere texts of similar length are padded together.

Legend: B texts, T tokens of the longest text, F tokens of all texts, H heads, D width of a head, W
width of the transformer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

ATTENTION = "unidec"  # name of `attend` in transformers
# Architectures whose texts may be packed. True: positions are counted from after the padding id.
PACKABLE = {"bert": False, "distilbert": False, "roberta": True, "xlm-roberta": True}


class Padded(NamedTuple):
    """Texts that are padded to the longest: ids int64 [B, T], mask bool [B, T]."""

    ids_BT: Tensor
    mask_BT: Tensor

    def inputs(self, config: Any) -> dict[str, Any]:
        """Arguments of a transformer with this configuration."""
        mask_BT = self.mask_BT.long()
        if config._attn_implementation != "eager" and config.model_type in PACKABLE:
            # a 4-d mask is used as it is; transformers would read the values of a mask [B, T], and
            # the host would wait
            num_tokens = mask_BT.shape[1]
            mask_BT = self.mask_BT[:, None, None, :].expand(-1, 1, num_tokens, -1)
        return {"input_ids": self.ids_BT, "attention_mask": mask_BT}

    def pool(self, hidden_BTW: Tensor, pooling: str) -> Tensor:
        """A vector of each text, float32 [B, W]: the mean of its tokens ("mean"), or weighted by
        their positions from 1 ("weighted_mean"), their maximum ("max"), or the vector of the first
        ("cls") or last one ("last"). A text without tokens has zeros, except for "cls".
        """
        hidden_BTW = hidden_BTW.float()
        if pooling == "cls":
            return hidden_BTW[:, 0]
        weight_BT1 = self.mask_BT.unsqueeze(-1).float()
        if pooling == "max":
            largest_BW = hidden_BTW.masked_fill(weight_BT1 == 0, -torch.inf).amax(1)
            return largest_BW.masked_fill(weight_BT1.amax(1) == 0, 0)
        if pooling == "last":  # no token follows it
            weight_BT1 = weight_BT1 - F.pad(weight_BT1[:, 1:], (0, 0, 0, 1))
        elif pooling == "weighted_mean":
            weight_BT1 = weight_BT1 * weight_BT1.cumsum(1)
        return (hidden_BTW * weight_BT1).sum(1) / weight_BT1.sum(1).clamp_min(1)


class Packed(NamedTuple):
    """Texts packed one after the other.

    Attributes:
        ids_F: int64; place_F: int64, position of each token in its text.
        bounds: int32 [B + 1], where each text begins, and the end of the last.
        most: upper bound on the tokens of a text.
    """

    ids_F: Tensor
    place_F: Tensor
    bounds: Tensor
    most: int

    def inputs(self, config: Any) -> dict[str, Any]:
        """Arguments of a transformer with this configuration; the texts are one row."""
        place_F = self.place_F
        if PACKABLE[config.model_type]:
            place_F = place_F + config.pad_token_id + 1
        return {
            "input_ids": self.ids_F[None],
            "position_ids": place_F[None],
            "cu_seq_lens_q": self.bounds,
            "max_length_q": self.most,
        }

    def pool(self, hidden_1FW: Tensor, pooling: str) -> Tensor:
        """As `Padded.pool`."""
        hidden_FW = hidden_1FW.squeeze(0).float()  # a gradient of [0] would be copied
        begin_B = self.bounds[:-1]
        end_B = self.bounds[1:]
        if pooling == "cls":
            return hidden_FW[begin_B]
        length_B = end_B - begin_B
        has_tokens_B1 = (length_B > 0).unsqueeze(1)
        if pooling == "last":
            return hidden_FW[end_B - 1] * has_tokens_B1
        of_texts: dict[str, Any] = {"offsets": self.bounds, "unsafe": True}
        if pooling == "max":
            largest_BW = torch.segment_reduce(hidden_FW, "max", initial=-torch.inf, **of_texts)
            return largest_BW.where(has_tokens_B1, 0)
        total_B = length_B
        if pooling == "weighted_mean":
            hidden_FW = hidden_FW * (self.place_F + 1).unsqueeze(1)
            total_B = length_B * (length_B + 1) / 2
        sum_BW = torch.segment_reduce(hidden_FW, "sum", initial=0, **of_texts)
        return sum_BW / total_B.clamp_min(1).unsqueeze(1)


def can_pack(config: Any, device: torch.device, amp: torch.dtype | None) -> bool:
    """Whether a transformer reads packed texts on a device under autocast to a type."""
    on_gpu = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return on_gpu and amp is not None and is_packable(config)


def is_packable(config: Any) -> bool:
    """Whether a transformer's architecture and its attention's kernel allow packing."""
    width_of_head = config.hidden_size // config.num_attention_heads
    return config.model_type in PACKABLE and width_of_head % 8 == 0


def attend(
    module: nn.Module,
    query_1HFD: Tensor,
    key_1HFD: Tensor,
    value_1HFD: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention within each text, for transformers' attention interface; torch's for padded texts.

    Packed attention has no dropout of its weights, since its kernel lacks it.
    """
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        parts = (query_1HFD, key_1HFD, value_1HFD)
        return sdpa_attention_forward(module, *parts, attention_mask, **options)
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query_1HFD, key_1HFD, value_1HFD))
    return varlen(query, key, value, cu_seq_lens_q, max_length_q)[None], None


def varlen(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, most: int) -> Tensor:
    """Attention within each text of a packed sequence [F, H, D]; a GPU kernel."""
    from torch.nn.attention.varlen import varlen_attn

    out_FHD = varlen_attn(query, key, value, bounds, bounds, most, most)
    return cast(Tensor, out_FHD)


class _Rounded(torch.autograd.Function):
    """Weights in another type, cast by one launch for all; their gradients are float32."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        rounded = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(rounded, weights)
        return tuple(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exact = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        torch._foreach_copy_(exact, grads)
        return None, *exact


def in_half(module: nn.Module, dtype: torch.dtype, device_type: str) -> Callable[[Packed], Tensor]:
    """A module with its weights rounded to autocast's type, once for all passes; gradients reach
    the original weights.

    Everything in it computes in this type, where autocast would keep norms and sums in float32 and
    cast each input of a layer.
    """
    weights = dict(module.named_parameters())
    rounded = dict(zip(weights, _Rounded.apply(dtype, *weights.values()), strict=True))
    for name, weight in weights.items():
        if not weight.requires_grad:
            rounded[name] = rounded[name].detach()

    def run(texts: Packed) -> Tensor:
        with torch.autocast(device_type, enabled=False):
            return functional_call(module, rounded, (texts,))

    return run
