"""Is a challenger better than the champion on the same queries? Both rankings against one truth, check by check.

Shape legend: N queries, K predicted labels, L labels of the data set, B labels of a bundle, E positive pairs.

The two bundles may know other labels than the data set: predictions are mapped by uid first (`mapped`). A label that a
bundle does not know is a miss of its, one that the data set has no more is taken out of its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.evaluation.metrics import GROUPS, check_predictions, evaluate, lookup, pair_keys
from unidec.evaluation.significance import NUM_SAMPLES, QueryScores, paired_differences
from unidec.metric_names import parse

Labels = NDArray[np.int64]

_TIE = 1e-9  # percentage points: sums in another order


@dataclass(frozen=True)
class Check:
    """One thing that a challenger must show.

    Attributes:
        check: its name. passed: whether it does. got, limit: figures, None where there are none. words: both in words.
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


def mapped(rows_NK: Any, row_of_B: NDArray[np.int64], k: int) -> Labels:
    """Predictions in a bundle's label rows -> rows of the data set, at most k a query.

    Args:
        rows_NK: int [N, K], best first, -1 = none.
        row_of_B: int64 [B]: the data set's row of each label of the bundle, -1 for one that it has no more.
        k: places to return.

    Returns:
        int64 [N, k]: labels that the data set has no more are taken out and those behind move up; padded with -1.
    """
    rows_NK = np.asarray(rows_NK)
    if not len(row_of_B) or not rows_NK.size:
        return np.full((len(rows_NK), k), -1, dtype=np.int64)
    label_NK = np.where(rows_NK >= 0, row_of_B[np.maximum(rows_NK, 0)], -1)
    order = np.argsort(label_NK < 0, axis=1, kind="stable")[:, :k]
    found = np.take_along_axis(label_NK, order, axis=1).astype(np.int64)
    return np.pad(found, ((0, 0), (0, k - found.shape[1])), constant_values=-1)


def metric_by_query(
    name: str, predicted_NK: Any, relevance: csr_matrix, inverse_propensity_L: Any, group_L: Any
) -> QueryScores:
    """What each query adds to one metric of `metrics.evaluate`, any but coverage, whole or of a group.

    Args:
        name: "nDCG@5", "tail/R@10", "PSP@3", "MRR", ...
        predicted_NK: int [N, K], label ids, best first; -1 = none.
        relevance: CSR [N, L], the truth after filters, relevant where > 0.
        inverse_propensity_L: float [L]. group_L: int [L], 0 tail, 1 torso, 2 head.

    Returns:
        Scores with this one metric, whose value is that of `evaluate`.

    Raises:
        DataError: shapes that do not fit, a label out of range or predicted twice for one query.
    """
    group, kind, k = parse(name)
    weight_L = np.asarray(inverse_propensity_L, dtype=np.float64)
    label_NK = check_predictions(predicted_NK, relevance, len(weight_L))
    num_queries = len(label_NK)
    key_E = pair_keys(relevance, positive_only=True)
    if group:
        key_E = key_E[np.asarray(group_L)[key_E % max(len(weight_L), 1)] == GROUPS.index(group)]
    row_E, label_E = np.divmod(key_E, max(len(weight_L), 1))
    positives_N = np.bincount(row_E, minlength=num_queries)
    hit_NK = lookup(label_NK, key_E, len(weight_L))
    # in a group the means are over the queries that have a relevant label in it
    counted_N = (positives_N > 0).astype(np.float64) if group else np.ones(num_queries)
    k = k or 100
    discount = 1.0 / np.log2(np.arange(2, k + 2))
    ideal_N = np.concatenate([[1.0], np.cumsum(discount)])[np.minimum(positives_N, k)]
    hit_NK = hit_NK[:, :k]
    if kind == "P":
        above_N, below_N = hit_NK.sum(axis=1) / k, np.ones(num_queries)
    elif kind == "R":
        above_N, below_N = hit_NK.sum(axis=1) / np.maximum(positives_N, 1), counted_N
    elif kind == "nDCG":
        above_N, below_N = (hit_NK * discount[: hit_NK.shape[1]]).sum(axis=1) / ideal_N, counted_N
    elif kind == "MRR":
        first_N = hit_NK.argmax(axis=1) if hit_NK.shape[1] else np.zeros(num_queries)
        above_N, below_N = np.where(hit_NK.any(axis=1), 1.0 / (1.0 + first_N), 0.0), counted_N
    elif kind in ("PSP", "PSnDCG"):
        weight_NK = np.where(hit_NK, weight_L[label_NK[:, :k]], 0.0) if len(weight_L) else np.zeros(hit_NK.shape)
        order_E = np.lexsort((-weight_L[label_E], row_E))  # a query's positives by falling weight: the best answer
        rank_E = np.arange(len(row_E)) - np.repeat(np.cumsum(positives_N) - positives_N, positives_N)
        best_E = np.where(rank_E < k, weight_L[label_E[order_E]], 0.0)
        if kind == "PSnDCG":
            weight_NK = weight_NK * discount[: hit_NK.shape[1]] / ideal_N[:, None]
            best_E = best_E * discount[np.minimum(rank_E, k - 1)] / ideal_N[row_E]
        above_N = weight_NK.sum(axis=1)
        below_N = np.bincount(row_E, weights=best_E, minlength=num_queries).astype(np.float64)
    else:
        raise ValueError(f"{name} belongs to all queries together")
    return QueryScores((name,), above_N[None].astype(np.float64), below_N[None])


