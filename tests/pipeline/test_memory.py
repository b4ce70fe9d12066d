"""The memory estimate against reality: state to the byte, steps against what tensors take, advice that makes it fit."""

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from unidec.config import Params
from unidec.data.dataset import write_dataset
from unidec.data.tokens import TokenCache, build_token_cache
from unidec.errors import ArtifactError, ConfigError
from unidec.model import full_bce, hinge
from unidec.model.encoder import InputBuilder, TransformerEncoder, length_chunks
from unidec.pipeline import memory
from unidec.pipeline.memory import (
    MARGIN,
    STATE,
    Amount,
    Estimate,
    Setting,
    empty_encoder,
    estimate,
    gib,
    state_amounts,
    step_amounts,
)
from unidec.pipeline.step_sizes import Sizes, Texts, batch_sizes, training_rows, typical_lengths
from unidec.training import trainer as trainer_module

ALL, ONE, FROZEN = ({"encoder.kind": "transformer", "encoder.trainable_layers": layers} for layers in (-1, 1, 0))


@pytest.fixture(scope="module")
def data(helper, tiny_bert, tmp_path_factory):
    """1,080 training queries, 400 labels and their token caches: steps large enough to drown what every step has."""
    root = tmp_path_factory.mktemp("memory")
    dataset = write_dataset(root / "dataset", helper("conftest").make_raw(1200, 100, 400, seed=1), validation_share=0.1)
    tokens = [
        TokenCache.open(build_token_cache(dataset.text_batches(name), tiny_bert, 16, root / name, size))
        for name, size in (("queries", dataset.num_queries), ("labels", dataset.num_labels))
    ]
    return dataset, tokens


@pytest.fixture
def live(helper):
    """Counts the bytes of tensors that live."""
    return helper("training/live_bytes").LiveBytes()


def setting(params, dataset, tokens):
    sizes = Sizes.of(dataset, *tokens)
    half = params.optim.precision == "bf16"
    return Setting.of(params, sizes, empty_encoder(params.encoder.name), False, half)


def amounts(s):
    """Bytes by name: of the state, and of what a step allocates."""
    totals = {}
    for amount in (*state_amounts(s), *step_amounts(s)):
        totals[amount.name] = totals.get(amount.name, 0) + amount.num_bytes
    return totals


def state_of(s):
    return {name: size for name, size in amounts(s).items() if name in STATE}


# -- state: exact ---------------------------------------------------------------------------------------


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
def test_weights_and_state_are_exact(overrides, open_trainer, tiny_distilbert):
    overrides = dict(overrides)
    if overrides.pop("distilbert", False):
        overrides["encoder.name"] = str(tiny_distilbert)
    trainer = open_trainer(**overrides, **{"optim.epochs": 1, "pool.refresh": 1})
    trainer.refresh()
    trainer.train_round()
    params = Params.model_validate(trainer.settings.everything)
    s = setting(params, trainer.dataset, list(trainer.tokens.values()))
    planned = amounts(s)

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
    assert encoder.width == s.model.encoder.width
    # a checkpoint holds these tensors, AdamW's step counts and torch's random state
    trainer.writer.wait()
    newest = max((trainer.run_dir / "checkpoints").glob("step-*"))
    stored = sum(file.stat().st_size for file in newest.glob("*.safetensors"))
    checkpoint = sum(real.values())
    assert checkpoint < stored < checkpoint + 40_000


@pytest.mark.parametrize(
    ("name", "millions"),
    [("distilbert-base-uncased", 66.4), ("bert-base-uncased", 108.9), ("someone/all-MiniLM-L6-v2", 22.6)],
)
def test_parameters_of_the_known_encoders(name, millions):
    """As their model cards state them, without the pooling head."""
    count = sum(p.numel() for p in empty_encoder(name).parameters())
    assert round(count / 1e6, 1) == millions
    with pytest.raises(ConfigError, match="more layers"):
        TransformerEncoder(empty_encoder(name), "mean", 13)


def test_encoders_by_file(tmp_path, tiny_bert):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "distilbert", "dim": 96, "hidden_dim": 100, "n_heads": 2}))
    found = empty_encoder("anything", file)
    assert found.config.hidden_size == 96 and all(p.device.type == "meta" for p in found.parameters())
    assert empty_encoder(str(tiny_bert)).config.num_hidden_layers == 3
    with pytest.raises(ArtifactError):
        empty_encoder(str(tmp_path))
    for number, text in enumerate(("{", "{}", '{"model_type": "no such"}')):
        broken = tmp_path / f"{number}.json"
        broken.write_text(text)
        with pytest.raises(ConfigError, match="not a transformer"):
            empty_encoder("anything", broken)


