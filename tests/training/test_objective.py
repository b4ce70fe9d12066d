"""The objective of a step against dense float64 loops: all labels, rows that hold texts, weights,
options.
"""

import math

import numpy as np
import pytest
import torch
from helpers.trainings import with_first_round

from unidec.model.losses import symmetric_loss
from unidec.model.pairs import target_weights
from unidec.training import objective as module
from unidec.training.gradient_cache import encode_texts

QUIET = {"model.dropout": 0.0, "loss.clf_bce": 0.0}


def losses_of(trainer, batch, backward=False):
    x_BW, run_backward = encode_texts(trainer.model.encoder, batch.texts, trainer.encoding.autocast)
    losses = trainer.objective.losses(x_BW, batch, 0)
    if backward:
        run_backward(torch.stack(list(losses.values())).sum())
    return {name: float(value.detach()) for name, value in losses.items()}


def scores(trainer, rows, temperature=0.1):
    """Every query against every label, by both heads, with the classifier's rows as validation sees
    them: float64.
    """
    model = trainer.model
    tokens = trainer.encoding.tokens
    model.eval()
    de, clf = model.encode_queries(tokens["queries"], rows)
    label_de = model.encode_labels(tokens["labels"])
    table, bias = trainer.classifier()
    model.train()
    de_BL = None if de is None else de.astype(np.float64) @ label_de.T.astype(np.float64)
    clf_BL = None if clf is None else clf.astype(np.float64) @ table.T.astype(np.float64)
    if clf_BL is not None and bias is not None:
        clf_BL = clf_BL + bias
    return tuple(None if x is None else x / temperature for x in (de_BL, clf_BL))


def pairs(dataset, rows):
    """Positives and ignored pairs, dense, of all labels."""
    positive = dataset.relevance[rows].toarray() > 0
    return positive, dataset.filter_pairs[rows].toarray().astype(bool) & ~positive


def slow_ds(logit, positive, ignored):
    """Decoupled softmax, mean over a row's positives, mean over rows that have one."""
    rows = []
    for x, is_positive, is_ignored in zip(logit, positive, ignored):
        negatives = [
            math.exp(v) for v, p, skip in zip(x, is_positive, is_ignored) if not p and not skip
        ]
        one = [math.log(math.exp(v) + sum(negatives)) - v for v, p in zip(x, is_positive) if p]
        if one:
            rows.append(sum(one) / len(one))
    return sum(rows) / len(rows)


def slow_bce(logit, positive, ignored, normalise):
    total = 0.0
    entries = 0
    active = 0
    for x, is_positive, is_ignored in zip(logit, positive, ignored):
        if is_positive.any():
            kept = [(v, p) for v, p, skip in zip(x, is_positive, is_ignored) if not skip]
            total += sum(math.log1p(math.exp(-v if p else v)) for v, p in kept)
            entries = entries + len(kept)
            active = active + 1
    return total / (active if normalise == "rows" else entries)


# -- the dual encoder over all labels
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("clf_labels", ["pool", "all", 19, 20])
def test_the_dual_encoder_over_all_labels(open_trainer, tiny_dataset, clf_labels, chunk):
    trainer = with_first_round(
        open_trainer(
            **QUIET,
            **{
                "pool.de_labels": "all",
                "pool.clf_labels": clf_labels,
                "loss.balance": 0.3,
                "loss.de_forward": 0.7,
                "loss.clf_forward": 1.0,
                "optim.encode_chunk": chunk,
            },
        )
    )
    rows = np.sort(trainer.rows[: 3 if clf_labels == 19 else 13])
    batch = trainer.prepare(rows, 0)
    every = np.arange(tiny_dataset.num_labels)
    assert np.array_equal(batch.pool.pool_S, every)
    (de, clf), (positive, ignored) = scores(trainer, rows), pairs(tiny_dataset, rows)
    found = losses_of(trainer, batch)
    forth = slow_ds(de, positive, ignored)
    back = slow_ds(de.T, positive.T, ignored.T)
    expected = 0.7 * forth + 0.3 * back
    assert found["loss_de"] == pytest.approx(0.3 * expected, rel=1e-4)
    seen = every if batch.clf.ids is None else batch.clf.ids.numpy()
    assert (len(seen) < len(every)) == (clf_labels in ("pool", 19))
    drawn = trainer.batches.sampler.batch(
        rows, epoch=0, step=0, shortlist_NH=trainer.made.negatives
    ).pool_S
    assert set(drawn) <= set(seen)
    assert (len(seen) > len(drawn)) == (clf_labels != "pool")
    expected = slow_ds(clf[:, seen], positive[:, seen], ignored[:, seen])
    assert found["loss_clf"] == pytest.approx(0.7 * expected, rel=1e-4)


