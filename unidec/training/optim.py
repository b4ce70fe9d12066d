"""Optimisers and schedule: AdamW in learning-rate groups for dense parameters, row-sparse optimisers for tables.

Legend: R rows of a table, U rows used in a step, D width.

Rows that a step does not use are not touched: their moments do not decay and no weight decay reaches them, and a row
that returns after k steps continues with the state it had (`torch.optim.SparseAdam` does the same). That costs U x D
instead of R x D a step, which is what lets a table outgrow the batch (benchmarks/results/classifier-rows.md).

All compute in float32. A table in bfloat16 is written with stochastic rounding: to nearest, an update smaller than
half a unit of bfloat16's 8 bits would be lost each time; rounded up with the right probability it counts on average.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from unidec.model.row_table import RowTable
from unidec.model.unidec import UniDEC
from unidec.sections import Optim

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
MOMENTUM = 0.9
State = dict[str, Tensor]  # by name


class RowOptimiser:
    """Gradient descent without state: w -= lr g. The others differ in `columns` and `update`.

    Args:
        table: keeps the state too (`RowTable.state`).
        lr: base learning rate.
        seed: with the step's number decides how rows in bfloat16 are rounded.
        decay: weight decay; 0 but for `AllRowsAdamW` and `RowMomentum`.
    """

    columns: ClassVar[dict[str, bool]] = {}  # state by name: a value for each entry (True), or one a row

    def __init__(self, table: RowTable, lr: float, seed: int | str = 0, decay: float = 0.0):
        self.table, self.lr, self.seed, self.decay = table, lr, seed, decay
        for name, wide in self.columns.items():
            table.add_state(name, *([table.weight.shape[1]] if wide else []))

    @torch.no_grad()
    def step(self, step: int, factor: float, scale: Tensor | float = 1.0, failed: Tensor | None = None) -> None:
        """Update the gathered rows from their leaf's gradient, then forget them.

        Args:
            step: number of this update, from 1 (bias correction).
            factor: the schedule's share of the learning rate.
            scale: multiplies the gradient (clipping), 0-d.
            failed: float32 0-d, 1 where nothing may change; None: 0.
        """
        rows_U, leaf = self.table.used or (None, None)
        if leaf is None or leaf.grad is None:
            self.table.forget()
            return
        weight, state = leaf.detach(), self.table.used_state()  # the leaf holds the rows' values
        # multiplied on the device: a number made into a tensor would be copied there, for which the host waits
        factors = torch.ones((), dtype=weight.dtype, device=weight.device).mul_(scale)
        if failed is not None:  # without a gradient only Adam's moments would still move
            leaf.grad.masked_fill_(failed.bool(), 0.0)
            factors = torch.where(failed.bool(), 0.0, factors)
        self.update(weight, leaf.grad, state, step, self.lr * factor, factors, failed)
        if self.table.weight.dtype == torch.bfloat16:
            if rows_U is None:
                first = self.table.first_row
                rows_U = torch.arange(first, first + self.table.own_rows, device=weight.device)
            weight = round_to_bfloat16(weight, row_noise(rows_U, weight.shape[1], f"{self.seed} {step}"))
        self.table.write_back(weight, state)

    def update(
        self, weight: Tensor, grad: Tensor, state: State, step: int, lr: float, scale: Tensor, failed: Tensor | None
    ) -> None:
        """Change weight [U, D] and state in place; the gradient may be used up. Where `failed`, gradient and scale are
        0, and both must stay as they are."""
        weight.addcmul_(grad, scale, value=-lr)


class RowAdam(RowOptimiser):
    """Adam (Kingma and Ba, 2015) with the moments of each row as they were when it was last used."""

    columns: ClassVar = {"first": True, "second": True}

    def __init__(self, table: RowTable, lr: float, seed: int | str = 0, decay: float = 0.0):
        super().__init__(table, lr, seed, decay)
        self._count = torch.zeros((), dtype=torch.float32, device=table.device)

    def update(
        self, weight: Tensor, grad: Tensor, state: State, step: int, lr: float, scale: Tensor, failed: Tensor | None
    ) -> None:
        self._count.fill_(step - 1)
        adamw(  # one pass over gradient, moments and weight
            [weight], [grad.mul_(scale)], [state["first"]], [state["second"]], [], [self._count], fused=True,
            amsgrad=False, beta1=BETA1, beta2=BETA2, lr=lr, weight_decay=self.decay, eps=EPS, maximize=False,
            found_inf=failed,
        )  # fmt: skip


class AllRowsAdamW(RowAdam):
    """AdamW (Loshchilov and Hutter, 2019) as torch has it for a whole table: a step changes every row, one without a
    gradient by its moments and by weight decay. Costs R x D a step."""

    @torch.no_grad()
    def step(self, step: int, factor: float, scale: Tensor | float = 1.0, failed: Tensor | None = None) -> None:
        """As `RowOptimiser.step`; the rows that were not gathered have gradient 0."""
        rows_U, leaf = self.table.used or (None, None)
        if rows_U is not None and leaf is not None and leaf.grad is not None:
            self.table.forget()
            with torch.enable_grad():
                leaf_RD = self.table.gather(None)
            leaf_RD.grad = torch.zeros_like(leaf_RD).index_copy_(0, rows_U - self.table.first_row, leaf.grad)
        super().step(step, factor, scale, failed)


class RowMomentum(RowOptimiser):
    """Gradient descent with momentum (Polyak, 1964) and weight decay, as Renee has it: velocity = 0.9 velocity + g +
    decay w; w -= lr velocity."""

    columns: ClassVar = {"velocity": True}

    def update(
        self, weight: Tensor, grad: Tensor, state: State, step: int, lr: float, scale: Tensor, failed: Tensor | None
    ) -> None:
        applies = torch.ones_like(scale) if failed is None else 1 - failed
        velocity = state["velocity"].mul_(1 - (1 - MOMENTUM) * applies).addcmul_(grad, scale)
        if self.decay > 0:
            velocity.addcmul_(weight, applies, value=self.decay)
        weight.addcmul_(velocity, applies, value=-lr)


class RowAdagrad(RowOptimiser):
    """Row-wise AdaGrad (Mudigere et al., 2022; AdaGrad: Duchi et al., 2011): one value a row.

    sum += mean_d(g_d^2); w -= lr g / (sqrt(sum) + eps). With D = 1, a bias, it is AdaGrad itself.
    """

    columns: ClassVar = {"sum": False}

    def update(
        self, weight: Tensor, grad: Tensor, state: State, step: int, lr: float, scale: Tensor, failed: Tensor | None
    ) -> None:
        norm_U = torch.linalg.vector_norm(grad, dim=1).mul_(scale)  # reads the gradient once, makes no [U, D]
        sum_U = state["sum"].addcmul_(norm_U, norm_U, value=1 / grad.shape[1])
        rate_U = sum_U.sqrt().add_(EPS).reciprocal_().mul_(scale)
        weight.addcmul_(grad, rate_U.unsqueeze(1), value=-lr)


ROW_OPTIMISERS: dict[str, type[RowOptimiser]] = {  # by `optim.clf_state`
    "adam": RowAdam, "adamw": AllRowsAdamW, "adagrad": RowAdagrad, "sgd": RowOptimiser, "momentum": RowMomentum,
}  # fmt: skip


def bytes_per_row(dtype: str, state: str, width: int) -> tuple[int, int]:
    """Bytes of a row's weight and of its state, which is float32 always."""
    values = sum(width if wide else 1 for wide in ROW_OPTIMISERS[state].columns.values())
    return width * (2 if dtype == "bf16" else 4), 4 * values


