"""What the method of a single paper may add: the interfaces by which model, batches, objective and
trainer call it.

A method may change how the classifier's rows are made (`Rows`), add a loss (`FurtherLoss`, or
`ScoreLoss` on each head's scores) or change a batch (`Change`). `Additions` are the parts that it
adds to a model. The methods are in `unidec.methods`, which also chooses those that a recipe names;
the core knows none of them.

Legend: B queries of a batch, S labels that a head scores, L labels, M further queries, D width of a
head, W width of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from unidec.config import Encoder, Model
from unidec.data.tokens import Tokens
from unidec.model.batch import Prepared
from unidec.model.encoder import TokenLayers
from unidec.model.encoder_inputs import Parts
from unidec.model.pairs import PoolTargets
from unidec.model.pool import PoolBatch

Part = nn.Module | nn.Parameter | Tensor
# source and rows int64 [n] -> the encoder's outputs [n, W]
TextInput = Callable[[str, np.ndarray], Tensor]
# scores [B, S] and targets -> the classifier's loss, 0-d
HeadLoss = Callable[[Tensor, PoolTargets], Tensor]
# a head's queries [B, D] and its labels' vectors or rows [S, D], and whether they have unit length
# -> those on which the head has a loss
View = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]
Classifier = tuple[np.ndarray | None, np.ndarray | None]
Shortlist = tuple[np.ndarray, dict[str, float]]  # labels by data set row, int32 [N, H], and figures
NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Additions:
    """What methods add to a model; by default nothing.

    Attributes:
        num_rows: rows of the classifier's table; None: one for each label.
        parts: width of the encoder -> weights that train, and buffers, by name. They become
            attributes of the model and part of its state.
        token_layers: width of a token's embedding -> layers of the encoder's bag.
        label_vectors: changes the dual encoder's vectors of labels before they are scaled: (the
            model, vectors float32 [S, D], labels int64 [S]) -> float32 [S, D].
    """

    num_rows: int | None = None
    parts: Callable[[int], dict[str, Part]] = lambda _width: {}
    token_layers: Callable[[int], TokenLayers | None] = lambda _width: None
    label_vectors: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None


# sections `encoder` and `model`, number of labels -> what is added
Add = Callable[[Encoder, Model, int], Additions]


def whole(query_BD: Tensor, label_SD: Tensor, is_unit: bool) -> tuple[Tensor, Tensor]:
    """A head's vectors, unchanged."""
    return query_BD, label_SD


def add_nothing(*_: Any) -> Additions:
    """No additions: a model with no method."""
    return Additions()


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A batch as it was drawn on the host.

    Attributes:
        pool, clf_pool: queries and labels of the dual encoder's loss, and of the classifier's.
        encoded: int64, labels whose texts are encoded, ascending.
        seed: of the run; epoch, step: of the batch. Together they determine random numbers.
        device: where a method puts its tensors.
    """

    pool: PoolBatch
    clf_pool: PoolBatch
    encoded: np.ndarray
    seed: int
    epoch: int
    step: int
    device: torch.device

    def rng(self, stream: int) -> np.random.Generator:
        """Random numbers of the batch; each use has its own stream."""
        return np.random.default_rng((self.seed, self.epoch, self.step, stream))


class Rows:
    """How the classifier's rows are made; by default each label has a row of the table.

    Attributes:
        holds_text: whether a row contains the vector of its label's text, so that its row of the
            table starts at 0.
    """

    name: ClassVar = "rows"
    holds_text: ClassVar[bool] = False

    def draw(self, drawn: Drawn) -> tuple[Any, np.ndarray]:
        """Data that `rows` needs for a batch, and rows of further queries to encode, int64 [M]."""
        return None, NO_ROWS

    def rows(self, table_SD: Tensor, text_TW: Tensor, batch: Prepared) -> Tensor:
        """The classifier's rows in a step, [S, D].

        Args:
            table_SD: the labels' rows of the table.
            text_TW: the encoder's outputs of the batch's labels, then of the further queries.
        """
        return table_SD

    def exported(self) -> Classifier:
        """Rows float32 [L, D] and biases float32 [L] as they are exported; None: the table's."""
        return None, None