def test_rows_of_the_classifier_agree_with_the_optimisers(data, tiny_params):
    for dtype, state, dim in itertools.product(("fp32", "bf16"), ("adam", "adagrad", "sgd"), (1, 16)):
        s = setting(tiny_params(**{"model.clf_dtype": dtype, "optim.clf_state": state, "model.dim": dim}), *data)
        found = state_of(s)
        a_row = dim * (2 if dtype == "bf16" else 4) + {"adam": 8 * dim, "adagrad": 4, "sgd": 0}[state]
        assert found["classifier table"] + found["classifier state"] == 400 * a_row


def test_ranks_share_the_classifier_alone(data, tiny_params):
    alone, three = (state_of(setting(tiny_params(**{"run.devices": n}), *data)) for n in (1, 3))
    assert three["classifier table"] == 134 * 16 * 4  # 400 labels, the largest part
    assert {k: v for k, v in three.items() if "classifier" not in k} == {
        k: v for k, v in alone.items() if "classifier" not in k
    }


# -- a step: an upper estimate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("overrides", [ALL, ONE, {**ALL, "distilbert": True}, {**ONE, "distilbert": True}], ids=str)
def test_activations_are_what_autograd_saves(overrides, precision, data, tiny_params, tiny_distilbert, tmp_path):
    """Never less than autograd saves (by more than 5%), at most half more."""
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
    texts = Texts.of([np.sort(tokens[0].lengths(rows))])
    s = setting(params, dataset, tokens)
    s = dataclasses.replace(s, batch=dataclasses.replace(s.batch, texts=texts, held=texts))
    assert 0.95 * real <= amounts(s)["activations"] + amounts(s).get("bfloat16 weights and gradients", 0) <= 1.5 * real


def _path(params):
    from unidec.model.sources import resolve_encoder

    return resolve_encoder(params.encoder.name)


def test_a_frozen_transformer_keeps_nothing(data, tiny_params):
    planned = amounts(setting(tiny_params(**FROZEN), *data))
    assert "activations" not in planned and not planned["encoder moments"]


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
    "all labels' texts": {"model.heads": "de", "pool.de_labels": "all"},
    "all labels' texts, bert": {"model.heads": "de", "pool.de_labels": "all", **ALL},
    "bert, cached": {"pool.de_labels": "all", "optim.encode_chunk": 64, **ALL},
    "bert, cached, recomputed": {"optim.encode_chunk": 64, "run.recompute": True, **ALL},
    "bag, cached": {"pool.de_labels": "all", "optim.encode_chunk": 64},
    "bce over all labels": {"model.heads": "clf", "pool.clf_labels": "all", "loss.clf": "bce", "loss.clf_bce": 0.0},
    "residual rows": {"model.heads": "clf", "model.clf_residual": True},
    "soft top-k": {"model.heads": "de", "loss.de": "softtopk", "loss.de_forward": 1.0, "pool.de_labels": "all"},
    "hinge": {"model.heads": "clf", "loss.clf": "hinge", "loss.clf_bce": 0.0, "pool.clf_labels": "all"},
    "frozen bag": {"encoder.frozen": True, "model.heads": "clf", "pool.clf_labels": "all"},
    "frozen both, dropout": {"encoder.kind": "both", "encoder.frozen": True, "encoder.dropout": 0.2},
    "a bag of the start": {"encoder.kind": "both", "encoder.bag_head": 4, "encoder.dropout": 0.2},
    "triplet": {"model.heads": "de", "loss.de": "triplet"},
    "hardest": {"model.heads": "de", "loss.de": "triplet", "loss.triplet_negatives": "hardest"},
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_training_steps(name, data, live, tiny_params, tiny_distilbert, tmp_path, monkeypatch):
    """All tensors of two steps on a processor: estimated at most 5% too low, and at most twice too high."""
    monkeypatch.setattr(trainer_module, "LOG_EVERY", 1)
    overrides = {"pool.batch_size": 300, "optim.epochs": 1, "pool.refresh": 1, "run.checkpoint_minutes": 0.0}
    overrides |= PEAKS[name]
    if overrides.pop("distilbert", False):
        overrides["encoder.name"] = str(tiny_distilbert)
    params, (dataset, tokens) = tiny_params(**overrides), data
    trainer = trainer_module.Trainer(
        params.training, trainer_module.TrainingData(dataset, *tokens), tmp_path / "run", tmp_path / "cache"
    )
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
            batch = trainer.prepare(rows, number)
            pools.append(len(batch.pool.pool_S))
            trainer.train_step(batch)
            trainer.step += 1
            del batch

    s = setting(params, dataset, tokens)
    assert len(trainer.made.offsets) - 1 == s.batch.steps
    assert np.diff(trainer.made.offsets).max() == s.batch.queries
    assert max(pools) <= s.batch.labels
    assert 0.95 * live.peak <= sum(amounts(s).values()) <= 2 * live.peak


