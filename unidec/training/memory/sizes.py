"""Sizes behind the memory estimate: of the data, of the encoder, of a batch.

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

# config.json of the models that papers and recipes name (from their model cards), for estimates without the model
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
_MPNET_BUCKETS = 32  # relative positions of MPNet, a bias for each and every head


@dataclass(frozen=True)
class EncoderShape:
    """A transformer's architecture, as its config.json states it.

    Attributes:
        known: parameters of this family are counted exactly; others are counted like BERT.
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
            ConfigError: a size is missing.
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
            ArtifactError: none of these exists. ConfigError: the file is not a transformer's config.
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
    def parameters(self) -> int:
        """All of them, without a pooling head (`load_transformer` leaves it out)."""
        rows = self.vocab_size + self.positions + (0 if self.family in ("distilbert", "mpnet") else self.token_types)
        extra = _MPNET_BUCKETS * self.attention_heads if self.family == "mpnet" else 0
        return (rows + 2) * self.hidden + self.layers * self.layer_parameters + extra

    def trained_layers(self, trainable_layers: int) -> int:
        """Layers that train under `encoder.trainable_layers`.

        Raises:
            ConfigError: the encoder has fewer layers.
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
    """Sizes of a data set.

    Attributes:
        num_queries: N of all splits; num_train, num_validation: of those splits; num_labels: L.
        num_pairs: stored query-label pairs.
        query_lengths, label_lengths: number of texts with 0, 1, 2, ... tokens.
        vocab_size: of the tokenizer.
        text_bytes: of the stored label texts; 0: unknown.
        num_graph_pairs: entries of the label graph (Gandalf's soft targets); 0: unknown.
    """

    num_queries: int
    num_train: int
    num_validation: int
    num_labels: int
    num_pairs: int
    query_lengths: tuple[int, ...]
    label_lengths: tuple[int, ...]
    vocab_size: int
    text_bytes: int = 0
    num_graph_pairs: int = 0

    @classmethod
    def of(cls, dataset: XMCDataset, query_tokens: Tokens, label_tokens: Tokens, num_graph_pairs: int = 0) -> Sizes:
        """Of a data set, its token caches and, for Gandalf, the entries of its label graph."""
        return cls(
            dataset.num_queries, len(dataset.rows("train")), len(dataset.rows("validation")), dataset.num_labels,
            int(dataset.relevance.nnz), _histogram(query_tokens), _histogram(label_tokens), query_tokens.vocab_size,
            int(dataset.labels.nbytes), num_graph_pairs,
        )  # fmt: skip

    @classmethod
    def given(
        cls, labels: int, queries: int, tokens: int, *, pairs: int | None = None, vocab_size: int = 30522
    ) -> Sizes:
        """From counts alone: every text has `tokens` tokens; without `pairs` each query has 5 labels (the sets of the
        papers have 2 to 22)."""
        if min(labels, queries, tokens) < 1:
            raise ConfigError("sizes must be at least 1", where="--labels, --queries, --tokens",
                              got=f"{labels}, {queries}, {tokens}")  # fmt: skip
        shorter = (0,) * tokens
        return cls(
            queries, queries, 0, labels, 5 * queries if pairs is None else pairs, (*shorter, queries),
            (*shorter, labels), vocab_size,
        )  # fmt: skip


def _histogram(tokens: Tokens) -> tuple[int, ...]:
    return tuple(int(count) for count in np.bincount(tokens.lengths(), minlength=1))


def typical_lengths(histogram: tuple[int, ...], num_texts: int, max_length: int) -> np.ndarray:
    """Lengths of a typical batch of texts, ascending: evenly spaced quantiles, the longest text among them.

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
    """Texts that are encoded together, in chunks of similar length as the encoder pads them.

    Attributes:
        count: texts. tokens: without padding. padded: with padding. squares: token pairs within texts, with padding.
    """

    count: int
    tokens: int
    padded: int
    squares: int


def padded_texts(parts: list[np.ndarray]) -> Texts:
    """What `InputBuilder` makes of parts (queries, labels) with these ascending lengths."""
    chunks = [part[start : start + CHUNK_TEXTS] for part in parts for start in range(0, len(part), CHUNK_TEXTS)]
    return Texts(
        sum(map(len, parts)), sum(int(part.sum()) for part in parts),
        sum(len(chunk) * int(chunk[-1]) for chunk in chunks), sum(len(chunk) * int(chunk[-1]) ** 2 for chunk in chunks),
    )  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Sizes of the largest training step.

    Attributes:
        queries: B. labels: in the dual encoder's logits (S or L; without a dual encoder: S). classifier_labels: in
            the classifier's (S or L; 0: no classifier).
        steps: steps an epoch. negatives: H, columns of the mined shortlist (0: nothing is mined).
        texts: queries and labels that one rank encodes.
        held: those of them whose activations are in memory at once; fewer with `run.recompute` and
            `optim.encode_chunk`.
    """

    queries: int
    labels: int
    classifier_labels: int
    steps: int
    negatives: int
    texts: Texts
    held: Texts


def batch_sizes(params: Params, sizes: Sizes) -> Batch:
    """The largest step that these parameters make on this data (`Trainer`, `PoolSampler`)."""
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
    parts = _lengths(params, sizes, num_queries, count[encoded_labels(params)])
    texts = padded_texts(parts)
    return Batch(
        num_queries, de_labels or drawn, clf_labels, batches, pool.eta * pool.refresh if mines else 0, texts,
        _held(params, parts, texts),
    )  # fmt: skip


def _lengths(params: Params, sizes: Sizes, num_queries: int, num_labels: int) -> list[np.ndarray]:
    """Lengths of the texts of one rank: each rank encodes its part of the queries and of the labels."""
    ranks, longest = params.run.devices, params.tokens.max_length
    counts = ((sizes.query_lengths, num_queries), (sizes.label_lengths, num_labels))
    return [typical_lengths(histogram, -(-count // ranks), longest) for histogram, count in counts if count]


def _held(params: Params, parts: list[np.ndarray], texts: Texts) -> Texts:
    at_once = min(
        params.optim.encode_chunk or texts.count, CHUNK_TEXTS if params.run.recompute else texts.count, texts.count
    )
    if at_once == texts.count:
        return texts
    longest = max((int(part[-1]) for part in parts if len(part)), default=0)
    return padded_texts([np.full(at_once, longest)])


def training_rows(params: Params, sizes: Sizes) -> int:
    """Training queries; with Gandalf a share of the label texts too."""
    labels = math.ceil(params.label_graph.share * sizes.num_labels) if params.pool.gandalf else 0
    return sizes.num_train + labels