@dataclass(frozen=True, kw_only=True)
class Exported:
    """How a trained model is exported: as an ordinary one, without parts that only training needs.

    Attributes:
        classifier: rows float32 [L, D] and biases float32 [L]; None: the model's table and biases,
            unchanged.
        settings: values of section `model` that the export has instead of the training's.
        without: parts of the model that are omitted.
    """

    classifier: Classifier = (None, None)
    settings: Mapping[str, Any] = field(default_factory=dict)
    without: Collection[str] = ()


AS_TRAINED = Exported()


class Drawing(Protocol):
    """A method that adds a part to each batch, `batch.added[name]`."""

    @property
    def name(self) -> str: ...

    def draw(self, drawn: Drawn) -> Any:
        """Its part of a batch."""


class FurtherLoss(Drawing, Protocol):
    """A loss in addition to the heads' losses; `name` is its key in the figures of a step."""

    def loss(self, query_BW: Tensor, batch: Prepared, head_loss: HeadLoss) -> Tensor:
        """The loss, 0-d, from the queries' encoder outputs; `head_loss` is the classifier's."""


class ScoreLoss(Drawing, Protocol):
    """A loss on the scores of each head, added to the head's own."""

    def loss(self, head: str, logit_BS: Tensor, targets: PoolTargets, batch: Prepared) -> Tensor:
        """The loss, 0-d.

        Args:
            head: "de" or "clf".
            logit_BS: scores divided by the temperature; may be overwritten.
            targets: the head's pairs.
        """


class Change(Drawing, Protocol):
    """A change of a step's batch."""

    def apply(self, x_BW: Tensor, batch: Prepared) -> tuple[Tensor, Prepared]:
        """The encoder's outputs and the batch, changed."""


class TextChange(Protocol):
    """A change of the texts of a step's queries."""

    def apply(self, parts: Parts, drawn: Drawn) -> tuple[str, Tokens, np.ndarray]:
        """The changed texts of all queries of the batch, as a new source: name, tokens, rows int64
        [B].
        """


class Shortlister(Protocol):
    """Chooses the labels from which hard negatives are drawn, instead of the nearest labels."""

    def shortlist(
        self, encode: Callable[[np.ndarray], Tensor], rows_n: np.ndarray, relevance: sp.csr_matrix
    ) -> Shortlist:
        """Labels by data set row, int32 [N, H], padded with -1; and figures.

        Args:
            encode: returns the encoder's outputs [n, W] of training rows.
            rows_n: int64 [n], all training rows.
            relevance: csr [N, L].
        """


@dataclass(frozen=True, kw_only=True)
class Methods:
    """The methods of a training.

    Attributes:
        reads_labels: whether the dual encoder's vectors of labels depend on the labels, not on
            their texts alone.
        export: returns how the model is exported.
        shortlister: None: hard negatives are the nearest labels.
        texts: changes the queries' texts.
        views: a head's loss is the sum of its losses on them.
    """

    rows: Rows
    losses: Sequence[FurtherLoss]
    score_losses: Sequence[ScoreLoss]
    changes: Sequence[Change]
    reads_labels: bool
    export: Callable[[], Exported]
    shortlister: Shortlister | None
    texts: TextChange | None
    views: Sequence[View]

    def draw(self, drawn: Drawn) -> tuple[dict[str, Any], np.ndarray]:
        """Data that methods need for a batch, by name; rows of further queries to encode [M]."""
        of_rows, further = self.rows.draw(drawn)
        drawing: list[Drawing] = [*self.losses, *self.score_losses, *self.changes]
        added = {method.name: method.draw(drawn) for method in drawing}
        return {self.rows.name: of_rows, **added}, further
