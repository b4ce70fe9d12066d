"""What the sections of `gpu.py` share: sizes, figures with their origin, clocks, and trainers on
synthetic data, whose tokens may exist only when they are asked for.

Everything takes the device as a value; what only CUDA has is behind the functions at the head of
this file."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy.sparse import csr_matrix
from synthetic import HashedTokens, Synthetic, Words, write_dataset, write_encoder, write_tokens

from unidec.config import Params, load_params
from unidec.data.dataset import XMCDataset
from unidec.data.tokens import TokenCache
from unidec.model.batch import Prepared
from unidec.model.sources import resolve_encoder
from unidec.training.round_refresh import Refresh
from unidec.training.trainer import Trainer, TrainingData

MAX_LENGTH = 32  # tokens of a text
MINILM = "all-MiniLM-L6-v2"  # its tokenizer comes with extra `minilm`; no weights of it are used

# -- the device
# --------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, run: Callable[[], Any]) -> float:
    """How long it takes, the device's work included."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - begin


def start_peak(device: torch.device) -> None:
    """Measure the peak of allocated memory from here on."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Most bytes that tensors held on a GPU since `start_peak`; 0 without one."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def free_bytes(device: torch.device) -> int:
    """Of the GPU, with what torch keeps for later."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def clean_up(device: torch.device) -> None:
    """After a section, whatever became of it: its memory is free, and nothing is refused any
    longer.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    """For the table."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor"


# -- sizes and figures
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How large the sections are.

    Attributes:
        hidden, layers: of the DistilBERT that trains, with random weights.
        train, labels, batch, pool, dim: of the step, the refresh and what compile brings.
        steps: whole steps that are timed.
        small: queries, labels, batch and pool of what is compared with the CPU; its encoder is
        small too.
        search: labels, queries and their width, of search and mining.
        product: queries, pool labels, width of the encoder and of a head, of the products in bf16.
        compiler: torch.compile's backend.
    """

    hidden: int
    layers: int
    train: int
    labels: int
    batch: int
    pool: int
    dim: int
    steps: int
    small: tuple[int, int, int, int]
    search: tuple[int, int, int]
    product: tuple[int, int, int, int]
    compiler: str = "inductor"


SIZES = {
    # LF-AmazonTitles-131K as published: 294,805 queries, batches of N / 2^8 = 1,152
    "card": Sizes(
        768,
        6,
        294_805,
        131_073,
        1024,
        3000,
        384,
        20,
        (2048, 2000, 256, 700),
        (1_305_265, 8192, 384),
        (1152, 3000, 768, 384),
    ),
    "cpu": Sizes(
        128,
        2,
        4096,
        4000,
        128,
        350,
        64,
        8,
        (512, 500, 64, 180),
        (50_000, 1024, 64),
        (1152, 3000, 768, 384),
    ),
    "tiny": Sizes(
        64, 1, 96, 60, 16, 40, 16, 2, (96, 60, 16, 40), (300, 24, 16), (16, 40, 32, 16), "eager"
    ),
}


@dataclass(frozen=True)
class Figure:
    """A line of the table.

    Attributes:
        section, what, value: what was found; a number is rounded for people only in the table.
        origin: "measured on ...", "computed ..."; sizes: what it was taken at.
        goal: in words, "" where there is none; ok: whether it is met, None where it cannot be said
        here.
    """

    section: str
    what: str
    value: float | str
    unit: str
    origin: str
    sizes: str
    goal: str = ""
    ok: bool | None = None


# -- data and trainers of any size
# --------------------------------------------------------------------------------------------------

NEGATIVES = 30  # eta x T


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A training whose memory is measured: of LF-AmazonTitles-1.3M as UniDEC trains it, unless said
    otherwise.
    """

    labels: int = 1_305_265
    train: int = 140_544
    batch: int = 1098
    pool: int = 3000
    dim: int = 256
    hidden: int = 768
    layers: int = 6
    max_length: int = 32
    dtype: str = "fp32"
    state: str = "adam"
    recompute: bool = False


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


