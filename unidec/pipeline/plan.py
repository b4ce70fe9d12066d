"""The memory of a training: estimated (`unidec plan`), checked before it starts, compared with what was used."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidec.config import Params
from unidec.errors import ConfigError
from unidec.pipeline import paths
from unidec.pipeline.start_file import effective
from unidec.training.memory.advice import MARGIN, Advice, Shortage, advise, shortages
from unidec.training.memory.estimate import GIB, PHASES, PLACES, Estimate, Phase, Place, estimate, gib
from unidec.training.memory.machine import Machine, device_peak, host_peak, parse_bytes, resident
from unidec.training.memory.sizes import EncoderShape, Sizes

if TYPE_CHECKING:
    from unidec.training.step_timing import Times

# what is trained is saved before the index is built, which can be done on another machine
TRAINING: tuple[Phase, ...] = tuple(phase for phase in PHASES if phase != "index")
# Memory that the CUDA context, its libraries and cuBLAS's workspaces take. An assumption, used only for a GPU that is
# given by its size: the free memory that a GPU here reports excludes them.
CONTEXT_BYTES = 512 << 20
_at_import = resident()  # the libraries are loaded, no data is
_process: list[int] = []


@dataclass(frozen=True)
class Planned:
    """The estimate of a training, the machine, and settings that would fit it."""

    estimate: Estimate
    machine: Machine
    short: list[Shortage]
    advice: Advice | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; bytes are whole numbers."""
        found, advice = self.estimate, self.advice
        peaks = {
            place: {"phase": found.peak(place)[0], "needed_bytes": found.peak(place)[1],
                    "free_bytes": self.machine.free(place),
                    "phases_bytes": {phase: found.peak(place, [phase])[1] for phase in PHASES}}
            for place in self._places
        }  # fmt: skip
        return {
            "device": found.device, "fits": not self.short, "state_bytes": found.state_bytes, "peaks": peaks,
            "facts": found.facts, "amounts": [asdict(amount) for amount in found.amounts],
            "short": [str(shortage) for shortage in self.short],
            "advice": None if advice is None else {
                "settings": advice.settings, "fits": advice.fits,
                "needed_bytes": {place: advice.estimate.peak(place)[1] for place in peaks},
            },
        }  # fmt: skip

    def lines(self) -> list[str]:
        """For people: facts, a table for each place."""
        facts = ", ".join(f"{key.replace('_', ' ')} {value:,}" if isinstance(value, int) else f"{key} {value}"
                          for key, value in self.estimate.facts.items())  # fmt: skip
        lines = [f"device: {self.estimate.device}, {facts}"]
        for place in self._places:
            phase, needed = self.estimate.peak(place)
            free = self.machine.free(place)
            during = "" if place == "disk" else f" during {PHASES[phase]}"
            lines += [
                "",
                f"{PLACES[place]}: {gib(needed)} needed{during}" + ("" if free is None else f", {gib(free)} free"),
            ]
            amounts = sorted((a for a in self.estimate.amounts if a.place == place), key=lambda a: -a.num_bytes)
            lines += [f"  {a.name:<32} {gib(a.num_bytes):>12}  {PHASES[a.phase]}: {a.formula}" for a in amounts]
        return [*lines, "", f"training state (weights, tables, their optimisers): {gib(self.estimate.state_bytes)}"]

    def verdict(self) -> list[str]:
        """Whether it fits, and settings that would."""
        if not self.short:
            return ["fits"]
        lines = [f"does not fit: {'; '.join(map(str, self.short))}"]
        if self.advice is not None:
            needs = ", ".join(f"{PLACES[place]} {gib(self.advice.estimate.peak(place)[1])}" for place in self._places)
            which = "would fit: " if self.advice.fits else "the smallest known settings do not fit either:"
            lines.append(f"{which} {self.advice}    ({needs})")
        return lines

    @property
    def is_small(self) -> bool:
        """Whether it fits and takes at most half of what is free everywhere: one line is enough then."""
        frees = [(self.machine.free(place), self.estimate.peak(place)[1]) for place in self._places]
        return not self.short and all(free is None or needed <= free / 2 for free, needed in frees)

    def line(self) -> str:
        """All of it in one line."""
        parts = []
        for place in self._places:
            free = self.machine.free(place)
            parts.append(f"{PLACES[place]} {gib(self.estimate.peak(place)[1])}" + (f" of {gib(free)}" if free else ""))
        return f"{'does not fit' if self.short else 'fits'}: {', '.join(parts)}"

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
    free: dict[str, int | None] | None = None,
    phases: tuple[Phase, ...] = tuple(PHASES),
) -> Planned:
    """Estimate the memory of a training and compare it with this machine, or with another one.

    Args:
        params: all parameters.
        sizes: of the data; None: of the ingested data.
        encoder_config: a config.json, if the encoder itself is not on this machine.
        free: bytes of another machine: "device" (plans for a GPU, whatever is here), "host", "disk".
        phases: those that have to fit.
    """
    free = free or {}
    sizes = sizes or stored_sizes(params)
    shape = EncoderShape.of(params.encoder.name, encoder_config)
    cuda, half = _device(params, free.get("device") is not None)
    process, context = process_bytes(), CONTEXT_BYTES if free.get("device") is not None else 0
    machine = Machine.here(cuda, paths.RUNS, free)

    def estimate_of(other: Params) -> Estimate:
        return estimate(other, sizes, shape, cuda=cuda, half=half, process=process, context=context)

    found = estimate_of(params)
    short = shortages(found, machine, phases)
    return Planned(found, machine, short, advise(params, machine, estimate_of, phases) if short else None)


