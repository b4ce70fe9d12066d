"""The ranking metrics by name, and where each is shown; imports no heavy package.

A metric is added in two files: what a query contributes to it (`unidec.evaluation.metrics.Scope`),
and its line in `PLACES`. The slow reference in tests/evaluation/test_metrics.py then fails until it
has the metric too; dvc.yaml lists the columns of DVC's own plots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

GROUPS = ("tail", "torso", "head")
"""Names of the frequency groups 0, 1, 2 of `unidec.data.propensity.frequency_group`."""

BASELINES = {"knn": "TF-IDF kNN", "mix": "TF-IDF kNN + label match"}
"""Baselines of every report (`unidec.evaluation.baselines`), and their names in it."""

DEFAULT_KS = (1, 3, 5, 10, 100)
DEFAULT_PROPENSITY_KS = (1, 3, 5)

PLACES = {
    "P@1": "headline card compared part drawn traded comparison compare tested gate tag window"
    " judged",
    "P@3": "headline comparison window",
    "P@5": "headline card compared comparison compare tested gate window group comparison-group",
    "nDCG@5": "headline card compared part traded comparison compare tested gate tag list window"
    " judged group mlflow-group",
    "PSP@1": "headline traded comparison compare tested gate",
    "PSP@3": "headline",
    "PSP@5": "headline card compared part drawn traded comparison compare tested gate tag list"
    " group mlflow-group comparison-group",
    "R@10": "headline card comparison compare gate tag window group mlflow-group comparison-group"
    " drawn-group",
    "R@100": "headline card compared part drawn comparison compare tested gate window group",
    "coverage@5": "headline comparison gate tag group comparison-group",
    "MRR": "headline gate window",
    "tail/P@5": "gate",
    "tail/R@10": "compared gate tag",
    "tail/R@100": "gate",
    "torso/R@10": "compared gate",
    "head/R@10": "compared gate",
}
"""Metric -> where it is shown, in the order of tables.

headline: metrics.json, MLflow and the report's first table. card: on top of the report. compared:
with baselines, and as curves. part: of each head, votes and what the index loses.
drawn: in charts of comparisons, and the columns of MLflow's table of runs. traded: against the
weight of rare labels. comparison, compare: tables of `unidec compare`, on its page and in the
terminal. tested: by paired tests of comparisons, and in DVC's figures of a run. gate: its page.
tag, list: of versions in the registry. window, judged: `unidec monitor`. group, mlflow-group,
comparison-group, drawn-group: within each frequency group, in the report's table, in MLflow, in
comparisons and in charts.
"""


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
    """All metrics of `unidec.evaluation.metrics.evaluate`, over all labels and by group."""
    names = [f"{kind}@{k}" for kind in ("P", "nDCG", "R", "coverage") for k in DEFAULT_KS]
    names += [f"{kind}@{k}" for kind in ("PSP", "PSnDCG") for k in DEFAULT_PROPENSITY_KS]
    names += [name for name in PLACES if "/" not in name and name not in names]
    return names + [f"{group}/{name}" for group in GROUPS for name in names]


def shown(place: str) -> list[str]:
    """The metrics that are shown at a place of `PLACES`, in order."""
    return [name for name, places in PLACES.items() if place in places.split()]


def of_all_labels() -> list[str]:
    """The metrics that are compared, without those of groups of labels."""
    return [name for name in shown("compared") if "/" not in name]


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """The headline metrics among all metrics."""
    return {name: metrics[name] for name in shown("headline") if name in metrics}


def in_words(name: str) -> str:
    """A metric's name in a sentence: "R@10 of tail labels"."""
    group, _, metric = name.rpartition("/")
    return f"{metric} of {group} labels" if group else metric


def without_at(text: str) -> str:
    """A metric's name for DVC and MLflow, which allow no "@": "P@1" -> "P_at_1"."""
    return text.replace("@", "_at_")