def test_constants_of_the_code():
    assert memory._FULL_BCE_CHUNK == full_bce.CHUNK
    assert memory._TRIPLET_BLOCK == hinge._TripletAll.BLOCK


def test_logits_of_all_labels_are_not_counted_if_they_are_not_held(tiny_params):
    sizes = Sizes.given(1_000_000, 100_000, 8)
    of_all = {"model.heads": "clf", "pool.clf_labels": "all", "pool.batch_size": 512, "loss.clf_bce": 0.0}
    shape = empty_encoder("distilbert-base-uncased")

    def logits(**overrides):
        params = tiny_params(**of_all, **overrides)
        found = estimate(params, sizes, shape, cuda=True, half=False, process=0)
        return found.named("logits and losses, classifier")

    assert logits(**{"loss.clf": "bce"}) < 0.03 * logits(**{"loss.clf": "ds"})


# -- data and batches --------------------------------------------------------------------------------------------------


def test_typical_batches_are_as_wide_as_sampled_ones(data):
    _, (queries, _) = data
    sizes = Sizes.of(*data[:1], *data[1])
    assert sum(sizes.query_lengths) == len(queries)
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(40):
        lengths = queries.lengths(rng.choice(len(queries), 600, replace=False))
        drawn.append(sum(len(places) * lengths[places].max() for places in length_chunks(lengths)))
    padded = Texts.of([typical_lengths(sizes.query_lengths, 600, 16)]).padded
    assert 0.98 * np.mean(drawn) <= padded <= 1.05 * np.max(drawn)
    assert Texts.of([np.full(600, 7)]) == Texts(600, 4200, 4200, 600 * 49)
    assert typical_lengths((0, 0, 5), 3, 1).tolist() == [1, 1, 1]
    assert typical_lengths((), 0, 5).tolist() == [] == typical_lengths((0,), 0, 5).tolist()


def test_sizes_follow_what_the_heads_see(data, tiny_params):
    dataset, tokens = data
    sizes = Sizes.of(dataset, *tokens)

    def batch(**overrides):
        return batch_sizes(tiny_params(**overrides), sizes)

    plain, every = batch(), batch(**{"pool.de_labels": "all"})
    assert plain.labels < every.labels == sizes.num_labels
    assert plain.classifier_labels == every.classifier_labels == plain.labels
    assert every.texts.count - plain.texts.count == every.labels - plain.labels
    assert plain.negatives > 0 and batch(**{"pool.de_labels": "all", "model.heads": "de"}).negatives == 0
    alone = batch(**{"model.heads": "clf"})
    assert alone.texts.count == alone.queries
    assert batch(**{"model.heads": "clf", "model.clf_residual": True}).texts.count == alone.queries + alone.labels
    part = batch(**{"pool.de_labels": "all", "optim.encode_chunk": 50})
    assert part.texts == every.texts and part.held.count == 50 and every.held is every.texts
    longest = max(int(lengths.lengths().max()) for lengths in tokens)
    assert part.held.padded == 50 * longest


@pytest.mark.parametrize(("share", "rows"), [(1.0, 400), (0.5, 200), (0.001, 1)])
def test_with_gandalf_labels_are_training_rows(share, rows, data, tiny_params):
    sizes = Sizes.of(data[0], *data[1])
    params = tiny_params(**{"pool.gandalf": True, "label_graph.share": share})
    assert training_rows(params, sizes) == sizes.num_train + rows
    assert training_rows(tiny_params(), sizes) == sizes.num_train


