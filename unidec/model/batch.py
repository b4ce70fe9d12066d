"""A training step's batch on the device: queries, labels and their pairs, and the texts to encode.

Legend: B queries of a batch, S labels that a head scores, C texts of a chunk, U distinct tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unidec.model.encoder import EncoderInput
from unidec.model.pairs import PoolTargets
from unidec.model.pool import PoolBatch


@dataclass(frozen=True)
class TextChunks:
    """The texts of a step in chunks of texts with similar lengths; no chunk mixes queries and
    labels.

    Attributes:
        num_texts: B.
        chunks: for each chunk (positions int64 [C] among the step's texts, encoder input).
        unique_U: int64, distinct token ids of all texts, ascending; None without a bag.
    """

    num_texts: int
    chunks: tuple[tuple[Tensor, EncoderInput], ...]
    unique_U: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ClassifierLabels:
    """The labels in the classifier's loss.

    Attributes:
        targets: their pairs with the queries.
        ids: int64, labels whose rows this rank holds, on the table's device; None: all labels.
        sizes: for each rank the number of labels whose rows it holds.
    """

    targets: PoolTargets
    ids: Tensor | None
    sizes: list[int]


@dataclass(frozen=True, kw_only=True)
class TextCounts:
    """Counts of a batch's texts.

    Attributes:
        own_queries: queries at the start of the texts that this rank encodes.
        texts, tokens: sums over the texts of all ranks.
    """

    own_queries: int
    texts: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A batch on the device.

    Attributes:
        pool: all queries and labels of the dual encoder's loss, also those that other ranks encode
            (of a model without a dual encoder: the classifier's).
        targets: pairs of the queries with the labels of the dual encoder's loss.
        clf: the labels of the classifier's loss.
        texts: the texts that this rank encodes: its part of the queries, then its part of the
            labels, then those that a method added; in chunks if gradients are cached.
        counts: numbers of texts.
        own_labels: int64, the labels whose texts this rank encodes, if a method reads them.
        added: data that methods drew for the batch, by name.
    """

    pool: PoolBatch
    targets: PoolTargets
    clf: ClassifierLabels
    texts: EncoderInput | TextChunks
    counts: TextCounts
    own_labels: Tensor | None
    added: Mapping[str, Any]
