"""Trainings that begin with another model, on a frozen encoder, with a residual classifier, with
tail positives.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.label_targets import soft_targets
from helpers.trainings import train_to_the_end, weights

from unidec.data.storage import write_folder
from unidec.errors import ArtifactError, ConfigError
from unidec.model.unidec import KIND, VERSION, UniDEC
from unidec.training.initial_weights import document_frequency
from unidec.training.trainer import Trainer, TrainingData


def export(trainer, path):
    with write_folder(path, KIND, VERSION) as out:
        trainer.export(out)
    return str(path)


def losses(trainer):
    return (trainer.run_dir / "history.jsonl").read_text().splitlines()


@pytest.fixture
def two_stages(open_trainer, tmp_path):
    """`two_stages(**second)`: a dual encoder, trained and exported, and a trainer that begins with
    it.
    """

    def two_stages(**second):
        first = train_to_the_end(open_trainer("first", **{"model.heads": "de", "optim.epochs": 2}))
        start = export(first, tmp_path / "exported")
        return first, open_trainer("second", **{"encoder.start": start} | second)

    return two_stages


def test_document_frequencies_count_texts(tiny_tokens):
    tokens = tiny_tokens["queries"]
    expected = np.zeros(200, dtype=np.int64)
    rows = np.array([3, 7, 7, 11])
    for row in rows:
        for token in {*tokens.ids[tokens.offsets[row] : tokens.offsets[row + 1]].tolist()}:
            expected[token] += 1
    assert (
        document_frequency(tokens, rows, 200, lambda flat, lengths: (flat, lengths)).tolist()
        == expected.tolist()
    )


def test_the_bag_keeps_the_weights_of_its_start(two_stages):
    first, second = two_stages()
    for name in ("embedding", "log_weight"):
        ours, theirs = (getattr(t.model.encoder.bag, name).weight for t in (second, first))
        assert torch.equal(ours, theirs)
    assert second.identity["encoder.start"] != '""'
    assert first.identity["encoder.start"] == '""'


def test_the_start_is_part_of_the_identity_by_content(two_stages, open_trainer, tmp_path):
    first, second = two_stages()
    moved = export(first, tmp_path / "moved")
    other = export(second, tmp_path / "other")
    same = open_trainer("third", **{"encoder.start": moved})
    assert same.identity["encoder.start"] == second.identity["encoder.start"]
    second.mine()
    second.train_round()
    with pytest.raises(ConfigError, match=r"encoder\.start"):
        open_trainer("second", **{"encoder.start": other})
    assert open_trainer("second", **{"encoder.start": moved}).at.step == second.at.step, (
        "wherever it lies"
    )


def test_without_the_start_there_is_no_training(open_trainer, tmp_path):
    with pytest.raises(ArtifactError):
        open_trainer("run", **{"encoder.start": str(tmp_path / "nothing")})


SECOND = {
    "a classifier on a frozen dual encoder": {
        "model.heads": "clf",
        "encoder.frozen": True,
        "encoder.dropout": 0.2,
    },
    "both heads on a frozen encoder": {"encoder.frozen": True},
    "residual on a frozen encoder": {"encoder.frozen": True, "model.clf_residual": True},
    "residual": {"model.clf_residual": True, "model.heads": "clf"},
}


@pytest.mark.parametrize("kind", SECOND)
def test_second_stages_learn_and_are_resumed_bit_for_bit(two_stages, open_trainer, kind):
    _, second = two_stages(**SECOND[kind])
    before = weights(second)
    whole = weights(train_to_the_end(second))
    frozen = SECOND[kind].get("encoder.frozen", False)
    for name, value in whole.items():
        trains = not (frozen and name.startswith("encoder.")) and name != "log_scale"
        assert torch.equal(value, before[name]) != trains, name
    figures = [json.loads(line)["loss"] for line in losses(second)]
    assert figures[-1] < figures[0]
    start = second.settings.encoder.start
    again = open_trainer("again", **SECOND[kind] | {"encoder.start": start})
    again.mine()
    again.train_round()
    resumed = weights(
        train_to_the_end(open_trainer("again", **SECOND[kind] | {"encoder.start": start}))
    )
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_a_frozen_encoder_is_never_computed_in_a_step(two_stages, monkeypatch):
    _, second = two_stages(**{"encoder.frozen": True})
    monkeypatch.setattr(type(second.model.encoder), "_parts", None)
    train_to_the_end(second)


@pytest.mark.parametrize("frozen", [True, False])
def test_with_cached_gradients_a_residual_classifier_trains_the_same(open_trainer, frozen):
    """Chunks of texts, a frozen encoder's too; no dropout, since chunks draw it in
    another order.
    """
    common = {
        "model.clf_residual": True,
        "model.dropout": 0.0,
        "encoder.frozen": frozen,
        "optim.epochs": 2,
    }
    plain, chunked = (
        weights(
            train_to_the_end(
                open_trainer(f"chunks of {size}", **common | {"optim.encode_chunk": size})
            )
        )
        for size in (0, 7)
    )
    for name, value in plain.items():
        torch.testing.assert_close(chunked[name], value, rtol=1e-4, atol=2e-4, msg=name)


def test_a_frozen_encoder_without_a_start_keeps_its_first_weights(open_trainer):
    """A bag's weights come from the training texts before its outputs are computed."""
    trainer = open_trainer("frozen", **{"encoder.frozen": True})
    plain = open_trainer("plain")
    for name in ("embedding", "log_weight"):
        assert torch.equal(*(getattr(t.model.encoder.bag, name).weight for t in (trainer, plain)))
    cached = trainer.encoding.build(
        [("queries", trainer.encoding.tokens["queries"], trainer.rows)]
    ).output_BW
    texts = plain.model.encode("queries", plain.encoding.tokens["queries"], plain.rows)
    np.testing.assert_allclose(cached.float().numpy(), texts, atol=2e-3)
    before = weights(trainer)
    after = weights(train_to_the_end(trainer))
    assert all(torch.equal(after[n], v) for n, v in before.items() if n.startswith("encoder."))


