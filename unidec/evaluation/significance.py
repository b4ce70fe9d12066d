"""Are two systems different, or was it the draw of the queries? Paired tests over queries, for means and for ratios.

Shape legend: N queries, K predicted labels, L labels, M metrics, S runs (seeds) of a system, R resamples, C = S x M
columns.

Every metric here is 100 * sum_i above_i / sum_i below_i over the queries (`metrics.by_query`). The part below does not
depend on the system, so a metric's mean over seeds is the same ratio of means, and one code tests both kinds.

- Interval: paired bootstrap. Queries are drawn with replacement, the same draw for both systems. Source: Efron and
  Tibshirani 1993; Koehn 2004.
- p-value: randomisation test. If the systems were alike, a query's two results could as well be swapped; swapping each
  query by a fair coin gives the difference's distribution. Source: Fisher 1935; Noreen 1989; Smucker et al. 2007.
- Several seeds: a query keeps its results under all seeds together, in a draw as in a swap: the statement is on these
  trained models. Seeds stacked as if each were a set of queries of its own would find too much.
- Holm 1979: with many comparisons some seem to differ by chance; p-values are corrected over the whole family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.errors import DataError
from unidec.evaluation.metrics import by_query
from unidec.progress import progress

METRICS = ("P@1", "P@3", "P@5", "nDCG@5", "R@10", "R@100", "PSP@1", "PSP@3", "PSP@5", "PSnDCG@5", "MRR")
NUM_SAMPLES = 10_000
_BLOCK = 2**21  # draws of a query at a time: some 50 MB

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class QueryScores:
    """What each query adds to each metric: `value(m) = 100 * sum(above) / sum(below)`, 0 where below is 0.

    Attributes:
        names: M metrics. above_MN, below_MN: float64 [M, N], at least 0.
    """

    names: tuple[str, ...]
    above_MN: Floats
    below_MN: Floats

    def __post_init__(self) -> None:
        wrong = self.above_MN.ndim != 2 or self.above_MN.shape != self.below_MN.shape
        if wrong or len(self.names) != len(self.above_MN) or self.above_MN.shape[1] == 0:
            raise DataError(
                "scores by query that do not fit together",
                got=f"{len(self.names)} metrics, {self.above_MN.shape} above, {self.below_MN.shape} below the line",
                expected="[metrics, queries] for both, of at least one query",
            )
        if not (np.isfinite(self.above_MN).all() and np.isfinite(self.below_MN).all() and (self.below_MN >= 0).all()):
            raise DataError("scores by query must be finite, those below the line at least 0")

    @property
    def num_queries(self) -> int:
        """N."""
        return self.above_MN.shape[1]

    def value(self, name: str) -> float:
        """One metric in percent."""
        one = self.select([name])
        return float(_ratio(one.above_MN[0].sum(), one.below_MN[0].sum()))

    def select(self, names: Sequence[str]) -> QueryScores:
        """The same queries, these metrics."""
        if unknown := [name for name in names if name not in self.names]:
            raise DataError("no such metric by query", got=", ".join(unknown), expected=", ".join(self.names))
        rows = [self.names.index(name) for name in names]
        return QueryScores(tuple(names), self.above_MN[rows], self.below_MN[rows])


def query_scores(
    predicted_NK: Any, relevance: csr_matrix, inverse_propensity_L: Any, names: Sequence[str] = METRICS,
    group_L: Any = None,
) -> QueryScores:  # fmt: skip
    """Metrics by query; arguments and errors as `metrics.by_query`, values as `metrics.evaluate`."""
    parts = by_query(predicted_NK, relevance, names, inverse_propensity_L, group_L)
    above, below = zip(*parts.values(), strict=True)
    return QueryScores(tuple(parts), np.stack(above), np.stack(below))


@dataclass(frozen=True)
class Comparison:
    """One system beside another on one metric.

    Attributes:
        value, against_value: the metric in percent, mean over seeds. difference: value - against_value.
        low, high: 95 % interval of the difference, in percentage points.
        p_value: two-sided. p_adjusted: after Holm's correction over all comparisons of the call.
        num_seeds, against_seeds: runs of both systems. alpha: level of `better` and `worse`.
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
    num_seeds: int
    against_seeds: int
    alpha: float = 0.05

    @property
    def better(self) -> bool:
        """Significantly above."""
        return self.p_adjusted < self.alpha and self.difference > 0

    @property
    def worse(self) -> bool:
        """Significantly below."""
        return self.p_adjusted < self.alpha and self.difference < 0


