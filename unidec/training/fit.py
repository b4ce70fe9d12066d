"""The one loop over rounds: UniDEC's Algorithm 1.

Every training runs it: the command line, the Prefect flow, comparisons, several ranks, and `unidec.fit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Report = dict[str, Any]


class Rounds(Protocol):
    """What trains: one process, or several that are started for each phase. Phases that are done return at once."""

    @property
    def finished(self) -> bool: ...
    @property
    def round_number(self) -> int: ...
    def cluster(self) -> Report: ...
    def mine(self) -> Report: ...
    def train_round(self) -> Report: ...
    def validate(self) -> Report: ...


Phase = Callable[[str, int, Callable[[], Report]], Report]  # name of the phase, number of the round, its work


def fit(rounds: Rounds, phase: Phase = lambda _name, _round, work: work()) -> None:
    """Train until the last epoch: refresh (cluster, mine), train a round, validate; repeat.

    Killed anywhere and started again, it continues from the newest checkpoint. `phase` runs each phase; a flow passes
    one that also makes it a task.
    """
    while not rounds.finished:
        number = rounds.round_number
        phase("cluster", number, rounds.cluster)
        phase("mine", number, rounds.mine)
        phase("train round", number, rounds.train_round)
        phase("validate", number, rounds.validate)
