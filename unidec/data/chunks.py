"""Divides rows into blocks, and texts into chunks that are padded to the same length.

Shape legend: B texts, P entries, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

CHUNK_TEXTS = 256
"""Number of texts that are padded together in training."""
GPU_CHUNK_TOKENS = CHUNK_TEXTS * 32
"""On a GPU, chunks of short texts may have up to this number of tokens, padding included:
otherwise the GPU waits for the host to launch kernels. Measured: benchmarks/results/gpu.md.
"""

LONG = 512
"""If a batch has texts of more tokens, its chunks are bounded by their padding and by the cost of
attention over `CHUNK_TEXTS` texts of this length, which is quadratic in the length.
"""


def blocks(count: int, size: int) -> Iterator[slice]:
    """The numbers below `count` in blocks of `size`; the last one may be smaller."""
    for begin in range(0, count, size):
        yield slice(begin, min(begin + size, count))


def offsets_of(sizes: ArrayLike) -> NDArray[np.int64]:
    """Where each of some groups of these sizes begins, in order, and the end of the last: int64
    [G + 1].
    """
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def groups_of(sizes: NDArray[Any]) -> NDArray[np.int64]:
    """The group of each member, for groups of these sizes, in order: int64 [P]."""
    return np.repeat(np.arange(len(sizes)), sizes)


def length_chunks(
    lengths_B: NDArray[np.int64], size: int = CHUNK_TEXTS, tokens: int = 0
) -> Iterator[NDArray[np.int64]]:
    """Indices of the texts in chunks of at most `size`, sorted by length to keep padding short.

    Args:
        tokens: a chunk may have more than `size` texts if it has at most this number of tokens,
            padding included. Chunks of long texts are smaller (`LONG`).
    """
    order_B = np.argsort(lengths_B, kind="stable")
    start = 0
    sorted_B = lengths_B[order_B]
    while start < len(order_B):
        count = size
        if tokens:
            # padded tokens of a chunk that ends with each text
            left_B = sorted_B[start:]
            padded_B = np.arange(1, len(left_B) + 1) * left_B
            count = max(size, int(np.searchsorted(padded_B, tokens, side="right")))
        if sorted_B[-1] > LONG:
            count = min(count, _without_much_padding(sorted_B[start : start + count]))
        yield order_B[start : start + count]
        start += count


def _without_much_padding(lengths_B: NDArray[np.int64]) -> int:
    """How many of these texts, sorted by length, form a chunk: its padding may exceed the number of
    its tokens by at most `GPU_CHUNK_TOKENS`, and its attention is bounded (`LONG`).
    """
    num_B = np.arange(1, len(lengths_B) + 1)
    padded_B = num_B * lengths_B
    most_B = 2 * np.cumsum(lengths_B) + GPU_CHUNK_TOKENS
    too_many_B = (padded_B > most_B) | (padded_B * lengths_B > CHUNK_TEXTS * LONG**2)
    return max(int(np.argmax(too_many_B)), 1) if too_many_B.any() else len(lengths_B)


def attention_work(shape: tuple[int, ...]) -> int:
    """Sort key for the work of chunks of shape [C, T], or [F] if packed: the number of tokens, and
    for padded texts longer than `LONG` the number of token pairs in attention.
    """
    return int(np.prod(shape)) * max((LONG, *shape[1:]))
