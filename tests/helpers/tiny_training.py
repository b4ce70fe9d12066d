"""Parameters of trainings small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unidec.config import Params

# everything that decides what is computed: the shipped defaults may move, what a test asserts does
# not
TINY: dict[str, Any] = {
    "seed": 3,
    "device": "cpu",
    "tokens.max_length": 16,
    "encoder.kind": "bag",
    "encoder.trainable_layers": 0,
    "encoder.bag_dropout": 0.0,
    "encoder.dropout": 0.0,
    "encoder.residual": False,
    "encoder.start": "",
    "encoder.frozen": False,
    "encoder.bag_words": 0,
    "encoder.bag_head": 0,
    "encoder.transformer_tokens": 0,
    "model.heads": "both",
    "model.dim": 16,
    "model.dropout": 0.1,
    "model.clf_init": "label_embedding",
    "model.clf_residual": False,
    "model.clf_bias": False,
    "model.temperature": 0.1,
    "model.learn_temperature": False,
    "pool.batches": "clustered",
    "pool.batch_size": 12,
    "pool.beta": 2,
    "pool.eta": 2,
    "pool.size": 0,
    "pool.de_labels": "pool",
    "pool.clf_labels": "pool",
    "pool.refresh": 2,
    "pool.cluster_start": 0,
    "pool.positives": "uniform",
    "pool.gandalf": False,
    "loss.reduction": "psl",
    "loss.de": "ds",
    "loss.clf": "ds",
    "loss.clf_bce": 0.1,
    "loss.bce_normalise": "rows",
    "loss.balance": 0.5,
    "loss.de_forward": 0.5,
    "loss.clf_forward": 0.5,
    "loss.margin": 0.3,
    "loss.triplet_negatives": "all",
    "loss.topk": 5,
    "loss.weights": "none",
    "optim.epochs": 4,
    "optim.lr_encoder": 1e-3,
    "optim.lr_bag": 1e-2,
    "optim.lr_heads": 1e-2,
    "optim.lr_clf": 1e-2,
    "optim.warmup_epochs": 1.0,
    "optim.weight_decay": 0.05,
    "optim.clip_norm": 1.0,
    "optim.precision": "fp32",
    "optim.encode_chunk": 0,
    "run.check_memory": False,  # half a second; tests of it set it
    "index.factory": "Flat",
    "index.space": "both",
    "index.clf_weight": 1.0,
    "index.clf_normalize": True,
}


def tiny_params(folder: Path, **overrides: Any) -> Params:
    """`TINY` on the transformer in a folder, with other values by key path; a head alone is
    searched alone.
    """
    values = TINY | {"encoder.name": str(folder)} | overrides
    if values["model.heads"] != "both" and "index.space" not in overrides:
        values["index.space"] = values["model.heads"]
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return Params.model_validate(nested)
