"""The refresh every T epochs: clusters of queries (the batches of the next round) and mined hard
negatives.

Legend: N queries of the data set, n training queries, L labels, H mined negatives of a query, D
width of a head, W width of the encoder, C clusters.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from unidec.config import Pool, TrainingSettings
from unidec.data.storage import MANIFEST, file_sha256, load_array, read_manifest, write_folder
from unidec.errors import ArtifactError, TrainingError
from unidec.model.additions import Classifier, Rows
from unidec.model.pool import num_clusters
from unidec.model.unidec import UniDEC
from unidec.training.batches import Batches
from unidec.training.clustering import balanced_clusters
from unidec.training.encoding import Encoding
from unidec.training.fit import Figures
from unidec.training.mining import mine_hard_negatives
from unidec.training.sampler import clustered_batches, draws_pools, queries_a_batch, random_batches

KIND = "refresh"
VERSION = 1
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
        if self.order is None or self.offsets is None:
            return random_batches(rows, batch_size, seed, epoch)
        num_batches = num_clusters(len(rows), batch_size)
        return clustered_batches(self.order, self.offsets, seed, epoch, num_batches)

    def save(self, path: Path, epoch: int) -> None:
        """Write it to a folder, as the refresh of the round that starts after `epoch` epochs."""
        with write_folder(path, KIND, VERSION, {"epoch": epoch}) as out:
            for name in _NDIM:
                array = getattr(self, name)
                if array is not None:
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
                where=path,
                expected=f"the refresh after epoch {epoch}",
                fix="run the refresh first",
            )
        arrays = {}
        for name, ndim in _NDIM.items():
            file = path / f"{name}.npy"
            if file.is_file():
                arrays[name] = load_array(file, ndim=ndim)
        return cls(**arrays, sha256=file_sha256(path / MANIFEST))


def cluster_size(pool: Pool, epoch: int, num_rows: int) -> int:
    """Largest number of queries in a cluster of the round that starts after `epoch` epochs.

    It is the size of a batch, and 1 (random batches) before `pool.start_epoch`. In NGAME's
    curriculum it starts at `pool.cluster_start` and doubles at the epochs of
    `pool.cluster_doublings` (if empty at each refresh), up to the size of a batch.

    Args:
        num_rows: number of training queries.
    """
    batch = queries_a_batch(pool, num_rows)
    if epoch < pool.start_epoch:
        return 1
    if pool.cluster_start == 0:
        return batch
    doublings = epoch // pool.refresh
    if pool.cluster_doublings:
        doublings = sum(begin <= epoch for begin in pool.cluster_doublings)
    # no more doublings than a batch has bits: the number of epochs is not limited
    return min(pool.cluster_start << min(doublings, batch.bit_length()), batch)


@dataclass(frozen=True, kw_only=True)
class Clustered:
    """A refresh without negatives; vectors [n, D] of the training queries, None if nothing needs
    them; and figures.
    """

    refresh: Refresh
    query_nD: np.ndarray | None
    figures: Figures


class Refresher:
    """Makes the refreshes of a run with its current model, and keeps them in the run's folder. All
    ranks call its methods together.
    """

    def __init__(
        self, settings: TrainingSettings, encoding: Encoding, batches: Batches, run_dir: Path
    ):
        self.settings = settings
        self.encoding = encoding
        self.batches = batches
        self.ranks = batches.ranks
        self.root = run_dir / "refresh"
        # folder of large vectors; on a GPU, or with several ranks, they are in memory
        is_on_cpu = encoding.device.type == "cpu"
        self.files = run_dir if is_on_cpu and self.ranks.alone else None
        # of the next round, until its hard negatives are mined
        self._clustered: Clustered | None = None

    def mines(self, epoch: int) -> bool:
        """Whether steps sample hard negatives in the round that begins after `epoch` epochs."""
        pool = self.settings.pool
        return pool.eta > 0 and epoch >= pool.start_epoch and draws_pools(self.settings.model, pool)

    def folder(self, epoch: int) -> Path:
        """Folder of the refresh of the round that begins after `epoch` epochs."""
        return self.root / f"epoch-{epoch:05d}"

    def exists(self, epoch: int) -> bool:
        """Whether there is a refresh of the round that begins after `epoch` epochs."""
        return Refresh.exists(self.folder(epoch), epoch)

    def load(self, epoch: int) -> Refresh:
        """The refresh of the round that begins after `epoch` epochs."""
        return Refresh.load(self.folder(epoch), epoch)

    def cluster(self, epoch: int) -> Figures:
        """Cluster the training queries for the round that begins after `epoch` epochs; returns
        figures of the clusters.
        """
        begin = time.perf_counter()
        work_begin = self.encoding.clock()
        pool = self.settings.pool
        rows = self.batches.rows
        size = cluster_size(pool, epoch, len(rows))
        is_clustered = pool.batches == "clustered"
        clusters_vectors = is_clustered and size > 1
        mines_vectors = self.mines(epoch) and not pool.shortlist
        figures: Figures = {}
        query_nD = None
        if clusters_vectors or mines_vectors:
            query_nD = self.query_vectors()
            figures["encode_queries_seconds"] = time.perf_counter() - begin
        refresh = Refresh()
        if is_clustered and size == 1:  # each query is a cluster
            refresh = Refresh(rows, np.arange(len(rows) + 1))
        elif is_clustered and query_nD is not None:
            encoded = time.perf_counter()
            device = self.encoding.device
            made = balanced_clusters(query_nD, size, self.settings.seed, device, self.ranks)
            refresh = Refresh(rows[made.order_N], made.offsets)
            figures["cluster_seconds"] = time.perf_counter() - encoded
            figures["clusters"] = len(made.offsets) - 1
            figures["cluster_size"] = size
            figures["cluster_cosine"] = made.objective
        figures["refresh_seconds"] = time.perf_counter() - begin
        figures["work_seconds"] = self.encoding.clock() - work_begin
        self._clustered = Clustered(refresh=refresh, query_nD=query_nD, figures=figures)
        return figures

    def mine(self, epoch: int) -> Figures:
        """Mine hard negatives if a loss runs over pools, and write them and the clusters to the
        run's folder; returns figures of both. Clusters the queries if that is not done yet.
        """
        if self._clustered is None:
            self.cluster(epoch)
        clustered = self._clustered
        assert clustered is not None
        self._clustered = None
        begin = time.perf_counter()
        work_begin = self.encoding.clock()
        refresh = clustered.refresh
        figures = dict(clustered.figures)
        if self.mines(epoch):
            if self.batches.methods.shortlister is not None:
                negatives, mined = self._shortlist()
            else:
                assert clustered.query_nD is not None
                label_LD = self.label_vectors()
                figures["encode_labels_seconds"] = time.perf_counter() - begin
                negatives, mined = self._nearest(clustered.query_nD, label_LD)
            refresh = replace(refresh, negatives=negatives)
            for key, value in mined.items():
                figures[f"mine_{key}"] = value
        if self.ranks.is_first:
            self._write(refresh, epoch)
        self.ranks.barrier()  # the other ranks read it
        figures["refresh_seconds"] += time.perf_counter() - begin
        figures["work_seconds"] += self.encoding.clock() - work_begin
        return figures

    def query_vectors(self) -> np.ndarray:
        """Vectors [n, D] of all training rows; each rank encodes a part of them."""
        own_rows = self.ranks.own(self.batches.rows)
        vectors = self.encoding.vectors_of(self.batches.texts.parts(own_rows), self.files)
        return self.ranks.gather_array(vectors)

    def label_vectors(self) -> np.ndarray:
        """Vectors of this rank's part of the labels, in the space of the queries' vectors: from the
        dual encoder or, if the model lacks it, the classifier's rows.
        """
        model = self.encoding.model
        if model.heads == "clf":
            rows_LD, _ = exported_classifier(model, self.batches.methods.rows)
            assert rows_LD is not None
            return rows_LD
        own_labels = self.ranks.own(np.arange(model.num_labels))
        return self.encoding.vectors_of(self.batches.texts.of_labels(own_labels), self.files)

    def _nearest(self, query_nD: np.ndarray, label_LD: np.ndarray) -> tuple[np.ndarray, Figures]:
        """The nearest labels of each training row, and figures."""
        pool = self.settings.pool
        sampler = self.batches.sampler
        with self.encoding.autocast():  # products have the type in which steps compute
            return mine_hard_negatives(
                query_nD,
                self.batches.rows,
                label_LD,
                (sampler.relevance, sampler.filter_pairs),
                pool.eta * pool.refresh,
                device=self.encoding.device,
                ranks=self.ranks,
                mining=pool.mining,
            )

    def _shortlist(self) -> tuple[np.ndarray, Figures]:
        """A method's shortlist for each training row, and figures."""
        shortlister = self.batches.methods.shortlister
        assert shortlister is not None
        relevance = self.batches.sampler.relevance
        with self.encoding.autocast():
            return shortlister.shortlist(self._row_outputs, self.batches.rows, relevance)

    def _row_outputs(self, rows: np.ndarray) -> Tensor:
        """The encoder's outputs of training rows, [n, W]."""
        return self.encoding.outputs_of(self.batches.texts.parts(rows))

    def _write(self, refresh: Refresh, epoch: int) -> None:
        folder = self.folder(epoch)
        refresh.save(folder, epoch)
        previous = self.folder(epoch - self.settings.pool.refresh)
        for other in self.root.glob("epoch-*"):
            if other not in (folder, previous):  # no remaining checkpoint is inside its round
                shutil.rmtree(other, ignore_errors=True)


def exported_classifier(model: UniDEC, rows: Rows, into: np.ndarray | None = None) -> Classifier:
    """(rows float32 [L, D], biases float32 [L]) of the labels, as exported; None for what the model
    lacks. With several ranks, of the labels held here. The table's rows fill `into` if it is given.
    """
    rows_LD, bias_L = rows.exported()
    table_LD, table_bias_L = model.classifier_table(into)
    if rows_LD is None:
        rows_LD = table_LD
    if bias_L is None:
        bias_L = table_bias_L
    return rows_LD, bias_L
