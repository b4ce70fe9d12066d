"""Checkpoints of a training run: everything that decides its future, whole or absent.

Layout of a run's folder: `checkpoints/epoch-00005/` (model.safetensors, optimisers.safetensors, state.json,
manifest.json), `checkpoints/latest` (a name), `refresh/` (clusters and hard negatives of the coming round),
`history.jsonl`, `rounds.jsonl`. A checkpoint lies at the end of a round, where the next refresh follows: clusters and
negatives are not in it. Two valid checkpoints are kept; `latest` moves only when its checkpoint is durable.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unidec.data.storage import read_manifest, write_bytes_atomic, write_folder
from unidec.errors import ArtifactError

KIND, VERSION = "checkpoint", 1
KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: counters, weights, optimiser state with the random states."""

    state: dict[str, Any]
    model: dict[str, Tensor]
    optimisers: dict[str, Tensor]


def save_checkpoint(run_dir: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint beside the others, move `latest`, then remove all but the newest two.

    Raises:
        ArtifactError: it cannot be written; the ones before it are untouched.
    """
    from safetensors.torch import save_file

    root = run_dir / "checkpoints"
    path = root / f"epoch-{checkpoint.state['epoch']:05d}"
    tensors = (*checkpoint.model.values(), *checkpoint.optimisers.values())
    size = sum(t.numel() * t.element_size() for t in tensors)
    with write_folder(path, KIND, VERSION, num_bytes=size) as out:
        for name, group in (("model", checkpoint.model), ("optimisers", checkpoint.optimisers)):
            save_file({k: v.detach().cpu().contiguous() for k, v in group.items()}, out.path / f"{name}.safetensors")
        (out.path / "state.json").write_text(json.dumps(checkpoint.state, sort_keys=True) + "\n", encoding="utf-8")
    write_bytes_atomic(root / "latest", path.name.encode())
    for old in sorted(root.glob("epoch-*"))[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def load_checkpoint(run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with newer ones; None where there is none at all.

    Raises:
        ArtifactError: there are checkpoints, and none is whole.
    """
    from safetensors.torch import load_file

    refused: list[str] = []
    for path in _newest_first(run_dir / "checkpoints"):
        try:
            read_manifest(path, KIND, VERSION)
        except ArtifactError as error:
            refused.append(str(error))
            continue
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        model, optimisers = (load_file(path / f"{name}.safetensors") for name in ("model", "optimisers"))
        return Checkpoint(state, model, optimisers), refused
    if refused:
        raise ArtifactError(
            "no checkpoint of this run is whole",
            where=str(run_dir / "checkpoints"),
            got="; ".join(refused),
            fix="delete the run's folder to train from the start",
        )
    return None, refused


def _newest_first(root: Path) -> Iterator[Path]:
    yield from sorted(root.glob("epoch-*"), reverse=True)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """States of torch's generators (dropout), as tensors to keep with the optimisers."""
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(tensors: dict[str, Tensor], device: torch.device) -> None:
    """Continue the sequences that `random_state` saw."""
    torch.set_rng_state(tensors["random.cpu"].cpu())
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"].cpu(), device)
