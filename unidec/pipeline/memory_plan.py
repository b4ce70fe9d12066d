"""Memory of a training: how much it needs, whether this fits on the machine, and settings that
would fit (`unidec plan`).

Sizes of weights, tables and optimiser states are exact, and the largest step is simulated without
allocating memory (`unidec.pipeline.memory_probe`). Clustering, mining and the index are upper
estimates. Memory-mapped files do not count: the system drops their pages if needed.

Legend: L labels, n training rows, D width of a head, W width of the encoder.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import psutil
import torch
from pydantic import ByteSize, TypeAdapter, ValidationError

from unidec.config import Params, packaged, with_settings
from unidec.config.index_spec import COMPRESSED, IndexSpec
from unidec.data.chunks import CHUNK_TEXTS, LONG
from unidec.data.storage import folder_bytes
from unidec.errors import ConfigError
from unidec.machine import available_disk, available_host
from unidec.model.arrays import heads_of
from unidec.model.encoder import transformer_options
from unidec.pipeline import paths
from unidec.pipeline.data_sizes import Sizes, stored_sizes
from unidec.pipeline.memory_probe import (
    ROWS,
    STATE,
    Measured,
    encoder_config,
    measure,
    num_rows,
)
from unidec.pipeline.start import effective
from unidec.pipeline.teaching import teacher_width
from unidec.pipeline.time_plan import StageTime, plan_time
from unidec.text_page import render_text
from unidec.training.clustering import PART_BYTES
from unidec.training.encoding import on_disk as vectors_on_disk
from unidec.training.mining import uses_faiss
from unidec.training.precision import autocast_type, choose_device
from unidec.training.sampler import draws_pools

Place = Literal["device", "host", "disk"]
Phase = Literal["always", "step", "refresh", "index"]
Free = Mapping[Place, int | None]
Settings = dict[str, bool | int | str]  # key path -> value
PLACES: dict[Place, str] = {"device": "GPU memory", "host": "host memory", "disk": "disk space"}
PHASES: dict[Phase, str] = {
    "always": "all the time",
    "step": "a training step",
    "refresh": "clustering and mining",
    "index": "validation and indexing",
}
# share of the free memory to leave free: for allocators, which round up and fragment, and for other
# processes
MARGIN = 0.05
FP16 = 2
FP32 = 4
INT32 = 4
INT64 = 8
CONTEXT_BYTES = 512 << 20  # assumed size of the GPU driver, its libraries and cuBLAS's workspaces
_ROW_SETS = 2  # copies of a step's classifier rows: rows in use, and rows being written back
_BLOCK = 1 << 16  # rows that are projected or scored together
# maximum number of points that clustering processes together: on a GPU (True), on a CPU (False)
_POINTS = {True: 1 << 20, False: 1 << 16}
_NAME_BYTES = 32  # offsets and uid of a label's text; its characters are estimated at 8 a token
# of texts whose words are compared; measured with 10^6 queries and labels (results/scale.md)
_TOKEN_BYTES = 90
REMEDIES: list[Settings] = packaged("pipeline/plan.yaml")["remedies"]


@dataclass(frozen=True)
class Amount:
    """An amount of memory: its purpose, where it is held, and in which phase."""

    name: str
    place: Place
    num_bytes: int
    phase: Phase = "always"


@dataclass(frozen=True)
class Plan:
    """The memory that a training needs, and the free memory.

    Attributes:
        device: "cuda" or "cpu". step: a description of the largest step.
        free: free bytes by place; a place of unknown size counts as large enough.
        advice: if the training does not fit, settings with which it does; None: none are known.
        times: the time of each stage, if asked for.
    """

    amounts: tuple[Amount, ...]
    device: str
    step: str
    free: Free
    advice: Settings | None = None
    times: Sequence[StageTime] = ()

    def held(self, place: Place, phase: Phase) -> list[Amount]:
        """The amounts held at a place in a phase, largest first."""
        phases = ("always", phase)
        here = [a for a in self.amounts if a.place == place and a.phase in phases]
        return sorted(here, key=operator.attrgetter("num_bytes"), reverse=True)

    def needed(self, place: Place) -> dict[Phase, int]:
        """Bytes needed at a place in each phase, including those held all the time."""
        return {
            phase: sum(amount.num_bytes for amount in self.held(place, phase)) for phase in PHASES
        }

    def peak(self, place: Place) -> tuple[Phase, int]:
        """The phase that needs the most memory at a place, and the bytes it needs."""
        return max(self.needed(place).items(), key=operator.itemgetter(1))

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, tables and their optimiser states: per rank on a GPU, of all ranks on a
        CPU.
        """
        return sum(amount.num_bytes for amount in self.amounts if amount.name in STATE)

    @property
    def shortages(self) -> dict[Place, float]:
        """Bytes that are missing at each place where the training does not fit."""
        shortages = {}
        for place, free in self.free.items():
            _, needed = self.peak(place)
            if free is not None and needed > (1 - MARGIN) * free:
                shortages[place] = needed / (1 - MARGIN) - free
        return shortages

    @property
    def short(self) -> list[str]:
        """A line for each place where the training does not fit."""
        lines = []
        for place in self.shortages:
            phase, needed = self.peak(place)
            size = f"{gib(needed)} needed, {gib(self.free[place] or 0)} free"
            lines.append(f"{PLACES[place]}: {size} ({PHASES[phase]})")
        return lines

    @property
    def missing(self) -> str:
        """How much is missing where: "1.20 GiB more disk space"."""
        return " and ".join(
            f"{gib(more)} more {PLACES[place]}" for place, more in self.shortages.items()
        )

    def settings(self, form: str) -> list[str]:
        """The settings of `advice` in a format such as "--set {}={}"."""
        advice = (self.advice or {}).items()
        return [form.format(key, str(value).lower()) for key, value in advice]

    def as_dict(self) -> dict[str, object]:
        """The plan for JSON; "peaks" has the phase and the bytes of each place's peak."""
        return {
            "fits": not self.short,
            "state_bytes": self.state_bytes,
            "peaks": {place: self.peak(place) for place in PLACES},
            "estimate": {
                "amounts": [asdict(one) for one in self.amounts],
                "device": self.device,
                "step": self.step,
            },
            "free": self.free,
            "short": self.short,
            "advice": self.advice,
            "times": [asdict(time) for time in self.times],
        }

    def lines(self) -> list[str]:
        """The plan as printed: the largest amounts at each place, whether the training fits, and
        settings with which it would.
        """
        used = {place: name for place, name in PLACES.items() if self.peak(place)[1]}
        return render_text("plan.txt", plan=self, used=used, phases=PHASES, gib=gib).splitlines()


