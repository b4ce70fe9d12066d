"""Optimisers and schedule: AdamW in learning-rate groups for dense parameters, row-sparse optimisers for tables.

Legend: S rows that the classifier uses in a step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from unidec.model.unidec import UniDEC
from unidec.sections import Optim
from unidec.training.row_optim import BETA1, BETA2, EPS, ROW_OPTIMISERS


class Optimisers:
    """Everything that changes weights: AdamW groups, a row-sparse optimiser a table, warm-up and cosine, clipping.

    Groups (spec, detail 9): transformer, heads (with the residual network and temperatures), bag, classifier table;
    weight decay on matrices of the dense groups only. The bag's tables train by Adam, the classifier's by
    `clf_state`.

    Args:
        model: on its device.
        settings: section `optim`.
        steps_per_epoch: for the schedule.
        seed: decides how rows in bfloat16 are rounded.

    Attributes:
        dense: parameters that AdamW trains; row: optimisers of the tables, by the tables' names.
    """

    def __init__(self, model: UniDEC, settings: Optim, steps_per_epoch: int, *, seed: int = 0):
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
        self.device = model.device
        self.row = {}
        for name, table in model.tables().items():
            if name.startswith("encoder."):  # sgd keeps nothing
                self.row[name] = ROW_OPTIMISERS["sgd" if model.encoder.frozen else "adam"](table, settings.lr_bag)
            else:
                self.row[name] = ROW_OPTIMISERS[settings.clf_state](table, settings.lr_clf, f"{seed} {name}")

    def factor(self, step: int) -> float:
        """Share of the learning rates at a step (from 0): linear warm-up, then a cosine to 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / (self.total - self.warmup)))

    def gradients(self) -> list[Tensor]:
        """All gradients of the step."""
        leaves = [row.table.used[1] for row in self.row.values() if row.table.used is not None]
        return [t.grad for t in (*self.dense, *leaves) if t.grad is not None]

    @torch.no_grad()
    def step(self, step: int, norm: Tensor) -> None:
        """One update of everything at a step (from 0), given the norm of all gradients, 0-d."""
        scale: Tensor | float = 1.0
        if self.settings.clip_norm > 0:
            scale = (self.settings.clip_norm / (norm + 1e-6)).clamp_max(1.0)
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

    def dense_state(self) -> dict[str, Tensor]:
        """AdamW's moments and step counts, "adamw.<number of the parameter>.<key>"; empty before the first step."""
        return {
            f"adamw.{index}.{key}": torch.as_tensor(value)
            for index, parameter in enumerate(self.dense)
            for key, value in self.adamw.state.get(parameter, {}).items()
        }

    def load_dense_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `dense_state` gave for the same model; other names are passed over."""
        for index, parameter in enumerate(self.dense):
            prefix = f"adamw.{index}."
            state: dict[str, Any] = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
            if state:
                # the step counts too: the fused update reads them on the device
                self.adamw.state[parameter] = {k: v.to(parameter.device, copy=True) for k, v in state.items()}

    def row_states(self) -> dict[str, dict[str, Tensor]]:
        """Rows held here, by table: "weight" and what its optimiser keeps. The tensors themselves, no copies."""
        return {name: {**row.state(), "weight": row.table.weight.detach()} for name, row in self.row.items()}

    def load_row_states(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """Copy in what `row_states` gave; KeyError or RuntimeError: it is of another model."""
        for name, own in self.row_states().items():
            for key, tensor in own.items():
                tensor.copy_(tensors[name][key].view(tensor.shape))
