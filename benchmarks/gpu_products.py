"""Sections of `gpu.py` on memory and on large products: memory, search, bf16."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu_bench import (
    Bench,
    Cell,
    free_bytes,
    open_cell,
    peak_bytes,
    seconds,
    start_peak,
    train,
    uniform,
)
from measure import Memory
from scipy.sparse import csr_matrix
from torch import Tensor

from unidec.config import Params
from unidec.config.index_spec import IndexSpec
from unidec.data.tokens import TokenCache
from unidec.model.faiss_library import faiss_module
from unidec.model.search import exact_search
from unidec.pipeline.memory_plan import MARGIN, Plan, Sizes, plan_memory
from unidec.ranking.index import LabelIndex, recall
from unidec.training.mining import mine_hard_negatives

SCALE = 18.0  # 1 / temperature of the recipes
# of a title, with padding; of DistilBERT
TOKENS = 16
LAYERS = 6
# of LF-AmazonTitles-1.3M
TEST_QUERIES = 970_237
ALL_LABELS = 1_305_265
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
}

# name: (parameters, sizes, the card's bytes)
CASES: dict[str, tuple[dict[str, Any], Sizes, int]] = {
    "1.3M labels, 48 GB": (
        AMAZON,
        Sizes.given(1_300_000, 2_248_619, 32, pairs=49_900_000),
        48 * 10**9,
    ),
    "1.3M labels, 16 GiB": (
        AMAZON,
        Sizes.given(1_300_000, 2_248_619, 32, pairs=49_900_000),
        16 << 30,
    ),
    "1.3M labels, 16 GiB, recomputed": (
        {**AMAZON, "run": {"recompute": True}},
        Sizes.given(1_300_000, 2_248_619, 32, pairs=49_900_000),
        16 << 30,
    ),
    **{
        f"450M labels, 141 GB, {state}": (
            {**BID, "optim": {"clf_state": state}},
            Sizes.given(450_000_000, 10_000_000, 12),
            141 * 10**9,
        )
        for state in ("adagrad", "sgd", "adam")
    },
}
MEASURED = {
    "papers-1.3M": Cell(),
    "papers-1.3M-recompute": Cell(recompute=True),
    "rows-450M": Cell(
        labels=450_000_000,
        batch=2048,
        pool=4000,
        dim=64,
        max_length=12,
        dtype="bf16",
        state="adagrad",
    ),
}

# -- memory
# --------------------------------------------------------------------------------------------------


def memory(bench: Bench) -> None:
    """Peak memory of the papers' largest settings: planned, and measured where the card
    holds them.
    """
    rows = (
        ("1.3M labels, 16 GiB, recomputed", "papers-1.3M-recompute", 16.0),
        ("1.3M labels, 48 GB", "papers-1.3M", None),
        ("450M labels, 141 GB, adagrad", "rows-450M", 141.0),
    )
    for case, cell, most in rows:
        plan = _planned(case)
        step = plan.needed("device")["step"]
        sizes = f"{case}: {plan.step}"
        bench.add(
            "a training step's peak",
            step / 1e9,
            "GB",
            sizes,
            most=most,
            origin="computed by the planner",
        )
        phase, peak = plan.peak("device")
        if phase != "step":
            bench.add(
                "the refresh's peak",
                peak / 1e9,
                "GB",
                sizes,
                most=most,
                origin="computed by the planner",
            )
        if bench.on_card:
            _measure_cell(bench, cell, step, most)
    if not bench.on_card:
        _on_the_host(bench)


def _planned(case: str) -> Plan:
    values, sizes, card = CASES[case]
    return plan_memory(
        Params.model_validate(values), sizes, {"device": card, "host": 1 << 40, "disk": 4 << 40}
    )


def _measure_cell(bench: Bench, name: str, planned: int, most: float | None) -> None:
    """The peak of some steps of a cell of `MEASURED`, where the card and the time allow it."""
    cell = MEASURED[name]
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


def _on_the_host(bench: Bench) -> None:
    """What recomputing saves of a small step's activations, by the memory of this process."""
    sizes = bench.sizes
    what = (
        f"{sizes.batch} queries, pool of {sizes.pool}, 32 tokens, {sizes.layers} layers of "
        f"{sizes.hidden}"
    )
    for recompute, name in ((False, "without"), (True, "with")):
        trainer = bench.trainer(bench.params("unidec-gpu", **{"run.recompute": recompute}))
        trainer.made = uniform(trainer)
        for which, cache in trainer.batches.texts.tokens.items():
            trainer.batches.texts.tokens[which] = _longest_texts(cache)
        rows = trainer.made.batches(trainer.rows, trainer.batch_size, 0, 0)[:3]
        with Memory() as held:
            train(trainer, (trainer.prepare(rows_B, number) for number, rows_B in enumerate(rows)))
        megabytes = held.facts()["anonymous_mib"] * 2**20 / 1e6
        bench.add(f"steps {name} run.recompute, the process's growth", megabytes, "MB", what)


