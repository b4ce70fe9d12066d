"""Checks that losses and gradients are finite, without making the host wait in each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class UncheckedStep:
    """A step that the host has not checked yet: rows of some queries, and its losses (0-d)."""

    epoch: int
    step: int
    some_rows: np.ndarray
    losses: dict[str, Tensor]


class FiniteChecks:
    """Records steps on the device, and finds the first that failed.

    On a GPU the host checks only when it logs or writes a checkpoint; until then `failed` stops all
    updates from the first non-finite step on.

    Attributes:
        each_step: whether the host checks after each step.
        failed: float32 0-d, 1 after a step that failed, else 0.
    """

    def __init__(self, device: torch.device):
        self.each_step = device.type == "cpu"
        self.failed = torch.zeros((), device=device)
        # with the value of `failed` after each step
        self._steps: list[tuple[UncheckedStep, Tensor]] = []

    def note(self, step: UncheckedStep, value: Tensor) -> None:
        """Record a step.

        Args:
            value: 0-d, finite if all losses and gradients are.
        """
        self.failed = torch.maximum(self.failed, (~torch.isfinite(value)).float())
        self._steps.append((step, self.failed))

    @property
    def stops_update(self) -> Tensor | None:
        """The optimisers' argument `failed`; None if the host has checked the step."""
        return None if self.each_step else self.failed

    def first_failure(self) -> UncheckedStep | None:
        """The first step since the last call whose loss or gradient was not finite; waits for the
        device.
        """
        steps = self._steps
        self._steps = []
        if not steps or not bool(self.failed):
            return None
        self.failed = torch.zeros_like(self.failed)
        return next(step for step, failed in steps if bool(failed))
