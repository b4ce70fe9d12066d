"""Memory of a training: what it needs, whether that fits here, and settings that would fit (`unidec plan`).

Weights, tables and their optimisers' state are exact; the rest is an upper estimate, whose parts are added up although
some never coincide. Memory-mapped files are not counted: the system drops their pages if needed.

Legend: L labels, n training queries, H mined negatives a query, D width of a head, W width of the encoder, h and i
widths of the transformer and of its feed-forward layers.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from pydantic import ByteSize, TypeAdapter, ValidationError

from unidec.config import Params, with_settings
from unidec.data.tokens import CHUNK_TEXTS
from unidec.errors import ConfigError
from unidec.machine import available_disk, available_host
from unidec.model.encoder import TextEncoder, transformer_options
from unidec.model.label_tree import num_clusters
from unidec.model.losses import BY_COLUMNS
from unidec.model.sources import resolve_encoder
from unidec.model.unidec import UniDEC
from unidec.pipeline import paths
from unidec.pipeline.start import effective
from unidec.training.optim import bytes_per_row
from unidec.training.precision import autocast_type, choose_device
from unidec.training.sampler import draws_pools, encoded_labels, head_labels, queries_a_batch

Place = Literal["device", "host", "disk"]
Phase = Literal["always", "step", "refresh", "index"]
Free = Mapping[Place, int | None]
Settings = dict[str, bool | int | str]  # by key path
PLACES: dict[Place, str] = {"device": "GPU memory", "host": "host memory", "disk": "disk"}
PHASES: dict[Phase, str] = {"always": "all the time", "step": "a training step", "refresh": "clustering and mining",
                            "index": "validation and indexing"}  # fmt: skip
STATE = ("encoder and heads", "token table", "classifier rows")
MARGIN = 0.05  # of what is free: allocators round up and fragment, other processes need some
SMALL = 0.1  # of what is free: a plan that needs no more anywhere is one line
FP32, BF16, INT32, INT64 = 4, 2, 4, 8
CONTEXT_BYTES = 512 << 20  # the GPU's driver, its libraries and cuBLAS's workspaces: an assumption
_ROW_SETS = 2  # classifier rows in flight: in use, and being written back
_FULL_BCE_CHUNK = 8192  # labels at once in unidec.model.full_bce
_TRIPLET_BLOCK = 1 << 22  # triplets at once in unidec.model.losses
_BLOCK = 1 << 16  # rows that are encoded, projected or scored together
_TABLES = ("table.weight", "bias.weight", "bag.embedding.weight", "bag.log_weight.weight")  # counted by rows
KNOWN = {"distilbert-base-uncased": "distilbert", "msmarco-distilbert-base-v4": "distilbert",
         "bert-base-uncased": "bert"}  # fmt: skip  # plans for them need no files
# tried in this order, mildest first: those that change nothing that is learnt, then precision, then data
REMEDIES: tuple[Settings, ...] = (
    {"run.recompute": True}, {"optim.encode_chunk": 256}, {"run.table_place": "host"}, {"run.table_place": "disk"},
    {"model.clf_dtype": "bf16"}, {"optim.clf_state": "adagrad"}, {"optim.clf_state": "sgd"},
    {"pool.clf_labels": "pool"}, {"pool.de_labels": "pool"}, {"tokens.max_length": 32},
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes of a data set.

    Attributes:
        num_queries: of all splits; num_train: n; num_labels: L.
        num_pairs: query-label pairs that are stored, and entries of the label graph where it is trained on.
        query_tokens, label_tokens: tokens of a text: on average, and of the longest.
        vocab_size: of the tokenizer.
    """

    num_queries: int
    num_train: int
    num_labels: int
    num_pairs: int
    query_tokens: tuple[float, int]
    label_tokens: tuple[float, int]
    vocab_size: int = 30522

    @classmethod
    def stored(cls, params: Params) -> Sizes:
        """Of the ingested data set and its token caches."""
        dataset, queries, labels = paths.open_dataset(), paths.open_tokens("queries"), paths.open_tokens("labels")
        graph = paths.open_label_graph(params) if paths.LABEL_GRAPH.is_dir() else None
        pairs = int(dataset.relevance.nnz) + (0 if graph is None else int(graph.nnz))
        counts = dataset.num_queries, len(dataset.rows("train")), dataset.num_labels, pairs
        of_queries, of_labels = ((float(of.lengths().mean()), int(of.lengths().max())) for of in (queries, labels))
        return cls(*counts, of_queries, of_labels, queries.vocab_size)

    @classmethod
    def given(cls, labels: int, queries: int, tokens: int, pairs: int | None = None) -> Sizes:
        """From counts alone; without `pairs` each query has 5 labels (the sets of the papers have 2 to 22)."""
        length = (float(tokens), tokens)
        return cls(queries, queries, labels, 5 * queries if pairs is None else pairs, length, length)


