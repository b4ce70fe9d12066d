"""What the page of a comparison shows, as plain values: it knows no files, and nothing of how cells are run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unidec.evaluation.plots import Records
from unidec.evaluation.significance import Comparison

HEADLINE = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@10", "R@100", "coverage@5")
COSTS = {
    "train_seconds": "training, s", "refresh_seconds": "refreshes, s", "total_seconds": "whole cell, s",
    "search_ms": "search, ms a query", "encode_ms": "encoding, ms a query", "peak_memory_bytes": "peak memory, MB",
    "parameters_encoder": "encoder, parameters", "parameters_heads": "heads, parameters",
    "parameters_classifier": "classifier, parameters", "bundle_bytes": "bundle, MB",
}  # fmt: skip
"""Keys of `Run.costs` that are shown, and their column heads; a name that ends in `_bytes` is shown in MB."""


@dataclass(frozen=True)
class Task:
    """A data set with a choice of text: name (unique), one line about it, and facts (nested mappings allowed)."""

    name: str
    about: str = ""
    card: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One seed of a cell.

    Attributes:
        metrics: of the test split in percent, named as `metrics.evaluate` does. validation: of the validation split.
        parts: {"de" | "clf" | "knn": metrics of the test split with that score alone}.
        costs: keys of `COSTS`; what was not measured is left out.
        curve: lines of rounds.jsonl; peers have none. history: lines of history.jsonl. bins: of `frequency_bins`.
    """

    seed: int
    metrics: Mapping[str, float]
    validation: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    curve: Records = ()
    history: Records = ()
    bins: Records = ()


@dataclass(frozen=True)
class Summary:
    """Mean (NaN without a value), standard deviation of a sample (n - 1; NaN below two values) and number of values."""

    mean: float
    spread: float
    count: int


def summary(values: Sequence[float]) -> Summary:
    """Mean, sample standard deviation and number of the finite values."""
    finite = [float(value) for value in values if math.isfinite(value)]
    mean = statistics.fmean(finite) if finite else math.nan
    return Summary(mean, statistics.stdev(finite) if len(finite) > 1 else math.nan, len(finite))


@dataclass(frozen=True)
class Cell:
    """One system on one task, all its seeds.

    Attributes:
        task: name of its task. name: unique within the task.
        kind: "recipe" is trained by us, "peer" comes from outside or needs no training.
        about: one line. recipe: its recipe's name. settings: what is set beyond the recipe and the common settings.
        runs: the seeds that ended well, may be empty.
    """

    task: str
    name: str
    kind: Literal["recipe", "peer"] = "recipe"
    about: str = ""
    recipe: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    runs: Sequence[Run] = ()

    def values(self, metric: str) -> list[float]:
        """A metric of each seed that has it, finite."""
        found = [float(run.metrics[metric]) for run in self.runs if metric in run.metrics]
        return [value for value in found if math.isfinite(value)]

    def summary(self, metric: str) -> Summary:
        """A metric over the seeds."""
        return summary(self.values(metric))


@dataclass(frozen=True)
class Group:
    """Cells that differ in one thing, shown as a small table of differences to the base.

    Attributes:
        base: name of the cell the others are compared with. cells: the others, in order.
        about: which table of which paper this repeats.
    """

    title: str
    base: str
    cells: Sequence[str]
    about: str = ""


@dataclass(frozen=True)
class Failure:
    """A run without a result. state: "failed" or "not run"; reason: its last message; log: relative path."""

    task: str
    cell: str
    seed: int | None = None
    state: str = "failed"
    reason: str = ""
    log: str = ""


@dataclass(frozen=True)
class ComparisonInput:
    """All that the page shows; a part that is not given is left out.

    Attributes:
        date: as it shall read. about: one line. notes: paragraphs under the heading: what was found.
        tasks, cells: shown in this order; a cell's task that is not among `tasks` gets a table without a card.
        contrasts: paired tests of each task; `contrast_note`: which test, how corrected.
        groups: ablation tables, shown for each task that has their cells. failures: runs without a result.
        common: settings that all recipes share. lineage: commit, hashes, machine, commands.
    """

    title: str = "Comparison"
    date: str = ""
    about: str = ""
    notes: Sequence[str] = ()
    tasks: Sequence[Task] = ()
    cells: Sequence[Cell] = ()
    contrasts: Mapping[str, Sequence[Comparison]] = field(default_factory=dict)
    contrast_note: str = ""
    groups: Sequence[Group] = ()
    failures: Sequence[Failure] = ()
    common: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
