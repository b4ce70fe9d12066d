"""Are two systems different, or was it the draw of the queries? Paired tests over queries, for means and for ratios.

Shape legend: N queries, K predicted labels, L labels, R resamples, C comparisons (system, opponent, metric).

Every metric here is 100 * sum_i above_i / sum_i below_i over the queries (`metrics.by_query`). The part below does not
depend on the system, so a metric's mean over seeds is the same ratio of means, and one code tests both kinds.

- Interval: paired bootstrap; queries are drawn with replacement, the same draw for both systems (Koehn 2004).
- p-value: randomisation test; each query's two results are swapped by a fair coin (Noreen 1989; Smucker et al. 2007).
- Several seeds: a query keeps its results under all seeds together, in a draw as in a swap: the statement is on these
  trained models. Seeds stacked as if each were a set of queries of its own would find too much.
- p-values are corrected over the whole family of comparisons (Holm 1979).

The same decides whether a challenger may replace the champion: both rankings against one truth, check by check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from unidec.evaluation.metrics import Floats, QueryParts, by_query, evaluate
from unidec.metric_names import parse
from unidec.sections import Gate

ALPHA = 0.05
NUM_SAMPLES = 10_000
_BLOCK = 2**21  # draws of a query at a time: some 50 MB
_TIE = 1e-9  # percentage points: sums in another order
Runs = Mapping[str, Sequence[QueryParts]]
"""System -> its runs, at least one (a seed each), all over the same queries and truth; each as `metrics.by_query`."""


@dataclass(frozen=True)
class Comparison:
    """One system beside another on one metric.

    Attributes:
        value, against_value: the metric in percent, mean over seeds. difference: value - against_value.
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
        """Significantly above."""
        return self.p_adjusted < ALPHA and self.difference > 0

    @property
    def worse(self) -> bool:
        """Significantly below."""
        return self.p_adjusted < ALPHA and self.difference < 0


def compare_systems(
    runs: Runs, against: str | Mapping[str, str], metrics: Sequence[str], *, num_samples: int | None = None,
    seed: int = 0,
) -> list[Comparison]:  # fmt: skip
    """Every system against one, on every metric; p-values corrected over all of these comparisons.

    Args:
        against: the system to compare with, or metric -> system (`best_systems`).
        num_samples: R; None: 10,000, or more where Holm's correction of so many comparisons needs smaller p-values.
        seed: of the draws: the same call gives the same result.

    Returns:
        One comparison for each (other system, metric), systems in the order of `runs`.
    """
    below, mean = {name: next(iter(runs.values()))[0][name][1] for name in metrics}, _means(runs, metrics)
    opponents = dict.fromkeys(metrics, against) if isinstance(against, str) else against
    compared = [(system, opponents[m], m) for system in runs for m in metrics if system != opponents[m]]
    if not compared:
        return []
    # the smallest p-value is about 2 / R: corrected by the number of comparisons it must still reach alpha
    num_samples = num_samples or max(NUM_SAMPLES, round(4 * len(compared) / ALPHA))
    value = {key: float(_ratio(above_N.sum(), below[key[1]].sum())) for key, above_N in mean.items()}
    gap_NC = np.stack([mean[system, m] - mean[other, m] for system, other, m in compared], axis=1)
    below_NC = np.stack([below[m] for _, _, m in compared], axis=1)
    low_C, high_C = np.percentile(_bootstrap(gap_NC, below_NC, num_samples, seed), [2.5, 97.5], axis=0).tolist()
    p_C = _randomisation(gap_NC, num_samples, seed + 1)
    found = []
    columns = (low_C, high_C, p_C.tolist(), holm(p_C).tolist())
    for (system, other, m), low, high, p, adjusted in zip(compared, *columns, strict=True):
        own, theirs = value[system, m], value[other, m]
        found.append(Comparison(system, other, m, own, theirs, own - theirs, low, high, p, adjusted, len(gap_NC)))
    return found


def paired_differences(
    first: QueryParts, second: QueryParts, metric: str, *, num_samples: int = NUM_SAMPLES, seed: int = 0
) -> Floats:
    """first - second on one metric in resamples of the queries, the same for both: float64 [R], percentage points."""
    (above_N, below_N), (others_N, _) = first[metric], second[metric]
    gap_N = above_N - others_N
    return _bootstrap(gap_N[:, None], below_N[:, None], num_samples, seed)[:, 0]


def best_systems(runs: Runs, names: Sequence[str], metrics: Sequence[str]) -> dict[str, str]:
    """For each metric the best of the systems `names`, by the mean over their runs; the first of equals."""
    mean = _means(runs, metrics)
    return {metric: max(names, key=lambda name: mean[name, metric].sum()) for metric in metrics}


