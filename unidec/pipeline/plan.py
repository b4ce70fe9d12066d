"""The memory of a training: estimated (`unidec plan`), checked before it starts, compared with what was used."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from unidec.config import Params, with_settings
from unidec.errors import ConfigError
from unidec.machine import available_device, available_disk, available_host, device_peak, host_peak, resident
from unidec.pipeline import paths
from unidec.pipeline.memory import (
    GIB,
    MARGIN,
    PHASES,
    PLACES,
    Estimate,
    Free,
    Phase,
    Place,
    Shortage,
    empty_encoder,
    estimate,
    gib,
)
from unidec.pipeline.start_file import effective
from unidec.pipeline.step_sizes import Sizes
from unidec.training.precision import autocast_type, choose_device

# what is trained is saved before the index is built, which can be done on another machine
TRAINING: tuple[Phase, ...] = tuple(phase for phase in PHASES if phase != "index")
# Memory that the CUDA context, its libraries and cuBLAS's workspaces take. An assumption, used only for a GPU that is
# given by its size: the free memory that a GPU here reports excludes them.
CONTEXT_BYTES = 512 << 20
# mildest first: those that change nothing that is learnt, then precision, then data
REMEDIES: tuple[dict[str, Any], ...] = (
    {"run.recompute": True}, {"optim.encode_chunk": 256}, {"run.table_place": "host"}, {"run.table_place": "disk"},
    {"model.clf_dtype": "bf16"}, {"optim.clf_state": "adagrad"}, {"optim.clf_state": "sgd"},
    {"pool.clf_labels": "pool"}, {"pool.de_labels": "pool"}, {"tokens.max_length": 32},
)  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """Other settings by key path; fits: they are enough, otherwise they need least of all that are known."""

    settings: dict[str, Any]
    estimate: Estimate
    fits: bool

    def __str__(self) -> str:
        return " ".join(f"--set {key}={str(v).lower() if v is True else v}" for key, v in self.settings.items())


def advise(params: Params, free: Free, estimate_of: Callable[[Params], Estimate], phases: Collection[Phase]) -> Advice:
    """The first of `REMEDIES`, or of smaller batches, with which a training fits; else those that help, together.

    Args:
        params: all parameters, of a training that does not fit.
        free: bytes that are free.
        estimate_of: the estimate for other parameters, same sizes.
        phases: those that have to fit.
    """

    def missing(found: Estimate) -> float:
        return sum(shortage.needed / max(shortage.free, 1) for shortage in found.shortages(free, phases))

    pool, remedies = params.pool, list(REMEDIES)
    size, batch = pool.size or pool.batch_size * (pool.beta + pool.eta), pool.batch_size
    while batch > 32:  # the pool keeps its size relative to the batch
        batch, size = batch // 2, max(size // 2, batch // 2)
        remedies.append({"pool.batch_size": batch, "pool.size": size})
    for remedy in remedies:
        changed = with_settings(params, remedy)
        if changed is not None and not missing(found := estimate_of(changed)):
            return Advice(remedy, found, True)
    best = Advice({}, estimate_of(params), False)
    for remedy in remedies:
        changed = with_settings(params, best.settings | remedy)
        if changed is not None and missing(found := estimate_of(changed)) < missing(best.estimate):
            best = Advice(best.settings | remedy, found, not missing(found))
            if best.fits:
                break
    return best


@dataclass(frozen=True)
class Planned:
    """The estimate of a training, what is free on the machine, and settings that would fit it."""

    estimate: Estimate
    free: Free
    short: list[Shortage]
    advice: Advice | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; bytes are whole numbers."""
        found, advice = self.estimate, self.advice
        peaks = {place: found.peak(place) for place in self._places}
        return {
            "device": found.device, "fits": not self.short, "state_bytes": found.state_bytes, "facts": found.facts,
            "peaks": {place: {"phase": phase, "needed_bytes": needed, "free_bytes": self.free.get(place)}
                      for place, (phase, needed) in peaks.items()},
            "amounts": [asdict(amount) for amount in found.amounts], "short": list(map(str, self.short)),
            "advice": {"settings": advice.settings, "fits": advice.fits} if advice else None,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """For people: facts, and a table for each place."""
        found = self.estimate
        facts = (f"{key.replace('_', ' ')} {f'{value:,}' if isinstance(value, int) else value}"
                 for key, value in found.facts.items())  # fmt: skip
        lines = [f"device: {found.device}, {', '.join(facts)}"]
        for place in self._places:
            phase, needed = found.peak(place)
            free = self.free.get(place)
            of = "" if free is None else f", {gib(free)} free"
            lines += ["", str(Shortage(place, phase, needed, 0)).rpartition(", ")[0] + of]
            amounts = sorted((a for a in found.amounts if a.place == place), key=lambda a: -a.num_bytes)
            lines += [f"  {a.name:<32} {gib(a.num_bytes):>12}  {PHASES[a.phase]}" for a in amounts]
        return [*lines, "", f"training state (weights, tables, their optimisers): {gib(found.state_bytes)}"]

    def verdict(self) -> list[str]:
        """Whether it fits, and settings that would."""
        if self.advice is None:
            return ["fits"]
        needs = ", ".join(f"{PLACES[place]} {gib(self.advice.estimate.peak(place)[1])}" for place in self._places)
        which = "would fit: " if self.advice.fits else "the smallest known settings do not fit either:"
        return [f"does not fit: {'; '.join(map(str, self.short))}", f"{which} {self.advice}    ({needs})"]

    def line(self) -> str | None:
        """All of it in one line, if it fits and takes at most half of what is free everywhere."""
        parts = []
        for place in self._places:
            needed, free = self.estimate.peak(place)[1], self.free.get(place)
            if free is not None and needed > free / 2:
                return None
            parts.append(f"{PLACES[place]} {gib(needed)}" + (f" of {gib(free)}" if free else ""))
        return f"fits: {', '.join(parts)}"

    @property
    def _places(self) -> list[Place]:
        return [place for place in PLACES if place != "device" or self.estimate.device == "cuda"]


def stored_sizes(params: Params) -> Sizes:
    """Sizes of the ingested data set and its token caches."""
    graph = paths.open_label_graph(params) if paths.LABEL_GRAPH.is_dir() else None
    edges = int(graph.nnz) if graph is not None else 0
    return Sizes.of(paths.open_dataset(), paths.open_tokens("queries"), paths.open_tokens("labels"), edges)


def plan_memory(
    params: Params,
    sizes: Sizes | None = None,
    *,
    encoder_config: Path | None = None,
    free: Free | None = None,
    phases: Collection[Phase] = tuple(PHASES),
) -> Planned:
    """Estimate the memory of a training and compare it with this machine, or with another one.

    Args:
        params: all parameters.
        sizes: of the data; None: of the ingested data.
        encoder_config: a config.json, if the encoder itself is not on this machine.
        free: bytes of another machine: "device" (plans for a GPU, whatever is here), "host", "disk".
        phases: those that have to fit.
    """
    given = {place: size for place, size in (free or {}).items() if size is not None}
    sizes, transformer = sizes or stored_sizes(params), empty_encoder(params.encoder.name, encoder_config)
    cuda, half = _device(params, "device" in given)
    process, context = process_bytes(), CONTEXT_BYTES if "device" in given else 0
    here: dict[Place, int | None] = {"host": available_host() + resident(), "disk": available_disk(paths.RUNS)}
    if cuda and "device" not in given:
        here["device"] = available_device()

    def estimate_of(other: Params) -> Estimate:
        return estimate(other, sizes, transformer, cuda=cuda, half=half, process=process, context=context)

    found, there = estimate_of(params), here | given
    short = found.shortages(there, phases)
    return Planned(found, there, short, advise(params, there, estimate_of, phases) if short else None)


@cache
def process_bytes() -> int:
    """Memory of a process that has loaded the libraries that a training loads, measured at the first call."""
    import torch
    import transformers

    _ = transformers.AutoModel, transformers.BertModel, torch.ones(64, 64) @ torch.ones(64, 64)
    return resident()


def _device(params: Params, given: bool) -> tuple[bool, bool]:
    """Whether the plan is for a GPU, and whether transformers compute in bfloat16 there."""
    if given:
        return True, params.optim.precision != "fp32"
    device = choose_device(params.device)
    return device.type == "cuda", autocast_type(params.optim.precision, device) is not None


def check_fits(params: Params, free: Free | None = None) -> Planned | None:
    """Refuse to start a training that does not fit; does nothing if `run.check_memory` is false.

    Args:
        params: all parameters.
        free: bytes by place, instead of the measured ones.

    Raises:
        ConfigError: it does not fit; the fix names settings that would, if any are known.
    """
    process_bytes()  # before anything is read
    if not params.run.check_memory:
        return None
    reused = (paths.CACHE, paths.MODEL, paths.BUNDLE, paths.RUNS)  # a run replaces or reuses their files
    reusable = sum(file.stat().st_size for folder in reused for file in folder.rglob("*") if file.is_file())
    disk: Free = {"disk": available_disk(paths.RUNS) + reusable}
    planned = plan_memory(params, free={**disk, **(free or {})}, phases=TRAINING)
    advice = planned.advice
    if advice is None:
        return planned
    first, fix = planned.short[0], f"{advice}, or a larger machine"
    if not advice.fits:
        fix = f"a larger machine: the smallest known settings ({advice}) do not fit either"
    raise ConfigError(
        "the training does not fit into memory", where="unidec plan", got="; ".join(map(str, planned.short)),
        expected=f"at most {gib(first.free)} of {PLACES[first.place]}, of which {MARGIN:.0%} stays free",
        fix=f"{fix}; `unidec plan` shows every amount, run.check_memory: false skips this check",
    )  # fmt: skip


def memory_figures(params: Params) -> dict[str, float]:
    """Estimated memory beside what this process has used so far, in GiB, for a round's report and the tracker.

    The used host memory includes pages of memory-mapped files and the copy that a checkpoint is written from.
    """
    cuda, half = _device(params, False)
    transformer = empty_encoder(params.encoder.name)
    found = estimate(params, stored_sizes(params), transformer, cuda=cuda, half=half, process=process_bytes())
    used: dict[Place, int | None] = {"host": host_peak(), "device": device_peak() if cuda else None}
    return {
        f"{place}_{what}_gib": size / GIB
        for place, peak in used.items() if peak is not None
        for what, size in (("planned", found.peak(place, TRAINING)[1]), ("used", peak))
    }  # fmt: skip


def plan_command(
    params: Params,
    by_hand: dict[str, int | None],
    free: dict[Place, str | None],
    encoder_config: Path | None,
    measured: bool,
    as_json: bool,
    terms: bool = False,
) -> bool:
    """Print what `unidec plan` prints; returns whether the training fits.

    Args:
        by_hand: "labels", "queries", "tokens", "pairs" of a data set that is not here; all None: the ingested one.
        free: "device", "host", "disk" of another machine, as "16GiB".
        terms: print every amount also of a small training, which otherwise takes one line.

    Raises:
        ConfigError: some sizes are given but not all, or a size cannot be read.
    """
    given = {name: value for name, value in by_hand.items() if value is not None}
    if given and not given.keys() >= {"labels", "queries", "tokens"}:
        raise ConfigError("sizes of other data require all three", where="unidec plan",
                          expected="--labels, --queries, --tokens")  # fmt: skip
    there = {place: _bytes(text, f"--{place}") for place, text in free.items() if text}
    if not given:
        params = effective(params)
    sizes = Sizes.given(**given) if given else stored_sizes(params)
    planned = plan_memory(params, sizes, encoder_config=encoder_config, free=there)
    result, times = planned.as_dict(), []
    if measured and "device" not in there and "host" not in (shortage.place for shortage in planned.short):
        from unidec.pipeline.step_timing import measure

        found = measure(params, sizes, encoder_config)
        times, result["times"] = found.lines(), asdict(found)
    elif measured:
        times = ["time: not measured: " + ("another machine" if "device" in there else "it does not fit here")]
    if as_json:
        print(json.dumps(result, indent=2))
    elif (line := planned.line()) and not planned.short and not given and not terms:
        print("; ".join([line, *times[-1:], "--terms shows every amount"]))
    else:
        print("\n".join([*planned.lines(), *times, *planned.verdict()]))
    return not planned.short


def _bytes(text: str, where: str) -> int:
    """ "16GiB", "141GB" -> bytes."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        expected = "e.g. 16GiB, 141GB, 800MiB"
        raise ConfigError("not a size of memory", where=where, got=text, expected=expected) from error
