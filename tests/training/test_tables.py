"""Whole trainings with the classifier's table in every type, with every state, in every place."""

import json

import pytest
import torch

from unidec.model import row_table
from unidec.training import trainer as trainer_module

TIMES = ("seconds", "texts_per_s", "tokens_per_s")
# of 40 labels: a step leaves most rows alone
SMALL = {"pool.size": 16, "optim.epochs": 2, "pool.refresh": 2}
CHOICES = [
    (dtype, state) for dtype in ("fp32", "bf16") for state in ("adam", "adagrad", "sgd", "momentum")
]


def run(trainer):
    """Train to the end: all weights and states, and the history."""
    while not trainer.finished:
        if trainer.refresh_due:
            trainer.mine()
        trainer.train_round()
    return everything(trainer)


def everything(trainer):
    rows = trainer.optimisers.row_states()
    state = {f"{table}.{name}": x for table, part in rows.items() for name, x in part.items()}
    state |= trainer.model.dense_state() | trainer.optimisers.dense_state()
    lines = (trainer.run_dir / "history.jsonl").read_text().splitlines()
    history = [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]
    return {name: x.detach().to("cpu", copy=True) for name, x in state.items()}, history


def assert_same(ours, theirs):
    assert ours[0].keys() == theirs[0].keys()
    assert [
        name for name, value in ours[0].items() if not torch.equal(value, theirs[0][name])
    ] == []
    assert ours[1] == theirs[1] != []


@pytest.mark.parametrize(("dtype", "state"), CHOICES)
def test_the_place_changes_nothing(open_trainer, dtype, state):
    values = {**SMALL, "model.clf_dtype": dtype, "optim.clf_state": state, "model.clf_bias": True}
    device = run(open_trainer("device", **values))
    for place in ("host", "disk"):
        trainer = open_trainer(place, **values, **{"run.table_place": place})
        assert trainer.model.table.placement.place == place
        assert_same(run(trainer), device)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_that_are_fetched_as_on_a_gpu_train_the_same(open_trainer, monkeypatch, dtype):
    values = {**SMALL, "model.clf_dtype": dtype, "model.clf_bias": True, "run.checkpoint_steps": 3}
    device = run(open_trainer("device", **values))

    fetched = []
    to_device = row_table.to_device
    monkeypatch.setattr(row_table, "to_device", lambda *args: fetched.append(1) or to_device(*args))
    trainer = open_trainer("host", **values, **{"run.table_place": "host"})
    trainer.model.table.is_remote = trainer.model.bias.is_remote = True
    assert_same(run(trainer), device)
    assert len(fetched) == 2 * 4 * trainer.at.step  # table and bias: weight, two moments, ids


def test_a_checkpoint_holds_what_was_on_its_way_back(open_trainer):
    values = {**SMALL, "run.table_place": "host", "pool.clf_labels": "pool"}
    trainer = open_trainer("run", **values)
    trainer.mine()
    trainer.made = trainer_module.Refresh.load(trainer.refresher.folder(0), 0)
    table = trainer.model.table
    table.is_remote = True
    trainer.model.train()
    batches = trainer.made.batches(trainer.rows, trainer.batch_size, 0, 0)
    batch = trainer.prepare(batches[0], 0)
    assert batch.clf.ids.device.type == "cpu"  # where the rows are looked up, whatever the device
    trainer.train_step(batch)
    trainer.at.step = trainer.at.epoch_step = 1
    before = table.weight.detach().clone()
    trainer.save()
    assert not torch.equal(table.weight, before)
    assert torch.equal(open_trainer("run", **values).model.table.weight, table.weight)


@pytest.mark.parametrize(
    ("dtype", "state"), [choice for choice in CHOICES if choice != ("fp32", "adam")]
)
def test_opened_again_for_each_round_it_ends_with_the_same_bits(open_trainer, dtype, state):
    values = {
        **SMALL,
        "pool.refresh": 1,
        "model.clf_dtype": dtype,
        "optim.clf_state": state,
        "model.clf_bias": True,
    }
    whole = run(open_trainer("whole", **values))
    for place in ("disk", "device", "host"):  # one that was moved between rounds, too
        trainer = open_trainer("parts", **values, **{"run.table_place": place})
        if trainer.finished:
            break
        trainer.mine()
        trainer.train_round()
    assert_same(everything(open_trainer("parts", **values)), whole)


def test_every_choice_is_another_training(open_trainer):
    """The parameters reach the table: no two end with the same rows."""
    tables = []
    for dtype, state in CHOICES:
        values = {**SMALL, "optim.epochs": 1, "model.clf_dtype": dtype, "optim.clf_state": state}
        trainer = open_trainer(f"{dtype}-{state}", **values)
        trainer.mine()
        start = trainer.model.table.weight.float().clone()
        trainer.train_round()
        tables.append(trainer.model.table.weight.detach().float())
        assert not torch.equal(tables[-1], start)
    assert all(
        not torch.equal(one, other) for at, one in enumerate(tables) for other in tables[:at]
    )


@pytest.mark.cuda
@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize(("dtype", "state"), CHOICES)
def test_on_a_gpu_the_place_changes_nothing_in_the_table(open_trainer, place, dtype, state):
    """The classifier alone on frozen vectors: nothing in its training adds in an order that can
    change.
    """
    values = {
        **SMALL,
        "device": "cuda",
        "model.heads": "clf",
        "encoder.kind": "transformer",
        "model.clf_dtype": dtype,
        "optim.clf_state": state,
        "pool.eta": 0,
        "pool.batches": "random",
    }
    device = run(open_trainer("device", **values))
    assert_same(run(open_trainer(place, **values, **{"run.table_place": place})), device)
