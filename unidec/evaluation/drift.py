"""How far two collections of queries are apart, and how far they would be by chance.

A distance grows as a window shrinks, also where nothing changed. So each is judged against its noise: the quantile
`QUANTILE` of the distances of windows that are drawn with replacement from held-out queries of the reference (whole
queries: words of one query come together). It is measured once, for some window sizes, and kept with the reference.

Shape suffixes: N queries of a reference, n of a window, R resampled windows, D width of the embeddings, B bins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from unidec.data.profile import DatasetProfile, spaced

Floats = npt.NDArray[np.floating[Any]]

QUANTILE = 0.99
SIZES = (50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000)  # of windows for which noise is measured
RESAMPLED = 200
POOL = 2000  # held-out queries that windows are drawn from
SCORE_QUANTILES = 101
SCORE_BINS = 20
_DIGITS = 6  # of what is stored


def js_distance(first_B: Any, second_B: Any) -> float:
    """Jensen-Shannon distance of two histograms (Lin, 1991): root of the divergence in bits, 0 (the same) to 1 (nothing
    shared). Two empty histograms are the same.
    """
    return float(_js_distances(np.asarray(first_B, dtype=np.float64)[None], second_B)[0])


def _js_distances(some_RB: Any, one_B: Any) -> Floats:
    """`js_distance` of each row to one histogram, [R]."""
    some, one = np.asarray(some_RB, dtype=np.float64), np.asarray(one_B, dtype=np.float64)
    total_R, total = some.sum(axis=1, keepdims=True), one.sum()
    p, q = some / np.maximum(total_R, 1e-300), np.broadcast_to(one / max(total, 1e-300), some.shape)
    middle = (p + q) / 2

    def divergence(part: Floats) -> Floats:
        inside = np.where(part > 0, part / np.where(middle > 0, middle, 1.0), 1.0)
        return (part * np.log2(inside)).sum(axis=1)

    distance = np.sqrt(np.clip((divergence(p) + divergence(q)) / 2, 0.0, 1.0))
    empty_R = total_R[:, 0] == 0
    return np.where(empty_R | (total == 0), np.where(empty_R & (total == 0), 0.0, 1.0), distance)


def mean_shift(mean_D: Any, other_D: Any, std_D: Any) -> float:
    """How far a mean moved: the root mean square over the dimensions of its change in standard deviations.

    0.1 is a tenth of the spread of single queries. Dimensions that are constant in the reference count nothing.
    """
    return float(_mean_shifts(np.asarray(other_D, dtype=np.float64)[None], mean_D, std_D)[0])


def _mean_shifts(some_RD: Floats, mean_D: Any, std_D: Any) -> Floats:
    std = np.asarray(std_D, dtype=np.float64)
    real = std > 1e-6 * std.max(initial=0.0)
    if not real.any():
        return np.zeros(len(some_RD))
    return np.sqrt(np.mean(((some_RD - np.asarray(mean_D)) / np.where(real, std, 1.0))[:, real] ** 2, axis=1))


def served_facts(vectors_ND: Floats, scores_N: Floats) -> dict[str, Any] | None:
    """Facts of queries as a bundle sees them, JSON-able: of their vectors in the searched space and of the best label's
    score. None without queries.
    """
    if not len(scores_N):
        return None
    vectors, scores = np.asarray(vectors_ND, dtype=np.float64), np.asarray(scores_N, dtype=np.float64)
    quantiles = np.quantile(scores, np.linspace(0, 1, SCORE_QUANTILES))
    edges = np.unique(_rounded(np.quantile(scores, np.arange(1, SCORE_BINS) / SCORE_BINS)))
    return {
        "count": len(scores),
        "mean": _rounded(vectors.mean(axis=0)).tolist(),
        "std": _rounded(vectors.std(axis=0)).tolist(),
        "score_quantiles": _rounded(quantiles).tolist(),
        "score_edges": edges.tolist(),
        "score_histogram": _histogram(scores, edges).tolist(),
    }


def compare_served(reference: Mapping[str, Any], vectors_ND: Floats, scores_N: Floats, low: float) -> dict[str, Any]:
    """A window's queries beside `served_facts` of a reference.

    Args:
        low: scores below this quantile of the reference's count as low.

    Returns:
        "shift" (`mean_shift`), "spread" (its variance over the reference's, summed over dimensions, minus 1), "score"
        (`js_distance` over the reference's bins), "low_score" (share of the window) and "low_score_below".
    """
    vectors, scores = np.asarray(vectors_ND, dtype=np.float64), np.asarray(scores_N, dtype=np.float64)
    std = np.asarray(reference["std"])
    below = float(np.interp(low, np.linspace(0, 1, SCORE_QUANTILES), reference["score_quantiles"]))
    histogram = _histogram(scores, np.asarray(reference["score_edges"]))
    spread = vectors.var(axis=0).sum() / max(float((std**2).sum()), 1e-300) - 1
    return {
        "shift": mean_shift(reference["mean"], vectors.mean(axis=0), std),
        "spread": float(spread),
        "score": js_distance(histogram, reference["score_histogram"]),
        "low_score": float((scores < below).mean()),
        "low_score_below": below,
    }


def low_score_noise(low: float, reference_size: int, window_size: int) -> float:
    """Share of a window below the reference's quantile `low` that chance explains, at `QUANTILE`.

    How many of n fall below an order statistic of N others is beta-binomial whatever the distribution (Wilks, 1941).
    """
    from scipy.stats import betabinom  # takes half a second to import

    rank = low * (reference_size - 1) + 1  # from 1; between two where the quantile is
    return float(betabinom.ppf(QUANTILE, window_size, rank, reference_size + 1 - rank)) / max(window_size, 1)


class Noise:
    """Noise by window size, as `text_noise` and `served_noise` measured it."""

    def __init__(self, stored: Mapping[str, Sequence[float]]) -> None:
        self._values = {name: np.asarray(values, dtype=np.float64) for name, values in stored.items()}

    def at(self, name: str, size: float) -> float:
        """What chance explains for a window of `size` queries; 0 where it was not measured.

        Interpolated in logarithms; the last value beyond the largest size, growing as a root below the smallest.
        """
        values = self._values.get(name)
        if values is None or size <= 0:
            return 0.0
        if size < SIZES[0]:
            return float(values[0] * np.sqrt(SIZES[0] / size))
        return float(np.exp(np.interp(np.log(size), np.log(SIZES), np.log(np.maximum(values, 1e-12)))))


def text_noise(profile: DatasetProfile, seed: int = 0) -> dict[str, list[float]]:
    """Noise of "length" and "tokens" (`js_distance` to the training queries), and of the shares "unknown_tokens" and
    "unseen_words" (to the held-out queries' own), by `SIZES`.
    """
    reference, held = profile.queries, profile.held_out
    rows = spaced(np.arange(len(held)), POOL)
    if not len(rows):
        return {}
    bins = len(profile.figures["queries"]["length"]["histogram"])
    length = csr_matrix((np.ones(len(rows)), (np.arange(len(rows)), held.length_bins[rows])), shape=(len(rows), bins))
    lengths_B = np.bincount(reference.length_bins, minlength=bins)
    tokens_B = np.asarray(reference.bucket_NB.sum(axis=0)).ravel()
    statistics: dict[str, Callable[[Floats], Floats]] = {
        "length": lambda w_RN: _js_distances(w_RN @ length, lengths_B),
        "tokens": lambda w_RN: _js_distances(w_RN @ held.bucket_NB[rows], tokens_B),
    }
    own = held is reference  # then what is drawn is compared with what it is drawn from
    found = _resample(statistics, len(rows), len(reference) if own else None, seed)
    shares = {"unknown_tokens": (held.unknown_N, held.tokens_N), "unseen_words": (held.unseen_N, held.words_N)}
    return found | _resample(
        {name: _share_change(part_N[rows], whole_N[rows]) for name, (part_N, whole_N) in shares.items()},
        len(rows), len(held), seed + 1,
    )  # fmt: skip


def served_noise(vectors_ND: Floats, scores_N: Floats, seed: int = 0) -> dict[str, list[float]]:
    """Noise of "shift", "spread" and "score" as `compare_served` counts them, by `SIZES`."""
    reference = served_facts(vectors_ND, scores_N)
    if reference is None:
        return {}
    rows = spaced(np.arange(len(scores_N)), POOL)
    vectors = np.asarray(vectors_ND, dtype=np.float64)[rows]
    vectors -= vectors.mean(axis=0)
    std, squares_N = vectors.std(axis=0), (vectors**2).sum(axis=1)
    edges, total = np.asarray(reference["score_edges"]), max(float((std**2).sum()), 1e-300)
    place = np.searchsorted(edges, np.asarray(scores_N, dtype=np.float64)[rows], side="right")
    bins = csr_matrix((np.ones(len(rows)), (np.arange(len(rows)), place)), shape=(len(rows), len(edges) + 1))

    def spread(w_RN: Floats) -> Floats:
        count_R = w_RN.sum(axis=1)
        mean_RD = w_RN @ vectors / count_R[:, None]
        return np.abs((w_RN @ squares_N / count_R - (mean_RD**2).sum(axis=1)) / total - 1)

    statistics: dict[str, Callable[[Floats], Floats]] = {
        "shift": lambda w_RN: _mean_shifts(w_RN @ vectors / w_RN.sum(axis=1, keepdims=True), 0.0, std),
        "spread": spread,
        "score": lambda w_RN: _js_distances(w_RN @ bins, reference["score_histogram"]),
    }
    return _resample(statistics, len(rows), len(scores_N), seed)


def _share_change(part_N: Floats, whole_N: Floats) -> Callable[[Floats], Floats]:
    """Change of a share of all words (or tokens) from the pool's own."""
    share = part_N.sum() / max(whole_N.sum(), 1)
    return lambda w_RN: np.abs(w_RN @ part_N / np.maximum(w_RN @ whole_N, 1) - share)


def _resample(
    statistics: Mapping[str, Callable[[Floats], Floats]], pool: int, reference: int | None, seed: int
) -> dict[str, list[float]]:
    """`QUANTILE` of each statistic over `RESAMPLED` windows of each size, drawn from a pool of queries.

    Where the pool is a part of the reference (its size is given), a window of n and a reference of N differ as a sample
    of n N / (n + N) does from what it is drawn from.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, list[float]] = {name: [] for name in statistics}
    for size in SIZES:
        drawn = size if reference is None else max(1, round(size * reference / (size + reference)))
        weight_RN = rng.multinomial(drawn, np.full(pool, 1 / pool), size=RESAMPLED).astype(np.float64)
        for name, statistic in statistics.items():
            found[name].append(float(_rounded(np.quantile(statistic(weight_RN), QUANTILE))))
    return found


def _histogram(values_N: Floats, edges: Floats) -> npt.NDArray[np.int64]:
    return np.bincount(np.searchsorted(edges, values_N, side="right"), minlength=len(edges) + 1)


def _rounded(values: Any) -> Any:
    """To a few significant digits: what the last bits depend on is no fact."""
    values = np.asarray(values, dtype=np.float64)
    size = np.where(values == 0, 1.0, np.abs(values))
    scale = 10.0 ** (_DIGITS - 1 - np.floor(np.log10(size)))
    return np.where(values == 0, 0.0, np.round(values * scale) / scale)
