"""Gradient caching: the texts of a step are encoded in chunks, with the activations of one chunk in
memory at a time.

Legend: B texts of a step, C texts of a chunk, U distinct tokens, W width of the encoder.

1. Each chunk is encoded without a graph; its vectors and the random state before it are kept.
2. The loss is computed on all vectors together, and its gradient with regard to them.
3. Each chunk is encoded again from its random state, so with the same dropout, and its part of that
   gradient is propagated through the encoder.

The gradient equals that of one pass over all texts, at the cost of a second forward pass. Source:
Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"
(GradCache), with the replay of the random state that DEXML's dropout needs. Only the encoder runs
twice; heads and classifier run once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from unidec.data.chunks import length_chunks
from unidec.data.tokens import Tokens
from unidec.model.batch import TextChunks
from unidec.model.encoder import EncoderInput, TextEncoder
from unidec.model.encoder_inputs import InputBuilder, joined
from unidec.model.pairs import to_device
from unidec.model.row_table import RowTable
from unidec.training.precision import random_state, restore_random_state

TextParts = list[tuple[str, Tokens, np.ndarray]]
Context = Callable[[], contextlib.AbstractContextManager[object]]


def cut_texts(parts: TextParts, build: InputBuilder, size: int, device: torch.device) -> TextChunks:
    """Cut a step's texts, (name of the source, its tokens, rows int64) each, into chunks of at most
    `size`.
    """
    chunks: list[tuple[Tensor, EncoderInput]] = []
    first = 0
    for name, tokens, rows in parts:
        for places in length_chunks(tokens.lengths(rows), size):
            chunk = build([(name, tokens, rows[places])])
            chunks.append((to_device(places + first, device), chunk))
        first += len(rows)
    # fewer texts than ranks, none for this rank, which still takes part in the sums over ranks
    if not chunks:
        nowhere = to_device(np.empty(0, dtype=np.int64), device)
        chunks.append((nowhere, build(parts)))
    if all(chunk.unique_U is None for _, chunk in chunks):
        return TextChunks(first, tuple(chunks))
    # computed again on the host: on the device the host would have to wait for their number
    bag = build.encoder.bag
    assert bag is not None
    features, _ = bag.features(*joined(parts))
    return TextChunks(first, tuple(chunks), to_device(np.unique(features), device))


def encode_texts(
    encoder: TextEncoder,
    texts: EncoderInput | TextChunks,
    context: Context,
    parallel: Callable[[EncoderInput], Tensor] | None = None,
) -> tuple[Tensor, Callable[[Tensor], None]]:
    """Vectors of a step's texts, encoded in one pass or in chunks, and the backward function for a
    loss on them.

    Args:
        context: returns the context of a pass (autocast), a new one for each pass: autocast caches
            casts of the weights until it ends, and some versions of torch would reuse those of a
            pass without a graph in one with a graph.
        parallel: with several ranks the result of `Ranks.data_parallel`, used for the last pass
            with a graph.

    Returns:
        float32 [B, W] (with chunks a leaf), and a function that computes all gradients of a loss,
        0-d. With chunks it restores the random state at its end.
    """
    if not isinstance(texts, TextChunks):
        with context():
            return (parallel or encoder)(texts), Tensor.backward
    device = next(encoder.parameters()).device
    states = []
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
            if texts.unique_U is not None:  # each chunk gathers a part of the rows of all texts
                tables = [each for each in encoder.modules() if isinstance(each, RowTable)]
                for table in tables:
                    stack.enter_context(table.parts(texts.unique_U))
            run: Callable[[EncoderInput], Tensor] = encoder
            for state, (places, chunk) in zip(states, texts.chunks, strict=True):
                if parallel is not None and state is states[-1]:  # adds up what came before, too
                    run = parallel
                restore_random_state(state, device)
                with context():
                    x_CW = run(chunk)
                if not x_CW.requires_grad:  # nothing in the encoder trains
                    return
                x_CW.backward(x_BW.grad[places].to(x_CW.dtype))

    return x_BW, backward
