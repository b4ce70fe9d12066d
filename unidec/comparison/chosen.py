"""The settings that a comparison's tuning chose: the best trial of each recipe cell, in a file kept in git.

    UniDEC:
      set: {lr: 2}
      trials: {lr=0.5: 29.3, as it is: 30.1, lr=2: 30.8}

Figures are nDCG@5 on the validation split of the tuning's data; null: the trial failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unidec.comparison.plan import ComparisonFile, Overrides, System, flat, in_words
from unidec.config import read_yaml, short
from unidec.errors import ConfigError

AS_IT_IS = "as it is"


def read_chosen(path: str | Path, file: ComparisonFile, systems: Mapping[str, System]) -> dict[str, Overrides]:
    """The chosen settings of each recipe cell of a comparison file.

    Raises:
        ConfigError: the file is missing or damaged, a cell is not in it, or was tuned with other trials.
    """
    assert file.tuning is not None
    where, fix = file.tuning.file, f"unidec compare {path} --tune"
    if not Path(where).is_file():
        raise ConfigError("the systems have not been tuned", where=where, fix=fix)
    found, chosen = read_yaml(Path(where))[0], dict[str, Any]()
    for name, system in systems.items():
        if system.kind == "recipe":
            entry = found.get(name)
            chosen[name] = entry.get("set") if isinstance(entry, dict) else None
            if chosen[name] not in [flat(trial) for trial in system.trials]:
                expected = "one of its trials: " + "; ".join(in_words(trial) or AS_IT_IS for trial in system.trials)
                raise ConfigError("not tuned with these trials", where=f"{where}: {name}", got=short(chosen[name]),
                                  expected=expected, fix=f'{fix} --only "{name}"')  # fmt: skip
    return chosen
