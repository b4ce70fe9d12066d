"""Gradient caching: a step whose texts are encoded in chunks, so that the activations of one chunk are held at a time.

Legend: B texts of a step, C texts of a chunk, U distinct tokens, W width of the encoder.

1. Every chunk is encoded without a graph; what is kept of it are its vectors and the random state it began with.
2. The loss is computed on all vectors together, and its gradient with regard to them.
3. Every chunk is encoded again from its random state, so with the same dropout, and takes its part of that gradient.

The gradient is that of one pass over all chunks; it costs a second forward pass. Source: Gao et al. 2021, "Scaling
Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache), with the replay that DEXML's recipe
needs; the cut is at the encoder's output, the heads and the classifier are computed once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from unidec.data.tokens import Tokens, length_chunks
from unidec.model.encoder import BagEncoder, EncoderInput, InputBuilder, TextEncoder
from unidec.model.row_table import RowTable
from unidec.training.checkpoint import random_state, restore_random_state

TextParts = list[tuple[str, Tokens, np.ndarray]]
Context = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class TextChunks:
    """The texts of a step, cut into chunks of similar length.

    Attributes:
        num_texts: B.
        chunks: (places int64 [C] among the step's texts, input) of each chunk.
        unique_U: int64, distinct token ids of all texts, ascending, each once; None without a bag.
    """

    num_texts: int
    chunks: tuple[tuple[Tensor, EncoderInput], ...]
    unique_U: Tensor | None = None


class ChunkBuilder:
    """Cuts a step's texts into chunks; no chunk mixes queries and labels.

    Args:
        size: texts a chunk, at least 1.
        device: of places and ids.
        kept: rows of labels whose chunks are made once and kept, since every step has them; None: none are.
    """

    def __init__(self, size: int, device: torch.device, kept: np.ndarray | None = None):
        self.size, self.device, self.kept = size, device, kept
        self._kept_part: _Part | None = None

    def __call__(self, parts: TextParts, build: InputBuilder) -> TextChunks:
        """The chunks of a step's texts.

        Args:
            parts: (name of the source, its tokens, rows int64) each, as `InputBuilder` takes them.
            build: makes each chunk's input.
        """
        made = [self._part(part, build) for part in parts]
        chunks: list[tuple[Tensor, EncoderInput]] = []
        first = 0
        for part in made:
            chunks += [(places + first, given) for places, given in part.chunks]
            first += part.num_texts
        unique_U = None
        if any(given.unique_U is not None for _, given in chunks):
            ids_U = functools.reduce(np.union1d, [part.unique_U for part in made])
            unique_U = torch.from_numpy(ids_U).to(self.device)
        return TextChunks(first, tuple(chunks), unique_U)

    def _part(self, part: tuple[str, Tokens, np.ndarray], build: InputBuilder) -> _Part:
        name, tokens, rows = part
        is_kept = self.kept is not None and name == "labels" and np.array_equal(rows, self.kept)
        if is_kept and self._kept_part is not None:
            return self._kept_part
        cut = length_chunks(tokens.lengths(rows), self.size)
        chunks = [(torch.from_numpy(places).to(self.device), build([(name, tokens, rows[places])])) for places in cut]
        made = _Part(len(rows), chunks, _distinct(tokens, rows, build.encoder.bag))
        if is_kept:
            self._kept_part = made
        return made


@dataclass(frozen=True)
class _Part:
    """Rows of one source: how many, their chunks with places among them, their distinct token ids int64 [U]."""

    num_texts: int
    chunks: list[tuple[Tensor, EncoderInput]]
    unique_U: np.ndarray


def _distinct(tokens: Tokens, rows: np.ndarray, bag: BagEncoder | None) -> np.ndarray:
    """Rows of the bag's table that some texts use, int64 [U], ascending, each once."""
    flat, offsets = tokens.ragged(rows)
    if bag is not None:
        flat, _ = bag.features(flat, np.diff(offsets))
    seen_V = np.zeros(1 + int(flat.max(initial=-1)), dtype=bool)  # flags: a tenth of the time of sorting the tokens
    seen_V[flat] = True
    return np.flatnonzero(seen_V)


class Encoding:
    """Vectors of a step's texts in one pass; `backward` is the loss's own.

    Attributes:
        x_BW: the encoder's outputs, float32, with their graph.
    """

    def __init__(self, encoder: TextEncoder, texts: EncoderInput, context: Context):
        with context():
            self.x_BW: Tensor = encoder(texts)

    def backward(self, loss: Tensor) -> None:
        """Gradients of everything that trains."""
        loss.backward()


class CachedEncoding:
    """Vectors of a step's texts, chunk by chunk; `backward` encodes each chunk a second time.

    Args:
        encoder: of the model; in training its tables must not have been gathered from in this step.
        texts: of the step.
        context: entered around each pass (autocast), a new one for each: it keeps casts of the weights until it ends,
            and those of a pass without a graph have none (some versions of torch would take them for the other pass).

    Attributes:
        x_BW: the encoder's outputs, float32 [B, W], a leaf.
    """

    def __init__(self, encoder: TextEncoder, texts: TextChunks, context: Context):
        self.encoder, self.texts, self.context = encoder, texts, context
        self.device = next(encoder.parameters()).device
        self._states = []
        x_BW: Tensor | None = None
        with torch.no_grad(), context():
            for places, chunk in texts.chunks:
                self._states.append(random_state(self.device))
                x_CW = encoder(chunk)
                if x_BW is None:
                    x_BW = x_CW.new_empty(texts.num_texts, x_CW.shape[1], dtype=torch.float32)
                x_BW[places] = x_CW.float()
        if x_BW is None:
            x_BW = torch.zeros(0, encoder.width, device=self.device)
        self.x_BW: Tensor = x_BW.requires_grad_()

    def backward(self, loss: Tensor) -> None:
        """Gradients of everything that trains: behind the vectors from the loss's graph, before them chunk by chunk.

        The random state is afterwards what it was before.
        """
        loss.backward()
        grad_BW = self.x_BW.grad
        if grad_BW is None:
            return
        after = random_state(self.device)
        try:
            with self._tables():
                self._encode_again(grad_BW)
        finally:
            restore_random_state(after, self.device)

    def _encode_again(self, grad_BW: Tensor) -> None:
        for state, (places, chunk) in zip(self._states, self.texts.chunks, strict=True):
            restore_random_state(state, self.device)
            with self.context():
                x_CW = self.encoder(chunk)
            if not x_CW.requires_grad:  # nothing of the encoder trains
                return
            x_CW.backward(grad_BW[places].to(x_CW.dtype))

    @contextlib.contextmanager
    def _tables(self) -> Iterator[None]:
        """Within: chunks gather parts of the rows of all texts from the encoder's tables."""
        with contextlib.ExitStack() as stack:
            if self.texts.unique_U is not None:
                for table in _tables_of(self.encoder):
                    stack.enter_context(table.parts(self.texts.unique_U))
            yield


def _tables_of(encoder: nn.Module) -> list[RowTable]:
    return [module for module in encoder.modules() if isinstance(module, RowTable)]


def encode_texts(encoder: TextEncoder, texts: EncoderInput | TextChunks, context: Context) -> Encoding | CachedEncoding:
    """Vectors of a step's texts, in one pass or in chunks."""
    if isinstance(texts, TextChunks):
        return CachedEncoding(encoder, texts, context)
    return Encoding(encoder, texts, context)
