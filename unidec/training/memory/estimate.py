"""Memory that a training needs: weights and optimiser state to the byte, everything else as an upper estimate.

Legend: B queries, S labels of a pool, L labels, N queries of all splits, n training queries, V vocabulary, H mined
negatives a query, D width of a head, W width of the encoder, h width of the transformer, i width of its feed-forward
layers, T tokens of a text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from unidec.config import Params
from unidec.training.memory.sizes import Batch, EncoderShape, Sizes, batch_sizes, training_rows
from unidec.training.needs import head_labels, weighs_by_propensity

Place = Literal["device", "host", "disk"]
Phase = Literal["always", "step", "refresh", "index"]
PLACES: dict[Place, str] = {"device": "GPU memory", "host": "host memory", "disk": "disk"}
PHASES: dict[Phase, str] = {"always": "all the time", "step": "a training step", "refresh": "clustering and mining",
                            "index": "validation and indexing"}  # fmt: skip

GIB = 1 << 30
FP32, BF16, FP16, INT32, INT64 = 4, 2, 2, 4, 8
_LOGIT_COPIES = 5  # matrices of the size of the logits that a loss holds at once, forward and backward
_ROW_SETS = 4  # classifier rows in flight: fetched ahead, in use, and row_store.WRITES_AHEAD being written
_FULL_BCE_CHUNK = 8192  # labels at once in unidec.model.full_bce
_TRIPLET_BLOCK = 1 << 22  # triplets at once in unidec.model.hinge
_BLOCK = 1 << 16  # rows that are encoded, projected or scored together
_QUERY_BLOCK = 512  # queries of a tile of scores in unidec.model.search
_CLUSTER_POINTS = {False: 1 << 16, True: 1 << 20}  # on a processor, on a GPU: unidec.training.clustering
_STRING = 57  # bytes of a Python string besides its characters, and of the pointer to it


@dataclass(frozen=True)
class Amount:
    """An amount of memory: its name, where and when it is held, its bytes and how they are computed."""

    name: str
    place: Place
    num_bytes: int
    formula: str
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

    def peak(self, place: Place, phases: Iterable[Phase] = tuple(PHASES)) -> tuple[Phase, int]:
        """The phase that needs most memory at a place, and its bytes (what is always held included)."""
        always = self._total(place, "always")
        totals = {phase: always + (self._total(place, phase) if phase != "always" else 0) for phase in phases}
        phase = max(totals, key=lambda name: totals[name])
        return phase, totals[phase]

    def named(self, name: str) -> int:
        """Bytes of the amounts with this name; 0 if there is none."""
        return sum(amount.num_bytes for amount in self.amounts if amount.name == name)

    @property
    def state_bytes(self) -> int:
        """Weights, tables and their optimisers' state, wherever they are: the content of a checkpoint."""
        return sum(self.named(name) for name in STATE)

    def _total(self, place: Place, phase: Phase) -> int:
        return sum(a.num_bytes for a in self.amounts if a.place == place and a.phase == phase)


STATE = (
    "encoder weights", "encoder moments", "head weights", "head moments", "token table", "token table state",
    "classifier table", "classifier state",
)  # fmt: skip