def compare_systems(
    runs: Mapping[str, Sequence[QueryScores]], against: str | Mapping[str, str], metrics: Sequence[str] | None = None,
    *, num_samples: int | None = None, seed: int = 0, alpha: float = 0.05,
) -> list[Comparison]:  # fmt: skip
    """Every system against one, on every metric; p-values corrected over all of these comparisons.

    Args:
        runs: system -> its runs, one a seed, all over the same queries in the same order.
        against: the system to compare with, or metric -> system (`best_systems`).
        metrics: which; all that the runs have when None.
        num_samples: R; None: 10,000, or more where Holm's correction of so many comparisons needs smaller p-values.
        seed: of the draws: the same call gives the same result.

    Returns:
        One comparison for each (other system, metric), systems in the order of `runs`.

    Raises:
        DataError: no runs, other queries or other truth in one of them, an unknown system or metric.
    """
    names = _checked_names(runs, metrics)
    opponents = {name: against if isinstance(against, str) else against.get(name, "") for name in names}
    unknown = sorted({system for system in opponents.values() if system not in runs})
    if unknown:
        raise DataError("no such system to compare with", got=unknown, expected=f"one of {', '.join(runs)}")
    pairs = [(s, opponents[m], m) for s in runs for m in names if s != opponents[m]]
    if not pairs:
        return []
    # the smallest p-value is about 2 / R: corrected by the number of comparisons it must still reach alpha
    num_samples = num_samples or max(NUM_SAMPLES, round(4 * len(pairs) / alpha))
    mean_MN = {system: np.mean([run.select(names).above_MN for run in own], axis=0) for system, own in runs.items()}
    below_MN = next(iter(runs.values()))[0].select(names).below_MN
    value_SM = {system: _ratio(above_MN.sum(axis=1), below_MN.sum(axis=1)) for system, above_MN in mean_MN.items()}
    interval = _bootstrap(mean_MN, below_MN, pairs, names, num_samples, seed)
    p_values = _randomisation(mean_MN, pairs, names, num_samples, seed + 1)
    found = []
    for (system, other, metric), ends, p, adjusted in zip(pairs, interval, p_values, holm(p_values), strict=True):
        m = names.index(metric)
        value, against_value = float(value_SM[system][m]), float(value_SM[other][m])
        found.append(Comparison(
            system, other, metric, value, against_value, value - against_value, float(ends[0]), float(ends[1]),
            float(p), float(adjusted), below_MN.shape[1], len(runs[system]), len(runs[other]), alpha,
        ))  # fmt: skip
    return found


def paired_differences(
    first: QueryScores, second: QueryScores, metric: str, *, num_samples: int = NUM_SAMPLES, seed: int = 0
) -> Floats:
    """first - second on one metric in resamples of the queries, drawn for both alike: float64 [R], percentage points.

    Raises:
        DataError: other queries or another truth in one of them, an unknown metric.
    """
    names = _checked_names({"first": [first], "second": [second]}, [metric])
    above_2N = np.concatenate([first.select(names).above_MN, second.select(names).above_MN])
    below_N = first.select(names).below_MN[0]
    parts = []
    for count_RN in _draws(num_samples, len(below_N), seed):
        value_R2 = _ratio(count_RN @ above_2N.T, (count_RN @ below_N)[:, None])
        parts.append(value_R2[:, 0] - value_R2[:, 1])
    return np.concatenate(parts)


def best_systems(
    runs: Mapping[str, Sequence[QueryScores]], names: Sequence[str], metrics: Sequence[str] | None = None
) -> dict[str, str]:
    """For each metric the best of the systems `names`, by the mean over their runs; the first of equals."""
    chosen = _checked_names(runs, metrics)
    if not names or any(name not in runs for name in names):
        raise DataError("no such systems to choose from", got=list(names), expected=f"some of {', '.join(runs)}")
    return {m: max(names, key=lambda name: float(np.mean([run.value(m) for run in runs[name]]))) for m in chosen}


