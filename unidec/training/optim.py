"""Optimisers and schedule: AdamW in learning-rate groups for dense parameters, lazy row-sparse Adam for tables.

Legend: R rows of a table, U rows used in a step, D width.

Rows that a step does not use are not touched: their moments do not decay and no weight decay reaches them, and a row
that returns after k steps continues with the moments it had (`torch.optim.SparseAdam` does the same). That costs U x
D instead of R x D a step in time and traffic, which is what lets a table outgrow the batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from unidec.config import Optim
from unidec.model.row_table import RowTable
from unidec.model.unidec import UniDEC

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


class RowAdam:
    """Adam on the rows of one `RowTable` that a step gathered (lazy: see the module).

    Args:
        table: the table.
        lr: base learning rate.
    """

    def __init__(self, table: RowTable, lr: float):
        self.table, self.lr = table, lr
        self.first = torch.zeros_like(table.weight, requires_grad=False)
        self.second = torch.zeros_like(table.weight, requires_grad=False)
        self._count = torch.zeros((), dtype=torch.float32, device=table.weight.device)

    @torch.no_grad()
    def step(self, step: int, factor: float, scale: Tensor | float = 1.0) -> None:
        """Update the gathered rows from their leaf's gradient, then forget them.

        Args:
            step: number of this update, from 1 (bias correction).
            factor: the schedule's share of the learning rate.
            scale: multiplies the gradient (clipping).
        """
        used, self.table.used = self.table.used, None
        if used is None or used[1].grad is None:
            return
        rows, leaf = used
        grad: Tensor = leaf.grad  # type: ignore[assignment]
        weight: Tensor = self.table.weight if rows is None else leaf.detach()  # the leaf holds the rows' values
        first, second = (self.first, self.second) if rows is None else (self.first[rows], self.second[rows])
        self._count.fill_(step - 1)
        adamw(  # one pass over gradient, moments and weight
            [weight], [grad.mul_(scale)], [first], [second], [], [self._count], fused=True, amsgrad=False,
            beta1=BETA1, beta2=BETA2, lr=self.lr * factor, weight_decay=0.0, eps=EPS, maximize=False,
        )  # fmt: skip
        if rows is not None:
            self.first[rows], self.second[rows], self.table.weight[rows] = first, second, weight


class Optimisers:
    """Everything that changes weights: AdamW groups, a `RowAdam` a table, warm-up and cosine, clipping.

    Groups (spec, detail 9): transformer, heads (with the residual network and temperatures), bag, classifier table;
    weight decay on matrices of the dense groups only.
    """

    def __init__(self, model: UniDEC, settings: Optim, steps_per_epoch: int):
        self.settings = settings
        self.warmup = max(1, round(settings.warmup_epochs * steps_per_epoch))
        self.total = max(settings.epochs * steps_per_epoch, self.warmup + 1)
        self.rates = {"encoder": settings.lr_encoder, "heads": settings.lr_heads}
        groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                part = "encoder" if name.startswith("encoder.transformer.") else "heads"
                # biases, norms and temperatures are vectors, in every architecture and whatever their names
                groups.setdefault((part, parameter.ndim > 1), []).append(parameter)
        self.dense = [p for parameters in groups.values() for p in parameters]
        self.adamw = torch.optim.AdamW(
            [
                {"params": parameters, "lr": self.rates[part], "part": part,
                 "weight_decay": settings.weight_decay if decays else 0.0}
                for (part, decays), parameters in groups.items()
            ],
            betas=(BETA1, BETA2), eps=EPS, fused=True,
        )  # fmt: skip
        self.row = {
            name: RowAdam(table, settings.lr_bag if name.startswith("encoder.") else settings.lr_clf)
            for name, table in model.tables().items()
        }

    def factor(self, step: int) -> float:
        """Share of the learning rates at a step (from 0): linear warm-up, then a cosine to 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / (self.total - self.warmup)))

    def gradients(self) -> list[Tensor]:
        """All gradients of the step."""
        leaves = [row.table.used[1] for row in self.row.values() if row.table.used is not None]
        return [t.grad for t in (*self.dense, *leaves) if t.grad is not None]

    def gradient_norm(self) -> Tensor:
        """2-norm over all gradients, 0-d; infinite or NaN as soon as one entry is."""
        return torch.nn.utils.get_total_norm(self.gradients())

    @torch.no_grad()
    def step(self, step: int, norm: Tensor) -> None:
        """One update of everything.

        Args:
            step: from 0.
            norm: of `gradient_norm`.
        """
        limit = self.settings.clip_norm
        scale: Tensor | float = 1.0
        if limit > 0:
            scale = (limit / (norm + 1e-6)).clamp_max(1.0)
            grads = [p.grad for p in self.dense if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, scale)
        factor = self.factor(step)
        for group in self.adamw.param_groups:
            group["lr"] = self.rates[group["part"]] * factor
        self.adamw.step()
        for row in self.row.values():
            row.step(step + 1, factor, scale)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop all gradients and gathered rows."""
        self.adamw.zero_grad(set_to_none=True)
        for row in self.row.values():
            row.table.forget()

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts as named tensors."""
        tensors = {}
        for index, parameter in enumerate(self.dense):
            for key, value in self.adamw.state.get(parameter, {}).items():
                tensors[f"adamw.{index}.{key}"] = torch.as_tensor(value)
        for name, row in self.row.items():
            tensors[f"row.{name}.first"], tensors[f"row.{name}.second"] = row.first, row.second
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` gave for the same model."""
        for index, parameter in enumerate(self.dense):
            prefix = f"adamw.{index}."
            state: dict[str, Any] = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
            if state:
                # the step counts too: the fused update reads them on the device
                self.adamw.state[parameter] = {k: v.to(parameter.device, copy=True) for k, v in state.items()}
        for name, row in self.row.items():
            row.first.copy_(tensors[f"row.{name}.first"])
            row.second.copy_(tensors[f"row.{name}.second"])
