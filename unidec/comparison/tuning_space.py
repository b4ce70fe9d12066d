"""The space of a search: a range or choices for each key path, and `lr`, which multiplies all
learning rates.

    optim.lr_bag: {low: 0.0003, high: 0.003, log: true}
    pool.beta: [1, 2, 3]
    lr: {low: 0.25, high: 4, log: true}

Only this module imports optuna.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from unidec.config import (
    Params,
    ParamsError,
    build_params,
    describe,
    keys_deciding,
    leaves,
    origins,
    problem,
    read_yaml,
    short,
)
from unidec.errors import ConfigError

RATES = "lr"
Ranges = Mapping[str, Any]


def import_optuna() -> Any:
    """Import Optuna, with its log silenced.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            "Optuna is not installed",
            where="unidec tune",
            fix="make setup, or pip install 'unidec-xmc[tune]'",
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def read_space(path: str | Path, params: Params) -> dict[str, Any]:
    """Read a search space file, and check each bound and each choice with all other parameters
    unchanged.

    Raises:
        ConfigError: no such file, not YAML, or an empty file. ParamsError: every problem, with its
        line.
    """
    if not Path(path).is_file():
        raise ConfigError(
            "no such search space file", where=path, fix="comparison/tune.yaml is an example"
        )
    raw, lines = read_yaml(Path(path))
    if not raw:
        raise ConfigError(
            "nothing to tune", where=path, expected="optim.lr_bag: {low: 0.0003, high: 0.003}"
        )
    origin = origins(lines)
    if problems := problems_of(raw, params, origin, path):
        raise ParamsError(problems, path, "search space")
    return raw


def problems_of(
    ranges: Ranges, params: Params, origin: Mapping[str, str], source: str | Path
) -> list[str]:
    """Problems of the ranges: unknown keys, values out of bounds or in conflict with the other
    parameters.

    Args:
        origin: line of each key path. source: the file, or the part of it.
    """
    problems = []
    for key, entry in ranges.items():
        try:
            if isinstance(entry, dict) and key in Params.model_fields:
                raise ValueError(
                    f"key paths, not sections: {key}.<key>: {{low: 0.001, high: 0.01}}"
                )
            for value in _values(key, entry):
                applied(params, {key: value}, origin=origin, source=source)
            _check_form(key, entry)
        except ParamsError as error:
            problems += error.problems
        except ValueError as error:
            what = "cannot be tuned like this"
            problems.append(problem(key, what, short(entry), str(error), origin))
    return problems


@functools.cache
def _kinds() -> dict[str, list[str]]:
    """Types of value that each key accepts: "number", "integer", ..."""
    return {RATES: ["number"]} | {key: kinds.split() for key, _, kinds, _ in describe()}


def _values(key: str, entry: Any) -> list[Any]:
    """All choices, or both ends of a range; for an unknown key, the entry itself."""
    if key not in _kinds():
        return [entry]
    if isinstance(entry, dict):
        return [entry[end] for end in ("low", "high") if end in entry]
    return entry if isinstance(entry, list) else []


def _check_form(key: str, entry: Any) -> None:
    """Raise a ValueError that describes what is valid, if the entry is not."""
    # all trials share data and tokens; the seed decides the index, too
    tunable = set(keys_deciding("label_graph", "training"))
    tunable -= set(keys_deciding("tokens", "index"))
    if key != RATES and key not in tunable:
        sections = sorted({name.partition(".")[0] for name in tunable})
        raise ValueError(f"a key of {', '.join(sections)} that does not change the tokens")
    if isinstance(entry, list):
        if not entry:
            raise ValueError("one or more choices")
        return
    is_number = not {"number", "integer"}.isdisjoint(_kinds()[key])
    is_range = isinstance(entry, dict) and {"low", "high"} <= entry.keys() <= {"low", "high", "log"}
    if not is_number or not is_range:
        raise ValueError("{low: 0.001, high: 0.01, log: true} for a number, or choices: [1, 2, 4]")
    log = entry.get("log", False)
    if not isinstance(log, bool):
        raise ValueError("log: true or false")
    if entry["low"] > entry["high"]:
        raise ValueError("low <= high")
    if log and entry["low"] <= 0:
        raise ValueError("low > 0 with log: true")


def applied(
    params: Params,
    settings: Mapping[str, Any],
    kept: Collection[str] = (),
    *,
    origin: Mapping[str, str] | None = None,
    source: str | Path = "trial",
) -> Params:
    """The parameters with the settings of a trial; keys in `kept` do not change.

    Raises:
        ParamsError: a setting is invalid, or in conflict with the other parameters.
    """
    before = dict(leaves(params))
    values = {**before, **settings}
    factor = values.pop(RATES, 1)
    if type(factor) not in (int, float) or factor <= 0:
        raise ValueError("lr multiplies all learning rates: a number above 0")
    if factor != 1:
        for key in values:
            if key.startswith("optim.lr_"):
                values[key] *= factor
    values |= {key: before[key] for key in kept if key in before}
    return build_params(values, origin or {}, source)


def unchanged(ranges: Ranges, params: Params) -> dict[str, Any]:
    """The settings that change nothing, without keys whose range excludes the current value."""
    values = dict(leaves(params)) | {RATES: 1}
    return {key: values[key] for key, entry in ranges.items() if holds(entry, values[key])}


def holds(entry: Any, value: Any) -> bool:
    """Whether a trial may draw this value."""
    if isinstance(entry, list):
        return value in entry
    return isinstance(value, int | float) and entry["low"] <= value <= entry["high"]


def distributions(ranges: Ranges) -> dict[str, Any]:
    """The ranges as Optuna's distributions; integer distributions for integer keys."""
    of_optuna = import_optuna().distributions
    takes = _kinds()
    found = {}
    for key, entry in ranges.items():
        if isinstance(entry, list):
            found[key] = of_optuna.CategoricalDistribution(entry)
        elif "number" in takes[key]:
            found[key] = of_optuna.FloatDistribution(**entry)
        else:
            found[key] = of_optuna.IntDistribution(**entry)
    return found
