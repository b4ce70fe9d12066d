"""Training: refresh (cluster, mine), then epochs of steps on pools of labels (UniDEC, Algorithm 1).

Legend: B queries in a batch, N queries, L labels, W width of the encoder, D width of a head.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from unidec.data.dataset import XMCDataset
from unidec.data.storage import read_json_lines, write_bytes_atomic
from unidec.data.tokens import TokenCache
from unidec.errors import ArtifactError, TrainingError
from unidec.interrupt import stop_signals
from unidec.model.encoder import InputBuilder
from unidec.model.frozen import cached_inputs
from unidec.model.label_tree import num_clusters
from unidec.model.row_table import Placement
from unidec.model.sources import resolve_encoder
from unidec.model.unidec import UniDEC
from unidec.params import TrainingSettings
from unidec.progress import progress
from unidec.training.batches import Batches, Prepared
from unidec.training.checkpoint import Checkpoint, CheckpointWriter, RowPart, load_checkpoint
from unidec.training.distributed import ALONE, Ranks
from unidec.training.fit import Figures, RoundReport
from unidec.training.gradient_cache import encode_texts
from unidec.training.identity import check_same, run_identity
from unidec.training.objective import Objective
from unidec.training.optim import Optimisers
from unidec.training.precision import autocast_type, choose_device, random_state, restore_random_state
from unidec.training.refresh import Clusters, Refresh, make_clusters, make_refresh, shortlist_labels
from unidec.training.sampler import queries_a_batch
from unidec.training.start import Start, cluster_labels, start_bag, take_model, take_rows
from unidec.training.stopping import Stopping

LOG_EVERY = 10  # steps between two lines of history.jsonl; only then the host waits for a GPU


@dataclass(frozen=True)
class TrainingData:
    """Input of a training: a data set, its token caches, and if needed the label graph, csr [L, L]: soft targets of
    label texts for `pool.gandalf`, relations between labels for `model.clf_graph`."""

    dataset: XMCDataset
    query_tokens: TokenCache
    label_tokens: TokenCache
    label_graph: sp.csr_matrix | None = None


@dataclass(frozen=True)
class _Step:
    """A step that the host has not checked for finite values yet: rows of some of its queries, its losses (0-d), and
    whether a loss or gradient of this or an earlier unchecked step was not finite (0-d, 1 or 0)."""

    epoch: int
    step: int
    some_rows: np.ndarray
    losses: dict[str, Tensor]
    failed: Tensor


class Trainer:
    """A training run in a folder. If the folder has checkpoints, it resumes from the newest one, also inside a round.

    Args:
        cache_dir: folder of the caches of frozen transformers' outputs, shared by runs.
        accept: keys of the run's identity (`unidec.training.identity`) that may differ from the checkpoint's.
        start: an earlier model to start from; None: a new model.

    Attributes:
        epoch: finished epochs; epoch_step: finished steps of the next epoch; step: finished steps of the run.
        batch_size: queries of the largest batch.
        made: the refresh of the current round: its clusters and hard negatives.
        seconds: wall time of all steps; work_seconds: time of all rounds by `clock`, which is processor time, on a GPU
            wall time.
        notes: a JSON object that checkpoints store for the caller (the tracker's run id).

    Raises:
        ConfigError: data, parameters, tokenizer, code or start differ from those of the newest checkpoint, with the
            keys that differ; or the start has another encoder.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        data: TrainingData,
        run_dir: Path,
        cache_dir: Path,
        *,
        accept: Collection[str] = (),
        ranks: Ranks = ALONE,
        start: Start | None = None,
    ):
        self.settings, self.data, self.dataset = settings, data, data.dataset
        self.run_dir, self.ranks, self.start = run_dir, ranks, start
        self.tokens = {"queries": data.query_tokens, "labels": data.label_tokens}
        self.device = choose_device(settings.device)
        self.amp = autocast_type(settings.optim.precision, self.device)
        torch.manual_seed(settings.seed)
        num_labels = self.dataset.num_labels
        begin, end = ranks.part(num_labels)
        scratch = run_dir / "table" / f"rank-{ranks.rank}"
        self.model = UniDEC.create(
            settings.encoder, settings.model, num_labels, resolve_encoder(settings.encoder.name),
            data.query_tokens.vocab_size, dict(settings.everything),
            placement=Placement(settings.run.table_place, scratch, begin, end - begin, self.device),
        ).to(self.device)  # fmt: skip
        self.model.encoder.recompute = settings.run.recompute
        if settings.run.compile:
            self.model.encoder.compile_transformer()
        num_kept = settings.pool.shortlist
        self.objective = Objective(settings.loss, settings.seed, self.model, ranks, self._autocast, num_kept)
        uncached = InputBuilder(self.model.encoder, self.device)
        self.batches = Batches(settings, self.dataset, self.tokens, uncached, self.device, ranks, data.label_graph)
        if start is not None:  # changes weights on which the caches of frozen results depend
            take_model(self.model, start)
        else:
            start_bag(self.model, self.batches.parts(self.rows))
        if not ranks.is_first:  # until the first rank has computed the caches
            ranks.barrier()
        self.build = cached_inputs(self.model.encoder, self.tokens, cache_dir, self.device, self.amp)
        if ranks.is_first:
            ranks.barrier()
        self.batches.build = self.build
        self.model.label_input = self._encode_labels if settings.model.clf_residual else None
        self.model.related_LN = self.batches.related_LN
        if settings.model.clf_queries:
            self.model.related_input = lambda places: self._encode("queries", self.dataset.rows("train")[places])
        self.batch_size = queries_a_batch(settings.pool, len(self.rows))
        self.steps_per_epoch = math.ceil(len(self.rows) / self.batch_size)
        if settings.pool.batches == "clustered":
            self.steps_per_epoch = num_clusters(len(self.rows), self.batch_size)
        self.optimisers = Optimisers(self.model, settings.optim, self.steps_per_epoch, seed=settings.seed)
        self.writer = CheckpointWriter(run_dir, ranks)
        self.epoch = self.epoch_step = self.step = 0
        self.made = Refresh()
        self._clusters: Clusters | None = None  # of the next round, until its hard negatives are mined
        # on a GPU the host checks for finite values only when it logs or writes a checkpoint; until then `_failed`
        # stops all updates from the first step on that is not finite
        self.checks_each_step = self.device.type == "cpu"
        self._failed = torch.zeros((), device=self.device)
        self._unchecked: list[_Step] = []
        self.seconds = self.work_seconds = 0.0
        self.clock = time.process_time if self.device.type == "cpu" else time.perf_counter
        optim = settings.optim
        self.stopping = Stopping(optim.epochs, settings.pool.refresh, optim.patience, optim.budget_minutes)
        self.notes: dict[str, Any] = {}
        self._saved_step, self._saved_at = 0, time.monotonic()
        self._restore(accept)
        encoder = self.model.encoder
        self.parallel: torch.nn.Module | None = None  # with several ranks: the wrapped encoder if a transformer trains
        if not ranks.alone and encoder.transformer is not None and not encoder.takes_vectors:
            self.parallel = ranks.data_parallel(encoder, self.build(self.batches.parts(self.rows[:0])))
        summed_in_backward = set() if self.parallel is None else set(self.parallel.parameters())
        # parameters whose gradients have to be summed over the ranks after the backward pass
        self._summed_after = [p for p in self.optimisers.dense if p not in summed_in_backward]

    @property
    def rows(self) -> np.ndarray:
        """int64 [n]: training rows."""
        return self.batches.rows

    def _encode_labels(self, rows: np.ndarray) -> Tensor:
        return self._encode("labels", rows)

    def _encode(self, name: str, rows: np.ndarray) -> Tensor:
        with self._autocast():
            output_NW = self.model.encode(name, self.tokens[name], rows, self.build)
        return torch.from_numpy(output_NW).to(self.device)

    def _restore(self, accept: Collection[str]) -> None:
        data, sha256 = self.data, self.start.sha256 if self.start is not None else None
        self.identity = run_identity(
            self.settings.everything, data.dataset, data.query_tokens, data.label_tokens, sha256, data.label_graph
        )
        tables = self.model.tables().items()
        row_ranges = {name: (table.first_row, table.first_row + table.own_rows) for name, table in tables}

        def check(state: dict[str, Any]) -> None:
            check_same(state["identity"], self.identity, accept, str(self.run_dir))

        checkpoint, rejected = load_checkpoint(self.run_dir, row_ranges, check)
        for reason in rejected if self.ranks.is_first else ():
            print(f"checkpoint skipped: {reason}")
        if checkpoint is None:
            if self.start is not None:
                uids = self.dataset.labels["uid"]
                take_rows(self.model, self.start, uids, self._encode_labels, self.settings.keep)
            else:
                self.model.start_table(self._encode_labels)
            if self.model.label_cluster is not None:
                vectors_LD = self._vectors("labels", np.arange(self.dataset.num_labels))
                size = self.settings.model.labels_a_cluster
                cluster_labels(self.model, vectors_LD, size, self.settings.seed, self.ranks)
        else:
            self._load(checkpoint)
        if self.settings.model.surrogate and self.model.table is not None and self.model.label_cluster is not None:
            self.batches.label_by_cluster(self.model.label_cluster.cpu().numpy(), self.model.table.num_rows)
        if self.model.tree is not None and self.model.label_cluster is not None:
            self.batches.add_levels(self.model.label_cluster.cpu().numpy(), self.model.tree.counts)
        if self.ranks.is_first:
            # the last step has number `step` - 1, since steps are numbered from 0
            for name, key, last in (("history", "step", self.step - 1), ("rounds", "epoch", self.epoch)):
                _drop_later_lines(self.run_dir / f"{name}.jsonl", key, last)

    def _load(self, checkpoint: Checkpoint) -> None:
        weights = {key.removeprefix("model."): x for key, x in checkpoint.dense.items() if key.startswith("model.")}
        try:
            self.model.load_dense_state(weights)
            self.optimisers.load_row_states({name: part.tensors for name, part in checkpoint.rows.items()})
        except (KeyError, RuntimeError) as error:
            what = "the checkpoint does not fit the model"
            raise ArtifactError(what, where=str(self.run_dir), got=str(error)) from error
        self.optimisers.load_dense_state(checkpoint.dense)
        state = checkpoint.state
        self.epoch, self.epoch_step, self.step = (int(state[key]) for key in ("epoch", "epoch_step", "step"))
        restore_random_state(checkpoint.dense, self.device)
        self.seconds, self.notes = float(state["seconds"]), dict(state["notes"])
        self.work_seconds = float(state.get("work_seconds", 0.0))
        self._saved_step = self.step

    def save(self) -> None:
        """Write a checkpoint, durable when this returns. Raises ArtifactError: it cannot be written."""
        tables = self.model.tables()
        rows = {
            name: RowPart(tables[name].first_row, tables[name].num_rows, tensors)
            for name, tensors in self.optimisers.row_states().items()
        }
        dense = {f"model.{name}": tensor for name, tensor in self.model.dense_state().items()}
        dense |= self.optimisers.dense_state() | random_state(self.device)
        state = {
            "epoch": self.epoch, "epoch_step": self.epoch_step, "step": self.step, "seconds": self.seconds,
            "refresh": self.made.sha256 if self._inside_round else None, "identity": self.identity,
            "notes": self.notes, "work_seconds": self.work_seconds,
        }  # fmt: skip
        self.writer.save(Checkpoint(state, dense, rows))
        self._saved_step, self._saved_at = self.step, time.monotonic()

    def _save_is_due(self) -> bool:
        run = self.settings.run
        seconds = time.monotonic() - self._saved_at
        return 0 < run.checkpoint_steps <= self.step - self._saved_step or 0 < 60 * run.checkpoint_minutes <= seconds

    @property
    def _inside_round(self) -> bool:
        return self.epoch_step > 0 or (self.epoch % self.settings.pool.refresh > 0 and not self.finished)

    @property
    def _round_begin(self) -> int:
        """Finished epochs at the begin of the current round, or of the next one."""
        return self.epoch - self.epoch % self.settings.pool.refresh

    @property
    def finished(self) -> bool:
        """Whether the last round is complete."""
        return self.epoch >= self.stopping.read(self.run_dir, self.epoch)[1]

    @property
    def refresh_due(self) -> bool:
        """Whether a round begins here whose clusters and hard negatives have not been computed yet."""
        folder = self._refresh_folder(self.epoch)
        return not (self.finished or self._inside_round or Refresh.exists(folder, self.epoch))

    def _refresh_folder(self, epoch: int) -> Path:
        return self.run_dir / "refresh" / f"epoch-{epoch:05d}"

    def cluster(self) -> Figures:
        """Cluster the training queries for the next round with the current model, and return figures of the clusters.

        Queries and labels are compared in the dual encoder's space, of a classifier alone in the classifier's."""
        begin = self.clock()
        self._clusters = make_clusters(
            self.settings, self.rows, self._query_vectors, self.device, self.ranks, self.epoch
        )  # fmt: skip
        self._clusters[2]["work_seconds"] = self.clock() - begin
        return self._clusters[2]

    def refresh(self) -> Figures:
        """Mine hard negatives for the next round, and write them and the clusters to the run's folder; returns figures
        of both. Runs `cluster` if it has not been called."""
        if self._clusters is None:
            self.cluster()
        clusters, self._clusters, begin = self._clusters, None, self.clock()
        assert clusters is not None
        refresh, report = make_refresh(
            self.settings, self.rows, self.batches.sampler, clusters, self._label_vectors, self.device, self.ranks,
            self._shortlist if self.settings.pool.shortlist else None,
        )  # fmt: skip
        if self.ranks.is_first:
            refresh.save(self._refresh_folder(self.epoch), self.epoch)
            needed = {self._refresh_folder(epoch) for epoch in (self.epoch, self.epoch - self.settings.pool.refresh)}
            for old in set((self.run_dir / "refresh").glob("epoch-*")) - needed:
                shutil.rmtree(old, ignore_errors=True)  # no remaining checkpoint is inside its round
        self.ranks.barrier()  # the other ranks read it
        return report | {"work_seconds": report["work_seconds"] + self.clock() - begin}

    def _shortlist(self) -> tuple[np.ndarray, Figures]:
        """The label tree's shortlist for each training row, and figures: `shortlist_labels`."""
        assert self.model.tree is not None and self.model.label_cluster is not None

        def encode(rows: np.ndarray) -> Tensor:
            return torch.cat([self._encode(name, some) for name, _, some in self.batches.parts(rows)])

        cluster_L, relevance = self.model.label_cluster.cpu().numpy(), self.batches.sampler.relevance
        num_kept = self.settings.pool.shortlist
        with self._autocast():
            return shortlist_labels(self.model.tree, cluster_L, encode, self.rows, relevance, num_kept)

    def _query_vectors(self) -> np.ndarray:
        """Vectors float32 [n, D] of all training rows; each rank encodes a part of them."""
        begin, end = self.ranks.part(len(self.rows))
        parts = self.batches.parts(self.rows[begin:end])
        return self.ranks.gather_array(np.concatenate([self._vectors(name, rows) for name, _, rows in parts]))

    def _vectors(self, name: str, rows: np.ndarray) -> np.ndarray:
        only: Literal["de", "clf"] = "clf" if self.model.heads == "clf" else "de"
        with self._autocast():
            vectors = self.model.vectors(name, self.tokens[name], rows, self.build, desc=f"encode {name}", only=only)
        return vectors[only == "clf"]  # type: ignore[return-value]

    def _label_vectors(self) -> np.ndarray:
        """Vectors of this rank's part of the labels; of a classifier alone its rows."""
        table = self.model.classifier_table()[0] if self.model.heads == "clf" else None
        return self._vectors("labels", np.arange(*self.ranks.part(self.dataset.num_labels))) if table is None else table

    def train_round(self, on_log: Callable[[int, dict[str, float]], None] | None = None) -> RoundReport:
        """Train until the next refresh is due or the training ends, with checkpoints as configured and at the end.
        SIGINT and SIGTERM take effect after the current step and a checkpoint.

        Args:
            on_log: called on the first rank at logging steps, with the step and its figures.
        """
        pool, begin, first_step, first = self.settings.pool, time.perf_counter(), self.step, self.ranks.is_first
        work_begin = self.clock() - self.work_seconds
        last_begin, last_end = (epoch * self.steps_per_epoch for epoch in self.stopping.read(self.run_dir, self.epoch))
        self.optimisers.last_round = (last_begin, last_end)
        self.made = Refresh.load(self._refresh_folder(self._round_begin), self._round_begin)
        until = min(self.settings.optim.epochs, self._round_begin + pool.refresh)
        total = (until - self.epoch) * self.steps_per_epoch - self.epoch_step
        self.model.train()
        self.ranks.barrier()  # start together, since steps have a short timeout
        with (
            stop_signals() as stop,
            progress(total=total, desc=f"epochs {self.epoch + 1} to {until}", unit="step") as bar,
            open(self.run_dir / "history.jsonl" if first else os.devnull, "a", encoding="utf-8") as history,
        ):
            for logs in self._steps(until):
                bar.update(1)
                if logs is not None:
                    history.write(json.dumps(logs) + "\n")
                    bar.note(f"loss {logs['loss']:.3f}")
                    if on_log is not None and first:
                        on_log(self.step - 1, logs)
                stopping, due = self.ranks.any(stop.asked is not None, self._save_is_due())
                if stopping or due or self.epoch == until:
                    self._check_finite()
                    self.work_seconds = self.clock() - work_begin
                    history.flush()
                    if first:
                        os.fsync(history.fileno())  # a resumed run needs the lines before its checkpoint
                    self.save()
                if stopping:
                    stop.asked = stop.asked or signal.SIGTERM  # ranks that got no signal stop, too
                    break
        seconds, steps = time.perf_counter() - begin, self.step - first_step
        return RoundReport(
            self.epoch, steps, seconds, steps / seconds, self.writer.seconds, self.finished, self.step,
            work_seconds=self.work_seconds,
        )  # fmt: skip

    def _steps(self, until: int) -> Iterator[dict[str, float] | None]:
        """Run the remaining steps up to epoch `until`; yields after each step, with figures to log or None."""
        while self.epoch < until:
            # depends on the seed and the epoch only: a resumed run gets the same batches and skips finished ones
            batches = self.made.batches(self.rows, self.batch_size, self.settings.seed, self.epoch)
            for prepared in self.batches.ahead(batches, self.epoch, self.epoch_step, self.made.negatives):
                logs = self.train_step(prepared)
                self.step += 1
                self.epoch_step += 1
                if self.epoch_step == len(batches):
                    self.epoch, self.epoch_step = self.epoch + 1, 0
                yield logs

    def prepare(self, rows_B: np.ndarray, step: int) -> Prepared:
        """The batch of training rows at a step of the current epoch."""
        return self.batches.prepare(rows_B, self.epoch, step, self.made.negatives)

    def train_step(self, batch: Prepared) -> dict[str, float] | None:
        """One step of Algorithm 1: encode queries and pool once, compute both heads' losses, backward, update.

        Returns:
            every `LOG_EVERY` steps figures to log, else None.

        Raises:
            TrainingError: a loss or gradient is not finite (weights are not updated; on a GPU the error is raised at
                the next logging step or checkpoint), or the GPU is out of memory.
        """
        begin = time.perf_counter()
        if not self.ranks.is_first:  # ranks must draw different dropout masks
            stream = np.random.SeedSequence([self.settings.seed % 2**63, self.ranks.rank, self.step])
            torch.manual_seed(int(stream.generate_state(1, np.uint64)[0]))
        try:
            x_BW, backward = encode_texts(self.model.encoder, batch.texts, self._autocast, self.parallel)
            losses = self.objective.losses(x_BW, batch, self.step)
            loss = torch.stack(list(losses.values())).sum()
            with self.ranks.exchanging():
                backward(loss)
        except torch.OutOfMemoryError as error:
            raise self._no_memory(batch) from error
        norm = self._complete_gradients()
        self._failed = torch.maximum(self._failed, (~torch.isfinite(norm + loss.detach())).float())
        losses = {name: value.detach() for name, value in losses.items()}
        self._unchecked.append(_Step(self.epoch, self.step, batch.pool.rows_B[:5], losses, self._failed))
        if self.checks_each_step:
            self._check_finite()
        self.optimisers.step(self.step, norm, None if self.checks_each_step else self._failed)
        self.seconds += time.perf_counter() - begin
        if self.step % LOG_EVERY:
            return None
        self._check_finite()
        return self._figures(batch, losses, norm)

    def _check_finite(self) -> None:
        """Raise TrainingError for the first step since the last check whose loss or gradient was not finite."""
        steps, self._unchecked = self._unchecked, []
        if steps and bool(self._failed):
            self._failed = torch.zeros_like(self._failed)
            raise self._not_finite(next(step for step in steps if bool(step.failed)))

    def _complete_gradients(self) -> Tensor:
        """Add up gradients over the ranks, and return the norm of all gradients, 0-d."""
        optimisers, ranks = self.optimisers, self.ranks
        tables = {name: row.table for name, row in optimisers.row.items()}
        ranks.sum_gradients(self._summed_after, complete=[self.model.log_scale])
        ranks.sum_rows([table for name, table in tables.items() if name.startswith("encoder.")])
        sharded = [t.used[1].grad for name, t in tables.items() if not name.startswith("encoder.") and t.used]
        return ranks.norm(optimisers.gradients(), [grad for grad in sharded if grad is not None])

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self.amp or torch.bfloat16, enabled=self.amp is not None)

    def _figures(self, batch: Prepared, losses: dict[str, Tensor], norm: Tensor) -> dict[str, float]:
        optimisers, optim = self.optimisers, self.settings.optim
        factor = optimisers.factor(self.step)
        num_queries, pool_size = len(batch.pool.rows_B), len(batch.pool.pool_S)
        seconds = max(self.seconds, 1e-9) / (self.step + 1)
        return {
            "step": self.step, "epoch": self.step / self.steps_per_epoch, "seconds": round(self.seconds, 3),
            "loss": sum(float(v.detach()) for v in losses.values()),
            **{k: float(v.detach()) for k, v in losses.items()},
            "lr_encoder": optim.lr_encoder * factor, "lr_heads": optim.lr_heads * factor,
            "lr_clf": optim.lr_clf * factor, "grad_norm": float(norm), "pool_size": pool_size,
            "positives_per_query": len(batch.pool.positive_row_P) / num_queries,
            "texts_per_s": batch.num_texts / seconds, "tokens_per_s": batch.num_tokens / seconds,
        }  # fmt: skip

    def _not_finite(self, step: _Step) -> TrainingError:
        self.optimisers.zero_grad()
        uids = self.dataset.query_uids(step.some_rows)
        return TrainingError(
            "a loss or gradient is not finite; the weights are as they were before this step",
            where=f"epoch {step.epoch}, step {step.step}, queries {', '.join(uids)}, ...",
            got=", ".join(f"{name} {float(value.detach()):g}" for name, value in step.losses.items()),
            fix="a lower learning rate, a higher model.temperature, or optim.clip_norm above 0",
        )

    def _no_memory(self, batch: Prepared) -> TrainingError:
        self.optimisers.zero_grad()
        return TrainingError(
            "the GPU's memory is full",
            where=f"epoch {self.epoch}, step {self.step}",
            got=f"{len(batch.pool.rows_B)} queries, {len(batch.pool.pool_S)} pool labels, "
            f"up to {self.settings.everything['tokens']['max_length']} tokens",
            fix=f"pool.batch_size: {max(1, self.settings.pool.batch_size // 2)}, a smaller pool.size or max_length, "
            "run.recompute or optim.encode_chunk; the run resumes from its last checkpoint",
        )


def _drop_later_lines(path: Path, key: str, last: int) -> None:
    """Remove the lines that a resumed run will write again: those whose `key` is above `last`."""
    if path.is_file():
        lines = [json.dumps(line) for line in read_json_lines(path) if line[key] <= last]
        write_bytes_atomic(path, "".join(f"{line}\n" for line in lines).encode())
