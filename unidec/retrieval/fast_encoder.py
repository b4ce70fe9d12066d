"""Query texts as vectors without torch: onnxruntime for a transformer, numpy for a bag of tokens and the heads.

Weights are the loaded model's own; nothing is read but the bundle. A transformer runs over a few texts of similar
length at a time: little padding, and what a layer works on stays in the cache.

Legend: B texts, T tokens of the longest text, F tokens of all texts, V tokens of the vocabulary, D width of a part, W
width of all parts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from unidec.data.tokens import Tokens, length_chunks, load_tokenizer
from unidec.errors import ArtifactError, UnidecError
from unidec.model.arrays import Bag, ModelArrays
from unidec.model.onnx_graph import linear, stack_graph
from unidec.model.onnx_int8 import Int8Products, watching_graph
from unidec.model.transformer_parts import Linear, TransformerParts
from unidec.model.words import with_words
from unidec.retrieval.encoded import Encoded, as_encoded
from unidec.retrieval.words import WordSpace

Floats = npt.NDArray[np.float32]
CHUNK_TEXTS = 8  # texts that go through a transformer together: measured, docs/query-path.md
_LEAST = 1e-12  # torch.nn.functional.normalize's: a vector that is shorter is divided by this


class FastEncoder:
    """A model's queries without torch.

    Args:
        model: encoder and heads.
        words: of the bundle's training queries, where they are compared by words.
        int8: the transformer's linear layers in 8 bits.
        threads: of one call.
        texts: to find the scales of 8 bits on, such as labels' titles.

    Attributes:
        name: "onnx", "onnx-int8", or "bag" where there is no transformer.

    Raises:
        UnsupportedModel: an architecture that is not known here.
        UnidecError: onnx or onnxruntime is not installed.
        ArtifactError: texts have tokens or places that the weights do not have.
    """

    def __init__(
        self, model: ModelArrays, words: WordSpace | None, *, int8: bool = False, threads: int = 1,
        texts: Sequence[str] = (),
    ) -> None:  # fmt: skip
        # one for good: what a bundle is does not change, and to ask for it again takes longer than a short text
        self._tokenizer, self._words = load_tokenizer(model.tokenizer_folder, model.max_length), words
        self._parts: list[Callable[[Tokens], Floats]] = []
        self.name = "bag"
        if (transformer := model.transformer) is not None:
            self._check_rows("tokens", self._tokenizer.vocab_size, len(transformer.words_VD))
            self._check_rows("places", transformer.first_place + model.max_length, len(transformer.places_PD))
            self.name = "onnx-int8" if int8 else "onnx"
            seen = self._tokens(texts) if int8 else None
            self._parts.append(_Transformer(transformer, model.encoder.pooling, model.unit_vectors, threads, seen))
        if (bag := model.bag()) is not None:
            self._check_rows("tokens", self._tokenizer.vocab_size, len(bag.embedding_VD) - bag.num_words)
            self._parts.append(_BagOfTokens(bag))
        self._residual = None if (residual := model.residual()) is None else [_weights(layer) for layer in residual]
        self._heads = {name: _weights(head) for name, head in model.heads().items()}
        self._weight_WO = np.concatenate([weight for weight, _ in self._heads.values()], axis=1)
        self._bias_O = np.concatenate([bias for _, bias in self._heads.values()])

    def encode(self, texts: Sequence[str]) -> Encoded:
        """See `QueryEncoder.encode`."""
        tokens = self._tokens(texts)
        parts = [part(tokens) for part in self._parts]
        x_BW = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        if self._residual is not None:
            (first_WW, first_W), (last_WW, last_W) = self._residual
            x_BW = x_BW + _gelu(x_BW @ first_WW + first_W) @ last_WW + last_W
        both_BO = x_BW @ self._weight_WO + self._bias_O
        found, start = {}, 0
        for name, (weight_WD, _) in self._heads.items():
            found[name] = both_BO[:, start : start + weight_WD.shape[1]]
            start += weight_WD.shape[1]
        if "de" in found:
            found["de"] = _normalised(np.tanh(found["de"]))
        if "clf" in found:
            found["clf"] = np.ascontiguousarray(found["clf"])
        return as_encoded(tokens, self._tokenizer, self._words, found.get("de"), found.get("clf"))

    def _check_rows(self, what: str, needed: int, there: int) -> None:
        """Now, rather than when the first such text is asked."""
        if needed > there:
            raise ArtifactError(
                f"the tokenizer gives {what} that the model's weights do not have", where=str(self._tokenizer.file),
                got=needed, expected=f"at most {there}",
            )  # fmt: skip

    def _tokens(self, texts: Sequence[str]) -> Tokens:
        """As `encode_texts`."""
        tokenizer = self._tokenizer
        flat, length_B = tokenizer.encode(texts)
        offsets = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum(length_B, out=offsets[1:])
        return Tokens(flat, offsets, tokenizer.vocab_size, tokenizer.pad_id, tokenizer.max_length)


class _BagOfTokens:
    """`model.encoder.BagEncoder` in numpy, text by text: the batch does not change a bit."""

    def __init__(self, bag: Bag) -> None:
        self._embedding_VD, self._weight_V = bag.embedding_VD, bag.weight_V
        self._head, self._num_words, self._continues_V = bag.head, bag.num_words, bag.continues_V

    def __call__(self, tokens: Tokens) -> Floats:
        flat_F, lengths_B = tokens.ids, np.diff(tokens.offsets)
        if self._continues_V is not None:
            flat_F, lengths_B = with_words(flat_F.astype(np.int64), lengths_B, self._continues_V, self._num_words)
        width = self._embedding_VD.shape[1]
        out_BW = np.empty((len(lengths_B), width * (2 if self._head else 1)), dtype=np.float32)
        start = 0
        for place, length in enumerate(lengths_B.tolist()):
            own = flat_F[start : start + length]
            rows, weights = self._embedding_VD[own], self._weight_V[own]
            np.dot(weights, rows, out=out_BW[place, :width])
            if self._head:
                np.dot(weights[: self._head], rows[: self._head], out=out_BW[place, width:])
            start += length
        halves = out_BW.reshape(-1, width)
        return _normalised(halves).reshape(out_BW.shape)


class _Transformer:
    """`model.encoder.TransformerEncoder` in onnxruntime.

    Args:
        unit: vectors are brought to unit length.
        seen: texts to find the scales of 8 bits on; None: 32 bits.
    """

    def __init__(self, parts: TransformerParts, pooling: str, unit: bool, threads: int, seen: Tokens | None) -> None:
        _check_installed()
        self._parts, self._unit, self._threads = parts, unit, threads
        product: Any = linear
        if seen is not None:
            watching = self._session(watching_graph(self._parts))
            most: list[Floats] = []
            for feed, _ in self._feeds(seen):
                found = watching.run(None, feed)
                most = [np.maximum(*pair) for pair in zip(most, found, strict=True)] if most else found
            product = Int8Products(most)
        self._session_of_all = self._session(stack_graph(parts, pooling, product))
        self._parts = replace(parts, blocks=())  # the session has weights of its own

    def __call__(self, tokens: Tokens) -> Floats:
        out_BD = np.empty((len(tokens), self._parts.words_VD.shape[1]), dtype=np.float32)
        for feed, rows in self._feeds(tokens):
            out_BD[rows] = self._session_of_all.run(None, feed)[0]
        return _normalised(out_BD) if self._unit else out_BD

    def _feeds(self, tokens: Tokens) -> Iterator[tuple[dict[str, Floats], npt.NDArray[np.int64]]]:
        """Inputs of a session and the rows of their texts."""
        for rows in length_chunks(tokens.lengths(), CHUNK_TEXTS):
            ids_BT, mask_BT = tokens.batch(rows)
            yield {"hidden": self._parts.hidden(ids_BT), "mask": mask_BT.astype(np.float32)}, rows

    def _session(self, graph: Any) -> Any:
        import onnxruntime  # type: ignore[import-untyped]

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self._threads, 1
        options.log_severity_level = 3  # its own warnings are of shapes that it finds itself
        # threads wait in a loop for each other inside a call, which takes microseconds; between calls they sleep
        options.add_session_config_entry("session.force_spinning_stop", "1")
        return onnxruntime.InferenceSession(
            graph.SerializeToString(), options, providers=["CPUExecutionProvider"],
            disabled_optimizers=["SkipLayerNormFusion"],  # three times as slow as the two steps that it makes one
        )  # fmt: skip


def _check_installed() -> None:
    try:
        for name in ("onnx", "onnxruntime"):
            importlib.import_module(name)
    except ImportError as error:
        raise UnidecError(
            f"onnxruntime cannot be used: {error}", fix="pip install 'unidec-xmc[serve]', or serve.runtime: torch"
        ) from error


def _weights(layer: Linear) -> tuple[Floats, Floats]:
    """A linear layer's weight [in, out], contiguous, and bias."""
    return np.ascontiguousarray(layer.weight_IO), layer.bias_O


def _normalised(x_BD: Floats) -> Floats:
    """As torch.nn.functional.normalize."""
    length_B1 = np.sqrt(np.einsum("bd,bd->b", x_BD, x_BD))[:, None]
    return x_BD / np.maximum(length_B1, np.float32(_LEAST))


def _gelu(x: Floats) -> Floats:
    from scipy.special import erf

    return (x * 0.5 * (1 + erf(x / np.sqrt(2)))).astype(np.float32)
