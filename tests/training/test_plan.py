"""Plans against reality: bytes of weights and state exactly, activations and peaks against what tensors take."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from unidec.errors import ConfigError
from unidec.model.encoder import InputBuilder, length_chunks
from unidec.model.losses import PoolTargets, symmetric_loss
from unidec.training import trainer as trainer_module
from unidec.training.plan import sizes as sizes_module
from unidec.training.plan.around import checkpoint_bytes
from unidec.training.plan.items import PHASES, STATE, STEP
from unidec.training.plan.planning import make_plan
from unidec.training.plan.sizes import (
    NAMED,
    EncoderShape,
    Sizes,
    batch_sizes,
    distinct_tokens,
    padded_texts,
    typical_lengths,
)
from unidec.training.plan.step import Setting, classifier_state, layer_bytes, loss_copies, state_items, work_items
from unidec.training.row_optim import bytes_per_row

TRANSFORMER = {"encoder.kind": "transformer"}
ALL, ONE, FROZEN = ({**TRANSFORMER, "encoder.trainable_layers": layers} for layers in (-1, 1, 0))


@pytest.fixture(scope="module")
def data(plan_data):
    """1,080 training queries, 400 labels: steps large enough to drown what every step has."""
    return plan_data(1200, 100, 400)


def setting(params, dataset, tokens, **changes):
    sizes = Sizes.of(dataset, *tokens)
    half = params.optim.precision == "bf16"
    shape = EncoderShape.of(params.encoder.name)
    return dataclasses.replace(Setting(params, sizes, shape, batch_sizes(params, sizes), False, half), **changes)


def amounts(items):
    totals = {}
    for item in items:
        totals[item.name] = totals.get(item.name, 0) + item.num_bytes
    return totals


# -- what is kept from step to step ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {"model.clf_bias": True},
        {"model.heads": "de", "encoder.residual": True},
        {"model.heads": "clf", "optim.clf_state": "adagrad", "model.learn_temperature": True},
        {"model.clf_dtype": "bf16", "optim.clf_state": "sgd", "pool.clf_labels": "all"},
        {"model.clf_dtype": "bf16", "optim.clf_state": "adam", "model.clf_bias": True, **FROZEN},
        {"model.clf_dtype": "bf16", "optim.clf_state": "adagrad", "run.table_place": "disk", **ONE},
        {"run.table_place": "host", "encoder.kind": "both", "encoder.trainable_layers": -1},
        {"encoder.kind": "both", "encoder.frozen": True},
        {"encoder.kind": "both", "encoder.bag_words": 77},
        {"encoder.kind": "both", "encoder.trainable_layers": 2, "distilbert": True},
        {**ALL, "distilbert": True, "run.recompute": True},
    ],
    ids=str,
)
def test_weights_and_state_are_planned_to_the_byte(overrides, open_trainer, tiny_distilbert):
    overrides = dict(overrides)
    if overrides.pop("distilbert", False):
        overrides["encoder.name"] = str(tiny_distilbert)
    trainer = open_trainer(**overrides, **{"optim.epochs": 1, "pool.refresh": 1})
    trainer.refresh()
    trainer.train_round()
    s = setting(trainer.params, trainer.dataset, [trainer.tokens["queries"], trainer.tokens["labels"]])
    planned = amounts(state_items(s))

    model, encoder = trainer.model, trainer.model.encoder
    weights = dict(model.named_parameters())
    rows = trainer.optimisers.row_states()
    adamw = dict(trainer.optimisers.adamw.state)
    transformer = [p for name, p in weights.items() if name.startswith("encoder.transformer.")]
    heads = [p for name, p in weights.items() if name.startswith(("head", "log_scale", "encoder.residual"))]

    def moments(parameters):
        return sum(adamw[p][key].nbytes for p in parameters if p in adamw for key in ("exp_avg", "exp_avg_sq"))

    def of_rows(names, weight):
        return sum(x.nbytes for n in names for key, x in rows.get(n, {}).items() if (key == "weight") == weight)

    bag, table = ("encoder.bag.embedding", "encoder.bag.log_weight"), ("table", "bias")
    real = {
        "encoder weights": sum(p.nbytes for p in transformer),
        "encoder moments": moments(transformer),
        "head weights": sum(p.nbytes for p in heads),
        "head moments": moments(heads),
        "token table": of_rows(bag, True),
        "token table state": of_rows(bag, False),
        "classifier table": of_rows(table, True),
        "classifier state": of_rows(table, False),
    }
    assert {name: planned.get(name, 0) for name in STATE} == real
    assert planned.get("encoder gradients", 0) == sum(p.nbytes for p in transformer if p.requires_grad)
    assert planned["head gradients"] == sum(p.nbytes for p in heads if p.requires_grad)
    assert encoder.width == s.width
    # a checkpoint is these tensors, AdamW's step counts and torch's random state
    trainer.writer.wait()
    newest = max((trainer.run_dir / "checkpoints").glob("step-*"))
    stored = sum(file.stat().st_size for file in newest.glob("*.safetensors"))
    assert checkpoint_bytes(s) < stored < checkpoint_bytes(s) + 40_000


@pytest.mark.parametrize("name", sorted(NAMED))
def test_parameters_of_the_named_encoders(name):
    from transformers import AutoConfig, AutoModel

    from unidec.model.encoder import TransformerEncoder, _options

    values = dict(NAMED[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModel.from_config(config, **_options(config))
    shape = EncoderShape.of(name)
    assert shape.known
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    for layers in (-1, 0, 2):
        trained = sum(p.numel() for p in TransformerEncoder(model, "mean", layers).parameters() if p.requires_grad)
        assert shape.trained_parameters(layers) == trained
    assert EncoderShape.of_config(config.to_dict()) == shape


def test_other_families_and_bad_configs(tmp_path):
    from transformers import MPNetConfig, MPNetModel, RobertaConfig, RobertaModel

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    for config, make in (
        (RobertaConfig(vocab_size=50, **small), RobertaModel),
        (MPNetConfig(vocab_size=50, **small), MPNetModel),
    ):
        model = make(config, add_pooling_layer=False)
        assert EncoderShape.of_config(config.to_dict()).parameters == sum(p.numel() for p in model.parameters())
    assert not EncoderShape.of_config({**NAMED["bert-base-uncased"], "model_type": "new"}).known
    with pytest.raises(ConfigError, match="not a transformer"):
        EncoderShape.of_config({"model_type": "bert"})
    with pytest.raises(ConfigError, match="more layers"):
        EncoderShape.of("bert-base-uncased").trained_layers(13)


def test_rows_of_the_classifier_agree_with_the_optimisers(data, tiny_params):
    for dtype, state, dim in itertools.product(("fp32", "bf16"), ("adam", "adagrad", "sgd"), (1, 16)):
        s = setting(tiny_params(**{"model.clf_dtype": dtype, "optim.clf_state": state, "model.dim": dim}), *data)
        assert (s.row_bytes, s.row_state_bytes) == bytes_per_row(dtype, state, dim)
        assert sum(item.num_bytes for item in classifier_state(s)) == 400 * sum(bytes_per_row(dtype, state, dim))


def test_ranks_share_the_classifier_alone(data, tiny_params):
    alone, three = (amounts(state_items(setting(tiny_params(**{"run.devices": n}), *data))) for n in (1, 3))
    assert three["classifier table"] == 134 * 16 * 4  # 400 labels, the largest part
    assert {k: v for k, v in three.items() if "classifier" not in k} == {
        k: v for k, v in alone.items() if "classifier" not in k
    }


# -- what a step makes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("overrides", [ALL, ONE, {**ALL, "distilbert": True}, {**ONE, "distilbert": True}], ids=str)
def test_activations_are_what_autograd_saves(overrides, precision, data, tiny_params, tiny_distilbert, tmp_path):
    """Within 3% (8% with bfloat16: small masks and casts of vectors count more)."""
    from unidec.model.unidec import UniDEC

    overrides = dict(overrides) | {"optim.precision": precision}
    if overrides.pop("distilbert", False):
        overrides["encoder.name"] = str(tiny_distilbert)
    params, (dataset, tokens) = tiny_params(**overrides), data
    torch.manual_seed(0)
    model = UniDEC.create(params.encoder, params.model, 10, _path(params), 0, params.model_dump()).train()
    rows = np.arange(700)
    batch = InputBuilder(model.encoder, torch.device("cpu"))([("queries", tokens[0], rows)])
    kept = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"),
    ):
        model.encoder(batch)
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    texts = padded_texts([np.sort(tokens[0].lengths(rows))])
    s = setting(params, dataset, tokens)
    s = dataclasses.replace(s, batch=dataclasses.replace(s.batch, texts=texts))
    planned = amounts(work_items(s))
    total = planned["activations"] + amounts(state_items(s)).get("half-precision weights", 0) // 2  # less gradients
    total += planned["encoder input"] if params.encoder.trainable_layers < 0 else 0  # states given are the caller's
    assert total == pytest.approx(real, rel=0.08 if precision == "bf16" else 0.03)


def _path(params):
    from unidec.model.sources import resolve_encoder

    return resolve_encoder(params.encoder.name)


def test_a_frozen_transformer_keeps_nothing(data, tiny_params):
    planned = amounts(work_items(setting(tiny_params(**FROZEN), *data)))
    assert not {"activations", "encoder input"} & planned.keys()
    assert "encoder moments" not in {i.name for i in state_items(setting(tiny_params(**FROZEN), *data)) if i.num_bytes}


@pytest.mark.parametrize("aux_bce", [False, True])
@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("kind", ["ds", "supcon", "triplet", "bce", "hinge", "hardest", "softtopk"])
@pytest.mark.parametrize("forward", [0.0, 0.5, 1.0])
def test_copies_of_the_logits(kind, forward, learn, aux_bce, live):
    """Kept exactly; at most: never more than planned, and planned at most a quarter too high (triplet: twice)."""
    if kind == "bce" and aux_bce:
        pytest.skip("BCE twice is refused")
    if kind == "softtopk" and forward < 1:
        pytest.skip("query to label only")
    num_queries, num_labels, each = 120, 1500, 2
    row_P = torch.arange(num_queries).repeat_interleave(each)
    pairs = len(row_P)
    empty = torch.empty(0, dtype=torch.int64)
    targets = PoolTargets(row_P, torch.randperm(num_labels)[:pairs], torch.ones(pairs, dtype=torch.bool), None,
                          torch.full((num_queries,), each), empty, empty)  # fmt: skip
    query, label = (torch.randn(n, 4, requires_grad=True) for n in (num_queries, num_labels))
    scale = torch.tensor(3.0, requires_grad=learn)

    def loss(kind, logit, forward):
        if kind in ("triplet", "hardest", "hinge"):
            options = {} if kind == "hinge" else {"negatives": "hardest" if kind == "hardest" else "all"}
            name = kind.replace("hardest", "triplet")
            return symmetric_loss(name, logit, targets, reduction="psl", forward=forward, margin=0.3, **options)
        return symmetric_loss(kind, logit * scale, targets, reduction="psl", forward=forward)

    def total():
        logit = query @ label.T
        return loss(kind, logit, forward) + (loss("bce", logit, 1.0) if aux_bce else 0.0)

    planned = loss_copies(kind, forward, aux_bce, learn, pairs, num_queries, num_labels)
    size = 4 * num_queries * num_labels
    with live:
        result = total()
        kept, at_most = live.now / size, live.peak / size
        live.peak = live.now
        result.backward()
        backward = live.peak / size
    assert kept == pytest.approx(planned.kept, abs=0.08)
    slack = 2.0 if kind == "triplet" else 1.25
    assert at_most - 0.1 <= planned.forward <= slack * at_most
    assert backward <= planned.backward + 0.1


PEAKS = {
    "bag": {},
    "bag, dual encoder": {"model.heads": "de"},
    "bag, all labels": {"pool.clf_labels": "all", "model.heads": "clf", "pool.eta": 0},
    "frozen": FROZEN,
    "both": {"encoder.kind": "both", "encoder.trainable_layers": -1},
    "bert": ALL,
    "bert, recomputed": {**ALL, "run.recompute": True},
    "bert, one layer": ONE,
    "distilbert, half": {**ALL, "distilbert": True, "optim.precision": "bf16"},
    "residual": {"encoder.residual": True, "encoder.dropout": 0.1},
    "half rows, adagrad": {"model.clf_dtype": "bf16", "optim.clf_state": "adagrad"},
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_training_steps(name, data, live, tiny_params, tiny_distilbert, tmp_path, monkeypatch):
    """All that lives at once in two steps, on a processor: planned from 5% too low to 25% too high (50% where
    activations are recomputed) for real pools, and never more than 5% too low for planned ones."""
    monkeypatch.setattr(trainer_module, "LOG_EVERY", 1)
    overrides = {"pool.batch_size": 300, "optim.epochs": 1, "pool.refresh": 1, "run.checkpoint_minutes": 0.0} | dict(
        PEAKS[name]
    )
    if overrides.pop("distilbert", False):
        overrides["encoder.name"] = str(tiny_distilbert)
    params, (dataset, tokens) = tiny_params(**overrides), data
    trainer = trainer_module.Trainer(params, dataset, *tokens, tmp_path / "run", tmp_path / "cache")
    trainer.refresh()
    trainer.made = trainer_module.Refresh.load(trainer._refresh_folder(0), 0)
    trainer.model.train()
    batches = sorted(trainer.made.batches(trainer.rows, params.pool.batch_size, 0, 0), key=len)[-2:]
    for rows in trainer.optimisers.row_states().values():
        for tensor in rows.values():
            live.add(tensor)
    for tensor in trainer.model.parameters():
        live.add(tensor)
    pools = []
    with live:
        for number, rows in enumerate(batches):  # the second with AdamW's moments
            pools.append(trainer.train_step(trainer.prepare(rows, number))["pool_size"])
            trainer.step += 1

    s = setting(params, dataset, tokens)
    assert len(trainer.made.offsets) - 1 == s.batch.steps
    assert max(pools) <= s.batch.labels
    assert np.diff(trainer.made.offsets).max() == s.batch.queries

    def planned(s):
        items = [*state_items(s), *work_items(s)]
        return max(sum(item.num_bytes for item in items if item.held(phase)) for phase in STEP)

    assert planned(s) >= 0.95 * live.peak
    lengths = [
        typical_lengths(histogram, count, 16)
        for histogram, count in ((s.sizes.query_lengths, s.batch.queries), (s.sizes.label_lengths, max(pools)))
    ]
    texts = padded_texts(lengths if params.model.heads != "clf" else lengths[:1])
    real = dataclasses.replace(
        s.batch, labels=max(pools), texts=texts, unique_tokens=distinct_tokens(s.sizes, texts.tokens),
        classifier_labels=s.batch.classifier_labels if params.pool.clf_labels == "all" else max(pools),
    )  # fmt: skip
    slack = 1.5 if params.run.recompute else 1.25  # a chunk of the longest texts need not be in these two batches
    assert 0.95 * live.peak <= planned(dataclasses.replace(s, batch=real)) <= slack * live.peak


def test_fused_attention_keeps_no_pairs(data, tiny_params):
    s = setting(tiny_params(**ALL), *data)
    token, pair = layer_bytes(s)
    fused_token, fused_pair = layer_bytes(dataclasses.replace(s, cuda=True, half=True))
    assert pair == 2 * 12 and fused_pair == 0
    assert fused_token < 0.7 * token


# -- data and batches --------------------------------------------------------------------------------------------------


def test_bytes_of_the_data(data, tiny_params):
    dataset, tokens = data
    params = tiny_params()
    plan = make_plan(params, Sizes.of(dataset, *tokens), EncoderShape.of(params.encoder.name), cuda=False, half=False,
                     process=0)  # fmt: skip
    assert plan.named("token ids") == sum(t.ids.nbytes for t in tokens)
    assert plan.named("token offsets") == sum(t.offsets.nbytes for t in tokens)
    csr = dataset.relevance
    assert plan.named("relevance") == csr.data.nbytes + csr.indices.nbytes + dataset.num_queries * 8 + 8
    assert plan.named("hard negatives") == dataset.num_queries * params.pool.eta * params.pool.refresh * 4


def test_typical_batches_are_as_wide_as_drawn_ones(data):
    _, (queries, _) = data
    sizes = Sizes.of(*data[:1], *data[1])
    assert sum(sizes.query_lengths) == len(queries) and sizes.query_tokens == len(queries.ids)
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(40):
        lengths = queries.lengths(rng.choice(len(queries), 600, replace=False))
        drawn.append(sum(len(places) * lengths[places].max() for places in length_chunks(lengths)))
    padded = padded_texts([typical_lengths(sizes.query_lengths, 600, 16)]).padded
    assert 0.98 * np.mean(drawn) <= padded <= 1.05 * np.max(drawn)
    # by hand every text is as long; no texts are no tokens
    assert padded_texts([np.full(600, 7)]) == dataclasses.replace(
        padded_texts([]), count=600, tokens=4200, padded=4200, squares=600 * 49, longest=7, chunk_padded=256 * 7,
        chunk_squares=256 * 49,
    )  # fmt: skip
    assert typical_lengths((0, 0, 5), 3, 1).tolist() == [1, 1, 1]
    assert typical_lengths((), 0, 5).tolist() == [] == typical_lengths((0,), 0, 5).tolist()


def test_distinct_tokens_are_close_to_drawn_ones(data):
    dataset, tokens = data
    sizes, rng = Sizes.of(dataset, *tokens), np.random.default_rng(0)
    ids = np.concatenate([t.ids for t in tokens])
    for count in (1, 64, 1024, 4000):
        drawn = np.mean([len(np.unique(rng.choice(ids, count))) for _ in range(20)])
        assert 0.9 * drawn <= distinct_tokens(sizes, count) <= 1.6 * drawn + 1
    assert distinct_tokens(dataclasses.replace(sizes, distinct=()), 10**9) == sizes.vocab_size


def test_a_sample_of_many_ids(monkeypatch):
    monkeypatch.setattr(sizes_module, "_SAMPLED_IDS", 2560)
    ids = np.arange(10_000)
    sample = sizes_module._sample(ids)
    assert len(sample) == 2560 and sample[0] == 0 and sample[-1] == 9_999
    assert abs(sample.mean() - ids.mean()) < 50
    assert sizes_module._sample(ids[:2560]) is not None and len(sizes_module._sample(ids[:100])) == 100


def test_degenerate_sizes(tiny_params):
    params = tiny_params(**{"pool.batch_size": 512})
    shape = EncoderShape.of(params.encoder.name)
    for labels, queries, tokens in ((1, 1, 1), (1, 5000, 512), (10**9, 1, 32)):
        sizes = Sizes.given(labels, queries, tokens)
        batch = batch_sizes(params, sizes)
        assert 1 <= batch.queries <= 512 and 1 <= batch.labels <= labels and batch.steps >= 1
        plan = make_plan(params, sizes, shape, cuda=True, half=True, process=1)
        assert all(item.num_bytes > 0 for item in plan.items)
        assert set(PHASES) >= {phase for item in plan.items for phase in item.phases}
    with pytest.raises(ConfigError):
        Sizes.given(0, 1, 1)


def test_places(tiny_params, data):
    """With a processor nothing lies on a device; a placed table moves with its state."""
    dataset, tokens = data
    sizes = Sizes.of(dataset, *tokens)

    def plan(cuda, **overrides):
        params = tiny_params(**overrides)
        return make_plan(params, sizes, EncoderShape.of(params.encoder.name), cuda=cuda, half=False, process=1000)

    here, there = plan(False), plan(True)
    assert here.peak("device")[1] == 0 and there.peak("device")[1] > 0
    assert here.state_bytes == there.state_bytes
    for place in ("host", "disk"):
        items = {i.name: i for i in plan(True, **{"run.table_place": place}).items if i.name.startswith("classifier ")}
        assert items["classifier table"].place == items["classifier state"].place == place
        assert plan(True, **{"run.table_place": place}).peak("device")[1] < there.peak("device")[1]
    gandalf = plan(False, **{"pool.gandalf": True})
    assert gandalf.facts["batch_queries"] > here.facts["batch_queries"]
