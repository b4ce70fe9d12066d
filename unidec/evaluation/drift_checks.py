"""Did more change than allowed? Each figure of a later data set, or of a window of queries, beside the earlier.

Bounds are learnt from the reference: its own figures, the section `drift` of the parameters, and the noise of a window
of that size (`unidec.evaluation.drift`). Of a data set Great Expectations judges them (`unidec.validation`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unidec.evaluation.drift import Noise, js_distance, low_score_noise
from unidec.sections import Drift

Unit = Literal["count", "mean", "share", "distance", "shift", "metric"]
Bounds = tuple[float | None, float | None]
State = Literal["ok", "warning", "stop"]

SHARE_FLOOR = 0.1  # a smaller share may grow as much as this one: twice next to nothing is next to nothing
_Z = 2.58  # of a two-sided interval of 99%

_ROWS = {"train": "training queries", "validation": "validation queries", "test": "test queries", "labels": "labels",
         "pairs": "pairs"}  # fmt: skip
_MEANS = {"positives": "positives a query", "query_length": "characters a query", "query_tokens": "tokens a query",
          "label_length": "characters a label"}  # fmt: skip
_SHARES = {
    "empty_queries": "queries without text",
    "empty_labels": "labels without text",
    "repeated_queries": "training queries whose text another has",
    "repeated_labels": "labels whose text another has",
    "test_texts_in_train": "test queries whose text is a training query's (leak)",
    "queries_without_positives": "queries without positives",
    "labels_without_training_points": "labels without training points",
    "unseen_labels": "labels of held-out queries without training points",
    "unseen_words": "words of held-out queries that no training text has",
}


@dataclass(frozen=True)
class Check:
    """One figure, earlier and later.

    Attributes:
        key, name: for machines and for people. old, new: the figure; a distance has no earlier one.
        unit: a share is 0 to 1, a distance Jensen-Shannon's, a shift in standard deviations, a metric in percent.
        warn, stop: (at least, at most), None: no limit. noise: what chance explains, where that is known.
    """

    key: str
    name: str
    unit: Unit
    old: float | None
    new: float
    warn: Bounds
    stop: Bounds = (None, None)
    noise: float | None = None

    @property
    def state(self) -> State:
        """ok, warning or stop."""
        return "stop" if _outside(self.new, self.stop) else "warning" if _outside(self.new, self.warn) else "ok"

    @property
    def words(self) -> str:
        """One sentence for people."""
        now = f"{self.name}: {shown(self.new, self.unit)}"
        if self.old is not None:
            change = f" ({self.new / self.old - 1:+.1%})" if self.unit in ("count", "mean") and self.old else ""
            now = f"{self.name}: {shown(self.old, self.unit)} before, {shown(self.new, self.unit)} now{change}"
        bounds = self.stop if self.state == "stop" else self.warn
        return f"{now}; {within(bounds, self.unit)} expected" if self.state != "ok" else now

    def to_json(self) -> dict[str, Any]:
        """JSON-able; "check" is the key, "value" the new figure, "drifted" whether it warns or stops."""
        return {
            "check": self.key, "name": self.name, "unit": self.unit, "old": self.old, "value": self.new,
            "warn": list(self.warn), "stop": list(self.stop), "noise": self.noise, "state": self.state,
            "drifted": self.state != "ok", "words": self.words,
        }  # fmt: skip


def shown(value: float | None, unit: Unit) -> str:
    """A figure as people read it."""
    if value is None:
        return "–"
    if unit == "share":
        return f"{value:.2%}" if value < 0.1 else f"{value:.1%}"
    if unit == "count":
        return f"{value:,.0f}"
    if unit in ("mean", "metric"):
        return f"{value:,.2f}"
    return f"{value:.3f} sd" if unit == "shift" else f"{value:.3f}"


def within(bounds: Bounds, unit: Unit) -> str:
    """Bounds as people read them."""
    low, high = bounds
    if low is None:
        return f"at most {shown(high, unit)}"
    return f"at least {shown(low, unit)}" if high is None else f"{shown(low, unit)} to {shown(high, unit)}"


def compare_datasets(
    old: Mapping[str, Any], new: Mapping[str, Any], noise: Noise, limits: Drift,
    labels: Mapping[str, float] | None = None,
) -> list[Check]:  # fmt: skip
    """A later data set beside an earlier one, both as `profile_dataset` counts them, with the same tokenizer.

    Args:
        noise: of the earlier one.
        labels: {"left", "new"}: share of the earlier labels that are gone, of the later ones that are new, if known.
    """
    levels = (limits.warn_change, limits.stop_change)
    before, now = _means(old), _means(new)
    checks = [_relative(k, name, "count", old["rows"][k], new["rows"][k], levels) for k, name in _ROWS.items()]
    checks += [_relative(key, name, "mean", before[key], now[key], levels) for key, name in _MEANS.items()]
    for which, name in {"left": "labels that are gone", "new": "labels that are new"}.items() if labels else ():
        warn, stop = ((None, _above(level)) for level in levels)
        checks.append(Check(f"labels_{which}", name, "share", None, (labels or {})[which], warn, stop))
    checks += [_share(key, name, old["shares"][key], new["shares"][key], levels) for key, name in _SHARES.items()]
    for key, name in (("unknown_tokens", "tokens that the tokenizer does not know"), ("cut", "texts that are cut")):
        checks.append(_share(key, name, old["queries"][key], new["queries"][key], levels))
    counts = {"queries": new["queries"]["count"], "labels": new["labels"]["count"]}
    distances = (limits.warn_distance, limits.stop_distance)
    return checks + [
        _distance(f"{which}_{what}_distance", f"{what} of {which}", old[which], new[which], what, distances, chance)
        for which, size in counts.items()
        for what in ("length", "tokens")
        for chance in [noise.at(what, size)]
    ]


def _means(figures: Mapping[str, Any]) -> dict[str, float]:
    queries, labels = figures["queries"], figures["labels"]
    found = (figures["positives"], queries["length"]["mean"], queries["tokens"]["mean"], labels["length"]["mean"])
    return dict(zip(_MEANS, found, strict=True))


def compare_texts(reference: Mapping[str, Any], window: Mapping[str, Any], noise: Noise, limits: Drift) -> list[Check]:
    """The texts of a window of queries (`Measured.summary`) beside those that a model was trained on (its profile)."""
    size = window["count"]
    limit = (limits.warn_distance, None)
    checks = [
        _distance(f"{what}_distance", f"{what} of queries", reference["queries"], window, what, limit,
                  noise.at(what, size))
        for what in ("length", "tokens")
    ]  # fmt: skip
    names = {"unknown_tokens": "tokens that the tokenizer does not know", "unseen_words": "words that training lacked"}
    for key, name in names.items() if reference["held_out"] else ():
        before, chance = reference["held_out"][key]["share"], noise.at(key, size)
        high = before + max(limits.warn_change * max(before, SHARE_FLOOR), chance)
        checks.append(Check(key, name, "share", before, window[key]["share"], (None, high), noise=chance))
    return checks


def compare_answers(
    reference: Mapping[str, Any], window: Mapping[str, Any], size: int, noise: Noise, limits: Drift
) -> list[Check]:
    """What a bundle answers a window of `size` queries (`compare_served`) beside what it answered the reference's."""
    spread_noise, shift_noise, score_noise = (noise.at(name, size) for name in ("spread", "shift", "score"))
    spread = max(limits.warn_change, spread_noise)
    low_noise = low_score_noise(limits.low_score_quantile, reference["count"], size)
    return [
        Check("shift", "shift of the mean embedding", "shift", None, window["shift"],
              (None, max(limits.warn_shift, shift_noise)), noise=shift_noise),
        Check("spread", "variance of the embeddings (reference: 1)", "mean", 1.0, 1 + window["spread"],
              (1 - spread, 1 + spread), noise=spread_noise),
        Check("score_distance", "distribution of the top score", "distance", None, window["score"],
              (None, max(limits.warn_distance, score_noise)), noise=score_noise),
        Check("low_score", f"queries with a top score below {window['low_score_below']:.3f}", "share",
              limits.low_score_quantile, window["low_score"], (None, max(limits.warn_low_score, low_noise)),
              noise=low_noise),
    ]  # fmt: skip