def holm(p_values: Any) -> Floats:
    """Holm's step-down correction: float64, in the order given, at most 1.

    The i-th smallest of n p-values is multiplied by n - i + 1; none may be smaller than one before it.
    Errors: DataError for values outside of 0 to 1.
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise DataError("p-values are numbers from 0 to 1", got=p.tolist()[:20] if p.ndim == 1 else f"shape {p.shape}")
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p))))
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(stepped, 1.0)
    return corrected


def _ratio(above: Any, below: Any) -> Any:
    """Percent; 0 where there is nothing below the line."""
    below = np.asarray(below, dtype=np.float64)
    return 100.0 * np.divide(above, below, out=np.zeros(np.broadcast(above, below).shape), where=below > 0)


def _checked_names(runs: Mapping[str, Sequence[QueryScores]], metrics: Sequence[str] | None) -> tuple[str, ...]:
    """The metrics asked for; refuses runs that cannot be paired."""
    empty = [system for system, own in runs.items() if not own]
    if not runs or empty:
        raise DataError("systems without a run", got=empty or "no system at all")
    first = next(iter(runs.values()))[0]
    names = tuple(metrics) if metrics is not None else first.names
    reference = first.select(names)
    for system, own in runs.items():
        for run in own:
            below_MN = run.select(names).below_MN
            if below_MN.shape != reference.below_MN.shape or not np.allclose(below_MN, reference.below_MN, rtol=1e-9):
                raise DataError(
                    "runs over different queries or another truth cannot be paired",
                    where=system,
                    got=f"{run.num_queries} queries",
                    expected=f"the {first.num_queries} queries of the others, in the same order",
                )
    return names


def _blocks(num_samples: int, num_queries: int, desc: str) -> Iterator[int]:
    """Sizes of the blocks of resamples, with a progress line."""
    block = max(1, _BLOCK // num_queries)
    with progress(total=num_samples, desc=desc, unit="draw") as bar:
        for start in range(0, num_samples, block):
            size = min(block, num_samples - start)
            yield size
            bar.update(size)


def _draws(num_samples: int, num_queries: int, seed: int) -> Iterator[Floats]:
    """How often each query is drawn in each resample, in blocks of resamples: [R', N]."""
    generator = np.random.default_rng([seed, 0])
    for size in _blocks(num_samples, num_queries, "paired bootstrap"):
        drawn = generator.integers(num_queries, size=(size, num_queries))
        drawn += np.arange(size)[:, None] * num_queries
        count_RN = np.bincount(drawn.ravel(), minlength=size * num_queries).reshape(size, num_queries)
        yield count_RN.astype(np.float64)


def _bootstrap(
    mean_MN: Mapping[str, Floats], below_MN: Floats, pairs: Sequence[tuple[str, str, str]], names: tuple[str, ...],
    num_samples: int, seed: int,
) -> Floats:  # fmt: skip
    """95 % intervals [pairs, 2]. One draw of the queries serves all systems and metrics."""
    above_NC = np.ascontiguousarray(np.concatenate(list(mean_MN.values())).T)  # systems x metrics
    place = {system: i * len(names) for i, system in enumerate(mean_MN)}
    metric = np.array([names.index(m) for _, _, m in pairs])
    first, second = (np.array([place[pair[side]] for pair in pairs]) + metric for side in (0, 1))
    parts = []
    for count_RN in _draws(num_samples, below_MN.shape[1], seed):
        above_RC, below_RM = count_RN @ above_NC, count_RN @ below_MN.T
        parts.append(_ratio(above_RC[:, first] - above_RC[:, second], below_RM[:, metric]))
    return np.percentile(np.concatenate(parts), [2.5, 97.5], axis=0).T


def _randomisation(
    mean_MN: Mapping[str, Floats], pairs: Sequence[tuple[str, str, str]], names: tuple[str, ...], num_samples: int,
    seed: int,
) -> Floats:  # fmt: skip
    """p-values [pairs]: the share of swappings whose difference is at least as far from 0 as the one seen.

    The seen one counts among them (add one). A query's swap is the same for all pairs and all seeds.
    """
    generator = np.random.default_rng(seed)
    gap = [mean_MN[system][names.index(m)] - mean_MN[other][names.index(m)] for system, other, m in pairs]
    gap_NC = np.ascontiguousarray(np.stack(gap, axis=1))
    scale_C = np.maximum(np.abs(gap_NC).sum(axis=0), 1e-300)
    seen_C = np.abs(gap_NC.sum(axis=0)) - 1e-11 * scale_C  # the part below the line is the same on both sides
    extreme_C = np.zeros(len(pairs))
    for size in _blocks(num_samples, len(gap_NC), "randomisation test"):
        sign_RN = 2.0 * generator.integers(2, size=(size, len(gap_NC)), dtype=np.int32) - 1.0
        extreme_C += (np.abs(sign_RN @ gap_NC) >= seen_C).sum(axis=0)
    return (extreme_C + 1) / (num_samples + 1)