def process_bytes() -> int:
    """Memory of a process that has loaded the libraries that a training loads, measured at the first call."""
    if not _process:
        import torch
        import transformers

        _ = transformers.AutoModel, transformers.BertModel, torch.ones(64, 64) @ torch.ones(64, 64)
        _process.append(resident())
    return _process[0]


def measure_time(params: Params, sizes: Sizes | None = None, encoder_config: Path | None = None) -> Times:
    """Times of a training on this machine, from a few real steps on random ids."""
    from unidec.training.step_timing import measure

    return measure(params, sizes or stored_sizes(params), EncoderShape.of(params.encoder.name, encoder_config))


def _device(params: Params, given: bool) -> tuple[bool, bool]:
    """Whether the plan is for a GPU, and whether transformers compute in bfloat16 there."""
    from unidec.training.precision import autocast_type, choose_device

    if given:
        return True, params.optim.precision != "fp32"
    device = choose_device(params.device)
    return device.type == "cuda", autocast_type(params.optim.precision, device) is not None


def check_fits(
    params: Params, device_memory: int | None = None, host_memory: int | None = None, disk: int | None = None
) -> Planned | None:
    """Refuse to start a training that does not fit; does nothing if `run.check_memory` is false.

    Args:
        params: all parameters.
        device_memory, host_memory, disk: free bytes, instead of the measured ones.

    Raises:
        ConfigError: it does not fit; the fix names settings that would, if any are known.
    """
    process_bytes()  # before anything is read
    if not params.run.check_memory:
        return None
    reusable = sum(_folder_bytes(folder) for folder in (paths.CACHE, paths.MODEL, paths.BUNDLE, paths.RUNS))
    given = {"device": device_memory, "host": host_memory, "disk": disk}
    if disk is None:
        given["disk"] = (Machine.here(False, paths.RUNS).disk or 0) + reusable
    planned = plan_memory(params, free=given, phases=TRAINING)
    if not planned.short:
        return planned
    advice = planned.advice
    if advice is not None and advice.fits:
        fix = f"{advice}, or a larger machine"
    else:
        fix = f"a larger machine: the smallest known settings ({advice}) do not fit either"
    first = planned.short[0]
    raise ConfigError(
        "the training does not fit into memory", where="unidec plan",
        got="; ".join(str(shortage) for shortage in planned.short),
        expected=f"at most {gib(first.free)} of {PLACES[first.place]}, of which {MARGIN:.0%} stays free",
        fix=f"{fix}; `unidec plan` shows every amount, run.check_memory: false skips this check",
    )  # fmt: skip


def memory_figures(params: Params) -> dict[str, float]:
    """Estimated memory beside what this process has used so far, in GiB, for a round's report and the tracker.

    The used host memory includes pages of memory-mapped files and the copy that a checkpoint is written from.
    """
    sizes, shape = stored_sizes(params), EncoderShape.of(params.encoder.name)
    cuda, half = _device(params, False)
    found = estimate(params, sizes, shape, cuda=cuda, half=half, process=_process[0] if _process else _at_import)
    figures = {
        "host_planned_gib": found.peak("host", TRAINING)[1] / GIB,
        "host_used_gib": host_peak() / GIB,
    }
    used = device_peak() if cuda else None
    if used is not None:
        figures |= {"device_planned_gib": found.peak("device", TRAINING)[1] / GIB, "device_used_gib": used / GIB}
    return figures


def _folder_bytes(folder: Path) -> int:
    """Bytes of the files below a folder; a run replaces or reuses them."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) if folder.is_dir() else 0


def plan_command(
    params: Params,
    by_hand: dict[str, int | None],
    free: dict[str, str | None],
    encoder_config: Path | None,
    measured: bool,
    as_json: bool,
    terms: bool = False,
) -> bool:
    """Print what `unidec plan` prints.

    Args:
        by_hand: "labels", "queries", "tokens", "pairs" of a data set that is not here; all None: the ingested one.
        free: "device", "host", "disk" of another machine, as "16GiB".
        terms: print every amount also of a small training, which otherwise takes one line.

    Returns:
        Whether it fits.

    Raises:
        ConfigError: some sizes are given but not all, or a size cannot be read.
    """
    labels, queries, tokens = by_hand["labels"], by_hand["queries"], by_hand["tokens"]
    sizes: Sizes | None = None
    if labels is not None and queries is not None and tokens is not None:
        sizes = Sizes.given(labels, queries, tokens, pairs=by_hand["pairs"])
    elif any(value is not None for value in by_hand.values()):
        raise ConfigError("sizes of other data require all three", where="unidec plan",
                          expected="--labels, --queries, --tokens")  # fmt: skip
    if sizes is None:
        sizes, params = stored_sizes(params), effective(params)
    there = {place: parse_bytes(text, f"--{place}") if text else None for place, text in free.items()}
    planned = plan_memory(params, sizes, encoder_config=encoder_config, free=there)
    result, times = planned.as_dict(), []
    if measured and there["device"] is None and "host" not in (shortage.place for shortage in planned.short):
        found = measure_time(params, sizes, encoder_config)
        times, result["times"] = [f"{name}: {value}" for name, value in found.lines()], asdict(found)
    elif measured:
        times = ["time: not measured: " + ("another machine" if there["device"] else "it does not fit here")]
    if as_json:
        print(json.dumps(result, indent=2))
    elif planned.is_small and labels is None and not terms:
        print("; ".join([planned.line(), *times[-1:], "--terms shows every amount"]))
    else:
        print("\n".join([*planned.lines(), *times, *planned.verdict()]))
    return not planned.short
