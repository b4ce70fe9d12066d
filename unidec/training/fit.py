"""The only loop over training rounds: UniDEC's Algorithm 1.

The command line, the Prefect flow, comparisons, trainings on several ranks and `unidec.fit` run it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Figures = dict[str, float]  # report of clustering and mining: seconds, counts, mean scores


@dataclass(frozen=True)
class RoundReport:
    """Report of a trained round, or of the part of it since a resume.

    Attributes:
        epoch, step: finished epochs and steps of the whole run.
        steps, train_seconds, steps_per_s: of this report.
        finished: whether the training is complete.
        memory: peak memory, in GiB.
        work_seconds: processor time of the whole run (on a GPU wall time); validation adds the time
            of refreshes.
        trained_seconds, round, validation, validation_seconds, refresh, seconds: set by validation:
            seconds of all rounds, number of the round, metrics in percent, and figures of the
            round's phases.
    """

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
    """Runs the phases of rounds: in this process, or in several that are started for each phase. A
    phase that is already complete returns at once.
    """

    @property
    def finished(self) -> bool: ...
    @property
    def round_number(self) -> int: ...
    def cluster(self) -> Figures: ...
    def mine(self) -> Figures: ...
    def train_round(self) -> RoundReport: ...
    def validate(self) -> RoundReport: ...


# runs a phase, given its name, round number and function
Phase = Callable[[str, int, Callable[[], Report]], Report]


def fit(rounds: Rounds, phase: Phase = lambda _name, _round, work: work()) -> None:
    """Train until the last round is complete: cluster, mine, train a round, validate; repeat.

    After an interruption at any point, a new call resumes from the newest checkpoint. `phase` runs
    each phase; a flow passes a function that runs it as a task.
    """
    while not rounds.finished:
        number = rounds.round_number
        phase("cluster", number, rounds.cluster)
        phase("mine", number, rounds.mine)
        phase("train round", number, rounds.train_round)
        phase("validate", number, rounds.validate)
