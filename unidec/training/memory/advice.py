"""Whether a training fits a machine, and the settings that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from unidec.config import Params
from unidec.training.memory.estimate import PHASES, PLACES, Estimate, Phase, Place, gib
from unidec.training.memory.machine import Machine

MARGIN = 0.05  # of what is free: allocators round up and fragment, other processes need some
_ENCODE_CHUNK = 256  # texts: smaller chunks leave a device idle


@dataclass(frozen=True)
class Shortage:
    """A place where a training needs more than is free."""

    place: Place
    phase: Phase
    needed: int
    free: int

    def __str__(self) -> str:
        during = "" if self.place == "disk" else f" during {PHASES[self.phase]}"
        return f"{PLACES[self.place]}: {gib(self.needed)} needed{during}, {gib(self.free)} free"


@dataclass(frozen=True)
class Advice:
    """Other settings by key path; fits: they are enough, otherwise they need least of all that are known."""

    settings: dict[str, Any]
    estimate: Estimate
    fits: bool

    def __str__(self) -> str:
        return " ".join(f"--set {key}={str(v).lower() if v is True else v}" for key, v in self.settings.items())


def shortages(estimate: Estimate, machine: Machine, phases: Collection[Phase] = tuple(PHASES)) -> list[Shortage]:
    """Where the training does not fit; a place of unknown size counts as large enough."""
    found = []
    for place in PLACES:
        free = machine.free(place)
        phase, needed = estimate.peak(place, phases)
        if free is not None and needed > (1 - MARGIN) * free:
            found.append(Shortage(place, phase, needed, free))
    return found


def ladder(params: Params) -> list[dict[str, Any]]:
    """Settings that save memory, mildest first: those that change nothing that is learnt, then precision, then data."""
    model, pool, run, optim = params.model, params.pool, params.run, params.optim
    rungs: list[dict[str, Any]] = []
    if params.encoder.kind != "bag" and params.encoder.trainable_layers != 0 and not run.recompute:
        rungs.append({"run.recompute": True})
    if run.devices == 1 and not params.encoder.frozen and not 0 < optim.encode_chunk <= _ENCODE_CHUNK:
        rungs.append({"optim.encode_chunk": _ENCODE_CHUNK})
    if model.heads != "de":
        rungs += [{"run.table_place": place} for place in _after(run.table_place, "device", "host", "disk")]
        if model.clf_dtype == "fp32":
            rungs.append({"model.clf_dtype": "bf16"})
        rungs += [{"optim.clf_state": state} for state in _after(optim.clf_state, "adam", "adagrad", "sgd")]
    rungs += [{"index.kind": kind} for kind in _after(params.index.kind, "hnsw", "flat", "pq")]
    if model.heads != "de" and pool.clf_labels == "all":
        rungs.append({"pool.clf_labels": "pool"})
    if model.heads != "clf" and pool.de_labels == "all":
        rungs.append({"pool.de_labels": "pool"})
    if params.tokens.max_length > 32:
        rungs.append({"tokens.max_length": 32})
    size, batch = pool.size or pool.batch_size * (pool.beta + pool.eta), pool.batch_size
    while batch > 32:  # the pool keeps its size relative to the batch
        batch, size = batch // 2, max(size // 2, batch // 2)
        rungs.append({"pool.batch_size": batch, "pool.size": size})
    return rungs


def _after(now: str, *values: str) -> tuple[str, ...]:
    return values[values.index(now) + 1 :] if now in values else ()


def with_settings(params: Params, settings: dict[str, Any]) -> Params | None:
    """The parameters with other values by key path; None if they are in conflict."""
    values = params.model_dump()
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        (values[section] if section else values)[name] = value
    try:
        return Params.model_validate(values)
    except ValidationError:
        return None


def advise(
    params: Params,
    machine: Machine,
    estimate_of: Callable[[Params], Estimate],
    phases: Collection[Phase] = tuple(PHASES),
) -> Advice | None:
    """The mildest settings with which a training fits a machine; None if it fits as it is.

    The first single rung of the ladder that is enough; else rungs are combined from the top, without those that do not
    help.

    Args:
        params: all parameters. machine: what is free. estimate_of: the estimate for other parameters, same sizes.
        phases: those that have to fit.
    """

    def missing(found: Estimate) -> float:
        return sum(shortage.needed / max(shortage.free, 1) for shortage in shortages(found, machine, phases))

    best = estimate_of(params)
    if not missing(best):
        return None
    rungs = ladder(params)
    for rung in rungs:
        changed = with_settings(params, rung)
        if changed is not None and not missing(found := estimate_of(changed)):
            return Advice(rung, found, True)
    taken: dict[str, Any] = {}
    for rung in rungs:
        changed = with_settings(params, taken | rung)
        if changed is None:
            continue
        found = estimate_of(changed)
        if missing(found) < missing(best):
            taken, best = taken | rung, found
            if not missing(best):
                return Advice(taken, best, True)
    return Advice(taken, best, False)
