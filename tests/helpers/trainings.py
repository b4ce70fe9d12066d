"""What tests do with a `Trainer`: train to the end, keep its weights, read its history."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from unidec.training.round_refresh import Refresh
from unidec.training.trainer import Trainer

TIMES = ("seconds", "texts_per_s", "tokens_per_s")

# pools and heads, by name, under which a teacher teaches
POOLS = {
    "a pool for both heads": {},
    "a limited pool, filled": {"pool.size": 14, "pool.fill": True},
    "random batches": {"pool.batches": "random"},
    "all labels for both": {"pool.de_labels": "all", "pool.clf_labels": "all"},
    "other labels for the classifier": {"pool.clf_labels": 18},
    "a dual encoder": {"model.heads": "de", "index.space": "de"},
    "a classifier": {"model.heads": "clf", "index.space": "clf", "pool.clf_labels": "all"},
}


def train_to_the_end(trainer: Trainer) -> Trainer:
    """As the stages do."""
    while not trainer.finished:
        if trainer.refresh_due:
            trainer.mine()
        trainer.train_round()
    return trainer


def with_first_round(trainer: Trainer) -> Trainer:
    """At the start of its first round: clustered, mined, in training mode."""
    trainer.mine()
    trainer.made = Refresh.load(trainer.run_dir / "refresh" / "epoch-00000", 0)
    trainer.model.train()
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """A copy of the model's state."""
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def history(trainer: Trainer) -> list[dict[str, Any]]:
    """Lines of history.jsonl without the figures that a clock decides."""
    lines = (trainer.run_dir / "history.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def loss_by_teacher(trainer):
    """Trains to the end; the teacher's loss of the dual encoder on the training queries' pool,
    without its weight.
    """
    train_to_the_end(trainer)
    trainer.model.eval()
    batch = trainer.prepare(trainer.rows, 0)
    x = trainer.model.encoder(batch.texts).detach()
    (method,) = trainer.batches.methods.score_losses
    own = batch.counts.own_queries
    de = trainer.model.de(x, own)
    score = de[:own] @ de[own:].T / trainer.settings.model.temperature
    loss = method.loss("de", score.detach(), batch.targets, batch)
    return float(loss) / trainer.settings.teacher.weight
