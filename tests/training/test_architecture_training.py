"""Trainings of encoders of each architecture, with prompts and a bag beside."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny_architectures import ARCHITECTURES, LABEL, LENGTH, QUERY
from helpers.tiny_training import tiny_params

from unidec.data.tokens import TokenCache, build_token_cache
from unidec.errors import ConfigError
from unidec.training.trainer import Trainer, TrainingData

PROMPTS = {"queries": QUERY, "labels": LABEL}
SLOW = pytest.mark.slow
CASES = [
    pytest.param(name, layers, marks=[] if layers == -1 or name in ("qwen3", "t5") else SLOW)
    for name in ARCHITECTURES
    for layers in (-1, 1)
]


class Killed(Exception):
    pass


@pytest.fixture
def open_trainer(tiny_encoder, tiny_dataset, tmp_path):
    """`open_trainer(name, trainable_layers, run)`."""

    def get(name: str, layers: int, run: str) -> Trainer:
        folder = tiny_encoder(name)
        caches = []
        for which, prompt in PROMPTS.items():
            size = getattr(tiny_dataset, f"num_{which}")
            path = tmp_path / which
            if not path.is_dir():
                texts = tiny_dataset.text_batches(which)
                build_token_cache(texts, folder, LENGTH, path, size, prompt=prompt)
            caches.append(TokenCache.open(path))
        changes = {
            "tokens.max_length": LENGTH,
            "encoder.kind": "both",
            "encoder.trainable_layers": layers,
            "optim.epochs": 1,
            "pool.refresh": 1,
            "optim.warmup_epochs": 0.0,
            "run.checkpoint_steps": 1,
        }
        params = tiny_params(folder, **changes)
        data = TrainingData(tiny_dataset, *caches, None)
        return Trainer(params.training, data, tmp_path / run, tmp_path / "cache")

    return get


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize(("name", "layers"), CASES)
def test_a_killed_training_goes_on(open_trainer, monkeypatch, name, layers) -> None:
    """All weights are in the end those of a training that was not killed; those to train moved."""
    whole = open_trainer(name, layers, "whole")
    before = state(whole)
    whole.mine()
    whole.train_round()
    part = open_trainer(name, layers, "part")
    part.mine()
    step = part.train_step

    def dies(batch):
        if part.at.step == 2:
            raise Killed
        return step(batch)

    monkeypatch.setattr(part, "train_step", dies)
    with pytest.raises(Killed):
        part.train_round()
    again = open_trainer(name, layers, "part")
    assert again.at.step == 2
    again.train_round()
    after = state(again)
    for key, value in state(whole).items():
        assert torch.equal(after[key], value), key
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert any(key.startswith("encoder.transformer.transformer.") for key in moved)
    dense = [key for key in before if key.startswith("encoder.transformer.dense.")]
    assert len(dense) >= len(ARCHITECTURES[name].dense)
    assert moved.issuperset(dense)


def test_texts_behind_another_prompt_are_refused(open_trainer, monkeypatch) -> None:
    monkeypatch.setitem(PROMPTS, "labels", "other: ")
    with pytest.raises(ConfigError, match="another prompt") as caught:
        open_trainer("bert", -1, "run")
    assert "labels" in str(caught.value) and LABEL in str(caught.value)
