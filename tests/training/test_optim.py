"""Optimisers: groups, schedule, clipping and state, against torch on an equivalent dense model."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn.utils import get_total_norm as total_norm

from unidec.data.tokens import encode_texts
from unidec.model.encoder_inputs import InputBuilder
from unidec.model.first_rows import start_table
from unidec.model.row_table import Placement
from unidec.model.unidec import UniDEC
from unidec.training.optim import Optimisers

CPU = torch.device("cpu")
NUM_LABELS = 9
TEXTS = [f"river query w{i} music" for i in range(6)]


def make_model(folder, params):
    torch.manual_seed(1)
    model = UniDEC.create(params.encoder, params.model, NUM_LABELS, folder, 0, params.model_dump())
    if model.table is not None:
        torch.nn.init.normal_(model.table.weight)
    return model.train()


def quiet(**values):
    """No dropout: two runs of the same step give the same gradients."""
    return {"model.dropout": 0.0, "model.clf_bias": True, **values}


def loss_of(model, rows, labels=(0, 3, 4)):
    """A loss that reaches every part of the model."""
    tokens = encode_texts(TEXTS, model.tokenizer_folder, 16)
    x_BW = model.encoder(InputBuilder(model.encoder, CPU)([("queries", tokens, np.asarray(rows))]))
    labels = torch.as_tensor(labels)
    loss = x_BW.new_zeros(())
    if model.heads != "clf":
        loss = loss + 10 * model.de(x_BW)[:, 0].sum() * model.log_scale[0].exp()
    if model.heads != "de":
        logit = model.clf(x_BW) @ model.table.gather(labels).T
        loss = (
            loss
            + (logit + (model.bias.gather(labels).T if model.bias is not None else 0)).pow(2).sum()
        )
    return loss


# -- groups
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bag", "transformer", "both"])
def test_every_trained_parameter_is_in_the_right_group_once(tiny_bert, tiny_params, kind):
    layers = 0 if kind == "bag" else 2
    params = tiny_params(
        **{
            "encoder.kind": kind,
            "encoder.trainable_layers": layers,
            "encoder.residual": kind == "bag",
            "model.learn_temperature": True,
            "optim.weight_decay": 0.07,
            "optim.lr_encoder": 1e-5,
            "optim.lr_heads": 2e-5,
            "optim.lr_bag": 3e-5,
            "optim.lr_clf": 4e-5,
            "model.clf_bias": True,
        }
    )
    model = make_model(tiny_bert, params)
    optimisers = Optimisers(model, params.optim, 5)
    group_of = {id(p): group for group in optimisers.adamw.param_groups for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(group_of) == len(trained) == len(optimisers.dense)
    for name, parameter in trained.items():
        group = group_of[id(parameter)]
        expected = 1e-5 if name.startswith("encoder.transformer.") else 2e-5
        assert group["lr"] == (expected), name
        # biases, norms and temperatures, whatever an architecture calls them
        vector = name.endswith(("bias", "log_scale")) or "norm" in name.lower()
        assert group["weight_decay"] == (0.0 if vector else 0.07), name
    rates = {name: row.lr for name, row in optimisers.row.items()}
    bag = (
        {f"encoder.bag.{name}": 3e-5 for name in ("embedding", "log_weight")}
        if kind != "transformer"
        else {}
    )
    assert rates == {"table": 4e-5, "bias": 4e-5, **bag}


def test_norms_of_distilbert_do_not_decay(tiny_distilbert, tiny_params):
    """Its norms are called `sa_layer_norm` and `output_layer_norm`: lists of names have missed
    them.
    """
    params = tiny_params(**{"encoder.kind": "transformer", "encoder.trainable_layers": -1})
    model = make_model(tiny_distilbert, params)
    decays = {
        id(p)
        for g in Optimisers(model, params.optim, 5).adamw.param_groups
        if g["weight_decay"] > 0
        for p in g["params"]
    }
    norms = [
        name
        for name, p in model.named_parameters()
        if "layer_norm" in name.lower() and id(p) in decays
    ]
    assert norms == []
    assert any("sa_layer_norm.weight" in name for name, _ in model.named_parameters())


# -- schedule
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warmup", "steps"),
    [
        (1.0, 7),
        (0.0, 7),
        (2.5, 4),
        (4.0, 7),
    ],
)
def test_schedule_rises_to_one_then_falls_to_nought(tiny_bert, tiny_params, warmup, steps):
    params = tiny_params(**{"optim.epochs": 4, "optim.warmup_epochs": warmup})
    optimisers = Optimisers(make_model(tiny_bert, params), params.optim, steps)
    last = 4 * steps
    rise = max(1, round(warmup * steps))
    factors = [optimisers.factor(step) for step in range(last)]
    expected = [(step + 1) / rise for step in range(rise)]
    assert factors[:rise] == pytest.approx(expected)
    assert factors[rise - 1] == 1.0
    assert all(a >= b for a, b in zip(factors[rise - 1 :], factors[rise:], strict=False))
    assert all(0 < factor <= 1 for factor in factors)
    assert optimisers.factor(max(last, rise + 1)) == pytest.approx(0, abs=1e-12)
    if rise < last:
        middle = rise + (last - rise) / 2
        assert optimisers.factor(middle) == pytest.approx(0.5)


def test_a_linear_decay_and_an_epsilon(tiny_bert, tiny_params):
    changed = {"optim.epochs": 4, "optim.decay": "linear", "optim.adam_eps": 1e-6}
    params = tiny_params(**changed)
    optimisers = Optimisers(make_model(tiny_bert, params), params.optim, 10)
    assert [optimisers.factor(step) for step in (9, 10, 25, 40)] == [1, 1, 0.5, 0]
    assert {group["eps"] for group in optimisers.adamw.param_groups} == {1e-6}


def test_learning_rates_follow_the_schedule(tiny_bert, tiny_params):
    params = tiny_params(**quiet())
    model = make_model(tiny_bert, params)
    optimisers = Optimisers(model, params.optim, 10)
    for step in (0, 9, 25):
        loss_of(model, [0, 1]).backward()
        optimisers.step(step, total_norm(optimisers.gradients()))
        share = (step + 1) / 10 if step < 10 else 0.5 * (1 + math.cos(math.pi * (step - 10) / 30))
        rates = [group["lr"] for group in optimisers.adamw.param_groups]
        expected = [params.optim.lr_heads * share] * 2
        assert rates == pytest.approx(expected)


# -- steps
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("kind", ["bag", "transformer"])
def test_steps_equal_torch_on_a_dense_model(tiny_bert, tiny_params, kind, clip):
    """Same gradients, all parameters dense in torch's AdamW: rows used each step are plain Adam,
    one norm over all.
    """
    params = tiny_params(
        **quiet(
            **{
                "encoder.kind": kind,
                "encoder.trainable_layers": 1 if kind == "transformer" else 0,
                "optim.clip_norm": clip,
                "model.learn_temperature": True,
                "optim.lr_bag": 3e-2,
                "optim.lr_clf": 4e-2,
            }
        )
    )
    model = make_model(tiny_bert, params)
    optim = params.optim
    optimisers = Optimisers(model, optim, 5)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    tables = {f"{name}.weight": table for name, table in model.tables().items()}
    dense = {
        n: start[n].clone().requires_grad_()
        for n, p in model.named_parameters()
        if p.requires_grad or n in tables
    }

    def rate(name):
        part = {"encoder.transformer": optim.lr_encoder, "encoder.bag": optim.lr_bag}
        part |= {"table": optim.lr_clf, "bias": optim.lr_clf}
        return next((lr for prefix, lr in part.items() if name.startswith(prefix)), optim.lr_heads)

    theirs = torch.optim.AdamW(
        [
            {
                "params": [p],
                "name": n,
                "weight_decay": optim.weight_decay if p.ndim > 1 and n not in tables else 0.0,
            }
            for n, p in dense.items()
        ]
    )
    for step in range(4):
        loss_of(model, range(6), tuple(range(NUM_LABELS))).backward()
        for name, parameter in dense.items():
            parameter.grad = torch.zeros_like(parameter)
            if name in tables:
                rows, leaf = tables[name].used
                parameter.grad[rows] = leaf.grad
            else:
                parameter.grad.copy_(model.get_parameter(name).grad)
        norm = total_norm(optimisers.gradients())
        optimisers.step(step, norm)
        expected = torch.nn.utils.clip_grad_norm_(dense.values(), clip if clip else math.inf)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
        for group in theirs.param_groups:
            group["lr"] = rate(group["name"]) * optimisers.factor(step)
        theirs.step()
    for name, parameter in dense.items():
        # rows of tokens that no text has stay; the gradients of the others are the same in each
        # step
        torch.testing.assert_close(
            model.get_parameter(name).detach(), parameter.detach(), rtol=1e-5, atol=1e-6, msg=name
        )
        assert not torch.equal(parameter, start[name]), name


def test_a_step_ends_with_no_gradient_left(tiny_bert, tiny_params):
    params = tiny_params(**quiet())
    model = make_model(tiny_bert, params)
    optimisers = Optimisers(model, params.optim, 5)
    loss_of(model, [0, 1]).backward()
    assert len(optimisers.gradients()) == len(optimisers.dense) + 4
    optimisers.step(0, total_norm(optimisers.gradients()))
    assert optimisers.gradients() == []
    assert all(table.used is None for table in model.tables().values())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["dense", "rows"])
def test_the_norm_shows_one_bad_entry(tiny_bert, tiny_params, value, where):
    params = tiny_params(**quiet())
    model = make_model(tiny_bert, params)
    optimisers = Optimisers(model, params.optim, 5)
    loss_of(model, [0, 1]).backward()
    grad = model.head_de[0].weight.grad if where == "dense" else model.table.used[1].grad
    grad[1, 2] = value
    assert not torch.isfinite(total_norm(optimisers.gradients()))


@pytest.mark.parametrize("kind", ["bag", "transformer", "both"])
def test_state_continues_bit_for_bit(tiny_bert, tiny_params, kind, rng):
    layers = 0 if kind == "bag" else 1
    params = tiny_params(**quiet(**{"encoder.kind": kind, "encoder.trainable_layers": layers}))
    model = make_model(tiny_bert, params).eval()
    for table in model.tables().values():
        table.train()
    rows = [rng.permutation(6)[:3] for _ in range(6)]

    def steps(model, optimisers, begin, end):
        for step in range(begin, end):
            loss_of(model, rows[step], tuple(range(step, step + 3))).backward()
            optimisers.step(step, total_norm(optimisers.gradients()))

    optimisers = Optimisers(model, params.optim, 5)
    steps(model, optimisers, 0, 3)
    half = copy.deepcopy(model)
    dense = {name: t.clone() for name, t in optimisers.dense_state().items()}
    rows_of = {
        name: {k: t.clone() for k, t in states.items()}
        for name, states in optimisers.row_states().items()
    }
    steps(model, optimisers, 3, 6)
    resumed = Optimisers(half, params.optim, 5)
    for table in half.tables().values():
        table.weight.zero_()  # weights come with the rows
    resumed.load_dense_state(dense)
    resumed.load_row_states(rows_of)
    before = {name: t.clone() for name, t in dense.items()}
    rows_before = copy.deepcopy(rows_of)
    steps(half, resumed, 3, 6)
    for name, value in model.state_dict().items():
        assert torch.equal(value, half.state_dict()[name]), name
    # what was loaded is copied
    assert all(torch.equal(dense[name], before[name]) for name in dense)
    assert all(
        torch.equal(t, rows_before[name][k])
        for name, states in rows_of.items()
        for k, t in states.items()
    )
    fresh = Optimisers(copy.deepcopy(half), params.optim, 5)
    assert fresh.dense_state() == {}  # nothing before the first step


# -- the classifier's table
# --------------------------------------------------------------------------------------------

STATES = {
    "adam": {"first", "second"},
    "adamw": {"first", "second"},
    "adagrad": {"sum"},
    "sgd": set(),
    "momentum": {"velocity"},
}


@pytest.mark.parametrize("state", sorted(STATES))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_classifier_has_its_own_state_and_type(tiny_bert, tiny_params, state, dtype):
    params = tiny_params(**quiet(**{"optim.clf_state": state, "model.clf_dtype": dtype}))
    model = make_model(tiny_bert, params)
    states = Optimisers(model, params.optim, 5).row_states()
    adam = STATES["adam"] | {"weight"}
    bag = {"encoder.bag.embedding": adam, "encoder.bag.log_weight": adam}
    assert {name: set(of) for name, of in states.items()} == {
        "table": STATES[state] | {"weight"},
        "bias": STATES[state] | {"weight"},
        **bag,
    }
    weights = {name: of["weight"].dtype for name, of in states.items()}
    rough = torch.bfloat16 if dtype == "bf16" else torch.float32
    assert weights == {"table": rough, "bias": torch.float32, **dict.fromkeys(bag, torch.float32)}
    assert all(
        t.dtype == torch.float32
        for of in states.values()
        for name, t in of.items()
        if name != "weight"
    )
    assert states["table"]["weight"].data_ptr() == model.table.weight.data_ptr()  # no copies


@pytest.mark.parametrize("damage", ["missing table", "missing state", "fewer rows"])
def test_rows_of_another_model_are_refused(tiny_bert, tiny_params, damage):
    params = tiny_params(**quiet())
    optimisers = Optimisers(make_model(tiny_bert, params), params.optim, 5)
    rows = {name: dict(of) for name, of in optimisers.row_states().items()}
    if damage == "missing table":
        del rows["table"]
    elif damage == "missing state":
        del rows["table"]["second"]
    else:
        rows["table"]["weight"] = rows["table"]["weight"][1:]
    with pytest.raises((KeyError, RuntimeError)):
        optimisers.load_row_states(rows)


def test_the_seed_decides_how_bfloat16_is_rounded(tiny_bert, tiny_params):
    params = tiny_params(**quiet(**{"model.clf_dtype": "bf16", "optim.clf_state": "sgd"}))
    tables = []
    for seed in (1, 1, 2):
        model = make_model(tiny_bert, params)
        optimisers = Optimisers(model, params.optim, 5, seed=seed)
        for step in range(2):
            loss_of(model, [0, 1, 2]).backward()
            optimisers.step(step, total_norm(optimisers.gradients()))
        tables.append(model.table.weight)
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fetched_rows_train_the_same_in_every_place(tiny_bert, tiny_params, tmp_path, place, dtype):
    params = tiny_params(**quiet(**{"model.clf_dtype": dtype}))
    states = []
    for placement in (Placement(), Placement(place, tmp_path)):
        torch.manual_seed(1)
        model = UniDEC.create(
            params.encoder,
            params.model,
            NUM_LABELS,
            tiny_bert,
            0,
            params.model_dump(),
            placement=placement,
        ).train()
        x_LW = torch.randn(
            NUM_LABELS, model.encoder.width, generator=torch.Generator().manual_seed(2)
        )
        start_table(model, lambda rows, x_LW=x_LW: x_LW[rows])
        optimisers = Optimisers(model, params.optim, 5)
        for table in (model.table, model.bias):
            table.is_remote = placement.place != "device"  # as on a GPU
        for step in range(6):
            labels = torch.tensor([step % 3, 5, 8 - step % 2])
            loss_of(model, [0, 1, 2], labels).backward()
            optimisers.step(step, total_norm(optimisers.gradients()))
        states.append(
            {
                f"{name}.{k}": t
                for name, of in optimisers.row_states().items()
                for k, t in of.items()
            }
        )
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