def test_pool_and_all_labels_sample_the_same_positives(open_trainer):
    """The draw of a step's positives is one, whatever the heads see: both heads' reductions pick
    among the same.
    """
    trainer = with_first_round(
        open_trainer(**{"pool.de_labels": "all", "loss.reduction": "pol", "pool.beta": 1})
    )
    batch = trainer.prepare(trainer.rows[:13], 0)
    ids = batch.clf.ids.numpy()
    t = batch.targets
    u = batch.clf.targets
    of_all = set(zip(t.row_P[t.sampled_P].tolist(), t.col_P[t.sampled_P].tolist()))
    label_P = ids[u.col_P[u.sampled_P]]
    of_pool = set(zip(u.row_P[u.sampled_P].tolist(), label_P.tolist()))
    assert of_all == of_pool and len(of_all) == 13


# -- BCE over all labels
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", ["rows", "entries"])
@pytest.mark.parametrize("bias", [False, True])
def test_bce_over_all_labels_is_made_in_chunks(
    open_trainer, tiny_dataset, monkeypatch, normalise, bias
):
    overrides = {
        "model.heads": "clf",
        "pool.clf_labels": "all",
        "loss.clf": "bce",
        "model.clf_bias": bias,
    }
    trainer = with_first_round(
        open_trainer(**QUIET, **overrides, **{"loss.bce_normalise": normalise})
    )
    if bias:
        torch.nn.init.normal_(trainer.model.bias.weight, std=0.3)
    rows = np.sort(trainer.rows[:13])
    batch = trainer.prepare(rows, 0)
    calls = []
    chunked = module.full_bce
    monkeypatch.setattr(module, "full_bce", lambda *a, **k: calls.append(1) or chunked(*a, **k))
    found = losses_of(trainer, batch, backward=True)["loss_clf"]
    assert calls, "the logits of all labels are not to be held"
    grads = [g.clone() for g in trainer.optimisers.gradients()]
    trainer.optimisers.zero_grad()
    positive, ignored = pairs(tiny_dataset, rows)
    expected = slow_bce(scores(trainer, rows)[1], positive, ignored, normalise)
    assert found == pytest.approx(expected, rel=1e-4)

    def dense(query, table, bias, scale, targets, normalise):
        logit = query @ table.T if bias is None else query @ table.T + bias.T
        return symmetric_loss(
            "bce", logit * scale, targets, reduction="psl", forward=1.0, normalise=normalise
        )

    monkeypatch.setattr(module, "full_bce", dense)
    losses_of(trainer, batch, backward=True)
    for ours, theirs in zip(grads, trainer.optimisers.gradients(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-6)


# -- dropout of rows
# --------------------------------------------------------------------------------------------------


def test_rows_are_dropped_in_training_alone(open_trainer, monkeypatch):
    trainer = with_first_round(
        open_trainer(
            **QUIET, **{"model.heads": "clf", "model.clf_dropout": 0.25, "index.space": "clf"}
        )
    )
    with torch.no_grad():
        trainer.model.table.weight.normal_()
    batch = trainer.prepare(np.sort(trainer.rows[:13]), 0)
    seen = []
    products = trainer.objective._products
    monkeypatch.setattr(
        trainer.objective,
        "_products",
        lambda query, row: seen.append(row.detach()) or products(query, row),
    )
    losses_of(trainer, batch, backward=True)
    whole = trainer.model.table.weight[batch.clf.ids]
    leaf = trainer.model.table.used[1]
    dropped = seen[0] == 0
    assert 0.1 < float(dropped.float().mean()) < 0.4
    expected = (whole / 0.75).masked_fill(dropped, 0.0)
    torch.testing.assert_close(seen[0], expected)
    assert not leaf.grad[dropped].any()
    assert leaf.grad[~dropped].any()
    trainer.optimisers.zero_grad()
    trainer.model.eval()
    losses_of(trainer, batch)
    assert torch.equal(seen[1], whole)


# -- rows that hold their label's text
# ---------------------------------------------------------------------------------

RESIDUAL = {"model.clf_residual": True, "loss.clf_forward": 0.4}


@pytest.mark.parametrize(
    "overrides",
    [
        {"model.heads": "clf"},
        {},
        {"pool.de_labels": "all"},
        {"model.heads": "clf", "optim.encode_chunk": 5},
        {"model.clf_gates": True},
    ],
    ids=str,
)
def test_a_row_is_its_labels_text_and_a_free_vector(open_trainer, tiny_dataset, overrides):
    trainer = with_first_round(open_trainer(**QUIET, **RESIDUAL, **overrides))
    with torch.no_grad():
        trainer.model.table.weight.normal_(std=0.4)
        if "model.clf_gates" in overrides:
            free_LD = trainer.model.table.weight.clone()
            as_sum = trainer.classifier()[0]
            trainer.model.gates.normal_(std=2.0)
            text_LD = torch.from_numpy(as_sum) - free_LD
            gates_2D = 2 * torch.sigmoid(trainer.model.gates).view(2, -1)
            gated = (gates_2D[0] * text_LD + gates_2D[1] * free_LD).numpy()
            np.testing.assert_allclose(trainer.classifier()[0], gated, rtol=1e-4, atol=1e-5)
    rows = np.sort(trainer.rows[:13])
    batch = trainer.prepare(rows, 0)
    seen = batch.clf.ids.numpy()
    assert 0 < len(seen) < tiny_dataset.num_labels
    positive, ignored = pairs(tiny_dataset, rows)
    positive = positive[:, seen]
    ignored = ignored[:, seen]
    clf = scores(trainer, rows)[1][:, seen]
    forth = slow_ds(clf, positive, ignored)
    back = slow_ds(clf.T, positive.T, ignored.T)
    expected = 0.4 * forth + 0.6 * back
    weight = 1.0 if trainer.model.heads == "clf" else 0.5
    assert losses_of(trainer, batch, backward=True)["loss_clf"] == pytest.approx(
        weight * expected, rel=1e-4
    )
    used, leaf = trainer.model.table.used
    assert used.tolist() == seen.tolist()
    assert leaf.grad.abs().sum() > 0
    # the labels' words train too, also with a classifier alone
    words = set(
        np.concatenate(
            [trainer.encoding.tokens["labels"].ragged(np.array([label]))[0] for label in seen]
        ).tolist()
    )
    of_queries = set(
        np.concatenate(
            [trainer.encoding.tokens["queries"].ragged(np.array([r]))[0] for r in rows]
        ).tolist()
    )
    token_ids, grads = trainer.model.encoder.bag.embedding.used
    moved = set(token_ids[grads.grad.abs().sum(1) > 0].tolist())
    assert moved & (words - of_queries)


# -- weights and options
# -----------------------------------------------------------------------------------------------


def slow_weighted_ds(logit, positive, ignored, importance):
    """The rows' means over positives, each positive counting its importance, all of them together
    what they did.
    """
    parts = []
    for x, is_positive, is_ignored in zip(logit, positive, ignored):
        negatives = sum(
            math.exp(v) for v, p, skip in zip(x, is_positive, is_ignored) if not p and not skip
        )
        share = 1 / max(is_positive.sum(), 1)
        parts += [
            (share, share * importance[column], math.log(math.exp(v) + negatives) - v)
            for column, (v, p) in enumerate(zip(x, is_positive))
            if p
        ]
    before = sum(part[0] for part in parts)
    after = sum(part[1] for part in parts)
    weighted = sum(weight * loss for _, weight, loss in parts)
    return weighted * before / after / positive.any(1).sum()


def test_inverse_propensities_weight_both_heads(open_trainer, tiny_dataset):
    a = 2.0
    b = 0.5
    trainer = with_first_round(
        open_trainer(
            **QUIET,
            **{
                "loss.weights": "propensity",
                "data.propensity_a": a,
                "data.propensity_b": b,
                "loss.de_forward": 1.0,
                "loss.clf_forward": 1.0,
            },
        )
    )
    train = tiny_dataset.rows("train")
    rows = np.sort(trainer.rows[:13])
    count = (tiny_dataset.relevance[train].toarray() > 0).sum(0)
    c = (math.log(len(train)) - 1) * (b + 1) ** a
    inverse = [1 + c / (n + b) ** a for n in count]
    batch = trainer.prepare(rows, 0)
    seen = batch.pool.pool_S
    positive, ignored = (x[:, seen] for x in pairs(tiny_dataset, rows))
    found = losses_of(trainer, batch)
    for head, logit in zip(("loss_de", "loss_clf"), scores(trainer, rows), strict=True):
        plain = slow_ds(logit[:, seen], positive, ignored)
        expected = slow_weighted_ds(logit[:, seen], positive, ignored, np.array(inverse)[seen])
        assert expected != pytest.approx(plain, rel=5e-4)
        assert found[head] == pytest.approx(0.5 * expected, rel=3e-5)


@pytest.mark.parametrize(
    ("kind", "key", "option", "values"),
    [
        ("triplet", "loss.triplet_negatives", "negatives", ("all", "hardest")),
        ("triplet", "loss.triplet_positives", "positives", (0, 2)),
        ("triplet", "loss.margin", "margin", (0.1, 0.9)),
        ("hinge", "loss.margin", "margin", (0.1, 0.9)),
        ("softtopk", "loss.topk", "topk", (1, 3)),
        ("bce", "loss.bce_normalise", "normalise", ("rows", "entries")),
        ("bce", "loss.bce_normalise", "normalise", ("rows", "sum")),
    ],
)
def test_options_reach_their_loss(open_trainer, kind, key, option, values):
    forward = 1.0 if kind == "softtopk" else 0.5
    found = []
    for number, value in enumerate(values):
        overrides = {
            "loss.de": kind,
            "loss.de_forward": forward,
            key: value,
            "model.heads": "de",
            "pool.size": 30,
        }
        trainer = with_first_round(open_trainer(f"run-{number}", **overrides))
        batch = trainer.prepare(trainer.rows[:13], 0)
        cosine = torch.randn(
            13, len(batch.pool.pool_S), generator=torch.Generator().manual_seed(1)
        ).tanh()
        scale = torch.tensor(7.0)
        found.append(
            trainer.objective.loss(kind, cosine, scale, batch.targets, forward=forward, step=0)
        )
        scaled = cosine if kind in ("triplet", "hinge") else cosine * 7.0
        options = {option: value} | ({"normalise": "rows"} if kind == "hinge" else {})
        expected = symmetric_loss(
            kind, scaled, batch.targets, reduction="psl", forward=forward, **options
        )
        if not (kind == "triplet" and option == "negatives"):
            assert float(found[-1]) == pytest.approx(float(expected), rel=1e-6)
    assert float(found[0]) != pytest.approx(float(found[1]), rel=1e-3)


def test_the_random_pick_of_one_positive_follows_the_step(open_trainer):
    trainer = with_first_round(open_trainer(**{"loss.reduction": "pol", "pool.beta": 3}))
    batch = trainer.prepare(trainer.rows[:30], 0)
    cosine = torch.randn(
        30, len(batch.pool.pool_S), generator=torch.Generator().manual_seed(1)
    ).tanh()
    found = [
        float(
            trainer.objective.loss(
                "ds", cosine, torch.tensor(9.0), batch.targets, forward=1.0, step=n
            )
        )
        for n in (0, 1, 0)
    ]
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("everything", [False, True])
def test_one_positive_alone_is_one_in_bce_too(open_trainer, everything):
    """ "pol": the others are neither positive nor negative, in chunks over all labels as in a
    pool.
    """
    trainer = with_first_round(
        open_trainer(
            **QUIET,
            **{
                "model.heads": "clf",
                "loss.clf": "bce",
                "loss.bce_normalise": "sum",
                "loss.reduction": "pol",
                "pool.clf_labels": "all" if everything else "pool",
                "pool.beta": 2,
            },
        )
    )
    rows = np.sort(trainer.rows[:13])
    batch = trainer.prepare(rows, 0)
    clf = batch.clf.targets
    logit = torch.from_numpy(scores(trainer, rows)[1])
    logit = logit if batch.clf.ids is None else logit[:, batch.clf.ids]
    generator = torch.Generator().manual_seed(hash((trainer.settings.seed, 0)) % 2**63)
    weight_P = target_weights("pol", clf, len(rows), generator)
    sign = -torch.ones_like(logit)
    sign[clf.row_P, clf.col_P] = 2 * weight_P.double() - 1
    loss = torch.nn.functional.softplus(-sign * logit)
    loss[clf.row_P[weight_P == 0], clf.col_P[weight_P == 0]] = 0
    loss[clf.ignored_row_F, clf.ignored_col_F] = 0
    assert (weight_P == 0).any()
    assert losses_of(trainer, batch)["loss_clf"] == pytest.approx(float(loss.sum()), rel=1e-4)


def test_the_classifier_by_cosines(open_trainer):
    """As the softmax of normalised queries and rows (NGAME)."""
    found = []
    for cosine in (False, True):
        trainer = with_first_round(
            open_trainer(
                f"cosine-{cosine}", **QUIET, **{"model.heads": "clf", "model.clf_cosine": cosine}
            )
        )
        model = trainer.model
        with torch.no_grad():
            torch.manual_seed(1)
            model.table.weight.normal_()
            if not cosine:  # the rows and queries themselves have unit length
                model.table.weight.copy_(torch.nn.functional.normalize(model.table.weight, dim=1))
                clf = model.clf
                model.clf = lambda x, clf=clf: torch.nn.functional.normalize(clf(x), dim=1)
        batch = trainer.prepare(np.sort(trainer.rows[:13]), 0)
        found.append(losses_of(trainer, batch)["loss_clf"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


# -- number formats
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "clf",
    [
        {"loss.clf": "ds"},
        {"loss.clf": "bce", "pool.clf_labels": "all"},
    ],
)
def test_products_in_bfloat16_and_losses_in_float32(open_trainer, monkeypatch, clf):
    """bfloat16 keeps 8 bits: products of unit vectors are off by thousandths, losses and gradients
    by a few percent.
    """
    trainer = with_first_round(open_trainer(**QUIET, **clf))
    batch = trainer.prepare(np.sort(trainer.rows[:13]), 0)
    types = []
    losses = []
    grads = []

    def watched(kind, logit_BS, *args, **options):
        types.append(logit_BS.dtype)
        return symmetric_loss(kind, logit_BS, *args, **options)

    monkeypatch.setattr(module, "symmetric_loss", watched)
    for trainer.encoding.amp in (None, torch.bfloat16):
        trainer.optimisers.zero_grad()
        losses.append(losses_of(trainer, batch, backward=True))
        grads.append([grad.flatten().clone() for grad in trainer.optimisers.gradients()])
    assert set(types) == {torch.float32}
    for exact, rough in zip(losses[0].values(), losses[1].values(), strict=True):
        assert rough != exact and rough == pytest.approx(exact, rel=0.02)
    for exact, rough in zip(*grads, strict=True):
        assert rough.dtype == torch.float32
        assert torch.cosine_similarity(rough, exact, dim=0) > 0.995