def compare_quality(
    reference: Mapping[str, float], metrics: Mapping[str, float], errors: Mapping[str, float],
    unknown_labels: Mapping[str, float], limits: Drift,
) -> list[Check]:  # fmt: skip
    """A labelled window's metrics in percent (`errors`: their standard errors) beside those of the validation split."""
    checks = []
    for name in ("P@1", "nDCG@5"):
        if name in reference and name in metrics:
            before, chance = reference[name], _Z * errors[name]
            low = before - max(limits.warn_change * before, chance)
            key = name.replace("@", "_at_")
            checks.append(Check(key, name, "metric", before, metrics[name], (low, None), noise=chance))
    high = min(1.0, max(limits.warn_change, _Z * math.sqrt(0.25 / max(unknown_labels["of"], 1))))
    name = "labels of the window that the model does not know"
    return [*checks, Check("unknown_labels", name, "share", None, unknown_labels["share"], (None, high))]


def order(checks: Sequence[Check]) -> list[Check]:
    """What stops first, then what warns, then the rest; else as they were."""
    return sorted(checks, key=lambda check: ("stop", "warning", "ok").index(check.state))


def _relative(key: str, name: str, unit: Unit, old: float, new: float, levels: tuple[float, float]) -> Check:
    """A count or a mean may change by a share of itself; where there was nothing there is nothing to compare with."""
    warn, stop = ((old * max(0.0, 1 - level), old * (1 + level)) if old else (None, None) for level in levels)
    return Check(key, name, unit, old, new, warn, stop)


def _share(
    key: str, name: str, old: Mapping[str, float], new: Mapping[str, float], levels: tuple[float, float]
) -> Check:
    """A share of something bad may grow by a share of itself, and by what chance explains (of independent items)."""
    before = old["share"]
    likely = (before * old["of"] + 1) / (old["of"] + 2)
    chance = _Z * math.sqrt(likely * (1 - likely) * (1 / max(old["of"], 1) + 1 / max(new["of"], 1)))
    warn, stop = (min(1.0, before + max(level * max(before, SHARE_FLOOR), chance)) for level in levels)
    return Check(key, name, "share", before, new["share"], (None, _above(warn)), (None, _above(stop)), chance)


def _distance(
    key: str, name: str, old: Mapping[str, Any], new: Mapping[str, Any], what: str,
    limits: tuple[float, float | None], noise: float,
) -> Check:  # fmt: skip
    part = {"length": "histogram", "tokens": "buckets"}[what]
    distance = js_distance(old[what][part], new[what][part])
    warn, stop = (None if limit is None else max(limit, noise) for limit in limits)
    return Check(key, f"distribution of the {name}", "distance", None, distance, (None, warn), (None, stop), noise)


def _above(limit: float) -> float | None:
    """No limit where nothing can be above it."""
    return None if limit >= 1 else limit


def _outside(value: float, bounds: Bounds) -> bool:
    low, high = bounds
    return not ((low is None or value >= low) and (high is None or value <= high))
