"""Low-rank adapters of a transformer's linear layers, which train instead of its weights (LoRA: Hu
et al., 2022), with PEFT.

Only training has adapters: it exports merged weights, so that nothing else needs PEFT.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unidec.errors import ConfigError, UnidecError
from unidec.model.encoder import TransformerEncoder, empty_transformer
from unidec.model.frozen import frozen_sha256

_ADAPTER = "default"  # PEFT's name of the only one
BASE = "encoder.transformer.base_sha256"  # in checkpoints: which weights the adapters belong to


def add_adapters(encoder: TransformerEncoder | None, lora: Mapping[str, Any]) -> None:
    """Freeze the layers that would train, and give each of their linear layers an adapter, if it
    has none; does nothing for rank 0.

    Args:
        lora: `encoder.lora`. Its targets are last parts of layer names; none: all linear layers.

    Raises:
        ConfigError: there are no such layers. UnidecError: PEFT is not installed.
    """
    rank = lora.get("rank", 0)
    if encoder is None or not rank:
        return
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UnidecError(
            f"PEFT cannot be imported: {error}", fix="pip install 'unidec-xmc[lora]'"
        ) from error
    parts = [part for part in encoder.trained if part is not encoder.dense]
    for part in [] if _adapted(encoder) else parts:
        targets = checked_targets(part, lora.get("targets", []))
        config = LoraConfig(
            r=rank, lora_alpha=lora.get("alpha") or 2 * rank, target_modules=targets
        )
        inject_adapter_in_model(config, part, adapter_name=_ADAPTER)
    for name, parameter in encoder.named_parameters():
        is_dense = name.startswith("dense.") and parameter.requires_grad
        parameter.requires_grad_(".lora_" in name or is_dense)


def checked_targets(part: nn.Module, targets: list[str]) -> list[str]:
    """The given names of linear layers, or all; raises ConfigError if there are no such layers."""
    names = {
        name.rpartition(".")[2]
        for name, module in part.named_modules()
        if isinstance(module, nn.Linear)
    }
    unknown = sorted(set(targets) - names)
    if unknown or not names:
        raise ConfigError(
            "no linear layers of these names",
            where="encoder.lora",
            got=", ".join(unknown) or type(part).__name__,
            expected=", ".join(sorted(names)) or "a transformer with linear layers",
            fix="encoder.lora: {rank: 16} adapts all linear layers",
        )
    return targets or sorted(names)


def check_targets(folder: Path, targets: list[str]) -> None:
    """Raise the ConfigError of `checked_targets` for the transformer in a folder, without its
    weights.
    """
    with torch.device("meta"):
        checked_targets(empty_transformer(folder), targets)


def _adapted(model: nn.Module) -> dict[str, Any]:
    """The layers with an adapter, by name."""
    modules = model.named_modules()
    return {name: module for name, module in modules if hasattr(module, "get_delta_weight")}


@torch.no_grad()
def merged(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's state as if it had no adapters: their products are added to the weights."""
    adapted = _adapted(model)
    if not adapted:
        return state
    plain = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in state.items()
        if ".lora_" not in name
    }
    for name, layer in adapted.items():
        plain[f"{name}.weight"] = layer.base_layer.weight + layer.get_delta_weight(_ADAPTER)
    return plain


def without_own_weights(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's state for a checkpoint: of a model with adapters, without the transformer's own
    weights, which do not change.
    """
    untrained = _untrained_state(model)
    if not untrained:
        return state
    kept = {name: state[name] for name in state if name not in untrained}
    return kept | {BASE: base_sha256(model)}


def with_own_weights(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole state, from a state `without_own_weights`; raises RuntimeError if its adapters
    belong to other weights.
    """
    untrained = _untrained_state(model)
    if not untrained:
        return state
    kept = dict(state)
    if not torch.equal(kept.pop(BASE), base_sha256(model)):
        raise RuntimeError("encoder.lora: the adapters belong to another encoder.name")
    return untrained | kept


def _untrained_state(model: Any) -> dict[str, Tensor]:
    """The transformer's own weights in a model with adapters, which its checkpoints omit; {}
    without adapters.
    """
    if not _adapted(model):
        return {}
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if name.startswith("encoder.transformer.") and not parameter.requires_grad
    }


def base_sha256(model: Any) -> Tensor:
    """sha256 of the transformer's own weights, uint8 [32]; computed once."""
    encoder = model.encoder.transformer
    if not hasattr(encoder, "own_sha256"):
        digest = bytes.fromhex(frozen_sha256(encoder))
        encoder.own_sha256 = torch.tensor(list(digest), dtype=torch.uint8)
    return encoder.own_sha256
