"""Training: refresh (cluster, mine), then epochs of steps on pools of labels (UniDEC, Algorithm 1).

Legend: B queries in a batch, n training rows, L labels, W width of the encoder, D width of a head.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unidec.config import TrainingSettings
from unidec.data.storage import Folder
from unidec.errors import TrainingError
from unidec.interrupt import stop_signals
from unidec.model.additions import Classifier
from unidec.model.batch import Prepared
from unidec.model.unidec import UniDEC
from unidec.progress import progress
from unidec.training.checkpoint import Checkpoint, CheckpointWriter, RowPart
from unidec.training.distributed import ALONE, Ranks
from unidec.training.encoding import label_arrays
from unidec.training.finite import FiniteChecks, UncheckedStep
from unidec.training.fit import Figures, RoundReport
from unidec.training.gradient_cache import encode_texts
from unidec.training.initial_weights import Start
from unidec.training.opening import Place, TrainingData, open_training
from unidec.training.optim import Optimisers
from unidec.training.precision import deterministic, random_state
from unidec.training.round_refresh import Refresh, Refresher, exported_classifier
from unidec.training.sampler import queries_a_batch, steps_an_epoch
from unidec.training.stopping import Stopping

LOG_EVERY = 10  # steps between two lines of history.jsonl; only then the host waits for a GPU


@dataclass
class Progress:
    """Progress of a training.

    Attributes:
        epoch: finished epochs; epoch_step: finished steps of the next epoch; step: finished steps
            of the run.
        seconds: wall time of all steps; work_seconds: time of all rounds by `Encoding.clock`.
    """

    epoch: int = 0
    epoch_step: int = 0
    step: int = 0
    seconds: float = 0.0
    work_seconds: float = 0.0

    @classmethod
    def of(cls, state: dict[str, Any]) -> Progress:
        """The progress in a checkpoint's state; of {}: nothing is done."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: state[name] for name in names & state.keys()})


