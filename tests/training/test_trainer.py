"""Training on the tiny set: the loss of a step against loops, learning, resuming bit for bit,
faults in a step.
"""

import math
import shutil
import warnings

import numpy as np
import pytest
import torch
from helpers.trainings import history, weights

from unidec.errors import ConfigError, TrainingError
from unidec.training import trainer as module
from unidec.training.precision import autocast_type, choose_device
from unidec.training.round_refresh import Refresh

pytestmark = pytest.mark.usefixtures("every_step_is_logged")


def train(trainer, rounds=1):
    reports = []
    for _ in range(rounds):
        trainer.mine()
        reports.append(trainer.train_round())
    return reports


def moments(trainer):
    rows = trainer.optimisers.row_states()
    state = trainer.optimisers.dense_state() | {
        f"{t}.{n}": x for t, part in rows.items() for n, x in part.items()
    }
    return {name: value.clone() for name, value in state.items()}


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [
        name
        for name in ours
        if not torch.equal(ours[name].nan_to_num(7.0), theirs[name].nan_to_num(7.0))
    ] == []


SYSTEMS = {
    "unidec": {},
    "depsl": {"model.heads": "de"},
    "classifier": {"model.heads": "clf", "pool.eta": 0},
    "classifier, mined": {"model.heads": "clf", "pool.eta": 2, "model.clf_bias": True},
    "classifier, all labels": {"model.heads": "clf", "pool.clf_labels": "all"},
    "unidec, all labels": {"pool.clf_labels": "all", "model.clf_bias": True},
    "random batches": {
        "pool.batches": "random",
        "pool.eta": 0,
        "loss.reduction": "pol",
        "pool.beta": 1,
    },
    "supcon, temperatures": {
        "loss.de": "supcon",
        "loss.clf": "supcon",
        "model.learn_temperature": True,
    },
    "triplet and bce": {
        "loss.de": "triplet",
        "loss.clf": "bce",
        "loss.clf_bce": 0.0,
        "loss.reduction": "psl-sum",
    },
    "beside": {"encoder.kind": "both", "encoder.residual": True},
    "one layer": {"encoder.kind": "transformer", "encoder.trainable_layers": 1, "optim.epochs": 2},
    "gandalf": {"pool.gandalf": True, "pool.clf_labels": "all"},
    "all layers": {
        "encoder.kind": "transformer",
        "encoder.trainable_layers": -1,
        "optim.epochs": 2,
    },
    "dexml, all labels": {
        "model.heads": "de",
        "pool.de_labels": "all",
        "loss.reduction": "pol",
        "pool.beta": 1,
        "optim.encode_chunk": 9,
    },
    "soft top-k": {
        "model.heads": "de",
        "pool.de_labels": "all",
        "loss.de": "softtopk",
        "loss.de_forward": 1.0,
    },
    "hardest": {
        "loss.de": "triplet",
        "loss.triplet_negatives": "hardest",
        "loss.clf": "hinge",
        "loss.margin": 0.5,
    },
    "renee": {
        "model.heads": "clf",
        "pool.clf_labels": "all",
        "loss.clf": "bce",
        "loss.clf_bce": 0.0,
        "pool.gandalf": True,
    },
    "residual": {
        "model.heads": "clf",
        "model.clf_residual": True,
        "loss.clf": "bce",
        "loss.clf_bce": 0.0,
    },
    "for the tail": {
        "loss.weights": "propensity",
        "pool.positives": "tail",
        "pool.de_labels": "all",
    },
}


# -- a step
# --------------------------------------------------------------------------------------------------


def slow_ds(logit, positive, ignored):
    """Decoupled softmax, PSL, rows to columns: one pair after the other."""
    rows = []
    for i in range(len(logit)):
        negatives = logit[i][~(positive[i] | ignored[i])]
        one = [
            math.log(math.exp(x) + sum(map(math.exp, negatives))) - x
            for x, p in zip(logit[i], positive[i])
            if p
        ]
        if one:
            rows.append(sum(one) / len(one))
    return sum(rows) / len(rows)


def slow_bce(logit, positive, ignored, normalise):
    total = 0.0
    entries = 0
    for row, is_positive, is_ignored in zip(logit, positive, ignored):
        if is_positive.any():
            pairs = [(x, p) for x, p, skip in zip(row, is_positive, is_ignored) if not skip]
            total += sum(
                math.log1p(math.exp(-x)) if p else math.log1p(math.exp(x)) for x, p in pairs
            )
            entries += len(pairs)
    return total / (positive.any(1).sum() if normalise == "rows" else entries)