class Optimisers:
    """Everything that changes the weights of a model, which is on its device: AdamW groups, a row-sparse optimiser a
    table, clipping, warm-up, and then a cosine over all epochs, or with patience `last_round`.

    Groups (spec, detail 9): transformer, heads (with the residual network and temperatures), bag, classifier table;
    weight decay on matrices of the dense groups, `clf_decay` on the classifier's rows. The bag's tables train by Adam,
    the classifier's by `clf_state`.

    Attributes:
        dense: parameters that AdamW trains; row: optimisers of the tables, by the tables' names.
        last_round: with patience: steps done at its begin and at its end, as far as they are known.
    """

    def __init__(self, model: UniDEC, settings: Optim, steps_per_epoch: int, *, seed: int = 0):
        self.settings = settings
        self.warmup = max(1, round(settings.warmup_epochs * steps_per_epoch))
        self.total = max(settings.epochs * steps_per_epoch, self.warmup + 1)
        self.last_round = (self.total - 1, self.total)
        self.rates = {"encoder": settings.lr_encoder, "heads": settings.lr_heads}
        groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                part = "encoder" if name.startswith("encoder.transformer.") else "heads"
                # biases, norms and temperatures are vectors, in every architecture and whatever their names
                groups.setdefault((part, parameter.ndim > 1), []).append(parameter)
        groups = groups or {("heads", False): []}  # nothing dense trains: AdamW wants a group
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
                decay = settings.clf_decay if table.weight.shape[1] > 1 else 0.0  # biases do not decay
                self.row[name] = ROW_OPTIMISERS[settings.clf_state](table, settings.lr_clf, f"{seed} {name}", decay)

    def factor(self, step: int) -> float:
        """Share of the learning rates at a step (from 0): linear warm-up, then a cosine to 0; with patience constant
        after the warm-up, and linear to 0 in the last round."""
        if self.settings.patience:
            begin, end = self.last_round
            return min(1.0, (step + 1) / self.warmup) * min(1.0, (end - step) / (end - begin))
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / (self.total - self.warmup)))

    def gradients(self) -> list[Tensor]:
        """All gradients of the step."""
        leaves = [row.table.used[1] for row in self.row.values() if row.table.used is not None]
        return [t.grad for t in (*self.dense, *leaves) if t.grad is not None]

    @torch.no_grad()
    def step(self, step: int, norm: Tensor, failed: Tensor | None = None) -> None:
        """One update of everything at a step (from 0), given the norm of all gradients, 0-d. Where `failed` (float32,
        0-d) is 1 nothing changes, which the device decides: the host need not wait; None: 0."""
        scale: Tensor | float = 1.0
        if self.settings.clip_norm > 0:
            scale = (self.settings.clip_norm / (norm + 1e-6)).clamp_max(1.0)
            grads = [p.grad for p in self.dense if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, scale)
        factor = self.factor(step)
        for group in self.adamw.param_groups:
            group["lr"] = self.rates[group["part"]] * factor
        self.adamw.found_inf = failed  # type: ignore[attr-defined] # as torch.amp's GradScaler hands it over
        self.adamw.step()
        for row in self.row.values():
            row.step(step + 1, factor, scale, failed)
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
        return {name: row.table.rows() for name, row in self.row.items()}

    def load_row_states(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """Copy in what `row_states` gave; KeyError or RuntimeError: it is of another model."""
        for name, own in self.row_states().items():
            for key, tensor in own.items():
                tensor.copy_(tensors[name][key].view(tensor.shape))


def row_noise(rows_U: Tensor, width: int, seed: str) -> Tensor:
    """Random int16 [U, D], uniform over all values: a hash of (seed, row, column).

    So the same on every device, for any order of the rows and any number of processes. SplitMix64 (Steele, Lea and
    Flood, 2014), one 64-bit word for four columns.
    """
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little", signed=True)
    words = (width + 3) // 4
    counter = rows_U.unsqueeze(1) * words
    z = counter + torch.arange(words, device=rows_U.device)
    z.mul_(_signed(0x9E3779B97F4A7C15)).add_(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))  # >> copies the sign
    z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))
    return z.view(torch.int16)[:, :width]


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def round_to_bfloat16(x: Tensor, noise: Tensor) -> Tensor:
    """float32 to bfloat16, up or down at random so that the mean is x; what bfloat16 can hold stays as it is.

    The upper half of a float32 is a bfloat16, and 16 random bits added to the lower half carry into the upper with the
    probability of its share. Infinity stays, NaN stays NaN, and beyond the largest finite value it is infinity or that
    value. `x` is used up; `noise` is int16 of the same shape, uniform.
    """
    nan = x.isnan()
    bits = x.view(torch.int32).add_(noise).add_(0x8000)  # noise is signed: from 0 on
    upper = bits.view(torch.int16).unflatten(-1, (-1, 2))[..., 1]  # little endian, as torch's platforms are
    return upper.view(torch.bfloat16).masked_fill(nan, torch.nan)
