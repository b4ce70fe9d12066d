"""The memory of a training: planned (`unidec plan`), checked before it starts, compared with what was used."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidec.config import Params
from unidec.errors import ConfigError
from unidec.stages import paths
from unidec.stages.start_file import effective
from unidec.training.plan.advice import MARGIN, Advice, Shortage, advice, shortages
from unidec.training.plan.items import GIB, PHASES, PLACE_NAMES, Plan, gib
from unidec.training.plan.machine import Machine, device_peak, host_peak, parse_bytes, resident
from unidec.training.plan.planning import make_plan
from unidec.training.plan.sizes import EncoderShape, Sizes
from unidec.training.plan.text import as_dict, show, verdict

if TYPE_CHECKING:
    from unidec.training.plan.timing import Times

# what is trained is safe before the index is made, on another machine if need be
TRAINING = tuple(phase for phase in PHASES if phase != "index")
# What the driver's context, its libraries' code and cuBLAS's workspaces take of a GPU. An assumption, used only where
# another machine's memory is given by hand: what a GPU here says is free is less by them already.
CONTEXT_BYTES = 512 << 20
_at_import = resident()  # the libraries are loaded, nothing is read yet
_process: list[int] = []


@dataclass(frozen=True)
class Planned:
    """A plan beside a machine, and what would fit it."""

    plan: Plan
    machine: Machine
    short: list[Shortage]
    advised: Advice | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return as_dict(self.plan, self.machine, self.short, self.advised)

    @property
    def last_lines(self) -> list[str]:
        """Fits or not, and the fix."""
        return verdict(self.short, self.advised)


def stored_sizes(params: Params) -> Sizes:
    """Sizes of the ingested data set and its token caches."""
    edges = 0
    if params.pool.gandalf and paths.LABEL_GRAPH.is_dir():
        from unidec.data.label_graph import load_label_graph

        edges = int(load_label_graph(paths.LABEL_GRAPH).nnz)
    return Sizes.of(paths.open_dataset(), paths.open_tokens("queries"), paths.open_tokens("labels"), edges)


def plan_memory(
    params: Params,
    sizes: Sizes | None = None,
    *,
    encoder_config: Path | None = None,
    free: dict[str, int | None] | None = None,
    phases: tuple[str, ...] = tuple(PHASES),
) -> Planned:
    """Plan a training and compare it with this machine, or with another one.

    Args:
        params: all parameters.
        sizes: of the data; None: of what is ingested.
        encoder_config: a config.json, where the encoder itself is not on this machine.
        free: bytes of another machine: "device" (plans for a GPU, whatever is here), "host", "disk".
        phases: those that have to fit.
    """
    free = free or {}
    sizes = sizes or stored_sizes(params)
    shape = EncoderShape.of(params.encoder.name, encoder_config)
    cuda, half = _device(params, free.get("device") is not None)
    process, context = process_bytes(), CONTEXT_BYTES if free.get("device") is not None else 0
    machine = Machine.here(cuda, paths.RUNS, free)

    def plan_of(other: Params) -> Plan:
        return make_plan(other, sizes, shape, cuda=cuda, half=half, process=process, context=context)

    plan = plan_of(params)
    short = shortages(plan, machine, phases)
    return Planned(plan, machine, short, advice(params, machine, plan_of, phases) if short else None)


def process_bytes() -> int:
    """What a process holds that has loaded all that a training loads, measured at the first call."""
    if not _process:
        import torch
        import transformers

        _ = transformers.AutoModel, transformers.BertModel, torch.ones(64, 64) @ torch.ones(64, 64)
        _process.append(resident())
    return _process[0]


def measure_time(params: Params, sizes: Sizes | None = None, encoder_config: Path | None = None) -> Times:
    """Times of a training on this machine, from a few real steps on random ids."""
    from unidec.training.plan.timing import measure

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
    """Refuse to start a training that does not fit; nothing is done where `run.check_memory` is false.

    Args:
        params: all parameters.
        device_memory, host_memory, disk: bytes to take for what is free, in place of what is measured.

    Raises:
        ConfigError: it does not fit; the fix names settings that would, or says that none are known.
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
    advised = planned.advised
    if advised is not None and advised.fits:
        fix = f"{advised}, or a larger machine"
    else:
        fix = f"a larger machine: {advised} is the smallest known here and does not fit either"
    first = planned.short[0]
    raise ConfigError(
        "the training does not fit into memory", where="unidec plan",
        got="; ".join(str(shortage) for shortage in planned.short),
        expected=f"at most {gib(first.free)} of {PLACE_NAMES[first.place]}, {MARGIN:.0%} of it kept free",
        fix=f"{fix}; `unidec plan` shows the whole reckoning, run.check_memory: false starts all the same",
    )  # fmt: skip


def memory_figures(params: Params) -> dict[str, float]:
    """What was planned beside what this process has used, in GiB, for a round's report and the tracker.

    Host memory is compared with pages of files and snapshots included, since the system counts them.
    """
    sizes, shape = stored_sizes(params), EncoderShape.of(params.encoder.name)
    cuda, half = _device(params, False)
    plan = make_plan(params, sizes, shape, cuda=cuda, half=half, process=_process[0] if _process else _at_import)
    figures = {
        "host_planned_gib": plan.peak("host", spare=True, phases=TRAINING)[1] / GIB,
        "host_used_gib": host_peak() / GIB,
    }
    used = device_peak() if cuda else None
    if used is not None:
        figures |= {"device_planned_gib": plan.peak("device", phases=TRAINING)[1] / GIB, "device_used_gib": used / GIB}
    return figures


def _folder_bytes(folder: Path) -> int:
    """Of what a run would replace or read again."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) if folder.is_dir() else 0


def plan_command(
    params: Params,
    by_hand: dict[str, int | None],
    free: dict[str, str | None],
    encoder_config: Path | None,
    measured: bool,
    as_json: bool,
) -> bool:
    """What `unidec plan` prints.

    Args:
        by_hand: "labels", "queries", "tokens", "pairs" of a data set that is not here; all none: the one that is.
        free: "device", "host", "disk" of another machine, as "16GiB".

    Returns:
        Whether it fits.

    Raises:
        ConfigError: some sizes by hand but not all, or a size that cannot be read.
    """
    labels, queries, tokens = by_hand["labels"], by_hand["queries"], by_hand["tokens"]
    sizes: Sizes | None = None
    if labels is not None and queries is not None and tokens is not None:
        sizes = Sizes.given(labels, queries, tokens, pairs=by_hand["pairs"])
    elif any(value is not None for value in by_hand.values()):
        raise ConfigError("sizes by hand need all three", where="unidec plan", expected="--labels, --queries, --tokens")
    if sizes is None:
        sizes, params = stored_sizes(params), effective(params)
    there = {place: parse_bytes(text, f"--{place}") if text else None for place, text in free.items()}
    planned = plan_memory(params, sizes, encoder_config=encoder_config, free=there)
    times: list[tuple[str, str]] = []
    result = planned.as_dict()
    if measured and there["device"] is None and "host" not in (shortage.place for shortage in planned.short):
        found = measure_time(params, sizes, encoder_config)
        times, result["times"] = found.lines(), asdict(found)
    elif measured:
        times = [("time", "not measured: " + ("another machine" if there["device"] else "it does not fit here"))]
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        show(planned.plan, planned.machine, planned.last_lines, times)
    return not planned.short