def test_a_residual_step_is_that_of_a_dense_reference(open_trainer):
    """One step of a bare residual classifier: gradients against float64 autograd on rows written
    out by hand.
    """
    trainer = open_trainer(
        **{
            "model.heads": "clf",
            "model.clf_residual": True,
            "model.dropout": 0.0,
            "loss.clf": "supcon",
            "loss.clf_bce": 0.0,
            "loss.clf_forward": 1.0,
            "encoder.frozen": True,
        }
    )
    model = trainer.model.train()
    batch = trainer.prepare(trainer.rows[:9], 0)
    labels = batch.clf.ids
    own = batch.counts.own_queries
    x_BW = model.encoder(batch.texts)
    loss = sum(trainer.objective.losses(x_BW, batch, 0).values())
    loss.backward()

    w, b = (p.detach().double().requires_grad_() for p in model.head_clf[0].parameters())
    free_SD = model.table.weight[labels].detach().double().requires_grad_()
    x_BW = x_BW.detach().double()
    row_SD = F.normalize(x_BW[own:] @ w.T + b, dim=1) + free_SD
    logit_BS = (x_BW[:own] @ w.T + b) @ row_SD.T / 0.1
    pairs = trainer.dataset.relevance[trainer.rows[:9]].toarray()[:, labels.numpy()] > 0
    linked = trainer.dataset.filter_pairs[trainer.rows[:9]].toarray()[:, labels.numpy()] & ~pairs
    log_p_BS = torch.log_softmax(logit_BS.masked_fill(torch.from_numpy(linked), -torch.inf), dim=1)
    expected = -torch.stack(
        [log_p_BS[i, torch.from_numpy(row)].mean() for i, row in enumerate(pairs)]
    ).mean()
    torch.testing.assert_close(
        loss.detach().double(),
        expected.detach(),
        rtol=1e-5,
        atol=1e-6,
    )
    expected.backward()
    torch.testing.assert_close(
        model.head_clf[0].weight.grad.double(),
        w.grad,
        rtol=1e-4,
        atol=1e-5,
    )
    torch.testing.assert_close(
        model.table.used[1].grad.double(), free_SD.grad, rtol=1e-4, atol=1e-5
    )


