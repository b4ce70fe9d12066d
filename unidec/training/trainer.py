"""Training: refresh (cluster, mine), then epochs of steps on pools of labels (UniDEC, Algorithm 1).

Legend: B queries in a batch, S labels its classifier sees, N queries, L labels, W width of the encoder, D width of a
head.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.storage import write_bytes_atomic
from unidec.data.tokens import TokenCache
from unidec.errors import ArtifactError, DataError, TrainingError
from unidec.model.encoder import EncoderInput
from unidec.model.frozen import cached_inputs
from unidec.model.losses import PoolTargets, symmetric_loss
from unidec.model.sources import resolve_encoder
from unidec.model.unidec import UniDEC
from unidec.progress import progress
from unidec.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from unidec.training.optim import Optimisers
from unidec.training.precision import autocast_type, choose_device
from unidec.training.refresh import Refresh, make_refresh
from unidec.training.sampler import PoolBatch, PoolSampler

LOG_EVERY = 10  # steps between two lines of history: the only steps at which the host waits for the device


@dataclass(frozen=True)
class Prepared:
    """A batch on the device: the pool, its pairs, the classifier's pairs and labels (None: all), the texts."""

    pool: PoolBatch
    targets: PoolTargets
    clf_targets: PoolTargets
    clf_labels: Tensor | None
    texts: EncoderInput
    num_tokens: int


