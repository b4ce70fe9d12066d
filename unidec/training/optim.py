"""Optimisers and schedule: AdamW in learning-rate groups for dense parameters, row-sparse
optimisers for tables.

Legend: R rows of a table, U rows used in a step, D width.

A row-sparse optimiser does not touch rows that a step does not use: their moments do not decay,
they have no weight decay, and a row that is used again after k steps continues with its old state
(`torch.optim.SparseAdam` does the same). A step then costs U x D instead of R x D, hardly more for
a large table (benchmarks/results/classifier-rows.md).

All optimisers compute in float32. A table in bfloat16 is written with stochastic rounding: rounding
to nearest would lose each update smaller than half a unit of bfloat16's 8 bits, while stochastic
rounding is correct on average."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from unidec.config import Optim
from unidec.model.row_table import RowTable
from unidec.model.unidec import UniDEC

BETA1 = 0.9
BETA2 = 0.999
EPS = 1e-8
MOMENTUM = 0.9
# of SplitMix64, as signed numbers: the increment; shifts and factors (the last shift has none)
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
State = dict[str, Tensor]  # an optimiser's state by name


@dataclass
class RowOptimiser:
    """Gradient descent without state: w -= lr g. Subclasses override `columns` and `update`.

    Attributes:
        table: also holds the optimiser's state (`RowTable.state`).
        lr: base learning rate.
        seed: with the step's number decides how rows in bfloat16 are rounded.
        decay: weight decay, for `AllRowsAdamW` and `RowMomentum` only.
    """

    # state by name: one value for each entry (True) or for each row (False)
    columns: ClassVar[dict[str, bool]] = {}

    table: RowTable
    lr: float
    seed: int | str = 0
    decay: float = 0.0

    def __post_init__(self) -> None:
        table = self.table
        width = table.weight.shape[1]
        for name, wide in self.columns.items():
            shape = (width,) if wide else ()
            table.add_state(name, *shape)

    @torch.no_grad()
    def step(
        self, step: int, factor: float, scale: Tensor | float = 1.0, failed: Tensor | None = None
    ) -> None:
        """Update the gathered rows with their leaf's gradient, and end the table's use of them.

        Args:
            step: number of this update, from 1 (bias correction).
            factor: the schedule's factor of the learning rate.
            scale: multiplies the gradient (clipping), 0-d.
            failed: float32 0-d, 1 if nothing may change, else 0; None: 0.
        """
        table = self.table
        rows_U, leaf = table.used or (None, None)
        if leaf is None or leaf.grad is None:
            table.forget()
            return
        weight = leaf.detach()  # the leaf holds the rows' values
        state = table.used_state()
        # created on the device: the host would wait for the copy of a Python number
        scales = torch.ones((), dtype=weight.dtype, device=weight.device).mul_(scale)
        # the gradient may not be finite; with a gradient of 0, `update` handles moments
        if failed is not None:
            leaf.grad.masked_fill_(failed.bool(), 0.0)
            scales = torch.where(failed.bool(), 0.0, scales)
        self.update(
            weight, leaf.grad, state, step=step, lr=self.lr * factor, scale=scales, failed=failed
        )
        if table.weight.dtype == torch.bfloat16:
            if rows_U is None:
                rows_U = torch.arange(table.own_rows, device=weight.device) + table.first_row
            noise = row_noise(rows_U, weight.shape[1], f"{self.seed} {step}")
            weight = round_to_bfloat16(weight, noise)
        table.write_back(weight, state)

    def update(
        self,
        weight: Tensor,
        grad: Tensor,
        state: State,
        *,
        step: int,
        lr: float,
        scale: Tensor,
        failed: Tensor | None,
    ) -> None:
        """Update weight [U, D] and state in place; may overwrite the gradient. If `failed` is 1,
        gradient and scale are 0, and weight and state must not change.
        """
        weight.addcmul_(grad, scale, value=-lr)


class RowAdam(RowOptimiser):
    """Adam (Kingma and Ba, 2015), in which the moments of a row change only when it is used."""

    columns: ClassVar = {"first": True, "second": True}

    def update(
        self,
        weight: Tensor,
        grad: Tensor,
        state: State,
        *,
        step: int,
        lr: float,
        scale: Tensor,
        failed: Tensor | None,
    ) -> None:
        # created on the device: the host would wait for the copy of a Python number
        num_steps = torch.full((), step - 1, dtype=torch.float32, device=weight.device)
        adamw(  # one pass over gradient, moments and weight
            params=[weight],
            grads=[grad.mul_(scale)],
            exp_avgs=[state["first"]],
            exp_avg_sqs=[state["second"]],
            max_exp_avg_sqs=[],
            state_steps=[num_steps],
            fused=True,
            amsgrad=False,
            beta1=BETA1,
            beta2=BETA2,
            lr=lr,
            weight_decay=self.decay,
            eps=EPS,
            maximize=False,
            found_inf=failed,
        )


class AllRowsAdamW(RowAdam):
    """AdamW (Loshchilov and Hutter, 2019) of a whole table, as in torch: a step changes every row,
    those without a gradient by their moments and weight decay. A step costs R x D.
    """

    @torch.no_grad()
    def step(
        self, step: int, factor: float, scale: Tensor | float = 1.0, failed: Tensor | None = None
    ) -> None:
        """As `RowOptimiser.step`; rows that were not gathered have a gradient of 0."""
        rows_U, leaf = self.table.used or (None, None)
        if rows_U is not None and leaf is not None and leaf.grad is not None:
            self.table.forget()
            with torch.enable_grad():
                leaf_RD = self.table.gather(None)
            place_U = rows_U - self.table.first_row
            leaf_RD.grad = torch.zeros_like(leaf_RD).index_copy_(0, place_U, leaf.grad)
        super().step(step, factor, scale, failed)


class RowMomentum(RowOptimiser):
    """Gradient descent with momentum (Polyak, 1964) and weight decay, as in Renee: velocity = 0.9
    velocity + g + decay w; w -= lr velocity.
    """

    columns: ClassVar = {"velocity": True}

    def update(
        self,
        weight: Tensor,
        grad: Tensor,
        state: State,
        *,
        step: int,
        lr: float,
        scale: Tensor,
        failed: Tensor | None,
    ) -> None:
        # 1, or 0 after a failure: then nothing changes
        ok = torch.ones_like(scale) if failed is None else 1 - failed
        velocity = state["velocity"]
        velocity.mul_(1 - (1 - MOMENTUM) * ok).addcmul_(grad, scale)
        if self.decay > 0:
            velocity.addcmul_(weight, ok, value=self.decay)
        weight.addcmul_(velocity, ok, value=-lr)


class RowAdagrad(RowOptimiser):
    """Row-wise AdaGrad (Mudigere et al., 2022; AdaGrad: Duchi et al., 2011), with one value of
    state for each row.

    sum += mean_d(g_d^2); w -= lr g / (sqrt(sum) + eps). With D = 1 (a bias) it is AdaGrad.
    """

    columns: ClassVar = {"sum": False}

    def update(
        self,
        weight: Tensor,
        grad: Tensor,
        state: State,
        *,
        step: int,
        lr: float,
        scale: Tensor,
        failed: Tensor | None,
    ) -> None:
        # reads the gradient once, without a [U, D] copy
        norm_U = torch.linalg.vector_norm(grad, dim=1).mul_(scale)
        sum_U = state["sum"]
        sum_U.addcmul_(norm_U, norm_U, value=1 / grad.shape[1])
        rate_U = sum_U.sqrt().add_(EPS).reciprocal_().mul_(scale)
        weight.addcmul_(grad, rate_U.unsqueeze(1), value=-lr)


ROW_OPTIMISERS: dict[str, type[RowOptimiser]] = {  # by `optim.clf_state`
    "adam": RowAdam,
    "adamw": AllRowsAdamW,
    "adagrad": RowAdagrad,
    "sgd": RowOptimiser,
    "momentum": RowMomentum,
}


class Optimisers:
    """The optimisers of a model, which must be on its device: AdamW for dense parameters, one
    optimiser for each table; gradient clipping; and the learning-rate schedule.

    Groups: transformer, heads (with the residual network and temperatures), bag,
    classifier table. Weight decay applies to matrices of the dense groups, `clf_decay` to the
    classifier's rows. The bag's tables train by Adam, the classifier's by `clf_state`.

    Attributes:
        dense: parameters that AdamW trains; row: the tables' optimisers by name of the table.
        last_round: with patience: finished steps of the run at the beginning and end of the last
            round, as known so far.
    """

    def __init__(self, model: UniDEC, settings: Optim, steps_per_epoch: int, *, seed: int = 0):
        num_steps = settings.epochs * steps_per_epoch
        self.settings = settings
        self.warmup = max(1, round(settings.warmup_epochs * steps_per_epoch))
        self.total = max(num_steps, self.warmup + 1)
        self.last_round = (self.total - 1, self.total)
        groups: dict[tuple[bool, bool], dict[str, Any]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                is_encoder = name.startswith("encoder.transformer.")
                rate = settings.lr_encoder if is_encoder else settings.lr_heads
                # no weight decay on biases, norms and temperatures: in every architecture they are
                # vectors
                decays = parameter.ndim > 1
                decay = settings.weight_decay if decays else 0.0
                new = {"params": [], "base_lr": rate, "lr": rate, "weight_decay": decay}
                group = groups.setdefault((is_encoder, decays), new)
                group["params"].append(parameter)
        # AdamW needs a group even if no dense parameter trains
        of_adamw = list(groups.values()) or [{"params": [], "base_lr": 0.0}]
        self.dense: list[nn.Parameter] = []
        for group in of_adamw:
            self.dense += group["params"]
        self.adamw = torch.optim.AdamW(
            of_adamw, betas=(BETA1, BETA2), eps=settings.adam_eps, fused=True
        )
        self.row: dict[str, RowOptimiser] = {}
        for name, table in model.tables().items():
            if name.startswith("encoder."):
                # a frozen table needs no state
                optimiser = RowOptimiser if model.encoder.frozen else RowAdam
                self.row[name] = optimiser(table, settings.lr_bag)
            else:
                # biases do not decay
                decay = settings.clf_decay if table.weight.shape[1] > 1 else 0.0
                optimiser = ROW_OPTIMISERS[settings.clf_state]
                self.row[name] = optimiser(table, settings.lr_clf, f"{seed} {name}", decay)

    def factor(self, step: int) -> float:
        """Factor of the learning rates at a step (from 0): linear warm-up, then a cosine or a line
        to 0; with patience constant after the warm-up, and linear to 0 in the last round.
        """
        warm = (step + 1) / self.warmup
        if self.settings.patience:
            begin, end = self.last_round
            left = (end - step) / (end - begin)
            return min(1.0, warm) * min(1.0, left)
        if step < self.warmup:
            return warm
        if self.settings.decay == "linear":
            return (self.total - step) / (self.total - self.warmup)
        done = math.pi * (step - self.warmup) / (self.total - self.warmup)
        return 0.5 * (1 + math.cos(done))

    def gradients(self) -> list[Tensor]:
        """All gradients of the step, of dense parameters and of tables."""
        used = [row.table.used for row in self.row.values()]
        leaves = [each[1] for each in used if each is not None]
        return _gradients([*self.dense, *leaves])

    @torch.no_grad()
    def step(self, step: int, norm: Tensor, failed: Tensor | None = None) -> None:
        """Update all weights at a step (from 0).

        Args:
            norm: of all gradients, 0-d.
            failed: float32 0-d; if it is 1, nothing changes. The device decides this, so that the
                host need not wait. None: 0.
        """
        scale: Tensor | float = 1.0
        if self.settings.clip_norm > 0:
            scale = (self.settings.clip_norm / (norm + 1e-6)).clamp_max(1.0)
            grads = _gradients(self.dense)
            if grads:
                torch._foreach_mul_(grads, scale)
        factor = self.factor(step)
        for group in self.adamw.param_groups:
            group["lr"] = group["base_lr"] * factor
        self.adamw.found_inf = failed  # type: ignore[attr-defined] # as torch.amp's GradScaler hands it over
        self.adamw.step()
        for row in self.row.values():
            row.step(step + 1, factor, scale, failed)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop all gradients, and end the tables' use of gathered rows."""
        self.adamw.zero_grad(set_to_none=True)
        for row in self.row.values():
            row.table.forget()

    def dense_state(self) -> dict[str, Tensor]:
        """AdamW's moments and step counts as "adamw.<number of the parameter>.<key>"; empty before
        the first step.
        """
        tensors = {}
        for index, state in self.adamw.state_dict()["state"].items():
            for key, value in state.items():
                tensors[f"adamw.{index}.{key}"] = value
        return tensors

    def load_dense_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore a `dense_state` of the same model; other names are ignored."""
        for name, tensor in tensors.items():
            if name.startswith("adamw."):
                _, index, key = name.split(".")
                parameter = self.dense[int(index)]
                # also the step counts, which the fused update reads on the device
                self.adamw.state[parameter][key] = tensor.to(parameter.device, copy=True)

    def row_states(self) -> dict[str, dict[str, Tensor]]:
        """Weight (as "weight") and optimiser state of the rows held here, by table: the tensors
        themselves.
        """
        return {name: row.table.rows() for name, row in self.row.items()}

    def load_row_states(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """Copy the tensors of a `row_states` into the tables. Raises KeyError or RuntimeError: they
        are of another model.
        """
        for name, state in self.row_states().items():
            for key, tensor in state.items():
                saved = tensors[name][key]
                tensor.copy_(saved.view(tensor.shape))


def _gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def row_noise(rows_U: Tensor, width: int, seed: str) -> Tensor:
    """Random int16 [U, D], uniform over all values, from a hash of (seed, row, column).

    The values are the same on every device, for any order of the rows and any number of processes.
    The hash is SplitMix64 (Steele, Lea and Flood, 2014), with one 64-bit word for four columns."""
    digest = hashlib.sha256(seed.encode()).digest()
    start = int.from_bytes(digest[:8], "little", signed=True)
    words = (width + 3) // 4
    counter = rows_U.unsqueeze(1) * words
    z = counter + torch.arange(words, device=rows_U.device)
    z.mul_(_INCREMENT).add_(start)
    for shift, factor in _MIXING:
        unsigned = (1 << (64 - shift)) - 1  # >> copies the sign
        z.bitwise_xor_((z >> shift) & unsigned)
        z.mul_(factor)
    return z.view(torch.int16)[:, :width]


def round_to_bfloat16(x: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bfloat16, up or down at random so that the expected result is x; exact
    values do not change.

    The upper half of a float32 is a bfloat16. Adding 16 random bits to the lower half carries into
    the upper half with a probability in proportion to the lower half's value. Infinity and NaN do
    not change; a value beyond the largest finite bfloat16 becomes infinity or that bfloat16.

    Args:
        x: is overwritten.
        noise: int16 of the same shape, uniform.
    """
    nan = x.isnan()
    bits = x.view(torch.int32)
    bits.add_(noise).add_(0x8000)  # noise is signed, the sum is not negative
    # halves of each number; little endian, as torch's platforms are
    halves = bits.view(torch.int16).unflatten(-1, (-1, 2))
    upper = halves[..., 1]
    return upper.view(torch.bfloat16).masked_fill(nan, torch.nan)