def holm(p_values: Any) -> Floats:
    """Holm's step-down correction: float64, in the order given, at most 1.

    The i-th smallest of n p-values is multiplied by n - i + 1; none may be smaller than one before it.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p)))), 1.0)
    return corrected


def _ratio(above: Any, below: Any) -> Any:
    """Percent; 0 where there is nothing below the line."""
    return 100.0 * np.divide(above, below, out=np.zeros(np.shape(above)), where=np.asarray(below) > 0)


def _means(runs: Runs, metrics: Sequence[str]) -> dict[tuple[str, str], Floats]:
    """What is above the line of each query, mean over the runs, by (system, metric)."""
    return {(s, m): np.mean([run[m][0] for run in own], axis=0) for s, own in runs.items() for m in metrics}


def _blocks(num_samples: int, num_queries: int) -> list[int]:
    """Sizes of the blocks of resamples."""
    block = max(1, _BLOCK // num_queries)
    return [min(block, num_samples - start) for start in range(0, num_samples, block)]


def _bootstrap(gap_NC: Floats, below_NC: Floats, num_samples: int, seed: int) -> Floats:
    """Differences in percentage points, [R, C]; one draw of the queries serves all columns."""
    num_queries, generator, parts = len(gap_NC), np.random.default_rng([seed, 0]), []
    for size in _blocks(num_samples, num_queries):
        drawn = generator.integers(num_queries, size=(size, num_queries))
        drawn += np.arange(size)[:, None] * num_queries
        count_RN = np.bincount(drawn.ravel(), minlength=size * num_queries).reshape(size, -1).astype(np.float64)
        parts.append(_ratio(count_RN @ gap_NC, count_RN @ below_NC))
    return np.concatenate(parts)


def _randomisation(gap_NC: Floats, num_samples: int, seed: int) -> Floats:
    """p-values [C]: the share of swappings whose difference is at least as far from 0 as the one seen.

    The seen one counts among them (add one). A query's swap is the same for all columns and all seeds.
    """
    generator = np.random.default_rng(seed)
    scale_C = np.maximum(np.abs(gap_NC).sum(axis=0), 1e-300)
    seen_C = np.abs(gap_NC.sum(axis=0)) - 1e-11 * scale_C  # the part below the line is the same on both sides
    extreme_C = np.zeros(gap_NC.shape[1])
    for size in _blocks(num_samples, len(gap_NC)):
        sign_RN = 2.0 * generator.integers(2, size=(size, len(gap_NC)), dtype=np.int32) - 1.0
        extreme_C += (np.abs(sign_RN @ gap_NC) >= seen_C).sum(axis=0)
    return (extreme_C + 1) / (num_samples + 1)


@dataclass(frozen=True)
class Check:
    """One requirement on a challenger: its name, whether it is met, figures (None: there are none), and a sentence."""

    check: str
    passed: bool
    got: float | str | None
    limit: float | str | None
    words: str


def challenge(
    challenger_NK: Any, champion_NK: Any, relevance: csr_matrix, inverse_propensity_L: Any, group_L: Any, rules: Gate
) -> tuple[list[Check], dict[str, Any]]:
    """Both rankings by every metric; whether the challenger may replace the champion.

    Args:
        challenger_NK, champion_NK: int [N, K], rows of the data set's labels, best first; -1 = none (a miss).
        relevance: CSR [N, L], the truth after filters. inverse_propensity_L, group_L: [L].
        rules: which metric decides, by what margin (below 0: so much may be lost) and in what share of the paired
            bootstrap's resamples (0: any); which metrics are guarded, and what they may lose.

    Returns:
        the checks (the deciding metric, its confidence, the guarded metrics), and {"metrics": {"challenger",
        "champion"}: all metrics of each, in percent, "comparison": {"metric": the one that decides, "difference":
        challenger - champion on it, in points, "confidence": share of the resamples in which the challenger is ahead by
        the margin (None for coverage), "intervals": {metric: [low, high]} of the difference, 95 % by paired bootstrap,
        of those that count but coverage, "num_queries", "better", "worse": queries on which either is better}}.

    Raises:
        DataError: shapes that do not fit.
    """
    metric, rankings = rules.metric, (challenger_NK, champion_NK)
    new, old = (evaluate(rows, relevance, inverse_propensity_L, group_L) for rows in rankings)
    paired = [name for name in dict.fromkeys([metric, *rules.guarded]) if parse(name).kind != "coverage"]
    mine, its = (by_query(rows, relevance, paired, inverse_propensity_L, group_L) for rows in rankings)
    differences = {name: paired_differences(mine, its, name) for name in paired}
    intervals = {name: np.percentile(found_R, [2.5, 97.5]).tolist() for name, found_R in differences.items()}
    checks = [_check(metric, new, old, rules.margin, f"at least {rules.margin:+.2f} required")]
    share, gap_N = None, np.zeros(0)
    if metric in paired:
        gap_N = mine[metric][0] - its[metric][0]
        share = float((differences[metric] >= rules.margin - _TIE).mean())
    if share is not None and rules.confidence > 0:
        low, high = intervals[metric]
        ahead = f"ahead by {rules.margin:.2f}" if rules.margin > 0 else f"worse by at most {-rules.margin:.2f}"
        words = (
            f"in {share:.1%} of the resamples of {new['num_queries']:,.0f} queries the challenger is "
            f"{ahead} points, {rules.confidence:.0%} required; 95 % interval: {low:+.2f} to {high:+.2f} points"
        )
        checks.append(Check("confidence", share >= rules.confidence, share, rules.confidence, words))
    rule = f"it may lose {rules.tolerance:.2f}"
    checks += [_check(name, new, old, -rules.tolerance, rule) for name in rules.guarded if name != metric]
    comparison = {
        "metric": metric, "difference": new[metric] - old[metric], "confidence": share, "intervals": intervals,
        "num_queries": int(new["num_queries"]), "better": int((gap_N > 1e-12).sum()),
        "worse": int((gap_N < -1e-12).sum()),
    }  # fmt: skip
    return checks, {"metrics": {"challenger": new, "champion": old}, "comparison": comparison}


def _check(name: str, new: dict[str, float], old: dict[str, float], limit: float, rule: str) -> Check:
    gap = new[name] - old[name]
    words = f"{new[name]:.2f} against {old[name]:.2f}: {gap:+.2f} points, {rule}"
    return Check(name, gap >= limit - _TIE, gap, limit, words)
