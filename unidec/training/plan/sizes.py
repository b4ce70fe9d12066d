"""What a plan is made from: the sizes of the data, the shape of the encoder, and the sizes of a batch.

Legend: N queries of all splits, L labels, B queries in a batch, S labels in its pool, H mined negatives a query, D
width of a head, W width of the encoder, T tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.tokens import CHUNK_TEXTS, Tokens
from unidec.errors import ArtifactError, ConfigError
from unidec.training.needs import draws_pools, encoded_labels, head_labels

# config.json of the models that the papers and the recipes name, where no folder is at hand (their model cards)
NAMED: dict[str, dict[str, Any]] = {
    "distilbert-base-uncased": {"model_type": "distilbert", "dim": 768, "n_layers": 6, "n_heads": 12,
                                "hidden_dim": 3072, "vocab_size": 30522, "max_position_embeddings": 512},
    "bert-base-uncased": {"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                          "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512,
                          "type_vocab_size": 2},
    "all-MiniLM-L6-v2": {"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
                         "intermediate_size": 1536, "vocab_size": 30522, "max_position_embeddings": 512,
                         "type_vocab_size": 2},
}  # fmt: skip
_FAMILIES = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet")
_SAMPLED_IDS, _RUNS, _POWERS = 1 << 21, 256, 28
_MPNET_BUCKETS = 32  # relative positions of MPNet, a bias for each and every head


@dataclass(frozen=True)
class EncoderShape:
    """A transformer's architecture, as its config.json states it.

    Attributes:
        known: its family is one whose parameters are counted exactly; others are counted like BERT.
    """

    family: str
    hidden: int
    layers: int
    attention_heads: int
    intermediate: int
    vocab_size: int
    positions: int
    token_types: int
    known: bool = True

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> EncoderShape:
        """From the content of config.json.

        Raises:
            ConfigError: a size that is not there.
        """

        def size(*names: str) -> int:
            found = next((config[name] for name in names if name in config), None)
            if not isinstance(found, int):
                raise ConfigError(
                    "not a transformer's config.json", where="encoder config", expected=" or ".join(names)
                )
            return found

        family = str(config.get("model_type"))
        return cls(
            family, size("hidden_size", "dim"), size("num_hidden_layers", "n_layers"),
            size("num_attention_heads", "n_heads"), size("intermediate_size", "hidden_dim"), size("vocab_size"),
            size("max_position_embeddings"), int(config.get("type_vocab_size", 0)), family in _FAMILIES,
        )  # fmt: skip

    @classmethod
    def of(cls, name: str, config_file: Path | None = None) -> EncoderShape:
        """By a config.json, a local folder, a name of `NAMED`, or what `resolve_encoder` finds.

        Raises:
            ArtifactError: none of these. ConfigError: a file that is no such config.
        """
        folder = Path(name) / "config.json"
        file = config_file or (folder if folder.is_file() else None)
        known = NAMED.get(name.rpartition("/")[2])
        if file is None and known is None:
            from unidec.model.sources import resolve_encoder

            file = resolve_encoder(name) / "config.json"
        if file is None:
            assert known is not None
            return cls.of_config(known)
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ArtifactError("not a readable config.json", where=str(file), got=str(error)[:200]) from error
        return cls.of_config(config)

    @property
    def layer_parameters(self) -> int:
        """Of one layer: four square projections, the feed-forward pair, two norms."""
        h, i = self.hidden, self.intermediate
        return 4 * (h * h + h) + (h * i + i) + (i * h + h) + 4 * h

    @property
    def layer_matrices(self) -> int:
        """Entries of one layer's matrices: what autocast keeps a half-precision copy of."""
        return 4 * self.hidden**2 + 2 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All of them, without a pooling head (`load_transformer` leaves it out)."""
        rows = self.vocab_size + self.positions + (0 if self.family in ("distilbert", "mpnet") else self.token_types)
        extra = _MPNET_BUCKETS * self.attention_heads if self.family == "mpnet" else 0
        return (rows + 2) * self.hidden + self.layers * self.layer_parameters + extra

    def trained_layers(self, trainable_layers: int) -> int:
        """Layers that train under `encoder.trainable_layers`.

        Raises:
            ConfigError: more than there are.
        """
        if trainable_layers > self.layers:
            raise ConfigError("more layers to train than there are", where="encoder.trainable_layers",
                              got=trainable_layers, expected=f"-1 to {self.layers}")  # fmt: skip
        return self.layers if trainable_layers < 0 else trainable_layers

    def trained_parameters(self, trainable_layers: int) -> int:
        """Parameters that train."""
        layers = self.trained_layers(trainable_layers)
        return self.parameters if trainable_layers < 0 else layers * self.layer_parameters


@dataclass(frozen=True)
class Sizes:
    """How large the data is.

    Attributes:
        num_queries: N of all splits; num_train, num_validation: of those splits; num_labels: L.
        num_pairs, num_filter_pairs: stored entries of the two matrices.
        query_lengths, label_lengths: number of texts with 0, 1, 2, ... tokens.
        vocab_size: of the tokenizer.
        text_bytes: of the stored texts of the labels (uids and titles go into the bundle); 0: not known.
        num_graph_pairs: entries of the label graph (Gandalf's soft targets); 0: not known.
        distinct: different tokens to expect among 1, 2, 4, 8, ... tokens of these texts; empty: not known.
    """

    num_queries: int
    num_train: int
    num_validation: int
    num_labels: int
    num_pairs: int
    num_filter_pairs: int
    query_lengths: tuple[int, ...]
    label_lengths: tuple[int, ...]
    vocab_size: int
    text_bytes: int = 0
    num_graph_pairs: int = 0
    distinct: tuple[int, ...] = ()

    @classmethod
    def of(cls, dataset: XMCDataset, query_tokens: Tokens, label_tokens: Tokens, num_graph_pairs: int = 0) -> Sizes:
        """Of a data set, its token caches and, for Gandalf, the entries of its label graph."""
        return cls(
            dataset.num_queries, len(dataset.rows("train")), len(dataset.rows("validation")), dataset.num_labels,
            int(dataset.relevance.nnz), int(dataset.filter_pairs.nnz), _histogram(query_tokens),
            _histogram(label_tokens), query_tokens.vocab_size, int(dataset.labels.nbytes), num_graph_pairs,
            _distinct(query_tokens, label_tokens),
        )  # fmt: skip

    @classmethod
    def given(
        cls, labels: int, queries: int, tokens: int, *, pairs: int | None = None, vocab_size: int = 30522,
        validation: int = 0,
    ) -> Sizes:  # fmt: skip
        """By hand: every text has `tokens` tokens; without `pairs` each query has 5 labels (the sets of the papers
        have 2 to 22)."""
        if min(labels, queries, tokens) < 1:
            raise ConfigError("sizes must be at least 1", where="--labels, --queries, --tokens",
                              got=f"{labels}, {queries}, {tokens}")  # fmt: skip
        lengths = [0] * (tokens + 1)
        return cls(
            queries + validation, queries, validation, labels, 5 * queries if pairs is None else pairs, 0,
            (*lengths[:-1], queries + validation), (*lengths[:-1], labels), vocab_size,
        )  # fmt: skip

    @property
    def query_tokens(self) -> int:
        """Tokens of all queries."""
        return sum(length * count for length, count in enumerate(self.query_lengths))

    @property
    def label_tokens(self) -> int:
        """Tokens of all labels."""
        return sum(length * count for length, count in enumerate(self.label_lengths))


def _histogram(tokens: Tokens) -> tuple[int, ...]:
    return tuple(int(count) for count in np.bincount(tokens.lengths(), minlength=1))


def _distinct(*caches: Tokens) -> tuple[int, ...]:
    """Expected number of different tokens among 2^k drawn ones: sum over tokens of 1 - (1 - share)^(2^k)."""
    sample = np.concatenate([_sample(tokens.ids) for tokens in caches])
    share_V = np.bincount(sample) / max(len(sample), 1)
    keep = np.log1p(-share_V[(share_V > 0) & (share_V < 1)])
    return tuple(math.ceil(float(-np.expm1(keep * 2.0**k).sum())) + 1 for k in range(_POWERS))


def _sample(ids: np.ndarray) -> np.ndarray:
    """All ids, or of many some runs from everywhere: a run is read at once, where single ids would read every page."""
    if len(ids) <= _SAMPLED_IDS:
        return ids
    run = _SAMPLED_IDS // _RUNS
    starts = np.linspace(0, len(ids) - run, _RUNS, dtype=np.int64)
    return np.concatenate([ids[start : start + run] for start in starts])


def distinct_tokens(sizes: Sizes, num_tokens: int) -> int:
    """At most so many different tokens to expect in a batch of `num_tokens`."""
    bound = min(num_tokens, sizes.vocab_size)
    power = max(0, math.ceil(math.log2(max(num_tokens, 1))))
    return min(bound, sizes.distinct[power]) if power < len(sizes.distinct) else bound


def typical_lengths(histogram: tuple[int, ...], num_texts: int, max_length: int) -> np.ndarray:
    """Lengths of a batch of texts drawn from these, ascending: evenly spaced quantiles, the longest text among them.

    Returns:
        int64 [num_texts], cut to `max_length`.
    """
    cumulative = np.cumsum(histogram)
    if not num_texts or not cumulative[-1]:
        return np.zeros(num_texts, dtype=np.int64)
    rank = np.ceil(np.arange(1, num_texts + 1) * (cumulative[-1] / num_texts))
    return np.minimum(np.searchsorted(cumulative, rank), max_length).astype(np.int64)


@dataclass(frozen=True)
class Texts:
    """Texts that one step encodes, as the encoder pads them: chunks of similar length.

    Attributes:
        count: texts. tokens: without padding. padded: with it. squares: token pairs of one text, with padding.
        longest: tokens of the longest. chunk_padded, chunk_squares: of a chunk of the longest texts.
        held: what is encoded with a graph at once where gradients are cached; None: all of this.
    """

    count: int
    tokens: int
    padded: int
    squares: int
    longest: int
    chunk_padded: int
    chunk_squares: int
    held: Texts | None = None

    @property
    def graph(self) -> Texts:
        """Those whose activations are held at once."""
        return self.held or self


def padded_texts(parts: list[np.ndarray], encode_chunk: int = 0) -> Texts:
    """What `InputBuilder` makes of parts (queries, labels) with these ascending lengths.

    Args:
        encode_chunk: as in section `optim`.
    """
    held = None
    if encode_chunk:
        parts = [part[start : start + encode_chunk] for part in parts for start in range(0, len(part), encode_chunk)]
        largest = max(parts, key=lambda part: len(part) * int(part[-1]), default=None)
        held = None if largest is None else padded_texts([largest])
    chunks = [part[start : start + CHUNK_TEXTS] for part in parts for start in range(0, len(part), CHUNK_TEXTS)]
    padded = [len(chunk) * int(chunk[-1]) for chunk in chunks]
    squares = [len(chunk) * int(chunk[-1]) ** 2 for chunk in chunks]
    longest = max((int(part[-1]) for part in parts if len(part)), default=0)
    chunk = min(max(map(len, parts), default=0), CHUNK_TEXTS)  # in some batch it is of the longest texts
    return Texts(
        sum(map(len, parts)), sum(int(part.sum()) for part in parts), sum(padded), sum(squares), longest,
        chunk * longest, chunk * longest**2, held,
    )  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Sizes of one training step.

    Attributes:
        queries: B; labels: in the dual encoder's logits (S or L; a classifier alone: S); classifier_labels: in the
            classifier's (S or L; 0: no classifier).
        steps: steps an epoch; negatives: H, places of a mined shortlist (0: nothing is mined).
        texts: queries and labels that one rank encodes.
        unique_tokens: at most so many different tokens among them; held_tokens: among those encoded at once.
    """

    queries: int
    labels: int
    classifier_labels: int
    steps: int
    negatives: int
    texts: Texts
    unique_tokens: int
    held_tokens: int


def batch_sizes(params: Params, sizes: Sizes) -> Batch:
    """The largest step these parameters make on this data (`Trainer`, `PoolSampler`)."""
    pool = params.pool
    num_train = training_rows(params, sizes)
    batches = math.ceil(num_train / pool.batch_size)
    if pool.batches == "clustered":
        batches = 2 ** math.ceil(math.log2(batches))
    num_queries = math.ceil(num_train / batches)
    # mean of min(count, beta) <= min(mean count, beta): a batch's queries sample no more positives than this
    positives = min(pool.beta, sizes.num_pairs / sizes.num_queries)
    mines = pool.eta > 0 and draws_pools(params)
    sampled = math.ceil(num_queries * (positives + (pool.eta if mines else 0)))
    drawn = max(1, min(sampled, sizes.num_labels, pool.size or sampled))
    count = {"none": 0, "pool": drawn, "all": sizes.num_labels}
    de_labels, clf_labels = (count[labels] for labels in head_labels(params))
    encoded = count[encoded_labels(params)]
    ranks, longest = params.run.devices, params.tokens.max_length  # each rank encodes its part of both
    parts = [typical_lengths(sizes.query_lengths, -(-num_queries // ranks), longest)]
    if encoded:
        parts.append(typical_lengths(sizes.label_lengths, -(-encoded // ranks), longest))
    texts = padded_texts(parts, params.optim.encode_chunk)
    return Batch(
        num_queries, de_labels or drawn, clf_labels, batches, pool.eta * pool.refresh if mines else 0, texts,
        _bag_rows(params, sizes, texts.tokens), _bag_rows(params, sizes, texts.graph.tokens),
    )  # fmt: skip


def _bag_rows(params: Params, sizes: Sizes, num_tokens: int) -> int:
    """At most so many different rows of the bag's table to expect; a word of several pieces has two at least."""
    return distinct_tokens(sizes, num_tokens) + min(params.encoder.bag_words, num_tokens // 2)


def label_rows(params: Params, sizes: Sizes) -> int:
    """Labels whose texts are training queries too (Gandalf)."""
    return math.ceil(params.label_graph.share * sizes.num_labels) if params.pool.gandalf else 0


def training_rows(params: Params, sizes: Sizes) -> int:
    """n: training queries, with Gandalf label texts too."""
    return sizes.num_train + label_rows(params, sizes)