def gib(num_bytes: float) -> str:
    """Format bytes as "1.23 GiB"; small amounts in MiB."""
    mib = num_bytes / 2**20
    return f"{mib / 1024:,.2f} GiB" if mib >= 102.4 else f"{mib:,.2f} MiB"


def _state_and_step(
    params: Params, sizes: Sizes, measured: Measured, gpu: bool
) -> Iterable[Amount]:
    """Memory held between steps, exact to the byte, and memory that a step allocates and frees."""
    place = params.run.table_place
    for name, num_bytes in measured.state.items():
        yield Amount(name, place if name == ROWS else "device", num_bytes)
    for name, num_bytes in measured.step.items():
        yield Amount(name, "device", num_bytes, "step")
    if gpu and place != "device":
        all_rows = measured.state[ROWS] * params.run.devices
        rows = math.ceil(_ROW_SETS * all_rows * measured.num_labels / sizes.num_labels)
        yield Amount("classifier rows of a step", "device", rows, "step")
        yield Amount("classifier rows in flight", "host", rows, "step")


def _shortlist(params: Params, sizes: Sizes) -> int:
    """Bytes of the hard negatives of a round."""
    pool = params.pool
    if pool.eta == 0 or not draws_pools(params.model, pool):
        return 0
    each = pool.eta * pool.refresh
    if pool.shortlist:
        each = pool.shortlist * params.model.labels_a_cluster
    return INT32 * each * (sizes.num_queries + sizes.num_labels * pool.gandalf)


def _attention(params: Params, sizes: Sizes, gpu: bool) -> int:
    """Bytes of attention scores and weights while a chunk of long texts is encoded; 0 if attention
    is fused.
    """
    encoder = params.encoder
    longest = min(params.tokens.max_length, max(sizes.query_tokens[1], sizes.label_tokens[1]))
    longest = min(longest, encoder.transformer_tokens or longest)
    if longest <= LONG or not encoder.has_transformer:
        return 0
    config = encoder_config(encoder.name)
    is_static = not config.num_hidden_layers
    if is_static or transformer_options(config, gpu)["attn_implementation"] != "eager":
        return 0
    pairs = max(longest**2, CHUNK_TEXTS * LONG**2)
    return 2 * FP32 * int(config.num_attention_heads) * pairs


