"""Are two systems different, or was it the draw of the queries? Paired tests over queries, for means and for ratios.

Shape legend: N queries, K predicted labels, L labels, E positive (query, label) pairs, M metrics, S runs (seeds) of a
system, R resamples, C = S x M columns.

Every metric here is 100 * sum_i above_i / sum_i below_i over the queries: with below = 1 a mean (P@k, R@k, nDCG@k,
MRR), else a ratio of data-set sums (PSP@k, PSnDCG@k). The part below does not depend on the system, so a metric's mean
over seeds is the same ratio of means, and one code tests both kinds.

- Paired bootstrap: queries are drawn with replacement, the same draw for both systems, and the difference of the
  metrics is taken anew. Gives the interval, and on request the p-value. Source: Efron and Tibshirani 1993; Koehn 2004.
- Randomisation test: if the systems were alike, then a query's two results could as well be swapped; swapping each
  query by a fair coin gives the difference's distribution. Source: Fisher 1935; Noreen 1989; Smucker et al. 2007.
- Several seeds: a query keeps its results under all seeds together, in a draw as in a swap ("average"): the statement
  is on these trained models. Seeds stacked as if each were a set of queries of its own would count the same queries
  several times and find too much, so this is not offered. "resample" draws the seeds of both systems anew as well: the
  statement is then on the way to train, and with few seeds its interval is rough (of 2 seeds, half the draws take one
  of them twice).
- Holm 1979: with many comparisons some seem to differ by chance; p-values are corrected over the whole family.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.errors import ArtifactError, DataError
from unidec.evaluation.metrics import check_predictions, lookup, pair_keys
from unidec.progress import progress

PRECISION = (1, 3, 5)
RECALL = (10, 100)
RECIPROCAL_RANK = 100  # places that MRR looks at
NUM_SAMPLES = 10_000
_BLOCK = 2**21  # draws of a query at a time: some 50 MB

Floats = NDArray[np.float64]
Test = Literal["randomisation", "bootstrap"]
Seeds = Literal["average", "resample"]


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
        row = self._row(name)
        return float(_ratio(self.above_MN[row].sum(), self.below_MN[row].sum()))

    def select(self, names: Sequence[str]) -> QueryScores:
        """The same queries, these metrics."""
        rows = [self._row(name) for name in names]
        return QueryScores(tuple(names), self.above_MN[rows], self.below_MN[rows])

    def save(self, path: str | Path) -> None:
        """One .npz file."""
        np.savez(Path(path), names=np.array(self.names), above=self.above_MN, below=self.below_MN)

    @classmethod
    def load(cls, path: str | Path) -> QueryScores:
        """What `save` wrote. Errors: ArtifactError for a file that is missing or something else."""
        try:
            with np.load(path, allow_pickle=False) as file:
                return cls(tuple(map(str, file["names"])), file["above"], file["below"])
        except (OSError, KeyError, ValueError, zipfile.BadZipFile, DataError) as error:
            raise ArtifactError("not a file of scores by query", where=str(path), got=str(error)[:200]) from error

    def _row(self, name: str) -> int:
        if name not in self.names:
            raise DataError("no such metric by query", got=name, expected=", ".join(self.names))
        return self.names.index(name)


def query_scores(predicted_NK: Any, relevance: csr_matrix, inverse_propensity_L: Any) -> QueryScores:
    """P@1, P@3, P@5, nDCG@5, R@10, R@100, PSP@1, PSP@3, PSP@5, PSnDCG@5 and MRR by query.

    Their values are the figures of `unidec.evaluation.metrics.Evaluator`.

    Args:
        predicted_NK: int [N, K], label ids, best first; -1 = none.
        relevance: CSR [N, L], the truth after filters, relevant where > 0.
        inverse_propensity_L: float [L].

    Raises:
        DataError: shapes that do not fit, a label out of range or predicted twice for one query.
    """
    weight_L = np.asarray(inverse_propensity_L, dtype=np.float64)
    label_NK = check_predictions(predicted_NK, relevance, len(weight_L))
    num_queries = len(label_NK)
    key_E = pair_keys(relevance, positive_only=True)
    row_E, label_E = np.divmod(key_E, max(len(weight_L), 1))
    hit_NK = lookup(label_NK, key_E, len(weight_L))
    weight_NK = np.where(hit_NK, weight_L[label_NK], 0.0) if len(weight_L) else np.zeros(label_NK.shape)
    positives_N = np.bincount(row_E, minlength=num_queries)
    best_E = np.lexsort((-weight_L[label_E], row_E))  # a query's positives by falling weight
    rank_E = np.arange(len(row_E)) - np.repeat(np.cumsum(positives_N) - positives_N, positives_N)
    best_weight_E = weight_L[label_E[best_E]]
    discount = 1.0 / np.log2(np.arange(2, 7))
    ideal_N = np.concatenate([[1.0], np.cumsum(discount)])[np.minimum(positives_N, 5)]
    one_N = np.ones(num_queries)

    def best(k: int, gain_E: Floats) -> Floats:
        within_E = np.where(rank_E < k, gain_E, 0.0)
        return np.bincount(row_E, weights=within_E, minlength=num_queries).astype(np.float64)

    width = min(5, label_NK.shape[1])
    parts: dict[str, tuple[Floats, Floats]] = {}
    for k in PRECISION:
        parts[f"P@{k}"] = hit_NK[:, :k].sum(axis=1) / k, one_N
    parts["nDCG@5"] = (hit_NK[:, :5] * discount[:width]).sum(axis=1) / ideal_N, one_N
    for k in RECALL:
        parts[f"R@{k}"] = hit_NK[:, :k].sum(axis=1) / np.maximum(positives_N, 1), one_N
    for k in PRECISION:
        parts[f"PSP@{k}"] = weight_NK[:, :k].sum(axis=1), best(k, best_weight_E)
    gain_E = best_weight_E * discount[np.minimum(rank_E, 4)] / ideal_N[row_E]
    parts["PSnDCG@5"] = (weight_NK[:, :5] * discount[:width]).sum(axis=1) / ideal_N, best(5, gain_E)
    top_NK = hit_NK[:, :RECIPROCAL_RANK]
    first_N = top_NK.argmax(axis=1) if top_NK.shape[1] else np.zeros(num_queries)
    parts["MRR"] = np.where(top_NK.any(axis=1), 1.0 / (1.0 + first_N), 0.0), one_N
    above, below = zip(*parts.values(), strict=True)
    return QueryScores(tuple(parts), np.stack(above).astype(np.float64), np.stack(below).astype(np.float64))


@dataclass(frozen=True)
class Comparison:
    """One system beside another on one metric.

    Attributes:
        value, against_value: the metric in percent, mean over seeds. difference: value - against_value.
        low, high: 95 % interval of the difference by paired bootstrap (percentiles). All in percentage points.
        p_value: two-sided, of the chosen test. p_adjusted: after Holm's correction over all comparisons of the call.
        num_queries; num_seeds, against_seeds: runs of both systems. alpha: level of `better` and `worse`.
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
    runs: Mapping[str, Sequence[QueryScores]],
    against: str | Mapping[str, str],
    metrics: Sequence[str] | None = None,
    *,
    test: Test = "randomisation",
    seeds: Seeds = "average",
    num_samples: int | None = None,
    seed: int = 0,
    alpha: float = 0.05,
) -> list[Comparison]:
    """Every system against one, on every metric; p-values corrected over all of these comparisons.

    Args:
        runs: system -> its runs, one a seed, all over the same queries in the same order.
        against: the system to compare with, or metric -> system (`best_systems`).
        metrics: which; all that the runs have when None.
        test: where p-values come from. "randomisation" is about the sharp question whether a difference is there at
            all; it knows nothing of seeds drawn anew, so with seeds="resample" p-values are the bootstrap's.
        seeds: see the head of this file.
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
    selected = {system: [run.select(names) for run in own] for system, own in runs.items()}
    value_SM = {system: _metric_values(own) for system, own in selected.items()}
    sample, interval = _bootstrap(selected, pairs, names, num_samples, seed, seeds == "resample")
    if test == "randomisation" and seeds == "average":
        sample = _randomisation(selected, pairs, names, num_samples, seed + 1)
    corrected = holm(sample)
    found = []
    for i, (system, other, metric) in enumerate(pairs):
        m = names.index(metric)
        value, against_value = float(value_SM[system][m]), float(value_SM[other][m])
        found.append(Comparison(
            system, other, metric, value, against_value, value - against_value, float(interval[i, 0]),
            float(interval[i, 1]), float(sample[i]), float(corrected[i]), selected[system][0].num_queries,
            len(selected[system]), len(selected[other]), alpha,
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
    for count_RN in _draws(num_samples, len(below_N), np.random.default_rng([seed, 0])):
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
    values = {name: _metric_values([run.select(chosen) for run in runs[name]]) for name in names}
    return {metric: max(names, key=lambda name: values[name][m]) for m, metric in enumerate(chosen)}


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


def _metric_values(own: Sequence[QueryScores]) -> Floats:
    """Metrics of a system, mean over its runs: [M]."""
    return np.mean([_ratio(run.above_MN.sum(axis=1), run.below_MN.sum(axis=1)) for run in own], axis=0)


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


def _draws(num_samples: int, num_queries: int, generator: np.random.Generator) -> Iterator[Floats]:
    """How often each query is drawn in each resample, in blocks of resamples: [R', N]."""
    for size in _blocks(num_samples, num_queries, "paired bootstrap"):
        drawn = generator.integers(num_queries, size=(size, num_queries))
        drawn += np.arange(size)[:, None] * num_queries
        count_RN = np.bincount(drawn.ravel(), minlength=size * num_queries).reshape(size, num_queries)
        yield count_RN.astype(np.float64)


def _columns(selected: Mapping[str, Sequence[QueryScores]]) -> tuple[Floats, dict[str, slice]]:
    """All runs' parts above the line beside each other, [N, C], and each system's columns (S x M of them)."""
    blocks, place, start = [], {}, 0
    for system, own in selected.items():
        blocks += [run.above_MN for run in own]
        end = start + sum(len(run.names) for run in own)
        place[system] = slice(start, end)
        start = end
    return np.ascontiguousarray(np.concatenate(blocks).T), place


def _bootstrap(
    selected: Mapping[str, Sequence[QueryScores]],
    pairs: Sequence[tuple[str, str, str]],
    names: tuple[str, ...],
    num_samples: int,
    seed: int,
    redraw_seeds: bool,
) -> tuple[Floats, Floats]:
    """p-values [pairs] and 95 % intervals [pairs, 2]. One draw of the queries serves all systems and metrics.

    The p-value is twice the share of resamples on the lesser side of 0, ties on both, add-one smoothed.
    """
    generator, seed_generator = (np.random.default_rng([seed, part]) for part in (0, 1))
    above_NC, place = _columns(selected)
    below_NM = next(iter(selected.values()))[0].below_MN.T
    num_queries = len(above_NC)
    difference = np.empty((len(pairs), num_samples))
    done = 0
    for count_RN in _draws(num_samples, num_queries, generator):
        size = len(count_RN)
        above_RC, below_RM = count_RN @ above_NC, count_RN @ below_NM
        metric_RM = {}
        for system, own in selected.items():
            above_RSM = above_RC[:, place[system]].reshape(size, len(own), len(names))
            share_RS = np.full((size, len(own)), 1.0 / len(own))
            if redraw_seeds:
                share_RS = seed_generator.multinomial(len(own), share_RS[0], size=size) / len(own)
            metric_RM[system] = _ratio(np.einsum("rsm,rs->rm", above_RSM, share_RS), below_RM)
        for i, (system, other, metric) in enumerate(pairs):
            m = names.index(metric)
            difference[i, done : done + size] = metric_RM[system][:, m] - metric_RM[other][:, m]
        done += size
    tie = 1e-9  # percentage points: sums in another order
    lesser = np.minimum((difference <= tie).sum(axis=1), (difference >= -tie).sum(axis=1))
    p = np.minimum(1.0, 2.0 * (lesser + 1) / (num_samples + 1))
    return p, np.percentile(difference, [2.5, 97.5], axis=1).T


def _randomisation(
    selected: Mapping[str, Sequence[QueryScores]],
    pairs: Sequence[tuple[str, str, str]],
    names: tuple[str, ...],
    num_samples: int,
    seed: int,
) -> Floats:
    """p-values [pairs]: the share of swappings whose difference is at least as far from 0 as the one seen.

    The seen one counts among them (add one). A query's swap is the same for all pairs and all seeds.
    """
    generator = np.random.default_rng(seed)
    mean_MN = {system: np.mean([run.above_MN for run in own], axis=0) for system, own in selected.items()}
    gap = [mean_MN[system][names.index(m)] - mean_MN[other][names.index(m)] for system, other, m in pairs]
    gap_NC = np.ascontiguousarray(np.stack(gap, axis=1))
    scale_C = np.maximum(np.abs(gap_NC).sum(axis=0), 1e-300)
    seen_C = np.abs(gap_NC.sum(axis=0)) - 1e-11 * scale_C  # the part below the line is the same on both sides
    extreme_C = np.zeros(len(pairs))
    for size in _blocks(num_samples, len(gap_NC), "randomisation test"):
        sign_RN = 2.0 * generator.integers(2, size=(size, len(gap_NC)), dtype=np.int32) - 1.0
        extreme_C += (np.abs(sign_RN @ gap_NC) >= seen_C).sum(axis=0)
    return (extreme_C + 1) / (num_samples + 1)
