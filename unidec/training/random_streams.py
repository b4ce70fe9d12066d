"""Random streams of dropout: one a rank, kept in checkpoints.

All ranks create the same model from the same seed; then each continues with a stream of its own, or texts of different
ranks would lose the same entries. So with dropout several ranks train as well as one, but not to the same bits; and a
run resumed with another number of ranks continues with streams that begin there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from unidec.training.distributed import Ranks


def random_state(device: torch.device) -> dict[str, Tensor]:
    """States of torch's generators (dropout), as dense tensors of a checkpoint."""
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Continue the sequences that `random_state` saw."""
    torch.set_rng_state(tensors["random.cpu"].cpu())
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"].cpu(), device)


def start_stream(seed: int, step: int, ranks: Ranks) -> None:
    """The first rank continues with the stream that created the model, the others begin their own."""
    if not ranks.is_first:
        torch.manual_seed(int(np.random.SeedSequence([seed % 2**63, ranks.rank, step]).generate_state(1, np.uint64)[0]))


def random_states(device: torch.device, ranks: Ranks) -> dict[str, Tensor]:
    """States of all ranks' generators: `random.cpu` of the first, `random.cpu.1` of the second, ...; all ranks call."""
    own = random_state(device)
    if ranks.alone:
        return own
    states = {}
    for name, state in own.items():
        for rank, row in enumerate(ranks.gather_array(state.cpu().numpy()[None])):
            states[f"{name}.{rank}" if rank else name] = torch.from_numpy(row.copy())
    return states


def restore_random_states(
    tensors: Mapping[str, Tensor], device: torch.device, seed: int, step: int, ranks: Ranks
) -> None:
    """Continue this rank's sequences; a rank that the checkpoint does not know begins its own at this step."""
    suffix = "" if ranks.is_first else f".{ranks.rank}"
    own = {name: tensors[name + suffix] for name in ("random.cpu", "random.cuda") if name + suffix in tensors}
    if own:
        restore_random_state(own, device)
    else:
        start_stream(seed, step, ranks)
