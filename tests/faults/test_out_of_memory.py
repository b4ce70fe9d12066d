"""Fault 8: out of GPU memory: sizes and a smaller setting are named, nothing has changed, the
checkpoint resumes. A GPU that fails in a step leaves the last checkpoint, too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unidec.errors import TrainingError


def runs_out(trainer: Any, at_step: int, patch: pytest.MonkeyPatch, place: str) -> None:
    """From a step on there is no memory, in the encoder's forward pass, in backward or in the
    update.
    """
    step = trainer.train_step

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def short(batch: Any) -> Any:
        if trainer.at.step == at_step:
            if place == "forward":
                patch.setattr(trainer.model.encoder, "forward", full)
            elif place == "backward":
                patch.setattr(torch.Tensor, "backward", full)
            else:
                patch.setattr(trainer.objective, "losses", full)
        return step(batch)

    patch.setattr(trainer, "train_step", short)


@pytest.mark.parametrize("place", ["forward", "losses", "backward"])
def test_sizes_and_a_smaller_setting(
    open_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    overrides = {"run.checkpoint_steps": 2, "model.dropout": 0.2}
    trainer = open_trainer("run", **overrides)
    trainer.mine()
    with monkeypatch.context() as patch:
        runs_out(trainer, 3, patch, place)
        with pytest.raises(TrainingError) as caught:
            trainer.train_round()
    text = str(caught.value)
    assert "memory" in text and "step 3" in text
    assert re.search(r"\d+ queries, \d+ pool labels, up to 16 tokens", text)
    assert "pool.batch_size: 6" in text and "fix:" in text
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)

    resumed = open_trainer("run", **overrides)
    assert resumed.at.step == 2
    resumed.train_round()
    whole = open_trainer("whole", **overrides)
    whole.mine()
    whole.train_round()
    ours = resumed.model.state_dict()
    theirs = whole.model.state_dict()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_a_lost_card_leaves_the_last_checkpoint(
    open_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = {"run.checkpoint_steps": 2, "model.dropout": 0.2}
    trainer = open_trainer("run", **overrides)
    trainer.mine()
    step = trainer.train_step

    def lost(batch: Any) -> Any:
        if trainer.at.step == 3:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with ...")
        return step(batch)

    monkeypatch.setattr(trainer, "train_step", lost)
    with pytest.raises(TrainingError, match="the GPU failed") as caught:
        trainer.train_round()
    text = str(caught.value)
    assert "unspecified launch failure" in text and "Compile with" not in text
    assert "resumes from its last checkpoint" in text
    resumed = open_trainer("run", **overrides)
    assert resumed.at.step == 2
    assert resumed.train_round().step > 3


@pytest.mark.cuda
def test_a_real_one(
    tiny_dataset: Any, tiny_tokens: Any, tiny_params: Callable[..., Any], tmp_path: Path
) -> None:
    """What this process may take is limited to what it holds after the first steps."""
    from unidec.training.trainer import Trainer, TrainingData

    params = tiny_params(
        **{
            "device": "cuda",
            "encoder.kind": "transformer",
            "encoder.trainable_layers": -1,
            "run.checkpoint_steps": 2,
        }
    )

    def open_run() -> Trainer:
        return Trainer(
            params.training,
            TrainingData(tiny_dataset, *tiny_tokens.values()),
            tmp_path / "run",
            tmp_path / "cache",
        )

    trainer = open_run()
    trainer.mine()
    step = trainer.train_step
    ballast = []

    def crowded(batch: Any) -> Any:
        if trainer.at.step == 3:
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
            # what is reserved and free, to the last small block
            for size in (1 << 20, 1 << 14, 1 << 9):
                with contextlib.suppress(torch.OutOfMemoryError):
                    while True:
                        ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        return step(batch)

    trainer.train_step = crowded  # type: ignore[method-assign]
    try:
        with pytest.raises(TrainingError, match="memory is full"):
            trainer.train_round()
    finally:
        ballast.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    resumed = open_run()
    assert resumed.at.step == 2
    assert resumed.train_round().epoch == 2
