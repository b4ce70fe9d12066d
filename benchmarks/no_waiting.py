"""Host synchronisations that need no GPU to be seen: a mode that refuses every operator that would
wait for one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# values that are looked at, and results whose size depends on values
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique",
    "unique_",
    "is_nonzero",
    "equal.",
    "item",
)


class NoWaiting(TorchDispatchMode):
    """Refuses, with an AssertionError, what would make a GPU's host wait.

    On a processor all tensors are on one device, so copies between host and device are seen only of
    tensors on torch's device "meta", in place of a GPU: refused unless they are `non_blocking`, and
    to the host into a tensor that is there (`copy_`; it stays as it was, there are no values). So
    is `torch.where` of a number on the host beside tensors that are not: torch copies such a number
    to the device and waits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        kwargs = kwargs or {}
        by_mask = name.startswith("index") and any(
            index is not None and index.dtype == torch.bool
            for given in args
            if isinstance(given, (list, tuple))
            for index in given
            if isinstance(index, Tensor)
        )
        assert not by_mask and not name.startswith(WAITING), f"{func} waits for the device"
        if name.startswith(("where", "copy_", "_to_copy")):
            return _copied(name, func, args, kwargs)
        return func(*args, **kwargs)


def _copied(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    to = args[0].device if name.startswith("copy_") else kwargs.get("device")
    places = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    if to is not None:
        places.add(to.type)
    if len(places) > 1:
        asynchronous = kwargs.get("non_blocking") or (
            name.startswith("copy_") and args[2:3] == (True,)
        )
        assert asynchronous, f"{func} between host and device waits"
        if to.type == "cpu":
            assert name.startswith("copy_"), (
                f"{func} to the host: its values are read before they have arrived"
            )
            return args[0]
    return func(*args, **kwargs)
