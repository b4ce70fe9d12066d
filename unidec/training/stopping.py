"""When a training ends: after all epochs, or (`optim.patience`) one last round after validation stopped rising.

With patience the learning rate stays constant after the warm-up and falls in the last round (warmup-stable-decay: Hu et
al., MiniCPM, 2024), so a training may end at any round. All that decides is in rounds.jsonl: every process that reads
it, also after a resume, decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidec.data.storage import read_json_lines

METRIC, ROUNDS = "nDCG@5", "rounds.jsonl"


@dataclass(frozen=True)
class Stopping:
    """The settings that decide: `optim.epochs`, `pool.refresh`, `optim.patience`, `optim.budget_minutes`."""

    epochs: int
    refresh: int
    patience: int = 0
    budget_minutes: float = 0.0

    def last_round(self, lines: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
        """Finished epochs at the begin and at the end of the last round: decided, or the latest that is possible.

        It begins where validation has not risen for `patience` rounds, where the budget is too small for another round
        before it (a round costs the mean of those that were trained), or where `epochs` leave one round.

        Args:
            lines: of rounds.jsonl, in order: "epoch", "validation", "work_seconds".
        """
        begin, best, since = (self.epochs - 1) // self.refresh * self.refresh, -math.inf, 0
        for line in lines if self.patience else ():
            value = line.get("validation", {}).get(METRIC, math.nan)
            best, since = (value, 0) if value > best else (best, since + 1)  # NaN is no rise
            work = line.get("work_seconds", 0.0)
            needed = work + 2 * work * self.refresh / line["epoch"]
            if since >= self.patience or 0 < 60 * self.budget_minutes < needed:
                begin = min(begin, line["epoch"])
                break
        return begin, min(begin + self.refresh, self.epochs)

    def read(self, run_dir: Path, epoch: int) -> tuple[int, int]:
        """`last_round` of a run after so many epochs; later lines belong to a past that a resume has cut off."""
        lines = read_json_lines(run_dir / ROUNDS) if self.patience else ()
        return self.last_round(line for line in lines if line["epoch"] <= epoch)
