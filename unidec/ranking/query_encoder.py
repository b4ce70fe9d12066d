"""Encoders of a bundle's queries, with or without torch.

With torch, the model itself encodes. Without torch, onnxruntime runs the transformer from the
bundle's ONNX graph, and numpy computes the bag of tokens and the heads. The oldest bundles have no
graph; for their transformers, torch is required.

Legend: B texts, F tokens of all texts, V tokens of the vocabulary, D width of a head, W width of
the encoder's output.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from unidec.cores import num_threads
from unidec.data.chunks import length_chunks, offsets_of
from unidec.data.tokens import TextTokenizer, Tokens, behind, load_tokenizer
from unidec.errors import ArtifactError, ConfigError, UnidecError
from unidec.model.arrays import GRAPH, INT8_GRAPH, ModelConfig, heads_of, misfit, read_arrays
from unidec.model.onnx_session import open_session, threads_of_int8
from unidec.model.words import WordSpace, with_words
from unidec.ranking.sparse import Floats

Runtime = Literal["auto", "torch", "onnx", "onnx-int8"]
RUNTIMES = get_args(Runtime)
# texts per forward pass of a transformer; measured: benchmarks/results/query-path.md
CHUNK_TEXTS = 8
Counts = npt.NDArray[np.int64]
Part = Callable[[Tokens], Floats]
Layer = tuple[Floats, Floats]  # weight [in, out] and bias
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoded:
    """B encoded queries, ready to be searched in a bundle.

    Attributes:
        de_BD: float32 [B, D], unit length unless `model.normalize` is off; None without a
        dual-encoder head.
        clf_BD: float32 [B, D], output of the classifier head; None without one.
        words_BF: CSR from `WordSpace.vectors` if training queries are compared by words; else None.
        num_tokens_B: int64 [B], tokens after truncation, without special ones; empty if texts were
        not tokenised.
        unknown_B: int64 [B], number of those that are the unknown token; likewise empty.
    """

    de_BD: Floats | None
    clf_BD: Floats | None
    words_BF: csr_matrix | None = None
    num_tokens_B: Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    unknown_B: Counts = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        part = self.clf_BD if self.de_BD is None else self.de_BD
        assert part is not None
        return len(part)

    def take(self, rows: npt.NDArray[np.int64] | slice) -> Encoded:
        """The queries at the given rows."""
        parts = {name: part[rows] for name, part in vars(self).items() if part is not None}
        return replace(self, **parts)


class ModelEncoder:
    """Encodes queries with the model itself (`UniDEC`), in torch.

    Args:
        words: word space of the training queries; None if they are not compared by words.
    """

    name = "torch"

    def __init__(self, model: Any, words: WordSpace | None) -> None:
        self._model = model
        self._words = words

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode texts; raises DataError for a text that is not valid Unicode."""
        tokens = self._model.tokens(texts, "queries")
        de_BD, clf_BD = self._model.encode_queries(tokens, batch_size=max(1, len(texts)))
        tokenizer = load_tokenizer(self._model.tokenizer_folder, self._model.max_length)
        return _encoded(tokens, tokenizer, self._words, de_BD, clf_BD)


class FastEncoder:
    """Encodes queries without torch; arguments and errors as for `open_encoder`.

    Attributes:
        name: "onnx", "onnx-int8", or "bag" for a model without a transformer.
    """

    def __init__(
        self, about: ModelConfig, words: WordSpace | None, *, int8: bool = False, threads: int = 0
    ) -> None:
        if about.encoder.kind == "inception":
            raise ConfigError(
                "only torch encodes queries with an inception encoder",
                where="runtime",
                got="onnx",
                fix="runtime: auto or torch",
            )
        # loaded once: the bundle's folder may be replaced while this encoder is in use
        self._tokenizer = load_tokenizer(about.tokenizer_folder, about.max_length)
        self._words = words
        self._prompt = about.encoder.query_prompt
        self._parts: list[Part] = []
        self.name = "bag"
        if about.encoder.has_transformer:
            self.name = "onnx-int8" if int8 else "onnx"
            graph = about.folder / (INT8_GRAPH if int8 else GRAPH)
            width = about.transformer_width
            if int8:
                threads = threads or threads_of_int8(width)
            self._parts.append(_transformer_part(graph, width, threads))
        try:
            arrays = read_arrays(about.folder)
            if about.encoder.kind != "transformer":
                self._parts.append(_bag_part(about, arrays))
            self._residual: list[Layer] = []
            if about.encoder.residual:
                self._residual = [_linear(arrays, f"encoder.residual.{place}") for place in (0, 3)]
            self._normalize = about.settings.normalize
            self._heads: dict[str, Layer | None] = {}
            for head in heads_of(about.heads):
                is_own = head == "de" and about.settings.query_head
                layer = "head_query.0" if is_own else f"head_{head}.0"
                projects = about.settings.projection
                self._heads[head] = _linear(arrays, layer) if projects else None
            # encode a text of maximum length with the largest token id, to detect a misfit now and
            # not when such a query arrives
            longest = np.full(about.max_length, self._tokenizer.vocab_size - 1)
            self._head_outputs(self._tokens(longest, [about.max_length]))
        except ArtifactError:
            raise
        except Exception as error:  # errors of numpy and onnxruntime have no common base class
            raise misfit(about.folder, error) from error

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode texts; raises DataError for a text that is not valid Unicode."""
        tokens = self._tokens(*self._tokenizer.encode(texts))
        if self._prompt:
            tokens.prompted = self._tokens(*self._tokenizer.encode(behind(self._prompt, texts)))
        outputs = self._head_outputs(tokens)
        de_BD = outputs.get("de")
        clf_BD = outputs.get("clf")
        return _encoded(tokens, self._tokenizer, self._words, de_BD, clf_BD)

    def _tokens(
        self, ids_F: npt.NDArray[Any], lengths_B: Sequence[int] | npt.NDArray[np.int64]
    ) -> Tokens:
        offsets = offsets_of(lengths_B)
        tokenizer = self._tokenizer
        return Tokens(ids_F, offsets, tokenizer.vocab_size, tokenizer.pad_id, tokenizer.max_length)

    def _head_outputs(self, tokens: Tokens) -> dict[str, Floats]:
        """Output of each head by name, float32 [B, D]."""
        x_BW = np.concatenate([part(tokens) for part in self._parts], axis=1)
        if self._residual:
            from scipy.special import erf

            (first_WW, first_W), (last_WW, last_W) = self._residual
            y_BW = x_BW @ first_WW + first_W
            share_BW = 1 + erf(y_BW / np.sqrt(2))
            gelu_BW = (y_BW * 0.5 * share_BW).astype(np.float32)
            x_BW = x_BW + gelu_BW @ last_WW + last_W
        outputs = {}
        for head, layer in self._heads.items():
            out_BD = x_BW
            if layer is not None:
                weight, bias = layer
                out_BD = x_BW @ weight + bias
                if head == "de":
                    out_BD = np.tanh(out_BD)
            if head == "de" and self._normalize:
                out_BD = _normalised(out_BD)
            outputs[head] = out_BD
        return outputs


QueryEncoder = ModelEncoder | FastEncoder
"""Encoding is thread-safe; the vectors of a text do not depend on the other texts, except for
rounding.
"""


def open_encoder(bundle: Any, runtime: Runtime = "auto", threads: int = 0) -> QueryEncoder:
    """Open the encoder of a bundle's queries.

    Args:
        bundle: a `Bundle`.
        runtime: "torch": the model itself. "onnx": onnxruntime for the transformer, numpy for the
            rest. "onnx-int8": likewise, with the transformer's linear layers in 8 bits. "auto":
            "onnx-int8" on a CPU; torch on a GPU, or if the graph or onnxruntime is missing. All but
            "torch" encode a bag of tokens in numpy.
        threads: threads of one call; 0: one for a small 8-bit transformer, for which more are
            slower, otherwise `cores.num_threads`.

    Raises:
        ConfigError: no such runtime; "onnx" or "onnx-int8" if the bundle has no graph or
        onnxruntime is not installed.
        ArtifactError: weights are damaged, or do not match the model's configuration or tokenizer.
    """
    if runtime not in RUNTIMES:
        raise ConfigError(
            "no such runtime", where="runtime", got=runtime, expected=", ".join(RUNTIMES)
        )
    about = bundle.about
    on_cpu = str(getattr(about, "device", "cpu")) == "cpu"
    if runtime != "torch" and (runtime != "auto" or on_cpu):
        try:
            config = about
            if not isinstance(about, ModelConfig):
                config = ModelConfig.read(bundle.path / "model")
            return FastEncoder(config, bundle.words, int8=runtime != "onnx", threads=threads)
        except UnidecError as error:
            if runtime != "auto" or isinstance(error, ArtifactError):
                raise
            log.warning("queries are encoded by torch: %s", str(error).replace("\n", ";"))
    import torch

    torch.set_num_threads(num_threads(threads))
    return ModelEncoder(bundle.model, bundle.words)


def _transformer_part(graph: Path, width: int, threads: int) -> Part:
    """A transformer in onnxruntime. It encodes a few texts of similar length at a time, to limit
    padding and to keep activations in the cache.

    Raises:
        ConfigError: the graph is missing, or onnxruntime is not installed.
    """
    if not graph.is_file():
        raise ConfigError(
            "this bundle has no ONNX graph of its transformer",
            where=graph,
            fix="write the bundle again with this version (unidec index build), or runtime: torch",
        )
    try:
        session = open_session(graph, threads)
    except ImportError as error:
        raise ConfigError(
            f"onnxruntime cannot be used: {error}",
            where="runtime",
            fix="pip install 'unidec-xmc[serve]', or runtime: torch",
        ) from error

    def encode(texts: Tokens) -> Floats:
        tokens = texts.for_transformer
        out_BD = np.empty((len(tokens), width), dtype=np.float32)
        for rows in length_chunks(tokens.lengths(), CHUNK_TEXTS):
            ids_BT, mask_BT = tokens.batch(rows)
            inputs = {"input_ids": ids_BT, "attention_mask": mask_BT.astype(np.int64)}
            out_BD[rows] = session.run(None, inputs)[0]
        return out_BD

    return encode


def _bag_part(about: ModelConfig, arrays: Mapping[str, npt.NDArray[Any]]) -> Part:
    """`model.encoder.BagEncoder` in numpy, one text at a time, so that results are independent of
    the batch.
    """
    head = about.encoder.bag_head
    num_words = about.encoder.bag_words
    embedding_VD = arrays["encoder.bag.embedding.weight"]
    log_weight_V1 = arrays["encoder.bag.log_weight.weight"]
    num_rows = about.num_tokens + num_words
    shapes = [embedding_VD.shape, log_weight_V1.shape]
    expected: list[tuple[int, ...]] = [(num_rows, about.width), (num_rows, 1)]
    if num_words:
        continues_V = arrays["encoder.bag.continues"]
        shapes.append(continues_V.shape)
        expected.append((about.num_tokens,))
    if shapes != expected:
        raise ValueError(f"the bag of tokens has the shapes {shapes}, expected {expected}")
    weight_V: Floats = np.exp(log_weight_V1[:, 0])

    def encode(tokens: Tokens) -> Floats:
        flat_F = tokens.ids
        lengths_B = np.diff(tokens.offsets)
        if num_words:
            flat_F, lengths_B = with_words(
                flat_F.astype(np.int64), lengths_B, continues_V, num_words
            )
        num_parts = 2 if head else 1
        sums = np.empty((len(lengths_B), num_parts, about.width), dtype=np.float32)
        ends_B = np.cumsum(lengths_B)
        for sums_PD, end, length in zip(sums, ends_B, lengths_B, strict=True):
            ids = flat_F[end - length : end]
            rows = embedding_VD[ids]
            weights = weight_V[ids]
            np.dot(weights, rows, out=sums_PD[0])
            if head:
                np.dot(weights[:head], rows[:head], out=sums_PD[1])
        return _normalised(sums).reshape(len(sums), num_parts * about.width)

    return encode


def _linear(arrays: Mapping[str, npt.NDArray[Any]], name: str) -> Layer:
    """Weight [in, out], contiguous, and bias of a linear layer."""
    return np.ascontiguousarray(arrays[f"{name}.weight"].T), arrays[f"{name}.bias"]


def _normalised(x: Floats) -> Floats:
    """Scale the last dimension to unit length, like torch.nn.functional.normalize."""
    square = np.einsum("...d,...d->...", x, x)[..., None]
    return x / np.maximum(np.sqrt(square), np.float32(1e-12))


def _encoded(
    tokens: Tokens,
    tokenizer: TextTokenizer,
    words: WordSpace | None,
    de_BD: Floats | None,
    clf_BD: Floats | None,
) -> Encoded:
    """Combine tokens and head outputs into `Encoded`."""
    offsets = tokens.offsets
    is_unknown_F = tokens.ids == tokenizer.unknown_id
    num_unknown = np.concatenate([[0], np.cumsum(is_unknown_F)])
    words_BF = None
    if words is not None:
        words_BF = words.vectors(tokens.ids.astype(np.int64), offsets)
    return Encoded(
        de_BD,
        clf_BD,
        words_BF=words_BF,
        num_tokens_B=np.diff(offsets) - tokenizer.num_specials,
        unknown_B=np.diff(num_unknown[offsets]),
    )
