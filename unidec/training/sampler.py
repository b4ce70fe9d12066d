"""Divides the training queries into batches, and reads from the settings which labels each head
sees. The labels of a batch's pool are drawn in `unidec/model/pool.py`.

No random state is kept: every draw is seeded by the seed and the epoch, so a resumed run needs only
the counters.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from unidec.config import Loss, Model, Pool
from unidec.model.pool import num_clusters, step_rng

# streams of random numbers; `unidec.model.pool` has another
_RANDOM_BATCHES = 1
_CLUSTER_ORDER = 2


def random_batches(rows: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """ceil(n / batch_size) batches of shuffled rows, int64, whose sizes differ by at most one."""
    rng = step_rng(seed, epoch, 0, _RANDOM_BATCHES)
    shuffled = rng.permutation(np.asarray(rows, dtype=np.int64))
    return np.array_split(shuffled, -(-len(rows) // batch_size))


def queries_a_batch(pool: Pool, num_rows: int) -> int:
    """Number of queries in the largest batch: `pool.batch_size`, or for clustered batches with
    `pool.batch_fit: least` the smallest N / 2^depth, rounded up, that is at least that (as are the
    published 1,152 on 131K and 1,098 on 1.3M).
    """
    if pool.batch_fit == "most" or pool.batches == "random":
        return pool.batch_size
    depth = max(num_rows // pool.batch_size, 1).bit_length() - 1
    return -(-num_rows // 2**depth)


def steps_an_epoch(pool: Pool, num_rows: int) -> int:
    """Number of batches in an epoch."""
    batch_size = queries_a_batch(pool, num_rows)
    if pool.batches == "clustered":
        return num_clusters(num_rows, batch_size)
    return -(-num_rows // batch_size)


def clustered_batches(
    order: np.ndarray, offsets: np.ndarray, seed: int, epoch: int, num_batches: int
) -> list[np.ndarray]:
    """Batches of whole clusters, one or several in each, in a random order for each epoch; without
    empty batches.

    Args:
        order: int [n], data set rows, cluster after cluster; offsets: int [C + 1], where each
        cluster begins.
        num_batches: if there are more clusters, they are distributed at random to this many
            batches, whose sizes differ by at most one if the clusters' sizes do.
    """
    members = np.split(np.asarray(order, dtype=np.int64), offsets[1:-1])
    shuffled = step_rng(seed, epoch, 0, _CLUSTER_ORDER).permutation(len(members))
    if num_batches >= len(members):
        return [members[cluster] for cluster in shuffled if len(members[cluster])]
    # in turn, larger clusters first: each batch gets an even share of large and small ones
    sizes = np.diff(offsets)[shuffled]
    by_size = shuffled[np.argsort(-sizes, kind="stable")]
    batches = []
    for number in range(num_batches):
        of_batch = [members[cluster] for cluster in by_size[number::num_batches]]
        batches.append(np.concatenate(of_batch))
    return [batch for batch in batches if len(batch)]


Labels = Literal["none", "pool", "some", "all"]  # some: the pool, and other labels drawn uniformly


def head_labels(model: Model, pool: Pool) -> tuple[Labels, Labels]:
    """Labels in the dual encoder's loss, and in the classifier's; "none" for a head that the model
    does not have.
    """
    de: Labels = pool.de_labels
    clf: Labels = "some" if isinstance(pool.clf_labels, int) else pool.clf_labels
    if model.heads == "de":
        clf = "none"
    elif model.heads == "clf":
        de = "none"
    return de, clf


def draws_pools(model: Model, pool: Pool) -> bool:
    """Whether a loss runs over a pool; hard negatives are needed only then."""
    return not {"pool", "some"}.isdisjoint(head_labels(model, pool))


def encoded_labels(model: Model, pool: Pool, rows_hold_text: bool) -> Labels:
    """Labels whose texts a step encodes: the dual encoder's or, without it, the classifier's if its
    rows contain the vectors of label texts.
    """
    de, clf = head_labels(model, pool)
    return clf if de == "none" and rows_hold_text else de


def weighs_by_propensity(loss: Loss, pool: Pool) -> bool:
    """Whether losses, or the draw of positives, are weighted by inverse propensities."""
    return loss.weights == "propensity" or pool.positives == "tail"
