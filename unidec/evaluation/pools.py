"""How many true labels a query meets in its batch's pool, for settings of beta and eta (UniDEC preprint, figure 2b).

Legend: B queries in a batch, N training rows, H mined hard negatives of a query.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from unidec.training.sampler import PoolBatch, PoolSampler

BETAS, ETAS = (1, 2, 3, 5), (0, 3, 6)
MOST = 32  # the histogram's last bar: so many positives or more


def pool_study(
    sampler: PoolSampler,
    batches: Sequence[np.ndarray],
    shortlist_NH: np.ndarray | None,
    epoch: int,
    *,
    betas: Sequence[int] = BETAS,
    etas: Sequence[int] = ETAS,
    num_batches: int = 12,
) -> dict[str, Any]:
    """Draw pools of some of a round's batches as training does, for its own setting and for others.

    Args:
        sampler: of the run; its limit of the pool's size holds for every setting.
        batches: rows of the batches of an epoch; `num_batches` of them, evenly spaced, are drawn.
        shortlist_NH: int32 [N, H] mined hard negatives of the round, or None: eta is 0 in every setting.
        epoch: of the batches.
        betas, etas: sampled positives and hard negatives a query to try, beside the run's own; an eta that the
            shortlist cannot fill is left out.

    Returns:
        {"batches", "queries" (of a batch, mean), "beta", "eta", "size" (the run's own), "histogram": queries with 0, 1,
        ..., 31, 32 or more positives in the pool under the run's own setting, "share": percent of the queries'
        positives that are in the pool, "grid": [{"beta", "eta", "pool_size", "positives"}] means over batches and
        queries}; empty without batches.
    """
    if not len(batches):
        return {}
    chosen = np.unique(np.linspace(0, len(batches) - 1, min(num_batches, len(batches))).round().astype(int)).tolist()
    mined = shortlist_NH is not None and shortlist_NH.shape[1] > 0
    own = (sampler.beta, sampler.eta if mined else 0)

    def draw(beta: int, eta: int) -> list[PoolBatch]:
        other = copy.copy(sampler)
        other.beta, other.eta = beta, eta
        return [other.batch(batches[i], epoch=epoch, step=i, shortlist_NH=shortlist_NH) for i in chosen]

    histogram, grid = np.zeros(MOST + 1, dtype=np.int64), []
    inside = whole = 0
    width = shortlist_NH.shape[1] if mined and shortlist_NH is not None else 0
    for eta in sorted({*(eta for eta in etas if eta <= width and mined), own[1]}):
        for beta in sorted({*betas, own[0]}):
            drawn = draw(beta, eta)
            positives = np.concatenate([_positives(batch) for batch in drawn])
            if (beta, eta) == own:
                histogram = np.bincount(np.minimum(positives, MOST), minlength=MOST + 1)
                inside, whole = int(positives.sum()), sum(int(batch.num_positives_B.sum()) for batch in drawn)
            sizes = [len(batch.pool_S) for batch in drawn]
            grid.append(
                {"beta": beta, "eta": eta, "pool_size": float(np.mean(sizes)), "positives": float(positives.mean())}
            )
    return {
        "batches": len(chosen), "queries": float(np.mean([len(batches[i]) for i in chosen])), "beta": own[0],
        "eta": own[1], "size": sampler.size, "histogram": histogram.tolist(),
        "share": 100.0 * inside / whole if whole else 0.0, "grid": grid,
    }  # fmt: skip


def _positives(batch: PoolBatch) -> np.ndarray:
    """True labels of each query in the pool, int64 [B]."""
    return np.bincount(batch.positive_row_P, minlength=len(batch.rows_B))
