"""What a run tells the tracking server: few keys, the same for every run; all the rest is in its files.

- `training/...` by step; `refresh/...` and `validation/...` by round; `memory/...`; `system/...` by seconds
- `test/...`: the headline, and for tail, torso and head of the labels `test/tail/R@10`, ...
- `de/...`, `clf/...`, `heads/...`, `knn/...`: the parts of the result, on the same split; `index/...`
- parameters: what decides the model; where it runs and what becomes of it is no parameter of it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unidec.pipeline.ranking import headline

PARTS = ("de", "clf", "heads", "knn")  # each head, their blend, the votes
_OF_PART = ("P@1", "nDCG@5", "PSP@5", "R@100")
_GROUPS, _OF_GROUP = ("tail", "torso", "head"), ("R@10", "nDCG@5", "PSP@5")
_OF_REFRESH = {
    "refresh_seconds": "seconds", "cluster_cosine": "cluster_cosine", "mine_positive_found": "positive_found",
    "mine_positive_rank": "positive_rank", "mine_negative_score": "negative_score",
}  # fmt: skip
_NOT_THE_MODELS = ("raw", "validation", "run", "source", "retrain", "gate", "drift", "serve", "tracking")
_SHOWN = ("P@1", "P@5", "nDCG@5", "PSP@5", "R@100")


def model_params(flat: Mapping[str, Any], is_warm: bool) -> dict[str, Any]:
    """Of all parameters (dotted keys), those that decide the model; `warm.` where it starts from another."""
    left_out = _NOT_THE_MODELS if is_warm else (*_NOT_THE_MODELS, "warm")
    return {key: value for key, value in flat.items() if key.partition(".")[0] not in left_out}


def step_figures(figures: Mapping[str, Any]) -> dict[str, Any]:
    """A step's figures: "loss" -> "training/loss"; what it is the step of is no figure."""
    return {f"training/{name}": value for name, value in figures.items() if name != "step"}


def refresh_figures(report: Mapping[str, Any]) -> dict[str, float]:
    """How long a refresh took, how tight its clusters are and how good the mining model was."""
    return {f"refresh/{name}": float(report[key]) for key, name in _OF_REFRESH.items() if key in report}


def split_figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Of all that was measured on the test split, what people compare.

    Args:
        result: as outputs/metrics.json: "test" {"P@1", "tail/R@10", ...}, the parts, "index".
    """
    test = result["test"]
    of_groups = {f"{group}/{name}" for group in _GROUPS for name in _OF_GROUP} & test.keys()
    named = headline(test) | {name: test[name] for name in sorted(of_groups)}
    figures = {f"test/{name}": value for name, value in named.items()}
    for part in PARTS:
        figures |= {f"{part}/{name}": value for name, value in result.get(part, {}).items() if name in _OF_PART}
    return figures | {f"index/{name}": value for name, value in result["index"].items()}


def description(result: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """A run's description, in markdown: facts, a table of metrics, where the pages are.

    Args:
        result: as outputs/metrics.json.
        facts: name: value, in order; empty ones are left out.
    """
    lines = [f"**{name}**: {value}  " for name, value in facts.items() if value not in (None, "")]
    splits = {split: result[split] for split in ("validation", "test") if result.get(split)}
    lines += ["", "| | " + " | ".join(_SHOWN) + " |", "|---" * (len(_SHOWN) + 1) + "|"]
    for split, metrics in splits.items():
        shown = [f"{metrics[name]:.2f}" if name in metrics else "" for name in _SHOWN]
        lines.append(f"| {split} | " + " | ".join(shown) + " |")
    lines += ["", "*Artifacts*: `report.html` (by frequency, curves, examples), `validation/index.html` (the data),"]
    lines += ["`metrics.json` (every metric), `gate/gate.html` (against the champion)."]
    return "\n".join(lines)
