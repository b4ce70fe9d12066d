"""Training steps at one size, in a process of its own; `scale.py step` and `scale.py gpu` drive
several of them.

    python benchmarks/scale_step.py FOLDER '{"labels": 1000000, "device": "cpu", ...}'

Reads lines from stdin: `run K` trains K steps and answers with the milliseconds of each, `end`
answers with memory and ends. The trainer is the real one, on synthetic data; hard negatives are
uniform over all labels, the hardest case for caches: two thirds of a pool's rows lie anywhere in
the table."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import MIB, status
from scipy.sparse import csr_matrix
from synthetic import HashedTokens, Synthetic, Words, write_dataset, write_encoder, write_tokens

from unidec.config import Params, load_params
from unidec.data.dataset import XMCDataset
from unidec.data.tokens import TokenCache
from unidec.model.sources import resolve_encoder
from unidec.training.round_refresh import Refresh
from unidec.training.trainer import Trainer, TrainingData

NEGATIVES = 30  # eta x T
SIZE = {
    "labels": 10_000,
    "train": 100_000,
    "batch": 512,
    "pool": 3000,
    "dim": 64,
    "kind": "bag",
    "hidden": 64,
    "layers": 1,
    "max_length": 32,
    "dtype": "fp32",
    "state": "adam",
    "place": "device",
    "device": "cpu",
    "virtual": False,
    "recompute": False,
}


class VirtualDataset(XMCDataset):
    """What a trainer asks of a data set, without texts on disk: for more labels than a disk should
    hold.
    """

    def __init__(self, data: Synthetic, folder: Path) -> None:
        self.path = folder
        self.name = f"synthetic-{data.num_labels}"
        self.manifest = {"meta": {"name": self.name, "num_labels": data.num_labels}, "files": {}}
        self.sha256 = f"{data.num_train}-{data.num_labels}-{data.seed}"
        self.num_queries = data.num_queries
        self.num_labels = data.num_labels
        self.split_N = np.repeat(np.array([0, 2], np.uint8), [data.num_train, data.num_test])
        labels, offsets = data.positives(np.arange(data.num_queries))
        shape = (data.num_queries, data.num_labels)
        self.relevance = csr_matrix((np.ones(len(labels), np.float32), labels, offsets), shape)
        self.filter_pairs = csr_matrix(shape, dtype=bool)

    def query_uids(self, rows: Any = None) -> list[str]:
        return [str(row) for row in rows]


def parameters(size: dict[str, Any], encoder: Path) -> Params:
    """The cell's parameters: the library's defaults but for what the size says."""
    overrides = {
        "device": size["device"],
        "tokens.max_length": size["max_length"],
        "encoder.name": str(encoder),
        "encoder.kind": size["kind"],
        "encoder.trainable_layers": -1 if size["kind"] == "transformer" else 0,
        "model.dim": size["dim"],
        "model.clf_init": "xavier",
        "model.clf_dtype": size["dtype"],
        "optim.clf_state": size["state"],
        "optim.epochs": 1000,
        "run.table_place": size["place"],
        "run.recompute": size["recompute"],
        "pool.batches": "random",
        "pool.batch_size": size["batch"],
        "pool.size": size["pool"],
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "params.yaml"
        file.write_text("recipe: null\n", encoding="utf-8")
        return load_params(file, overrides)


def open_data(
    size: dict[str, Any], folder: Path, tokenizer: Path
) -> tuple[XMCDataset, TokenCache, TokenCache]:
    """The size's data, written to `folder` where it is not there yet."""
    data = Synthetic(Words(), size["train"], max(1, size["train"] // 20), size["labels"])
    if size["virtual"]:
        dataset: XMCDataset = VirtualDataset(data, folder)
        hashed = [
            HashedTokens(data, which, tokenizer, size["max_length"], folder / which)
            for which in ("queries", "labels")
        ]
        return dataset, hashed[0], hashed[1]  # type: ignore[return-value]
    if not (folder / "dataset").is_dir():
        write_dataset(data, folder / "dataset")
    for which in ("queries", "labels"):
        if not (folder / "tokens" / which).is_dir():
            write_tokens(data, folder / "tokens" / which, which, tokenizer, size["max_length"])
    caches = [
        TokenCache.open(folder / "tokens" / which, verify=False) for which in ("queries", "labels")
    ]
    return XMCDataset.open(folder / "dataset", verify=False), caches[0], caches[1]


def open_trainer(size: dict[str, Any], folder: Path, run_dir: Path) -> Trainer:
    """A new run at this size, its clusters random and its hard negatives uniform."""
    tokenizer = resolve_encoder("all-MiniLM-L6-v2")
    encoder = folder.parent / f"encoder-{size['kind']}-{size['hidden']}-{size['layers']}"
    if not encoder.is_dir():
        architecture = "distilbert" if size["kind"] == "transformer" else "bert"
        write_encoder(
            encoder,
            hidden=size["hidden"],
            layers=size["layers"],
            tokenizer_from=tokenizer,
            kind=architecture,
        )
    params = parameters(size, encoder)
    dataset, queries, labels = open_data(size, folder, tokenizer)
    trainer = Trainer(
        params.training, TrainingData(dataset, queries, labels), run_dir, folder / "cache"
    )
    rng = np.random.default_rng(0)
    shape = (dataset.num_queries, NEGATIVES)
    trainer.made = Refresh(negatives=rng.integers(0, dataset.num_labels, shape, dtype=np.int32))
    trainer.model.train()
    if trainer.device.type == "cpu":
        # zeros that nobody has written yet have no memory behind them: without this, what is timed
        # in a large table is the kernel's first touch of each page, which a training pays once
        for state in trainer.optimisers.row_states().values():
            for tensor in state.values():
                tensor.add_(0)
    return trainer


class Steps:
    """Runs steps and keeps their times."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.batches = trainer.made.batches(trainer.rows, trainer.settings.pool.batch_size, 0, 0)
        self.done = 0

    def run(self, count: int) -> dict[str, Any]:
        """Milliseconds of `count` steps, and of their preparation (within them); on a GPU all
        steps' mean.
        """
        trainer = self.trainer
        cuda = self.trainer.device.type == "cuda"
        whole: list[float] = []
        prepare: list[float] = []
        loss = 0.0
        pool = 0
        if cuda:
            torch.cuda.synchronize()
        first = begin = time.perf_counter()
        for _ in range(count):
            rows_B = self.batches[self.done % len(self.batches)]
            batch = trainer.prepare(rows_B, self.done)
            ready = time.perf_counter()
            logs = trainer.train_step(batch)
            trainer.at.step += 1
            self.done += 1
            now = time.perf_counter()
            whole.append(1000 * (now - begin))
            prepare.append(1000 * (ready - begin))
            begin = now
            pool = len(batch.pool.pool_S)
            loss = logs["loss"] if logs else loss
        if cuda:
            torch.cuda.synchronize()
            whole = [1000 * (time.perf_counter() - first) / count] * count
        return {"step_ms": whole, "prepare_ms": prepare, "pool": pool, "loss": loss}

    def facts(self) -> dict[str, Any]:
        """Memory as it is, and the bytes of the table and its optimiser's state by their shapes."""
        now = status()
        trainer = self.trainer
        held = [
            trainer.model.tables()["table"].weight,
            *trainer.optimisers.row_states()["table"].values(),
        ]
        facts = {
            "anonymous_mib": round(now["RssAnon"] / MIB, 1),
            "file_mib": round(now["RssFile"] / MIB, 1),
            "peak_mib": round(now["VmHWM"] / MIB, 1),
            "table_and_state_mib": round(sum(x.numel() * x.element_size() for x in held) / MIB, 1),
        }
        if trainer.device.type == "cuda":
            facts["gpu_peak_mib"] = round(torch.cuda.max_memory_allocated() / MIB, 1)
            facts["gpu_reserved_mib"] = round(torch.cuda.max_memory_reserved() / MIB, 1)
        return facts


def answer(facts: dict[str, Any], out: Any) -> None:
    print(json.dumps(facts), file=out, flush=True)


def main() -> None:
    # answers go to the real stdout; what others print must not mix with them
    out = sys.stdout
    sys.stdout = sys.stderr
    folder = Path(sys.argv[1])
    size = SIZE | json.loads(sys.argv[2])
    torch.set_num_threads(int(size.get("threads", torch.get_num_threads())))
    folder.mkdir(parents=True, exist_ok=True)
    imported = status()["VmRSS"]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder.parent) as run:
        run_dir = Path(run) / "run"
        run_dir.mkdir()
        steps = Steps(open_trainer(size, folder, run_dir))
        answer(
            {
                "start_seconds": time.perf_counter() - begin,
                "imported_mib": round(imported / MIB, 1),
            },
            out,
        )
        for line in sys.stdin:
            word, _, number = line.partition(" ")
            if word.strip() == "end":
                break
            answer(steps.run(int(number)), out)
        answer(steps.facts(), out)
    out.flush()
    os._exit(0)  # freeing gigabytes page by page takes seconds


if __name__ == "__main__":
    main()
