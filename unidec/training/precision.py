"""Device, number format, order of additions and random state of a training."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from unidec.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """If `wanted`, torch uses deterministic algorithms inside the block; an operation that has none
    raises RuntimeError.
    """
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        # filling memory before its use takes time, and only shows faults
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def choose_device(device: str) -> torch.device:
    """The torch device of the parameter `device`; "auto" is a GPU if there is one; under torchrun
    the GPU of LOCAL_RANK.

    A GPU is returned with its number: without one, torch would use the current device of each
    thread, and batches are prepared in another thread.

    Raises:
        ConfigError: "cuda" without a usable GPU, with torch's reason; "auto" with a GPU whose
        driver is too old: training on the CPU instead could take days.
    """
    import torch

    if device == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if is_available:
        number = os.environ.get("LOCAL_RANK", "0")
        return torch.device("cuda", int(number))
    reason = " ".join(str(warning.message) for warning in caught)
    if device == "cuda":
        try:
            torch.cuda.init()
            reason = "none is visible"
        except (RuntimeError, AssertionError) as error:  # no driver, an old one, torch without CUDA
            reason = str(error)
    elif "too old" not in reason:
        return torch.device("cpu")
    raise ConfigError(
        "no usable GPU",
        where="device",
        got=reason,
        fix="device: cpu; or a driver and a build of torch that fit each other",
    )


def autocast_type(precision: str, device: torch.device) -> torch.dtype | None:
    """The type for autocast: bfloat16, or None for float32.

    "auto" is bfloat16 on GPUs and processors that multiply it in hardware (AVX512-BF16 or AMX); on
    others it was measured to be three times slower than float32. The hardware's flags decide, so
    the result on a machine is always the same.

    Raises:
        ConfigError: "bf16" on a GPU that only emulates it.
    """
    import torch

    use_bfloat16 = precision == "bf16"
    if precision != "fp32" and device.type == "cuda":
        # V100 and T4 emulate bfloat16, slower than float32
        use_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if precision == "bf16" and not use_bfloat16:
            raise ConfigError(
                "this GPU has no bfloat16",
                where="optim.precision",
                got=f"bf16 on {torch.cuda.get_device_name(device)}",
                fix="optim.precision: auto or fp32",
            )
    elif precision == "auto":
        use_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if use_bfloat16 else None


def random_state(device: torch.device) -> dict[str, Tensor]:
    """States of torch's default generators (dropout), named as in a checkpoint."""
    import torch

    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Set torch's default generators to the states of a `random_state`."""
    import torch

    torch.set_rng_state(tensors["random.cpu"].cpu())
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"].cpu(), device)