def empty_encoder(name: str) -> Any:
    """A transformer without memory for its weights (torch's device "meta"): of a name that `resolve_encoder` finds, or
    of `KNOWN`.

    Raises:
        ArtifactError: there is none. ConfigError: not a transformer's config.
    """
    from transformers import AutoConfig, AutoModel

    known = None if Path(name).is_dir() else KNOWN.get(name.rpartition("/")[2])
    file = "" if known else str(resolve_encoder(name) / "config.json")
    try:
        config = AutoConfig.for_model(known) if known else AutoConfig.from_pretrained(file)
        with torch.device("meta"):
            return AutoModel.from_config(config, **transformer_options(config))
    except (OSError, ValueError) as error:
        raise ConfigError("not a transformer's config.json", where=file, got=str(error)[:200]) from error


@dataclass(frozen=True)
class Amount:
    """An amount of memory, and when it is held."""

    name: str
    place: Place
    num_bytes: int
    phase: Phase = "always"


@dataclass(frozen=True)
class Plan:
    """The memory that a training needs, and what is free.

    Attributes:
        amounts: all of them; device: "cuda" or "cpu"; step: the sizes of the largest step, for people.
        free: a place of unknown size counts as large enough.
        advice: settings that fit, where this does not; None: none are known.
    """

    amounts: tuple[Amount, ...]
    device: str
    step: str
    free: Free
    advice: Settings | None = None

    def needed(self, place: Place) -> dict[Phase, int]:
        """Bytes at a place in each phase, what is always held included."""
        here = [amount for amount in self.amounts if amount.place == place]
        return {phase: sum(a.num_bytes for a in here if a.phase in ("always", phase)) for phase in PHASES}

    def peak(self, place: Place) -> tuple[Phase, int]:
        """The phase that needs most memory at a place, and its bytes."""
        return max(self.needed(place).items(), key=operator.itemgetter(1))

    @property
    def state_bytes(self) -> int:
        """Weights, tables and their optimisers' state of one rank on a GPU, of all ranks on a CPU."""
        return sum(amount.num_bytes for amount in self.amounts if amount.name in STATE)

    @property
    def shortages(self) -> dict[Place, float]:
        """Places where the training does not fit: what it needs in units of what is free."""
        return {place: self.peak(place)[1] / max(size, 1) for place, size in self.free.items()
                if size is not None and self.peak(place)[1] > (1 - MARGIN) * size}  # fmt: skip

    @property
    def short(self) -> list[str]:
        """A line for each of `shortages`."""
        peaks = [(place, *self.peak(place)) for place in self.shortages]
        return [f"{PLACES[place]}: {gib(size)} needed, {gib(self.free[place] or 0)} free ({PHASES[phase]})"
                for place, phase, size in peaks]  # fmt: skip

    @property
    def fix(self) -> str:
        """Of what does not fit."""
        if self.advice is None:
            return "a larger machine: no known setting fits"
        return " ".join(f"--set {key}={str(v).lower() if v is True else v}" for key, v in self.advice.items())

    def as_dict(self) -> dict[str, object]:
        """For JSON; a place's peak is its phase and bytes."""
        found = {"fits": not self.short, "state_bytes": self.state_bytes, "peaks": {p: self.peak(p) for p in PLACES}}
        estimate = {"amounts": [asdict(amount) for amount in self.amounts], "device": self.device, "step": self.step}
        return found | {"estimate": estimate, "free": self.free, "short": self.short, "advice": self.advice}

    def lines(self) -> list[str]:
        """For people: the largest amounts of each place, whether it fits, and settings that would; one if small."""
        peaks = {place: self.peak(place)[1] for place in PLACES if self.peak(place)[1]}
        if all(size <= SMALL * (self.free.get(place) or 0) for place, size in peaks.items()):
            parts = [f"{PLACES[p]} {gib(size)} of {gib(self.free[p] or 0)} free" for p, size in peaks.items()]
            return [f"fits: {', '.join(parts)} (--json: all amounts)"]
        lines = [f"largest step: {self.step}"]
        for place, name in PLACES.items():
            phase, needed = self.peak(place)
            amounts = [a for a in self.amounts if a.place == place and a.phase in ("always", phase)]
            if amounts:
                free = self.free.get(place)
                lines.append(f"{name}: {gib(needed)}{f' of {gib(free)} free' if free else ''}, {PHASES[phase]}")
            amounts.sort(key=lambda amount: -amount.num_bytes)
            lines += [f"  {amount.name:<32}{gib(amount.num_bytes):>12}" for amount in amounts[:5]]
        return lines + (["does not fit: " + "; ".join(self.short), f"fix: {self.fix}"] if self.short else ["fits"])


