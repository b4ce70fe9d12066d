"""Drift: compare later data, or a window of queries, with the training data of a model.

All figures are compared by one method. Each has a change or a distance, and a limit from section
`drift` of the parameters. The limit is raised to the change that chance stays below in 99 of 100
samples of that size: 2.58 standard errors for a share, a mean or a metric; for a distance of
histograms, its quantile over samples from the reference's histogram (parametric bootstrap, Efron
and Tibshirani 1993).

Shape legend: N queries, D width of the embeddings, B bins, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import getitem
from typing import Any, Literal, get_args

import numpy as np
from scipy.spatial.distance import jensenshannon

from unidec.config import Drift
from unidec.metric_names import shown, without_at

Unit = Literal["count", "mean", "share", "distance", "shift", "metric"]
State = Literal["stop", "warning", "ok", "not judged"]
Bounds = tuple[float | None, float | None]
# largest change without a warning, and without a stop (None: it never stops)
Levels = tuple[float, float | None]

STATES = get_args(State)  # in the order of a page
# confidence of the chance limits, as a quantile and as a two-sided normal interval
QUANTILE = 0.99
Z = 2.58
DRAWS = 200
# tokens that count as one observation, since a text's tokens depend on each other (Kish 1965)
TOKENS_TOGETHER = 2
# smaller shares may grow by as much as a share of this size: doubling a tiny share is harmless
SHARE_FLOOR = 0.1
SCORE_BINS = 20
SHIFTS = 2.0  # multiple of `drift.warn` that the mean embedding may shift
_QUANTILES = np.linspace(0, 1, 101)
NO_LIMIT: Bounds = (None, None)
_FORMATS = {
    "count": "{:,.0f}",
    "mean": "{:,.2f}",
    "metric": "{:,.2f}",
    "shift": "{:.3f} sd",
    "distance": "{:.3f}",
}

# key -> name, unit, and the place in a profile
_FIGURES: dict[str, tuple[str, Unit, tuple[str, ...]]] = {
    "train": ("training queries", "count", ("rows", "train")),
    "validation": ("validation queries", "count", ("rows", "validation")),
    "test": ("test queries", "count", ("rows", "test")),
    "labels": ("labels", "count", ("rows", "labels")),
    "pairs": ("pairs", "count", ("rows", "pairs")),
    "positives": ("positives a query", "mean", ("positives",)),
    "query_length": ("characters a query", "mean", ("queries", "length", "mean")),
    "query_tokens": ("tokens a query", "mean", ("queries", "tokens", "mean")),
    "label_length": ("characters a label", "mean", ("labels", "length", "mean")),
}
_SHARES = {
    "empty_queries": "queries without text",
    "empty_labels": "labels without text",
    "repeated_queries": "training queries with the text of another one",
    "repeated_labels": "labels with the text of another one",
    "test_texts_in_train": "test queries whose text is a training query's (leak)",
    "queries_without_positives": "queries without positives",
    "labels_without_training_points": "labels without training queries",
    "unseen_labels": "labels of held-out queries without training queries",
}
_HISTOGRAMS = (("length", "histogram", 1), ("tokens", "buckets", TOKENS_TOGETHER))
_STRANGE = {
    "unknown_tokens": "tokens that the tokenizer does not know",
    "unseen_words": "words that training lacked",
}


@dataclass(frozen=True)
class Check:
    """One figure of the earlier and the later data, with its limits.

    Attributes:
        key, name: identifier and displayed name.
        old, new: the earlier and the later figure; a distance has no `old`.
        unit: a share is 0 to 1, a distance Jensen-Shannon's, a shift in standard deviations, a
            metric in percent.
        warn, stop: (minimum, maximum), None: no limit.
        noise: change that chance alone can explain; None if unknown.
        judged: False if there are too few queries to compare the figure with its limits.
    """

    key: str
    name: str
    unit: Unit
    old: float | None
    new: float
    warn: Bounds
    stop: Bounds = NO_LIMIT
    noise: float | None = None
    judged: bool = True

    @property
    def state(self) -> State:
        """Whether the figure is outside the limits `warn` or `stop`."""
        if not self.judged:
            return "not judged"
        if _outside(self.new, self.stop):
            return "stop"
        return "warning" if _outside(self.new, self.warn) else "ok"

    @property
    def words(self) -> str:
        """A sentence about the figure, and the limit if it is exceeded."""
        words = self.shown(self.new)
        if self.old is not None:
            words = f"{self.shown(self.old)} before, {words} now"
        if self.old and self.unit in ("count", "mean"):
            change = self.new / self.old - 1
            words += f" ({change:+.1%})"
        if self.drifted:
            bounds = self.stop if self.state == "stop" else self.warn
            words += f"; {self.within(bounds)} expected"
        return f"{self.name}: {words}"

    @property
    def drifted(self) -> bool:
        """Whether the figure is judged and outside the limits."""
        return self.state in ("stop", "warning")

    def shown(self, value: float | None) -> str:
        """A figure of this unit as displayed."""
        if value is None:
            return "–"
        if self.unit == "share":
            return f"{value:.2%}" if value < 0.1 else f"{value:.1%}"
        return _FORMATS[self.unit].format(value)

    def within(self, bounds: Bounds) -> str:
        """Bounds as displayed; "" for no limit."""
        low, high = (None if bound is None else self.shown(bound) for bound in bounds)
        if low and high:
            return f"{low} to {high}"
        if low:
            return f"at least {low}"
        return f"at most {high}" if high else ""

    def to_json(self) -> dict[str, object]:
        """The check for JSON: "check" is the key, "value" the new figure."""
        facts = asdict(self)
        renamed = {"check": facts.pop("key"), "value": facts.pop("new")}
        return facts | {
            **renamed,
            "warn": list(self.warn),
            "stop": list(self.stop),
            "state": self.state,
            "drifted": self.drifted,
            "words": self.words,
        }


def served_facts(
    vectors_ND: Any, scores_N: Any, edges: Sequence[float] | None = None
) -> dict[str, Any] | None:
    """Figures of queries in a bundle's searched space, for JSON; None without queries.

    Args:
        vectors_ND: in the searched space.
        scores_N: of each query's best label.
        edges: bin edges of the histogram of scores, from the reference; None: `SCORE_BINS` bins of
            equal size.
    """
    if not len(scores_N):
        return None
    vectors = np.asarray(vectors_ND, dtype=np.float64)
    scores = np.asarray(scores_N, dtype=np.float64)
    if edges is None:
        inner = np.arange(1, SCORE_BINS) / SCORE_BINS
        quantiles = _rounded(np.quantile(scores, inner))
        edges = np.unique(quantiles).tolist()
    bin_N = np.searchsorted(edges, scores, side="right")
    histogram = np.bincount(bin_N, minlength=len(edges) + 1)
    return {
        "count": len(scores),
        "mean": _rounded(vectors.mean(axis=0)),
        "std": _rounded(vectors.std(axis=0)),
        "score_quantiles": _rounded(np.quantile(scores, _QUANTILES)),
        "score_edges": list(edges),
        "score_histogram": histogram.tolist(),
    }


def compare(old: Mapping[str, Any], new: Mapping[str, Any], limits: Drift) -> list[Check]:
    """Checks of all figures that both sides have, ordered by state: stop, warning, ok, not judged.

    Windows with fewer queries than `limits.min_window` are not judged, nor are metrics of fewer
    labelled queries.

    Args:
        old: figures of `profile_dataset`; also "served" (`served_facts`) and "metrics" ({name:
            percent}), if known.
        new: for a later data set the same, also "label_changes" ({"left": share of the earlier
            labels that were removed, "new": share of the later labels that were added}). For a
            window of queries, which never stops: "count" (queries of the window), "queries" and
            "held_out" (`measure_texts`), "served" (with the edges of `old`), "metrics" ({name:
            (percent, its standard error)}), "labelled" (queries with labels) and "unknown_labels"
            (a share).
    """
    whole = "rows" in new
    levels: Levels = (limits.warn, limits.stop if whole else None)
    checks = _data_set_checks(old, new, levels) if whole else []
    for side in ("queries", "labels") if whole else ("queries",):
        prefix = f"{side}_" if whole else ""
        for what, part, together in _HISTOGRAMS:
            key = f"{prefix}{what}_distance"
            name = f"distribution of the {what} of {side}"
            before = old[side][what][part]
            after = new[side][what][part]
            checks.append(_distance(key, name, before, after, levels, together=together))
    if old["held_out"] and new["held_out"]:
        checks += _shares(_STRANGE, old["held_out"], new["held_out"], levels)
    if old.get("served") and new.get("served"):
        checks += _served_checks(old["served"], new["served"], limits.warn)
    checks = _judged(checks, new.get("count"), limits)
    if "unknown_labels" in new:
        of_labels = _label_checks(old["metrics"], new, levels)
        checks += _judged(of_labels, new.get("labelled"), limits)
    return sorted(checks, key=lambda check: STATES.index(check.state))


def _judged(checks: Sequence[Check], num_queries: int | None, limits: Drift) -> list[Check]:
    """The checks, marked as not judged if they are of too few queries."""
    judged = not not_judged(num_queries, limits)
    return [replace(check, judged=judged) for check in checks]


def not_judged(num_queries: int | None, limits: Drift) -> str:
    """Why a window is not judged (too few queries); "" if it is. `num_queries` None: no window."""
    if num_queries is None or num_queries >= limits.min_window:
        return ""
    return f"not judged: {num_queries} queries, fewer than drift.min_window ({limits.min_window})"


def _label_checks(
    before: Mapping[str, float], new: Mapping[str, Any], levels: Levels
) -> list[Check]:
    """Checks of the metrics and of unknown labels of a window of labelled queries; `before`:
    metrics in percent.
    """
    checks = []
    for metric in shown("judged"):
        if metric in before and metric in new["metrics"]:
            value, error = new["metrics"][metric]
            checks.append(
                _check(
                    without_at(metric),
                    metric,
                    "metric",
                    value,
                    levels,
                    old=before[metric],
                    noise=Z * error,
                )
            )
    missing = new["unknown_labels"]
    name = "labels of the window that the model does not know"
    noise = _noise(0.25, missing["of"])
    return [
        *checks,
        _check("unknown_labels", name, "share", missing["share"], levels, noise=noise),
    ]


def _data_set_checks(old: Mapping[str, Any], new: Mapping[str, Any], levels: Levels) -> list[Check]:
    """Checks of counts, means and shares of a whole data set."""
    checks = [
        _check(key, name, unit, _at(new, path), levels, old=_at(old, path))
        for key, (name, unit, path) in _FIGURES.items()
    ]
    for which, share in new.get("label_changes", {}).items():
        name = {"left": "labels that are gone", "new": "labels that are new"}[which]
        checks.append(_check(f"labels_{which}", name, "share", share, levels))
    checks += _shares(_SHARES, old["shares"], new["shares"], levels)
    cut = (old["queries"]["cut"], new["queries"]["cut"])
    return [*checks, _share("cut", "texts that are cut", *cut, levels)]


def _at(profile: Any, path: Sequence[str]) -> Any:
    """The figure at a place in a profile."""
    return reduce(getitem, path, profile)


def _served_checks(old: Mapping[str, Any], new: Mapping[str, Any], warn: float) -> list[Check]:
    """Checks of the embeddings and of the best labels' scores (`served_facts` of both sides)."""
    levels: Levels = (warn, None)
    std_D = np.asarray(old["std"])
    change_D = np.subtract(new["mean"], old["mean"])
    # dimensions that are constant in the reference are ignored
    varies_D = std_D > 1e-6 * std_D.max(initial=0.0)
    shift = 0.0
    if varies_D.any():
        shifts = change_D[varies_D] / std_D[varies_D]
        shift = float(np.sqrt(np.mean(shifts**2)))
    name = "shift of the mean embedding"
    noise = _noise(1.0, old["count"], new["count"])
    histograms = (old["score_histogram"], new["score_histogram"])
    return [
        _check("shift", name, "shift", shift, levels, step=SHIFTS, noise=noise),
        _distance("score_distance", "distribution of the top score", *histograms, levels),
    ]


