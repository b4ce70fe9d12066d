"""Did more change than allowed? Each figure of a later data set, or of a window of queries, beside the earlier.

Bounds are learnt from the reference: its own figures, the section `drift` of the parameters, and the noise of a window
of that size (`unidec.evaluation.drift`). Of a data set Great Expectations judges them (`unidec.validation`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from unidec.evaluation.drift import Noise, js_distance, low_score_noise
from unidec.sections import Drift

Unit = Literal["count", "mean", "share", "distance", "shift", "metric"]
Bounds = tuple[float | None, float | None]
State = Literal["ok", "warning", "stop"]

SHARE_FLOOR = 0.1  # a smaller share may grow as much as this one: twice next to nothing is next to nothing
_Z = 2.58  # of a two-sided interval of 99%
_FORMATS = {"count": "{:,.0f}", "mean": "{:,.2f}", "metric": "{:,.2f}", "shift": "{:.3f} sd", "distance": "{:.3f}"}

_ROWS = {"train": "training queries", "validation": "validation queries", "test": "test queries", "labels": "labels",
         "pairs": "pairs"}  # fmt: skip
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
_UNKNOWN = "tokens that the tokenizer does not know"


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
    def change(self) -> str:
        """From the earlier figure to the later; "" where there is no earlier one."""
        if self.old is None:
            return ""
        if self.unit in ("count", "mean") and self.old:
            return f"{self.new / self.old - 1:+.1%}"
        return f"{100 * (self.new - self.old):+.2f} pp" if self.unit == "share" else f"{self.new - self.old:+.2f}"

    @property
    def words(self) -> str:
        """One sentence for people."""
        now = f"{self.name}: {self.shown(self.new)}"
        if self.old is not None:
            change = f" ({self.change})" if self.unit in ("count", "mean") and self.old else ""
            now = f"{self.name}: {self.shown(self.old)} before, {self.shown(self.new)} now{change}"
        bounds = self.stop if self.state == "stop" else self.warn
        return f"{now}; {self.within(bounds)} expected" if self.state != "ok" else now

    def shown(self, value: float | None) -> str:
        """A figure of this unit as people read it."""
        if value is None:
            return "–"
        if self.unit == "share":
            return f"{value:.2%}" if value < 0.1 else f"{value:.1%}"
        return _FORMATS[self.unit].format(value)

    def within(self, bounds: Bounds) -> str:
        """Bounds as people read them; "" for no limit."""
        low, high = bounds
        if low is None:
            return "" if high is None else f"at most {self.shown(high)}"
        return f"at least {self.shown(low)}" if high is None else f"{self.shown(low)} to {self.shown(high)}"

    def to_json(self) -> dict[str, Any]:
        """JSON-able; "check" is the key, "value" the new figure, "drifted" whether it warns or stops."""
        fields = asdict(self) | {"warn": list(self.warn), "stop": list(self.stop)}
        named = {"check": fields.pop("key"), "value": fields.pop("new")}
        return {**named, **fields, "state": self.state, "drifted": self.state != "ok", "words": self.words}


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
    checks = [_relative(k, name, "count", old["rows"][k], new["rows"][k], levels) for k, name in _ROWS.items()]
    for (key, name, before), (_, _, now) in zip(_means(old), _means(new), strict=True):
        checks.append(_relative(key, name, "mean", before, now, levels))
    for which, name in {"left": "labels that are gone", "new": "labels that are new"}.items() if labels else ():
        warn, stop = ((None, _below_one(level)) for level in levels)
        checks.append(Check(f"labels_{which}", name, "share", None, (labels or {})[which], warn, stop))
    checks += [_share(key, name, old["shares"][key], new["shares"][key], levels) for key, name in _SHARES.items()]
    for key, name in (("unknown_tokens", _UNKNOWN), ("cut", "texts that are cut")):
        checks.append(_share(key, name, old["queries"][key], new["queries"][key], levels))
    distances = (limits.warn_distance, limits.stop_distance)
    for which in ("queries", "labels"):
        checks += _distances(f"{which}_", which, old[which], new[which], noise, distances)
    return checks


def compare_texts(reference: Mapping[str, Any], window: Mapping[str, Any], noise: Noise, limits: Drift) -> list[Check]:
    """The texts of a window of queries (`Measured.summary`) beside those that a model was trained on (its profile)."""
    checks = _distances("", "queries", reference["queries"], window, noise, (limits.warn_distance, None))
    names = {"unknown_tokens": _UNKNOWN, "unseen_words": "words that training lacked"}
    for key, name in names.items() if reference["held_out"] else ():
        before, chance = reference["held_out"][key]["share"], noise.at(key, window["count"])
        high = before + max(limits.warn_change * max(before, SHARE_FLOOR), chance)
        checks.append(Check(key, name, "share", before, window[key]["share"], (None, high), noise=chance))
    return checks


def compare_answers(
    reference: Mapping[str, Any], window: Mapping[str, Any], size: int, noise: Noise, limits: Drift
) -> list[Check]:
    """What a bundle answers a window of `size` queries (`compare_served`) beside what it answered the reference's."""
    spread_noise, shift_noise, score_noise = (noise.at(name, size) for name in ("spread", "shift", "score"))
    spread, low = max(limits.warn_change, spread_noise), limits.low_score_quantile
    low_noise = low_score_noise(low, reference["count"], size)
    return [
        Check("shift", "shift of the mean embedding", "shift", None, window["shift"],
              (None, max(limits.warn_shift, shift_noise)), noise=shift_noise),
        Check("spread", "variance of the embeddings (reference: 1)", "mean", 1.0, 1 + window["spread"],
              (1 - spread, 1 + spread), noise=spread_noise),
        Check("score_distance", "distribution of the top score", "distance", None, window["score"],
              (None, max(limits.warn_distance, score_noise)), noise=score_noise),
        Check("low_score", f"queries with a top score below {window['low_score_below']:.3f}", "share", low,
              window["low_score"], (None, max(limits.warn_low_score, low_noise)), noise=low_noise),
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


def _means(figures: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """(key, name, mean) each."""
    queries, labels = figures["queries"], figures["labels"]
    return [
        ("positives", "positives a query", figures["positives"]),
        ("query_length", "characters a query", queries["length"]["mean"]),
        ("query_tokens", "tokens a query", queries["tokens"]["mean"]),
        ("label_length", "characters a label", labels["length"]["mean"]),
    ]


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
    warn, stop = (_below_one(before + max(level * max(before, SHARE_FLOOR), chance)) for level in levels)
    return Check(key, name, "share", before, new["share"], (None, warn), (None, stop), chance)


def _distances(
    prefix: str, which: str, old: Mapping[str, Any], new: Mapping[str, Any], noise: Noise,
    limits: tuple[float, float | None],
) -> list[Check]:  # fmt: skip
    """Of lengths and of tokens, between two summaries of texts."""
    checks = []
    for what, part in (("length", "histogram"), ("tokens", "buckets")):
        chance, distance = noise.at(what, new["count"]), float(js_distance(old[what][part], new[what][part]))
        warn, stop = (None if limit is None else max(limit, chance) for limit in limits)
        name = f"distribution of the {what} of {which}"
        checks.append(
            Check(f"{prefix}{what}_distance", name, "distance", None, distance, (None, warn), (None, stop), chance)
        )
    return checks


def _below_one(limit: float) -> float | None:
    """No limit where no share can be above it."""
    return None if limit >= 1 else limit


def _outside(value: float, bounds: Bounds) -> bool:
    low, high = bounds
    return not ((low is None or value >= low) and (high is None or value <= high))
