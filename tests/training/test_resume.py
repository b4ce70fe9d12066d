"""A run cut off anywhere ends with the bits of one that never was: weights, moments, history."""

import json
import signal
from itertools import pairwise

import pytest
import torch
from helpers.trainings import history, train_to_the_end

from unidec.errors import ArtifactError, ConfigError
from unidec.training import trainer as module
from unidec.training.stopping import METRIC, ROUNDS

pytestmark = pytest.mark.usefixtures("every_step_is_logged")


def everything(trainer):
    rows = trainer.optimisers.row_states()
    state = {f"{table}.{name}": x for table, part in rows.items() for name, x in part.items()}
    return {**trainer.model.state_dict(), **trainer.optimisers.dense_state(), **state}


def assert_same(ours, theirs):
    one = everything(ours)
    other = everything(theirs)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert history(ours) == history(theirs)
    assert len(history(ours)) == theirs.at.step
    assert ours.at.step == theirs.at.step


class Killed(BaseException):
    """Stands for a SIGKILL: nothing of ours catches it."""


def kill_at(trainer, monkeypatch, steps):
    step = trainer.train_step

    def dies(batch):
        if trainer.at.step in steps:
            raise Killed
        return step(batch)

    monkeypatch.setattr(trainer, "train_step", dies)


