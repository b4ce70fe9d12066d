"""Paired significance tests over queries, and the checks of a challenger.

Shape legend: N queries, K predicted labels, L labels, R resamples, C comparisons (system, opponent,
metric).

Every metric here is 100 * sum_i above_i / sum_i below_i over the queries (`metrics.by_query`). The
denominator does not depend on the system, so the mean of a metric over seeds is the ratio of the
means, and the same code tests means and ratios.

- Interval: paired bootstrap; queries are drawn with replacement, the same draw for both systems
  (Koehn 2004).
- p-value: randomisation test; each query's two results are swapped at random (Noreen 1989; Smucker
  et al. 2007).
- Several seeds: a query's results under all seeds are drawn or swapped together, so the tests are
  about these trained models. Treating the seeds as independent sets of queries would find too many
  differences.
- p-values are corrected over all comparisons of a call (Holm 1979).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from unidec.config import Gate
from unidec.data.chunks import blocks
from unidec.evaluation.metrics import Floats, QueryParts, by_query, evaluate
from unidec.metric_names import parse

ALPHA = 0.05
NUM_SAMPLES = 10_000
_BLOCK = 2**21  # query draws per block: some 50 MB
_TIE = 1e-9  # percentage points: tolerance for sums in another order
Runs = Mapping[str, Sequence[QueryParts]]
"""System -> `metrics.by_query` of its runs, one per seed, all for the same queries and truth."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of two systems on one metric.

    Attributes:
        value, against_value: the metric in percent, mean over seeds. difference: value -
        against_value.
        low, high: 95 % interval of the difference, in percentage points.
        p_value: two-sided. p_adjusted: after Holm's correction over all comparisons of the call.
    """

    system: str
    against: str
    metric: str
    value: float
    against_value: float
    difference: float
    low: float
    high: float
    p_value: float
    p_adjusted: float
    num_queries: int

    @property
    def better(self) -> bool:
        """Whether `system` is significantly better."""
        return self.p_adjusted < ALPHA and self.difference > 0

    @property
    def worse(self) -> bool:
        """Whether `system` is significantly worse."""
        return self.p_adjusted < ALPHA and self.difference < 0


def compare_systems(
    runs: Runs,
    against: str | Mapping[str, str],
    metrics: Sequence[str],
    *,
    systems: Sequence[str] | None = None,
    num_samples: int | None = None,
    seed: int = 0,
) -> list[Comparison]:
    """Compare every system with one of them on every metric; p-values are corrected over all of
    these comparisons.

    Args:
        against: the system to compare with, or metric -> system (`best_systems`).
        systems: the systems to compare; None: all.
        num_samples: R; None: 10,000, or more if Holm's correction needs smaller p-values.
        seed: of the random draws.

    Returns:
        One comparison for each (other system, metric), systems in the order of `runs`.
    """
    opponents = dict.fromkeys(metrics, against) if isinstance(against, str) else against
    compared = [
        (system, opponents[metric], metric)
        for system in systems or runs
        for metric in metrics
        if system != opponents[metric]
    ]
    if not compared:
        return []
    if num_samples is None:
        # the smallest p-value is about 2 / R: below alpha even after the correction for all
        num_samples = max(NUM_SAMPLES, round(4 * len(compared) / ALPHA))
    mean = _means(runs, metrics)
    any_run = next(iter(runs.values()))[0]
    columns = [
        (mean[system, metric], mean[other, metric], any_run[metric][1])
        for system, other, metric in compared
    ]
    ours_NC, theirs_NC, below_NC = np.stack(columns, axis=-1)
    gap_NC = ours_NC - theirs_NC
    p_C = _randomisation(gap_NC, num_samples, seed + 1)
    below_C = below_NC.sum(axis=0)
    ours_C = _ratio(ours_NC.sum(axis=0), below_C)
    theirs_C = _ratio(theirs_NC.sum(axis=0), below_C)
    difference_RC = _bootstrap(gap_NC, below_NC, num_samples, seed)
    figures = {
        "value": ours_C,
        "against_value": theirs_C,
        "difference": ours_C - theirs_C,
        "low": np.percentile(difference_RC, 2.5, axis=0),
        "high": np.percentile(difference_RC, 97.5, axis=0),
        "p_value": p_C,
        "p_adjusted": holm(p_C),
    }
    return [
        Comparison(
            system=system,
            against=other,
            metric=metric,
            num_queries=len(gap_NC),
            **{name: float(figure_C[c]) for name, figure_C in figures.items()},
        )
        for c, (system, other, metric) in enumerate(compared)
    ]


def paired_differences(
    first: QueryParts,
    second: QueryParts,
    metric: str,
    *,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
) -> Floats:
    """Differences first - second of a metric in resamples of the queries, which both share: float64
    [R], percentage points.
    """
    above_N, below_N = first[metric]
    gap_N1 = (above_N - second[metric][0])[:, None]
    return _bootstrap(gap_N1, below_N[:, None], num_samples, seed).ravel()


def best_systems(runs: Runs, names: Sequence[str], metrics: Sequence[str]) -> dict[str, str]:
    """Metric -> the best of the systems `names` by their mean over runs; on ties the first."""
    mean = _means(runs, metrics)
    return {metric: max(names, key=lambda name: mean[name, metric].sum()) for metric in metrics}


def holm(p_values: Any) -> Floats:
    """p-values after Holm's step-down correction: float64, in the given order, at most 1.

    The i-th smallest of n p-values is multiplied by n - i + 1, and raised to the previous corrected
    value if smaller."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    multiplied = p[order] * np.arange(len(p), 0, -1)
    corrected = np.empty_like(p)
    corrected[order] = np.maximum.accumulate(multiplied).clip(max=1.0)
    return corrected