def gib(num_bytes: float) -> str:
    """ "1.23 GiB"; small amounts in MiB or KiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= 0.1 * size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes / 1024:,.2f} KiB"


def _product(*factors: float) -> str:
    return " x ".join(f"{factor:,}" for factor in factors)


@dataclass(frozen=True)
class Setting:
    """What the formulas read.

    Attributes:
        cuda: the device is a GPU. half: transformers compute in bfloat16.
    """

    params: Params
    sizes: Sizes
    shape: EncoderShape
    batch: Batch
    cuda: bool
    half: bool

    @property
    def has_transformer(self) -> bool:
        return self.params.encoder.kind != "bag"

    @property
    def trains_bag(self) -> bool:
        return self.params.encoder.kind != "transformer" and not self.params.encoder.frozen

    @property
    def bags(self) -> int:
        """Bags of tokens side by side: of the whole text, of its start."""
        return (1 + (self.params.encoder.bag_head > 0)) if self.params.encoder.kind != "transformer" else 0

    @property
    def width(self) -> int:
        """W."""
        return self.shape.hidden * (self.bags + self.has_transformer)

    @property
    def trained_layers(self) -> int:
        return self.shape.trained_layers(self.params.encoder.trainable_layers) if self.has_transformer else 0

    @property
    def num_heads(self) -> int:
        return 2 if self.params.model.heads == "both" else 1

    @property
    def row_bytes(self) -> int:
        """Of one row of the classifier's table."""
        return self.params.model.dim * (BF16 if self.params.model.clf_dtype == "bf16" else FP32)

    @property
    def row_state_bytes(self) -> int:
        """Of one row's optimiser state."""
        return {"adam": 2 * FP32 * self.params.model.dim, "adagrad": FP32, "sgd": 0}[self.params.optim.clf_state]


def estimate(
    params: Params, sizes: Sizes, shape: EncoderShape, *, cuda: bool, half: bool, process: int, context: int = 0
) -> Estimate:
    """The memory of a training; several ranks as processes on one machine, a device each.

    Args:
        params: all parameters.
        sizes: of the data.
        shape: of the transformer (a bag takes its width and vocabulary from it).
        cuda: the device is a GPU; otherwise what would be on it is in host memory.
        half: transformers compute in bfloat16.
        process: bytes of a process with the libraries loaded.
        context: bytes that the driver and its libraries hold on the device before the first tensor.

    Raises:
        ConfigError: more layers to train than the encoder has.
    """
    s = Setting(params, sizes, shape, batch_sizes(params, sizes), cuda, half)
    state = [*_encoder_state(s), *_head_state(s), *classifier_state(s)]
    amounts = [*state, *step_amounts(s), *_host_amounts(s, process), *_refresh_amounts(s), *_index_amounts(s)]
    amounts += _disk_amounts(s, state)
    if context:
        amounts.append(Amount("driver and libraries", "device", context, "context of the device"))
    if not cuda:
        amounts = [replace(amount, place="host") if amount.place == "device" else amount for amount in amounts]
    ranks = params.run.devices
    if ranks > 1:
        amounts = [
            replace(a, num_bytes=ranks * a.num_bytes, formula=f"{a.formula}, {ranks} ranks") if a.place == "host" else a
            for a in amounts
        ]
    batch = s.batch
    facts = {
        "queries": sizes.num_queries, "labels": sizes.num_labels, "steps_per_epoch": batch.steps,
        "batch_queries": batch.queries, "pool_labels": batch.labels, "classifier_labels": batch.classifier_labels,
        "texts_per_step": batch.texts.count, "tokens_per_step": batch.texts.tokens,
        "encoder_parameters": shape.parameters if s.has_transformer else 0, "precision": "bf16" if half else "fp32",
    }  # fmt: skip
    return Estimate(tuple(a for a in amounts if a.num_bytes), "cuda" if cuda else "cpu", facts)


# -- kept from step to step: exact -------------------------------------------------------------------------------------


def _encoder_state(s: Setting) -> list[Amount]:
    encoder, shape, amounts = s.params.encoder, s.shape, []
    if s.has_transformer:
        trained = shape.trained_parameters(encoder.trainable_layers)
        about = "" if shape.known else " (unknown architecture, counted like BERT)"
        amounts += [
            Amount("encoder weights", "device", FP32 * shape.parameters, f"{shape.parameters:,} x 4{about}"),
            Amount("encoder moments", "device", 2 * FP32 * trained, f"{trained:,} trained x 8 (AdamW)"),
            Amount("encoder gradients", "device", FP32 * trained, f"{trained:,} trained x 4", "step"),
        ]
        if s.half:
            amounts.append(Amount("bfloat16 weights and gradients", "device", 2 * BF16 * trained, f"{trained:,} x 4",
                                  "step"))  # fmt: skip
    if s.bags:
        rows = max(s.sizes.vocab_size, shape.vocab_size) + encoder.bag_words
        values, about = rows * (shape.hidden + 1), f"{rows:,} x ({shape.hidden:,} + 1)"
        amounts.append(Amount("token table", "device", FP32 * values, f"{about} x 4"))
        if s.trains_bag:
            amounts.append(Amount("token table state", "device", 2 * FP32 * values, f"{about} x 8 (Adam)"))
    return amounts


