"""How many true labels a query meets in its batch's pool, for settings of beta and eta (UniDEC preprint, figure 2b).

Legend: N training rows, H mined hard negatives of a query.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from unidec.training.sampler import PoolSampler

BETAS, ETAS = (1, 2, 3, 5), (0, 3, 6)
MOST = 32  # the histogram's last bar: so many positives or more


def pool_study(
    sampler: PoolSampler, batches: Sequence[np.ndarray], shortlist_NH: np.ndarray | None, epoch: int,
    num_batches: int = 12,
) -> dict[str, Any]:  # fmt: skip
    """Draw pools of `num_batches` of an epoch's batches (their rows) as training does, for its own setting and others.

    Args:
        sampler: of the run; its limit of the pool's size holds for every setting.
        shortlist_NH: int32 [N, H] mined hard negatives of the round; an eta that it cannot fill is left out.

    Returns:
        {"batches", "queries" (of a batch, mean), "beta", "eta", "size" (the run's own), "histogram": queries with 0, 1,
        ..., 31, 32 or more positives in the pool under the run's own setting, "share": percent of the queries'
        positives that are in the pool, "grid": [{"beta", "eta", "pool_size", "positives"}] means over batches and
        queries}; empty without batches.
    """
    if not len(batches):
        return {}
    chosen = np.unique(np.linspace(0, len(batches) - 1, min(num_batches, len(batches))).round().astype(int)).tolist()
    width = 0 if shortlist_NH is None else shortlist_NH.shape[1]
    own = (sampler.beta, sampler.eta if width else 0)
    found: dict[str, Any] = {
        "batches": len(chosen), "queries": float(np.mean([len(batches[i]) for i in chosen])), "beta": own[0],
        "eta": own[1], "size": sampler.size, "grid": [],
    }  # fmt: skip
    for eta in sorted({*(eta for eta in ETAS if eta <= width), own[1]}):
        for beta in sorted({*BETAS, own[0]}):
            other = copy.copy(sampler)
            other.beta, other.eta = beta, eta
            drawn = [other.batch(batches[i], epoch=epoch, step=i, shortlist_NH=shortlist_NH) for i in chosen]
            positives = np.concatenate([np.bincount(b.positive_row_P, minlength=len(b.rows_B)) for b in drawn])
            size = float(np.mean([len(batch.pool_S) for batch in drawn]))
            found["grid"].append({"beta": beta, "eta": eta, "pool_size": size, "positives": float(positives.mean())})
            if (beta, eta) == own:
                whole = sum(int(batch.num_positives_B.sum()) for batch in drawn)
                found["histogram"] = np.bincount(np.minimum(positives, MOST), minlength=MOST + 1).tolist()
                found["share"] = 100.0 * int(positives.sum()) / whole if whole else 0.0
    return found