def _refresh(params: Params, sizes: Sizes, width: int, gpu: bool) -> Iterable[Amount]:
    """Memory of a refresh: clustering copies up to half of the points or of a part of them (a GPU
    also holds all points); mining holds all vectors on a GPU, and a tile of scores.
    """
    yield Amount("attention of long texts", "device", _attention(params, sizes, gpu), "refresh")
    shortlist = _shortlist(params, sizes)
    if not shortlist and params.pool.batches != "clustered":
        return
    dim = params.model.dim
    rows = num_rows(params, sizes)
    labels = sizes.num_labels if shortlist else 0
    texts = rows + labels
    encoded = min(texts, 2 * _BLOCK) * (width + dim)
    rows_on_disk = _texts_on_disk(params, rows, gpu)
    labels_on_disk = _texts_on_disk(params, labels, gpu)
    on_disk = rows_on_disk + labels_on_disk
    points = PART_BYTES // (FP32 * dim) if rows_on_disk else rows
    copied = max(points // 2, 3 * min(points, _POINTS[gpu]))
    clustered = (copied + gpu * rows) * dim + 12 * rows
    mined = 512 * min(labels, _BLOCK) + gpu * texts * dim
    in_memory = (texts - on_disk) * dim + encoded
    yield Amount("query and label vectors", "host", FP32 * in_memory, "refresh")
    yield Amount("query and label vectors", "disk", FP16 * on_disk * dim, "refresh")
    yield Amount("clustering, mining", "device", FP32 * max(clustered, mined), "refresh")
    if labels and not params.pool.shortlist and uses_faiss(params.pool.mining, labels, gpu):
        # vectors, 4-bit codes and ids
        number = FP16 if labels_on_disk else FP32
        index = labels * (number * dim + dim // 2 + INT64)
        yield Amount("faiss index of mining", "host", index, "refresh")
    yield Amount("hard negatives", "host", shortlist, "refresh")


def _texts_on_disk(params: Params, texts: int, gpu: bool) -> int:
    """The number of these texts whose vectors are stored in a file: all, or none."""
    may_be = not gpu and params.run.devices == 1
    return texts if may_be and vectors_on_disk(texts, params.model.dim) else 0


def _index(params: Params, sizes: Sizes, measured: Measured) -> Iterable[Amount]:
    """The sampler; label vectors, names, the index and words of texts while the index is built; and
    files on disk.
    """
    model = params.model
    index = params.index
    labels = sizes.num_labels
    rows = num_rows(params, sizes)
    texts = sizes.num_queries + labels
    heads = len(heads_of(model.heads))
    vectors = FP32 * labels * heads * (model.dim + model.clf_bias)
    names = int(labels * (_NAME_BYTES + 8 * sizes.label_tokens[0]))
    entries = vectors
    if IndexSpec.parse(index.factory, index.search, labels).kind in COMPRESSED:
        entries //= 16  # codes of 4 bits, and ids
    in_memory = 0 if vectors_on_disk(labels, model.dim) else vectors
    other_ranks = measured.state[ROWS] * (params.run.devices - 1)
    weights = sum(measured.state.values()) + other_ranks
    block = FP32 * _BLOCK * (512 + measured.width + model.dim)
    yield Amount("sampler", "host", 4 * INT64 * (texts + rows))
    yield Amount("label vectors", "host", in_memory + block, "index")
    yield Amount("label vectors", "disk", vectors - in_memory, "index")
    yield Amount("label names and index", "host", 2 * (names + entries), "index")
    if index.knn_weight or index.fuses:
        tokens = rows * sizes.query_tokens[0] + labels * sizes.label_tokens[0]
        yield Amount("words of texts", "host", int(_TOKEN_BYTES * tokens), "index")
    checkpoint = weights + INT64 * rows + _shortlist(params, sizes)
    # two are kept while a third is written
    yield Amount("checkpoints", "disk", 3 * checkpoint)
    yield Amount("model and bundle", "disk", 2 * (weights + vectors) + names)
    encoder = params.encoder
    if encoder.frozen or (encoder.has_transformer and encoder.trainable_layers == 0):
        yield Amount("cached outputs of what is frozen", "disk", FP16 * texts * measured.width)
    taught = FP16 * rows * teacher_width(params.teacher.bundle)
    yield Amount("the teacher's vectors of training texts", "disk", taught)


def advise(params: Params, plan_of: Callable[[Params], Plan]) -> Settings | None:
    """Settings with which a training fits: a single one of `REMEDIES` or a smaller batch; if no
    single one is enough, those that help, added one after another; None if all of them together do
    not suffice.
    """

    def missing(settings: Settings) -> float:
        changed = with_settings(params, settings)
        return sum(plan_of(changed).shortages.values()) if changed else math.inf

    now = missing({})
    helpful: list[Settings] = []
    for remedy in [*REMEDIES, *_smaller_batches(params)]:
        shortage = missing(remedy)
        if not shortage:
            return remedy
        if shortage < now:
            helpful.append(remedy)
    combined = list(itertools.accumulate(helpful, operator.or_))
    if not combined or missing(combined[-1]):
        return None
    return next(settings for settings in combined if not missing(settings))


def _smaller_batches(params: Params) -> Iterable[Settings]:
    """Batches and pools of half the size, a quarter, and so on, with at least 16 queries."""
    pool = params.pool
    size = pool.size or pool.batch_size * (pool.beta + pool.eta)
    for half in range(1, pool.batch_size.bit_length() - 4):
        yield {"pool.batch_size": pool.batch_size >> half, "pool.size": size >> half}


def plan_memory(
    params: Params,
    sizes: Sizes | None = None,
    free: Free | None = None,
    training_only: bool = False,
) -> Plan:
    """Estimate the memory of a training and compare it with the free memory.

    Args:
        params: all parameters.
        sizes: None: those of the ingested data set.
        free: free bytes by place, instead of measured ones. With "device", the memory of another
            machine's GPU, nothing is measured on this machine.
        training_only: omit the index, which can be built on another machine.
    """
    sizes = sizes or stored_sizes(params)
    available = dict[Place, int | None](free or {})
    gpu = True
    half = params.optim.precision != "fp32"
    process = int(psutil.Process().memory_info().rss)
    if "device" not in available:
        device = choose_device(params.device)
        gpu = device.type == "cuda"
        half = autocast_type(params.optim.precision, device) is not None
        available.setdefault("host", available_host() + process)
        available.setdefault("disk", available_disk(paths.RUNS))
        if gpu:
            unused, _ = torch.cuda.mem_get_info()
            available["device"] = int(unused) + torch.cuda.memory_reserved()

    def plan_of(other: Params) -> Plan:
        measured = measure(other, sizes, gpu=gpu, half=half)
        amounts = [
            *_state_and_step(other, sizes, measured, gpu),
            *_refresh(other, sizes, measured.width, gpu),
            *_index(other, sizes, measured),
            Amount("process", "host", process),
            Amount("driver and libraries", "device", CONTEXT_BYTES * gpu),
        ]
        counted = [
            _of_all_ranks(amount, params.run.devices, gpu)
            for amount in amounts
            if amount.num_bytes and not (training_only and amount.phase == "index")
        ]
        size = f"{measured.num_queries:,} queries, {measured.num_labels:,} labels"
        step = f"{size}, {'bf16' if half else 'fp32'}"
        return Plan(tuple(counted), "cuda" if gpu else "cpu", step, available)

    plan = plan_of(params)
    return replace(plan, advice=advise(params, plan_of)) if plan.shortages else plan


def _of_all_ranks(amount: Amount, ranks: int, gpu: bool) -> Amount:
    """The amount for all ranks of a machine: each has a separate GPU, or all share the CPU."""
    if amount.place == "disk" or (amount.place == "device" and gpu):
        return amount
    return replace(amount, place="host", num_bytes=amount.num_bytes * ranks)


def check_fits(params: Params, free: Free | None = None) -> None:
    """Raise a ConfigError, with settings that fit, if a training does not fit. `free`: as for
    `plan_memory`.
    """
    if not params.run.check_memory:
        return
    # a run replaces or reuses the files in these folders
    reusable = sum(map(folder_bytes, (paths.CACHE, paths.MODEL, paths.BUNDLE, paths.RUNS)))
    known: Free = {"disk": available_disk(paths.RUNS) + reusable}
    plan = plan_memory(params, free={**known, **(free or {})}, training_only=True)
    short = plan.shortages
    if not short:
        return
    lacking = " and ".join(map(PLACES.__getitem__, short))
    advice = ", or ".join(filter(None, (", ".join(plan.settings("{}: {}")), plan.missing)))
    raise ConfigError(
        f"the training does not fit: too little {lacking}",
        where=paths.RUNS.absolute() if "disk" in short else f"device {plan.device}",
        got="; ".join(plan.short),
        expected=f"at most {1 - MARGIN:.0%} of what is free",
        fix=f"{advice}; `unidec plan` lists the amounts, run.check_memory: false skips this check",
    )


def plan_command(
    params: Params,
    labels: int | None,
    queries: int | None,
    tokens: int | None,
    device: str | None = None,
    machines: int | None = None,
) -> Plan:
    """The plan of `unidec plan`: for a data set of these sizes, or (None) data/dataset; and for a
    GPU with this memory, such as "16GiB", or (None) this machine. `machines`: also the time on so
    many machines.
    """
    if labels and queries and tokens:
        sizes = Sizes.given(labels, queries, tokens)
    elif labels or queries or tokens:
        raise ConfigError(
            "sizes are missing",
            where="unidec plan",
            expected="all of --labels, --queries and --tokens",
        )
    else:
        params = effective(params)
        sizes = stored_sizes(params)
    free: Free = {"device": _bytes_of(device)} if device else {}
    times = plan_time(sizes, machines) if machines else ()
    return replace(plan_memory(params, sizes, free), times=times)


def _bytes_of(size: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError as error:
        raise ConfigError(
            "not a size of memory",
            where="--device-memory",
            got=size,
            expected="a size such as 16GiB or 141GB",
        ) from error
