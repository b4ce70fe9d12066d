"""Memory that a training needs, and the settings that would make it fit.

Weights, tables and their optimisers' state are exact: counted on the model itself, built without memory. All the rest
is an upper estimate by a formula.

Legend: B queries, S labels of a pool, L labels, N queries of all splits, n training queries, H mined negatives a query,
D width of a head, W width of the encoder, h and i widths of the transformer and of its feed-forward layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from unidec.config import Params
from unidec.errors import ConfigError
from unidec.model.encoder import TextEncoder, transformer_options
from unidec.model.sources import resolve_encoder
from unidec.model.unidec import UniDEC
from unidec.pipeline.step_sizes import Batch, Sizes, batch_sizes, training_rows
from unidec.training.needs import head_labels, weighs_by_propensity
from unidec.training.row_optim import bytes_per_row

Place = Literal["device", "host", "disk"]
Phase = Literal["always", "step", "refresh", "index"]
Free = Mapping[Place, int | None]
PLACES: dict[Place, str] = {"device": "GPU memory", "host": "host memory", "disk": "disk"}
PHASES: dict[Phase, str] = {"always": "all the time", "step": "a training step", "refresh": "clustering and mining",
                            "index": "validation and indexing"}  # fmt: skip
MARGIN = 0.05  # of what is free: allocators round up and fragment, other processes need some
GIB = 1 << 30
FP32, BF16, FP16, INT32, INT64 = 4, 2, 2, 4, 8
_LOGIT_COPIES = 5  # matrices of the size of the logits that a loss holds at once, forward and backward
_ROW_SETS = 4  # classifier rows in flight: fetched ahead, in use, and row_store.WRITES_AHEAD being written
_FULL_BCE_CHUNK = 8192  # labels at once in unidec.model.full_bce
_TRIPLET_BLOCK = 1 << 22  # triplets at once in unidec.model.hinge
_BLOCK = 1 << 16  # rows that are encoded, projected or scored together
_QUERY_BLOCK = 512  # queries of a tile of scores in unidec.model.search
_CLUSTER_POINTS = {False: 1 << 16, True: 1 << 20}  # on a processor, on a GPU: unidec.training.clustering
_TABLES = ("table.weight", "bias.weight", "bag.embedding.weight", "bag.log_weight.weight")  # counted by rows
_STRING = 57  # bytes of a Python string besides its characters, and of the pointer to it
# sizes of the models that papers and recipes name, for plans without their files: transformers' defaults are BERT-base
# and DistilBERT
KNOWN: dict[str, dict[str, Any]] = {
    "distilbert-base-uncased": {"model_type": "distilbert"},
    "bert-base-uncased": {"model_type": "bert"},
    "all-MiniLM-L6-v2": {
        "model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536,
    },
}  # fmt: skip


@lru_cache(maxsize=4)
def empty_encoder(name: str, config_file: Path | None = None) -> Any:
    """A transformer without memory for its weights (torch's device "meta").

    Args:
        name: a local folder, a name of `KNOWN`, or what `resolve_encoder` finds.
        config_file: a config.json, in place of all these.

    Raises:
        ArtifactError: none of these exists. ConfigError: not a transformer's config.
    """
    from transformers import AutoConfig, AutoModel

    short, file = name.rpartition("/")[2], config_file
    if file is None and (Path(name).is_dir() or short not in KNOWN):
        file = resolve_encoder(name) / "config.json"
    try:
        config = AutoConfig.for_model(**KNOWN[short]) if file is None else AutoConfig.from_pretrained(str(file))
        with torch.device("meta"):
            return AutoModel.from_config(config, **transformer_options(config))
    except (OSError, ValueError) as error:
        raise ConfigError("not a transformer's config.json", where=str(file), got=str(error)[:200]) from error


@dataclass(frozen=True)
class Amount:
    """An amount of memory: its name, where it is held, its bytes, and when it is held."""

    name: str
    place: Place
    num_bytes: int
    phase: Phase = "always"


@dataclass(frozen=True)
class Estimate:
    """The memory of one training.

    Attributes:
        amounts: all of it; on a CPU what would be on the device is in host memory.
        device: "cuda" or "cpu".
        facts: sizes behind the formulas.
    """

    amounts: tuple[Amount, ...]
    device: str
    facts: dict[str, Any] = field(default_factory=dict)

    def peak(self, place: Place, phases: Collection[Phase] = tuple(PHASES)) -> tuple[Phase, int]:
        """The phase that needs most memory at a place, and its bytes (what is always held included)."""

        def total(*of: Phase) -> int:
            return sum(a.num_bytes for a in self.amounts if a.place == place and a.phase in of)

        phase = max(phases, key=lambda name: total("always", name))
        return phase, total("always", phase)

    def named(self, *names: str) -> int:
        """Bytes of the amounts with these names."""
        return sum(amount.num_bytes for amount in self.amounts if amount.name in names)

    @property
    def state_bytes(self) -> int:
        """Weights, tables and their optimisers' state, wherever they are: the content of a checkpoint."""
        return self.named(*STATE)

    def shortages(self, free: Free, phases: Collection[Phase] = tuple(PHASES)) -> list[Shortage]:
        """Where the training does not fit; a place of unknown size counts as large enough."""
        peaks = [Shortage(place, *self.peak(place, phases), free.get(place) or 0) for place in PLACES]
        return [one for one in peaks if free.get(one.place) is not None and one.needed > (1 - MARGIN) * one.free]


STATE = (
    "encoder weights", "encoder moments", "head weights", "head moments", "token table", "token table state",
    "classifier table", "classifier state",
)  # fmt: skip


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


def gib(num_bytes: float) -> str:
    """ "1.23 GiB"; small amounts in MiB or KiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= 0.1 * size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes / 1024:,.2f} KiB"


@dataclass(frozen=True)
class Setting:
    """What the formulas read: see `estimate`.

    Attributes:
        model: without its tables' rows, on torch's device "meta".
        config: transformers' config of the encoder (a bag takes its width and vocabulary from it).
        row_bytes: of one row of the classifier's table, and of its optimiser's state.
        rows: n, with Gandalf label texts too; listed: rows of the mined shortlist, of every split.
    """

    params: Params
    sizes: Sizes
    batch: Batch
    model: UniDEC
    config: Any
    row_bytes: tuple[int, int]
    rows: int
    listed: int
    cuda: bool
    half: bool

    @classmethod
    def of(cls, params: Params, sizes: Sizes, transformer: Any, cuda: bool, half: bool) -> Setting:
        encoder, model = params.encoder.model_copy(update={"bag_words": 0}), params.model
        with torch.device("meta"):
            own = deepcopy(transformer) if encoder.kind != "bag" else None  # which of its layers train is set on it
            text_encoder = TextEncoder(encoder, own, 1, transformer.config.hidden_size)
            empty = UniDEC(encoder, model, 1, text_encoder)
        row_bytes = bytes_per_row(model.clf_dtype, params.optim.clf_state, model.dim)
        rows, listed = training_rows(params, sizes), sizes.num_queries + sizes.num_labels * params.pool.gandalf
        batch = batch_sizes(params, sizes)
        return cls(params, sizes, batch, empty, transformer.config, row_bytes, rows, listed, cuda, half)

    @property
    def trains_bag(self) -> bool:
        return self.params.encoder.kind != "transformer" and not self.params.encoder.frozen

    @property
    def trained_layers(self) -> int:
        layers, encoder = self.config.num_hidden_layers, self.params.encoder
        return 0 if encoder.kind == "bag" else layers if encoder.trainable_layers < 0 else encoder.trainable_layers

    @property
    def intermediate(self) -> int:
        """i; DistilBERT's config has another name for it."""
        return getattr(self.config, "intermediate_size", None) or self.config.hidden_dim

    @property
    def head_vectors(self) -> int:
        """Bytes of the label vectors of all heads."""
        heads = 2 if self.params.model.heads == "both" else 1
        return FP32 * self.sizes.num_labels * self.params.model.dim * heads

    @property
    def index_bytes(self) -> int:
        """Of an index that keeps whole vectors, with the links of a graph or the ids of lists; quantised: less."""
        index, model = self.params.index, self.params.model
        width = (2 if index.space == "both" else 1) * model.dim + model.clf_bias
        return self.sizes.num_labels * (FP32 * width + 2 * INT32 * index.hnsw_links + 2 * INT64)


def estimate(
    params: Params, sizes: Sizes, transformer: Any, *, cuda: bool, half: bool, process: int, context: int = 0
) -> Estimate:
    """The memory of a training; several ranks as processes on one machine, a device each.

    Args:
        params: all parameters.
        sizes: of the data.
        transformer: of `empty_encoder`.
        cuda: the device is a GPU; otherwise what would be on it is in host memory.
        half: transformers compute in bfloat16.
        process: bytes of a process with the libraries loaded.
        context: bytes that the driver and its libraries hold on the device before the first tensor.

    Raises:
        ConfigError: more layers to train than the encoder has.
    """
    s = Setting.of(params, sizes, transformer, cuda, half)
    state = state_amounts(s)
    amounts = [*state, *step_amounts(s), *_refresh_amounts(s), *_index_amounts(s), *_disk_amounts(s, state)]
    # memory-mapped files are not counted: the system drops their pages if needed
    every, weighted = "all" in head_labels(params.model, params.pool), weighs_by_propensity(params.loss, params.pool)
    per_label = INT64 * (every + weighted)
    label_texts = 16 * (sizes.num_pairs + sizes.num_graph_pairs + s.listed) * params.pool.gandalf
    amounts += [
        Amount("driver and libraries", "device", context),
        Amount("process", "host", process),
        Amount("sampler", "host", per_label * sizes.num_labels + INT64 * s.rows + sizes.num_queries + label_texts),
    ]
    if not cuda:
        amounts = [replace(amount, place="host") if amount.place == "device" else amount for amount in amounts]
    ranks, batch = params.run.devices, s.batch
    amounts = [replace(a, num_bytes=ranks * a.num_bytes) if a.place == "host" else a for a in amounts if a.num_bytes]
    facts = {
        "queries": sizes.num_queries, "labels": sizes.num_labels, "steps_per_epoch": batch.steps,
        "batch_queries": batch.queries, "pool_labels": batch.labels, "classifier_labels": batch.classifier_labels,
        "texts_per_step": batch.texts.count, "tokens_per_step": batch.texts.tokens,
        "precision": "bf16" if half else "fp32",
    }  # fmt: skip
    return Estimate(tuple(amounts), "cuda" if cuda else "cpu", facts)


def state_amounts(s: Setting) -> list[Amount]:
    """What is kept from step to step, exact to the byte, and the gradients of what is dense."""
    encoder, model, place, amounts = s.params.encoder, s.params.model, s.params.run.table_place, []
    weights = {name: p for name, p in s.model.named_parameters() if not name.endswith(_TABLES)}
    for what in ("encoder", "head"):
        own = [p for name, p in weights.items() if name.startswith("encoder.transformer.") == (what == "encoder")]
        trained = sum(p.numel() for p in own if p.requires_grad)
        amounts += [
            Amount(f"{what} weights", "device", FP32 * sum(p.numel() for p in own)),
            Amount(f"{what} moments", "device", 2 * FP32 * trained),
            Amount(f"{what} gradients", "device", FP32 * trained, "step"),
        ]
        if s.half and what == "encoder":
            amounts.append(Amount("bfloat16 weights and gradients", "device", 2 * BF16 * trained, "step"))
    if encoder.kind != "transformer":
        rows = max(s.sizes.vocab_size, s.config.vocab_size) + encoder.bag_words
        table = FP32 * rows * (s.config.hidden_size + 1)
        amounts.append(Amount("token table", "device", table))
        amounts.append(Amount("token table state", "device", 2 * table * s.trains_bag))
    if model.heads != "de":
        rows = -(-s.sizes.num_labels // s.params.run.devices)
        bias = bytes_per_row("fp32", s.params.optim.clf_state, 1) if model.clf_bias else (0, 0)
        amounts.append(Amount("classifier table", place, rows * (s.row_bytes[0] + bias[0])))
        amounts.append(Amount("classifier state", place, rows * (s.row_bytes[1] + bias[1])))
    return amounts


def step_amounts(s: Setting) -> list[Amount]:
    """What a step allocates and frees. Parts are added up although some never coincide, but for activations that are
    computed again (`run.recompute`, `optim.encode_chunk`): then the logits are gone."""
    batch, encoder, model, width = s.batch, s.params.encoder, s.params.model, s.model.encoder.width
    n, held = batch.texts.count, batch.held.count
    activations, logits = _activations(s), _logits(s)
    amounts = activations + logits
    if held < n:
        amounts = max((activations, logits), key=lambda part: sum(amount.num_bytes for amount in part))
    # text vectors [n, W] with their gradients and copies (dropout, residual), and the heads' outputs [n, D]
    wide = 5 + (encoder.dropout > 0) + (5 if encoder.residual and not encoder.frozen else 0)
    vectors = held * wide * width + (2 * n * width if held < n else 0)
    vectors += 5 * (n + batch.queries + model.clf_residual * batch.classifier_labels) * model.dim
    amounts = [*amounts, Amount("text vectors", "device", FP32 * vectors, "step")]
    if s.trains_bag:  # rows of the token table, their gradients and moments; a token's place, text and weight
        tokens = batch.texts.tokens
        rows = min(tokens, s.sizes.vocab_size) + min(encoder.bag_words, tokens // 2)
        size = 4 * FP32 * rows * (s.config.hidden_size + 1) + 32 * tokens
        amounts.append(Amount("token rows of a step", "device", size, "step"))
    if model.heads != "de":  # rows in float32, their gradients and state; in flight where the table is not there
        fetched, half = s.cuda and s.params.run.table_place != "device", model.clf_dtype == "bf16"
        gathered = s.params.pool.clf_labels != "all" or fetched
        row = FP32 * model.dim * (1 + (gathered or half)) + gathered * s.row_bytes[1] + half * 14 * model.dim
        in_flight = fetched * _ROW_SETS * batch.classifier_labels * sum(s.row_bytes)
        amounts.append(Amount("classifier rows of a step", "device", batch.classifier_labels * row, "step"))
        amounts += [Amount("classifier rows in flight", place, in_flight) for place in ("device", "host")]
    return amounts


def _activations(s: Setting) -> list[Amount]:
    """A layer keeps 10 h (14 h in bfloat16, parts of it twice) and 2 i values a token; unfused attention its scores."""
    if not s.trained_layers:
        return []
    held, h, i = s.batch.held, s.config.hidden_size, s.intermediate
    value, everything = BF16 if s.half else FP32, s.params.encoder.trainable_layers < 0
    token = ((14 if s.half else 10) * h + 2 * i) * value
    pair = 0 if s.cuda else s.config.num_attention_heads * (2 * FP32 + value)
    kept = s.trained_layers * (held.padded * token + held.squares * pair) + everything * held.padded * h * 2 * FP32
    backward = everything * FP32 * s.config.vocab_size * h + 3 * value * min(held.padded, 1 << 13) * (i + h)
    inputs = s.batch.texts.padded * (INT64 if everything else h * FP32)
    return [
        Amount("activations", "device", kept, "step"),
        Amount("encoder input and gradients", "device", inputs + backward, "step"),
    ]


def _logits(s: Setting) -> list[Amount]:
    heads, batch, loss = s.params.model.heads, s.batch, s.params.loss
    pairs = int(batch.queries * s.sizes.num_pairs / s.sizes.num_queries) + 1
    of_de, of_clf = batch.labels * (heads != "clf"), batch.classifier_labels
    if loss.clf == "bce" and s.params.pool.clf_labels == "all":
        of_clf = min(of_clf, _FULL_BCE_CHUNK)
    logits = _LOGIT_COPIES * FP32 * batch.queries
    triplets = "triplet" in (loss.de, loss.clf) and loss.triplet_negatives == "all"
    return [
        Amount("positive pairs", "device", 80 * pairs, "step"),
        Amount("logits and losses, dual encoder", "device", logits * of_de, "step"),
        Amount("logits and losses, classifier", "device", logits * of_clf, "step"),
        Amount("triplets", "device", triplets * 9 * min(pairs * max(of_de, of_clf), _TRIPLET_BLOCK), "step"),
    ]


def _vectors(s: Setting, rows: int) -> int:
    """One head's vectors of texts, and a block of encoder outputs while they are computed."""
    dim = s.params.model.dim
    return FP32 * (rows * dim + min(rows, _BLOCK) * (s.model.encoder.width + dim))


def _tile(s: Setting) -> int:
    """A tile of scores of the exact search, and the check for finite values before it."""
    return FP32 * _QUERY_BLOCK * min(s.sizes.num_labels, _BLOCK) + _BLOCK * s.params.model.dim


def _refresh_amounts(s: Setting) -> list[Amount]:
    clusters, mines = s.params.pool.batches == "clustered", s.batch.negatives > 0
    if not (clusters or mines):
        return []
    n, dim, labels = s.rows, s.params.model.dim, s.sizes.num_labels
    # 256 texts at a time go through the encoder without gradients
    longest = min(max(len(s.sizes.query_lengths), len(s.sizes.label_lengths)) - 1, s.params.tokens.max_length)
    attention = 0 if s.cuda else 3 * longest * s.config.num_attention_heads
    through = 256 * longest * (4 * s.config.hidden_size + 2 * s.intermediate + attention)
    encoding = (BF16 if s.half else FP32) * through * (s.params.encoder.kind != "bag") + _vectors(s, 3 * 1024)
    # clustering copies the points of the largest cluster, a GPU holds all of them
    points = max(-(-n // 2), 3 * min(n, _CLUSTER_POINTS[s.cuda])) + n * s.cuda
    clustering = clusters * (FP32 * points * dim + 48 * n)
    mining = mines * (_tile(s) + FP32 * (n + labels) * dim * s.cuda)
    return [
        Amount("query and label vectors", "host", _vectors(s, n) + mines * _vectors(s, labels), "refresh"),
        Amount("texts being encoded", "device", encoding, "refresh"),
        Amount("clustering, then mining", "device", max(clustering, mining), "refresh"),
        Amount("hard negatives", "host", INT32 * s.listed * s.batch.negatives, "refresh"),
    ]


def _index_amounts(s: Setting) -> list[Amount]:
    """Label vectors of the heads, unit vectors of the classifier's, those that are searched, the index, the labels."""
    labels, unit = s.sizes.num_labels, s.params.model.heads != "de" and s.params.index.clf_normalize
    vectors = s.head_vectors + unit * FP32 * labels * s.params.model.dim + s.index_bytes
    return [
        Amount("label vectors to rank", "host", vectors + _vectors(s, min(labels, _BLOCK)) + _tile(s), "index"),
        Amount("search index", "host", s.index_bytes, "index"),
        Amount("label names", "host", 2 * labels * _STRING + s.sizes.text_bytes, "index"),
    ]


def _disk_amounts(s: Setting, state: list[Amount]) -> list[Amount]:
    """Files that a training and its index leave."""
    encoder, texts, ranks = s.params.encoder, s.sizes.num_queries + s.sizes.num_labels, s.params.run.devices
    whole = {a.name: a.num_bytes * (ranks if a.name.startswith("classifier") else 1) for a in state if a.name in STATE}
    refresh = INT64 * s.rows + INT32 * s.listed * s.batch.negatives
    weights = sum(size for name, size in whole.items() if not name.endswith(("state", "moments")))
    cached = 0  # outputs of a frozen encoder, or of a transformer's frozen layers, in float16
    if encoder.frozen:
        cached = texts * s.model.encoder.width
    elif encoder.kind != "bag" and 0 <= encoder.trainable_layers < s.config.num_hidden_layers:
        cached = (s.sizes.num_tokens if s.trained_layers else texts) * s.config.hidden_size
    return [
        Amount("checkpoints", "disk", 3 * (sum(whole.values()) + refresh)),  # two are kept
        Amount("model and bundle", "disk", 2 * weights + s.head_vectors + s.index_bytes + s.sizes.text_bytes),
        Amount("cached encoder outputs", "disk", FP16 * cached),
    ]