def stored_data(train: int, labels: int, folder: Path) -> tuple[XMCDataset, TokenCache, TokenCache]:
    """Synthetic data and their tokens in a folder."""
    data = Synthetic(Words(), train, max(1, train // 20), labels)
    caches = []
    write_dataset(data, folder / "dataset")
    for which in ("queries", "labels"):
        write_tokens(data, folder / which, which, resolve_encoder(MINILM), MAX_LENGTH)
        caches.append(TokenCache.open(folder / which, verify=False))
    return XMCDataset.open(folder / "dataset", verify=False), caches[0], caches[1]


# -- what a section is given
# --------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """What a section is given.

    Attributes:
        device: where it runs; sizes: how large; folder: for its data, which sections share.
        until: `time.monotonic()` when the time is over.
        section: its name; figures: what all sections found.
    """

    device: torch.device
    sizes: Sizes
    folder: Path
    until: float = float("inf")
    section: str = ""
    figures: list[Figure] = field(default_factory=list)
    _data: dict[tuple[int, int], tuple[XMCDataset, TokenCache, TokenCache]] = field(
        default_factory=dict
    )

    @property
    def on_card(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.monotonic()

    def add(
        self,
        what: str,
        value: float | str,
        unit: str,
        sizes: str,
        *,
        most: float | None = None,
        judged: bool = True,
        origin: str = "",
    ) -> None:
        """Take down a figure of this section.

        Args:
            most: its goal, at most so much; `judged`: whether being above it counts here.
            origin: where it is not measured on the device.
        """
        goal = "" if most is None else f"at most {most:g}"
        ok = float(value) <= most if most is not None and judged else None  # NaN is not
        origin = origin or f"measured on {device_name(self.device)}"
        self.figures.append(Figure(self.section, what, value, unit, origin, sizes, goal, ok))

    # -- trainers
    # ----------------------------------------------------------------------------------------------

    def encoder(self, hidden: int, layers: int, *, to_compare: bool = False) -> Path:
        """A DistilBERT of random weights. What is compared between devices has no dropout, since
        they draw other numbers, and weights five times as wide, so that its attention attends.
        """
        folder = self.folder / f"encoder-{hidden}-{layers}{'-to-compare' * to_compare}"
        if folder.is_dir():
            return folder
        write_encoder(
            folder,
            hidden=hidden,
            layers=layers,
            tokenizer_from=resolve_encoder(MINILM),
            kind="distilbert",
        )
        if to_compare:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            config |= {"dropout": 0.0, "attention_dropout": 0.0}
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            weights = load_file(folder / "model.safetensors")
            wider = {
                name: 5 * weight if weight.ndim == 2 else weight for name, weight in weights.items()
            }
            save_file(wider, folder / "model.safetensors", {"format": "pt"})
        return folder

    def params(self, recipe: str, **overrides: Any) -> Params:
        """A recipe at this bench's sizes, on its device."""
        sizes = self.sizes
        file = self.folder / f"{recipe}.yaml"
        file.write_text(f"recipe: {recipe}\n", encoding="utf-8")
        return load_params(
            file,
            {
                "device": self.device.type,
                "encoder.name": str(self.encoder(sizes.hidden, sizes.layers)),
                "tokens.max_length": MAX_LENGTH,
                "pool.batch_size": sizes.batch,
                "pool.size": sizes.pool,
                "model.dim": sizes.dim,
            }
            | overrides,
        )

    def data(self, train: int, labels: int) -> tuple[XMCDataset, TokenCache, TokenCache]:
        """Synthetic data and their tokens, made once."""
        if (train, labels) not in self._data:
            folder = self.folder / f"data-{train}-{labels}"
            folder.mkdir()
            self._data[train, labels] = stored_data(train, labels, folder)
        return self._data[train, labels]

    def trainer(self, params: Params, train: int = 0, labels: int = 0) -> Trainer:
        """A new run; before batches are drawn it needs a refresh (`uniform`, or its own)."""
        run = Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))
        data = TrainingData(*self.data(train or self.sizes.train, labels or self.sizes.labels))
        trainer = Trainer(params.training, data, run, run / "cache")
        trainer.model.train()
        return trainer


def open_cell(bench: Bench, cell: Cell, run: Path) -> Trainer:
    """A new run of a cell, whose data are made when they are asked for: its clusters are random and
    its hard negatives uniform, so that two thirds of a pool's rows lie anywhere in the table.
    """
    data = Synthetic(Words(), cell.train, cell.train // 20 + 1, cell.labels)
    tokenizer = resolve_encoder(MINILM)
    tokens = [
        HashedTokens(data, which, tokenizer, cell.max_length, run / which)
        for which in ("queries", "labels")
    ]
    file = run / "params.yaml"
    file.write_text("recipe: null\n", encoding="utf-8")
    values = {
        "device": bench.device.type,
        "tokens.max_length": cell.max_length,
        "encoder.name": str(bench.encoder(cell.hidden, cell.layers)),
        "encoder.kind": "transformer",
        "encoder.trainable_layers": -1,
        "model.dim": cell.dim,
        "model.clf_init": "xavier",
        "model.clf_dtype": cell.dtype,
        "optim.clf_state": cell.state,
        "optim.epochs": 1000,
        "run.recompute": cell.recompute,
        "pool.batches": "random",
        "pool.batch_size": cell.batch,
        "pool.size": cell.pool,
    }
    dataset = VirtualDataset(data, run)
    inputs = TrainingData(dataset, *tokens)  # type: ignore[arg-type]
    trainer = Trainer(load_params(file, values).training, inputs, run, run / "cache")
    shape = (dataset.num_queries, NEGATIVES)
    negatives = np.random.default_rng(0).integers(0, cell.labels, shape, dtype=np.int32)
    trainer.made = Refresh(negatives=negatives)
    trainer.model.train()
    return trainer


def uniform(trainer: Trainer) -> Refresh:
    """Random batches and uniform hard negatives, in place of a refresh: two thirds of a pool lie
    anywhere.
    """
    pool = trainer.settings.pool
    data = trainer.dataset
    shape = (data.num_queries, max(1, pool.eta * pool.refresh))
    return Refresh(
        negatives=np.random.default_rng(0).integers(0, data.num_labels, shape, dtype=np.int32)
    )


def some_batches(trainer: Trainer, count: int) -> list[Prepared]:
    """The first batches of the round, on the device."""
    rows = trainer.made.batches(trainer.rows, trainer.batch_size, trainer.settings.seed, 0)
    return [trainer.prepare(rows[number % len(rows)], number) for number in range(count)]


def train(trainer: Trainer, batches: Iterable[Prepared]) -> None:
    """The trainer's own steps."""
    for batch in batches:
        trainer.train_step(batch)
        trainer.at.step += 1


def of_step(trainer: Trainer, batch: Prepared) -> str:
    """A step's sizes in words."""
    return (
        f"{len(batch.pool.rows_B)} queries, {len(batch.pool.pool_S)} pool labels, "
        f"{batch.counts.tokens} tokens, "
        f"{trainer.dataset.num_labels} labels, {trainer.settings.optim.precision}"
    )