def test_degenerate_sizes(tiny_params):
    params = tiny_params(**{"pool.batch_size": 512})
    shape = empty_encoder(params.encoder.name)
    for labels, queries, tokens in ((1, 1, 1), (1, 5000, 512), (10**9, 1, 32)):
        sizes = Sizes.given(labels, queries, tokens)
        batch = batch_sizes(params, sizes)
        assert 1 <= batch.queries <= 512 and 1 <= batch.labels <= labels and batch.steps >= 1
        found = estimate(params, sizes, shape, cuda=True, half=True, process=1)
        assert all(amount.num_bytes > 0 for amount in found.amounts)
    with pytest.raises(ConfigError):
        Sizes.given(0, 1, 1)


def test_places(tiny_params, data):
    """Without a GPU nothing is on a device; a table moves with its optimiser state."""
    dataset, tokens = data
    sizes = Sizes.of(dataset, *tokens)

    def plan(cuda, **overrides):
        params = tiny_params(**overrides)
        return estimate(params, sizes, empty_encoder(params.encoder.name), cuda=cuda, half=False, process=1000)

    here, there = plan(False), plan(True)
    assert here.peak("device")[1] == 0 and there.peak("device")[1] > 0
    assert here.state_bytes == there.state_bytes
    for place in ("host", "disk"):
        items = {i.name: i for i in plan(True, **{"run.table_place": place}).amounts if i.name in STATE}
        assert items["classifier table"].place == items["classifier state"].place == place
        assert plan(True, **{"run.table_place": place}).peak("device")[1] < there.peak("device")[1]
    gandalf = plan(False, **{"pool.gandalf": True})
    assert gandalf.facts["batch_queries"] > here.facts["batch_queries"]


# -- places and phases -----------------------------------------------------------------------------------------------


def test_places_and_phases_of_an_estimate():
    found = Estimate(
        (Amount("a", "device", 100), Amount("b", "device", 50, "step"),
         Amount("c", "device", 70, "refresh"), Amount("d", "disk", 7)), "cuda",
    )  # fmt: skip
    assert found.peak("device") == ("refresh", 170)
    assert found.peak("device", ["step", "always"]) == ("step", 150)
    assert found.peak("host")[1] == 0 and found.peak("disk")[1] == 7
    exact = int(170 / (1 - MARGIN)) + 1
    (short,) = found.shortages({"device": exact - 2, "disk": 1000})
    assert (short.place, short.phase, short.needed, short.free) == ("device", "refresh", 170, exact - 2)
    assert not found.shortages({"device": exact, "disk": 1000}) and not found.shortages({"device": None})
    assert not found.shortages({"device": 160}, ["step"])


def test_amounts_in_words():
    assert gib(0) == "0.00 KiB" and gib(1 << 30) == "1.00 GiB" and gib(5 << 20) == "5.00 MiB"


# -- the host memory of a real process ---------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from pathlib import Path
from unidec.config import Params
from unidec.machine import host_peak
from unidec.pipeline.plan import TRAINING, process_bytes
from unidec.pipeline.memory import empty_encoder, estimate
from unidec.pipeline.step_sizes import Sizes
from unidec.pipeline.step_timing import random_data
from unidec.training.trainer import Trainer

root, bert = Path(sys.argv[1]), sys.argv[2]
params = Params.model_validate({
    "device": "cpu", "encoder": {"name": bert, "kind": "bag", "trainable_layers": 0},
    "model": {"dim": 256}, "pool": {"batch_size": 512, "size": 2000, "refresh": 1, "eta": 3},
    "optim": {"epochs": 1, "precision": "fp32"}, "tokens": {"max_length": 16},
})
data = random_data(root, 1_000, 80_000, Sizes.given(80_000, 1_000, 8, vocab_size=500), params)
sizes = Sizes.of(data.dataset, data.query_tokens, data.label_tokens)
base = process_bytes()
trainer = Trainer(params.training, data, root / "run", root / "cache")
trainer.refresh()
trainer.train_round()
plan = estimate(params, sizes, empty_encoder(bert), cuda=False, half=False, process=base)
print(json.dumps({"base": base, "used": host_peak(), "planned": plan.peak("host", TRAINING)[1]}))
"""


def test_host_memory_of_a_process(tiny_bert, tmp_path):
    """80,000 labels, 256 wide: beyond the libraries it takes what was planned, within a factor of 1.5 either way."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(tiny_bert)], capture_output=True, text=True, timeout=240,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    figures = json.loads(found.stdout.splitlines()[-1])
    used, planned = figures["used"] - figures["base"], figures["planned"] - figures["base"]
    assert planned > 300 << 20  # large enough to be seen beside the libraries
    assert used / 1.5 < planned < used * 1.5
