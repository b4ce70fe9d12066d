"""Ranks: the processes of one training on torch's own engine (`torchrun`), or this process alone.

Legend: R rows held by one rank, G rows of all ranks together, D width.

Every rank draws the same batch and the same pool, encodes its part of both, and gathers the others' embeddings: the
loss, computed by each rank over the whole pool, is the loss of one rank alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """The processes that train together; the default is this process alone, for which every method is free.

    Attributes:
        rank: number of this process, from 0.
        world: how many there are.
    """

    rank: int = 0
    world: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes and speaks for all."""
        return self.rank == 0

    def part(self, count: int) -> tuple[int, int]:
        """Begin and end of this rank's contiguous part of `count` things; parts differ by at most one."""
        return count * self.rank // self.world, count * (self.rank + 1) // self.world

    def gather(self, x_RD: Tensor, sizes: list[int]) -> Tensor:
        """Rows of all ranks [G, D], in the order of ranks; backward takes this rank's slice of the gradient."""
        return x_RD

    def barrier(self) -> None:
        """Wait for all."""


ALONE = Ranks()