def gib(num_bytes: float) -> str:
    """ "1.23 GiB", small amounts in MiB."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 0.1 * 2**30 else f"{num_bytes / 2**20:,.2f} MiB"


class Formulas:
    """Amounts of one rank, by phase. `transformer` is that of `empty_encoder`; the device is a GPU where `cuda`;
    transformers compute in bfloat16 where `half`. Raises ConfigError: more layers to train than the encoder has."""

    def __init__(self, params: Params, sizes: Sizes, transformer: Any, cuda: bool, half: bool):
        self.params, self.sizes, self.config, self.cuda, self.half = params, sizes, transformer.config, cuda, half
        encoder, model, pool, ranks = params.encoder, params.model, params.pool, params.run.devices
        with torch.device("meta"):
            own = deepcopy(transformer) if encoder.has_transformer else None  # which of its layers train is set on it
            settings = encoder.model_copy(update={"bag_words": 0})
            empty = UniDEC(settings, model, 1, TextEncoder(settings, own, 1, self.config.hidden_size))
        self.width, weights = empty.encoder.width, empty.named_parameters()
        clusters = {"auxiliary": num_clusters(sizes.num_labels, max(model.auxiliary, 1))}  # one label's, so far
        self.levels = [num_clusters(sizes.num_labels, size) for size in model.levels]
        for level, rows in enumerate(self.levels):
            clusters |= {f"tree.classifiers.{level}.{part}": rows for part in ("weight", "bias")}
        self.dense = [
            (name, p.numel() * clusters.get(name, 1), p.requires_grad)
            for name, p in weights
            if not name.endswith(_TABLES)
        ]
        self.trains_bag = encoder.kind != "transformer" and not encoder.frozen
        layers = self.config.num_hidden_layers if encoder.trainable_layers < 0 else encoder.trainable_layers
        self.trained_layers = layers if encoder.has_transformer else 0
        self.all_layers = encoder.has_transformer and encoder.trainable_layers < 0
        self.intermediate = getattr(self.config, "intermediate_size", None) or self.config.hidden_dim  # DistilBERT's
        self.scored_heads = 0 if cuda else self.config.num_attention_heads  # attention is not fused on a processor
        self.row_bytes = bytes_per_row(model.clf_dtype, params.optim.clf_state, model.dim)
        of_labels = params.label_graph.share * pool.gandalf + pool.simcse  # labels whose texts are queries
        self.rows = sizes.num_train + math.ceil(of_labels * sizes.num_labels)
        # the largest step
        self.queries = min(queries_a_batch(pool, self.rows), self.rows)
        mines = pool.eta > 0 and draws_pools(model, pool)
        places = pool.shortlist * model.labels_a_cluster if pool.shortlist else pool.eta * pool.refresh
        self.shortlist = INT32 * (sizes.num_queries + sizes.num_labels * pool.gandalf) * places * mines
        mean = sizes.num_pairs / sizes.num_queries
        most = max(pool.beta, mean) if pool.fill else pool.beta
        positives = most if pool.gandalf else min(most, mean)
        sampled = math.ceil(self.queries * (positives + pool.eta * mines))
        count = {"none": 0, "pool": max(1, min(sampled, sizes.num_labels, pool.size or sampled))}
        count["all"] = sizes.num_labels
        some = pool.clf_labels if isinstance(pool.clf_labels, int) else 0
        count["some"] = some if 2 * some < sizes.num_labels else sizes.num_labels
        of_heads = head_labels(model, pool)
        self.labels = max(count[labels] for labels in of_heads)
        # those that one rank compares with the queries
        self.de_labels, self.clf_labels = (
            math.ceil(count[labels] / (ranks if labels == "all" and loss in BY_COLUMNS else 1))
            for labels, loss in zip(of_heads, (params.loss.de, params.loss.clf), strict=True)
        )
        # texts that one rank encodes; sorted by length, a chunk is padded to no more than the next one's shortest
        of_labels = count[encoded_labels(model, pool)]
        drawn = min(of_labels * model.clf_queries, sizes.num_train)  # queries of the labels, on one rank
        counts = (math.ceil(self.queries / ranks) + drawn, math.ceil(of_labels / ranks))
        most = params.tokens.max_length
        lengths = [(min(mean, most), min(top, most)) for mean, top in (sizes.query_tokens, sizes.label_tokens)]
        texts = list(zip(counts, lengths, strict=True))
        self.texts, self.longest = sum(counts), max(top for _, top in lengths)
        self.tokens = sum(math.ceil(number * mean) for number, (mean, _) in texts)
        padded = sum(min(number * top, number * mean + CHUNK_TEXTS * top) for number, (mean, top) in texts)
        # those whose activations are in memory at once
        self.held = min(params.optim.encode_chunk or self.texts, CHUNK_TEXTS if params.run.recompute else self.texts)
        self.held_padded = math.ceil(min(padded, self.held * self.longest))

    def state(self) -> list[Amount]:
        """What is kept from step to step, exact to the byte."""
        params, model, encoder = self.params, self.params.model, self.params.encoder
        values = sum((3 if trained else 1) * count for _, count, trained in self.dense)  # with Adam's moments
        tokens = max(self.sizes.vocab_size, self.config.vocab_size) + encoder.bag_words
        table = tokens * (self.config.hidden_size + 1) * (encoder.kind != "transformer")
        rows = math.ceil(self.sizes.num_labels / params.run.devices) * (model.heads != "de")
        bias = bytes_per_row("fp32", params.optim.clf_state, 1) if model.clf_bias else (0, 0)
        return [
            Amount("encoder and heads", "device", FP32 * values),
            Amount("token table", "device", FP32 * table * (3 if self.trains_bag else 1)),
            Amount("classifier rows", params.run.table_place, rows * sum(self.row_bytes + bias)),
        ]

    def step(self) -> list[Amount]:
        """What a step allocates and frees."""
        params, model, texts = self.params, self.params.model, self.texts
        # in bfloat16 the transformer has casts of its weights and gradients too
        casts = [1 + (self.half and name.startswith("encoder.transformer.")) for name, _, _ in self.dense]
        gradients = sum(c * count * trained for c, (_, count, trained) in zip(casts, self.dense, strict=True))
        # text vectors [texts, W] with their gradients and copies (dropout, residual), and the heads' outputs [texts, D]
        copies = 11 if params.encoder.residual and not params.encoder.frozen else 6
        vectors = (copies * self.held + 2 * (texts - self.held)) * self.width
        vectors += 5 * (texts + self.queries + model.clf_residual * self.clf_labels) * model.dim
        if params.encoder.kind == "inception":  # token embeddings and what its layers keep of them
            vectors += 24 * self.held * params.encoder.inception_tokens * self.config.hidden_size
        # rows of the token table, their gradients and moments; a token's place, text and weight
        rows = min(self.tokens, self.sizes.vocab_size) + min(params.encoder.bag_words, self.tokens // 2)
        of_bag = (4 * FP32 * rows * (self.config.hidden_size + 1) + 32 * self.tokens) * self.trains_bag
        # classifier rows in float32, their gradients and state; in flight where the table is not on the device
        fetched, bf16 = self.cuda and params.run.table_place != "device", model.clf_dtype == "bf16"
        gathered = params.pool.clf_labels != "all" or fetched
        row = (FP32 * (1 + (gathered or bf16)) + 14 * bf16) * model.dim + gathered * self.row_bytes[1]
        all_rows = 0  # gradients of every row, whatever the step uses
        if params.optim.clf_state == "adamw" and gathered:
            own_rows = math.ceil(self.sizes.num_labels / params.run.devices)
            all_rows = (FP32 * (1 + bf16) + 14 * bf16) * model.dim * own_rows
        in_flight = fetched * _ROW_SETS * self.clf_labels * sum(self.row_bytes)
        return [
            Amount("gradients", "device", FP32 * gradients, "step"),
            Amount("activations", "device", self._activations() if self.trained_layers else 0, "step"),
            Amount("logits and losses", "device", self._logits(), "step"),
            Amount("text vectors", "device", FP32 * vectors, "step"),
            Amount("token rows of a step", "device", of_bag, "step"),
            Amount("classifier rows of a step", "device", self.clf_labels * row + all_rows + in_flight, "step"),
            Amount("classifier rows in flight", "host", in_flight, "step"),
        ]

    def _activations(self) -> int:
        """A layer keeps 10 h (14 h in bfloat16, parts of it twice) and 2 i values a token, and on a processor, where
        attention is not fused, its scores."""
        h, padded, value = self.config.hidden_size, self.held_padded, BF16 if self.half else FP32
        token = ((14 if self.half else 10) * h + 2 * self.intermediate) * value
        scores = self.longest * self.scored_heads * (2 * FP32 + value)
        embedded = FP32 * h * (2 * padded + self.config.vocab_size) * self.all_layers
        backward = 3 * value * min(padded, 1 << 13) * (self.intermediate + h)
        inputs = self.texts * self.longest * (INT64 if self.all_layers else FP32 * h)
        return padded * self.trained_layers * (token + scores) + embedded + backward + inputs

    def _logits(self) -> int:
        """A loss holds five matrices of the size of the logits at once, forward and backward; pairs, triplets."""
        loss, of_clf = self.params.loss, self.clf_labels
        pairs = int(self.queries * self.sizes.num_pairs / self.sizes.num_queries) + 1
        if loss.clf == "bce" and self.params.pool.clf_labels == "all":
            of_clf = min(of_clf, _FULL_BCE_CHUNK)
        every = "triplet" in (loss.de, loss.clf) and loss.triplet_negatives == "all"
        triplets = every * min(pairs * max(self.de_labels, of_clf), _TRIPLET_BLOCK)
        of_heads, pairs = self.de_labels + of_clf + sum(self.levels), pairs * (1 + len(self.levels))
        return 5 * FP32 * self.queries * of_heads + 80 * pairs + 9 * triplets

    def refresh(self) -> list[Amount]:
        """Clustering copies up to half of the points, a GPU holds all of them; mining has all vectors on a GPU, and a
        tile of scores."""
        n, dim, labels = self.rows, self.params.model.dim, self.sizes.num_labels * (self.shortlist > 0)
        if not labels and self.params.pool.batches != "clustered":
            return []
        token = 4 * self.config.hidden_size + 2 * self.intermediate + 3 * self.longest * self.scored_heads
        encoded = CHUNK_TEXTS * (self.longest * token * (self.params.encoder.has_transformer) + self.width + dim)
        points = (max(n // 2, 3 * min(n, 1 << (20 if self.cuda else 16))) + n * self.cuda) * dim + 12 * n
        vectors = (n + labels) * dim + min(n + labels, 2 * _BLOCK) * (self.width + dim)
        mined = 512 * min(labels, _BLOCK) + (n + labels) * dim * self.cuda
        return [
            Amount("query and label vectors", "host", FP32 * vectors, "refresh"),
            Amount("clustering, mining", "device", FP32 * (encoded + max(points, mined)), "refresh"),
            Amount("hard negatives", "host", self.shortlist, "refresh"),
        ]

    def index(self) -> list[Amount]:
        """Label vectors, names and the index while it is built (whole vectors, also of one that is quantised, with the
        links of a graph or the ids of lists); files; the sampler."""
        sizes, model, index, labels = self.sizes, self.params.model, self.params.index, self.sizes.num_labels
        heads = (model.heads == "both") + 1 + (model.heads != "de" and index.clf_normalize)
        width = (2 if index.space == "both" else 1) * model.dim + model.clf_bias
        of_kind = {"hnsw": 2 * INT32 * index.hnsw_links + 2 * INT64, "ivf-pq": INT64}
        stored = labels * (FP32 * width + of_kind.get(index.kind, 0))
        vectors = FP32 * (labels * model.dim * heads + _BLOCK * (512 + self.width + model.dim))
        names = math.ceil(labels * (57 + 8 * sizes.label_tokens[0]))  # 57: a Python string; 8: characters of a token
        texts = sizes.num_queries + labels
        with_texts = self.params.pool.gandalf or self.params.pool.simcse
        sampler = INT64 * 2 * (labels + self.rows) + 16 * (sizes.num_pairs + texts) * with_texts
        state, table, rows = (amount.num_bytes for amount in self.state())
        whole = state + table + rows * self.params.run.devices
        frozen = self.params.encoder.frozen or (self.params.encoder.has_transformer and not self.trained_layers)
        return [
            Amount("sampler", "host", sampler),
            Amount("label vectors, names and index", "host", vectors + 2 * (stored + names), "index"),
            Amount("checkpoints", "disk", 3 * (whole + INT64 * self.rows + self.shortlist)),  # two are kept
            Amount("model and bundle", "disk", 2 * whole + vectors + stored + names),
            Amount("cached outputs of what is frozen", "disk", 2 * texts * self.width * frozen),  # float16
        ]


def advise(params: Params, plan_of: Callable[[Params], Plan]) -> Settings | None:
    """The first of `REMEDIES`, then of smaller batches, with which a training fits; else the first of those that help,
    one after another together; None: not even all of them do."""

    def missing(settings: Settings) -> float:
        changed = with_settings(params, settings)
        return math.inf if changed is None else sum(plan_of(changed).shortages.values())

    pool, now = params.pool, missing({})
    batch, size = pool.batch_size, pool.size or pool.batch_size * (pool.beta + pool.eta)
    halves = range(1, batch.bit_length() - 4)
    smaller: list[Settings] = [{"pool.batch_size": batch >> half, "pool.size": size >> half} for half in halves]
    single = [(remedy, missing(remedy)) for remedy in (*REMEDIES, *smaller)]
    together = itertools.accumulate((remedy for remedy, left in single if left < now), operator.or_)
    tried = itertools.chain(single, ((remedy, missing(remedy)) for remedy in together))
    return next((remedy for remedy, left in tried if not left), None)


def plan_memory(
    params: Params, sizes: Sizes | None = None, free: Free | None = None, training_only: bool = False
) -> Plan:
    """Estimate the memory of a training and compare it with what is free.

    Args:
        params: all parameters.
        sizes: of the data; None: of the ingested data.
        free: bytes of another machine's "device" (a GPU; then nothing of this machine counts), "host" and "disk".
        training_only: leave out the index, which can be built on another machine.
    """
    sizes, process = sizes or Sizes.stored(params), int(psutil.Process().memory_info().rss)
    transformer, ranks = empty_encoder(params.encoder.name), params.run.devices
    cuda, half, there = True, params.optim.precision != "fp32", dict[Place, int | None](free or {})
    if "device" not in there:
        device = choose_device(params.device)
        cuda, half = device.type == "cuda", autocast_type(params.optim.precision, device) is not None
        there = {"host": available_host() + process, "disk": available_disk(paths.RUNS), **there}
        if cuda:
            there["device"] = int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved()

    def plan_of(other: Params) -> Plan:
        found = Formulas(other, sizes, transformer, cuda, half)
        amounts = [*found.state(), *found.step(), *found.refresh(), *found.index(), Amount("process", "host", process),
                   Amount("driver and libraries", "device", CONTEXT_BYTES * cuda)]  # fmt: skip
        if not cuda:
            amounts = [replace(amount, place="host") if amount.place == "device" else amount for amount in amounts]
        # ranks are processes on one machine, a device each
        amounts = [replace(a, num_bytes=ranks * a.num_bytes) if a.place == "host" else a for a in amounts]
        kept = tuple(a for a in amounts if a.num_bytes and not (training_only and a.phase == "index"))
        step = f"{found.queries:,} queries, {found.labels:,} labels, {'bf16' if half else 'fp32'}"
        return Plan(kept, "cuda" if cuda else "cpu", step, there)

    found = plan_of(params)
    return replace(found, advice=advise(params, plan_of)) if found.shortages else found


def check_fits(params: Params, free: Free | None = None) -> None:
    """Raise a ConfigError, with settings that fit, where a training does not. `free`: in place of what is measured."""
    if not params.run.check_memory:
        return
    reused = (paths.CACHE, paths.MODEL, paths.BUNDLE, paths.RUNS)  # a run replaces or reuses their files
    reusable = sum(file.stat().st_size for folder in reused for file in folder.rglob("*") if file.is_file())
    found = plan_memory(params, None, {"disk": available_disk(paths.RUNS) + reusable, **(free or {})}, True)
    if found.short:
        raise ConfigError(
            "the training does not fit into memory", where="unidec plan", got="; ".join(found.short),
            expected=f"{MARGIN:.0%} of what is free stays free",
            fix=f"{found.fix}; `unidec plan` shows the amounts, run.check_memory: false skips this check",
        )  # fmt: skip


def plan_command(
    params: Params, labels: int | None, queries: int | None, tokens: int | None, device: str | None
) -> Plan:
    """The plan of `unidec plan`. Sizes are those of a data set that is not here, `device` is the memory of a GPU, as
    "16GiB", in place of this machine's; None: what is here."""
    sizes = Sizes.given(labels, queries, tokens) if labels and queries and tokens else None
    if sizes is None and (labels or queries or tokens):
        raise ConfigError("sizes of other data require all three", where="unidec plan",
                          expected="--labels, --queries, --tokens")  # fmt: skip
    try:
        free: Free = {"device": int(TypeAdapter(ByteSize).validate_python(device))} if device else {}
    except ValidationError as error:
        raise ConfigError(
            "not a size of memory", where="--device-memory", got=device, expected="e.g. 16GiB, 141GB"
        ) from error
    return plan_memory(params if sizes else effective(params), sizes, free)