def test_a_residual_classifier_is_whole_wherever_it_is_looked_at(open_trainer, tmp_path):
    trainer = train_to_the_end(open_trainer(**{"model.clf_residual": True}))
    x_LW = trainer.encoding.outputs("labels", np.arange(trainer.dataset.num_labels))
    head = trainer.model.head_clf[0]
    text_LD = F.normalize(x_LW @ head.weight.T + head.bias, dim=1).detach()
    free_LD = trainer.model.table.weight
    assert free_LD.any()
    rows_LD = trainer.classifier()[0]
    expected = (text_LD + free_LD).numpy()
    np.testing.assert_allclose(rows_LD, expected, rtol=1e-4, atol=1e-6)
    loaded = UniDEC.load(export(trainer, tmp_path / "exported"))
    assert np.array_equal(loaded.classifier_table()[0], rows_LD)
    only = open_trainer("clf", **{"model.clf_residual": True, "model.heads": "clf"})
    assert np.array_equal(only.refresher.label_vectors(), only.classifier()[0])


def test_tail_positives_are_drawn_by_inverse_propensity(open_trainer, tiny_dataset):
    trainer: Trainer = open_trainer(**{"pool.positives": "tail", "pool.beta": 1, "pool.eta": 0})
    count_L = np.asarray((tiny_dataset.relevance[tiny_dataset.rows("train")] > 0).sum(0)).ravel()
    weight_L = trainer.batches.sampler.weight_L
    assert (np.diff(weight_L[np.argsort(count_L)]) <= 1e-12).all()
    assert weight_L.min() >= 1
    drawn = {"tail": 0.0, "uniform": 0.0}
    for name in drawn:
        sampler = (
            trainer.batches.sampler
            if name == "tail"
            else open_trainer("uniform", **{"pool.beta": 1, "pool.eta": 0}).batches.sampler
        )
        for step in range(40):
            batch = sampler.batch(trainer.rows, epoch=0, step=step, shortlist_NH=None)
            drawn[name] += weight_L[batch.pool_S[batch.positive_col_P[batch.sampled_P]]].sum()
    assert drawn["tail"] > drawn["uniform"] * 1.005
    train_to_the_end(trainer)


@pytest.mark.parametrize("kind", ["cooccurrence", "random-walk", "glas", "self"])
def test_gandalf_trains_on_any_graph_and_on_a_share_of_the_labels(
    tiny_params, tiny_dataset, tiny_tokens, tmp_path, kind
):
    settings = {"label_graph.kind": kind, "label_graph.share": 0.5, "label_graph.tail_first": True}
    params = tiny_params(
        **settings | {"pool.gandalf": True, "pool.cluster_start": 1, "optim.epochs": 2}
    )
    train_rows = tiny_dataset.rows("train")
    graph = soft_targets(tiny_dataset.relevance[train_rows], **params.label_graph.model_dump())
    trainer = Trainer(
        params.training,
        TrainingData(tiny_dataset, *tiny_tokens.values(), graph),
        tmp_path / "run",
        tmp_path / "cache",
    )
    chosen = np.flatnonzero(np.diff(graph.indptr))
    assert len(chosen) == tiny_dataset.num_labels // 2
    assert trainer.rows.tolist() == [
        *train_rows.tolist(),
        *(tiny_dataset.num_queries + chosen).tolist(),
    ]
    train_to_the_end(trainer)
    assert trainer.at.step == 2 * trainer.steps_per_epoch
    assert f'"{kind}"' == trainer.identity["label_graph.kind"]
