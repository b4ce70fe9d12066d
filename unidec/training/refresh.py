"""The refresh every T epochs: clusters of queries (the batches of the coming round) and mined hard negatives.

Legend: N queries of the data set, n training queries, L labels, H mined negatives a query, D width of a head.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from unidec.data.storage import MANIFEST, file_sha256, load_array, read_manifest, write_folder
from unidec.errors import ArtifactError, TrainingError
from unidec.params import TrainingSettings
from unidec.sections import Pool
from unidec.training.clustering import balanced_clusters
from unidec.training.distributed import ALONE, Ranks
from unidec.training.fit import Figures
from unidec.training.mining import mine_hard_negatives
from unidec.training.sampler import (
    PoolSampler,
    clustered_batches,
    draws_pools,
    num_clusters,
    queries_a_batch,
    random_batches,
)

KIND, VERSION = "refresh", 1
_NDIM = {"order": 1, "offsets": 1, "negatives": 2}


@dataclass(frozen=True)
class Refresh:
    """What a round trains on.

    Attributes:
        order: int64 [n] training rows, cluster after cluster, with offsets int64 [C + 1]; several clusters make a batch
            where they are smaller than one (`pool.cluster_start`). None: random batches.
        negatives: int32 [N, H] by training row, -1 where there is none; None: none are mined.
        sha256: of the manifest it was loaded with: a checkpoint inside its round names it.
    """

    order: np.ndarray | None = None
    offsets: np.ndarray | None = None
    negatives: np.ndarray | None = None
    sha256: str | None = None

    def batches(self, rows: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
        """Rows of each batch of an epoch."""
        if self.order is not None and self.offsets is not None:
            return clustered_batches(self.order, self.offsets, seed, epoch, num_clusters(len(rows), batch_size))
        return random_batches(rows, batch_size, seed, epoch)

    def save(self, path: Path, epoch: int) -> None:
        """Keep it for the round that starts after `epoch` epochs."""
        arrays = {name: getattr(self, name) for name in _NDIM if getattr(self, name) is not None}
        with write_folder(path, KIND, VERSION, {"epoch": epoch}) as out:
            for name, array in arrays.items():
                np.save(out.path / f"{name}.npy", array, allow_pickle=False)

    @staticmethod
    def is_made(path: Path, epoch: int) -> bool:
        """Whether the one made after `epoch` epochs is there, and whole."""
        try:
            return read_manifest(path, KIND, VERSION)["meta"].get("epoch") == epoch
        except ArtifactError:
            return False

    @classmethod
    def load(cls, path: Path, epoch: int) -> Refresh:
        """The one made after `epoch` epochs. Raises TrainingError: there is none, or it is damaged."""
        if not cls.is_made(path, epoch):
            raise TrainingError(
                "the round has no clusters and hard negatives", where=str(path),
                expected=f"those made after epoch {epoch}", fix="refresh first",
            )  # fmt: skip
        present = {n: load_array(path / f"{n}.npy", ndim=d) for n, d in _NDIM.items() if (path / f"{n}.npy").is_file()}
        return cls(**present, sha256=file_sha256(path / MANIFEST))


def cluster_size(pool: Pool, epoch: int, num_rows: int) -> int:
    """Largest number of queries in a cluster of the round that begins after `epoch` epochs, of `num_rows` in all.

    A batch's, or NGAME's curriculum: it starts at `pool.cluster_start` and doubles at each refresh up to a batch's."""
    batch = queries_a_batch(pool, num_rows)
    if pool.cluster_start == 0:
        return batch
    doublings = min(epoch // pool.refresh, batch.bit_length())
    return min(pool.cluster_start << doublings, batch)


# the first half of a refresh; float32 [n, D] of the training queries, None where nothing compares them; figures
Clusters = tuple[Refresh, np.ndarray | None, Figures]


def make_clusters(
    settings: TrainingSettings,
    rows: np.ndarray,
    query_vectors: Callable[[], np.ndarray],
    device: torch.device,
    ranks: Ranks = ALONE,
    epoch: int = 0,
) -> Clusters:
    """Cluster the training queries, rows int64 [n], after `epoch` epochs; all ranks call this. `query_vectors` gives
    float32 [n, D] of them, and is called only where clusters or negatives need them."""
    begin, refresh, query_ND = time.perf_counter(), Refresh(), None
    size = cluster_size(settings.pool, epoch, len(rows))
    report: Figures = {}
    clustered = settings.pool.batches == "clustered"
    if (clustered and size > 1) or (settings.pool.eta > 0 and draws_pools(settings.model, settings.pool)):
        query_ND = query_vectors()
        report["encode_queries_seconds"] = time.perf_counter() - begin
    if clustered and size == 1:  # a query is its own cluster: nothing to compare
        refresh = Refresh(rows, np.arange(len(rows) + 1))
    elif clustered and query_ND is not None:
        encoded = time.perf_counter()
        order_N, offsets, cosine = balanced_clusters(query_ND, size, settings.seed, device, ranks)
        refresh = Refresh(rows[order_N], offsets)
        report |= {"cluster_seconds": time.perf_counter() - encoded, "clusters": len(offsets) - 1,
                   "cluster_size": size, "cluster_cosine": cosine}  # fmt: skip
    return refresh, query_ND, report | {"refresh_seconds": time.perf_counter() - begin}


def make_refresh(
    settings: TrainingSettings,
    rows: np.ndarray,
    sampler: PoolSampler,
    clusters: Clusters,
    label_vectors: Callable[[], np.ndarray],
    device: torch.device,
    ranks: Ranks = ALONE,
) -> tuple[Refresh, Figures]:
    """Mine hard negatives where a loss runs over pools; with the clusters that is the refresh, and figures of both.
    `label_vectors` gives float32 [L, D], with several ranks this rank's part of it; called only when needed."""
    begin, pool, (refresh, query_ND, report) = time.perf_counter(), settings.pool, clusters
    if query_ND is not None and pool.eta > 0 and draws_pools(settings.model, pool):
        label_LD = label_vectors()
        report["encode_labels_seconds"] = time.perf_counter() - begin
        pairs, count = (sampler.relevance, sampler.filter_pairs), pool.eta * pool.refresh
        negatives, mined = mine_hard_negatives(query_ND, rows, label_LD, pairs, count, device, ranks, pool.mining)
        report = report | {f"mine_{key}": value for key, value in mined.items()}
        refresh = replace(refresh, negatives=negatives)
    return refresh, report | {"refresh_seconds": report["refresh_seconds"] + time.perf_counter() - begin}