DROPOUTS = {"model.dropout": 0.2, "encoder.dropout": 0.1, "encoder.bag_dropout": 0.2}
SYSTEMS = {
    "clustered, pool": {},
    "clustered, all labels": {"pool.clf_labels": "all", "model.clf_bias": True},
    "random, pool": {"pool.batches": "random"},
    "random, pol": {"pool.batches": "random", "loss.reduction": "pol"},
    "depsl": {"model.heads": "de"},
    "classifier": {"model.heads": "clf"},
    "beside": {"encoder.kind": "both", "model.learn_temperature": True, "encoder.residual": True},
    "one layer": {
        "encoder.kind": "transformer",
        "encoder.trainable_layers": 1,
        "encoder.bag_dropout": 0.0,
    },
    "bf16": {"encoder.kind": "both", "encoder.trainable_layers": 1, "optim.precision": "bf16"},
    "gandalf": {"pool.gandalf": True},
    "label tree": {"model.heads": "clf", "model.levels": [8, 3], "pool.shortlist": 2},
    "all labels' texts, cached gradients": {
        "pool.de_labels": "all",
        "optim.encode_chunk": 9,
        "encoder.bag_dropout": 0.3,
        "loss.weights": "propensity",
    },
    "gandalf, all labels": {"pool.gandalf": True, "pool.clf_labels": "all"},
    "adagrad": {"optim.clf_state": "adagrad", "model.clf_bias": True},
    "bf16 rows without state": {
        "optim.clf_state": "sgd",
        "model.clf_dtype": "bf16",
        "optim.lr_clf": 0.1,
    },
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_killed_in_a_round_it_goes_on_in_it(open_trainer, monkeypatch, system):
    """Cut off in both rounds, between checkpoints every three steps, once in the middle of an
    epoch's last step.
    """
    overrides = DROPOUTS | SYSTEMS[system]
    whole = train_to_the_end(open_trainer("whole", **overrides))
    cuts = [2, 7, whole.steps_per_epoch * 2 + 4, whole.steps_per_epoch * 4 - 1]
    for cut in cuts:
        part = open_trainer("parts", **overrides, **{"run.checkpoint_steps": 3})
        kill_at(part, monkeypatch, {cut})
        with pytest.raises(Killed):
            train_to_the_end(part)
        resumed = open_trainer("parts", **overrides, **{"run.checkpoint_steps": 3})
        assert cut - 3 < resumed.at.step <= cut, "no more than an interval is lost"
        torch.rand(17)  # whatever else the process draws
    assert_same(
        train_to_the_end(open_trainer("parts", **overrides, **{"run.checkpoint_steps": 3})), whole
    )


def test_killed_at_every_step(open_trainer, monkeypatch):
    whole = train_to_the_end(open_trainer("whole", **DROPOUTS))
    for cut in range(whole.at.step):
        part = open_trainer("parts", **DROPOUTS, **{"run.checkpoint_steps": 1})
        assert part.at.step == cut
        kill_at(part, monkeypatch, {cut + 1})
        if cut + 1 < whole.at.step:
            with pytest.raises(Killed):
                train_to_the_end(part)
    assert_same(train_to_the_end(part), whole)


def test_opened_again_for_each_refresh_and_round(open_trainer):
    whole = train_to_the_end(open_trainer("whole", **DROPOUTS))
    for _ in range(2):
        open_trainer("parts", **DROPOUTS).mine()
        open_trainer("parts", **DROPOUTS).train_round()
    parts = open_trainer("parts", **DROPOUTS)
    assert (parts.at.epoch, parts.at.epoch_step, parts.finished) == (4, 0, True)
    assert_same(parts, whole)


def test_without_a_checkpoint_it_begins_again(open_trainer, monkeypatch):
    whole = train_to_the_end(open_trainer("whole"))
    part = open_trainer("parts")  # by the clock only: none within a second
    kill_at(part, monkeypatch, {3})
    with pytest.raises(Killed):
        train_to_the_end(part)
    steps = [line["step"] for line in history(part)]
    assert steps == [0, 1, 2]
    with open(part.run_dir / "history.jsonl", "a") as file:
        file.write('{"step": 3, "lo')  # a line cut off
    resumed = open_trainer("parts")
    assert resumed.at.step == 0 and not resumed.refresh_due  # what it begins with is made already
    assert_same(train_to_the_end(resumed), whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_and_saves(open_trainer, monkeypatch, number):
    """A handler of the caller's own still gets it, after the checkpoint."""
    whole = train_to_the_end(open_trainer("whole", **DROPOUTS))
    part = open_trainer("parts", **DROPOUTS)
    step = part.train_step
    seen = []

    def signalled(batch):
        logs = step(batch)
        if part.at.step == 5:
            signal.raise_signal(number)
        return logs

    def handler(got, _frame):
        seen.append((got, part.at.step))
        raise Killed

    monkeypatch.setattr(part, "train_step", signalled)
    before = signal.signal(number, handler)
    try:
        with pytest.raises(Killed):
            train_to_the_end(part)
    finally:
        signal.signal(number, before)
    assert seen == [(number, 6)]
    resumed = open_trainer("parts", **DROPOUTS)
    assert resumed.at.epoch == 1
    assert resumed.at.epoch_step == 2
    assert resumed.at.step == 6
    assert_same(train_to_the_end(resumed), whole)


def test_a_damaged_newest_checkpoint_costs_an_interval(open_trainer, capsys):
    whole = train_to_the_end(open_trainer("whole", **{"run.checkpoint_steps": 3}))
    newest = sorted((whole.run_dir / "checkpoints").glob("step-*"))[-1]
    path = newest / "dense.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    before = {name: value.clone() for name, value in everything(whole).items()}
    lines = history(whole)
    resumed = open_trainer("whole", **{"run.checkpoint_steps": 3})
    assert newest.name in capsys.readouterr().out
    assert whole.at.step - 3 <= resumed.at.step < whole.at.step
    assert history(resumed) == lines[: resumed.at.step]
    train_to_the_end(resumed)
    assert all(torch.equal(before[name], value) for name, value in everything(resumed).items())


def test_a_checkpoint_needs_the_refresh_of_its_round(open_trainer, monkeypatch, capsys):
    """One inside a round is worth nothing without the clusters it was cut from: the one before the
    round is used.
    """
    whole = train_to_the_end(open_trainer("whole"))
    part = open_trainer("parts", **{"run.checkpoint_steps": 3})
    kill_at(part, monkeypatch, {13})
    with pytest.raises(Killed):
        train_to_the_end(part)
    array = part.run_dir / "refresh" / "epoch-00002" / "order.npy"
    content = bytearray(array.read_bytes())
    content[-3] ^= 1
    array.write_bytes(content)
    resumed = open_trainer("parts", **{"run.checkpoint_steps": 3})
    assert resumed.at.step == 8 and resumed.refresh_due
    assert "refresh" in capsys.readouterr().out
    assert_same(train_to_the_end(resumed), whole)


def test_what_differs_is_refused_by_name(open_trainer):
    train_to_the_end(open_trainer())
    with pytest.raises(ConfigError, match=r"optim\.lr_clf") as caught:
        open_trainer(**{"optim.lr_clf": 0.5, "pool.beta": 1})
    assert (
        "pool.beta" in str(caught.value)
        and "0.5" in str(caught.value)
        and "0.01" in str(caught.value)
    )
    open_trainer(**{"run.checkpoint_steps": 7})  # changes nothing that is learnt


def test_what_is_accepted_must_still_fit(
    open_trainer, tiny_dataset, tiny_tokens, tiny_params, tmp_path
):
    trainer = train_to_the_end(open_trainer())
    params = tiny_params(**{"model.dim": 12})
    with pytest.raises(ArtifactError, match="does not fit the model"):
        module.Trainer(
            params.training,
            module.TrainingData(tiny_dataset, *tiny_tokens.values()),
            trainer.run_dir,
            tmp_path / "cache",
            accept=["model.dim"],
        )
    params = tiny_params(**{"optim.lr_clf": 0.5})
    again = module.Trainer(
        params.training,
        module.TrainingData(tiny_dataset, *tiny_tokens.values()),
        trainer.run_dir,
        tmp_path / "cache",
        accept=["optim.lr_clf"],
    )
    assert again.finished


# -- with patience: rounds.jsonl decides when it ends
# -----------------------------------------------------------------

# of the epoch; with patience 2 the last round is epochs 9 and 10
CURVE = {2: 5.0, 4: 7.0, 6: 6.0, 8: 6.5, 10: 9.0}
PATIENT = DROPOUTS | {"optim.patience": 2, "optim.epochs": 40, "run.checkpoint_steps": 3}


def run_with_patience(trainer, curve=CURVE):
    """Train as the stages do: after each round a line of rounds.jsonl, where there is none yet."""
    while True:
        file = trainer.run_dir / ROUNDS
        lines = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        )
        if (
            trainer.at.epoch
            and trainer.at.epoch_step == 0
            and trainer.at.epoch not in [line["epoch"] for line in lines]
        ):
            lines.append(
                {
                    "epoch": trainer.at.epoch,
                    "validation": {METRIC: curve[trainer.at.epoch]},
                    "work_seconds": trainer.at.work_seconds,
                }
            )
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if trainer.finished:
            return trainer
        if trainer.refresh_due:
            trainer.mine()
        trainer.train_round()


@pytest.mark.parametrize("cuts", [[1, 9, 18], [31, 33, 35, 37], [39]])
def test_with_patience_it_ends_early_and_killed_anywhere_with_the_same_bits(
    open_trainer, monkeypatch, cuts
):
    whole = run_with_patience(open_trainer("whole", **PATIENT))
    assert whole.at.epoch == 10
    assert whole.at.step == 10 * whole.steps_per_epoch
    assert whole.finished
    rates = [
        json.loads(line)["lr_heads"]
        for line in (whole.run_dir / "history.jsonl").read_text().splitlines()
    ]
    last = 8 * whole.steps_per_epoch
    assert len(set(rates[whole.steps_per_epoch : last + 1])) == 1
    assert all(a > b for a, b in pairwise(rates[last:]))
    for cut in cuts:
        part = open_trainer("parts", **PATIENT)
        kill_at(part, monkeypatch, {cut})
        with pytest.raises(Killed):
            run_with_patience(part)
    parts = run_with_patience(open_trainer("parts", **PATIENT))
    assert_same(parts, whole)
    assert 0 < open_trainer("whole", **PATIENT).at.work_seconds == whole.at.work_seconds


def test_until_the_last_round_it_is_the_training_that_ends_later(open_trainer):
    short = run_with_patience(open_trainer("short", **PATIENT))
    longer = run_with_patience(
        open_trainer("longer", **PATIENT), CURVE | {8: 8.0, 10: 1.0, 12: 1.0, 14: 0.0}
    )
    assert longer.at.epoch == 14
    last = 8 * short.steps_per_epoch
    assert history(short)[: last + 1] == history(longer)[: last + 1]
    assert history(short)[last + 2] != history(longer)[last + 2]