class Trainer:
    """One training run in one folder; open it again and it goes on from its newest checkpoint.

    Args:
        params: all parameters.
        dataset: queries, labels and relevance.
        query_tokens, label_tokens: token caches in the data set's order.
        run_dir: the run's folder.
        cache_dir: where a frozen transformer's outputs are kept between runs.

    Attributes:
        epoch: finished epochs; step: finished steps; finished: all epochs are done.
    """

    def __init__(
        self,
        params: Params,
        dataset: XMCDataset,
        query_tokens: TokenCache,
        label_tokens: TokenCache,
        run_dir: Path,
        cache_dir: Path,
    ):
        self.params, self.dataset, self.run_dir = params, dataset, run_dir
        self.tokens = {"queries": query_tokens, "labels": label_tokens}
        self.device = choose_device(params.device)
        self.amp = autocast_type(params.optim.precision, self.device)
        self.rows = dataset.rows("train")
        if not np.diff(dataset.relevance.indptr)[self.rows].any():
            raise DataError(
                "nothing to train on: no training query has a positive", where=str(dataset.path),
                got=f"{len(self.rows)} training queries", fix="look at the raw files' pairs and splits",
            )  # fmt: skip
        torch.manual_seed(params.seed)
        folder = resolve_encoder(params.encoder.name)
        self.model = UniDEC.create(
            params.encoder, params.model, dataset.num_labels, folder, query_tokens.vocab_size, params.model_dump()
        ).to(self.device)
        self.build = cached_inputs(self.model.encoder, self.tokens, cache_dir, self.device, self.amp)
        pool = params.pool
        self.sampler = PoolSampler(
            dataset.relevance, dataset.filter_pairs, beta=pool.beta, eta=pool.eta, size=pool.size, seed=params.seed
        )
        self.all_labels: PoolSampler | None = None
        if pool.clf_labels == "all" and params.model.heads != "de":
            self.all_labels = PoolSampler(
                dataset.relevance, dataset.filter_pairs, beta=pool.beta, eta=0, size=0, seed=params.seed, full=True
            )
        self.steps_per_epoch = self._num_batches()
        self.optimisers = Optimisers(self.model, params.optim, self.steps_per_epoch)
        self.epoch = self.step = 0
        self.made = Refresh()
        self.seconds = 0.0
        self._restore()

    # -- start and resume ---------------------------------------------------------------------------------------------

    def _num_batches(self) -> int:
        """Batches an epoch: clusters are 2^depth, the smallest depth that fits (as `balanced_clusters` cuts)."""
        batches = math.ceil(len(self.rows) / self.params.pool.batch_size)
        return 2 ** math.ceil(math.log2(batches)) if self.params.pool.batches == "clustered" else batches

    def _start_weights(self) -> None:
        """What a new model takes from the data: the bag's document frequencies, the classifier's first rows."""
        bag = self.model.encoder.bag
        if bag is not None:
            flat, offsets = self.tokens["queries"].ragged(self.rows)
            vocab = bag.embedding.num_rows
            text = np.repeat(np.arange(len(self.rows)), np.diff(offsets))
            seen = np.unique(text * vocab + flat) % vocab
            frequency_V = np.bincount(seen, minlength=vocab)
            bag.start_weights(frequency_V, len(self.rows))
        if self.params.model.heads != "de":
            x_LW = None
            if self.params.model.clf_init == "label_embedding":
                x_LW = torch.from_numpy(self._encode("labels", None)).to(self.device)
            self.model.start_table(x_LW)

    def _restore(self) -> None:
        checkpoint, refused = load_checkpoint(self.run_dir)
        for reason in refused:
            print(f"checkpoint passed over: {reason}")
        if checkpoint is None:
            self._start_weights()
            return
        try:
            self.model.load_state_dict(checkpoint.model, strict=True)
        except RuntimeError as error:
            raise ArtifactError(
                "the checkpoint is of another model", where=str(self.run_dir), got=str(error)
            ) from error
        self.optimisers.load_state(checkpoint.optimisers)
        restore_random_state(checkpoint.optimisers, self.device)
        self.epoch, self.step = int(checkpoint.state["epoch"]), int(checkpoint.state["step"])
        self.seconds = float(checkpoint.state["seconds"])
        for name, key in (("history", "step"), ("rounds", "epoch")):
            # history counts steps from 0: the next one has this number
            limit = self.step - 1 if key == "step" else self.epoch
            _cut_lines(self.run_dir / f"{name}.jsonl", lambda line, k=key, m=limit: line[k] <= m)

    def save(self) -> Path:
        """Write a checkpoint."""
        state = {"epoch": self.epoch, "step": self.step, "seconds": self.seconds}
        optimisers = self.optimisers.state() | random_state(self.device)
        return save_checkpoint(self.run_dir, Checkpoint(state, self.model.state_dict(), optimisers))

    @property
    def finished(self) -> bool:
        """All epochs are done."""
        return self.epoch >= self.params.optim.epochs

    # -- refresh ------------------------------------------------------------------------------------------------------

    def refresh(self) -> dict[str, Any]:
        """Clusters and hard negatives for the coming round, by the model as it is; kept in the run's folder.

        Queries and labels are compared in the dual encoder's space; a classifier alone compares in its own.

        Returns:
            figures: seconds of each part, clusters, what mining found.
        """
        made, report = make_refresh(
            self.params, self.rows, self.sampler, lambda: self._vectors("queries", self.rows), self._label_vectors,
            self.device,
        )  # fmt: skip
        made.save(self.run_dir / "refresh", self.epoch)
        return report

    def _encode(self, name: str, rows: np.ndarray | None) -> np.ndarray:
        with self._autocast():
            return self.model.encode(name, self.tokens[name], rows, self.build, desc=f"encode {name}")

    def _vectors(self, name: str, rows: np.ndarray | None) -> np.ndarray:
        de, clf = self.model.project(self._encode(name, rows))
        return de if de is not None else clf  # type: ignore[return-value]

    def _label_vectors(self) -> np.ndarray:
        table = self.model.classifier_table()[0] if self.model.heads == "clf" else None
        return self._vectors("labels", None) if table is None else table

    # -- training -----------------------------------------------------------------------------------------------------

    def train_round(self) -> dict[str, Any]:
        """Train until the next refresh is due (or the end), save a checkpoint.

        Returns:
            figures of the round.
        """
        pool, begin = self.params.pool, time.perf_counter()
        self.made = Refresh.load(self.run_dir / "refresh", self.epoch)
        until = min(self.params.optim.epochs, (self.epoch // pool.refresh + 1) * pool.refresh)
        first_step = self.step
        total = (until - self.epoch) * self.steps_per_epoch
        self.model.train()
        with (
            progress(total=total, desc=f"epochs {self.epoch + 1} to {until}", unit="step") as bar,
            open(self.run_dir / "history.jsonl", "a", encoding="utf-8") as history,
        ):
            while self.epoch < until:
                batches = self.made.batches(self.rows, pool.batch_size, self.params.seed, self.epoch)
                for prepared in self._prepared(batches):
                    logs = self.train_step(prepared)
                    self.step += 1
                    bar.update(1)
                    if logs is not None:
                        history.write(json.dumps(logs) + "\n")
                        bar.note(f"loss {logs['loss']:.3f}")
                history.flush()
                self.epoch += 1
        seconds = time.perf_counter() - begin
        self.save()
        steps = self.step - first_step
        return {"epoch": self.epoch, "steps": steps, "train_seconds": seconds, "steps_per_s": steps / seconds,
                "finished": self.finished}  # fmt: skip

    def _prepared(self, batches: list[np.ndarray]) -> Iterator[Prepared]:
        """Batches made ready; on a GPU the next is made while the device works on this one."""
        # the step within the epoch names a batch's random numbers, so a resumed run draws the same ones
        if self.device.type == "cpu":
            yield from (self.prepare(rows, step) for step, rows in enumerate(batches))
            return
        with ThreadPoolExecutor(1) as ahead:
            coming = ahead.submit(self.prepare, batches[0], 0)
            for step in range(len(batches)):
                prepared = coming.result()
                if step + 1 < len(batches):
                    coming = ahead.submit(self.prepare, batches[step + 1], step + 1)
                yield prepared

    def prepare(self, rows_B: np.ndarray, step: int) -> Prepared:
        """Sample the pool of some queries and put it, and the texts to encode, on the device."""
        pool = self.sampler.batch(rows_B, epoch=self.epoch, step=step, shortlist_NH=self.made.negatives)
        targets = clf_targets = PoolTargets.from_batch(pool, self.device)
        clf_labels = None
        if self.all_labels is not None:
            full = self.all_labels.batch(rows_B, epoch=self.epoch, step=step, shortlist_NH=None)
            clf_targets = PoolTargets.from_batch(full, self.device)
        elif self.params.model.heads != "de":
            clf_labels = torch.from_numpy(pool.pool_S).to(self.device, non_blocking=True)
        parts = [("queries", self.tokens["queries"], pool.rows_B)]
        if self.params.model.heads != "clf":
            parts.append(("labels", self.tokens["labels"], pool.pool_S))
        num_tokens = sum(int(tokens.lengths(rows).sum()) for _, tokens, rows in parts)
        return Prepared(pool, targets, clf_targets, clf_labels, self.build(parts), num_tokens)

    def train_step(self, batch: Prepared) -> dict[str, float] | None:
        """One step of Algorithm 1: encode queries and pool once, both heads' losses, backward, update.

        Returns:
            figures to log every `LOG_EVERY` steps, else None.

        Raises:
            TrainingError: a loss or gradient that is not finite (the weights keep their values), or no memory left.
        """
        begin = time.perf_counter()
        try:
            with self._autocast():
                x_BW = self.model.encoder(batch.texts)
            losses = self._losses(x_BW, batch)
            loss = torch.stack(list(losses.values())).sum()
            loss.backward()
        except torch.OutOfMemoryError as error:
            raise self._no_memory(batch) from error
        norm = self.optimisers.gradient_norm()
        if not bool(torch.isfinite(norm + loss.detach())):
            raise self._not_finite(batch, losses)
        self.optimisers.step(self.step, norm)
        self.seconds += time.perf_counter() - begin
        return self._figures(batch, losses, norm) if self.step % LOG_EVERY == 0 else None

    def _losses(self, x_BW: Tensor, batch: Prepared) -> dict[str, Tensor]:
        """Weighted losses of the heads: balance * L_D, (1 - balance) * (L_C + clf_bce * BCE)."""
        settings, model = self.params.loss, self.model
        scale = model.log_scale.exp()
        num_queries = len(batch.pool.rows_B)
        both = model.heads == "both"
        losses = {}
        if model.heads != "clf":
            de_BD = model.de(x_BW)
            logit_BS = de_BD[:num_queries] @ de_BD[num_queries:].T
            losses["loss_de"] = (settings.balance if both else 1.0) * self._loss(
                settings.de, logit_BS, scale[0], batch.targets, settings.de_forward
            )
        if model.heads != "de":
            assert model.table is not None
            logit_BS = model.clf(x_BW[:num_queries]) @ model.table.gather(batch.clf_labels).T
            if model.bias is not None:
                logit_BS = logit_BS + model.bias.gather(batch.clf_labels).T
            weight = 1.0 - settings.balance if both else 1.0
            clf = self._loss(settings.clf, logit_BS, scale[1], batch.clf_targets, settings.clf_forward)
            if settings.clf_bce > 0:
                clf = clf + settings.clf_bce * self._loss("bce", logit_BS, scale[1], batch.clf_targets, 1.0)
            losses["loss_clf"] = weight * clf
        return losses

    def _loss(self, kind: str, similarity_BS: Tensor, scale: Tensor, targets: PoolTargets, forward: float) -> Tensor:
        settings = self.params.loss
        options: dict[str, Any] = {"reduction": settings.reduction, "forward": forward}
        if settings.reduction == "pol":  # which of the sampled positives; a stream of its own for each step
            options["generator"] = torch.Generator().manual_seed(hash((self.params.seed, self.step)) % 2**63)
        if kind == "triplet":  # its margin is in units of similarity
            return symmetric_loss(kind, similarity_BS, targets, margin=settings.margin, **options)
        if kind == "bce":
            options["normalise"] = settings.bce_normalise
        return symmetric_loss(kind, similarity_BS * scale, targets, **options)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self.amp or torch.bfloat16, enabled=self.amp is not None)

    # -- what is said -------------------------------------------------------------------------------------------------

    def _figures(self, batch: Prepared, losses: dict[str, Tensor], norm: Tensor) -> dict[str, float]:
        optimisers, optim = self.optimisers, self.params.optim
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
            "texts_per_s": batch.texts.num_texts / seconds, "tokens_per_s": batch.num_tokens / seconds,
        }  # fmt: skip

    def _not_finite(self, batch: Prepared, losses: dict[str, Tensor]) -> TrainingError:
        self.optimisers.zero_grad()
        uids = self.dataset.query_uids(batch.pool.rows_B[:5])
        return TrainingError(
            "a loss or gradient is not finite; the weights are as they were before this step",
            where=f"epoch {self.epoch}, step {self.step}, queries {', '.join(uids)}, ...",
            got=", ".join(f"{name} {float(value.detach()):g}" for name, value in losses.items()),
            fix="a lower learning rate, a higher model.temperature, or optim.clip_norm above 0",
        )

    def _no_memory(self, batch: Prepared) -> TrainingError:
        self.optimisers.zero_grad()
        return TrainingError(
            "the GPU's memory is full",
            where=f"epoch {self.epoch}, step {self.step}",
            got=f"{len(batch.pool.rows_B)} queries, {len(batch.pool.pool_S)} pool labels, "
            f"up to {self.params.tokens.max_length} tokens",
            fix=f"pool.batch_size: {max(1, self.params.pool.batch_size // 2)}, a smaller pool.size or max_length; "
            "the run goes on from its last checkpoint",
        )


def _cut_lines(path: Path, keep: Any) -> None:
    """Drop the lines that a resumed run will write again."""
    if path.is_file():
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        write_bytes_atomic(path, "".join(f"{line}\n" for line in lines if keep(json.loads(line))).encode())