def _ratio(above: Any, below: Any) -> Any:
    """above / below in percent; 0 where below is 0."""
    return 100.0 * np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _means(runs: Runs, metrics: Sequence[str]) -> dict[tuple[str, str], Floats]:
    """(system, metric) -> each query's contribution to the numerator, mean over the runs, [N]."""
    return {
        (system, metric): np.mean([run[metric][0] for run in of_system], axis=0)
        for system, of_system in runs.items()
        for metric in metrics
    }


def _blocks(num_samples: int, num_queries: int) -> list[int]:
    """Sizes of the blocks of resamples."""
    block = max(1, _BLOCK // num_queries)
    return [some.stop - some.start for some in blocks(num_samples, block)]


def _bootstrap(gap_NC: Floats, below_NC: Floats, num_samples: int, seed: int) -> Floats:
    """Differences in percentage points, [R, C]; all columns share each draw of the queries."""
    num_queries = len(gap_NC)
    generator = np.random.default_rng([seed, 0])
    parts = []
    for size in _blocks(num_samples, num_queries):
        drawn_RN = generator.integers(num_queries, size=(size, num_queries))
        drawn_RN += np.arange(size)[:, None] * num_queries
        count = np.bincount(drawn_RN.ravel(), minlength=size * num_queries)
        count_RN = count.reshape(size, -1).astype(np.float64)
        parts.append(_ratio(count_RN @ gap_NC, count_RN @ below_NC))
    return np.concatenate(parts)


def _randomisation(gap_NC: Floats, num_samples: int, seed: int) -> Floats:
    """p-values [C]: the share of random swaps whose difference is at least as large as the observed
    one, which is counted among them (add one). All columns and all seeds share each query's swap.
    """
    num_queries, num_compared = gap_NC.shape
    generator = np.random.default_rng(seed)
    scale_C = np.abs(gap_NC).sum(axis=0).clip(min=1e-300)
    # denominators are equal, so numerators are compared
    observed_C = np.abs(gap_NC.sum(axis=0)) - 1e-11 * scale_C
    extreme_C = np.zeros(num_compared)
    for size in _blocks(num_samples, num_queries):
        drawn_RN = generator.integers(2, size=(size, num_queries), dtype=np.int32)
        sign_RN = 2.0 * drawn_RN - 1.0
        swapped_RC = np.abs(sign_RN @ gap_NC)
        extreme_C += (swapped_RC >= observed_C).sum(axis=0)
    return (extreme_C + 1) / (num_samples + 1)


@dataclass(frozen=True)
class Check:
    """One check of a challenger: name, whether it passed, the value and its limit (None: no
    figures), a sentence.
    """

    check: str
    passed: bool
    got: float | str | None
    limit: float | str | None
    words: str


def challenge(
    challenger_NK: Any,
    champion_NK: Any,
    relevance: csr_matrix,
    inverse_propensity_L: Any,
    group_L: Any,
    rules: Gate,
) -> tuple[list[Check], dict[str, Any]]:
    """Measure both rankings, and check whether the challenger may replace the champion.

    Args:
        challenger_NK, champion_NK: int [N, K], rows of the data set's labels, best first; -1 = none
        (a miss).
        relevance: CSR [N, L], the truth after filters. inverse_propensity_L, group_L: [L].
        rules: the deciding metric, its margin (negative: the allowed loss) and the share of the
            paired bootstrap's resamples in which the margin must be reached (0: not checked); the
            guarded metrics and their allowed loss.

    Returns:
        the checks (the deciding metric, its confidence, the guarded metrics), and a mapping:
        "metrics": {"challenger", "champion"}: all metrics of each, in percent. "comparison":
        {"metric": the deciding one, "difference": challenger - champion on it, in points,
        "confidence": share of the resamples in which the challenger is ahead by the margin (None
        for coverage), "intervals": {metric: [low, high]}, 95 % intervals of the difference by
        paired bootstrap (not for coverage), "num_queries", "better", "worse": numbers of queries on
        which the challenger is better or worse}.

    Raises:
        DataError: shapes do not match.
    """
    weights = (inverse_propensity_L, group_L)
    both = (challenger_NK, champion_NK)
    deciding, *guarded = dict.fromkeys([rules.metric, *rules.guarded])
    paired = [name for name in (deciding, *guarded) if parse(name).kind != "coverage"]
    new, old = (evaluate(found_NK, relevance, *weights) for found_NK in both)
    new_parts, old_parts = (by_query(found_NK, relevance, paired, *weights) for found_NK in both)
    differences = {name: paired_differences(new_parts, old_parts, name) for name in paired}
    comparison: dict[str, Any] = {
        "metric": deciding,
        "difference": new[deciding] - old[deciding],
        "confidence": None,
        "intervals": {
            name: np.percentile(of_name_R, [2.5, 97.5]).tolist()
            for name, of_name_R in differences.items()
        },
        "num_queries": int(new["num_queries"]),
        "better": 0,
        "worse": 0,
    }
    required = f"at least {rules.margin:+.2f} required"
    checks = [_check(deciding, new, old, rules.margin, required)]
    if deciding in paired:
        gap_N = new_parts[deciding][0] - old_parts[deciding][0]
        comparison["better"] = int((gap_N > 1e-12).sum())
        comparison["worse"] = int((gap_N < -1e-12).sum())
        is_ahead_R = differences[deciding] >= rules.margin - _TIE
        comparison["confidence"] = float(is_ahead_R.mean())
        if rules.confidence > 0:
            checks.append(_confidence(comparison, rules))
    may_lose = f"it may lose {rules.tolerance:.2f}"
    checks += [_check(name, new, old, -rules.tolerance, may_lose) for name in guarded]
    return checks, {"metrics": {"challenger": new, "champion": old}, "comparison": comparison}


def _confidence(comparison: Mapping[str, Any], rules: Gate) -> Check:
    """A check that the challenger is ahead by the margin in enough resamples."""
    share = comparison["confidence"]
    low, high = comparison["intervals"][rules.metric]
    ahead = f"worse by at most {-rules.margin:z.2f}"  # z: 0.00, never -0.00
    if rules.margin > 0:
        ahead = f"ahead by {rules.margin:.2f}"
    words = (
        f"in {share:.1%} of the resamples of {comparison['num_queries']:,} queries the challenger "
        f"is {ahead} points, {rules.confidence:.0%} required; 95 % interval: "
        f"{low:+.2f} to {high:+.2f} points"
    )
    return Check("confidence", share >= rules.confidence, share, rules.confidence, words)


def _check(
    name: str, new: dict[str, float], old: dict[str, float], limit: float, rule: str
) -> Check:
    """A check that the difference new - old of a metric is at least `limit`."""
    after = new[name]
    before = old[name]
    gap = after - before
    words = f"{after:.2f} against {before:.2f}: {gap:+.2f} points, {rule}"
    return Check(name, gap >= limit - _TIE, gap, limit, words)