def _check(
    key: str,
    name: str,
    unit: Unit,
    new: float,
    levels: Levels,
    *,
    old: float | None = None,
    step: float = 1.0,
    noise: float = 0.0,
) -> Check:
    """The check of a figure that may change by the levels times `step`, or by the noise if that is
    more.

    Counts and means may change by a share of their old value in both directions, metrics may rise
    without limit, all others may only grow. An old value of 0 sets no limit, nor does a limit of 1
    or more for a share.
    """
    both_ways = unit in ("count", "mean", "metric")
    before = old or 0.0
    unit_step = before if both_ways else step

    def bounds(level: float | None) -> Bounds:
        if level is None or not unit_step:
            return NO_LIMIT
        change = max(level * unit_step, noise)
        lowest = max(0.0, before - change) if both_ways else None
        highest = before + change
        if unit == "metric" or (unit == "share" and highest >= 1):
            return lowest, None
        return lowest, highest

    warn, stop = map(bounds, levels)
    return Check(key, name, unit, old, new, warn=warn, stop=stop, noise=noise or None)


def _shares(
    names: Mapping[str, str], old: Mapping[str, Any], new: Mapping[str, Any], levels: Levels
) -> list[Check]:
    """Checks of several shares of defects."""
    return [_share(key, name, old[key], new[key], levels) for key, name in names.items()]


