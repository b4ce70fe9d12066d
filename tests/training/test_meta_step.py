"""Preparing a batch and a step on torch's device "meta", in place of a GPU: nothing waits for a
copy.
"""

import contextlib
from dataclasses import replace

import pytest
import torch
from helpers import golden

from unidec.config import recipe_names
from unidec.training.round_refresh import Refresh
from unidec.training.trainer import Trainer, TrainingData


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Fused attention, copies as a GPU's, and nothing that "meta" does not have: random states,
    autocast.
    """
    monkeypatch.setattr(
        "unidec.model.encoder.transformer_options", lambda _: {"attn_implementation": "sdpa"}
    )
    copying = (
        "model.pairs",
        "model.row_table",
        "model.encoder_inputs",
        "model.unidec",
        "training.batches",
        "training.gradient_cache",
        "methods.mixup",
        "methods.residual_rows",
    )
    for module in copying:
        monkeypatch.setattr(
            f"unidec.{module}.to_device",
            lambda x, device: torch.as_tensor(x).to(device, non_blocking=True),
        )
    monkeypatch.setattr("unidec.training.gradient_cache.random_state", lambda device: None)
    monkeypatch.setattr(
        "unidec.training.gradient_cache.restore_random_state", lambda state, device: None
    )
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())


def moved(trainer):
    """The trainer with its model on "meta"; AdamW, which is torch's, does nothing there."""
    trainer.encoding.device = torch.device("meta")
    trainer.checks.each_step = False
    trainer.batches.device = trainer.device
    trainer.batches.build = replace(trainer.batches.build, device=trainer.device)
    places = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    trainer.model.to("meta")  # makes new parameters
    moved_ones = dict(trainer.model.named_parameters())
    optimisers = trainer.optimisers
    optimisers.dense = [moved_ones[places[id(parameter)]] for parameter in optimisers.dense]
    trainer.checks.failed = trainer.checks.failed.to("meta")
    trainer.optimisers.adamw.step = lambda: None
    return trainer


@pytest.mark.parametrize(
    ("place", "clip_norm"),
    [
        ("device", 1.0),
        ("host", 0.0),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("device", 0.0), ("host", 1.0))),
    ],
)
@pytest.mark.parametrize("name", recipe_names())
def test_no_step_waits_for_a_copy(
    name,
    place,
    clip_norm,
    benchmark_module,
    tiny_dataset,
    tiny_tokens,
    tiny_bert,
    tmp_path,
    as_on_a_gpu,
):
    values = {"optim.clip_norm": clip_norm}
    params = golden.small(name, tiny_bert, tmp_path, **values)
    if place == "host":
        if params.pool.clf_labels == "all" or params.model.heads == "de":
            pytest.skip("this recipe requires run.table_place: device")
        params = golden.small(name, tiny_bert, tmp_path, **values, **{"run.table_place": "host"})
    graph = golden.label_graph(params, tiny_dataset) if params.reads_label_graph else None
    data = TrainingData(tiny_dataset, *tiny_tokens.values(), graph)
    trainer = Trainer(params.training, data, tmp_path / "run", tmp_path / "cache")
    trainer.mine()
    trainer.made = Refresh.load(trainer.refresher.folder(0), 0)
    trainer.model.train()
    rows = trainer.made.batches(trainer.rows, trainer.batch_size, 0, 0)
    trainer = moved(trainer)
    for trainer.at.step in (1, 2):
        with benchmark_module("no_waiting").NoWaiting():
            batch = trainer.prepare(rows[trainer.at.step], trainer.at.step)
            assert trainer.train_step(batch) is None
    assert batch.clf.ids is None or batch.clf.ids.device.type == (
        "cpu" if place == "host" else "meta"
    )
    assert trainer.model.table is None or (trainer.model.table._pending is not None) == (
        place == "host"
    )
