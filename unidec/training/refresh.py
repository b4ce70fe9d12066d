"""The refresh every T epochs: clusters of queries (the batches of the next round) and mined hard
negatives.

Legend: N queries of the data set, n training queries, L labels, H mined negatives of a query, D
width of a head, E
positives of some queries.

Source: UniDEC, H_i = top-k of a nearest-neighbour search without P_i, |H_i| = eta x T. Labels of
filter pairs (the
query is the label itself) are excluded too: they score best and are not negatives (spec, detail 6).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from unidec.config import Mining, Pool, TrainingSettings
from unidec.data.storage import MANIFEST, file_sha256, load_array, read_manifest, write_folder
from unidec.errors import ArtifactError, TrainingError
from unidec.model.faiss_library import faiss_module
from unidec.model.pool import PoolSampler, num_clusters
from unidec.model.search import exact_search, labels_that_fit, query_block
from unidec.progress import progress
from unidec.training.clustering import balanced_clusters
from unidec.training.distributed import ALONE, Ranks
from unidec.training.fit import Figures
from unidec.training.precision import autocast_type
from unidec.training.sampler import (
    clustered_batches,
    draws_pools,
    queries_a_batch,
    random_batches,
)

KIND = "refresh"
VERSION = 1
BLOCK = 512  # queries compared with all labels at a time
_BLOCKS = 8  # blocks between two updates of the progress bar
_PAIRS = 1 << 16  # positives scored at once
# labels searched in addition to H, so that among equal scores the lowest label ids are taken
_SPARE = 32
# least labels for each inverted list on average: faiss requires 39 to train a centroid
_ROWS_A_LIST = 40
_LISTS_A_PROBE = 16  # one of so many inverted lists is searched ...
# ... and at most this many: from about 65,000 labels on, the time of a query grows with sqrt(L)
_MAX_PROBES = 64
# of faiss's k-means: labels for each centroid, and iterations
_TRAINING_LABELS = 64
_ITERATIONS = 10
_COMPARED = 1000  # queries on which an approximate search is compared with the exact one
_NDIM = {"order": 1, "offsets": 1, "negatives": 2}


@dataclass(frozen=True)
class Refresh:
    """Clusters and hard negatives of a round.

    Attributes:
        order: int64 [n], training rows, cluster after cluster; offsets: int64 [C + 1], where each
            cluster begins. Clusters smaller than a batch (`pool.cluster_start`) are combined to
            batches. None: random batches.
        negatives: int32 [N, H] by training row, padded with -1; None: no hard negatives.
        sha256: of the manifest of its folder, if it was loaded; checkpoints inside the round
        contain it.
    """

    order: np.ndarray | None = None
    offsets: np.ndarray | None = None
    negatives: np.ndarray | None = None
    sha256: str | None = None

    def batches(self, rows: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
        """Training rows of each batch of an epoch."""
        if self.order is not None and self.offsets is not None:
            return clustered_batches(
                self.order, self.offsets, seed, epoch, num_clusters(len(rows), batch_size)
            )
        return random_batches(rows, batch_size, seed, epoch)

    def save(self, path: Path, epoch: int) -> None:
        """Write it to a folder, as the refresh of the round that starts after `epoch` epochs."""
        arrays = {name: getattr(self, name) for name in _NDIM if getattr(self, name) is not None}
        with write_folder(path, KIND, VERSION, {"epoch": epoch}) as out:
            for name, array in arrays.items():
                np.save(out.path / f"{name}.npy", array, allow_pickle=False)

    @staticmethod
    def exists(path: Path, epoch: int) -> bool:
        """Whether the folder has the complete refresh of the round that starts after `epoch`
        epochs.
        """
        try:
            return read_manifest(path, KIND, VERSION)["meta"].get("epoch") == epoch
        except ArtifactError:
            return False

    @classmethod
    def load(cls, path: Path, epoch: int) -> Refresh:
        """Load the refresh of the round that starts after `epoch` epochs. Raises TrainingError: it
        is missing or damaged.
        """
        if not cls.exists(path, epoch):
            raise TrainingError(
                "clusters and hard negatives of the round are missing or damaged",
                where=str(path),
                expected=f"the refresh after epoch {epoch}",
                fix="run the refresh first",
            )
        present = {
            n: load_array(path / f"{n}.npy", ndim=d)
            for n, d in _NDIM.items()
            if (path / f"{n}.npy").is_file()
        }
        return cls(**present, sha256=file_sha256(path / MANIFEST))


def cluster_size(pool: Pool, epoch: int, num_rows: int) -> int:
    """Largest number of queries in a cluster of the round that starts after `epoch` epochs.

    It is the size of a batch. In NGAME's curriculum it starts at `pool.cluster_start` and doubles
    at the epochs of `pool.cluster_doublings` (if empty at each refresh), up to the size of a batch.

    Args:
        num_rows: number of training queries.
    """
    batch = queries_a_batch(pool, num_rows)
    if pool.cluster_start == 0:
        return batch
    reached = sum(begin <= epoch for begin in pool.cluster_doublings)
    doublings = reached if pool.cluster_doublings else epoch // pool.refresh
    return min(pool.cluster_start << min(doublings, batch.bit_length()), batch)


# arguments and results as of `exact_search`, without the labels
Search = Callable[..., tuple[np.ndarray, np.ndarray]]
# a refresh without negatives, vectors float32 [n, D] of the training queries (None if not needed),
# and figures
Clusters = tuple[Refresh, np.ndarray | None, Figures]


def make_clusters(
    settings: TrainingSettings,
    rows: np.ndarray,
    query_vectors: Callable[[], np.ndarray],
    device: torch.device,
    ranks: Ranks = ALONE,
    epoch: int = 0,
) -> Clusters:
    """Cluster the training queries for the round that starts after `epoch` epochs; all ranks call
    this.

    Args:
        rows: int64 [n], training rows.
        query_vectors: returns their vectors float32 [n, D]; called only if clusters or negatives
        need them.
    """
    begin = time.perf_counter()
    refresh = Refresh()
    query_ND = None
    size = cluster_size(settings.pool, epoch, len(rows))
    report: Figures = {}
    clustered = settings.pool.batches == "clustered"
    if (clustered and size > 1) or (_mines(settings) and not settings.pool.shortlist):
        query_ND = query_vectors()
        report["encode_queries_seconds"] = time.perf_counter() - begin
    if clustered and size == 1:  # each query is a cluster
        refresh = Refresh(rows, np.arange(len(rows) + 1))
    elif clustered and query_ND is not None:
        encoded = time.perf_counter()
        order_N, offsets, cosine = balanced_clusters(query_ND, size, settings.seed, device, ranks)
        refresh = Refresh(rows[order_N], offsets)
        report |= {
            "cluster_seconds": time.perf_counter() - encoded,
            "clusters": len(offsets) - 1,
            "cluster_size": size,
            "cluster_cosine": cosine,
        }
    return refresh, query_ND, report | {"refresh_seconds": time.perf_counter() - begin}


def _mines(settings: TrainingSettings) -> bool:
    """Whether steps sample hard negatives."""
    return settings.pool.eta > 0 and draws_pools(settings.model, settings.pool)


def make_refresh(
    settings: TrainingSettings,
    rows: np.ndarray,
    sampler: PoolSampler,
    clusters: Clusters,
    label_vectors: Callable[[], np.ndarray],
    *,
    device: torch.device,
    ranks: Ranks = ALONE,
    shortlist: Callable[[], tuple[np.ndarray, Figures]] | None = None,
) -> tuple[Refresh, Figures]:
    """Mine hard negatives if a loss runs over pools, and return the complete refresh, with figures
    of clustering and mining. Inner products have the type in which steps compute.

    Args:
        clusters: from `make_clusters`.
        label_vectors: returns vectors float32 [L, D], with several ranks this rank's part of them;
            called only if needed.
        shortlist: returns labels and figures that replace the nearest labels
        (`unidec.model.additions.Shortlister`).
    """
    begin, pool, (refresh, query_ND, report) = time.perf_counter(), settings.pool, clusters
    if not _mines(settings):
        pass
    elif shortlist is not None:
        negatives, mined = shortlist()
        report = report | {f"mine_{key}": value for key, value in mined.items()}
        refresh = replace(refresh, negatives=negatives)
    elif query_ND is not None:
        label_LD = label_vectors()
        report["encode_labels_seconds"] = time.perf_counter() - begin
        pairs = (sampler.relevance, sampler.filter_pairs)
        count = pool.eta * pool.refresh
        half = autocast_type(settings.optim.precision, device)
        with torch.autocast(device.type, dtype=half or torch.bfloat16, enabled=half is not None):
            negatives, mined = mine_hard_negatives(
                query_ND, rows, label_LD, pairs, count, device, ranks, pool.mining
            )
        report = report | {f"mine_{key}": value for key, value in mined.items()}
        refresh = replace(refresh, negatives=negatives)
    return refresh, report | {
        "refresh_seconds": report["refresh_seconds"] + time.perf_counter() - begin
    }


def mine_hard_negatives(
    query_nD: np.ndarray,
    rows_n: np.ndarray,
    label_LD: np.ndarray,
    pairs: tuple[sp.csr_matrix, sp.csr_matrix],
    num_negatives: int,
    device: str | torch.device | None = None,
    ranks: Ranks = ALONE,
    mining: Mining = "exact",
) -> tuple[np.ndarray, Figures]:
    """Mine for each query the `num_negatives` (eta x T) nearest labels that are not positives or
    filtered; among equal scores lower label ids come first.

    Args:
        query_nD: float32 [n, D] query vectors; rows_n: int64 [n], their data set rows, each once.
        label_LD: float32 [L, D] label vectors; with several ranks this rank's part of them.
        pairs: relevance and filter pairs, csr [N, L].
        num_negatives: H.
        device: device of the exact search; None: the CPU.
        ranks: processes that share the work by blocks of queries; all return the complete result.
        mining: "exact", or "faiss" for an approximate search on the CPU.

    Returns:
        Mined labels by data set row, best first, int32 [N, H], padded with -1; and figures:
        `queries`, `negative_score` (mean over all negatives), `positives_found` (share of the
        queries' positives that score at least as high as the query's last negative, so that the
        search would find them), `seconds`; for an approximate search `recall`, the share of the
        exact results that it finds.

    Raises:
        DataError: vectors are not finite. UnidecError: faiss is not installed.
    """
    begin_time, (relevance, filter_pairs) = time.perf_counter(), pairs
    shortlist = np.full((relevance.shape[0], num_negatives), -1, dtype=np.int32)
    label = torch.from_numpy(np.require(ranks.gather_array(label_LD), requirements="W"))
    if len(label) <= labels_that_fit(torch.device(device or "cpu"), label.shape[1]):
        label = label.to(device)
    # blocks are the same for any number of ranks, because the bits of scores depend on the size of
    # a block
    block = query_block(len(label), BLOCK)
    own = slice(
        *(min(block * number, len(query_nD)) for number in ranks.part(-(-len(query_nD) // block)))
    )
    exact: Search = partial(exact_search, label_LD=label, block=block, device=device)
    search = exact if mining == "exact" else faiss_search(label)
    # sum of negatives' scores; numbers of negatives, positives, positives found
    rows = rows_n[own]
    sums = np.zeros(4)
    with progress(total=len(rows), desc="mine hard negatives", unit="query") as bar:
        for begin in range(0, len(rows), _BLOCKS * block):
            some = rows[begin : begin + _BLOCKS * block]
            query = query_nD[own][begin : begin + _BLOCKS * block]
            positive = _pattern(relevance[some])
            excluded = positive + _pattern(filter_pairs[some])
            score, negative = search(query, k=num_negatives + _SPARE, exclude=excluded)
            order = np.lexsort((negative, -score), axis=1)[:, :num_negatives]
            score = np.take_along_axis(score, order, axis=1)
            negative = np.take_along_axis(negative, order, axis=1)
            shortlist[some] = negative
            found_E = _scores(query, label, positive) >= np.repeat(
                score[:, -1], np.diff(positive.indptr)
            )
            mined = score[negative >= 0]
            sums += mined.sum(dtype=np.float64), len(mined), len(found_E), found_E.sum()
            bar.update(len(some))
    shortlist[rows_n] = ranks.gather_array(shortlist[rows])
    total, num_negatives_found, num_positives, num_found = (
        ranks.gather_array(sums[None]).sum(0).tolist()
    )
    report = {
        "queries": len(query_nD),
        "negative_score": total / max(num_negatives_found, 1),
        "positives_found": num_found / max(num_positives, 1),
        "seconds": time.perf_counter() - begin_time,
    }
    if mining != "exact":
        step = max(1, len(query_nD) // _COMPARED)
        rows = rows_n[::step]
        excluded = _pattern(relevance[rows]) + _pattern(filter_pairs[rows])
        _, expected = exact(query_nD[::step], k=num_negatives, exclude=excluded)
        same = (shortlist[rows][:, :, None] == expected[:, None]) & (expected >= 0)[:, None]
        report["recall"] = float(same.sum() / max((expected >= 0).sum(), 1))
    return shortlist, report


def faiss_search(label: torch.Tensor) -> Search:
    """An approximate search by faiss on the CPU: of about 4 sqrt(L) inverted lists, the nearest to
    a query are searched.
    """
    faiss = faiss_module()
    label_LD = np.ascontiguousarray(label.cpu().numpy())
    num_labels, width = label_LD.shape
    num_lists = max(1, min(4 * math.isqrt(num_labels), num_labels // _ROWS_A_LIST))
    index: Any = faiss.index_factory(width, f"IVF{num_lists},Flat", faiss.METRIC_INNER_PRODUCT)
    index.cp.max_points_per_centroid, index.cp.niter = _TRAINING_LABELS, _ITERATIONS
    with progress(total=num_labels, desc="faiss index of the labels", unit="label") as bar:
        index.train(label_LD)
        index.add(label_LD)
        bar.update(num_labels)
    index.nprobe = max(1, min(num_lists // _LISTS_A_PROBE, _MAX_PROBES))

    def search(query: np.ndarray, k: int, exclude: sp.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
        first = np.arange(len(query))[:, None] * num_labels
        excluded_B = np.diff(exclude.indptr)
        keys = np.repeat(first[:, 0], excluded_B) + exclude.indices
        # search enough labels that k are left after the exclusion
        score, nearest = index.search(
            np.ascontiguousarray(query), k + int(excluded_B.max(initial=0))
        )
        removed = (nearest < 0) | np.isin(first + nearest, keys)
        score[removed], nearest[removed] = -np.inf, -1
        order = np.argsort(-score, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(score, order, axis=1), np.take_along_axis(nearest, order, axis=1)

    return search


def _scores(query_nD: np.ndarray, label_LD: torch.Tensor, pairs: sp.csr_matrix) -> np.ndarray:
    """Inner products of the pairs, csr [n, L], of queries and labels, float32 [E]."""
    row_E = torch.from_numpy(np.repeat(np.arange(len(query_nD)), np.diff(pairs.indptr))).to(
        label_LD.device
    )
    label_E = torch.from_numpy(pairs.indices.astype(np.int64)).to(label_LD.device)
    query = torch.from_numpy(np.require(query_nD, requirements=["C", "W"])).to(label_LD)
    pieces = zip(row_E.split(_PAIRS), label_E.split(_PAIRS), strict=True)
    return (
        torch.cat([torch.linalg.vecdot(query[row], label_LD[label]) for row, label in pieces])
        .float()
        .cpu()
        .numpy()
    )


def _pattern(matrix: sp.csr_matrix) -> sp.csr_matrix:
    """The matrix with value 1 for each stored entry, also for stored zeros."""
    return sp.csr_matrix(
        (np.ones(len(matrix.indices), np.int8), matrix.indices, matrix.indptr), matrix.shape
    )