@contextlib.contextmanager
def _lost_card() -> Iterator[None]:
    """Context that turns errors of a GPU into a `TrainingError`; they may appear long after their
    cause.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        raise TrainingError(
            "the GPU failed",
            where="a training step",
            got=str(error).partition("\n")[0],
            fix="start the training again: it resumes from its last checkpoint; or see the "
            "driver's log (dmesg)",
        ) from error


@dataclass(frozen=True)
class Saved:
    """The last checkpoint: finished steps, and when it was written (`time.monotonic`)."""

    step: int
    at: float


class Trainer:
    """A training run in a folder. If the folder has checkpoints, it resumes from the newest one,
    even inside a round.

    Args:
        cache_dir: folder of the caches of frozen transformers' outputs, shared by runs.
        accept: keys of the run's identity (`unidec.training.identity`) that may differ from the
            checkpoint's.
        start: an earlier model to start from; None: a new model.

    Attributes:
        at: progress of the training.
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
        self.refresher = Refresher(settings, parts.encoding, parts.batches, run_dir)
        self.made = Refresh()
        self._saved = Saved(step=self.at.step, at=time.monotonic())

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
        """The device on which steps compute."""
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

    def classifier(self, into: np.ndarray | None = None) -> Classifier:
        """(rows float32 [L, D], biases float32 [L]) of the labels, as exported; None for what the
        model lacks. With several ranks, of the labels held here. The table's rows fill `into`.
        """
        return exported_classifier(self.model, self.batches.methods.rows, into)

    def label_vectors(self) -> dict[str, np.ndarray]:
        """Vectors of all labels by name: `label_arrays`."""
        encoding = self.encoding
        labels = encoding.tokens["labels"]
        with encoding.autocast():
            return label_arrays(self.model, labels, encoding.build, self.run_dir, self.classifier)

    def export(self, folder: Folder, extra: dict[str, Any] | None = None) -> None:
        """Write the model into a folder: `UniDEC.save_into`."""
        self.model.save_into(folder, extra, self.batches.methods.export())

    def save(self) -> None:
        """Write a checkpoint, durable when this returns. Raises ArtifactError: it cannot be
        written.
        """
        rows = {}
        for name, table in self.model.tables().items():
            rows[name] = RowPart(table.first_row, table.num_rows, table.rows())
        dense = self.optimisers.dense_state() | random_state(self.device)
        for name, tensor in self.model.dense_state().items():
            dense[f"model.{name}"] = tensor
        state = asdict(self.at)
        state["refresh"] = self.made.sha256 if self._inside_round else None
        state["identity"] = self.identity
        self.writer.save(Checkpoint(state, dense, rows))
        self._saved = Saved(step=self.at.step, at=time.monotonic())

    def _save_is_due(self) -> bool:
        run = self.settings.run
        steps = self.at.step - self._saved.step
        minutes = (time.monotonic() - self._saved.at) / 60
        return 0 < run.checkpoint_steps <= steps or 0 < run.checkpoint_minutes <= minutes

    @property
    def _inside_round(self) -> bool:
        if self.at.epoch_step > 0:
            return True
        return self.at.epoch > self.round_begin and not self.finished

    @property
    def round_begin(self) -> int:
        """Finished epochs at the beginning of the current round, or of the next one."""
        return self.at.epoch - self.at.epoch % self.settings.pool.refresh

    @property
    def finished(self) -> bool:
        """Whether the last round is complete."""
        _, end = self.stopping.read(self.run_dir, self.at.epoch)
        return self.at.epoch >= end

    @property
    def refresh_due(self) -> bool:
        """Whether a round begins here whose clusters and hard negatives are not computed yet."""
        begins = not self.finished and not self._inside_round
        return begins and not self.refresher.exists(self.at.epoch)

    def cluster(self) -> Figures:
        """Cluster the training queries for the next round; returns figures of the clusters."""
        return self.refresher.cluster(self.at.epoch)

    def mine(self) -> Figures:
        """Mine hard negatives for the next round, and write them and the clusters to the run's
        folder; returns figures of both. Runs `cluster` if it has not been called.
        """
        return self.refresher.mine(self.at.epoch)

    def train_round(
        self, on_log: Callable[[int, dict[str, float]], None] | None = None
    ) -> RoundReport:
        """Train until the next refresh is due or the training ends, with checkpoints as configured
        and at the end. SIGINT and SIGTERM take effect after the current step and a checkpoint.

        Args:
            on_log: called on the first rank at logging steps, with the step and its figures.

        Raises:
            TrainingError: as `train_step`, or the GPU failed.
        """
        begin = time.perf_counter()
        first_step = self.at.step
        work_begin = self.encoding.clock() - self.at.work_seconds
        self._set_last_round()
        self.made = self.refresher.load(self.round_begin)
        round_end = self.round_begin + self.settings.pool.refresh
        until = min(self.settings.optim.epochs, round_end)
        epochs = until - self.at.epoch
        total = epochs * self.steps_per_epoch - self.at.epoch_step
        title = f"epochs {self.at.epoch + 1} to {until}"
        on_cpu = self.device.type == "cpu"  # where it costs nothing
        # only the first rank keeps the figures
        records = self.run_dir / "history.jsonl" if self.ranks.is_first else os.devnull
        self.model.train()
        self.ranks.barrier()  # start together, since steps have a short timeout
        with (
            _lost_card(),
            deterministic(on_cpu or self.settings.run.deterministic),
            stop_signals() as stop,
            progress(total=total, desc=title, unit="step") as bar,
            open(records, "a", encoding="utf-8") as history,
        ):
            for logs in self.steps(until):
                bar.update(1)
                if logs is not None:
                    history.write(json.dumps(logs) + "\n")
                    bar.note(f"loss {logs['loss']:.3f}")
                    if on_log is not None and self.ranks.is_first:
                        on_log(self.at.step - 1, logs)
                # all ranks stop and save together
                asked = stop.asked is not None
                stopping, due = self.ranks.any(asked, self._save_is_due())
                if stopping or due or self.at.epoch == until:
                    self.check_finite()
                    self.at.work_seconds = self.encoding.clock() - work_begin
                    history.flush()
                    if self.ranks.is_first:
                        os.fsync(history.fileno())  # a resumed run needs these lines
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

    def _set_last_round(self) -> None:
        """Tell the schedule which round is the last one, as far as that is decided."""
        begin, end = self.stopping.read(self.run_dir, self.at.epoch)
        steps = self.steps_per_epoch
        self.optimisers.last_round = (begin * steps, end * steps)

    def steps(self, until: int) -> Iterator[dict[str, float] | None]:
        """Run the remaining steps up to epoch `until`; yields after each step, with figures to log
        or None.
        """
        seed = self.settings.seed
        while self.at.epoch < until:
            epoch = self.at.epoch
            # depends on the seed and the epoch only: a resumed run gets the same batches and skips
            # finished ones
            batches = self.made.batches(self.rows, self.batch_size, seed, epoch)
            first = self.at.epoch_step
            for prepared in self.batches.ahead(batches, epoch, first, self.made.negatives):
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
        step = self.at.step
        begin = time.perf_counter()
        self._seed_dropout()
        encoder = self.model.encoder
        try:
            x_BW, backward = encode_texts(
                encoder, batch.texts, self.encoding.autocast, self.gradients.parallel
            )
            losses = self.objective.losses(x_BW, batch, step)
            loss = torch.stack(list(losses.values())).sum()
            with self.ranks.exchanging():
                backward(loss)
        except torch.OutOfMemoryError as error:
            raise self._no_memory(batch) from error
        norm = self.gradients.complete()
        losses = {name: value.detach() for name, value in losses.items()}
        self.checks.note(
            UncheckedStep(
                epoch=self.at.epoch,
                step=step,
                some_rows=batch.pool.rows_B[:5],
                losses=losses,
            ),
            norm + loss.detach(),
        )
        if self.checks.each_step:
            self.check_finite()
        # on a GPU the device itself leaves the weights as they are after a failure
        self.optimisers.step(step, norm, self.checks.stops_update)
        self.at.seconds += time.perf_counter() - begin
        if step % LOG_EVERY:
            return None
        self.check_finite()
        return self.figures(batch, losses, norm)

    def _seed_dropout(self) -> None:
        """Ranks must draw different dropout masks; the first keeps the run's generator."""
        if not self.ranks.is_first:
            seed = self.settings.seed % 2**63
            stream = np.random.SeedSequence([seed, self.ranks.rank, self.at.step])
            (drawn,) = stream.generate_state(1, np.uint64)
            torch.manual_seed(int(drawn))

    def check_finite(self) -> None:
        """Raise TrainingError for the first step since the last check whose loss or gradient was
        not finite.
        """
        failure = self.checks.first_failure()
        if failure is not None:
            raise self._not_finite(failure)

    def figures(self, batch: Prepared, losses: dict[str, Tensor], norm: Tensor) -> dict[str, float]:
        """Figures of a step for its line in history.jsonl."""
        step = self.at.step
        optim = self.settings.optim
        pool = batch.pool
        factor = self.optimisers.factor(step)
        values = {name: float(value) for name, value in losses.items()}
        seconds = max(self.at.seconds, 1e-9) / (step + 1)
        return {
            "step": step,
            "epoch": step / self.steps_per_epoch,
            "seconds": round(self.at.seconds, 3),
            "loss": sum(values.values()),
            **values,
            "lr_encoder": optim.lr_encoder * factor,
            "lr_heads": optim.lr_heads * factor,
            "lr_clf": optim.lr_clf * factor,
            "grad_norm": float(norm),
            "pool_size": len(pool.pool_S),
            "positives_per_query": len(pool.positive_row_P) / len(pool.rows_B),
            "texts_per_s": batch.counts.texts / seconds,
            "tokens_per_s": batch.counts.tokens / seconds,
        }

    def _not_finite(self, step: UncheckedStep) -> TrainingError:
        self.optimisers.zero_grad()
        uids = ", ".join(self.dataset.query_uids(step.some_rows))
        losses = []
        for name, value in step.losses.items():
            losses.append(f"{name} {float(value):g}")
        return TrainingError(
            "a loss or gradient is not finite; the weights are as they were before this step",
            where=f"epoch {step.epoch}, step {step.step}, queries {uids}, ...",
            got=", ".join(losses),
            fix="a lower learning rate, a higher model.temperature, or optim.clip_norm above 0",
        )

    def _no_memory(self, batch: Prepared) -> TrainingError:
        self.optimisers.zero_grad()
        num_queries = len(batch.pool.rows_B)
        num_labels = len(batch.pool.pool_S)
        max_length = self.settings.everything["tokens"]["max_length"]
        half = max(1, self.settings.pool.batch_size // 2)
        return TrainingError(
            "the GPU's memory is full",
            where=f"epoch {self.at.epoch}, step {self.at.step}",
            got=f"{num_queries} queries, {num_labels} pool labels, up to {max_length} tokens",
            fix=f"pool.batch_size: {half}, a smaller pool.size or max_length, run.recompute or "
            "optim.encode_chunk; the run resumes from its last checkpoint",
        )
