"""Time of a run at scale, on one machine or several (`unidec plan --machines`).

Each stage was measured with 10^5, 10^6 and 10^7 queries and as many labels, on two cores, with both
heads alone and one epoch (benchmarks/results/scale.md). Seconds a row are interpolated by the
number of labels, on logarithmic axes; beyond 10^7 their growth from 10^6 continues, except for
steps, whose pools of labels keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from unidec.config import packaged
from unidec.pipeline.data_sizes import Sizes

Rows = Literal["queries", "labels", "texts"]
MEASURED = (10**5, 10**6, 10**7)  # queries, and as many labels


@dataclass(frozen=True)
class Stage:
    """A stage.

    Attributes:
        rows: what it processes. seconds: measured at the `MEASURED` sizes.
        divided: share of the time that several machines divide. grows: a row takes longer with more
        labels.
    """

    name: str
    rows: Rows
    seconds: Sequence[float]
    divided: float = 0.0
    grows: bool = True


STAGES = [Stage(**stage) for stage in packaged("pipeline/plan.yaml")["stages"]]


@dataclass(frozen=True)
class StageTime:
    """The estimated time of a stage: hours until it ends, and hours of all machines together."""

    name: str
    machines: int
    hours: float
    machine_hours: float


def plan_time(sizes: Sizes, machines: int) -> list[StageTime]:
    """Estimate the time of each stage. `machines`: a number from 1."""
    num_rows = {
        "queries": sizes.num_train,
        "labels": sizes.num_labels,
        "texts": sizes.num_queries + sizes.num_labels,
    }
    times = []
    for stage in STAGES:
        used = machines if stage.divided else 1
        machine_hours = num_rows[stage.rows] * seconds_a_row(stage, sizes.num_labels) / 3600
        divided = stage.divided * machine_hours
        hours = machine_hours - divided + divided / used
        times.append(StageTime(stage.name, used, hours, machine_hours))
    return times


def seconds_a_row(stage: Stage, num_labels: int) -> float:
    """Seconds that a stage takes for one of its rows, by the number of labels."""
    measured_rows = np.array(MEASURED) * (2 if stage.rows == "texts" else 1)
    log_labels = np.log(MEASURED)
    log_seconds = np.log(np.array(stage.seconds) / measured_rows)
    at = math.log(num_labels)
    log_time = np.interp(at, log_labels, log_seconds)
    if stage.grows and at > log_labels[-1]:
        *_, rise = np.diff(log_seconds) / np.diff(log_labels)
        log_time += rise * (at - log_labels[-1])
    return math.exp(log_time)