def _share(
    key: str, name: str, old: Mapping[str, float], new: Mapping[str, float], levels: Levels
) -> Check:
    """A share of defects, which may grow by a share of its old value."""
    before = old["share"]
    of = old["of"]
    likely = (before * of + 1) / (of + 2)
    noise = _noise(likely * (1 - likely), of, new["of"])
    step = max(before, SHARE_FLOOR)
    return _check(key, name, "share", new["share"], levels, old=before, step=step, noise=noise)


def _distance(
    key: str,
    name: str,
    old_B: Sequence[int],
    new_B: Sequence[int],
    levels: Levels,
    together: int = 1,
) -> Check:
    """Check the distance of two histograms; `together`: counts per independent observation."""
    sizes = [math.ceil(sum(side) / together) for side in (old_B, new_B)]
    noise = 0.0
    if all(sizes):
        share_B = np.asarray(old_B, dtype=np.float64) / sum(old_B)
        samples = [
            np.random.default_rng(seed).multinomial(size, share_B, DRAWS)
            for seed, size in enumerate(sizes)
        ]
        noise = float(np.quantile(js_distance(*samples), QUANTILE))
    distance = float(js_distance(old_B, new_B))
    return _check(key, name, "distance", distance, levels, noise=noise)


def js_distance(first_B: Any, second_B: Any) -> Any:
    """Jensen-Shannon distance of histograms [..., B] (Lin, 1991): the root of the divergence in
    bits, from 0 (equal) to 1 (disjoint). Two empty histograms are equal.
    """
    with np.errstate(invalid="ignore"):
        distance = jensenshannon(first_B, second_B, base=2, axis=-1)
    one_is_empty = np.any(first_B, axis=-1) != np.any(second_B, axis=-1)
    return np.where(np.isnan(distance), one_is_empty, distance)


def _noise(variance: float, *sizes: float) -> float:
    """The difference of means of samples of these sizes that chance stays below in 99 of 100
    cases.
    """
    inverse = sum(1 / max(size, 1) for size in sizes)
    return Z * math.sqrt(variance * inverse)


def _outside(value: float, bounds: Bounds) -> bool:
    """Whether a value, or NaN, is outside of its bounds."""
    low, high = bounds
    above = low is None or value >= low
    below = high is None or value <= high
    return not (above and below)


def _rounded(values_N: Any) -> list[float]:
    """Values with six significant digits; further digits may depend on the machine."""
    return [float(f"{value:.6g}") for value in values_N]
