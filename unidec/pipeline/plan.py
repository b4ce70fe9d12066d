"""Memory of a training: how much it needs, whether that fits here, and settings that would fit
(`unidec plan`).

Weights, tables and their optimisers' state are exact. The rest is an upper estimate: its parts are
added up although some are never held at the same time. Memory-mapped files do not count: the system
drops their pages if needed.

Legend: L labels, n training queries, H mined negatives per query, D width of a head, W width of the
encoder, h and i
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
from unidec.data.tokens import CHUNK_TEXTS, GPU_CHUNK_TOKENS
from unidec.errors import ConfigError
from unidec.machine import available_disk, available_host
from unidec.methods.assembly import additions
from unidec.methods.inception import token_layers
from unidec.model.encoder import TextEncoder, transformer_options
from unidec.model.losses import BY_COLUMNS
from unidec.model.pool import num_clusters
from unidec.model.row_table import Placement
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
Settings = dict[str, bool | int | str]  # key path -> value
PLACES: dict[Place, str] = {"device": "GPU memory", "host": "host memory", "disk": "disk"}
SPACE: dict[Place, str] = PLACES | {"disk": "disk space"}
PHASES: dict[Phase, str] = {
    "always": "all the time",
    "step": "a training step",
    "refresh": "clustering and mining",
    "index": "validation and indexing",
}
STATE = ("encoder and heads", "token table", "classifier rows")
# share of the free memory to keep free: allocators round up and fragment, other processes need some
MARGIN = 0.05
SMALL = 0.1  # share of the free memory: a plan that needs less everywhere is printed as one line
FP32 = 4
BF16 = 2
INT32 = 4
INT64 = 8
CONTEXT_BYTES = 512 << 20  # the GPU's driver, its libraries and cuBLAS's workspaces: an assumption
# copies of the classifier rows in flight: the rows in use, and those being written back
_ROW_SETS = 2
_FULL_BCE_CHUNK = 8192  # labels per block in unidec.model.full_bce
_TRIPLET_BLOCK = 1 << 22  # triplets per block in unidec.model.losses
_BLOCK = 1 << 16  # rows that are encoded, projected or scored together
# counted by rows
_TABLES = ("table.weight", "bias.weight", "bag.embedding.weight", "bag.log_weight.weight")
KNOWN = {
    "distilbert-base-uncased": "distilbert",
    "msmarco-distilbert-base-v4": "distilbert",
    "bert-base-uncased": "bert",
}  # encoders that can be planned for without their files
# tried in this order: first settings that do not change what is learnt, then lower precision, then
# less data
REMEDIES: tuple[Settings, ...] = (
    {"run.recompute": True},
    {"optim.encode_chunk": 256},
    {"run.table_place": "host"},
    {"run.table_place": "disk"},
    {"model.clf_dtype": "bf16"},
    {"optim.clf_state": "adagrad"},
    {"optim.clf_state": "sgd"},
    {"pool.clf_labels": "pool"},
    {"pool.de_labels": "pool"},
    {"tokens.max_length": 32},
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a data set.

    Attributes:
        num_queries: of all splits; num_train: n; num_labels: L.
        num_pairs: stored query-label pairs, and entries of the label graph if training uses it.
        query_tokens, label_tokens: number of tokens of a text: mean and maximum.
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
        """Sizes of the ingested data set and its token caches."""
        dataset = paths.open_dataset()
        queries = paths.open_tokens("queries")
        labels = paths.open_tokens("labels")
        graph = paths.open_label_graph(params) if paths.LABEL_GRAPH.is_dir() else None
        pairs = int(dataset.relevance.nnz) + (0 if graph is None else int(graph.nnz))
        of_queries, of_labels = (
            (float(of.mean()), int(of.max())) for of in (queries.lengths(), labels.lengths())
        )
        return cls(
            dataset.num_queries,
            len(dataset.rows("train")),
            dataset.num_labels,
            pairs,
            of_queries,
            of_labels,
            queries.vocab_size,
        )

    @classmethod
    def given(cls, labels: int, queries: int, tokens: int, pairs: int | None = None) -> Sizes:
        """Sizes from counts alone. Default of `pairs`: 5 labels per query (the papers' data sets
        have 2 to 22).
        """
        length = (float(tokens), tokens)
        return cls(
            queries, queries, labels, 5 * queries if pairs is None else pairs, length, length
        )


def empty_encoder(name: str) -> Any:
    """A transformer on torch's device "meta", whose weights take no memory.

    `name` is a folder or name that `resolve_encoder` finds, or one of `KNOWN`.

    Raises:
        ArtifactError: there is no such encoder. ConfigError: its config.json is not a
        transformer's.
    """
    from transformers import AutoConfig, AutoModel

    known = None if Path(name).is_dir() else KNOWN.get(name.rpartition("/")[2])
    file = "" if known else str(resolve_encoder(name) / "config.json")
    try:
        config = AutoConfig.for_model(known) if known else AutoConfig.from_pretrained(file)
        with torch.device("meta"):
            return AutoModel.from_config(config, **transformer_options(config))
    except (OSError, ValueError) as error:
        fix = "save it with AutoModel.save_pretrained"
        raise ConfigError(
            "not a transformer's config.json", where=file, got=str(error)[:200], fix=fix
        ) from error


@dataclass(frozen=True)
class Amount:  # of memory: its purpose, where it is held, and in which phase
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
    """

    amounts: tuple[Amount, ...]
    device: str
    step: str
    free: Free
    advice: Settings | None = None

    def needed(self, place: Place) -> dict[Phase, int]:
        """Bytes at a place in each phase, including what is held all the time."""
        here = [amount for amount in self.amounts if amount.place == place]
        return {
            phase: sum(a.num_bytes for a in here if a.phase in ("always", phase))
            for phase in PHASES
        }

    def peak(self, place: Place) -> tuple[Phase, int]:
        """The phase that needs most memory at a place, and its bytes."""
        return max(self.needed(place).items(), key=operator.itemgetter(1))

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, tables and their optimisers' state: of one rank on a GPU, of all ranks
        on a CPU.
        """
        return sum(amount.num_bytes for amount in self.amounts if amount.name in STATE)

    @property
    def shortages(self) -> dict[Place, float]:
        """Places where the training does not fit: needed memory divided by free memory."""
        return {
            place: self.peak(place)[1] / max(size, 1)
            for place, size in self.free.items()
            if size is not None and self.peak(place)[1] > (1 - MARGIN) * size
        }

    @property
    def short(self) -> list[str]:
        """A line for each place where the training does not fit."""
        peaks = [(place, *self.peak(place)) for place in self.shortages]
        return [
            f"{PLACES[place]}: {gib(size)} needed, {gib(self.free[place] or 0)} free "
            f"({PHASES[phase]})"
            for place, phase, size in peaks
        ]

    @property
    def missing(self) -> str:
        """How much is missing where: "1.20 GiB more disk space"."""
        bytes_of = {
            place: self.peak(place)[1] / (1 - MARGIN) - (self.free[place] or 0)
            for place in self.shortages
        }
        return " and ".join(f"{gib(size)} more {SPACE[place]}" for place, size in bytes_of.items())

    def settings(self, form: str) -> list[str]:
        """The settings of `advice` in this form, such as "--set {}={}"."""
        return [form.format(key, str(value).lower()) for key, value in (self.advice or {}).items()]

    def as_dict(self) -> dict[str, object]:
        """The plan for JSON; the peak of a place is its phase and bytes."""
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
        }

    def lines(self) -> list[str]:
        """The plan as printed: the largest amounts of each place, whether it fits, and settings
        that would; a single line if little memory is needed.
        """
        peaks = {place: self.peak(place)[1] for place in PLACES if self.peak(place)[1]}
        if all(size <= SMALL * (self.free.get(place) or 0) for place, size in peaks.items()):
            parts = [
                f"{PLACES[p]} {gib(size)} of {gib(self.free[p] or 0)} free"
                for p, size in peaks.items()
            ]
            return [f"fits: {', '.join(parts)} (--json: all amounts)"]
        lines = [f"largest step: {self.step}"]
        for place, name in PLACES.items():
            phase, needed = self.peak(place)
            amounts = [a for a in self.amounts if a.place == place and a.phase in ("always", phase)]
            if amounts:
                free = self.free.get(place)
                lines.append(
                    f"{name}: {gib(needed)}{f' of {gib(free)} free' if free else ''}, "
                    f"{PHASES[phase]}"
                )
            amounts.sort(key=lambda amount: -amount.num_bytes)
            lines += [f"  {amount.name:<32}{gib(amount.num_bytes):>12}" for amount in amounts[:5]]
        if not self.short:
            return [*lines, "fits"]
        fix = " ".join(self.settings("--set {}={}")) or f"{self.missing}: no known setting fits"
        return [*lines, f"does not fit: {'; '.join(self.short)}", f"fix: {fix}"]


def gib(num_bytes: float) -> str:
    """ "1.23 GiB", small amounts in MiB."""
    return (
        f"{num_bytes / 2**30:,.2f} GiB"
        if num_bytes >= 0.1 * 2**30
        else f"{num_bytes / 2**20:,.2f} MiB"
    )


class Formulas:
    """The amounts of memory of one rank, by phase.

    Args:
        transformer: of `empty_encoder`. cuda: the device is a GPU. half: transformers compute in
        bfloat16.

    Raises:
        ConfigError: more layers to train than the encoder has.
    """

    def __init__(self, params: Params, sizes: Sizes, transformer: Any, cuda: bool, half: bool):
        self.params = params
        self.sizes = sizes
        self.config = transformer.config
        self.cuda = cuda
        self.half = half
        encoder = params.encoder
        model = params.model
        pool = params.pool
        ranks = params.run.devices
        with torch.device("meta"):
            # TextEncoder freezes layers in place
            copied = deepcopy(transformer) if encoder.has_transformer else None
            settings = encoder.model_copy(update={"bag_words": 0})
            width = self.config.hidden_size
            phi = TextEncoder(settings, copied, 1, width, token_layers(settings, width))
            no_rows = Placement(num_rows=0)  # the tables are counted by rows
            empty = UniDEC(settings, model, sizes.num_labels, phi, no_rows, add=additions)
        self.width = empty.encoder.width
        self.levels = [num_clusters(sizes.num_labels, size) for size in model.levels]
        self.dense = [  # name, number of values, whether it is trained
            (name, p.numel(), p.requires_grad)
            for name, p in empty.named_parameters()
            if not name.endswith(_TABLES)
        ]
        self.trains_bag = encoder.kind != "transformer" and not encoder.frozen
        layers = (
            self.config.num_hidden_layers
            if encoder.trainable_layers < 0
            else encoder.trainable_layers
        )
        self.trained_layers = layers if encoder.has_transformer else 0
        self.all_layers = encoder.has_transformer and encoder.trainable_layers < 0
        # DistilBERT's
        self.intermediate = (
            getattr(self.config, "intermediate_size", None) or self.config.hidden_dim
        )
        # on a CPU attention is not fused
        self.scored_heads = 0 if cuda else self.config.num_attention_heads
        self.row_bytes = bytes_per_row(model.clf_dtype, params.optim.clf_state, model.dim)
        # classifier rows that one rank holds
        self.rank_labels = math.ceil(sizes.num_labels / ranks)
        # share of labels whose texts are queries
        query_labels = params.label_graph.share * pool.gandalf + pool.simcse
        self.rows = sizes.num_train + math.ceil(query_labels * sizes.num_labels)
        # the largest step
        self.queries = min(queries_a_batch(pool, self.rows), self.rows)
        mines = pool.eta > 0 and draws_pools(model, pool)
        shortlisted = (
            pool.shortlist * model.labels_a_cluster if pool.shortlist else pool.eta * pool.refresh
        )
        # bytes
        self.shortlist = (
            INT32 * (sizes.num_queries + sizes.num_labels * pool.gandalf) * shortlisted * mines
        )
        mean = sizes.num_pairs / sizes.num_queries
        most = max(pool.beta, mean) if pool.fill else pool.beta
        positives = most if pool.gandalf else min(most, mean)
        sampled = math.ceil(self.queries * (positives + pool.eta * mines))
        some = pool.clf_labels if isinstance(pool.clf_labels, int) else 0
        count = {  # the labels of a head -> their number
            "none": 0,
            "pool": max(1, min(sampled, sizes.num_labels, pool.size or sampled)),
            "some": some if 2 * some < sizes.num_labels else sizes.num_labels,
            "all": sizes.num_labels,
        }
        labels_by_head = head_labels(model, pool)
        self.labels = max(count[labels] for labels in labels_by_head)
        # numbers of labels that one rank compares with the queries
        self.de_labels, self.clf_labels = (
            math.ceil(count[labels] / (ranks if labels == "all" and loss in BY_COLUMNS else 1))
            for labels, loss in zip(labels_by_head, (params.loss.de, params.loss.clf), strict=True)
        )
        # texts that one rank encodes, sorted by length: each chunk is padded to at most the next
        # chunk's shortest text
        label_texts = count[encoded_labels(model, pool, model.clf_residual)]
        # queries of the labels, on one rank
        drawn = min(label_texts * model.clf_queries, sizes.num_train)
        counts = (math.ceil(self.queries / ranks) + drawn, math.ceil(label_texts / ranks))
        limit = params.tokens.max_length
        lengths = [
            (min(mean, limit), min(top, limit))
            for mean, top in (sizes.query_tokens, sizes.label_tokens)
        ]
        texts = list(zip(counts, lengths, strict=True))
        self.texts = sum(counts)
        self.longest = max(top for _, top in lengths)
        self.tokens = sum(math.ceil(number * mean) for number, (mean, _) in texts)
        self.chunk_tokens = max(CHUNK_TEXTS * self.longest, GPU_CHUNK_TOKENS * self.cuda)
        padded = sum(
            min(number * top, number * mean + self.chunk_tokens) for number, (mean, top) in texts
        )
        # texts, and their padded tokens, whose activations are in memory at the same time
        at_once = params.optim.encode_chunk or self.texts
        recompute = params.run.recompute
        self.held = min(at_once, CHUNK_TEXTS if recompute else self.texts)
        self.held_padded = math.ceil(
            min(padded, at_once * self.longest, self.chunk_tokens if recompute else padded)
        )

    def state(self) -> list[Amount]:
        """Memory that is held from step to step, exact to the byte."""
        params = self.params
        model = self.params.model
        encoder = self.params.encoder
        # with Adam's moments
        values = sum((3 if trained else 1) * count for _, count, trained in self.dense)
        tokens = max(self.sizes.vocab_size, self.config.vocab_size) + encoder.bag_words
        table = tokens * (self.config.hidden_size + 1) * (encoder.kind != "transformer")
        rows = self.rank_labels * (model.heads != "de")
        bias = bytes_per_row("fp32", params.optim.clf_state, 1) if model.clf_bias else (0, 0)
        return [
            Amount("encoder and heads", "device", FP32 * values),
            Amount("token table", "device", FP32 * table * (3 if self.trains_bag else 1)),
            Amount("classifier rows", params.run.table_place, rows * sum(self.row_bytes + bias)),
        ]

    def step(self) -> list[Amount]:
        """Memory that a step allocates and frees."""
        params = self.params
        model = self.params.model
        texts = self.texts
        # in bfloat16 the transformer also has casts of its weights and gradients
        casts = [
            1 + (self.half and name.startswith("encoder.transformer.")) for name, _, _ in self.dense
        ]
        gradients = sum(
            c * count * trained for c, (_, count, trained) in zip(casts, self.dense, strict=True)
        )
        # text vectors [texts, W] with their gradients and copies (dropout, residual), and the
        # heads' outputs [texts, D]
        copies = 11 if params.encoder.residual and not params.encoder.frozen else 6
        vectors = (copies * self.held + 2 * (texts - self.held)) * self.width
        vectors += 5 * (texts + self.queries + model.clf_residual * self.clf_labels) * model.dim
        # token embeddings, and the activations of its layers
        if params.encoder.kind == "inception":
            vectors += 24 * self.held * params.encoder.inception_tokens * self.config.hidden_size
        # rows of the token table, their gradients and moments; 32: a token's place, text and weight
        rows = min(self.tokens, self.sizes.vocab_size) + min(
            params.encoder.bag_words, self.tokens // 2
        )
        token_rows = (
            4 * FP32 * rows * (self.config.hidden_size + 1) + 32 * self.tokens
        ) * self.trains_bag
        # classifier rows in float32, their gradients and state; in flight if the table is not on
        # the device
        fetched = self.cuda and params.run.table_place != "device"
        bf16 = model.clf_dtype == "bf16"
        gathered = params.pool.clf_labels != "all" or fetched
        row = (FP32 * (1 + (gathered or bf16)) + 14 * bf16) * model.dim + gathered * self.row_bytes[
            1
        ]
        all_rows = 0  # gradients of all rows, not only of those that the step uses
        if params.optim.clf_state == "adamw" and gathered:
            all_rows = (FP32 * (1 + bf16) + 14 * bf16) * model.dim * self.rank_labels
        in_flight = fetched * _ROW_SETS * self.clf_labels * sum(self.row_bytes)
        return [
            Amount("gradients", "device", FP32 * gradients, "step"),
            Amount(
                "activations", "device", self._activations() if self.trained_layers else 0, "step"
            ),
            Amount("logits and losses", "device", self._logits(), "step"),
            Amount("text vectors", "device", FP32 * vectors, "step"),
            Amount("token rows of a step", "device", token_rows, "step"),
            Amount(
                "classifier rows of a step",
                "device",
                self.clf_labels * row + all_rows + in_flight,
                "step",
            ),
            Amount("classifier rows in flight", "host", in_flight, "step"),
        ]

    def _activations(self) -> int:
        """Bytes of activations: a layer keeps 10 h values per token (14 h in bfloat16, which stores
        some of them twice) and 2 i, and on a CPU, where attention is not fused, the attention
        scores.
        """
        h = self.config.hidden_size
        padded = self.held_padded
        value = BF16 if self.half else FP32
        token = ((14 if self.half else 10) * h + 2 * self.intermediate) * value
        scores = self.longest * self.scored_heads * (2 * FP32 + value)
        embedded = FP32 * h * (2 * padded + self.config.vocab_size) * self.all_layers
        backward = 3 * value * min(padded, 1 << 13) * (self.intermediate + h)
        inputs = self.texts * self.longest * (INT64 if self.all_layers else FP32 * h)
        return padded * self.trained_layers * (token + scores) + embedded + backward + inputs

    def _logits(self) -> int:
        """Bytes of logits and losses: forward and backward, a loss holds five matrices of the size
        of the logits; and its pairs and triplets.
        """
        loss = self.params.loss
        clf_labels = self.clf_labels
        pairs = int(self.queries * self.sizes.num_pairs / self.sizes.num_queries) + 1
        if loss.clf == "bce" and self.params.pool.clf_labels == "all":
            clf_labels = min(clf_labels, _FULL_BCE_CHUNK)
        all_triplets = "triplet" in (loss.de, loss.clf) and loss.triplet_negatives == "all"
        triplets = all_triplets * min(pairs * max(self.de_labels, clf_labels), _TRIPLET_BLOCK)
        columns = self.de_labels + clf_labels + sum(self.levels)
        pairs = pairs * (1 + len(self.levels))
        return 5 * FP32 * self.queries * columns + 80 * pairs + 9 * triplets

    def refresh(self) -> list[Amount]:
        """Memory of a refresh: clustering copies up to half of the points (a GPU holds all of
        them); mining holds all vectors on a GPU, and a tile of scores.
        """
        n = self.rows
        dim = self.params.model.dim
        labels = self.sizes.num_labels * (self.shortlist > 0)
        if not labels and self.params.pool.batches != "clustered":
            return []
        token = (
            4 * self.config.hidden_size
            + 2 * self.intermediate
            + 3 * self.longest * self.scored_heads
        )
        encoded = self.chunk_tokens * token * self.params.encoder.has_transformer + CHUNK_TEXTS * (
            self.width + dim
        )
        points = (
            max(n // 2, 3 * min(n, 1 << (20 if self.cuda else 16))) + n * self.cuda
        ) * dim + 12 * n
        vectors = (n + labels) * dim + min(n + labels, 2 * _BLOCK) * (self.width + dim)
        mined = 512 * min(labels, _BLOCK) + (n + labels) * dim * self.cuda
        return [
            Amount("query and label vectors", "host", FP32 * vectors, "refresh"),
            Amount(
                "clustering, mining", "device", FP32 * (encoded + max(points, mined)), "refresh"
            ),
            Amount("hard negatives", "host", self.shortlist, "refresh"),
        ]

    def index(self) -> list[Amount]:
        """Memory of the sampler, of label vectors, names and the index while it is built (with
        unquantised vectors, and the links of a graph or the ids of lists), and of files on disk.
        """
        sizes = self.sizes
        model = self.params.model
        index = self.params.index
        labels = self.sizes.num_labels
        heads = (model.heads == "both") + 1 + (model.heads != "de" and index.clf_normalize)
        width = (2 if index.space == "both" else 1) * model.dim + model.clf_bias
        links_or_ids = {"hnsw": 2 * INT32 * index.hnsw_links + 2 * INT64, "ivf-pq": INT64}
        stored = labels * (FP32 * width + links_or_ids.get(index.kind, 0))
        vectors = FP32 * (labels * model.dim * heads + _BLOCK * (512 + self.width + model.dim))
        # 57: a Python string; 8: characters of a token
        names = math.ceil(labels * (57 + 8 * sizes.label_tokens[0]))
        texts = sizes.num_queries + labels
        with_texts = self.params.pool.gandalf or self.params.pool.simcse
        sampler = INT64 * 2 * (labels + self.rows) + 16 * (sizes.num_pairs + texts) * with_texts
        state, table, rows = (amount.num_bytes for amount in self.state())
        all_ranks = state + table + rows * self.params.run.devices
        frozen = self.params.encoder.frozen or (
            self.params.encoder.has_transformer and not self.trained_layers
        )
        return [
            Amount("sampler", "host", sampler),
            Amount(
                "label vectors, names and index", "host", vectors + 2 * (stored + names), "index"
            ),
            # two checkpoints are kept while a third is written
            Amount("checkpoints", "disk", 3 * (all_ranks + INT64 * self.rows + self.shortlist)),
            Amount("model and bundle", "disk", 2 * all_ranks + vectors + stored + names),
            # float16
            Amount("cached outputs of what is frozen", "disk", 2 * texts * self.width * frozen),
        ]


def advise(params: Params, plan_of: Callable[[Params], Plan]) -> Settings | None:
    """Settings with which a training fits: a single one of `REMEDIES` or a smaller batch; if no
    single one is enough, those that help, combined one after another; None if even all of them are
    not enough.
    """

    def missing(settings: Settings) -> float:
        changed = with_settings(params, settings)
        return math.inf if changed is None else sum(plan_of(changed).shortages.values())

    pool = params.pool
    now = missing({})
    batch = pool.batch_size
    size = pool.size or pool.batch_size * (pool.beta + pool.eta)
    halves = range(1, batch.bit_length() - 4)
    smaller: list[Settings] = [
        {"pool.batch_size": batch >> half, "pool.size": size >> half} for half in halves
    ]
    single = [(remedy, missing(remedy)) for remedy in (*REMEDIES, *smaller)]
    combined = itertools.accumulate(
        (remedy for remedy, shortage in single if shortage < now), operator.or_
    )
    tried = itertools.chain(single, ((remedy, missing(remedy)) for remedy in combined))
    return next((remedy for remedy, shortage in tried if not shortage), None)


def plan_memory(
    params: Params,
    sizes: Sizes | None = None,
    free: Free | None = None,
    training_only: bool = False,
) -> Plan:
    """Estimate the memory of a training and compare it with the free memory.

    Args:
        params: all parameters.
        sizes: of the data; None: of the ingested data set.
        free: free bytes by place, instead of measured ones. With "device", a GPU of another
            machine, nothing is measured here.
        training_only: omit the index, which can be built on another machine.
    """
    sizes = sizes or Sizes.stored(params)
    process = int(psutil.Process().memory_info().rss)
    transformer = empty_encoder(params.encoder.name)
    ranks = params.run.devices
    cuda = True
    half = params.optim.precision != "fp32"
    available = dict[Place, int | None](free or {})
    if "device" not in available:
        device = choose_device(params.device)
        cuda = device.type == "cuda"
        half = autocast_type(params.optim.precision, device) is not None
        available = {
            "host": available_host() + process,
            "disk": available_disk(paths.RUNS),
            **available,
        }
        if cuda:
            available["device"] = int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved()

    def plan_of(other: Params) -> Plan:
        formulas = Formulas(other, sizes, transformer, cuda, half)
        amounts = [
            *formulas.state(),
            *formulas.step(),
            *formulas.refresh(),
            *formulas.index(),
            Amount("process", "host", process),
            Amount("driver and libraries", "device", CONTEXT_BYTES * cuda),
        ]
        if not cuda:
            amounts = [
                replace(amount, place="host") if amount.place == "device" else amount
                for amount in amounts
            ]
        # all ranks are processes of one machine, with a device each
        amounts = [
            replace(a, num_bytes=ranks * a.num_bytes) if a.place == "host" else a for a in amounts
        ]
        counted = tuple(
            a for a in amounts if a.num_bytes and not (training_only and a.phase == "index")
        )
        step = (
            f"{formulas.queries:,} queries, {formulas.labels:,} labels, "
            f"{'bf16' if half else 'fp32'}"
        )
        return Plan(counted, "cuda" if cuda else "cpu", step, available)

    plan = plan_of(params)
    return replace(plan, advice=advise(params, plan_of)) if plan.shortages else plan


def check_fits(params: Params, free: Free | None = None) -> None:
    """Raise a ConfigError, with settings that fit, if a training does not fit. `free`: as for
    `plan_memory`.
    """
    if not params.run.check_memory:
        return
    # a run replaces or reuses their files
    folders = (paths.CACHE, paths.MODEL, paths.BUNDLE, paths.RUNS)
    reusable = sum(
        file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file()
    )
    plan = plan_memory(
        params, None, {"disk": available_disk(paths.RUNS) + reusable, **(free or {})}, True
    )
    if plan.short:
        lacking = " and ".join(SPACE[place] for place in plan.shortages)
        advice = " or ".join(filter(None, [plan.missing, ", ".join(plan.settings("{}: {}"))]))
        what = f"the training does not fit: too little {lacking}"
        limit = f"at most {1 - MARGIN:.0%} of what is free"
        fix = f"{advice}; `unidec plan` lists the amounts, run.check_memory: false skips this check"
        raise ConfigError(
            what,
            where=str(paths.RUNS.absolute()),
            got="; ".join(plan.short),
            expected=limit,
            fix=fix,
        )


def plan_command(
    params: Params, labels: int | None, queries: int | None, tokens: int | None, device: str | None
) -> Plan:
    """The plan of `unidec plan`, for another data set with these sizes or (None) data/dataset, and
    for another GPU with this memory, such as "16GiB", or (None) this machine.
    """
    sizes = Sizes.given(labels, queries, tokens) if labels and queries and tokens else None
    if sizes is None and (labels or queries or tokens):
        raise ConfigError(
            "sizes are missing",
            where="unidec plan",
            expected="all of --labels, --queries and --tokens",
        )
    try:
        free: Free = (
            {"device": int(TypeAdapter(ByteSize).validate_python(device))} if device else {}
        )
    except ValidationError as error:
        expected = "a size such as 16GiB or 141GB"
        raise ConfigError(
            "not a size of memory", where="--device-memory", got=device, expected=expected
        ) from error
    return plan_memory(params if sizes else effective(params), sizes, free)
