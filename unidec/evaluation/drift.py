"""How far two collections of queries are apart, and how far they would be by chance.

A distance grows as a window shrinks, also where nothing changed. So each is judged against its noise: the quantile
`QUANTILE` of the distances of windows that are drawn with replacement from held-out queries of the reference (whole
queries: words of one query come together). It is measured once, for some window sizes, and kept with the reference.

Shape suffixes: N queries of a reference, n of a window, R resampled windows, D width of the embeddings, B bins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix
from scipy.special import rel_entr

from unidec.data.profile import DatasetProfile, spaced

Floats = npt.NDArray[np.floating[Any]]
Statistic = Callable[[Floats], Floats]  # weights of a pool's queries in each window [R, N] -> a figure of each, [R]

QUANTILE = 0.99
SIZES = (50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000)  # of windows for which noise is measured
RESAMPLED = 200
POOL = 2000  # held-out queries that windows are drawn from
SCORE_QUANTILES = 101
SCORE_BINS = 20
_DIGITS = 6  # of what is stored


def js_distance(first_B: Any, second_B: Any) -> Floats:
    """Jensen-Shannon distance of two histograms (Lin, 1991), or of several to one, [..., B]: root of the divergence in
    bits, 0 (the same) to 1 (nothing shared). Two empty histograms are the same.
    """
    first, second = np.asarray(first_B, dtype=np.float64), np.asarray(second_B, dtype=np.float64)
    total, other = first.sum(axis=-1), second.sum(axis=-1)
    p, q = first / np.maximum(total, 1e-300)[..., None], second / np.maximum(other, 1e-300)[..., None]
    divergence = (rel_entr(p, (p + q) / 2) + rel_entr(q, (p + q) / 2)).sum(axis=-1) / (2 * np.log(2))
    empty = (total == 0).astype(float) + (other == 0)
    return np.where(empty > 0, empty == 1, np.sqrt(np.clip(divergence, 0.0, 1.0)))


def mean_shift(mean_D: Any, other_D: Any, std_D: Any) -> Floats:
    """How far a mean moved ([..., D]: several): the root mean square over the dimensions of its change in standard
    deviations.

    0.1 is a tenth of the spread of single queries. Dimensions that are constant in the reference count nothing.
    """
    std, change = np.asarray(std_D, dtype=np.float64), np.asarray(other_D, dtype=np.float64) - np.asarray(mean_D)
    real = std > 1e-6 * std.max(initial=0.0)
    return (
        np.sqrt(np.mean((change[..., real] / std[real]) ** 2, axis=-1)) if real.any() else np.zeros(change.shape[:-1])
    )


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
        "shift": float(mean_shift(reference["mean"], vectors.mean(axis=0), std)),
        "spread": float(spread),
        "score": float(js_distance(histogram, reference["score_histogram"])),
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


@dataclass(frozen=True)
class Noise:
    """Noise by window size, as `text_noise` and `served_noise` measured it."""

    measured: Mapping[str, Sequence[float]]

    def at(self, name: str, size: float) -> float:
        """What chance explains for a window of `size` queries; 0 where it was not measured.

        Interpolated in logarithms; the last value beyond the largest size, growing as a root below the smallest.
        """
        values = self.measured.get(name)
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
    length, lengths_B = _one_hot(held.length_bins[rows], bins), np.bincount(reference.length_bins, minlength=bins)
    tokens, tokens_B = held.bucket_NB[rows], np.asarray(reference.bucket_NB.sum(axis=0)).ravel()
    statistics = {
        "length": lambda w_RN: js_distance(w_RN @ length, lengths_B),
        "tokens": lambda w_RN: js_distance(w_RN @ tokens, tokens_B),
    }
    own = len(reference) if held is reference else None  # then what is drawn is compared with what it is drawn from
    shares = {
        "unknown_tokens": _share_change(held.unknown_N[rows], held.tokens_N[rows]),
        "unseen_words": _share_change(held.unseen_N[rows], held.words_N[rows]),
    }
    return _resample(statistics, len(rows), own, seed) | _resample(shares, len(rows), len(held), seed + 1)


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
    bins = _one_hot(place, len(edges) + 1)

    def spread(w_RN: Floats) -> Floats:
        count_R = w_RN.sum(axis=1)
        mean_RD = w_RN @ vectors / count_R[:, None]
        return np.abs((w_RN @ squares_N / count_R - (mean_RD**2).sum(axis=1)) / total - 1)

    statistics = {
        "shift": lambda w_RN: mean_shift(0.0, w_RN @ vectors / w_RN.sum(axis=1, keepdims=True), std),
        "spread": spread,
        "score": lambda w_RN: js_distance(w_RN @ bins, reference["score_histogram"]),
    }
    return _resample(statistics, len(rows), len(scores_N), seed)


def _one_hot(place_N: Any, size: int) -> csr_matrix:
    return csr_matrix((np.ones(len(place_N)), (np.arange(len(place_N)), place_N)), shape=(len(place_N), size))


def _share_change(part_N: Any, whole_N: Any) -> Statistic:
    """Change of a share of all words (or tokens) from the pool's own."""
    share = part_N.sum() / max(whole_N.sum(), 1)
    return lambda w_RN: np.abs(w_RN @ part_N / np.maximum(w_RN @ whole_N, 1) - share)


def _resample(
    statistics: Mapping[str, Statistic], pool: int, reference: int | None, seed: int
) -> dict[str, list[float]]:  # fmt: skip
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
