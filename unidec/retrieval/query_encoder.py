"""Query texts as vectors: what a bundle is asked with, made by the model itself or by a faster runtime.

Legend: B texts, F tokens of all texts, D width of a head.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from unidec.data.tokens import TextTokenizer, Tokens, encode_texts, load_tokenizer
from unidec.errors import ArtifactError, UnidecError
from unidec.model.arrays import ModelArrays

if TYPE_CHECKING:
    from unidec.retrieval.bundle import Bundle
    from unidec.retrieval.words import WordSpace

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]
Runtime = Literal["auto", "torch", "onnx", "onnx-int8"]
AUTO: Runtime = "onnx-int8"  # on all of lf-debian's test queries P@1 47.00 for 47.05, in half of the time
SEEN_TEXTS = 128  # of each kind, to find the scales of 8 bits on
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoded:
    """B texts as a bundle is asked with.

    Attributes:
        de_BD: float32 [B, D], unit length; None without a dual-encoder head.
        clf_BD: float32 [B, D], as the classifier's head gives them; None without one.
        words_BF: CSR of `WordSpace.vectors`, where training queries are compared by words; else None.
        num_tokens_B: int64 [B], tokens without the special ones, after cutting.
        unknown_B: int64 [B], how many of them stand for what the vocabulary lacks.
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
    """What `open_encoder` gives. Encoding is safe from several threads at once; the vectors of a text do not depend on
    the other texts (but for rounding)."""

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
        return spoken(tokens, tokenizer, self._words, de_BD, clf_BD)


def spoken(
    tokens: Tokens, tokenizer: TextTokenizer, words: WordSpace | None, de_BD: Floats | None, clf_BD: Floats | None
) -> Encoded:
    """`Encoded` of tokenised texts and their vectors."""
    flat_F, offsets, num_texts = tokens.ids, tokens.offsets, tokens.num_texts
    is_unknown_F = flat_F == tokenizer.unknown_id
    unknown_B = np.zeros(num_texts, dtype=np.int64)
    if is_unknown_F.any():
        unknown_B = np.diff(np.concatenate([[0], np.cumsum(is_unknown_F)])[offsets])
    words_BF = None if words is None else words.vectors(flat_F.astype(np.int64), offsets)
    return Encoded(de_BD, clf_BD, words_BF, np.diff(offsets) - tokenizer.num_specials, unknown_B)


def open_encoder(bundle: Bundle, runtime: Runtime = "auto", threads: int = 0) -> QueryEncoder:
    """What encodes a bundle's queries.

    Args:
        runtime: "torch": the model itself; "onnx": onnxruntime for its transformer, numpy for the rest; "onnx-int8":
            the transformer's linear layers in 8 bits; "auto": `AUTO` on a CPU, torch on a GPU and where that cannot be.
            A bag of tokens without a transformer is encoded in numpy by all but "torch".
        threads: of one call; 0: as many as this process has cores.

    Raises:
        UnidecError: "onnx" or "onnx-int8" of a model that is not known there, or onnxruntime is not installed.
        ArtifactError: weights that are damaged, or do not fit the model's configuration or tokenizer.
    """
    threads = threads or usable_cores()
    if runtime != "torch" and (runtime != "auto" or str(getattr(bundle.about, "device", "cpu")) == "cpu"):
        from unidec.retrieval.fast_encoder import FastEncoder

        int8 = (AUTO if runtime == "auto" else runtime) == "onnx-int8"
        try:
            arrays = ModelArrays.of(bundle.about)
            return FastEncoder(arrays, bundle.words, int8=int8, threads=threads, texts=_typical(bundle))
        except UnidecError as error:
            if runtime != "auto" or isinstance(error, ArtifactError):
                raise
            log.warning("queries are encoded by torch: %s", str(error).replace("\n", ";"))
    import torch

    torch.set_num_threads(threads)
    return ModelEncoder(bundle.model, bundle.words)


def _typical(bundle: Bundle) -> list[str]:
    """Some texts of the kind that the model sees: titles of labels, and of training queries where there are any."""
    columns = [bundle.titles] + ([] if bundle.neighbours is None else [bundle.neighbours.titles])
    some = [column.take(np.linspace(0, len(column) - 1, SEEN_TEXTS).astype(np.int64)) for column in columns]
    return [title for column in some for title in column.to_pylist() if title]


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
