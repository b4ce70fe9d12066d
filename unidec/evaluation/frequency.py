"""Metrics by label frequency: labels in bins of equal volume, and what each bin adds to P@5, PSP@5 and coverage@5.

Legend: N queries, K places, L labels, E relevant pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from unidec.errors import DataError
from unidec.evaluation.metrics import Ranked, Scope, percent

K = 5


def frequency_bins(
    predicted_NK: Any, truth: csr_matrix, count_L: Any, inverse_propensity_L: Any, num_bins: int = 5
) -> list[dict[str, float]]:
    """What labels of each frequency add to the metrics (the quantile analysis of Gandalf; thesis, figure 1.3).

    Bins are those of `volume_bins`; their contributions add up to the whole metric.

    Args:
        predicted_NK: int [N, K], label ids, best first; -1 = none.
        truth: CSR [N, L], the truth after filters, relevant where > 0.
        count_L: int [L], training queries of each label. inverse_propensity_L: float [L].

    Returns:
        a record a bin, most frequent labels first: "bin" (from 1), "labels", "train_pairs", "most" and "least"
        (training queries of its labels), "mean_frequency", "test_pairs" (relevant pairs of the truth), "P@5" and
        "PSP@5" (contributions, percentage points), "recall@5" (percent of its test pairs found) and "coverage@5"
        (percent of its labels with a test pair that are found at least once).

    Raises:
        DataError: shapes that do not fit.
    """
    count_L, weight_L = np.asarray(count_L), np.asarray(inverse_propensity_L, dtype=np.float64)
    if weight_L.shape != count_L.shape:
        got = f"{len(count_L)} counts, {len(weight_L)} propensities"
        raise DataError("counts and propensities do not fit together", got=got, expected="one of each for every label")
    ranked = Ranked(predicted_NK, truth, weight_L, np.zeros(len(count_L), dtype=np.int64))
    bin_L, label_E = volume_bins(count_L, num_bins), ranked.label_E
    hit_label = ranked.label_NK[:, :K][ranked.hit_NK[:, :K]]  # a label once for each query it is right for
    places, best_psp = max(len(ranked.label_NK), 1) * K, Scope(ranked).parts("PSP", K)[1].sum()

    def per_bin(label: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(bin_L[label], weights=weight, minlength=num_bins)

    hits, pairs, psp = per_bin(hit_label), per_bin(label_E), per_bin(hit_label, weight_L[hit_label])
    tested, found = per_bin(np.unique(label_E)), per_bin(np.unique(hit_label))
    records = []
    for b in np.unique(bin_L).tolist():
        own = count_L[bin_L == b]
        records.append(
            {
                "bin": b + 1, "labels": len(own), "train_pairs": int(own.sum()), "most": int(own.max()),
                "least": int(own.min()), "mean_frequency": float(own.mean()), "test_pairs": int(pairs[b]),
                f"P@{K}": 100.0 * float(hits[b]) / places, f"PSP@{K}": percent(psp[b], best_psp),
                f"recall@{K}": percent(hits[b], pairs[b]), f"coverage@{K}": percent(found[b], tested[b]),
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
