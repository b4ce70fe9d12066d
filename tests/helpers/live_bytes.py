"""What tensors take on a processor, counted while code runs."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages of all tensors that operations inside the block return: now, and at
    most.

    What an operation allocates and frees within itself is not seen, nor are arrays of numpy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._bytes: dict[int, int] = {}

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that was there before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._bytes:
            self._bytes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._bytes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out
