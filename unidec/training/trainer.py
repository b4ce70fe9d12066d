"""Training: refresh (cluster, mine), then epochs of steps on pools of labels (UniDEC, Algorithm 1).

Legend: B queries in a batch, N queries, L labels, W width of the encoder, D width of a head.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unidec.config import TrainingSettings
from unidec.data.storage import Folder
from unidec.errors import TrainingError
from unidec.interrupt import stop_signals
from unidec.model.batch import Prepared
from unidec.model.unidec import UniDEC
from unidec.progress import progress
from unidec.training.checkpoint import Checkpoint, CheckpointWriter, RowPart
from unidec.training.distributed import ALONE, Ranks
from unidec.training.finite import FiniteChecks, UncheckedStep
from unidec.training.fit import Figures, RoundReport
from unidec.training.gradient_cache import encode_texts
from unidec.training.opening import Place, TrainingData, open_training
from unidec.training.optim import Optimisers
from unidec.training.precision import random_state
from unidec.training.refresh import Clusters, Refresh, make_clusters, make_refresh
from unidec.training.sampler import queries_a_batch, steps_an_epoch
from unidec.training.start import Start
from unidec.training.stopping import Stopping

LOG_EVERY = 10  # steps between two lines of history.jsonl; only then the host waits for a GPU


@dataclass
class Progress:
    """How far a training is.

    Attributes:
        epoch: finished epochs; epoch_step: finished steps of the next epoch; step: finished steps
        of the run.
        seconds: wall time of all steps; work_seconds: time of all rounds by `Trainer.clock`.
        notes: a JSON object that checkpoints store for the caller (the tracker's run id).
    """

    epoch: int = 0
    epoch_step: int = 0
    step: int = 0
    seconds: float = 0.0
    work_seconds: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, state: dict[str, Any]) -> Progress:
        """That of a checkpoint's state; of {}: nothing is done."""
        names = [each.name for each in fields(cls)]
        return cls(**{name: value for name, value in state.items() if name in names})


@dataclass(frozen=True)
class Saved:
    """The last checkpoint: finished steps, and when it was written (`time.monotonic`)."""

    step: int
    at: float


class Trainer:
    """A training run in a folder. If the folder has checkpoints, it resumes from the newest one,
    also inside a round.

    Args:
        cache_dir: folder of the caches of frozen transformers' outputs, shared by runs.
        accept: keys of the run's identity (`unidec.training.identity`) that may differ from the
        checkpoint's.
        start: an earlier model to start from; None: a new model.

    Attributes:
        at: how far it is.
        made: the refresh of the current round: its clusters and hard negatives.

    Raises:
        ConfigError: data, parameters, tokenizer, code or start differ from those of the newest
            checkpoint, with the keys that differ; or the start has another encoder.
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
        place = Place(run_dir=run_dir, cache_dir=cache_dir, ranks=ranks)
        parts = open_training(settings, data, place, accept, start)
        self.settings = settings
        self.dataset = data.dataset
        self.run_dir = run_dir
        self.ranks = ranks
        self.encoding = parts.encoding
        self.batches = parts.batches
        self.objective = parts.objective
        self.gradients = parts.gradients
        self.checks = FiniteChecks(parts.encoding.device)
        self.identity = parts.identity
        self.writer = CheckpointWriter(run_dir, ranks)
        self.at = Progress.of(parts.state)
        self.made = Refresh()
        # of the next round, until its hard negatives are mined
        self._clusters: Clusters | None = None
        self._saved = Saved(step=int(parts.state.get("step", 0)), at=time.monotonic())

    @property
    def model(self) -> UniDEC:
        """The model in training."""
        return self.encoding.model

    @property
    def optimisers(self) -> Optimisers:
        """The optimisers of the model."""
        return self.gradients.optimisers

    @property
    def device(self) -> torch.device:
        """Where steps compute."""
        return self.encoding.device

    @property
    def rows(self) -> np.ndarray:
        """int64 [n]: training rows."""
        return self.batches.rows

    @property
    def batch_size(self) -> int:
        """Queries of the largest batch."""
        return queries_a_batch(self.settings.pool, len(self.rows))

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return steps_an_epoch(self.settings.pool, len(self.rows))

    @property
    def stopping(self) -> Stopping:
        """Decides when the training ends."""
        optim = self.settings.optim
        pool = self.settings.pool
        return Stopping(optim.epochs, pool.refresh, optim.patience, optim.budget_minutes)

    def clock(self) -> float:
        """Processor time, on a GPU wall time, in seconds."""
        return time.process_time() if self.device.type == "cpu" else time.perf_counter()

    def classifier(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(rows float32 [L, D], biases float32 [L]) of the labels, as exported; None for what the
        model does not have. With several ranks those held here.
        """
        rows_LD, bias_L = self.batches.methods.rows.exported()
        table_LD, table_bias_L = self.model.classifier_table()
        return table_LD if rows_LD is None else rows_LD, table_bias_L if bias_L is None else bias_L

    def label_vectors(self) -> dict[str, np.ndarray]:
        """Vectors of all labels by name, as a bundle has them: "de" and "clf" float32 [L, D],
        "bias" float32 [L]; those that the model has.
        """
        with self.encoding.autocast():
            label_de = self.model.encode_labels(self.encoding.tokens["labels"], self.encoding.build)
            rows_LD, bias_L = self.classifier()
        vectors = {"de": label_de, "clf": rows_LD, "bias": bias_L}
        return {name: array for name, array in vectors.items() if array is not None}

    def export(self, folder: Folder, extra: dict[str, Any] | None = None) -> None:
        """Write the model into a folder: `UniDEC.save_into`."""
        self.model.save_into(folder, extra, self.batches.methods.export())

    def save(self) -> None:
        """Write a checkpoint, durable when this returns. Raises ArtifactError: it cannot be
        written.
        """
        tables = self.model.tables()
        rows = {
            name: RowPart(tables[name].first_row, tables[name].num_rows, tensors)
            for name, tensors in self.optimisers.row_states().items()
        }
        dense = {f"model.{name}": tensor for name, tensor in self.model.dense_state().items()}
        dense |= self.optimisers.dense_state() | random_state(self.device)
        refresh = self.made.sha256 if self._inside_round else None
        state = asdict(self.at) | {"refresh": refresh, "identity": self.identity}
        self.writer.save(Checkpoint(state, dense, rows))
        self._saved = Saved(step=self.at.step, at=time.monotonic())

    def _save_is_due(self) -> bool:
        run = self.settings.run
        steps = self.at.step - self._saved.step
        seconds = time.monotonic() - self._saved.at
        return 0 < run.checkpoint_steps <= steps or 0 < 60 * run.checkpoint_minutes <= seconds

    @property
    def _inside_round(self) -> bool:
        return self.at.epoch_step > 0 or (
            self.at.epoch % self.settings.pool.refresh > 0 and not self.finished
        )

    @property
    def _round_begin(self) -> int:
        """Finished epochs at the begin of the current round, or of the next one."""
        return self.at.epoch - self.at.epoch % self.settings.pool.refresh

    @property
    def finished(self) -> bool:
        """Whether the last round is complete."""
        return self.at.epoch >= self.stopping.read(self.run_dir, self.at.epoch)[1]

    @property
    def refresh_due(self) -> bool:
        """Whether a round begins here whose clusters and hard negatives have not been
        computed yet.
        """
        folder = self.refresh_folder(self.at.epoch)
        return not (self.finished or self._inside_round or Refresh.exists(folder, self.at.epoch))

    def refresh_folder(self, epoch: int) -> Path:
        """Folder of the clusters and hard negatives of the round that begins after
        `epoch` epochs.
        """
        return self.run_dir / "refresh" / f"epoch-{epoch:05d}"

    def cluster(self) -> Figures:
        """Cluster the training queries for the next round with the current model, and return
        figures of the clusters.

        Queries and labels are compared in the dual encoder's space, of a classifier alone in the
        classifier's.
        """
        begin = self.clock()
        clusters = make_clusters(
            self.settings,
            self.rows,
            self._query_vectors,
            self.device,
            ranks=self.ranks,
            epoch=self.at.epoch,
        )
        figures = clusters[2]
        figures["work_seconds"] = self.clock() - begin
        self._clusters = clusters
        return figures

    def refresh(self) -> Figures:
        """Mine hard negatives for the next round, and write them and the clusters to the run's
        folder; returns figures of both. Runs `cluster` if it has not been called.
        """
        if self._clusters is None:
            self.cluster()
        clusters = self._clusters
        self._clusters = None
        assert clusters is not None
        begin = self.clock()
        refresh, report = make_refresh(
            self.settings,
            self.rows,
            self.batches.sampler,
            clusters,
            self._label_vectors,
            device=self.device,
            ranks=self.ranks,
            shortlist=self._shortlist if self.batches.methods.shortlister is not None else None,
        )
        if self.ranks.is_first:
            self._write_refresh(refresh)
        self.ranks.barrier()  # the other ranks read it
        return report | {"work_seconds": report["work_seconds"] + self.clock() - begin}

    def _write_refresh(self, refresh: Refresh) -> None:
        epoch = self.at.epoch
        refresh.save(self.refresh_folder(epoch), epoch)
        needed = {
            self.refresh_folder(epoch),
            self.refresh_folder(epoch - self.settings.pool.refresh),
        }
        for old in set((self.run_dir / "refresh").glob("epoch-*")) - needed:
            shutil.rmtree(old, ignore_errors=True)  # no remaining checkpoint is inside its round

    def _shortlist(self) -> tuple[np.ndarray, Figures]:
        """A method's shortlist for each training row, and figures."""
        shortlister = self.batches.methods.shortlister
        assert shortlister is not None
        with self.encoding.autocast():
            return shortlister.shortlist(
                self._row_outputs, self.rows, self.batches.sampler.relevance
            )

    def _row_outputs(self, rows: np.ndarray) -> Tensor:
        """The encoder's outputs of training rows, [n, W]."""
        return self.encoding.outputs_of(self.batches.texts.parts(rows))

    def _query_vectors(self) -> np.ndarray:
        """Vectors float32 [n, D] of all training rows; each rank encodes a part of them."""
        begin, end = self.ranks.part(len(self.rows))
        parts = self.batches.texts.parts(self.rows[begin:end])
        return self.ranks.gather_array(self.encoding.vectors_of(parts))

    def _label_vectors(self) -> np.ndarray:
        """Vectors of this rank's part of the labels; of a classifier alone its rows."""
        rows_LD = self.classifier()[0] if self.model.heads == "clf" else None
        if rows_LD is not None:
            return rows_LD
        return self.encoding.vectors("labels", np.arange(*self.ranks.part(self.dataset.num_labels)))

    def train_round(
        self, on_log: Callable[[int, dict[str, float]], None] | None = None
    ) -> RoundReport:
        """Train until the next refresh is due or the training ends, with checkpoints as configured
        and at the end. SIGINT and SIGTERM take effect after the current step and a checkpoint.

        Args:
            on_log: called on the first rank at logging steps, with the step and its figures.
        """
        begin = time.perf_counter()
        first_step = self.at.step
        first = self.ranks.is_first
        work_begin = self.clock() - self.at.work_seconds
        last_begin, last_end = self.stopping.read(self.run_dir, self.at.epoch)
        self.optimisers.last_round = (
            last_begin * self.steps_per_epoch,
            last_end * self.steps_per_epoch,
        )
        self.made = Refresh.load(self.refresh_folder(self._round_begin), self._round_begin)
        until = min(self.settings.optim.epochs, self._round_begin + self.settings.pool.refresh)
        total = (until - self.at.epoch) * self.steps_per_epoch - self.at.epoch_step
        self.model.train()
        self.ranks.barrier()  # start together, since steps have a short timeout
        with (
            stop_signals() as stop,
            progress(
                total=total, desc=f"epochs {self.at.epoch + 1} to {until}", unit="step"
            ) as bar,
            open(
                self.run_dir / "history.jsonl" if first else os.devnull, "a", encoding="utf-8"
            ) as history,
        ):
            for logs in self.steps(until):
                bar.update(1)
                if logs is not None:
                    history.write(json.dumps(logs) + "\n")
                    bar.note(f"loss {logs['loss']:.3f}")
                    if on_log is not None and first:
                        on_log(self.at.step - 1, logs)
                stopping, due = self.ranks.any(stop.asked is not None, self._save_is_due())
                if stopping or due or self.at.epoch == until:
                    self.check_finite()
                    self.at.work_seconds = self.clock() - work_begin
                    history.flush()
                    if first:
                        # a resumed run needs the lines before its checkpoint
                        os.fsync(history.fileno())
                    self.save()
                if stopping:
                    stop.asked = stop.asked or signal.SIGTERM  # ranks that got no signal stop, too
                    break
        seconds = time.perf_counter() - begin
        steps = self.at.step - first_step
        return RoundReport(
            epoch=self.at.epoch,
            steps=steps,
            train_seconds=seconds,
            steps_per_s=steps / seconds,
            checkpoint_seconds=self.writer.seconds,
            finished=self.finished,
            step=self.at.step,
            work_seconds=self.at.work_seconds,
        )

    def steps(self, until: int) -> Iterator[dict[str, float] | None]:
        """Run the remaining steps up to epoch `until`; yields after each step, with figures to log
        or None.
        """
        while self.at.epoch < until:
            # depends on the seed and the epoch only: a resumed run gets the same batches and skips
            # finished ones
            batches = self.made.batches(
                self.rows, self.batch_size, self.settings.seed, self.at.epoch
            )
            for prepared in self.batches.ahead(
                batches, self.at.epoch, self.at.epoch_step, self.made.negatives
            ):
                logs = self.train_step(prepared)
                self.at.step += 1
                self.at.epoch_step += 1
                if self.at.epoch_step == len(batches):
                    self.at.epoch += 1
                    self.at.epoch_step = 0
                yield logs

    def prepare(self, rows_B: np.ndarray, step: int) -> Prepared:
        """The batch of training rows at a step of the current epoch."""
        return self.batches.prepare(rows_B, self.at.epoch, step, self.made.negatives)

    def train_step(self, batch: Prepared) -> dict[str, float] | None:
        """One step of Algorithm 1: encode queries and pool once, compute both heads' losses,
        backward, update.

        Returns:
            every `LOG_EVERY` steps figures to log, else None.

        Raises:
            TrainingError: a loss or gradient is not finite (weights are not updated; on a GPU the
                error is raised at the next logging step or checkpoint), or the GPU is out of
                memory.
        """
        begin = time.perf_counter()
        if not self.ranks.is_first:  # ranks must draw different dropout masks
            stream = np.random.SeedSequence(
                [self.settings.seed % 2**63, self.ranks.rank, self.at.step]
            )
            torch.manual_seed(int(stream.generate_state(1, np.uint64)[0]))
        try:
            x_BW, backward = encode_texts(
                self.model.encoder, batch.texts, self.encoding.autocast, self.gradients.parallel
            )
            losses = self.objective.losses(x_BW, batch, self.at.step)
            loss = torch.stack(list(losses.values())).sum()
            with self.ranks.exchanging():
                backward(loss)
        except torch.OutOfMemoryError as error:
            raise self._no_memory(batch) from error
        norm = self.gradients.complete()
        losses = {name: value.detach() for name, value in losses.items()}
        some_rows = batch.pool.rows_B[:5]
        self.checks.note(self.at.epoch, self.at.step, some_rows, losses, norm + loss.detach())
        if self.checks.each_step:
            self.check_finite()
        self.optimisers.step(self.at.step, norm, self.checks.stops_update)
        self.at.seconds += time.perf_counter() - begin
        if self.at.step % LOG_EVERY:
            return None
        self.check_finite()
        return self.figures(batch, losses, norm)

    def check_finite(self) -> None:
        """Raise TrainingError for the first step since the last check whose loss or gradient was
        not finite.
        """
        failure = self.checks.first_failure()
        if failure is not None:
            raise self._not_finite(failure)

    def figures(self, batch: Prepared, losses: dict[str, Tensor], norm: Tensor) -> dict[str, float]:
        """Figures of a step for its line in history.jsonl."""
        optim = self.settings.optim
        factor = self.optimisers.factor(self.at.step)
        values = {name: float(value) for name, value in losses.items()}
        seconds = max(self.at.seconds, 1e-9) / (self.at.step + 1)
        return {
            "step": self.at.step,
            "epoch": self.at.step / self.steps_per_epoch,
            "seconds": round(self.at.seconds, 3),
            "loss": sum(values.values()),
            **values,
            "lr_encoder": optim.lr_encoder * factor,
            "lr_heads": optim.lr_heads * factor,
            "lr_clf": optim.lr_clf * factor,
            "grad_norm": float(norm),
            "pool_size": len(batch.pool.pool_S),
            "positives_per_query": len(batch.pool.positive_row_P) / len(batch.pool.rows_B),
            "texts_per_s": batch.counts.texts / seconds,
            "tokens_per_s": batch.counts.tokens / seconds,
        }

    def _not_finite(self, step: UncheckedStep) -> TrainingError:
        self.optimisers.zero_grad()
        uids = self.dataset.query_uids(step.some_rows)
        return TrainingError(
            "a loss or gradient is not finite; the weights are as they were before this step",
            where=f"epoch {step.epoch}, step {step.step}, queries {', '.join(uids)}, ...",
            got=", ".join(
                f"{name} {float(value.detach()):g}" for name, value in step.losses.items()
            ),
            fix="a lower learning rate, a higher model.temperature, or optim.clip_norm above 0",
        )

    def _no_memory(self, batch: Prepared) -> TrainingError:
        self.optimisers.zero_grad()
        return TrainingError(
            "the GPU's memory is full",
            where=f"epoch {self.at.epoch}, step {self.at.step}",
            got=f"{len(batch.pool.rows_B)} queries, {len(batch.pool.pool_S)} pool labels, "
            f"up to {self.settings.everything['tokens']['max_length']} tokens",
            fix=f"pool.batch_size: {max(1, self.settings.pool.batch_size // 2)}, a smaller "
            "pool.size or max_length, run.recompute or optim.encode_chunk; the run resumes from "
            "its last checkpoint",
        )