@pytest.mark.parametrize(
    ("everything", "normalise"),
    [
        (False, "rows"),
        (True, "entries"),
    ],
)
def test_the_losses_of_a_step_equal_loops(open_trainer, tiny_dataset, everything, normalise):
    """Both heads, both directions, weights, temperature, filter pairs and bias, from texts to the
    two figures.
    """
    trainer = open_trainer(
        **{
            "loss.balance": 0.3,
            "loss.de_forward": 0.7,
            "loss.clf_forward": 0.2,
            "loss.clf_bce": 0.25,
            "model.clf_bias": True,
            "model.dropout": 0.0,
            "pool.clf_labels": "all" if everything else "pool",
            "loss.bce_normalise": normalise,
        }
    )
    model = trainer.model
    torch.nn.init.normal_(model.bias.weight, std=0.3)
    trainer.mine()
    trainer.made = Refresh.load(trainer.run_dir / "refresh" / "epoch-00000", 0)
    relevance = tiny_dataset.relevance.toarray() > 0
    filtered = tiny_dataset.filter_pairs.toarray()
    rows = np.concatenate(
        [np.flatnonzero((filtered & ~relevance).any(1) & (tiny_dataset.split_N == 0)), [0, 1, 2]]
    )
    batch = trainer.prepare(rows, 0)
    losses = trainer.objective.losses(model.encoder(batch.texts), batch, 0)
    model.eval()

    def dense(head, columns):
        de, clf = model.encode_queries(trainer.encoding.tokens["queries"], rows)
        label_de, (table, bias) = (
            model.encode_labels(trainer.encoding.tokens["labels"]),
            model.classifier_table(),
        )
        logit = de @ label_de.T if head == "de" else clf @ table.T + bias
        positive = relevance[rows][:, columns]
        return (
            (logit[:, columns] / 0.1).astype(np.float64),
            positive,
            filtered[rows][:, columns] & ~positive,
        )

    pool = batch.pool.pool_S
    every = np.arange(tiny_dataset.num_labels)
    de = dense("de", pool)
    clf = dense("clf", every if everything else pool)
    assert de[2].any() and len(pool) < len(every)  # a filter pair lies in the pool
    both = [slow_ds(*pairs) for pairs in (de, [a.T for a in de], clf, [a.T for a in clf])]
    expected_de = 0.3 * (0.7 * both[0] + 0.3 * both[1])
    expected_clf = 0.7 * (0.2 * both[2] + 0.8 * both[3] + 0.25 * slow_bce(*clf, normalise))
    assert float(losses["loss_de"].detach()) == pytest.approx(expected_de, rel=1e-4)
    assert float(losses["loss_clf"].detach()) == pytest.approx(expected_clf, rel=1e-4)


def test_a_step_trains_the_pools_rows_and_no_other(open_trainer):
    trainer = open_trainer(**{"encoder.kind": "both", "pool.eta": 0, "pool.beta": 1})
    trainer.mine()
    trainer.made = Refresh.load(trainer.run_dir / "refresh" / "epoch-00000", 0)
    batch = trainer.prepare(trainer.rows[:6], 0)
    before = weights(trainer)
    trainer.train_step(batch)
    after = weights(trainer)
    moved = (before["table.weight"] != after["table.weight"]).any(1).nonzero().flatten().tolist()
    assert moved == batch.pool.pool_S.tolist()
    moved = (before["encoder.bag.embedding.weight"] != after["encoder.bag.embedding.weight"]).any(1)
    assert set(moved.nonzero().flatten().tolist()) <= set(batch.texts.unique_U.tolist())
    assert moved.sum() > 10
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any(name.startswith("encoder.transformer") for name in changed)
    assert {"head_de.0.weight", "head_clf.0.bias", "encoder.bag.log_weight.weight"} <= changed
    assert "log_scale" not in changed


# -- a run
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_learns(open_trainer, tiny_dataset, system):
    trainer = open_trainer(**SYSTEMS[system])
    epochs = trainer.settings.optim.epochs
    reports = train(trainer, epochs // 2)
    expected = [False] * (epochs // 2 - 1) + [True]
    assert [report.finished for report in reports] == expected
    lines = history(trainer)
    # 43 queries, 40 label texts
    assert trainer.steps_per_epoch == (8 if trainer.settings.pool.gandalf else 4)
    steps = [line["step"] for line in lines]
    assert steps == list(range(trainer.steps_per_epoch * epochs))
    losses = [line["loss"] for line in lines]
    assert np.mean(losses[-4:]) < 0.97 * np.mean(losses[:4])
    heads = trainer.settings.model.heads
    for line in lines:
        parts = [line[key] for key in ("loss_de", "loss_clf") if key in line]
        assert len(parts) == (2 if heads == "both" else 1)
        assert line["loss"] == pytest.approx(sum(parts))
        assert 0 < line["pool_size"] <= tiny_dataset.num_labels
        assert 1 <= line["positives_per_query"] <= tiny_dataset.num_labels
        assert line["grad_norm"] > 0
        assert math.isfinite(line["grad_norm"])
    assert lines[3]["epoch"] == 3 / trainer.steps_per_epoch


def test_logged_figures_are_those_of_the_batch(open_trainer):
    trainer = open_trainer(
        **{"optim.lr_clf": 0.02, "optim.lr_heads": 0.03, "optim.lr_encoder": 0.04}
    )
    trainer.mine()
    trainer.made = Refresh.load(trainer.run_dir / "refresh" / "epoch-00000", 0)
    batch = trainer.prepare(trainer.rows[:9], 0)
    figures = trainer.train_step(batch)
    positives = sum(
        set(batch.pool.pool_S.tolist()) >= {label}
        for row in trainer.rows[:9]
        for label in trainer.dataset.relevance[row].indices.tolist()
    )
    assert figures["pool_size"] == len(batch.pool.pool_S)
    assert figures["positives_per_query"] == pytest.approx(positives / 9)
    quarter = 1 / trainer.optimisers.warmup
    expected = (0.02 * quarter, 0.03 * quarter, 0.04 * quarter)
    assert (figures["lr_clf"], figures["lr_heads"], figures["lr_encoder"]) == pytest.approx(
        expected
    )
    assert figures["texts_per_s"] > 0
    assert figures["tokens_per_s"] > figures["texts_per_s"]
    monkeyed = pytest.MonkeyPatch()
    with monkeyed.context() as patch:
        patch.setattr(module, "LOG_EVERY", 10)
        trainer.at.step = 3
        assert trainer.train_step(trainer.prepare(trainer.rows[:9], 0)) is None


def test_another_seed_is_another_training(open_trainer):
    runs = []
    for name, seed in (
        ("a", 1),
        ("b", 2),
        ("c", 1),
    ):
        runs.append(open_trainer(name, seed=seed))
        train(runs[-1])
    assert history(runs[0]) == history(runs[2]) != history(runs[1])
    assert same(weights(runs[0]), weights(runs[2]))


def test_a_round_needs_the_refresh_of_its_epoch(open_trainer):
    trainer = open_trainer()
    with pytest.raises(TrainingError, match="run the refresh first"):
        trainer.train_round()
    train(trainer)
    with pytest.raises(TrainingError, match="refresh after epoch 2"):
        trainer.train_round()
    shutil.rmtree(trainer.run_dir / "refresh")
    with pytest.raises(TrainingError, match="run the refresh first"):
        trainer.train_round()


@pytest.mark.parametrize(
    ("overrides", "clusters", "mined"),
    [
        ({}, True, True),
        ({"pool.eta": 0}, True, False),
        ({"pool.batches": "random"}, False, True),
        ({"pool.batches": "random", "pool.eta": 0}, False, False),
        ({"model.heads": "clf", "pool.clf_labels": "all"}, True, False),
    ],
)
def test_a_refresh_makes_what_is_needed(open_trainer, tiny_dataset, overrides, clusters, mined):
    trainer = open_trainer(**overrides)
    report = trainer.mine()
    made = Refresh.load(trainer.run_dir / "refresh" / "epoch-00000", 0)
    assert (made.order is not None) == clusters
    assert (made.negatives is not None) == mined
    if clusters:
        assert sorted(made.order) == trainer.rows.tolist()
        assert report["clusters"] == trainer.steps_per_epoch == 4
        assert np.diff(made.offsets).max() <= 12
    if mined:
        assert made.negatives.shape == (tiny_dataset.num_queries, 4)  # eta x T
        banned = (tiny_dataset.relevance.toarray() > 0) | tiny_dataset.filter_pairs.toarray()
        for row in range(tiny_dataset.num_queries):
            labels = made.negatives[row][made.negatives[row] >= 0]
            assert not banned[row, labels].any()
            assert len(labels) == (4 if row in trainer.rows else 0)
    assert sorted(np.concatenate(made.batches(trainer.rows, 12, 3, 1))) == trainer.rows.tolist()


# -- faults
# --------------------------------------------------------------------------------------------------


def test_hard_negatives_of_an_approximate_search(open_trainer):
    """Few labels make one list, which is searched: what is trained on is what an exact search
    finds.
    """
    exact = open_trainer("auto")
    approximate = open_trainer("faiss", **{"pool.mining": "faiss"})
    reports = exact.mine(), approximate.mine()
    assert "mine_recall" not in reports[0] and reports[0]["mine_exact"] == 1.0
    assert reports[1]["mine_recall"] == 1.0
    found = [
        Refresh.load(trainer.run_dir / "refresh" / "epoch-00000", 0).negatives
        for trainer in (exact, approximate)
    ]
    np.testing.assert_array_equal(*found)


def fault_in_loss(trainer, monkeypatch):
    losses = trainer.objective.losses
    monkeypatch.setattr(
        trainer.objective,
        "losses",
        lambda *args: {k: v * math.inf for k, v in losses(*args).items()},
    )


def fault_in_dense_gradient(trainer, monkeypatch):
    trainer.model.head_de[0].weight.register_hook(lambda grad: grad * math.nan)


def fault_in_row_gradient(trainer, monkeypatch):
    gather = trainer.model.table.gather

    def poisoned(rows):
        leaf = gather(rows)
        leaf.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), math.inf))
        return leaf

    monkeypatch.setattr(trainer.model.table, "gather", poisoned)


@pytest.mark.parametrize("fault", [fault_in_loss, fault_in_dense_gradient, fault_in_row_gradient])
def test_what_is_not_finite_stops_before_the_step(open_trainer, monkeypatch, fault):
    trainer = open_trainer(**{"optim.clip_norm": 1.0})
    train(trainer)
    trainer.mine()
    trainer.made = Refresh.load(trainer.run_dir / "refresh" / "epoch-00002", 2)
    before = weights(trainer)
    before_moments = moments(trainer)
    rows = trainer.rows[5:12]
    with monkeypatch.context() as patch:
        fault(trainer, patch)
        with pytest.raises(TrainingError, match="not finite") as caught:
            trainer.train_step(trainer.prepare(rows, 0))
    message = str(caught.value)
    assert "epoch 2, step 8" in message
    assert all(uid in message for uid in trainer.dataset.query_uids(rows[:5]))
    assert "loss_de" in message and "loss_clf" in message and "fix:" in message
    assert same(before, weights(trainer))
    assert same(before_moments, moments(trainer))
    assert trainer.optimisers.gradients() == []
    if fault is not fault_in_dense_gradient:  # nothing of it is left
        loss = trainer.train_step(trainer.prepare(rows, 0))["loss"]
        assert loss > 0


def test_a_nan_among_the_weights_is_caught_at_once(open_trainer):
    trainer = open_trainer()
    trainer.mine()
    with torch.no_grad():
        trainer.model.head_clf[0].weight[1, 1] = math.nan
    before = weights(trainer)
    with pytest.raises(TrainingError, match="step 0"):
        trainer.train_round()
    assert same(before, weights(trainer))
    assert not (trainer.run_dir / "checkpoints").exists()


def test_no_memory_left_is_said_with_sizes(open_trainer, monkeypatch):
    trainer = open_trainer()
    trainer.mine()

    def full(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer.model.encoder, "forward", full)
    with pytest.raises(TrainingError, match="memory is full") as caught:
        trainer.train_round()
    for part in ("queries", "pool labels", "16 tokens", "pool.batch_size: 6"):
        assert part in str(caught.value)


# -- device and number format
# ------------------------------------------------------------------------------------------


def test_device_and_precision():
    cpu = torch.device("cpu")
    assert choose_device("cpu") == cpu
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert autocast_type("fp32", cpu) is None
    assert autocast_type("bf16", cpu) == torch.bfloat16
    assert autocast_type("auto", cpu) in (None, torch.bfloat16)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no usable GPU"):
            choose_device("cuda")


def test_a_gpu_has_its_number_in_every_thread(monkeypatch):
    """Without one, a batch that another thread prepares would go to the first GPU, whatever
    `set_device` said here.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for local_rank, device in (
        ("0", "auto"),
        ("1", "auto"),
        ("1", "cuda"),
    ):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert choose_device(device) == torch.device("cuda", int(local_rank))
    monkeypatch.delenv("LOCAL_RANK")
    assert choose_device("cuda") == torch.device("cuda", 0)


@pytest.mark.parametrize("in_hardware", [False, True])
def test_emulated_bfloat16_is_not_taken(monkeypatch, in_hardware):
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or in_hardware,
    )
    card = torch.device("cuda", 0)
    assert autocast_type("auto", card) == (torch.bfloat16 if in_hardware else None)
    assert autocast_type("fp32", card) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    if in_hardware:
        assert autocast_type("bf16", card) == torch.bfloat16
    else:
        with pytest.raises(ConfigError, match=r"(?s)bf16 on Tesla T4.*auto or fp32"):
            autocast_type("bf16", card)


def test_an_old_driver_is_named(monkeypatch):
    def refuse():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\n.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(ConfigError, match=r"(?s)driver on your system is too old.*device: cpu"):
        choose_device("cuda")


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_an_old_driver_does_not_mean_a_training_on_the_cpu(device, monkeypatch):
    """torch warns, and says that there is no GPU."""
    too_old = "CUDA initialization: The NVIDIA driver on your system is too old (found version 9)."

    def is_available():
        warnings.warn(too_old, UserWarning, stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    if device == "cpu":
        assert choose_device(device) == torch.device("cpu")
        return
    with pytest.raises(ConfigError) as error:
        choose_device(device)
    message = str(error.value)
    assert too_old in message
    assert "device: cpu" in message
