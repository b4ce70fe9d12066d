"""Encoded query texts, and the encoders that make them.

Legend: B texts, F tokens of all texts, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from unidec.data.tokens import TextTokenizer, Tokens, encode_texts, load_tokenizer

if TYPE_CHECKING:
    from unidec.retrieval.words import WordSpace

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Encoded:
    """B query texts, ready for the search in a bundle.

    Attributes:
        de_BD: float32 [B, D], unit length; None without a dual-encoder head.
        clf_BD: float32 [B, D], as the classifier's head gives them; None without one.
        words_BF: CSR of `WordSpace.vectors`, where training queries are compared by words; else None.
        num_tokens_B: int64 [B], tokens without the special ones, after cutting.
        unknown_B: int64 [B], how many of them are the unknown token.
    """

    de_BD: Floats | None
    clf_BD: Floats | None
    words_BF: csr_matrix | None
    num_tokens_B: Counts
    unknown_B: Counts

    def __len__(self) -> int:
        return len(self.num_tokens_B)

    def take(self, rows: npt.NDArray[np.int64]) -> Encoded:
        """Some of the texts."""
        de_BD, clf_BD, words_BF = (
            None if part is None else part[rows] for part in (self.de_BD, self.clf_BD, self.words_BF)
        )
        return Encoded(de_BD, clf_BD, words_BF, self.num_tokens_B[rows], self.unknown_B[rows])


class QueryEncoder(Protocol):
    """Returned by `query_encoder.open_encoder`. Encoding is thread-safe; the vectors of a text do not depend on
    the other texts (except for rounding)."""

    name: str

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Vectors of some texts.

        Raises:
            DataError: an item that is not a string of valid Unicode.
        """
        ...


class ModelEncoder:
    """The model itself, by torch.

    Args:
        model: as `UniDEC`.
        words: of the bundle's training queries, where they are compared by words.
    """

    name = "torch"

    def __init__(self, model: Any, words: WordSpace | None) -> None:
        self._model, self._words = model, words

    def encode(self, texts: Sequence[str]) -> Encoded:
        """See `QueryEncoder.encode`."""
        tokens = encode_texts(texts, self._model.tokenizer_folder, self._model.max_length)
        de_BD, clf_BD = self._model.encode_queries(tokens, np.arange(len(texts)), batch_size=max(1, len(texts)))
        tokenizer = load_tokenizer(self._model.tokenizer_folder, self._model.max_length)
        return as_encoded(tokens, tokenizer, self._words, de_BD, clf_BD)


def as_encoded(
    tokens: Tokens, tokenizer: TextTokenizer, words: WordSpace | None, de_BD: Floats | None, clf_BD: Floats | None
) -> Encoded:
    """Tokenised texts and their vectors as `Encoded`."""
    flat_F, offsets, num_texts = tokens.ids, tokens.offsets, tokens.num_texts
    is_unknown_F = flat_F == tokenizer.unknown_id
    unknown_B = np.zeros(num_texts, dtype=np.int64)
    if is_unknown_F.any():
        unknown_B = np.diff(np.concatenate([[0], np.cumsum(is_unknown_F)])[offsets])
    words_BF = None if words is None else words.vectors(flat_F.astype(np.int64), offsets)
    return Encoded(de_BD, clf_BD, words_BF, np.diff(offsets) - tokenizer.num_specials, unknown_B)
