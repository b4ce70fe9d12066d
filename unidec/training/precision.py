"""Device, number format and random numbers of a training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from unidec.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def choose_device(device: str) -> torch.device:
    """ "auto" is a GPU where there is one; under torchrun that of LOCAL_RANK.

    A GPU comes with its number: the current device, which torch takes where there is none, belongs to a thread, and
    batches are prepared in another one.

    Raises:
        ConfigError: "cuda" without a usable GPU.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no usable GPU", where="device", got="cuda", fix="device: auto or cpu")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def autocast_type(precision: str, device: torch.device) -> torch.dtype | None:
    """The type transformers compute in: bfloat16, or None for float32.

    "auto" takes bfloat16 on GPUs and on processors that multiply it in hardware (AVX512-BF16 or AMX). Without that it
    was measured three times slower than float32. The processor's flags decide, so the same machine always decides
    alike.
    """
    import torch

    able = precision == "bf16"
    if precision == "auto" and device.type == "cuda":
        able = torch.cuda.is_bf16_supported(including_emulation=False)  # V100 and T4 emulate it, slower than float32
    elif precision == "auto":
        able = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if able else None


def random_state(device: torch.device) -> dict[str, Tensor]:
    """States of torch's generators (dropout), as dense tensors of a checkpoint."""
    import torch

    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Continue the sequences that `random_state` saw."""
    import torch

    torch.set_rng_state(tensors["random.cpu"].cpu())
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"].cpu(), device)
