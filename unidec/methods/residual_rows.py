"""Residual classifier rows: a row is the vector of its label's text plus a free vector, which the
table holds (SiameseXML: Dahiya et al. 2021). Gates and related texts are optional
(`unidec.methods.gates`, `graph_rows`, `query_rows`).

Legend: S labels of a batch, L labels, N related texts, E pairs of a label and a related text, D
width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unidec.data.chunks import blocks
from unidec.methods.gates import NAME as GATES
from unidec.methods.gates import gated
from unidec.model.additions import NO_ROWS, Classifier, Drawn, Rows, TextInput
from unidec.model.batch import Prepared
from unidec.model.first_rows import START_BLOCK
from unidec.model.pairs import rows_at, to_device
from unidec.model.unidec import UniDEC

RELATED_GATE = "related_gate"


@dataclass(frozen=True, kw_only=True)
class RelatedPairs:
    """Pairs of a batch's labels and related texts: positions int64 [E], weights float32 [E]."""

    label_E: Tensor
    text_E: Tensor
    weight_E: Tensor

    @classmethod
    def on(
        cls, device: torch.device, label_E: np.ndarray, text_E: np.ndarray, weight_E: np.ndarray
    ) -> RelatedPairs:
        """The pairs on a device."""
        return cls(
            label_E=to_device(label_E.astype(np.int64), device),
            text_E=to_device(text_E.astype(np.int64), device),
            weight_E=to_device(weight_E.astype(np.float32), device),
        )

    def sums(self, text_ND: Tensor, num_labels: int) -> Tensor:
        """For each label the weighted sum of its related texts' vectors, scaled to unit length (0
        without any), [S, D].

        Args:
            text_ND: vectors of texts.
            num_labels: S.
        """
        text_ED = rows_at(text_ND, self.text_E)
        weighted_ED = text_ED * self.weight_E.unsqueeze(1)
        zeros_SD = text_ND.new_zeros(num_labels, text_ND.shape[1])
        sum_SD = zeros_SD.index_add(0, self.label_E, weighted_ED)
        return F.normalize(sum_SD, dim=-1)


class RelatedTexts(Protocol):
    """The texts that are related to each label.

    Attributes:
        related_LN: csr [L, N], weights of the related texts.
        source: "labels" or "queries".
    """

    related_LN: sp.csr_matrix

    @property
    def source(self) -> str: ...

    def draw(self, drawn: Drawn) -> tuple[RelatedPairs, np.ndarray]:
        """The pairs of a batch, and the rows of queries to encode for it, int64 [M]."""

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Rows of the source for columns of `related_LN`."""


@dataclass(frozen=True, kw_only=True)
class ResidualPart:
    """The part of a batch that residual rows need.

    Attributes:
        places: int64 [S], positions of the classifier's labels among the encoded ones; None: they
            are the same.
        related: pairs with related texts, or None.
    """

    places: Tensor | None
    related: RelatedPairs | None


def new_related_gate(dim: int, start: float) -> nn.Parameter:
    """The gate of related texts [D]; ECLARE: a softmax over parts, GraphSAGE: a matrix."""
    return nn.Parameter(torch.full((dim,), start))


@dataclass(frozen=True)
class ResidualRows(Rows):
    """Rows that add text and free vector. Trains on one rank only, which encodes the texts of all
    the batch's labels.

    Attributes:
        encode: returns the encoder's outputs of texts.
        related: texts whose gated vectors are added; None: none.
    """

    holds_text: ClassVar[bool] = True

    model: UniDEC
    encode: TextInput
    related: RelatedTexts | None = None

    def draw(self, drawn: Drawn) -> tuple[ResidualPart, np.ndarray]:
        labels_S = drawn.clf_pool.pool_S
        places = None
        related = None
        further = NO_ROWS
        if len(drawn.encoded) > len(labels_S):
            places = to_device(np.searchsorted(drawn.encoded, labels_S), drawn.device)
        if self.related is not None:
            related, further = self.related.draw(drawn)
        return ResidualPart(places=places, related=related), further

    def rows(self, table_SD: Tensor, text_TW: Tensor, batch: Prepared) -> Tensor:
        part: ResidualPart = batch.added[self.name]
        if part.places is not None:
            text_TW = text_TW[part.places]
        num_labels = len(table_SD)
        text_SD, further_MD = self.model.text_rows(text_TW).tensor_split([num_labels])
        related_SD = None
        if self.related is not None and part.related is not None:
            related_ND = text_SD if self.related.source == "labels" else further_MD
            related_SD = part.related.sums(related_ND, num_labels)
        return self._sum(text_SD, table_SD, related_SD)

    def _sum(self, text_SD: Tensor, free_SD: Tensor, related_SD: Tensor | None) -> Tensor:
        gates_2D = getattr(self.model, GATES, None)
        if gates_2D is not None:
            text_SD, free_SD = gated(gates_2D, text_SD, free_SD)
        row_SD = free_SD + text_SD
        if related_SD is not None:
            row_SD = row_SD + self.model.get_parameter(RELATED_GATE) * related_SD
        return row_SD

    @torch.no_grad()
    def exported(self) -> Classifier:
        """The rows of the labels held here: text plus free vector."""
        table = self.model.table
        assert table is not None
        device = self.model.device
        free_LD = table.numpy()
        rows_LD = np.empty_like(free_LD)
        related_ND = None if self.related is None else self._related_vectors(self.related)
        for own in blocks(len(free_LD), START_BLOCK):
            labels = np.arange(own.start, own.stop) + table.first_row
            related_BD = None
            if self.related is not None:
                sums_BD = (self.related.related_LN[labels] @ related_ND).astype(np.float32)
                related_BD = F.normalize(torch.from_numpy(sums_BD).to(device), dim=-1)
            text_BD = self._text_vectors("labels", labels)
            free_BD = torch.from_numpy(free_LD[own]).to(device)
            row_BD = self._sum(text_BD, free_BD, related_BD)
            rows_LD[own] = row_BD.cpu().numpy()
        return rows_LD, None

    def _related_vectors(self, related: RelatedTexts) -> np.ndarray:
        """Vectors of all related texts, float32 [N, D]: any of them may be related to a label."""
        num_texts = related.related_LN.shape[1]
        vectors = []
        for block in blocks(num_texts, START_BLOCK):
            rows = related.rows(np.arange(block.start, block.stop))
            vectors.append(self._text_vectors(related.source, rows).cpu())
        return torch.cat(vectors).numpy()

    def _text_vectors(self, source: str, rows: np.ndarray) -> Tensor:
        """Vectors of texts without dropout, float32 [n, D]."""
        output_BW = self.encode(source, rows).to(self.model.device)
        return self.model.text_rows(output_BW, dropout=False)
