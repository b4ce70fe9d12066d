"""sentence-transformers trained on our pairs: a bag of token embeddings, or a transformer, with in-batch negatives.

Model, loss (multiple-negatives ranking, for the transformer with cached gradients) and encoding are theirs; batches and
the loop are ours, because their trainer needs two further packages and has no view of relevance. As their guide asks,
no text is in a batch twice. What stays as it is for any user of that library: another true label of a query counts as
a negative when a batch has it.

Shape legend: E training pairs, n queries that are predicted, L labels, V token ids, D width, B pairs of a batch.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unidec.comparison.peers.task import predicted_splits, search_width, training_rows
from unidec.data.dataset import Text, XMCDataset
from unidec.data.tokens import TextTokenizer
from unidec.errors import DataError, TrainingError
from unidec.model.encoder import load_transformer
from unidec.model.search import exact_search
from unidec.model.sources import resolve_encoder
from unidec.progress import progress

ENCODE_TEXTS = 256
CHECKED = 50  # steps between two looks at the loss

Predictions = dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]]


def pair_batches(
    query_E: NDArray[np.int64], label_E: NDArray[np.int64], size: int, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """One epoch: places of pairs, int64 [size], in which no query and no label is twice.

    A pair that does not fit waits for the next batch. The epoch ends when what is left fills no batch: of frequent
    labels some pairs stay over, others in each epoch.
    """
    rest = deque(rng.permutation(len(query_E)).tolist())
    while True:
        chosen: list[int] = []
        queries: set[int] = set()
        labels: set[int] = set()
        waiting = []
        while rest and len(chosen) < size:
            pair = rest.popleft()
            query, label = int(query_E[pair]), int(label_E[pair])
            if query in queries or label in labels:
                waiting.append(pair)
                continue
            queries.add(query)
            labels.add(label)
            chosen.append(pair)
        if len(chosen) < size:
            return
        rest.extendleft(reversed(waiting))
        yield np.array(chosen, dtype=np.int64)


def rate(step: int, steps: int, warmup: float) -> float:
    """Share of the learning rate at a step: linear warm-up over that share of the steps, then linearly to 0."""
    rise = warmup * steps
    return (step + 1) / (rise + 1) if step < rise else max(0.0, (steps - step) / max(1.0, steps - rise))


def static_weights(
    texts: list[str], embedding_VD: NDArray[np.float32], folder: Path, max_length: int
) -> NDArray[np.float32]:
    """Start of the bag, float32 [V, D]: token embeddings times inverse document frequency, as our bag starts.

    Their bag is a mean compared by cosine: the weight inside the embedding is the same vector as our weight beside it.
    """
    flat, length = TextTokenizer(folder, max_length).encode(texts)
    text_F = np.repeat(np.arange(len(texts)), length)
    vocabulary = len(embedding_VD)
    seen = np.unique(text_F * vocabulary + flat) % vocabulary
    frequency_V = np.bincount(seen, minlength=vocabulary)
    idf_V = np.log((1 + len(texts)) / (1 + frequency_V)).clip(min=1e-3)
    return (embedding_VD * idf_V[:, None]).astype(np.float32)


def _static(folder: Path, texts: list[str], max_length: int) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(max(1, max_length - tokenizer.num_special_tokens_to_add(False)))
    transformer: Any = load_transformer(folder)
    embedding_VD = transformer.get_input_embeddings().weight.detach().numpy()
    weights = torch.from_numpy(static_weights(texts, embedding_VD, folder, max_length))
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, weights)])


def _transformer(folder: Path, max_length: int, pooling: str) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # it would report the pooling head that no file has and nothing uses
    try:
        words = Transformer(str(folder), max_seq_length=max_length)
    finally:
        logging.set_verbosity(before)
    if getattr(words.model, "pooler", None) is not None:
        words.model.pooler = None
    return SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension(), pooling_mode=pooling)])


def predict(
    name: str, dataset: XMCDataset, text: Text, settings: Mapping[str, Any], seed: int, options: Mapping[str, Any]
) -> tuple[Predictions, dict[str, Any]]:
    """Train, encode and search exactly.

    Args:
        name: "st-static" or "st-transformer".
        settings: max_length, encoder (name, pooling), epochs and batch_size of the comparison.
        options: all of the peer's options; an epochs or batch_size of None is the comparison's.

    Returns:
        split -> (labels int64 [n, width], scores float32: cosines), and facts.

    Raises:
        DataError: fewer pairs than one batch needs. TrainingError: a loss that is not finite.
    """
    from sentence_transformers import __version__
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
        MultipleNegativesRankingLoss,
    )

    torch.manual_seed(seed)
    rows = training_rows(dataset, options["train_on"])
    query_texts, label_texts = dataset.query_texts(rows, text), dataset.label_texts(None, text)
    folder = resolve_encoder(settings["encoder"]["name"])
    start = time.perf_counter()
    if name == "st-static":
        model = _static(folder, query_texts, settings["max_length"])
        loss: Any = MultipleNegativesRankingLoss(model, scale=options["scale"])
    else:
        model = _transformer(folder, settings["max_length"], settings["encoder"].get("pooling", "mean"))
        loss = CachedMultipleNegativesRankingLoss(model, scale=options["scale"], mini_batch_size=options["chunk"])
    chosen = {key: options[key] or settings[key] for key in ("epochs", "batch_size")}
    relevance = dataset.relevance[rows]
    query_E, label_E = np.repeat(np.arange(len(rows)), np.diff(relevance.indptr)), relevance.indices.astype(np.int64)
    used = _train(loss, model, (query_texts, label_texts), (query_E, label_E), seed, {**options, **chosen})
    facts = {
        "train_seconds": time.perf_counter() - start,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "version": f"sentence-transformers {__version__}",
        "pairs_an_epoch": used,
        "search_ms": {},
        **chosen,
    }
    label_LD = _encode(model, label_texts)
    width = search_width(dataset, options["train_on"])
    found: Predictions = {}
    for split in predicted_splits(dataset, options["train_on"]):
        texts = dataset.query_texts(dataset.rows(split), text)
        start = time.perf_counter()
        scores, labels = exact_search(_encode(model, texts), label_LD, width)
        facts["search_ms"][split] = 1000 * (time.perf_counter() - start) / max(len(texts), 1)
        found[split] = labels, scores
    return found, facts


def _encode(model: Any, texts: list[str]) -> NDArray[np.float32]:
    return model.encode(texts, batch_size=ENCODE_TEXTS, normalize_embeddings=True, show_progress_bar=False)


def _train(
    loss: Any,
    model: Any,
    texts: tuple[list[str], list[str]],
    pairs: tuple[NDArray[np.int64], NDArray[np.int64]],
    seed: int,
    options: Mapping[str, Any],
) -> float:
    """Trains in place; returns the mean share of the pairs that an epoch used."""
    (query_texts, label_texts), (query_E, label_E) = texts, pairs
    size = min(options["batch_size"], len(query_E))
    rng = np.random.default_rng(seed)
    epochs = [list(pair_batches(query_E, label_E, size, rng)) for _ in range(options["epochs"])]
    steps = sum(map(len, epochs))
    if not steps:
        raise DataError(
            "too few different queries and labels for one batch", got=f"{len(query_E)} pairs", expected=f"{size}",
            fix="a smaller batch_size",
        )  # fmt: skip
    optimiser = torch.optim.AdamW(model.parameters(), lr=options["learning_rate"], weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate(step, steps, options["warmup"]))
    model.train()
    with progress(total=steps, desc="sentence-transformers", unit="step") as bar:
        for step, batch in enumerate(batch for epoch in epochs for batch in epoch):
            sides = (
                [query_texts[query_E[pair]] for pair in batch],
                [label_texts[label_E[pair]] for pair in batch],
            )
            features = [_to(model.preprocess(side), model.device) for side in sides]
            value = loss(features, torch.empty(0))
            value.backward()
            if (step % CHECKED == 0 or step == steps - 1) and not math.isfinite(float(value.detach())):
                raise TrainingError(
                    "a loss that is not finite", got=float(value.detach()), fix="a smaller learning_rate"
                )
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            schedule.step()
            bar.update(1)
    model.eval()
    return steps * size / (options["epochs"] * len(query_E))


def _check(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise TrainingError("a loss that is not finite", where=f"step {step}", got=loss, fix="a smaller learning_rate")


def _to(features: Mapping[str, Any], device: Any) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in features.items()}
