"""Time of an epoch, from a few real steps on random ids.

The steps are the trainer's own, on a small data set made for it in a temporary folder: real batch, pool and sequence
sizes, the real architecture (random weights where the real ones are not here), few rows of the classifier's table,
since a step touches the pool's rows only. A batch that would take too long is measured at a part of its size.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import scipy.sparse as sp
import torch

from unidec.config import Params
from unidec.data.dataset import write_dataset
from unidec.data.raw import RawData, text_table
from unidec.data.storage import write_folder
from unidec.data.tokens import KIND, VERSION, TokenCache
from unidec.errors import ArtifactError
from unidec.model import frozen
from unidec.training.memory.advice import with_settings
from unidec.training.memory.sizes import NAMED, Batch, EncoderShape, Sizes, batch_sizes, typical_lengths
from unidec.training.needs import head_labels

STEPS = 3
SECONDS = 20.0  # a full-sized measurement may take
_PARTS = (16, 4, 1)  # a batch is measured at these parts of its size, as long as the next will not take too long


@dataclass(frozen=True)
class Times:
    """Seconds of a step, of an epoch and of all epochs; `how` tells how the step was measured."""

    step: float
    epoch: float
    total: float
    how: str

    def lines(self) -> list[tuple[str, str]]:
        """For people."""
        return [
            ("step", f"{_seconds(self.step)} ({self.how})"),
            ("epoch", f"{_seconds(self.epoch)} (estimated from the step)"),
            ("all epochs", f"{_seconds(self.total)} (estimated; without refreshes, validation and checkpoints)"),
        ]


def _seconds(value: float) -> str:
    if value < 100:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 6000 else f"{value / 3600:,.3g} h"


def measure(params: Params, sizes: Sizes, shape: EncoderShape) -> Times:
    """Times of a training on this machine.

    Args:
        params: all parameters. sizes: of the data. shape: of the transformer.
    """
    with tempfile.TemporaryDirectory() as folder:
        part, batch = _PARTS[0], batch_sizes(params, sizes)
        runner = _Runner(params, sizes, shape, batch, Path(folder))
        step = runner.step_seconds(part, 1)
        for larger in _PARTS[1:]:
            if 2 * STEPS * step * part / larger > SECONDS:  # two rounds of them
                break
            part, step = larger, runner.step_seconds(larger, STEPS)
    step *= part
    sized = "measured" if part == 1 else f"estimated: measured at 1/{part} of the batch and pool"
    how = f"{sized}, {batch.queries:,} queries and {batch.labels:,} labels"
    epoch = batch.steps * step
    return Times(step, epoch, params.optim.epochs * epoch, how)


class _Runner:
    """Real trainers on made-up data."""

    def __init__(self, params: Params, sizes: Sizes, shape: EncoderShape, batch: Batch, folder: Path):
        self.params, self.sizes, self.shape, self.batch, self.folder = params, sizes, shape, batch, folder
        self.encoder = _encoder_folder(params.encoder.name, shape, folder / "encoder")

    def step_seconds(self, part: int, steps: int) -> float:
        """Of one step at a part of the batch's size."""
        from unidec.training.trainer import Trainer, TrainingData

        queries, labels = max(1, self.batch.queries // part), max(1, self.batch.labels // part)
        pool = self.params.pool
        values = {
            "encoder.name": str(self.encoder), "pool.batch_size": queries, "pool.batches": "random",
            "pool.size": max(labels, queries) if pool.size else 0, "pool.refresh": 1, "pool.gandalf": False,
            "pool.eta": pool.eta if self.batch.negatives else 0, "optim.epochs": 2, "optim.warmup_epochs": 1.0,
            "pool.cluster_start": 0, "encoder.start": "", "run.devices": 1, "run.checkpoint_minutes": 0.0,
            "run.checkpoint_steps": 0, "model.clf_init": "xavier",
        }  # fmt: skip
        if self.params.model.clf_residual:
            values["model.clf_init"] = "label_embedding"
        if self.params.encoder.frozen:  # its vectors are read, whatever made them
            values["encoder.residual"] = False
        params = with_settings(self.params, values)
        assert params is not None
        of_de, of_clf = head_labels(params)
        num_labels = min(self.sizes.num_labels, 4 * labels)
        if of_de == "all":  # whose texts take the time: a part of them
            num_labels = max(1, self.sizes.num_labels // part)
        elif of_clf == "all":
            num_labels = self.sizes.num_labels
        dataset, tokens = _data(
            self.folder / f"data-{part}", queries * steps, num_labels, self.sizes, params, self.shape
        )
        with _quiet(), _zero_caches():
            data = TrainingData(dataset, tokens[0], tokens[1])
            trainer = Trainer(params, data, self.folder / f"run-{part}", self.folder / "cache")
            vars(trainer)["save"] = lambda: None  # a step is timed, not a disk
            _round_seconds(trainer)  # the first steps allocate
            return _round_seconds(trainer) / steps


def _round_seconds(trainer: Any) -> float:
    trainer.refresh()
    begin = time.perf_counter()
    trainer.train_round()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _encoder_folder(name: str, shape: EncoderShape, folder: Path) -> Path | str:
    """The encoder's own folder where it is on this machine, else the architecture with random weights."""
    from unidec.model.sources import PACKAGED, resolve_encoder

    short = name.rpartition("/")[2]
    if Path(name).is_dir() or short in PACKAGED or short not in NAMED:
        with contextlib.suppress(ArtifactError):
            return resolve_encoder(name)
    from transformers import AutoConfig, AutoModel

    config = dict(NAMED.get(short) or _bert_like(shape))
    model = AutoModel.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    with _quiet():
        model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")  # asked for, but ids are random here
    return folder


def _bert_like(shape: EncoderShape) -> dict[str, Any]:
    return {"model_type": "bert", "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.attention_heads, "intermediate_size": shape.intermediate,
            "vocab_size": shape.vocab_size, "max_position_embeddings": shape.positions}  # fmt: skip


def _data(folder: Path, num_queries: int, num_labels: int, sizes: Sizes, params: Params, shape: EncoderShape) -> Any:
    """A data set of empty texts with random pairs, and token caches of random ids with the real lengths."""
    rng = np.random.default_rng(0)
    each = max(1, min(num_labels, round(sizes.num_pairs / sizes.num_queries), 4 * params.pool.beta))
    columns = rng.integers(0, num_labels, num_queries * each)
    relevance = sp.csr_matrix((np.ones(len(columns), np.float32), columns, np.arange(num_queries + 1) * each),
                              shape=(num_queries, num_labels))  # fmt: skip
    relevance.sum_duplicates()
    relevance.data[:] = 1.0
    nothing = sp.csr_matrix((num_queries, num_labels), dtype=bool)

    def texts(what: str, count: int) -> Any:
        return text_table([f"{what}{row}" for row in range(count)], [""] * count, [""] * count)

    raw = RawData("plan", {"train": texts("q", num_queries)}, texts("l", num_labels), {"train": relevance},
                  {"train": nothing})  # fmt: skip
    dataset = write_dataset(folder / "dataset", raw, validation_share=0.0)
    caches = []
    for name, histogram, count in (("queries", sizes.query_lengths, num_queries),
                                   ("labels", sizes.label_lengths, num_labels)):  # fmt: skip
        lengths = rng.permutation(np.maximum(typical_lengths(histogram, count, params.tokens.max_length), 1))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        wide = sizes.vocab_size >= 65536
        ids = rng.integers(0, min(sizes.vocab_size, shape.vocab_size), int(offsets[-1])).astype(
            "<u4" if wide else "<u2"
        )
        meta = {"vocab_size": sizes.vocab_size, "pad_id": 0, "max_length": params.tokens.max_length,
                "num_texts": count, "num_tokens": len(ids)}  # fmt: skip
        with write_folder(folder / name, KIND, VERSION, meta) as out:
            np.save(out.path / "ids.npy", ids)
            np.save(out.path / "offsets.npy", offsets)
        caches.append(TokenCache.open(folder / name, verify=False))
    return dataset, caches


@contextlib.contextmanager
def _zero_caches() -> Iterator[None]:
    """Caches of frozen outputs stay zeros: a step takes as long, and nobody waits for them to be filled."""
    with mock.patch.object(frozen.FrozenCaches, "_own_share", return_value=()):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield
