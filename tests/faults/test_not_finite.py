"""Fault 7: a loss or gradient that is not finite: the step changes nothing and is named, the run
continues.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unidec.errors import TrainingError
from unidec.training.checkpoint import load_checkpoint

BAD_STEP = 6


def everything(trainer: Any) -> dict[str, torch.Tensor]:
    rows = trainer.optimisers.row_states()
    tables = {f"{table}/{name}": x for table, part in rows.items() for name, x in part.items()}
    state = {**trainer.model.dense_state(), **trainer.optimisers.dense_state(), **tables}
    return {name: x.detach().clone() for name, x in state.items()}


def spoil_loss(trainer: Any, value: float) -> None:
    losses = trainer.objective.losses
    trainer.objective.losses = lambda *given: {
        name: loss * value for name, loss in losses(*given).items()
    }


def spoil_gradient(trainer: Any, value: float) -> None:
    """The losses stay finite; one entry of one gradient does not."""
    gradients = trainer.optimisers.gradients

    def spoilt() -> list[torch.Tensor]:
        found = gradients()
        found[0].view(-1)[0] = value
        return found

    trainer.optimisers.gradients = spoilt


@pytest.mark.parametrize(
    "late",
    [
        {},
        {"optim.clf_state": "adagrad"},
        {"optim.clf_state": "sgd"},
        {"optim.clf_state": "adamw", "optim.clf_decay": 0.1},
        {"optim.clf_state": "momentum", "optim.clf_decay": 0.1},
        {"model.clf_dtype": "bf16", "optim.clip_norm": 0.0},
        None,
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        pytest.param(-float("inf"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("spoil", [spoil_loss, spoil_gradient])
def test_the_step_changes_nothing_and_the_run_goes_on(
    open_trainer: Callable[..., Any],
    spoil: Callable[..., None],
    value: float,
    late: dict[str, Any] | None,
) -> None:
    """`late`: as on a GPU, whose host sees it at the next checkpoint, two steps later; the device
    keeps the weights.
    """
    overrides = {"run.checkpoint_steps": 4, "model.dropout": 0.2} | (late or {})
    trainer = open_trainer("run", **overrides)
    trainer.checks.each_step = late is None
    trainer.mine()
    step = trainer.train_step
    before = {}
    queries = []

    def spoilt_at(batch: Any) -> Any:
        if trainer.at.step == BAD_STEP:
            before.update(everything(trainer))
            queries.extend(trainer.dataset.query_uids(batch.pool.rows_B[:5]))
            spoil(trainer, value)
        assert trainer.at.step <= BAD_STEP + (0 if late is None else 1)
        return step(batch)

    trainer.train_step = spoilt_at
    with pytest.raises(TrainingError, match="not finite") as caught:
        trainer.train_round()
    text = str(caught.value)
    assert (
        f"epoch 1, step {BAD_STEP}" in text
        and all(uid in text for uid in queries)
        and len(queries) == 5
    )
    assert "loss_de" in text and "loss_clf" in text and "fix:" in text
    after = everything(trainer)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []

    loaded, _ = load_checkpoint(trainer.run_dir)
    assert loaded is not None and loaded.state["step"] == 4
    resumed = open_trainer("run", **overrides)
    resumed.train_round()
    whole = open_trainer("whole", **overrides)
    whole.mine()
    whole.train_round()
    ours = everything(resumed)
    theirs = everything(whole)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
