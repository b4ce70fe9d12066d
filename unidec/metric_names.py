"""Names of the ranking metrics, for checking parameters without importing heavy packages."""

from __future__ import annotations

from typing import NamedTuple

GROUPS = ("tail", "torso", "head")
"""Names of the frequency groups 0, 1, 2 of `unidec.data.propensity.frequency_group`."""

BASELINES = {"knn": "TF-IDF kNN", "mix": "TF-IDF kNN + label match"}
"""Baselines of every report (`unidec.evaluation.baselines`), and their names in it."""

DEFAULT_KS = (1, 3, 5, 10, 100)
DEFAULT_PROPENSITY_KS = (1, 3, 5)


class MetricName(NamedTuple):
    """The parts of a metric's name; for example "tail/R@10" is R at 10 for the group tail.

    Attributes:
        group: one of `GROUPS`, or "" for all labels.
        kind: P, R, nDCG, MRR, PSP, PSnDCG or coverage.
        k: cut-off; 0 for MRR, which has none.
    """

    group: str
    kind: str
    k: int


def parse(name: str) -> MetricName:
    """The parts of a known metric's name."""
    group, _, rest = name.rpartition("/")
    kind, _, k = rest.partition("@")
    return MetricName(group, kind, int(k or 0))


def metric_names() -> list[str]:
    """All metrics of `unidec.evaluation.metrics.evaluate`, over all labels and per
    frequency group.
    """
    names = [f"{kind}@{k}" for kind in ("P", "nDCG", "R", "coverage") for k in DEFAULT_KS]
    names += [f"{kind}@{k}" for kind in ("PSP", "PSnDCG") for k in DEFAULT_PROPENSITY_KS]
    names += ["MRR"]
    return names + [f"{group}/{name}" for group in GROUPS for name in names]
