"""The one loop over rounds: UniDEC's Algorithm 1.

Every training runs it: the command line, the Prefect flow, comparisons, several ranks, and `unidec.fit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Figures = dict[str, float]  # of clustering and mining: seconds, numbers, mean scores


@dataclass(frozen=True)
class RoundReport:
    """A round, or what was trained since a resume: finished epochs and steps in all (`step`), its own `steps`, the
    most memory used (GiB). Validation adds the rest: seconds of all rounds, the round's number, metrics (percent), and
    to the `work_seconds` of training (processor seconds, on a GPU wall seconds, in all) those of refreshes."""

    epoch: int = 0
    steps: int = 0
    train_seconds: float = 0.0
    steps_per_s: float = 0.0
    checkpoint_seconds: float | None = None
    finished: bool = False
    step: int = 0
    memory: dict[str, float] | None = None
    trained_seconds: float | None = None
    work_seconds: float | None = None
    round: int | None = None
    validation: dict[str, float] | None = None
    validation_seconds: float | None = None
    refresh: Figures | None = None
    seconds: float | None = None


Report = Figures | RoundReport


class Rounds(Protocol):
    """What trains: one process, or several that are started for each phase. Phases that are done return at once."""

    @property
    def finished(self) -> bool: ...
    @property
    def round_number(self) -> int: ...
    def cluster(self) -> Figures: ...
    def mine(self) -> Figures: ...
    def train_round(self) -> RoundReport: ...
    def validate(self) -> RoundReport: ...


Phase = Callable[[str, int, Callable[[], Report]], Report]  # name of the phase, number of the round, its work


def fit(rounds: Rounds, phase: Phase = lambda _name, _round, work: work()) -> None:
    """Train until the last round: refresh (cluster, mine), train a round, validate; repeat.

    Killed anywhere and started again, it continues from the newest checkpoint. `phase` runs each phase; a flow passes
    one that also makes it a task."""
    while not rounds.finished:
        number = rounds.round_number
        phase("cluster", number, rounds.cluster)
        phase("mine", number, rounds.mine)
        phase("train round", number, rounds.train_round)
        phase("validate", number, rounds.validate)
