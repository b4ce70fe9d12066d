"""The settings that a comparison's tuning chose: the best trial of each recipe cell.

    UniDEC:
      set: {lr: 2}
      trials: {lr=0.5: 29.3, as it is: 30.1, lr=2: 30.8}

The file is kept in git. Figures are nDCG@5 on the validation split of the tuning's data; null: the
trial failed, or was stopped early.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from unidec.comparison.comparison_file import ComparisonFile, Overrides
from unidec.comparison.jobs import AS_IT_IS, System, in_words
from unidec.comparison.tuning_space import holds
from unidec.config import read_yaml, short
from unidec.data.storage import write_bytes_atomic
from unidec.errors import ConfigError
from unidec.training.stopping import METRIC

Trials = list[tuple[Overrides, float | None]]
"""Each trial's changed settings and its metric; None: it failed or was stopped early."""
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
    found, _ = read_yaml(Path(where))
    chosen: dict[str, Overrides] = {}
    for name, system in systems.items():
        if system.kind != "recipe":
            continue
        entry = found.get(name)
        settings = entry.get("set") if isinstance(entry, dict) else None
        if not isinstance(settings, dict) or not _is_within(settings, system.ranges):
            ranges = [f"{key}: {short(one)}" for key, one in system.ranges.items()]
            raise ConfigError(
                "not tuned with these ranges",
                where=f"{where}: {name}",
                got=short(settings),
                expected=f"values within {'; '.join(ranges)}",
                fix=f'{fix} --only "{name}"',
            )
        chosen[name] = settings
    return chosen


def _is_within(settings: Overrides, ranges: Mapping[str, Any]) -> bool:
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
        figures = {}
        for changed, metric in tried:
            name = in_words(changed) or AS_IT_IS
            figures[name] = None if metric is None else round(metric, 3)
        trained = [trial for trial in tried if trial[1] is not None]
        best, _ = max(trained, key=itemgetter(1), default=({}, None))
        entries[cell] = {"set": best, "trials": figures}
    ordered = {cell: entries[cell] for cell in file.cells if cell in entries}
    head = HEAD.format(path=path, metric=METRIC, data=file.tuning.data, seed=file.seeds[0])
    text = yaml.safe_dump(
        ordered, sort_keys=False, allow_unicode=True, default_flow_style=None, width=118
    )
    write_bytes_atomic(place, (head + text).encode())
    return place
