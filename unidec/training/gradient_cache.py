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
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unidec.data.tokens import Tokens, length_chunks
from unidec.model.encoder import EncoderInput, InputBuilder, TextEncoder
from unidec.model.pairs import to_device
from unidec.model.row_table import RowTable
from unidec.training.precision import random_state, restore_random_state

TextParts = list[tuple[str, Tokens, np.ndarray]]
Context = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class TextChunks:
    """The texts of a step, cut into chunks of similar length; no chunk mixes queries and labels.

    Attributes:
        num_texts: B.
        chunks: (places int64 [C] among the step's texts, input) of each chunk.
        unique_U: int64, distinct token ids of all texts, ascending, each once; None without a bag.
    """

    num_texts: int
    chunks: tuple[tuple[Tensor, EncoderInput], ...]
    unique_U: Tensor | None = None


def cut_texts(parts: TextParts, build: InputBuilder, size: int, device: torch.device) -> TextChunks:
    """Cut a step's texts, (name of the source, its tokens, rows int64) each, into chunks of at most `size`."""
    chunks: list[tuple[Tensor, EncoderInput]] = []
    first = 0
    for name, tokens, rows in parts:
        cut = length_chunks(tokens.lengths(rows), size)
        chunks += [(to_device(places + first, device), build([(name, tokens, rows[places])])) for places in cut]
        first += len(rows)
    if not chunks:  # fewer texts than ranks: none for this one, which takes part in the others' sums all the same
        chunks.append((to_device(np.empty(0, dtype=np.int64), device), build(parts)))
    if all(given.unique_U is None for _, given in chunks):
        return TextChunks(first, tuple(chunks))
    # found on the host once more: on the device the host would have to wait for how many there are
    bag, ragged = build.encoder.bag, [tokens.ragged(rows) for _, tokens, rows in parts]
    assert bag is not None
    used = [np.unique(bag.features(flat, np.diff(offsets))[0]) for flat, offsets in ragged]
    return TextChunks(first, tuple(chunks), to_device(np.unique(np.concatenate(used)), device))


def encode_texts(
    encoder: TextEncoder,
    texts: EncoderInput | TextChunks,
    context: Context,
    parallel: Callable[[EncoderInput], Tensor] | None = None,
) -> tuple[Tensor, Callable[[Tensor], None]]:
    """Vectors of a step's texts, in one pass or in chunks, and what computes all gradients of a loss on them.

    Args:
        context: entered around each pass (autocast), a new one for each: it keeps casts of the weights until it ends,
            and those of a pass without a graph have none (some versions of torch would take them for the other pass).
        parallel: the encoder as `Ranks.data_parallel` gives it, of several ranks: it makes the last pass with a graph.

    Returns:
        float32 [B, W], in chunks a leaf; and what is called with the loss, 0-d. Chunk by chunk that leaves the random
        state as it was.
    """
    if not isinstance(texts, TextChunks):
        with context():
            return (parallel or encoder)(texts), Tensor.backward
    device, states = next(encoder.parameters()).device, []
    x_BW = torch.empty(texts.num_texts, encoder.width, device=device)
    with torch.no_grad(), context():
        for places, chunk in texts.chunks:
            states.append(random_state(device))
            x_BW[places] = encoder(chunk).float()
    x_BW.requires_grad_()

    def backward(loss: Tensor) -> None:
        loss.backward()
        if x_BW.grad is None:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(restore_random_state, random_state(device), device)
            if texts.unique_U is not None:  # chunks gather parts of the rows of all texts
                for table in [module for module in encoder.modules() if isinstance(module, RowTable)]:
                    stack.enter_context(table.parts(texts.unique_U))
            for number, (state, (places, chunk)) in enumerate(zip(states, texts.chunks, strict=True), 1):
                restore_random_state(state, device)
                with context():
                    x_CW = (parallel if parallel and number == len(states) else encoder)(chunk)
                if not x_CW.requires_grad:  # nothing of the encoder trains
                    return
                x_CW.backward(x_BW.grad[places].to(x_CW.dtype))

    return x_BW, backward
