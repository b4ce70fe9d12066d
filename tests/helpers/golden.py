"""Golden losses: the first 20 steps of every shipped recipe, scaled down, kept in
`training/golden/<recipe>.json`.

A refactor leaves them as they are. After a change of a recipe or of the algorithm, record them
again and state it in the commit message:

    python tests/helpers/golden.py             # all recipes
    python tests/helpers/golden.py unidec      # this one

Everything of a recipe that decides what is computed is kept (losses, weights, dropouts, rates,
pools, refresh); sizes, the transformer, the length of the schedule and the number format are
replaced by small ones. Processors differ in the last bits of sums, exponentials and normal random
numbers, so figures are compared to a relative 1e-5, and dropout masks come from a generator that
other architectures do not have: golden losses count on x86-64 only."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from unidec.config import Params, load_params, recipe_names
from unidec.data.dataset import XMCDataset, write_dataset
from unidec.data.json_file import read_json_lines
from unidec.data.raw import RawData
from unidec.data.tokens import TokenCache, build_token_cache
from unidec.methods.teacher import TeacherVectors
from unidec.methods.word_teacher import WordTargets
from unidec.training import trainer as trainer_module
from unidec.training.trainer import Trainer, TrainingData

FOLDER = Path(__file__).parents[1] / "training" / "golden"
KEPT = ("loss", "loss_de", "loss_clf", "grad_norm", "pool_size", "positives_per_query")
STEPS = 20
EPOCHS = 5
REFRESH = 2


def small(recipe: str, transformer: Path, folder: Path, **overrides: Any) -> Params:
    """A recipe's parameters with small sizes, and what is given by key path."""
    file = folder / "params.yaml"
    file.write_text(f"recipe: {recipe}\n", encoding="utf-8")
    of_recipe = load_params(file)
    return load_params(
        file,
        {
            "seed": 0,
            "device": "cpu",
            "encoder.name": str(transformer),
            "tokens.max_length": 16,
            "model.dim": 16,
            "model.levels": [8, 3] if of_recipe.model.levels else [],
            "pool.shortlist": min(of_recipe.pool.shortlist, 2),
            "encoder.trainable_layers": min(of_recipe.encoder.trainable_layers, 1),
            "encoder.bag_head": min(of_recipe.encoder.bag_head, 4),
            "encoder.transformer_tokens": min(of_recipe.encoder.transformer_tokens, 8),
            "loss.widths": [4, 8] if of_recipe.loss.widths else [],
            "pool.batch_size": 12,
            "pool.batch_fit": "most",
            "pool.size": min(of_recipe.pool.size, 30),
            "pool.refresh": REFRESH,
            "pool.start_epoch": min(of_recipe.pool.start_epoch, REFRESH),
            "optim.epochs": EPOCHS,
            "optim.warmup_epochs": 1.0,
            "optim.precision": "fp32",
            "run.deterministic": True,
            "optim.encode_chunk": min(of_recipe.optim.encode_chunk, 16),
        }
        | overrides,
    )


def label_graph(params: Params, dataset: XMCDataset) -> csr_matrix:
    """What stage `label_graph` makes of the training queries."""
    from helpers.label_targets import soft_targets

    graph = params.label_graph
    relevance = dataset.relevance[dataset.rows("train")]
    return soft_targets(
        relevance, graph.threshold, kind=graph.kind, share=graph.share, tail_first=graph.tail_first
    )


def teacher(params: Params, dataset: XMCDataset) -> TeacherVectors | WordTargets | None:
    """Random vectors, or random probabilities by words, for the recipes that have a teacher."""
    rng = np.random.default_rng(7)
    if params.teacher.words:
        rows = dataset.rows("train")
        probability = rng.random((len(rows), dataset.num_labels)).astype(np.float32)
        probability[rng.random(probability.shape) < 0.8] = 0
        probability[dataset.filter_pairs[rows].toarray() > 0] = 0
        return WordTargets(rows, csr_matrix(probability))
    if params.recipe != "unidec-taught":
        return None
    label_LE = rng.standard_normal((dataset.num_labels, 5)).astype(np.float32)
    rows_n = np.arange(dataset.num_queries + dataset.num_labels)
    query_nE = rng.standard_normal((len(rows_n), 5)).astype(np.float16)
    return TeacherVectors(rows_n, query_nE, label_LE.__getitem__)


def first_steps(
    recipe: str, raw: RawData, transformer: Path, folder: Path
) -> list[dict[str, float]]:
    """Train 20 steps below a folder; the figures of each."""
    params = small(recipe, transformer, folder)
    dataset = write_dataset(folder / "dataset", raw, validation_share=0.1)
    tokens = []
    for name, size in (
        ("queries", dataset.num_queries),
        ("labels", dataset.num_labels),
    ):
        texts = dataset.text_batches(name, params.tokens.text)  # type: ignore[arg-type]
        tokens.append(
            TokenCache.open(build_token_cache(texts, transformer, 16, folder / name, size))
        )
    graph = label_graph(params, dataset) if params.reads_label_graph else None
    log_every = trainer_module.LOG_EVERY
    trainer_module.LOG_EVERY = 1
    try:
        while True:
            # opened again for each round, as the stages do
            trainer = Trainer(
                params.training,
                TrainingData(dataset, tokens[0], tokens[1], graph, teacher(params, dataset)),
                folder / "run",
                folder / "cache",
            )
            if trainer.finished:
                break
            trainer.mine()
            trainer.train_round()
    finally:
        trainer_module.LOG_EVERY = log_every
    lines = read_json_lines(folder / "run" / "history.jsonl")
    assert len(lines) == trainer.steps_per_epoch * EPOCHS >= STEPS
    return [{key: line[key] for key in KEPT if key in line} for line in lines[:STEPS]]


def differences(ours: list[dict[str, float]], golden: list[dict[str, float]]) -> list[str]:
    """What is not equal, in words; empty when all is."""
    found = []
    for step, (one, other) in enumerate(zip(ours, golden, strict=True)):
        if one.keys() != other.keys():
            found.append(f"step {step}: {sorted(one)} instead of {sorted(other)}")
            continue
        # the norm sums squares of what the losses only average: its last bits move more
        tolerance = {"grad_norm": 1e-4}
        found += [
            f"step {step}: {key} {one[key]!r} instead of {other[key]!r}"
            for key in one
            if not np.isclose(one[key], other[key], rtol=tolerance.get(key, 1e-5), atol=1e-7)
        ]
    return found


def main(recipes: list[str]) -> None:
    """Write the golden files and say how far each moved."""
    from helpers.tiny_data import make_raw, tiny_transformer

    raw = make_raw()
    for recipe in recipes or recipe_names():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            ours = first_steps(recipe, raw, tiny_transformer("bert", raw, folder / "bert"), folder)
        file = FOLDER / f"{recipe}.json"
        moved = differences(ours, json.loads(file.read_text())) if file.is_file() else ["new"]
        rows = ",\n".join(json.dumps(row) for row in ours)
        file.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
        print(
            f"{file.name}: {moved[0] if moved else 'as before'}{', ...' if len(moved) > 1 else ''}"
        )


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parents[1]))  # helpers of the tests, which pytest finds by itself
    FOLDER.mkdir(exist_ok=True)
    main(sys.argv[1:])
