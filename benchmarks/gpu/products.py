"""Sections on memory and search."""

from __future__ import annotations

import functools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bench import (
    MINILM,
    Bench,
    free_bytes,
    peak_bytes,
    seconds,
    start_peak,
    train,
)
from scipy.sparse import csr_matrix
from synthetic import HashedTokens, Synthetic, Words
from torch import Tensor

from unidec.config import Params, load_params
from unidec.config.index_spec import IndexSpec, Kind
from unidec.cores import num_threads
from unidec.data.dataset import XMCDataset
from unidec.data.tokens import TokenCache
from unidec.model.faiss_library import faiss_module
from unidec.model.search import exact_search, recall
from unidec.model.sources import resolve_encoder
from unidec.pipeline.memory_plan import MARGIN, Sizes, plan_memory
from unidec.ranking.index import LabelIndex
from unidec.training.mining import mine_hard_negatives
from unidec.training.round_refresh import Refresh
from unidec.training.trainer import Trainer, TrainingData

LARGEST_SECONDS = 240  # that 450M rows take, most of it to make them
# whose tokens are made at their greatest length: more would not fit into the host's memory
MOST_TEXTS = 10**7

# LF-AmazonTitles-1.3M as UniDEC trains it (1,098 queries, pool of 3,000, 256 wide, 32 tokens, every
# layer of a DistilBERT), and a table of 450 million labels, 64 wide (Query2Bid-450M of DePSL: batch
# 2,048, 12 tokens)
ENCODER = {"name": "distilbert-base-uncased", "kind": "transformer", "trainable_layers": -1}
AMAZON = {
    "encoder": ENCODER,
    "model": {"dim": 256},
    "pool": {"batch_size": 1098, "size": 3000, "beta": 3, "eta": 6},
    "tokens": {"max_length": 32},
}
# the classifier alone, random batches: an exact search over 450 million labels every few epochs is
# not practical
BID = {
    "encoder": ENCODER,
    "model": {"dim": 64, "heads": "clf", "clf_init": "normal", "clf_dtype": "bf16"},
    "pool": {"batch_size": 2048, "size": 3000, "eta": 0, "batches": "random"},
    "tokens": {"max_length": 12},
    "index": {"space": "clf"},
    "optim": {"clf_state": "adagrad"},
}

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


AMAZON_SIZES = Sizes.given(1_300_000, 2_248_619, 32, pairs=49_900_000)
ROWS = Cell(
    labels=450_000_000, batch=2048, pool=4000, dim=64, max_length=12, dtype="bf16", state="adagrad"
)
# name: (parameters and sizes for the planner, what is measured, at most so many GB)
CASES: dict[str, tuple[dict[str, Any], Sizes, Cell, float | None]] = {
    "recomputed": (AMAZON | {"run": {"recompute": True}}, AMAZON_SIZES, Cell(recompute=True), 16.0),
    "1.3M labels": (AMAZON, AMAZON_SIZES, Cell(), None),
    "450M labels": (BID, Sizes.given(450_000_000, 10_000_000, 12), ROWS, 141.0),
}


def memory(bench: Bench) -> None:
    """Peak memory of the papers' largest settings: planned, and measured where the card
    holds them.
    """
    for case, (values, sizes, cell, most) in CASES.items():
        free = {"device": 141 * 10**9, "host": 1 << 40, "disk": 4 << 40}
        plan = plan_memory(Params.model_validate(values), sizes, free)
        step = plan.needed("device")["step"]
        peaks = {"a training step's peak": step, "the largest peak": plan.peak("device")[1]}
        for what, planned in peaks.items():
            origin = "computed by the planner"
            what_of = f"{case}: {plan.step}"
            bench.add(what, planned / 1e9, "GB", what_of, most=most, origin=origin)
        if bench.on_card:
            _measure_cell(bench, cell, step, most)


def _measure_cell(bench: Bench, cell: Cell, planned: int, most: float | None) -> None:
    """The peak of some steps of a cell, where the card and the time allow it."""
    what = (
        f"{cell.labels} labels, {cell.batch} queries, pool of {cell.pool}, {cell.max_length} tokens"
    )
    large = cell.labels > MOST_TEXTS
    missing = planned > (1 - MARGIN) * free_bytes(bench.device)
    if missing or (large and bench.left < LARGEST_SECONDS):
        why = (
            "the card is too small"
            if missing
            else f"{bench.left:.0f} s are left of {LARGEST_SECONDS}"
        )
        bench.add("a training step's peak", "not measured", "", what, origin=why)
        return
    bench.add("a training step's peak", peak_of_steps(bench, cell) / 1e9, "GB", what, most=most)


def peak_of_steps(bench: Bench, cell: Cell) -> int:
    """Most bytes of the device that 12 steps of a cell hold, from the model's creation on. Every
    text has the greatest length (of more than `MOST_TEXTS` labels they are as they come).
    """
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        start_peak(bench.device)
        trainer = open_cell(bench, cell, Path(folder))
        if cell.labels <= MOST_TEXTS:
            for which, cache in trainer.batches.texts.tokens.items():
                trainer.batches.texts.tokens[which] = _longest_texts(cache)
        rows = trainer.made.batches(trainer.rows, trainer.batch_size, 0, 0)
        train(trainer, (trainer.prepare(rows[n % len(rows)], n) for n in range(12)))
        return peak_bytes(bench.device)


