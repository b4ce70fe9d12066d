"""Encoders of a bundle's queries, with or without torch.

With torch, the model itself encodes. Without torch, onnxruntime runs the transformer from the
bundle's ONNX graph, and numpy computes the bag of tokens and the heads. The oldest bundles have no
graph: torch encodes their transformer.

Legend: B texts, F tokens of all texts, V tokens of the vocabulary, D width of a head, W width of
the encoder's output.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from unidec.cores import num_threads
from unidec.data.tokens import TextTokenizer, Tokens, encode_texts, length_chunks, load_tokenizer
from unidec.errors import ArtifactError, ConfigError, UnidecError
from unidec.model.arrays import GRAPH, INT8_GRAPH, ModelConfig, misfit, read_arrays
from unidec.model.words import WordSpace, with_words

Runtime = Literal["auto", "torch", "onnx", "onnx-int8"]
RUNTIMES = get_args(Runtime)
# texts that a transformer encodes together; measured: benchmarks/results/query-path.md
CHUNK_TEXTS = 8
Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]
Part = Callable[[Tokens], Floats]
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
        unknown_B: int64 [B], how many of them are the unknown token; likewise empty.
    """

    de_BD: Floats | None
    clf_BD: Floats | None
    words_BF: csr_matrix | None = None
    num_tokens_B: Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    unknown_B: Counts = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(next(part for part in (self.de_BD, self.clf_BD) if part is not None))

    def take(self, rows: npt.NDArray[np.int64] | slice) -> Encoded:
        """The queries at the given rows."""
        parts: dict[str, Any] = {
            name: None if part is None else part[rows] for name, part in vars(self).items()
        }
        return Encoded(**parts)


