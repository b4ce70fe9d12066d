"""A step on torch's device "meta", which stands for a GPU: no copy between host and device is waited for."""

import contextlib
import dataclasses

import pytest
import torch

from unidec.config import recipe_names
from unidec.training.refresh import Refresh
from unidec.training.trainer import Trainer, TrainingData


def to_meta(given):
    """The same with every tensor on "meta", within tuples and dataclasses too."""
    if isinstance(given, torch.Tensor):
        return given.to("meta")
    if isinstance(given, tuple):
        return tuple(to_meta(each) for each in given)
    if dataclasses.is_dataclass(given):
        return dataclasses.replace(given, **{name: to_meta(value) for name, value in vars(given).items()})
    return given


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Fused attention, copies as a GPU's, and nothing that "meta" does not have: random states, autocast."""
    monkeypatch.setattr("unidec.model.encoder.transformer_options", lambda _: {"attn_implementation": "sdpa"})
    for module in ("unidec.model.pairs", "unidec.model.row_table"):
        monkeypatch.setattr(f"{module}.to_device", lambda x, device: torch.as_tensor(x).to(device, non_blocking=True))
    monkeypatch.setattr("unidec.training.gradient_cache.random_state", lambda device: None)
    monkeypatch.setattr("unidec.training.gradient_cache.restore_random_state", lambda state, device: None)
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())


def moved(trainer):
    """The trainer with its model on "meta"; AdamW, which is torch's, does nothing there."""
    trainer.device, trainer.checks_each_step = torch.device("meta"), False
    trainer.model.to("meta")
    trainer._failed = trainer._failed.to("meta")
    for row in trainer.optimisers.row.values():
        if hasattr(row, "_count"):
            row._count = row._count.to("meta")
    trainer.optimisers.adamw.step = lambda: None
    return trainer


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("name", recipe_names())
def test_no_step_waits_for_a_copy(
    name, place, clip_norm, helper, benchmark_module, tiny_dataset, tiny_tokens, tiny_bert, tmp_path, as_on_a_gpu
):
    golden, values = helper("training/golden"), {"optim.clip_norm": clip_norm}
    params = golden.small(name, tiny_bert, tmp_path, **values)
    if place == "host":
        if params.pool.clf_labels == "all" or params.model.heads == "de":
            pytest.skip("such a table is on the device")
        params = golden.small(name, tiny_bert, tmp_path, **values, **{"run.table_place": "host"})
    graph = golden.label_graph(params, tiny_dataset) if params.pool.gandalf else None
    data = TrainingData(tiny_dataset, *tiny_tokens.values(), graph)
    trainer = Trainer(params.training, data, tmp_path / "run", tmp_path / "cache")
    trainer.refresh()
    trainer.made = Refresh.load(trainer._refresh_folder(0), 0)
    trainer.model.train()
    batches = [trainer.prepare(rows, 0) for rows in trainer.made.batches(trainer.rows, trainer.batch_size, 0, 0)[:2]]
    trainer = moved(trainer)
    for trainer.step, batch in enumerate(batches, start=1):
        on_meta = to_meta(batch)
        if place == "host":
            on_meta = dataclasses.replace(on_meta, clf_labels=batch.clf_labels)
        with benchmark_module("no_waiting").NoWaiting():
            assert trainer.train_step(on_meta) is None
    assert trainer.model.table is None or (trainer.model.table._landing is not None) == (place == "host")