# -- search
# --------------------------------------------------------------------------------------------------


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
    whole = each * TEST_QUERIES * ALL_LABELS / num_labels
    bench.add(
        f"the same, {TEST_QUERIES} queries against {ALL_LABELS} labels",
        whole / 60,
        "minutes",
        sizes,
        origin="computed from the time of a query, linear in the labels",
    )
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
        30,
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
    if bench.on_card and getattr(faiss, "get_num_gpus", lambda: 0)() == 0:
        bench.add(
            "faiss on the GPU", "not measured", "", sizes, origin="the installed faiss has no GPU"
        )
        return
    results: list[np.ndarray] = []
    if bench.on_card:
        kind = "flat"
        flat = LabelIndex.build(label_LD).stored
        index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), bench.device.index or 0, flat)
        look = lambda: results.append(index.search(query_ND, 100)[1])  # noqa: E731
    else:
        kind = "ivf-pq"
        own = LabelIndex.build(label_LD, IndexSpec(kind=kind))
        look = lambda: results.append(own.search(query_ND, 100)[1])  # noqa: E731
    each = seconds(bench.device, look) / len(query_ND)
    bench.add(f"faiss, {kind}, k = 100", 1000 * each, "ms a query", sizes)
    bench.add(
        f"faiss, {kind}, recall of the exact 100", recall(results[0], exact_NK), "share", sizes
    )


# -- bf16
# --------------------------------------------------------------------------------------------------


def bf16(bench: Bench) -> None:
    """Heads and similarities of a step, forward and backward: in float32, and in bf16, as trained
    where it pays.
    """
    num_queries, num_labels, width, dim = bench.sizes.product
    sizes = f"{num_queries} queries, {num_labels} labels, {width} to {dim} wide, both heads"
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_queries + num_labels, width), (dim, width), (dim, width), (num_labels, dim)]
    leaves = [torch.randn(shape, generator=generator).to(bench.device) for shape in shapes]
    leaves[1] /= width**0.5
    # the classifier's queries have about unit length, as its rows have
    leaves[2] /= (width * dim) ** 0.5
    leaves[3] = F.normalize(leaves[3], dim=1)
    exact = _products(leaves, num_queries)
    times = {"float32": _time(bench, leaves, num_queries)}
    forms: dict[str, Callable[[], Any]] = {
        "bf16": lambda: torch.autocast(bench.device.type, dtype=torch.bfloat16)
    }
    if bench.on_card:
        forms["TF32"] = _TF32
    for name, form in forms.items():
        with form():
            given = _products(leaves, num_queries)
            times[name] = _time(bench, leaves, num_queries)
        logits, gradients = (
            max(_difference(a, b) for a, b in zip(given[part], exact[part], strict=True))
            for part in (slice(0, 2), slice(2, None))
        )
        bench.add(f"{name}: largest difference of a logit", logits, "of the largest", sizes)
        bench.add(f"{name}: largest difference of a gradient", gradients, "of the largest", sizes)
    for name, taken in times.items():
        bench.add(f"products of heads and similarities in {name}", 1000 * taken, "ms", sizes)
    texts = num_queries + num_labels
    of_heads = 6 * dim * (width * (texts + num_queries) + 2 * num_queries * num_labels)
    of_encoder = 6 * 12 * width**2 * LAYERS * TOKENS * texts  # 12 W^2 parameters a layer
    bench.add(
        "their share of a step's operations",
        of_heads / (of_heads + of_encoder),
        "",
        sizes,
        origin=f"computed: an encoder of {LAYERS} layers, {TOKENS} tokens a text",
    )
    for name in forms:
        bench.add(
            f"{name} saves of a step",
            1000 * (times["float32"] - times[name]),
            "ms",
            sizes,
            origin="computed from the times above",
        )


class _TF32:
    """Float32 products on tensor cores, within."""

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")

    def __exit__(self, *error: object) -> None:
        torch.set_float32_matmul_precision(self.before)


def _products(leaves: list[Tensor], num_queries: int) -> list[Tensor]:
    """Logits [B, S] of both heads and the gradients of what they are made of, as a step has them,
    without losses.
    """
    x_TW, de_DW, clf_DW, row_SD = (leaf.detach().requires_grad_() for leaf in leaves)
    de_TD = F.normalize(torch.tanh(F.linear(x_TW, de_DW)).float(), dim=1)
    logits = [
        (de_TD[:num_queries] @ de_TD[num_queries:].T) * SCALE,
        (F.linear(x_TW[:num_queries], clf_DW) @ row_SD.T) * SCALE,
    ]
    torch.autograd.backward([torch.logsumexp(logit.float(), dim=1).mean() for logit in logits])
    return [logit.detach().float() for logit in logits] + [
        leaf.grad for leaf in (x_TW, de_DW, clf_DW, row_SD)
    ]


def _time(bench: Bench, leaves: list[Tensor], num_queries: int) -> float:
    """Median seconds of `_products`."""
    times = 10 if bench.on_card else 1
    run = lambda: [_products(leaves, num_queries) for _ in range(times)]  # noqa: E731
    run()
    return float(np.median([seconds(bench.device, run) for _ in range(5)])) / times


def _difference(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).abs().max() / exact.abs().max())
