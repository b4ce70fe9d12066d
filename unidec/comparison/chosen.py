"""The settings that a comparison's tuning chose: the best trial of each recipe cell, in a file kept
in git.

    UniDEC:
      set: {lr: 2}
      trials: {lr=0.5: 29.3, as it is: 30.1, lr=2: 30.8}

Figures are nDCG@5 on the validation split of the tuning's data; null: the trial failed, or was
stopped early."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from unidec.comparison.plan import ComparisonFile, Overrides, System, in_words
from unidec.comparison.tuning_space import holds
from unidec.config import read_yaml, short
from unidec.data.storage import write_bytes_atomic
from unidec.errors import ConfigError
from unidec.training.stopping import METRIC

AS_IT_IS = "as it is"
Trials = list[tuple[Overrides, float | None]]
"""What each trial changed, and its metric; None: it failed or was stopped early."""
HEAD = """\
# Written by `unidec compare {path} --tune`: the best of each system's trials by {metric} of the
# validation split of "{data}", seed {seed}.
"""


def read_chosen(
    path: str | Path, file: ComparisonFile, systems: Mapping[str, System]
) -> dict[str, Overrides]:
    """The chosen settings of each recipe cell of a comparison file.

    Raises:
        ConfigError: the file is missing or damaged, a cell is not in it, or was tuned with other
        ranges.
    """
    assert file.tuning is not None
    where = file.tuning.file
    fix = f"unidec compare {path} --tune"
    if not Path(where).is_file():
        raise ConfigError("the systems have not been tuned", where=where, fix=fix)
    found = read_yaml(Path(where))[0]
    chosen = dict[str, Any]()
    for name, system in systems.items():
        if system.kind == "recipe":
            entry = found.get(name)
            settings = entry.get("set") if isinstance(entry, dict) else None
            if not isinstance(settings, dict) or not _within(settings, system.ranges):
                expected = "values within " + "; ".join(
                    f"{key}: {short(one)}" for key, one in system.ranges.items()
                )
                raise ConfigError(
                    "not tuned with these ranges",
                    where=f"{where}: {name}",
                    got=short(settings),
                    expected=expected,
                    fix=f'{fix} --only "{name}"',
                )
            chosen[name] = settings
    return chosen


def _within(settings: Mapping[str, Any], ranges: Mapping[str, Any]) -> bool:
    return all(key in ranges and holds(ranges[key], value) for key, value in settings.items())


def write_chosen(path: str | Path, file: ComparisonFile, trials: Mapping[str, Trials]) -> Path:
    """Write the best trial of each cell; entries of other cells are kept.

    Args:
        path: the comparison file. trials: of each cell.

    Returns:
        The path of the tuning's file.
    """
    assert file.tuning is not None
    place = Path(file.tuning.file)
    entries: dict[str, Any] = read_yaml(place)[0] if place.is_file() else {}
    for cell, tried in trials.items():
        best, _ = max(tried, key=lambda trial: -1.0 if trial[1] is None else trial[1])
        figures = {in_words(changed) or AS_IT_IS: _rounded(value) for changed, value in tried}
        entries[cell] = {"set": best, "trials": figures}
    ordered = {cell: entries[cell] for cell in file.cells if cell in entries}
    head = HEAD.format(path=path, metric=METRIC, data=file.tuning.data, seed=file.seeds[0])
    text = yaml.safe_dump(
        ordered, sort_keys=False, allow_unicode=True, default_flow_style=None, width=118
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(place, (head + text).encode())
    return place


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
