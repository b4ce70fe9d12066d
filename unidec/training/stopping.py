"""Decides when a training ends: after all epochs, or with `optim.patience` one round after
validation has stopped improving.

With patience the learning rate is constant after the warm-up and decays in the last round
(warmup-stable-decay: Hu et al., MiniCPM, 2024), so that a training can end at any round. The
decision depends on the settings and rounds.jsonl alone: it is the same in every process, also after
a resume."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidec.data.json_file import read_json_lines

METRIC = "nDCG@5"
ROUNDS = "rounds.jsonl"


@dataclass(frozen=True)
class Stopping:
    """Decides the last round, given `optim.epochs`, `pool.refresh`, `optim.patience` and
    `optim.budget_minutes`.
    """

    epochs: int
    refresh: int
    patience: int = 0
    budget_minutes: float = 0.0

    def last_round(self, lines: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
        """Finished epochs at the beginning and end of the last round or, while that is not decided,
        of the latest possible one.

        The last round begins when validation has not improved for `patience` rounds, when the
        budget does not allow another round before it (a round is assumed to take the mean time of
        the trained ones), or when `epochs` allow no further round after it.

        Args:
            lines: lines of rounds.jsonl in order, with "epoch", "validation" and "work_seconds".
        """
        begin = (self.epochs - 1) // self.refresh * self.refresh
        best = -math.inf
        since = 0
        for line in lines if self.patience else ():
            value = line.get("validation", {}).get(METRIC, math.nan)
            since += 1
            if value > best:  # NaN is no improvement
                best = value
                since = 0
            work = line.get("work_seconds", 0.0)
            round_work = work * self.refresh / line["epoch"]
            needed = work + 2 * round_work
            budget = 60 * self.budget_minutes
            if since >= self.patience or 0 < budget < needed:
                begin = min(begin, line["epoch"])
                break
        return begin, min(begin + self.refresh, self.epochs)

    def read(self, run_dir: Path, epoch: int) -> tuple[int, int]:
        """`last_round` of a run after `epoch` finished epochs. Later lines of rounds.jsonl are
        ignored: they were written before a resume from an earlier checkpoint.
        """
        lines = read_json_lines(run_dir / ROUNDS) if self.patience else ()
        return self.last_round(line for line in lines if line["epoch"] <= epoch)
