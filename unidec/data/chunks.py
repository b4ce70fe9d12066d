"""Which texts are padded together.

Shape legend: B texts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

CHUNK_TEXTS = 256
"""Number of texts that are padded together in training."""
GPU_CHUNK_TOKENS = CHUNK_TEXTS * 32
"""On a GPU more short texts are padded together, up to this number of tokens with padding:
otherwise the GPU waits for the host to launch kernels. Measured: benchmarks/results/gpu.md.
"""

LONG = 512
"""If a batch has texts of more tokens, its chunks are bounded by their padding and by the attention
of `CHUNK_TEXTS` texts of this length: it grows with the square of the length.
"""


def length_chunks(
    lengths_B: NDArray[np.int64], size: int = CHUNK_TEXTS, tokens: int = 0
) -> Iterator[NDArray[np.int64]]:
    """Indices of the texts, sorted by length, in chunks of at most `size`: so padding is short.

    Args:
        tokens: a chunk of more than `size` texts is allowed if it has at most this number of tokens
            with padding. Chunks of long texts are smaller (`LONG`).
    """
    order_B = np.argsort(lengths_B, kind="stable")
    start = 0
    sorted_B = lengths_B[order_B]
    while start < len(order_B):
        count = size
        if tokens:
            # tokens of the chunk up to each text
            left_B = sorted_B[start:]
            padded_B = np.arange(1, len(left_B) + 1) * left_B
            count = max(size, int(np.searchsorted(padded_B, tokens, side="right")))
        if sorted_B[-1] > LONG:
            count = min(count, _without_much_padding(sorted_B[start : start + count]))
        yield order_B[start : start + count]
        start += count


def _without_much_padding(lengths_B: NDArray[np.int64]) -> int:
    """How many of these texts, shortest first, are padded together: padding takes at most as many
    tokens as the texts, beyond `GPU_CHUNK_TOKENS`.
    """
    num_B = np.arange(1, len(lengths_B) + 1)
    padded_B = num_B * lengths_B
    most_B = 2 * np.cumsum(lengths_B) + GPU_CHUNK_TOKENS
    too_many_B = (padded_B > most_B) | (padded_B * lengths_B > CHUNK_TEXTS * LONG**2)
    return max(int(np.argmax(too_many_B)), 1) if too_many_B.any() else len(lengths_B)


def attention_work(shape: tuple[int, ...]) -> int:
    """Orders chunks [C, T], or packed ones [F], by their tokens; of long texts that are padded,
    attention's pairs of tokens decide.
    """
    return int(np.prod(shape)) * max((LONG, *shape[1:]))
