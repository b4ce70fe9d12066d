"""Builds an encoder's inputs from rows of tokenised texts: with numpy, then copied to the device.

Legend: B texts, N texts of a source, F tokens of all texts, U distinct tokens, D width of the
transformer, W width of the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unidec.data.chunks import GPU_CHUNK_TOKENS, LONG, length_chunks
from unidec.data.tokens import Tokens, places
from unidec.model.encoder import BagEncoder, EncoderInput, TextEncoder
from unidec.model.packed import Packed, Padded
from unidec.model.pairs import to_device

Parts = Sequence[tuple[str, Tokens, np.ndarray]]  # source, its tokens, rows int64
# Tokens of a packed sequence; a GPU is no faster with more, and memory for activations is limited.
PACK_TOKENS = 1 << 16


@dataclass(frozen=True)
class InputBuilder:
    """Builds inputs of an encoder.

    Attributes:
        frozen_vectors: by source, cached vectors float [N, D] of a transformer that is frozen as a
            whole.
        frozen_outputs: by source, cached outputs float [N, W] of an encoder that is frozen as a
            whole.
        packs: whether the transformer reads packed texts (`unidec.model.packed.can_pack`).
    """

    encoder: TextEncoder
    device: torch.device
    frozen_vectors: Mapping[str, np.ndarray] = field(default_factory=dict)
    frozen_outputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    packs: bool = False

    @property
    def chunk_tokens(self) -> int:
        """Padded tokens up to which a chunk has more than `CHUNK_TEXTS` texts; 0: never."""
        return GPU_CHUNK_TOKENS if self.device.type == "cuda" else 0

    def __call__(self, parts: Parts) -> EncoderInput:
        """Input for rows of several sources, in the given order, from caches where they exist."""
        if not self.encoder.frozen:
            return self.texts(parts)
        output_BW = self._cached(self.frozen_outputs, parts)
        if output_BW is None:
            output_BW = self.encoder.frozen_output(self.texts(parts))
        return EncoderInput(len(output_BW), output_BW=output_BW)

    def texts(self, parts: Parts) -> EncoderInput:
        """Input from which the encoder computes its output, even if it is frozen."""
        encoder = self.encoder
        fields: dict[str, Any] = {}
        vector_BD = self._cached(self.frozen_vectors, parts) if encoder.takes_vectors else None
        if vector_BD is not None:
            fields["vector_BD"] = vector_BD
        elif encoder.transformer is not None:
            fields |= self._packed(parts) if self.packs else self._padded(parts)
        if encoder.bag is not None:
            fields |= self._features(encoder.bag, parts)
        return EncoderInput(sum(len(rows) for _, _, rows in parts), **fields)

    def read_lengths(self, tokens: Tokens, rows: np.ndarray) -> np.ndarray:
        """Lengths by which texts are grouped for padding: if some may be `LONG`, only tokens that
        the transformer reads count.
        """
        lengths_B = tokens.lengths(rows)
        most = self.encoder.settings.transformer_tokens
        return np.minimum(lengths_B, most) if most and tokens.max_length > LONG else lengths_B

    def _cached(self, caches: Mapping[str, np.ndarray], parts: Parts) -> Tensor | None:
        """Cached values of all texts; None: not all sources have a cache."""
        if not all(name in caches for name, _, _ in parts):
            return None
        return self._to(np.concatenate([caches[name][rows] for name, _, rows in parts]))

    def _features(self, bag: BagEncoder, parts: Parts) -> dict[str, Tensor]:
        """The bag's fields of an input."""
        token_F, lengths_B = joined(parts)
        feature_F, lengths_B = bag.features(token_F, lengths_B)
        unique_U, local_F = np.unique(feature_F, return_inverse=True)
        offsets_B = np.cumsum(lengths_B) - lengths_B
        arrays = {
            "unique_U": unique_U,
            "local_F": local_F,
            "offsets_B": offsets_B.astype(np.int64),
        }
        if bag.head:
            arrays["head_F"] = places(lengths_B) < bag.head
        return {name: self._to(array) for name, array in arrays.items()}

    def _padded(self, parts: Parts) -> dict[str, Any]:
        """The transformer's fields of an input: chunks of texts of similar length."""
        most = self.encoder.settings.transformer_tokens
        chunks = []
        order = []
        first = 0
        for _, texts, rows in parts:
            tokens = texts.for_transformer
            for some_B in length_chunks(self.read_lengths(tokens, rows), tokens=self.chunk_tokens):
                ids_BT, mask_BT = tokens.batch(rows[some_B], most)
                chunks.append(Padded(self._to(ids_BT), self._to(mask_BT)))
                order.append(some_B + first)
            first += len(rows)
        if not chunks:
            return {}
        place_B = np.argsort(np.concatenate(order))
        return {"chunks": tuple(chunks), "place_B": self._to(place_B)}

    def _packed(self, parts: Parts) -> dict[str, Any]:
        """The transformer's fields of an input: few packed sequences, mostly one. If activations
        are recomputed, sequences are smaller, as one of them is recomputed at a time.
        """
        encoder = self.encoder
        parts = [(name, tokens.for_transformer, rows) for name, tokens, rows in parts]
        token_F, lengths_B = joined(parts, encoder.settings.transformer_tokens)
        most = max(tokens.max_length for _, tokens, _ in parts)
        end_B = np.cumsum(lengths_B)
        place_F = places(lengths_B)
        pack_B = (end_B - 1) // (GPU_CHUNK_TOKENS if encoder.recompute else PACK_TOKENS)
        chunks = []
        for pack in np.unique(pack_B):
            is_in_B = pack_B == pack
            is_in_F = np.repeat(is_in_B, lengths_B)
            bounds = np.cumsum([0, *lengths_B[is_in_B]], dtype=np.int32)
            ids_F = self._to(token_F[is_in_F])
            chunks.append(Packed(ids_F, self._to(place_F[is_in_F]), self._to(bounds), most))
        return {"chunks": tuple(chunks)}

    def _to(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)


def joined(parts: Parts, most: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int64 [F] of all texts, and the number of tokens of each, int64 [B]; `most` as in
    `Tokens.ragged`.
    """
    flats = []
    lengths = []
    for _, tokens, rows in parts:
        flat, offsets = tokens.ragged(rows, most)
        flats.append(flat)
        lengths.append(np.diff(offsets))
    return np.concatenate(flats), np.concatenate(lengths)
