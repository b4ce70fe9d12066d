"""The space of a tuning: parameters by key path, each with a range or choices, as Optuna's distributions.

Only this module imports optuna.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unidec.config import (
    Params,
    ParamsError,
    build_params,
    describe,
    keys_deciding,
    leaves,
    problem,
    read_yaml,
    short,
)
from unidec.errors import ConfigError


def import_optuna() -> Any:
    """Optuna, with its own log silenced.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        fix = "make setup, or pip install 'unidec-xmc[tune]'"
        raise ConfigError("Optuna is not installed", where="unidec tune", fix=fix) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def read_space(path: str | Path, params: Params) -> dict[str, Any]:
    """Read a search space file, and check each bound and each choice with all other parameters unchanged.

    Args:
        path: YAML: `optim.lr_bag: {low: 0.0003, high: 0.003, log: true}`, `pool.beta: [1, 2, 3]`.

    Returns:
        An Optuna distribution per key path; over integers if the key takes only those.

    Raises:
        ConfigError: no such file, not YAML, or an empty file. ParamsError: every problem, with its line.
    """
    if not Path(path).is_file():
        raise ConfigError("no such search space file", where=str(path), fix="comparison/tune.yaml is an example")
    raw, lines = read_yaml(Path(path))
    if not raw:
        raise ConfigError("nothing to tune", where=str(path), expected="optim.lr_bag: {low: 0.0003, high: 0.003}")
    origin = {".".join(key): f"line {line}" for key, line in lines.items()}
    base, takes = dict(leaves(params)), {key: kinds for key, _, kinds, _ in describe()}
    space, problems = dict[str, Any](), list[str]()
    for key, entry in raw.items():
        try:
            if isinstance(entry, dict) and key in Params.model_fields:
                raise ValueError(f"key paths, not sections: {key}.<key>: {{low: 0.001, high: 0.01}}")
            of_range = [entry[end] for end in ("low", "high") if end in entry] if isinstance(entry, dict) else []
            for value in (entry if isinstance(entry, list) else of_range) if key in takes else [entry]:
                build_params(base | {key: value}, origin, str(path))  # an unknown key, out of bounds, in conflict
            space[key] = _distribution(key, entry, takes[key])
        except ParamsError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(problem(key, "cannot be tuned like this", short(entry), str(error), origin))
    if problems:
        raise ParamsError(problems, str(path), "search space")
    return space


def _distribution(key: str, entry: Any, takes: str) -> Any:
    """The distribution of a key; a ValueError describes what would be valid."""
    kinds = import_optuna().distributions
    # all trials share data and tokens; the seed decides the index, too
    tunable = set(keys_deciding("label_graph", "training")) - set(keys_deciding("tokens", "index"))
    if key not in tunable:
        sections = sorted({name.partition(".")[0] for name in tunable})
        raise ValueError(f"a key of {', '.join(sections)} that needs no other tokens")
    if isinstance(entry, list):
        return kinds.CategoricalDistribution(entry)
    numbers = {"number", "integer"} & set(takes.split())
    if not numbers or not isinstance(entry, dict) or not {"low", "high"} <= entry.keys() <= {"low", "high", "log"}:
        raise ValueError("{low: 0.001, high: 0.01, log: true} for a number, or choices: [1, 2, 4]")
    if not isinstance(log := entry.get("log", False), bool):
        raise ValueError("log: true or false")
    kind = kinds.FloatDistribution if "number" in numbers else kinds.IntDistribution
    return kind(entry["low"], entry["high"], log=log)


def holds(ranged: Any, value: Any) -> bool:
    """Whether a trial may draw this value."""
    if hasattr(ranged, "choices"):
        return value in ranged.choices
    return isinstance(value, int | float) and ranged.low <= value <= ranged.high
