"""Answers kept for repeated queries: the least recently asked goes first; bounded in number and in bytes.

The key holds the bundle's hash: an answer is never given for another bundle, whatever was swapped meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

BYTES_EACH = 4096  # room on average: an answer of five labels takes about 800 bytes
_OVERHEAD = 400  # of an entry beside text and answer: key, links, objects


class AnswerCache:
    """Not for several threads: the event loop alone asks it.

    Args:
        size: answers kept; 0: none.
    """

    def __init__(self, size: int) -> None:
        self.size, self.room = size, size * BYTES_EACH
        self.largest = min(16 * BYTES_EACH, self.room // 8)
        self.num_bytes = 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Any | None:
        """The answer, which is now the most recent one; None where it is not kept."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, answer: Any, num_bytes: int) -> None:
        """Keep an answer; one that would push out many others is not kept.

        Args:
            num_bytes: of answer and key.
        """
        cost = num_bytes + _OVERHEAD
        if cost > self.largest:
            return
        before = self._kept.pop(key, None)
        if before is not None:
            self.num_bytes -= before[1]
        self._kept[key] = (answer, cost)
        self.num_bytes += cost
        while len(self._kept) > self.size or self.num_bytes > self.room:
            self.num_bytes -= self._kept.popitem(last=False)[1][1]
