"""Drift: compare later data, or a window of queries, with the training data of a model.

All figures are compared by one method. Each has a change or a distance, and a limit from section
`drift` of the parameters. The limit is raised to what chance explains in 99 of 100 samples of that
size: 2.58 standard errors for a share, a mean or a metric; for a distance of histograms, its
quantile over samples from the reference's histogram (parametric bootstrap, Efron and Tibshirani
1993). For a data set, Great Expectations evaluates the checks (`unidec.validation.checkpoint_run`).

Shape legend: N queries, D width of the embeddings, B bins, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from scipy.spatial.distance import jensenshannon

from unidec.config import Drift

Unit = Literal["count", "mean", "share", "distance", "shift", "metric"]
State = Literal["stop", "warning", "ok", "not judged"]
Bounds = tuple[float | None, float | None]
# largest change without a warning, and without a stop (None: it never stops)
Levels = tuple[float, float | None]

STATES = get_args(State)  # in the order of a page
# of what chance explains, as a quantile and as a two-sided normal interval
QUANTILE = 0.99
Z = 2.58
DRAWS = 200
# tokens that count as one observation, since a text's tokens depend on each other (Kish 1965)
TOKENS_TOGETHER = 2
# smaller shares may grow by as much as a share of this size: doubling a tiny share is harmless
SHARE_FLOOR = 0.1
SCORE_QUANTILES = 101
SCORE_BINS = 20
NO_LIMIT: Bounds = (None, None)
_FORMATS = {
    "count": "{:,.0f}",
    "mean": "{:,.2f}",
    "metric": "{:,.2f}",
    "shift": "{:.3f} sd",
    "distance": "{:.3f}",
}

_COUNTS = {
    "train": "training queries",
    "validation": "validation queries",
    "test": "test queries",
    "labels": "labels",
    "pairs": "pairs",
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
_STRANGE = {
    "unknown_tokens": "tokens that the tokenizer does not know",
    "unseen_words": "words that training lacked",
}


@dataclass(frozen=True)
class Check:
    """One figure of the earlier and the later data, with its limits.

    Attributes:
        key, name: identifier and displayed name. old, new: the figure; a distance has no earlier
        one.
        unit: a share is 0 to 1, a distance Jensen-Shannon's, a shift in standard deviations, a
        metric in percent.
        warn, stop: (minimum, maximum), None: no limit. noise: change that chance explains; None if
        unknown.
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
        return (
            "stop"
            if _outside(self.new, self.stop)
            else "warning"
            if _outside(self.new, self.warn)
            else "ok"
        )

    @property
    def words(self) -> str:
        """A sentence about the figure, and the limit if it is exceeded."""
        before = "" if self.old is None else f"{self.shown(self.old)} before, "
        change = (
            f" now ({self.new / self.old - 1:+.1%})"
            if self.old and self.unit in ("count", "mean")
            else ""
        )
        now = f"{self.name}: {before}{self.shown(self.new)}{change or (' now' if before else '')}"
        bounds = self.stop if self.state == "stop" else self.warn
        return f"{now}; {self.within(bounds)} expected" if self.drifted else now

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
        low, high = bounds
        if low is None:
            return "" if high is None else f"at most {self.shown(high)}"
        return (
            f"at least {self.shown(low)}"
            if high is None
            else f"{self.shown(low)} to {self.shown(high)}"
        )

    def to_json(self) -> dict[str, object]:
        """The check for JSON: "check" is the key, "value" the new figure."""
        fields = asdict(self) | {"warn": list(self.warn), "stop": list(self.stop)}
        del fields["judged"]  # the state says so
        renamed = {"check": fields.pop("key"), "value": fields.pop("new")}
        return {
            **renamed,
            **fields,
            "state": self.state,
            "drifted": self.drifted,
            "words": self.words,
        }


