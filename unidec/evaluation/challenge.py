"""Is a challenger better than the champion on the same queries? Both rankings against one truth, check by check.

Shape legend: N queries, K predicted labels, L labels of the data set, B labels of a bundle.

The two bundles may know other labels than the data set: predictions are mapped by uid first (`mapped`). A label that a
bundle does not know counts as missed, one that the data set no longer has is removed from its answer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.evaluation.metrics import evaluate
from unidec.evaluation.significance import paired_differences, query_scores
from unidec.metric_names import parse
from unidec.sections import Gate

_TIE = 1e-9  # percentage points: sums in another order


@dataclass(frozen=True)
class Check:
    """One requirement on a challenger.

    Attributes:
        check: its name. passed: whether it is met. got, limit: figures, None where there are none. words: in words.
    """

    check: str
    passed: bool
    got: float | str | None
    limit: float | str | None
    words: str

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True)
class Challenge:
    """Two systems on the same queries.

    Attributes:
        challenger, champion: all metrics of each, in percent.
        metric: the one that decides. difference: challenger - champion on it, in points.
        confidence: share of the resamples in which the challenger is ahead by the margin; None for coverage.
        intervals: (low, high) of the difference, 95 % by paired bootstrap, of each metric that counts but coverage.
        num_queries: N. better, worse: queries on which either is better by the deciding metric.
        checks: the deciding metric, its confidence, the guarded metrics.
    """

    challenger: dict[str, float]
    champion: dict[str, float]
    metric: str
    difference: float
    confidence: float | None
    intervals: dict[str, tuple[float, float]]
    num_queries: int
    better: int
    worse: int
    checks: list[Check]


def mapped(rows_NK: Any, row_of_B: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """Predictions in a bundle's label rows -> rows of the data set, int64 [N, k].

    Labels that the data set no longer has are removed and those behind move up; padded with -1.

    Args:
        rows_NK: int [N, K], best first, -1 = none.
        row_of_B: int64 [B]: the data set's row of each label of the bundle, -1 for one that it no longer has.
    """
    rows_NK = np.asarray(rows_NK)
    if not len(row_of_B) or not rows_NK.size:
        return np.full((len(rows_NK), k), -1, dtype=np.int64)
    label_NK = np.where(rows_NK >= 0, row_of_B[np.maximum(rows_NK, 0)], -1)
    order = np.argsort(label_NK < 0, axis=1, kind="stable")[:, :k]
    found = np.take_along_axis(label_NK, order, axis=1).astype(np.int64)
    return np.pad(found, ((0, 0), (0, k - found.shape[1])), constant_values=-1)


def challenge(
    challenger_NK: Any,
    champion_NK: Any,
    relevance: csr_matrix,
    inverse_propensity_L: Any,
    group_L: Any,
    rules: Gate,
) -> Challenge:
    """Both rankings by every metric; whether the challenger may replace the champion.

    Args:
        challenger_NK, champion_NK: int [N, K], rows of the data set's labels, best first; -1 = none (a miss).
        relevance: CSR [N, L], the truth after filters. inverse_propensity_L, group_L: [L].
        rules: which metric decides, by what margin (below 0: so much may be lost) and in what share of the paired
            bootstrap's resamples (0: any); which metrics are guarded, and what they may lose.

    Raises:
        DataError: shapes that do not fit, no queries.
    """
    rankings, metric = (challenger_NK, champion_NK), rules.metric
    new, old = (evaluate(rows, relevance, inverse_propensity_L, group_L) for rows in rankings)
    share, better, worse = None, 0, 0
    intervals: dict[str, tuple[float, float]] = {}
    for name in dict.fromkeys([metric, *rules.guarded]):
        if parse(name).kind == "coverage":
            continue
        mine, its = (query_scores(rows, relevance, inverse_propensity_L, [name], group_L) for rows in rankings)
        differences_R = paired_differences(mine, its, name)
        low, high = np.percentile(differences_R, [2.5, 97.5]).tolist()
        intervals[name] = (low, high)
        if name == metric:
            gap_N = mine.above_MN[0] - its.above_MN[0]
            better, worse = int((gap_N > 1e-12).sum()), int((gap_N < -1e-12).sum())
            share = float((differences_R >= rules.margin - _TIE).mean())
    num_queries = int(new["num_queries"])
    checks = [_check(metric, new, old, rules.margin, f"at least {rules.margin:+.2f} required")]
    if rules.confidence > 0 and share is not None:
        low, high = intervals[metric]
        words = (
            f"in {share:.1%} of the resamples of {num_queries:,} queries the challenger is {_ahead(rules.margin)}, "
            f"{rules.confidence:.0%} required; 95 % interval: {low:+.2f} to {high:+.2f} points"
        )
        checks.append(Check("confidence", share >= rules.confidence, share, rules.confidence, words))
    checks += [
        _check(name, new, old, -rules.tolerance, f"it may lose {rules.tolerance:.2f}")
        for name in rules.guarded
        if name != metric
    ]
    difference = new[metric] - old[metric]
    return Challenge(new, old, metric, difference, share, intervals, num_queries, better, worse, checks)


def _check(name: str, new: dict[str, float], old: dict[str, float], limit: float, rule: str) -> Check:
    gap = new[name] - old[name]
    words = f"{new[name]:.2f} against {old[name]:.2f}: {gap:+.2f} points, {rule}"
    return Check(name, gap >= limit - _TIE, gap, limit, words)


def _ahead(margin: float) -> str:
    if margin == 0:
        return "not worse"
    return f"ahead by {margin:.2f} points" if margin > 0 else f"worse by at most {-margin:.2f} points"
