"""Metrics by label frequency: labels in bins of equal volume, and what each bin adds to P@k, PSP@k and coverage@k.

Legend: N queries, K places, L labels, E relevant pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from unidec.errors import DataError
from unidec.evaluation.metrics import Ranked, percent


def frequency_bins(
    predicted_NK: Any, truth: csr_matrix, count_L: Any, inverse_propensity_L: Any, num_bins: int = 5, k: int = 5
) -> list[dict[str, float]]:
    """What labels of each frequency add to the metrics (the quantile analysis of Gandalf; thesis, figure 1.3).

    Labels are ordered by training queries, most first, and cut into bins of equal volume (`volume_bins`), so the first
    has head labels and the last tail labels. Contributions of the bins add up to the whole metric.

    Args:
        predicted_NK: int [N, K], label ids, best first; -1 = none.
        truth: CSR [N, L], the truth after filters, relevant where > 0.
        count_L: int [L], training queries of each label. inverse_propensity_L: float [L].

    Returns:
        a record a bin, most frequent labels first: "bin" (from 1), "labels", "train_pairs", "most" and "least"
        (training queries of its labels), "mean_frequency", "test_pairs" (relevant pairs of the truth), "P@k" and
        "PSP@k" (contributions, percentage points), "recall@k" (percent of its test pairs found) and "coverage@k"
        (percent of its labels with a test pair that are found at least once).

    Raises:
        DataError: shapes that do not fit, or num_bins or k below 1.
    """
    count_L, weight_L = np.asarray(count_L), np.asarray(inverse_propensity_L, dtype=np.float64)
    if weight_L.shape != count_L.shape or min(num_bins, k) < 1:
        raise DataError(
            "labels and settings of the bins do not fit together",
            got=f"{len(count_L)} counts, {len(weight_L)} propensities, {num_bins} bins, k {k}",
            expected="a count and a propensity for each label, at least one bin and k >= 1",
        )
    ranked = Ranked(predicted_NK, truth, weight_L, np.zeros(len(count_L), dtype=np.int64))
    bin_L, label_E = volume_bins(count_L, num_bins), ranked.label_E
    hit_label = ranked.label_NK[:, :k][ranked.hit_NK[:, :k]]  # a label once for each query it is right for
    places, best_psp = max(len(ranked.label_NK), 1) * k, ranked.scope("").parts("PSP", k)[1].sum()

    def per_bin(label: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(bin_L[label], weights=weight, minlength=num_bins)

    hits, pairs = per_bin(hit_label), per_bin(label_E)
    psp = per_bin(hit_label, weight_L[hit_label])
    tested, found = per_bin(np.unique(label_E)), per_bin(np.unique(hit_label))
    records = []
    for b in np.unique(bin_L).tolist():
        of_bin = count_L[bin_L == b]
        records.append(
            {
                "bin": b + 1, "labels": len(of_bin), "train_pairs": int(of_bin.sum()), "most": int(of_bin.max()),
                "least": int(of_bin.min()), "mean_frequency": float(of_bin.mean()), "test_pairs": int(pairs[b]),
                f"P@{k}": 100.0 * float(hits[b]) / places, f"PSP@{k}": percent(psp[b], best_psp),
                f"recall@{k}": percent(hits[b], pairs[b]), f"coverage@{k}": percent(found[b], tested[b]),
            }
        )  # fmt: skip
    return records


def volume_bins(count_L: Any, num_bins: int) -> np.ndarray:
    """Bin of each label, int64 [L] in 0 to num_bins - 1: equal sums of counts, most frequent first.

    Labels of one frequency stay together, so bins can differ in volume and one can be empty; labels without a training
    query are in the last.
    """
    count_L = np.asarray(count_L)
    values, place_L, members = np.unique(-count_L, return_inverse=True, return_counts=True)
    volume = -values.astype(np.float64) * members
    total = volume.sum()
    if total <= 0:
        return np.full(len(count_L), num_bins - 1, dtype=np.int64)
    middle = (np.cumsum(volume) - volume / 2) / total  # a frequency belongs where the middle of its volume lies
    bin_of_value = np.minimum((middle * num_bins).astype(np.int64), num_bins - 1)
    bin_of_value[values == 0] = num_bins - 1
    return bin_of_value[place_L]


def doubling_histogram(count: Any) -> dict[str, int]:
    """How many of the counts are 0, 1, 2, 3 to 4, 5 to 8, 9 to 16, ...: {"0": 7, "1": 3, "2": 0, "3–4": 5}.

    Args:
        count: int [any length], at least 0.
    """
    count = np.asarray(count, dtype=np.int64)
    power = np.where(count > 0, np.ceil(np.log2(np.maximum(count, 1))).astype(np.int64) + 1, 0)
    bars = np.bincount(power, minlength=1)

    def name(i: int) -> str:
        return str(i) if i < 3 else f"{2 ** (i - 2) + 1}–{2 ** (i - 1)}"

    return {name(i): int(bar) for i, bar in enumerate(bars.tolist())}