def served_facts(
    vectors_ND: Any, scores_N: Any, edges: Sequence[float] | None = None
) -> dict[str, Any] | None:
    """Figures of queries in a bundle's searched space, for JSON; None without queries.

    Args:
        vectors_ND: in the searched space. scores_N: of each query's best label.
        edges: bin edges of the histogram of scores, from the reference; None: `SCORE_BINS` bins of
        equal size.
    """
    if not len(scores_N):
        return None
    vectors = np.asarray(vectors_ND, dtype=np.float64)
    scores = np.asarray(scores_N, dtype=np.float64)
    if edges is None:
        edges = np.unique(
            _rounded(np.quantile(scores, np.arange(1, SCORE_BINS) / SCORE_BINS))
        ).tolist()
    return {
        "count": len(scores),
        "mean": _rounded(vectors.mean(axis=0)),
        "std": _rounded(vectors.std(axis=0)),
        "score_quantiles": _rounded(np.quantile(scores, np.linspace(0, 1, SCORE_QUANTILES))),
        "score_edges": list(edges),
        "score_histogram": np.bincount(
            np.searchsorted(edges, scores, side="right"), minlength=len(edges) + 1
        ).tolist(),
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
    change: Levels = (limits.warn_change, limits.stop_change if whole else None)
    distance: Levels = (limits.warn_distance, limits.stop_distance if whole else None)
    checks = _data_set_checks(old, new, change) if whole else []
    for side in ("queries", "labels") if whole else ("queries",):
        for what, part, together in (
            ("length", "histogram", 1),
            ("tokens", "buckets", TOKENS_TOGETHER),
        ):
            key = f"{side}_{what}_distance"[0 if whole else 8 :]
            name = f"distribution of the {what} of {side}"
            checks.append(
                _distance(
                    key, name, old[side][what][part], new[side][what][part], distance, together
                )
            )
    for key, name in _STRANGE.items() if old["held_out"] and new["held_out"] else ():
        checks.append(_share(key, name, old["held_out"][key], new["held_out"][key], change))
    if old.get("served") and new.get("served"):
        checks += _served_checks(old["served"], new["served"], limits)
    if not is_judged(new.get("count"), limits):
        checks = [replace(check, judged=False) for check in checks]
    if "unknown_labels" in new:
        of_labels = _label_checks(old["metrics"], new, change)
        judged = is_judged(new.get("labelled"), limits)
        checks += [replace(check, judged=judged) for check in of_labels]
    return sorted(checks, key=lambda check: STATES.index(check.state))


def is_judged(num_queries: int | None, limits: Drift) -> bool:
    """Whether a window has enough queries to be judged; None: not a window."""
    return num_queries is None or num_queries >= limits.min_window


def _label_checks(
    before: Mapping[str, float], new: Mapping[str, Any], change: Levels
) -> list[Check]:
    """Checks of the metrics and of unknown labels of a window of labelled queries; `before`:
    metrics in percent.
    """
    checks = []
    for name in ("P@1", "nDCG@5"):
        if name in before and name in new["metrics"]:
            value, error = new["metrics"][name]
            noise = Z * error
            checks.append(
                _band(name.replace("@", "_at_"), name, "metric", before[name], value, change, noise)
            )
    missing = new["unknown_labels"]
    name = "labels of the window that the model does not know"
    noise = _noise(0.25, missing["of"])
    checks.append(_growth("unknown_labels", name, "share", None, missing["share"], change, noise))
    return checks


def _data_set_checks(old: Mapping[str, Any], new: Mapping[str, Any], change: Levels) -> list[Check]:
    """Checks of counts, means and shares of a whole data set."""
    checks = [
        _band(key, name, "count", old["rows"][key], new["rows"][key], change)
        for key, name in _COUNTS.items()
    ]
    checks.append(
        _band("positives", "positives a query", "mean", old["positives"], new["positives"], change)
    )
    for key, side, what in (
        ("query_length", "queries", "length"),
        ("query_tokens", "queries", "tokens"),
        ("label_length", "labels", "length"),
    ):
        name = f"{'tokens' if what == 'tokens' else 'characters'} a {key.partition('_')[0]}"
        checks.append(
            _band(key, name, "mean", old[side][what]["mean"], new[side][what]["mean"], change)
        )
    for which, name in (("left", "labels that are gone"), ("new", "labels that are new")):
        if "label_changes" in new:
            checks.append(
                _growth(f"labels_{which}", name, "share", None, new["label_changes"][which], change)
            )
    checks += [
        _share(key, name, old["shares"][key], new["shares"][key], change)
        for key, name in _SHARES.items()
    ]
    return [
        *checks,
        _share("cut", "texts that are cut", old["queries"]["cut"], new["queries"]["cut"], change),
    ]


def _served_checks(old: Mapping[str, Any], new: Mapping[str, Any], limits: Drift) -> list[Check]:
    """Checks of the embeddings and of the best labels' scores (`served_facts` of both sides)."""
    sizes = (old["count"], new["count"])
    low = limits.low_score_quantile
    std = np.asarray(old["std"])
    new_std = np.asarray(new["std"])
    change = np.subtract(new["mean"], old["mean"])
    # dimensions that are constant in the reference are ignored
    varies = std > 1e-6 * std.max(initial=0.0)
    shift = float(np.sqrt(np.mean((change[varies] / std[varies]) ** 2))) if varies.any() else 0.0
    spread = float((new_std**2).sum() / max((std**2).sum(), 1e-300))
    below = float(np.interp(low, np.linspace(0, 1, SCORE_QUANTILES), old["score_quantiles"]))
    share = float((np.asarray(new["score_quantiles"]) < below).mean())
    return [
        _growth(
            "shift",
            "shift of the mean embedding",
            "shift",
            None,
            shift,
            (limits.warn_shift, None),
            _noise(1.0, *sizes),
        ),
        _band(
            "spread",
            "variance of the embeddings (reference: 1)",
            "mean",
            1.0,
            spread,
            (limits.warn_change, None),
            _noise(2.0, *sizes),
        ),
        _distance(
            "score_distance",
            "distribution of the top score",
            old["score_histogram"],
            new["score_histogram"],
            (limits.warn_distance, None),
        ),
        _growth(
            "low_score",
            f"queries with a top score below {below:.3f}",
            "share",
            low,
            share,
            (limits.warn_low_score - low, None),
            _noise(low * (1 - low), *sizes),
        ),
    ]


def _band(
    key: str, name: str, unit: Unit, old: float, new: float, levels: Levels, noise: float = 0.0
) -> Check:
    """A figure that may change by a share of its old value in both directions (a metric may rise
    without limit); an old value of 0 sets no limit.
    """
    warn, stop = (
        NO_LIMIT
        if level is None or not old
        else (
            max(0.0, old - max(level * old, noise)),
            None if unit == "metric" else old + max(level * old, noise),
        )
        for level in levels
    )
    return Check(key, name, unit, old, new, warn, stop, noise or None)


def _growth(
    key: str,
    name: str,
    unit: Unit,
    old: float | None,
    new: float,
    levels: Levels,
    noise: float = 0.0,
) -> Check:
    """A figure that may grow by the levels, or by what chance explains if that is more. A share
    cannot exceed 1, so a higher limit is none.
    """
    limits = [None if level is None else (old or 0.0) + max(level, noise) for level in levels]
    warn, stop = (
        None if limit is None or (unit == "share" and limit >= 1) else limit for limit in limits
    )
    return Check(key, name, unit, old, new, (None, warn), (None, stop), noise or None)


def _share(
    key: str, name: str, old: Mapping[str, float], new: Mapping[str, float], levels: Levels
) -> Check:
    """A share of defects, which may grow by a share of its old value."""
    before = old["share"]
    likely = (old["share"] * old["of"] + 1) / (old["of"] + 2)
    step, (warn, stop) = max(before, SHARE_FLOOR), levels
    noise = _noise(likely * (1 - likely), old["of"], new["of"])
    grown = (warn * step, None if stop is None else stop * step)
    return _growth(key, name, "share", before, new["share"], grown, noise)


def _distance(
    key: str,
    name: str,
    old_B: Sequence[int],
    new_B: Sequence[int],
    levels: Levels,
    together: int = 1,
) -> Check:
    """A distance of two histograms; `together`: counts that make up one independent observation."""
    sizes = [math.ceil(sum(side) / together) for side in (old_B, new_B)]
    noise = 0.0
    if all(sizes):
        share_B = np.asarray(old_B, dtype=np.float64) / sum(old_B)
        first_RB, second_RB = (
            np.random.default_rng(i).multinomial(n, share_B, DRAWS) for i, n in enumerate(sizes)
        )
        noise = float(np.quantile(js_distance(first_RB, second_RB), QUANTILE))
    return _growth(key, name, "distance", None, float(js_distance(old_B, new_B)), levels, noise)


def js_distance(first_B: Any, second_B: Any) -> Any:
    """Jensen-Shannon distance of histograms [..., B] (Lin, 1991): the root of the divergence in
    bits, from 0 (equal) to 1 (disjoint). Two empty histograms are equal.
    """
    with np.errstate(invalid="ignore"):
        distance = jensenshannon(first_B, second_B, base=2, axis=-1)
    one_is_empty = np.any(first_B, axis=-1) != np.any(second_B, axis=-1)
    return np.where(np.isnan(distance), one_is_empty, distance)


def _noise(variance: float, *sizes: float) -> float:
    """The difference of means of samples of these sizes that chance stays below in 99
    of 100 cases.
    """
    return Z * math.sqrt(variance * sum(1 / max(size, 1) for size in sizes))


def _outside(value: float, bounds: Bounds) -> bool:
    low, high = bounds
    return not ((low is None or value >= low) and (high is None or value <= high))


def _rounded(values_N: Any) -> list[float]:
    """Values with six significant digits; further digits may depend on the machine."""
    return [float(f"{value:.6g}") for value in values_N]