def challenge(
    challenger_NK: Any,
    champion_NK: Any,
    relevance: csr_matrix,
    inverse_propensity_L: Any,
    group_L: Any,
    *,
    metric: str,
    margin: float,
    confidence: float,
    guarded: Sequence[str],
    tolerance: float,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
) -> Challenge:
    """Both rankings by every metric; whether the challenger may take the champion's place.

    Args:
        challenger_NK, champion_NK: int [N, K], rows of the data set's labels, best first; -1 = none (a miss).
        relevance: CSR [N, L], the truth after filters. inverse_propensity_L, group_L: [L].
        metric: decides: challenger - champion must be at least `margin` points (below 0: so much may be lost),
        confidence: and be so in this share of the paired bootstrap's resamples; 0: not asked for.
        guarded, tolerance: metrics that may lose at most so many points.

    Raises:
        DataError: shapes that do not fit, no queries.
    """
    both = [evaluate(rows, relevance, inverse_propensity_L, group_L) for rows in (challenger_NK, champion_NK)]
    new, old = both
    difference = new[metric] - old[metric]
    share, better, worse = None, 0, 0
    intervals: dict[str, tuple[float, float]] = {}
    for name in dict.fromkeys([metric, *guarded]):
        if parse(name).kind == "coverage":
            continue
        mine, its = (
            metric_by_query(name, rows, relevance, inverse_propensity_L, group_L)
            for rows in (challenger_NK, champion_NK)
        )
        differences_R = paired_differences(mine, its, name, num_samples=num_samples, seed=seed)
        low, high = np.percentile(differences_R, [2.5, 97.5]).tolist()
        intervals[name] = (low, high)
        if name == metric:
            gap_N = mine.above_MN[0] - its.above_MN[0]
            better, worse = int((gap_N > 1e-12).sum()), int((gap_N < -1e-12).sum())
            share = float((differences_R >= margin - _TIE).mean())
    checks = [_decisive(metric, new[metric], old[metric], margin)]
    if confidence > 0 and share is not None:
        low, high = intervals[metric]
        words = (
            f"in {share:.1%} of the resamples of {int(new['num_queries']):,} queries the challenger is "
            f"{_ahead(margin)}, {confidence:.0%} are asked for; 95 % interval: {low:+.2f} to {high:+.2f} points"
        )
        checks.append(Check("confidence", share >= confidence, share, confidence, words))
    checks += [_guarded(name, new[name], old[name], tolerance) for name in guarded if name != metric]
    return Challenge(
        new, old, metric, difference, share, intervals, int(new["num_queries"]), better, worse, checks
    )  # fmt: skip


def _decisive(metric: str, new: float, old: float, margin: float) -> Check:
    words = f"{new:.2f} against {old:.2f}: {new - old:+.2f} points, at least {margin:+.2f} are asked for"
    return Check(metric, new - old >= margin - _TIE, new - old, margin, words)


def _guarded(metric: str, new: float, old: float, tolerance: float) -> Check:
    words = f"{new:.2f} against {old:.2f}: {new - old:+.2f} points, it may lose {tolerance:.2f}"
    return Check(metric, new - old >= -tolerance - _TIE, new - old, -tolerance, words)


def _ahead(margin: float) -> str:
    if margin == 0:
        return "not worse"
    return f"ahead by {margin:.2f} points" if margin > 0 else f"worse by at most {-margin:.2f} points"