def _head_state(s: Setting) -> list[Amount]:
    dim, frozen = s.params.model.dim, s.params.encoder.frozen
    values = s.num_heads * (s.width * dim + dim)
    trained = values + (2 if s.params.model.learn_temperature else 0)
    if s.params.encoder.residual:
        residual = 2 * (s.width**2 + s.width)
        values, trained = values + residual, trained + (0 if frozen else residual)
    values += 2  # temperatures
    return [
        Amount("head weights", "device", FP32 * values, f"{values:,} x 4"),
        Amount("head moments", "device", 2 * FP32 * trained, f"{trained:,} x 8 (AdamW)"),
        Amount("head gradients", "device", FP32 * trained, f"{trained:,} x 4", "step"),
    ]


def classifier_state(s: Setting) -> list[Amount]:
    """The classifier's table and its optimiser's state, where `run.table_place` puts them."""
    model, optim, ranks = s.params.model, s.params.optim, s.params.run.devices
    if model.heads == "de":
        return []
    rows, place = -(-s.sizes.num_labels // ranks), s.params.run.table_place
    bias = FP32 if model.clf_bias else 0
    bias_state = {"adam": 2, "adagrad": 1, "sgd": 0}[optim.clf_state] * bias
    more = (" + bias" if bias else "") + (f" (a rank of {ranks})" if ranks > 1 else "")
    return [
        Amount("classifier table", place, rows * (s.row_bytes + bias),
               _product(rows, model.dim, s.row_bytes // model.dim) + more),
        Amount("classifier state", place, rows * (s.row_state_bytes + bias_state),
               f"{_product(rows, s.row_state_bytes)}{more} ({optim.clf_state})"),
    ]  # fmt: skip


# -- a training step ---------------------------------------------------------------------------------------------------


def step_amounts(s: Setting) -> list[Amount]:
    """What a step allocates and frees. Parts are added up although some never coincide, but for activations that are
    computed again (`run.recompute`, `optim.encode_chunk`): then the logits are gone."""
    activations, logits = _activations(s), _logits(s)
    if s.batch.held.count < s.batch.texts.count:
        activations, logits = max((activations, []), ([], logits), key=lambda both: _bytes(both[0]) + _bytes(both[1]))
    return [*activations, *logits, _text_vectors(s), *_bag_rows(s), *_classifier_rows(s)]


def _bytes(amounts: list[Amount]) -> int:
    return sum(amount.num_bytes for amount in amounts)


def _activations(s: Setting) -> list[Amount]:
    """A layer keeps 8 h and 2 i values a token, and masks of dropout; unfused attention also its scores."""
    if not s.trained_layers:
        return []
    held, h, i, heads = s.batch.held, s.shape.hidden, s.shape.intermediate, s.shape.attention_heads
    value = BF16 if s.half else FP32
    masks = h * (1 if s.cuda else value) * (1 if s.shape.family == "distilbert" else 2)
    token = (2 * FP32 * h + 8 * BF16 * h if s.half else 8 * FP32 * h) + masks + 2 * i * value
    pair = 0 if s.cuda else heads * (2 * FP32 + value)
    everything = s.params.encoder.trainable_layers < 0
    kept = s.trained_layers * (held.padded * token + held.squares * pair) + everything * held.padded * h * 2 * FP32
    backward = everything * FP32 * s.shape.vocab_size * h + 3 * value * min(held.padded, 1 << 13) * (i + h)
    return [
        Amount("activations", "device", kept, f"{s.trained_layers} layers x {held.padded:,} tokens x {token:,}"
               + (f" + {held.squares:,} token pairs x {pair:,}" if pair else ""), "step"),
        Amount("encoder input and gradients", "device",
               s.batch.texts.padded * (INT64 if everything else h * FP32) + backward,
               f"{s.batch.texts.padded:,} tokens, gradients of a layer and of the token rows", "step"),
    ]  # fmt: skip


def _text_vectors(s: Setting) -> Amount:
    """Text vectors [n, W] with their gradients and copies (dropout, residual), and the heads' outputs [n, D]."""
    n, held, encoder = s.batch.texts.count, s.batch.held.count, s.params.encoder
    wide = 4 + (encoder.dropout > 0) + (5 if encoder.residual and not encoder.frozen else 0)
    vectors = held * (wide + 1) * s.width + (2 * n * s.width if held < n else 0)
    heads = 5 * (n + s.batch.queries + s.params.model.clf_residual * s.batch.classifier_labels) * s.params.model.dim
    return Amount("text vectors", "device", FP32 * (vectors + heads),
                  f"{n:,} texts, {s.width:,} and {s.params.model.dim:,} wide", "step")  # fmt: skip


def _bag_rows(s: Setting) -> list[Amount]:
    """Rows of the token table that a step uses, their gradients and moments; a token's place, text and weight."""
    if not s.trains_bag:
        return []
    tokens, words = s.batch.texts.tokens, s.params.encoder.bag_words
    rows = min(tokens, s.sizes.vocab_size) + min(words, tokens // 2)
    return [Amount("token rows of a step", "device", 4 * FP32 * rows * (s.shape.hidden + 1) + tokens * 32,
                   f"{rows:,} x ({s.shape.hidden:,} + 1) x 16 + {tokens:,} x 32", "step")]  # fmt: skip


def _classifier_rows(s: Setting) -> list[Amount]:
    """Rows that a step uses in float32, their gradients and state; rows in flight where the table is not there."""
    if s.params.model.heads == "de":
        return []
    rows, dim, fetched = s.batch.classifier_labels, s.params.model.dim, s.cuda and s.params.run.table_place != "device"
    gathered = s.params.pool.clf_labels != "all" or fetched
    half = s.params.model.clf_dtype == "bf16"
    row = FP32 * dim * (1 + (gathered or half)) + gathered * s.row_state_bytes + half * 14 * dim  # 14: rounding
    amounts = [Amount("classifier rows of a step", "device", rows * row, _product(rows, row), "step")]
    if fetched:
        each = s.row_bytes + s.row_state_bytes
        amounts += [
            Amount("classifier rows in flight", place, _ROW_SETS * rows * each, _product(_ROW_SETS, rows, each))
            for place in ("device", "host")
        ]
    return amounts


def _logits(s: Setting) -> list[Amount]:
    heads, batch = s.params.model.heads, s.batch
    pairs = int(batch.queries * s.sizes.num_pairs / s.sizes.num_queries) + 1
    columns = {"dual encoder": batch.labels if heads != "clf" else 0,
               "classifier": batch.classifier_labels if heads != "de" else 0}  # fmt: skip
    if s.params.loss.clf == "bce" and s.params.pool.clf_labels == "all":
        columns["classifier"] = min(columns["classifier"], _FULL_BCE_CHUNK)
    amounts = [
        Amount(f"logits and losses, {head}", "device", _LOGIT_COPIES * FP32 * batch.queries * count,
               _product(_LOGIT_COPIES, batch.queries, count, FP32), "step")
        for head, count in columns.items()
    ]  # fmt: skip
    if "triplet" in (s.params.loss.de, s.params.loss.clf) and s.params.loss.triplet_negatives == "all":
        block = min(pairs * max(columns.values()), _TRIPLET_BLOCK)
        amounts.append(Amount("triplets", "device", 9 * block, _product(9, block), "step"))
    return [*amounts, Amount("positive pairs", "device", 80 * pairs, _product(pairs, 80), "step")]


# -- around the steps --------------------------------------------------------------------------------------------------


def _host_amounts(s: Setting, process: int) -> list[Amount]:
    """Host memory besides the model's. Memory-mapped files are not counted: the system drops their pages if needed."""
    sizes, params, rows = s.sizes, s.params, training_rows(s.params, s.sizes)
    per_label = INT32 + (2 * INT32 + INT64 if "all" in head_labels(params) else 0) + 8 * weighs_by_propensity(params)
    amounts = [
        Amount("process", "host", process, "measured: Python and its libraries"),
        Amount("sampler", "host", per_label * sizes.num_labels + INT64 * rows + sizes.num_queries,
               f"{_product(sizes.num_labels, per_label)} + {rows:,} x 8"),
    ]  # fmt: skip
    if params.pool.gandalf:
        pairs = sizes.num_pairs + sizes.num_graph_pairs
        amounts.append(Amount("relevance with label texts", "host", 16 * (pairs + _shortlist_rows(s)),
                              f"({pairs:,} pairs + {_shortlist_rows(s):,} rows) x 16"))  # fmt: skip
    return amounts


def _shortlist_rows(s: Setting) -> int:
    """Rows of the mined shortlist: queries of every split, with Gandalf labels too."""
    return s.sizes.num_queries + (s.sizes.num_labels if s.params.pool.gandalf else 0)


def _encoding_bytes(s: Setting) -> int:
    """Of 256 texts that go through the encoder without gradients."""
    longest = min(max(len(s.sizes.query_lengths), len(s.sizes.label_lengths)) - 1, s.params.tokens.max_length)
    tokens, value = 256 * longest, BF16 if s.half else FP32
    attention = 0 if s.cuda else 3 * longest * s.shape.attention_heads
    through = tokens * (4 * s.shape.hidden + 2 * s.shape.intermediate + attention)
    return value * through * s.has_transformer + FP32 * 1024 * 3 * s.width


def _vectors(s: Setting, rows: int) -> int:
    """One head's vectors of texts, and a block of encoder outputs while they are computed."""
    return FP32 * (rows * s.params.model.dim + min(rows, _BLOCK) * (s.width + s.params.model.dim))


def _tile(s: Setting) -> int:
    """A tile of scores of the exact search, and the check for finite values before it."""
    return FP32 * _QUERY_BLOCK * min(s.sizes.num_labels, _BLOCK) + _BLOCK * s.params.model.dim


def _refresh_amounts(s: Setting) -> list[Amount]:
    clusters, mines = s.params.pool.batches == "clustered", s.batch.negatives > 0
    if not (clusters or mines):
        return []
    n, dim, labels = training_rows(s.params, s.sizes), s.params.model.dim, s.sizes.num_labels
    queries, searched = FP32 * n * dim, _vectors(s, labels) if mines else 0
    amounts = [
        Amount("query and label vectors", "host", _vectors(s, n) + searched,
               f"({n:,} + {labels if mines else 0:,}) x {dim:,} x 4", "refresh"),
        Amount("texts being encoded", "device", _encoding_bytes(s), "256 texts at a time", "refresh"),
    ]  # fmt: skip
    # clustering copies the points of the largest cluster, a GPU holds all of them
    points = max(-(-n // 2), 3 * min(n, _CLUSTER_POINTS[s.cuda])) + (n if s.cuda else 0)
    clustering = clusters * (FP32 * points * dim + 48 * n)
    mining = mines * (_tile(s) + (queries + FP32 * labels * dim if s.cuda else 0))
    amounts.append(Amount("clustering, then mining", "device", max(clustering, mining),
                          f"the larger of {gib(clustering)} and {gib(mining)}", "refresh"))  # fmt: skip
    if mines:
        listed = _shortlist_rows(s)
        amounts.append(Amount("hard negatives", "host", INT32 * listed * s.batch.negatives,
                              _product(listed, s.batch.negatives, INT32), "refresh"))  # fmt: skip
    return amounts


def _index_amounts(s: Setting) -> list[Amount]:
    """Label vectors of both heads, the space that is searched, the index and the label names of the bundle."""
    labels, dim, width = s.sizes.num_labels, s.params.model.dim, _space_width(s)
    copies = s.num_heads + (s.params.model.heads != "de" and s.params.index.clf_normalize)  # unit vectors are a copy
    vectors = FP32 * labels * (copies * dim + width) + _vectors(s, min(labels, _BLOCK)) + _tile(s)
    index = index_bytes(s)
    return [
        Amount("label vectors to rank", "host", vectors, f"{labels:,} x ({copies} x {dim:,} + {width:,}) x 4", "index"),
        Amount("search index", "host", index, f"{s.params.index.kind}: {labels:,} x {index / labels:.0f}", "index"),
        Amount("label names", "host", 2 * labels * _STRING + s.sizes.text_bytes, _product(labels, 2, _STRING), "index"),
    ]  # fmt: skip


def _space_width(s: Setting) -> int:
    """Width of the searched vectors."""
    index, model = s.params.index, s.params.model
    bias = model.clf_bias and not index.clf_normalize and index.space != "de"
    return (2 if index.space == "both" else 1) * model.dim + bool(bias)


def index_bytes(s: Setting) -> int:
    """Of the search index: codes of the labels, with a graph's links or ids and centroids of lists."""
    index, labels, space = s.params.index, s.sizes.num_labels, _space_width(s)
    code = FP32 * space
    if index.kind.endswith("sq8"):
        code = space
    elif index.kind.endswith("pq"):
        code = -(-space // (2 * index.pq_dims))
    if index.kind.startswith("hnsw"):
        return labels * (code + 2 * index.hnsw_links * INT32 + 2 * INT64)
    if index.kind.startswith("ivf"):
        lists = index.ivf_lists or min(round(16 * labels**0.5), max(1, labels // 64))
        return labels * (code + INT64) + FP32 * space * lists
    return labels * code


def _disk_amounts(s: Setting, state: list[Amount]) -> list[Amount]:
    """Files that a training and its index leave."""
    one = replace(s, params=s.params.model_copy(update={"run": s.params.run.model_copy(update={"devices": 1})}))
    whole = {a.name: a.num_bytes for a in (*state, *classifier_state(one)) if a.name in STATE}  # of all ranks
    checkpoint = sum(whole.values())
    refresh = INT64 * training_rows(s.params, s.sizes) + INT32 * _shortlist_rows(s) * s.batch.negatives
    weights = sum(size for name, size in whole.items() if not name.endswith(("state", "moments")))
    bundle = 2 * weights + FP32 * s.sizes.num_labels * s.params.model.dim * s.num_heads + index_bytes(s)
    return [
        Amount("checkpoints", "disk", 3 * (checkpoint + refresh), f"({checkpoint:,} + {refresh:,}) x 3: two kept"),
        Amount("model and bundle", "disk", bundle + s.sizes.text_bytes, "weights twice, label vectors, index, texts"),
        Amount("cached encoder outputs", "disk", _cache_bytes(s), "float16, data/cache"),
    ]  # fmt: skip


def _cache_bytes(s: Setting) -> int:
    """Of the cached outputs of a frozen encoder, or of a transformer's frozen layers."""
    texts = s.sizes.num_queries + s.sizes.num_labels
    if s.params.encoder.frozen:
        return FP16 * texts * s.width
    if not s.has_transformer or s.params.encoder.trainable_layers < 0 or s.trained_layers == s.shape.layers:
        return 0
    lengths = (*enumerate(s.sizes.query_lengths), *enumerate(s.sizes.label_lengths))
    tokens = sum(length * count for length, count in lengths)
    return FP16 * (tokens if s.trained_layers else texts) * s.shape.hidden
