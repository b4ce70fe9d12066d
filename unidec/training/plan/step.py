"""What a training step holds: weights, their optimisers' state, activations, logits.

Legend: B queries, S labels of a pool, L labels, V vocabulary, D width of a head, W width of the encoder, h width of the
transformer, i width of its feed-forward layers, T tokens of a text.

Every term is read off the code that allocates it; the tests compare with what tensors take on a processor.
"""

from __future__ import annotations

from dataclasses import dataclass

from unidec.config import Params
from unidec.training.plan.items import STEP, Item, gib, times
from unidec.training.plan.sizes import Batch, EncoderShape, Sizes

FP32, BF16, INT64 = 4, 2, 8
STATE_BYTES = {"adam": "two float32 moments a value", "adagrad": "one float32 a row", "sgd": "nothing"}
_SETS_OF_ROWS = 4  # fetched ahead, in use, and unidec.model.row_store.WRITES_AHEAD being written
_TRIPLET_BLOCK = 1 << 22  # unidec.model.hinge._TripletAll.BLOCK
_FULL_BCE_CHUNK = 8192  # labels at once, unidec.model.full_bce.CHUNK


@dataclass(frozen=True)
class Setting:
    """All that the terms read.

    Attributes:
        cuda: the device is a GPU: fused attention, dropout masks of one byte, a copy of what is on the host.
        half: transformers compute in bfloat16.
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
    def has_bag(self) -> bool:
        return self.params.encoder.kind != "transformer"

    @property
    def frozen(self) -> bool:
        """The encoder's outputs are its input."""
        return self.params.encoder.frozen

    @property
    def width(self) -> int:
        """W."""
        return self.shape.hidden * (self.bags + self.has_transformer)

    @property
    def bags(self) -> int:
        """Bags side by side: of the whole text, of its start."""
        return (1 + (self.params.encoder.bag_head > 0)) if self.has_bag else 0

    @property
    def trained_layers(self) -> int:
        return self.shape.trained_layers(self.params.encoder.trainable_layers) if self.has_transformer else 0

    @property
    def vocab(self) -> int:
        """V: rows of the token table, those of words behind them."""
        return max(self.sizes.vocab_size, self.shape.vocab_size) + self.params.encoder.bag_words

    @property
    def num_heads(self) -> int:
        return 2 if self.params.model.heads == "both" else 1

    @property
    def own_labels(self) -> int:
        """Classifier rows that one rank holds."""
        return -(-self.sizes.num_labels // self.params.run.devices)

    @property
    def row_bytes(self) -> int:
        """Of one row of the classifier's table."""
        return self.params.model.dim * (BF16 if self.params.model.clf_dtype == "bf16" else FP32)

    @property
    def row_state_bytes(self) -> int:
        """Of one row's optimiser state."""
        return {"adam": 2 * FP32 * self.params.model.dim, "adagrad": FP32, "sgd": 0}[self.params.optim.clf_state]


def state_items(s: Setting) -> list[Item]:
    """Weights and what optimisers keep of them, from the first step to the last."""
    return [*_encoder_state(s), *_head_state(s), *classifier_state(s)]


def _encoder_state(s: Setting) -> list[Item]:
    encoder, shape = s.params.encoder, s.shape
    items = []
    if s.has_transformer:
        trained = shape.trained_parameters(encoder.trainable_layers)
        about = "" if shape.known else " (architecture not known: counted like BERT)"
        items += [
            Item("encoder weights", "device", FP32 * shape.parameters, f"{shape.parameters:,} x 4{about}"),
            Item("encoder gradients", "device", FP32 * trained, f"{trained:,} that train x 4", ("backward", "update")),
            Item("encoder moments", "device", 2 * FP32 * trained, f"{trained:,} that train x 8 (AdamW)"),
        ]
        if s.half and trained:
            copies = s.trained_layers * shape.layer_matrices
            items.append(Item("half-precision weights", "device", 2 * BF16 * copies,
                              f"{copies:,} in matrices x 4 (gradients too)", ("forward", "backward")))  # fmt: skip
    if s.has_bag:
        values = s.vocab * (shape.hidden + 1)
        items += [
            Item("token table", "device", FP32 * values, f"{s.vocab:,} x ({shape.hidden:,} + 1) x 4"),
            Item(
                "token table state",
                "device",
                0 if s.frozen else 2 * FP32 * values,
                f"{s.vocab:,} x ({shape.hidden:,} + 1) x 8 (Adam)",
            ),
        ]
    return items


def _head_state(s: Setting) -> list[Item]:
    dim = s.params.model.dim
    values = s.num_heads * (s.width * dim + dim)
    trained = values + (2 if s.params.model.learn_temperature else 0)
    if s.params.encoder.residual:
        residual = 2 * (s.width**2 + s.width)
        values, trained = values + residual, trained + (0 if s.frozen else residual)
    values += 2  # temperatures
    return [
        Item("head weights", "device", FP32 * values, f"{values:,} x 4"),
        Item("head gradients", "device", FP32 * trained, f"{trained:,} x 4", ("backward", "update")),
        Item("head moments", "device", 2 * FP32 * trained, f"{trained:,} x 8 (AdamW)"),
    ]


def classifier_state(s: Setting) -> list[Item]:
    """The classifier's table and its optimiser's state, where `run.table_place` puts them."""
    model, optim = s.params.model, s.params.optim
    if model.heads == "de":
        return []
    place, rows = s.params.run.table_place, s.own_labels
    bias_state = {"adam": 2 * FP32, "adagrad": FP32, "sgd": 0}[optim.clf_state] if model.clf_bias else 0
    bias = FP32 if model.clf_bias else 0
    ranks = f" (a rank of {s.params.run.devices})" if s.params.run.devices > 1 else ""
    with_bias = " + bias" if bias else ""
    return [
        Item("classifier table", place, rows * (s.row_bytes + bias),
             f"{times(rows, model.dim, s.row_bytes // model.dim)}{with_bias}{ranks}"),
        *([Item("pages of the table's files", "host", rows * (s.row_bytes + bias + s.row_state_bytes + bias_state),
                "mapped into memory", spare=True)] if place == "disk" else []),
        Item("classifier state", place, rows * (s.row_state_bytes + bias_state),
             f"{rows:,} x {s.row_state_bytes:,}{with_bias} ({optim.clf_state}: {STATE_BYTES[optim.clf_state]})"),
    ]  # fmt: skip


def work_items(s: Setting) -> list[Item]:
    """What a step makes and forgets."""
    return [*_activations(s), *_vectors(s), *_bag_work(s), *_classifier_rows(s), *_loss_work(s)]


def layer_bytes(s: Setting) -> tuple[int, int]:
    """Bytes that one layer keeps for its backward pass: of a token, and of a pair of tokens of one text.

    float32, a token: the input, queries, keys, values, context, and the inputs of both norms and of the feed-forward
    part (8 h), its two inner values (2 i), one mask of dropout (two in BERT). bfloat16: the inputs of both norms stay
    float32; autocast casts the input once for each of queries, keys and values. A pair: softmax, its mask, their
    product; fused attention keeps none.
    """
    h, i = s.shape.hidden, s.shape.intermediate
    value = BF16 if s.half else FP32
    mask = 1 if s.cuda else value
    masks = mask * h * (1 if s.shape.family == "distilbert" else 2)
    kept = (2 * FP32 * h + 8 * BF16 * h) if s.half else 8 * FP32 * h
    if s.cuda:
        return kept + masks + 2 * i * value + FP32 * s.shape.attention_heads, 0
    return kept + masks + 2 * i * value, s.shape.attention_heads * (FP32 + FP32 + value)


def _activations(s: Setting) -> list[Item]:
    if not s.trained_layers:
        return []
    texts, h = s.batch.texts, s.shape.hidden
    token, pair = layer_bytes(s)
    passes: tuple[str, ...] = ("forward", "backward")
    held = texts.graph  # with cached gradients a chunk's activations, made in backward
    padded, squares, of = held.padded, held.squares, ""
    if texts.held is not None:
        of, passes = f" of {held.count:,} texts", ("backward",)
    if s.params.run.recompute:  # one chunk at a time, made again in backward
        padded, squares, of, passes = held.chunk_padded, held.chunk_squares, " of a chunk", ("backward",)
    kept = s.trained_layers * (padded * token + squares * pair)
    formula = f"{s.trained_layers} layers x {padded:,} tokens{of} x {token:,}"
    if pair:
        formula += f" + {squares:,} token pairs x {pair:,} each layer"
    everything = s.params.encoder.trainable_layers < 0
    ids = INT64 * texts.padded
    below = padded * h * (FP32 + (1 if s.cuda else FP32)) if everything else 0
    states = 0 if everything else texts.padded * h * FP32
    value = BF16 if s.half else FP32
    chunk = 3 * value * (texts.chunk_padded * s.shape.intermediate + texts.chunk_squares * s.shape.attention_heads)
    rows = FP32 * s.shape.vocab_size * h if everything else 0
    way = f"a chunk of {texts.chunk_padded:,} tokens"
    return [
        Item("activations", "device", kept + below, formula + (" + embeddings" if below else ""), passes),
        Item("encoder input", "device", ids + states,
             f"{texts.padded:,} x 8" if everything else times(texts.padded, h, FP32), ("forward", "backward")),
        Item("gradients on their way", "device", chunk + rows,
             way + (f", token rows {times(s.shape.vocab_size, h, 4)}" if rows else ""), ("backward",)),
    ]  # fmt: skip


def _vectors(s: Setting) -> list[Item]:
    """Text vectors [n, W] and what the heads make of them."""
    n, dim, model = s.batch.texts.count, s.params.model.dim, s.params.model
    held = s.batch.texts.graph.count
    wide = 2 + (s.params.encoder.dropout > 0) + (5 if s.params.encoder.residual and not s.frozen else 0)
    parts = 0 if s.frozen else 2 * s.has_transformer + 2 * s.bags
    values = held * (wide * s.width + parts * s.shape.hidden)
    formula = f"{held:,} texts x ({wide} x {s.width:,} + {parts} x {s.shape.hidden:,})"
    if held < n:  # all vectors and their gradients, while chunks are encoded
        values += 2 * n * s.width
        formula += f", {n:,} x 2 x {s.width:,}"
    masked = 1 if model.dropout > 0 else 0
    if model.heads != "clf":
        values += n * dim * (3 + masked)  # tanh, (mask,) dropped, unit length
    if model.heads != "de":
        values += s.batch.queries * dim * (1 + masked)
    if model.clf_residual and model.heads != "de":  # as the head gives them, of unit length, and added to the rows
        values += s.batch.classifier_labels * dim * (3 + masked)
    formula += f" and heads {dim:,} wide, x 4"
    return [Item("text vectors and heads", "device", FP32 * values, formula, ("forward", "backward"))]


def _bag_work(s: Setting) -> list[Item]:
    if not s.has_bag or s.frozen:
        return []
    texts, h = s.batch.texts, s.shape.hidden
    unique, tokens, held = s.batch.unique_tokens, texts.tokens, texts.graph.tokens
    # of a token: its place, its text, its weight before and after exp and dropout; of a row: itself and its gradient
    items = [
        Item("bag of tokens", "device", FP32 * unique * (h + 1) + tokens * 2 * INT64 + held * (2 + s.bags) * FP32,
             f"{unique:,} rows x ({h:,} + 1) x 4 + {tokens:,} tokens x 16 + {held:,} x {(2 + s.bags) * FP32}", STEP),
        Item("bag gradients", "device", FP32 * unique * (h + 1), f"{unique:,} rows x ({h:,} + 1) x 4",
             ("backward", "update")),
        Item("bag rows' moments", "device", 2 * FP32 * unique * (h + 1), f"{unique:,} rows gathered x ({h:,} + 1) x 8",
             ("update",)),
    ]  # fmt: skip
    if texts.held is not None:
        rows = s.batch.held_tokens
        items.append(Item("bag rows of a chunk", "device", 2 * FP32 * rows * (h + 1),
                          f"{rows:,} rows and their gradients x ({h:,} + 1) x 4", ("backward",)))  # fmt: skip
    return items


def _classifier_rows(s: Setting) -> list[Item]:
    if s.params.model.heads == "de":
        return []
    rows, dim = s.batch.classifier_labels, s.params.model.dim
    everything = s.params.pool.clf_labels == "all"
    half = s.params.model.clf_dtype == "bf16"
    fetched = s.cuda and s.params.run.table_place != "device"
    items = [Item("classifier gradients", "device", FP32 * rows * dim, times(rows, dim, 4), STEP)]
    if not everything or half or fetched:
        items.append(Item("classifier rows of a step", "device", FP32 * rows * dim, times(rows, dim, 4), STEP))
    if not everything or fetched:
        items.append(Item("classifier rows' state", "device", rows * s.row_state_bytes,
                          f"{rows:,} rows gathered x {s.row_state_bytes:,}", ("update",)))  # fmt: skip
    if half:  # noise of 16 bits from 64-bit words, the sum, the result
        items.append(Item("stochastic rounding", "device", rows * dim * (3 * BF16 + 2 * INT64 // 4 + FP32),
                          f"{times(rows, dim, 14)}", ("update",)))  # fmt: skip
    if fetched:  # the next batch's rows, those of steps that are not written yet, and their copies on the host
        row = s.row_bytes + s.row_state_bytes
        items += [
            Item("classifier rows on their way", place, _SETS_OF_ROWS * rows * row, times(_SETS_OF_ROWS, rows, row))
            for place in ("device", "host")
        ]
    return items


@dataclass(frozen=True)
class LossCopies:
    """Matrices of the size of a head's logits: kept until backward, and at most at once in either pass."""

    kept: float
    forward: float
    backward: float


def loss_copies(kind: str, forward: float, aux_bce: bool, learn_temperature: bool, pairs: int, queries: int,
                labels: int) -> LossCopies:  # fmt: skip
    """Copies of one head's logits under a loss of `unidec.model.losses`.

    Softmax losses keep an exponential a direction, made beside the logits, the scaled logits and a masked copy; BCE
    and soft top-k keep their masked copy and make another; the squared hinge keeps what is above its margin; triplet
    works in blocks of pairs, but for the hardest negatives masks a copy. A trained temperature keeps the logits.

    Args:
        kind: the loss's name, or "hardest": triplet with the hardest negatives.
    """
    directions, more = int(forward > 0) + int(forward < 1), 0.0  # more: of the backward pass
    if kind in ("bce", "softtopk"):
        kept, peak, more = 1.0, 4.0, float(kind == "softtopk")
    elif kind == "hinge":
        kept, peak = 1.0, 3.0
    elif kind == "hardest":
        kept, peak, more = 0.0, 2.0, 2.0
    elif kind == "triplet":
        size = max(queries * labels, 1)
        block = max(min(pairs * width, max(_TRIPLET_BLOCK, width)) for width in
                    ([labels] if forward > 0 else []) + ([queries] if forward < 1 else [])) / size  # fmt: skip
        kept, peak = float(directions), 2.0 + directions + 2.25 * block
    else:
        kept, peak = float(directions), 2.0 + directions
    if aux_bce:
        peak, kept = max(peak, kept + 4.0), kept + 1.0
    scaled = learn_temperature and (kind not in ("triplet", "hardest", "hinge") or aux_bce)
    return LossCopies(kept + scaled, peak, kept + 1.0 + more + 2.0 * scaled)


def _loss_work(s: Setting) -> list[Item]:
    loss, model, batch = s.params.loss, s.params.model, s.batch
    pairs = int(batch.queries * s.sizes.num_pairs / s.sizes.num_queries) + 1
    learn = model.learn_temperature
    de_kind, clf_kind = (
        "hardest" if kind == "triplet" and loss.triplet_negatives == "hardest" else kind for kind in (loss.de, loss.clf)
    )
    de = clf = LossCopies(0, 0, 0)
    if model.heads != "clf":
        de = loss_copies(de_kind, loss.de_forward, False, learn, pairs, batch.queries, batch.labels)
    if model.heads != "de" and loss.clf == "bce" and s.params.pool.clf_labels == "all":
        part = min(batch.classifier_labels, _FULL_BCE_CHUNK) / batch.classifier_labels
        clf = LossCopies(0.0, (4.0 + (model.dim / batch.queries)) * part, 0.0)
    elif model.heads != "de":
        clf = loss_copies(clf_kind, loss.clf_forward, loss.clf_bce > 0, learn, pairs, batch.queries,
                          batch.classifier_labels)  # fmt: skip
    de_size, clf_size = FP32 * batch.queries * batch.labels, FP32 * batch.queries * batch.classifier_labels
    first = de.forward * de_size
    # the first head's logits live until the second's are made
    second = de.kept * de_size + max(clf.forward * clf_size, de_size + clf_size if clf.kept else 0)
    back = max(de.backward * de_size + clf.kept * clf_size, de.kept * de_size + clf.backward * clf_size)
    peak = int(max(first, second, back))
    all_pairs = pairs * (1 + (0 < batch.classifier_labels != batch.labels))  # pool and all labels have their own
    # a pair: its two places, those of the mask, a flag and a relevance; for each head and direction of the loss its
    # weight, its logit less the sum, and its loss
    held, used = 4 * INT64 + 5, s.num_heads * 2 * 3 * FP32
    text = [f"{copies.forward:.3g} copies of {times(batch.queries, labels, 4)}"
            for copies, labels in ((de, batch.labels), (clf, batch.classifier_labels)) if copies.forward]  # fmt: skip
    formula = f"at most {gib(peak)}: " + "; ".join(text) + (f", {de.kept:g} kept of the first" if len(text) > 1 else "")
    return [
        Item("logits and losses", "device", peak, formula, ("forward",)),
        Item("positive pairs", "device", all_pairs * held + pairs * used,
             f"{all_pairs:,} pairs x {held} + {pairs:,} x {used}", ("forward",)),
    ]  # fmt: skip
