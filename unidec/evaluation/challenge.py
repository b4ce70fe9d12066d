"""Is a challenger better than the champion on the same queries? Both rankings against one truth, check by check.

Shape legend: N queries, K predicted labels, L labels of the data set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from unidec.evaluation.metrics import by_query, evaluate
from unidec.evaluation.significance import paired_differences
from unidec.metric_names import parse
from unidec.sections import Gate

_TIE = 1e-9  # percentage points: sums in another order


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
