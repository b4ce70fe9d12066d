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
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import scipy.sparse as sp
import torch

from unidec.config import Params, with_settings
from unidec.data.dataset import write_dataset
from unidec.data.raw import RawData, text_table
from unidec.data.storage import write_folder
from unidec.data.tokens import KIND, VERSION, TokenCache
from unidec.errors import ArtifactError
from unidec.model import frozen
from unidec.model.sources import PACKAGED, resolve_encoder
from unidec.pipeline.memory import KNOWN, empty_encoder
from unidec.pipeline.step_sizes import Batch, Sizes, batch_sizes, typical_lengths
from unidec.training.needs import head_labels
from unidec.training.trainer import Trainer, TrainingData

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

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"step: {_seconds(self.step)} ({self.how})",
            f"epoch: {_seconds(self.epoch)} (estimated from the step)",
            f"all epochs: {_seconds(self.total)} (estimated; without refreshes, validation and checkpoints)",
        ]


def _seconds(value: float) -> str:
    if value < 100:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 6000 else f"{value / 3600:,.3g} h"


def measure(params: Params, sizes: Sizes, encoder_config: Path | None = None) -> Times:
    """Times of a training on this machine, with data of these sizes.

    Args:
        encoder_config: a config.json, if the encoder itself is not on this machine.
    """
    part, batch = _PARTS[0], batch_sizes(params, sizes)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        encoder = _encoder_folder(params.encoder.name, encoder_config, Path(folder, "encoder"))
        params = params.model_copy(update={"encoder": params.encoder.model_copy(update={"name": str(encoder)})})
        step = _step_seconds(params, sizes, batch, Path(folder), part, 1)
        for larger in _PARTS[1:]:
            if 2 * STEPS * step * part / larger > SECONDS:  # two rounds of them
                break
            part, step = larger, _step_seconds(params, sizes, batch, Path(folder), larger, STEPS)
    step *= part
    sized = "measured" if part == 1 else f"estimated: measured at 1/{part} of the batch and pool"
    how = f"{sized}, {batch.queries:,} queries and {batch.labels:,} labels"
    return Times(step, batch.steps * step, params.optim.epochs * batch.steps * step, how)


def _encoder_folder(name: str, config_file: Path | None, folder: Path) -> Path:
    """The encoder's own folder where it is on this machine, else the architecture with random weights."""
    short = name.rpartition("/")[2]
    if Path(name).is_dir() or short in PACKAGED or short not in KNOWN:
        with contextlib.suppress(ArtifactError):
            return resolve_encoder(name)
    from transformers import AutoModel

    AutoModel.from_config(empty_encoder(name, config_file).config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")  # asked for, but ids are random here
    return folder


def _step_seconds(params: Params, sizes: Sizes, batch: Batch, folder: Path, part: int, steps: int) -> float:
    """Of one step at a part of the batch's size."""
    queries, labels, pool = max(1, batch.queries // part), max(1, batch.labels // part), params.pool
    values = {
        "encoder.start": "", "run.devices": 1, "run.checkpoint_minutes": 0.0,
        "run.checkpoint_steps": 0, "pool.batch_size": queries, "pool.batches": "random", "pool.cluster_start": 0,
        "pool.size": max(labels, queries) if pool.size else 0, "pool.refresh": 1, "pool.gandalf": False,
        "pool.eta": pool.eta if batch.negatives else 0, "optim.epochs": 2, "optim.warmup_epochs": 1.0,
        "model.clf_init": "label_embedding" if params.model.clf_residual else "xavier",
    }  # fmt: skip
    if params.encoder.frozen:  # its vectors are read, whatever made them
        values["encoder.residual"] = False
    small = with_settings(params, values)
    assert small is not None
    of_de, of_clf = head_labels(small.model, small.pool)
    num_labels = sizes.num_labels if of_clf == "all" else min(sizes.num_labels, 4 * labels)
    if of_de == "all":  # whose texts take the time: a part of them
        num_labels = max(1, sizes.num_labels // part)
    data = random_data(folder / f"data-{part}", queries * steps, num_labels, sizes, small)
    # caches of frozen outputs stay zeros: a step takes as long, and there is no wait to fill them
    with patch.object(frozen.FrozenCaches, "_own_share", return_value=()):
        trainer = Trainer(small.training, data, folder / f"run-{part}", folder / "cache")
        with patch.object(trainer, "save", lambda: None):  # a step is timed, not a disk
            _round_seconds(trainer)  # the first steps allocate
            return _round_seconds(trainer) / steps


def _round_seconds(trainer: Trainer) -> float:
    trainer.refresh()
    begin = time.perf_counter()
    trainer.train_round()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def random_data(folder: Path, num_queries: int, num_labels: int, sizes: Sizes, params: Params) -> TrainingData:
    """A data set of empty texts with random pairs, and token caches of random ids with the lengths of `sizes`."""
    rng = np.random.default_rng(0)
    each = max(1, min(num_labels, round(sizes.num_pairs / sizes.num_queries), 4 * params.pool.beta))
    columns, shape = rng.integers(0, num_labels, num_queries * each), (num_queries, num_labels)
    relevance = sp.csr_matrix((np.ones(len(columns), np.float32), columns, np.arange(num_queries + 1) * each), shape)
    relevance.sum_duplicates()
    relevance.data[:] = 1.0
    counts = {"queries": num_queries, "labels": num_labels}
    tables = {name: text_table([str(row) for row in range(count)], [""] * count) for name, count in counts.items()}
    no_pairs = sp.csr_matrix(shape, dtype=bool)
    raw = RawData("plan", {"train": tables["queries"]}, tables["labels"], {"train": relevance}, {"train": no_pairs})
    dataset = write_dataset(folder / "dataset", raw, validation_share=0.0)
    vocab_size = min(sizes.vocab_size, empty_encoder(params.encoder.name).config.vocab_size)
    caches = []
    for name, histogram in (("queries", sizes.query_lengths), ("labels", sizes.label_lengths)):
        lengths = rng.permutation(typical_lengths(histogram, counts[name], params.tokens.max_length)).clip(min=1)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ids = rng.integers(0, vocab_size, int(offsets[-1])).astype("<u4" if sizes.vocab_size >= 65536 else "<u2")
        meta = {"vocab_size": sizes.vocab_size, "pad_id": 0, "max_length": params.tokens.max_length,
                "num_texts": counts[name], "num_tokens": len(ids)}  # fmt: skip
        with write_folder(folder / name, KIND, VERSION, meta) as out:
            np.save(out.path / "ids.npy", ids)
            np.save(out.path / "offsets.npy", offsets)
        caches.append(TokenCache.open(folder / name, verify=False))
    return TrainingData(dataset, *caches)