class ModelEncoder:
    """Encodes queries by the model itself (`UniDEC`), with torch.

    Args:
        words: word space of the training queries; None if they are not compared by words.
    """

    name = "torch"

    def __init__(self, model: Any, words: WordSpace | None) -> None:
        self._model = model
        self._words = words

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode texts; raises DataError for a text that is not valid Unicode."""
        tokens = encode_texts(texts, self._model.tokenizer_folder, self._model.max_length)
        de_BD, clf_BD = self._model.encode_queries(
            tokens, np.arange(len(texts)), batch_size=max(1, len(texts))
        )
        tokenizer = load_tokenizer(self._model.tokenizer_folder, self._model.max_length)
        return _encoded(tokens, tokenizer, self._words, de_BD, clf_BD)


class FastEncoder:
    """Encodes queries without torch; arguments and errors are those of `open_encoder`.

    Attributes:
        name: "onnx", "onnx-int8", or "bag" for a model without a transformer.
    """

    def __init__(
        self, about: ModelConfig, words: WordSpace | None, *, int8: bool = False, threads: int = 1
    ) -> None:
        if about.encoder.kind == "inception":
            what = "only torch encodes queries with an inception encoder"
            fix = "runtime: auto or torch"
            raise ConfigError(what, where="runtime", got="onnx", fix=fix)
        # loaded once: the bundle's folder may be replaced while this encoder is in use
        self._tokenizer = load_tokenizer(about.tokenizer_folder, about.max_length)
        self._words = words
        self._parts: list[Part] = []
        self.name = "bag"
        if about.encoder.has_transformer:
            self.name = "onnx-int8" if int8 else "onnx"
            graph = about.folder / (INT8_GRAPH if int8 else GRAPH)
            self._parts.append(_transformer_part(graph, about.width, threads))
        try:
            arrays = read_arrays(about.folder)
            if about.encoder.kind != "transformer":
                self._parts.append(_bag_part(about, arrays))
            layers = ("encoder.residual.0", "encoder.residual.3") if about.encoder.residual else ()
            self._residual = [_linear(arrays, name) for name in layers]
            heads = [head for head in ("de", "clf") if about.heads in ("both", head)]
            has_layers = about.settings.projection
            self._normalize = about.settings.normalize
            self._heads = {
                head: _linear(arrays, f"head_{head}.0") if has_layers else None for head in heads
            }
            # a text of maximum length with the largest token id reports a misfit now, not when such
            # a query arrives
            longest = np.full(about.max_length, self._tokenizer.vocab_size - 1)
            self._head_outputs(self._tokens(longest, [about.max_length]))
        except ArtifactError:
            raise
        except Exception as error:  # errors of numpy and onnxruntime have no common base class
            raise misfit(about.folder, error) from error

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode texts; raises DataError for a text that is not valid Unicode."""
        tokens = self._tokens(*self._tokenizer.encode(texts))
        outputs = self._head_outputs(tokens)
        return _encoded(tokens, self._tokenizer, self._words, outputs.get("de"), outputs.get("clf"))

    def _tokens(
        self, ids_F: npt.NDArray[Any], lengths_B: Sequence[int] | npt.NDArray[np.int64]
    ) -> Tokens:
        offsets = np.concatenate([[0], np.cumsum(lengths_B)]).astype(np.int64)
        return Tokens(
            ids_F,
            offsets,
            self._tokenizer.vocab_size,
            self._tokenizer.pad_id,
            self._tokenizer.max_length,
        )

    def _head_outputs(self, tokens: Tokens) -> dict[str, Floats]:
        """Output of each head by name, float32 [B, D]."""
        x_BW = np.concatenate([part(tokens) for part in self._parts], axis=1)
        if self._residual:
            from scipy.special import erf

            (first_WW, first_W), (last_WW, last_W) = self._residual
            y_BW = x_BW @ first_WW + first_W
            gelu_BW = (y_BW * 0.5 * (1 + erf(y_BW / np.sqrt(2)))).astype(np.float32)
            x_BW = x_BW + gelu_BW @ last_WW + last_W
        outputs = {
            name: x_BW if layer is None else x_BW @ layer[0] + layer[1]
            for name, layer in self._heads.items()
        }
        if "de" in outputs:
            de_BD = np.tanh(outputs["de"]) if self._heads["de"] is not None else outputs["de"]
            outputs["de"] = _normalised(de_BD) if self._normalize else de_BD
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
        threads: threads of one call; 0: see `cores.num_threads`.

    Raises:
        ConfigError: no such runtime; "onnx" or "onnx-int8" if the bundle has no graph or
        onnxruntime is not installed.
        ArtifactError: weights are damaged, or do not match the model's configuration or tokenizer.
    """
    if runtime not in RUNTIMES:
        raise ConfigError(
            "no such runtime", where="runtime", got=runtime, expected=", ".join(RUNTIMES)
        )
    threads = num_threads(threads)
    about = bundle.about
    if runtime != "torch" and (runtime != "auto" or str(getattr(about, "device", "cpu")) == "cpu"):
        try:
            config = (
                about if isinstance(about, ModelConfig) else ModelConfig.read(bundle.path / "model")
            )
            return FastEncoder(config, bundle.words, int8=runtime != "onnx", threads=threads)
        except UnidecError as error:
            if runtime != "auto" or isinstance(error, ArtifactError):
                raise
            log.warning("queries are encoded by torch: %s", str(error).replace("\n", ";"))
    import torch

    torch.set_num_threads(threads)
    return ModelEncoder(bundle.model, bundle.words)


def _transformer_part(graph: Path, width: int, threads: int) -> Part:
    """A transformer in onnxruntime. It encodes a few texts of similar length at a time, so that
    there is little padding and activations stay in the cache.

    Raises:
        ConfigError: the graph is missing, or onnxruntime is not installed.
    """
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            f"onnxruntime cannot be used: {error}",
            where="runtime",
            fix="pip install 'unidec-xmc[serve]', or runtime: torch",
        ) from error
    if not graph.is_file():
        raise ConfigError(
            "this bundle has no ONNX graph of its transformer",
            where=str(graph),
            fix="write the bundle again with this version (unidec index build), or runtime: torch",
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # errors only: its warnings are about shapes that it infers itself
    options.log_severity_level = 3
    for pool in ("intra_op", "inter_op"):  # threads that wait must not take cores from others
        options.add_session_config_entry(f"session.{pool}.allow_spinning", "0")
    # processors without VNNI add pairs of 8-bit products in 16 bits, which overflow; the exact
    # product is slower
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(
        str(graph),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["SkipLayerNormFusion"],  # the fused operator takes three times as long
    )

    def encode(tokens: Tokens) -> Floats:
        out_BD = np.empty((len(tokens), width), dtype=np.float32)
        for rows in length_chunks(tokens.lengths(), CHUNK_TEXTS):
            ids_BT, mask_BT = tokens.batch(rows)
            out_BD[rows] = session.run(
                None, {"input_ids": ids_BT, "attention_mask": mask_BT.astype(np.int64)}
            )[0]
        return out_BD

    return encode


def _bag_part(about: ModelConfig, arrays: Mapping[str, npt.NDArray[Any]]) -> Part:
    """`model.encoder.BagEncoder` in numpy, one text at a time, so that results do not depend on the
    batch at all.
    """
    head = about.encoder.bag_head
    num_words = about.encoder.bag_words
    names = [
        f"encoder.bag.{name}" for name in ("embedding.weight", "log_weight.weight", "continues")
    ]
    num_rows = about.num_tokens + num_words
    for name, expected in zip(
        names, ((num_rows, about.width), (num_rows, 1), (about.num_tokens,)), strict=True
    ):
        if (num_words or name != names[2]) and arrays[name].shape != expected:
            raise ValueError(f"{name}: shape {arrays[name].shape}, expected {expected}")
    embedding_VD: Floats = arrays[names[0]]
    weight_V: Floats = np.exp(arrays[names[1]][:, 0])

    def encode(tokens: Tokens) -> Floats:
        flat_F = tokens.ids
        lengths_B = np.diff(tokens.offsets)
        if num_words:
            flat_F, lengths_B = with_words(
                flat_F.astype(np.int64), lengths_B, arrays[names[2]], num_words
            )
        sums = np.empty((len(lengths_B), 2 if head else 1, embedding_VD.shape[1]), dtype=np.float32)
        ends_B = np.cumsum(lengths_B)
        for text, (start, end) in enumerate(zip(ends_B - lengths_B, ends_B, strict=True)):
            ids = flat_F[start:end]
            rows = embedding_VD[ids]
            weights = weight_V[ids]
            np.dot(weights, rows, out=sums[text, 0])
            if head:
                np.dot(weights[:head], rows[:head], out=sums[text, 1])
        return _normalised(sums).reshape(len(sums), sums.shape[1] * sums.shape[2])

    return encode


def _linear(arrays: Mapping[str, npt.NDArray[Any]], name: str) -> tuple[Floats, Floats]:
    """Weight [in, out], contiguous, and bias of a linear layer."""
    return np.ascontiguousarray(arrays[f"{name}.weight"].T), arrays[f"{name}.bias"]


def _normalised(x: Floats) -> Floats:
    """Scale the last dimension to unit length, as torch.nn.functional.normalize."""
    length = np.sqrt(np.einsum("...d,...d->...", x, x))[..., None]
    return x / np.maximum(length, np.float32(1e-12))


def _encoded(
    tokens: Tokens,
    tokenizer: TextTokenizer,
    words: WordSpace | None,
    de_BD: Floats | None,
    clf_BD: Floats | None,
) -> Encoded:
    """Combine tokens and head outputs into `Encoded`."""
    flat_F = tokens.ids
    offsets = tokens.offsets
    unknown_B = np.diff(np.concatenate([[0], np.cumsum(flat_F == tokenizer.unknown_id)])[offsets])
    words_BF = None if words is None else words.vectors(flat_F.astype(np.int64), offsets)
    return Encoded(de_BD, clf_BD, words_BF, np.diff(offsets) - tokenizer.num_specials, unknown_B)
