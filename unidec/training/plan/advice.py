"""Whether a plan fits a machine, and which settings would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from unidec.config import Params
from unidec.training.plan.items import PHASES, PLACE_NAMES, PLACES, Place, Plan, gib
from unidec.training.plan.machine import Machine

_ENCODE_CHUNK = 256  # texts: smaller ones leave a device idle
MARGIN = 0.05  # of what is free: allocators round up and fragment, other processes breathe
# Settings in order of least harm: first what changes nothing that is learnt, then what changes how finely, at last what
# changes what a step sees. Each is tried on top of those before it, as long as it makes the plan smaller.
Step = tuple[str, Callable[[Params], Any]]


@dataclass(frozen=True)
class Shortage:
    """A place where a plan needs more than there is."""

    place: Place
    phase: str
    needed: int
    free: int

    def __str__(self) -> str:
        during = "" if self.place == "disk" else f" while {PHASES[self.phase]}"
        return f"{PLACE_NAMES[self.place]} {gib(self.needed)}{during}, {gib(self.free)} free"


@dataclass(frozen=True)
class Advice:
    """Settings that make a plan fit.

    Attributes:
        settings: other values by key path. plan: with them.
        fits: they are enough; else they are the smallest that is known here.
    """

    settings: dict[str, Any]
    plan: Plan
    fits: bool

    def __str__(self) -> str:
        return " ".join(f"--set {key}={str(v).lower() if v is True else v}" for key, v in self.settings.items())


def shortages(plan: Plan, machine: Machine, phases: Iterable[str] = tuple(PHASES)) -> list[Shortage]:
    """Where the plan does not fit; what is not known of the machine counts as enough."""
    found = []
    for place in PLACES:
        free = machine.free(place)
        phase, needed = plan.peak(place, phases=phases)
        if free is not None and needed > (1 - MARGIN) * free:
            found.append(Shortage(place, phase, needed, free))
    return found


def fits(plan: Plan, machine: Machine, phases: Iterable[str] = tuple(PHASES)) -> bool:
    """Whether there is room at every place, less `MARGIN`."""
    return not shortages(plan, machine, phases)


def ladder(params: Params) -> list[dict[str, Any]]:
    """Settings to try, in order of least harm; each is a few values by key path that go together."""
    model, pool, run = params.model, params.pool, params.run
    rungs: list[dict[str, Any]] = []
    has_table = model.heads != "de"
    if params.encoder.kind != "bag" and params.encoder.trainable_layers != 0 and not run.recompute:
        rungs.append({"run.recompute": True})
    if run.devices == 1 and not params.encoder.frozen and not 0 < params.optim.encode_chunk <= _ENCODE_CHUNK:
        rungs.append({"optim.encode_chunk": _ENCODE_CHUNK})
    if has_table:
        rungs += [{"run.table_place": place} for place in ("host", "disk") if _after(run.table_place, place)]
        if model.clf_dtype == "fp32":
            rungs.append({"model.clf_dtype": "bf16"})
        rungs += [{"optim.clf_state": state} for state in ("adagrad", "sgd") if _after(params.optim.clf_state, state)]
    if params.index.kind == "hnsw":
        rungs.append({"index.kind": "flat"})
    if params.index.kind in ("flat", "hnsw"):
        rungs.append({"index.kind": "pq"})
    if has_table and pool.clf_labels == "all":
        rungs.append({"pool.clf_labels": "pool"})
    if model.heads != "clf" and pool.de_labels == "all":
        rungs.append({"pool.de_labels": "pool"})
    if params.tokens.max_length > 32:
        rungs.append({"tokens.max_length": 32})
    size = pool.size or pool.batch_size * (pool.beta + pool.eta)
    batch = pool.batch_size
    while batch > 32:  # both together: the pool stays as many times the batch as it was
        batch, size = batch // 2, max(size // 2, batch // 2)
        rungs.append({"pool.batch_size": batch, "pool.size": size})
    return rungs


_ORDER = {"run": ("device", "host", "disk"), "state": ("adam", "adagrad", "sgd")}


def _after(now: str, other: str) -> bool:
    """Whether a value comes behind the present one in its order."""
    for order in _ORDER.values():
        if now in order and other in order:
            return order.index(other) > order.index(now)
    return False


def with_settings(params: Params, settings: dict[str, Any]) -> Params | None:
    """The parameters with other values by key path; None where they are in conflict."""
    values = params.model_dump()
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        (values[section] if section else values)[name] = value
    try:
        return Params.model_validate(values)
    except ValidationError:
        return None


def advice(
    params: Params, machine: Machine, plan_of: Callable[[Params], Plan], phases: Collection[str] = tuple(PHASES)
) -> Advice | None:
    """The mildest settings with which a training fits a machine; None where it fits as it is.

    One rung alone that is enough is taken first, in the ladder's order; else rungs are taken together, from the top,
    those that do not help left out.

    Args:
        params: all parameters. machine: what there is. plan_of: the plan of other parameters on the same sizes.
        phases: those that matter.
    """
    start = plan_of(params)
    if fits(start, machine, phases):
        return None
    rungs = ladder(params)
    for rung in rungs:
        changed = with_settings(params, rung)
        if changed is not None and fits(plan := plan_of(changed), machine, phases):
            return Advice(rung, plan, True)
    taken: dict[str, Any] = {}
    best = start
    for rung in rungs:
        changed = with_settings(params, taken | rung)
        if changed is None:
            continue
        plan = plan_of(changed)
        if _missing(plan, machine, phases) < _missing(best, machine, phases):
            taken, best = taken | rung, plan
            if fits(plan, machine, phases):
                return Advice(taken, plan, True)
    return Advice(taken, best, False)


def _missing(plan: Plan, machine: Machine, phases: Collection[str]) -> float:
    """How much is needed where too little is free, in shares of that."""
    return sum(shortage.needed / max(shortage.free, 1) for shortage in shortages(plan, machine, phases))