def _longest_texts(cache: TokenCache) -> TokenCache:
    """As many texts of random tokens, each of the greatest length."""
    count = len(cache)
    length = cache.max_length
    ids = np.random.default_rng(0).integers(1000, cache.vocab_size, count * length, dtype=np.uint16)
    return TokenCache(ids, np.arange(count + 1) * length, cache.vocab_size, cache.pad_id, length)


def search(bench: Bench) -> None:
    """Exact search and mining over all labels, and what faiss finds of it."""
    num_labels, num_queries, dim = bench.sizes.search
    label_LD, query_ND = _vectors(num_labels, num_queries, dim)
    sizes = (
        f"{num_queries} queries, {num_labels} labels, {dim} wide, random: no clusters that an "
        "index could use"
    )
    each, exact_NK = _exact(bench, label_LD, query_ND)
    bench.add("exact search, k = 100", 1000 * each, "ms a query", sizes)
    rng = np.random.default_rng(1)
    pairs = np.sort(rng.integers(0, num_labels, (num_queries, 3), dtype=np.int32), axis=1)
    shape = (num_queries, num_labels)
    relevance = csr_matrix(
        (np.ones(pairs.size, np.float32), pairs.ravel(), np.arange(0, pairs.size + 1, 3)), shape
    )
    nothing = csr_matrix(shape, dtype=bool)
    mine = lambda: mine_hard_negatives(  # noqa: E731
        query_ND.numpy(),
        np.arange(num_queries),
        label_LD.numpy(),
        (relevance, nothing),
        NEGATIVES,
        device=bench.device,
    )
    each = seconds(bench.device, mine) / num_queries
    bench.add("mining, 30 hard negatives, labels copied too", 1000 * each, "ms a query", sizes)
    _faiss(bench, label_LD.numpy(), query_ND.numpy(), exact_NK, sizes)


def _exact(bench: Bench, label_LD: Tensor, query_ND: Tensor) -> tuple[float, np.ndarray]:
    """Seconds a query, and the labels found, int64 [N, 100]."""
    label = label_LD.to(bench.device)
    query = query_ND.to(bench.device)
    found: list[np.ndarray] = []
    exact_search(query[:64], label, 100)  # warm-up
    taken = seconds(bench.device, lambda: found.extend(exact_search(query, label, 100)))
    return taken / len(query), found[1]


def _vectors(num_labels: int, num_queries: int, dim: int) -> tuple[Tensor, Tensor]:
    """Labels of unit length, and queries near some of them."""
    generator = torch.Generator().manual_seed(0)
    label_LD = F.normalize(torch.randn(num_labels, dim, generator=generator), dim=1)
    near = torch.randint(num_labels, (num_queries,), generator=generator)
    noise = F.normalize(torch.randn(num_queries, dim, generator=generator), dim=1)
    return label_LD, F.normalize(label_LD[near] + noise, dim=1)


def _faiss(
    bench: Bench, label_LD: np.ndarray, query_ND: np.ndarray, exact_NK: np.ndarray, sizes: str
) -> None:
    faiss = faiss_module()
    if getattr(faiss, "get_num_gpus", lambda: 0)() == 0:
        why = "the installed faiss has no GPU"
        bench.add("faiss on the GPU", "not measured", "", sizes, origin=why)
        return
    for kind in ("flat", "ivf-pq"):
        try:
            _faiss_index(bench, kind, label_LD, (query_ND, exact_NK), sizes)
        except RuntimeError as error:  # a kind or size that its GPU code does not have
            bench.add(f"faiss, {kind}", "not measured", "", sizes, origin=str(error)[:300])


def _faiss_index(
    bench: Bench,
    kind: Kind,
    label_LD: np.ndarray,
    asked: tuple[np.ndarray, np.ndarray],
    sizes: str,
) -> None:
    faiss = faiss_module()
    query_ND, exact_NK = asked
    begin = time.perf_counter()
    built = LabelIndex.build(label_LD, IndexSpec(kind=kind), threads=num_threads())
    bench.add(f"faiss, {kind}, built by all cores", time.perf_counter() - begin, "s", sizes)
    begin = time.perf_counter()
    resources = faiss.StandardGpuResources()
    index = faiss.index_cpu_to_gpu(resources, bench.device.index or 0, built.stored)
    bench.add(f"faiss, {kind}, copied", time.perf_counter() - begin, "s", sizes)
    index.reset()
    begin = time.perf_counter()
    index.add(label_LD)
    taken = time.perf_counter() - begin
    bench.add(f"faiss, {kind}, labels added on the GPU, trained before", taken, "s", sizes)
    for k, use in ((100, "k = 100"), (NEGATIVES, "mining, positives not left out")):
        look = functools.partial(index.search, query_ND, k)
        share = recall(look()[1], exact_NK[:, :k])
        each = seconds(bench.device, look) / len(query_ND)
        bench.add(f"faiss, {kind}, {use}", 1000 * each, "ms a query", sizes)
        bench.add(f"faiss, {kind}, recall of the exact {k}", share, "share", sizes)


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
