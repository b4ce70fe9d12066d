"""`unidec plan` and the check before a training: state to the byte, steps against what tensors
take, what would fit.
"""

import functools
import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from helpers.tiny_data import make_raw
from transformers import AutoModel

from unidec import cli
from unidec.config import Params, load_params, with_settings
from unidec.data.dataset import write_dataset
from unidec.data.storage import read_json
from unidec.data.tokens import TokenCache, build_token_cache
from unidec.errors import ArtifactError, ConfigError
from unidec.model import packed
from unidec.model.encoder import TransformerEncoder, transformer_options
from unidec.pipeline import data_stages, memory_probe, paths
from unidec.pipeline.data_sizes import stored_sizes
from unidec.pipeline.live_bytes import LiveBytes
from unidec.pipeline.memory_plan import (
    MARGIN,
    REMEDIES,
    Amount,
    Plan,
    check_fits,
    gib,
    plan_memory,
)
from unidec.pipeline.memory_probe import Sizes, encoder_config, measure, num_rows
from unidec.training import trainer as trainer_module

ALL, ONE, FROZEN = (
    {"encoder.kind": "transformer", "encoder.trainable_layers": layers} for layers in (-1, 1, 0)
)
BY_HAND = ["--labels", "1300000", "--queries", "2248619", "--tokens", "32"]
GIB = 1 << 30


@pytest.fixture(scope="module")
def data(tiny_bert, tmp_path_factory):
    """1,080 training queries, 400 labels and their token caches: steps large enough to drown what
    every step has.
    """
    root = tmp_path_factory.mktemp("memory")
    dataset = write_dataset(
        root / "dataset", make_raw(1200, 100, 400, seed=1), validation_share=0.1
    )
    tokens = [
        TokenCache.open(
            build_token_cache(dataset.text_batches(name), tiny_bert, 16, root / name, size)
        )
        for name, size in (("queries", dataset.num_queries), ("labels", dataset.num_labels))
    ]
    return dataset, tokens


def measured(params, dataset, tokens, *, gpu=False):
    """What a training of this data needs on a CPU, or on a GPU."""
    lengths = [(float(of.lengths().mean()), int(of.lengths().max())) for of in tokens]
    sizes = Sizes(
        num_queries=dataset.num_queries,
        num_train=len(dataset.rows("train")),
        num_labels=dataset.num_labels,
        num_pairs=int(dataset.relevance.nnz),
        query_tokens=lengths[0],
        label_tokens=lengths[1],
        vocab_size=tokens[0].vocab_size,
    )
    return measure(params, sizes, gpu=gpu, half=params.optim.precision == "bf16")


WORDS = {"index.knn_weight": "auto", "index.knn_by": "words", "index.fusion": True}


def by_name(amounts):
    return {amount.name: amount.num_bytes for amount in amounts}


# -- state: exact
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {"model.clf_bias": True},
        {"model.heads": "de", "encoder.residual": True},
        {"model.heads": "clf", "optim.clf_state": "adagrad", "model.learn_temperature": True},
        {"model.clf_dtype": "bf16", "optim.clf_state": "sgd", "pool.clf_labels": "all"},
        {"model.heads": "clf", "model.levels": [8, 3], "pool.shortlist": 2},
        {"optim.clf_state": "adamw", "optim.clf_decay": 0.01},
        {"optim.clf_state": "momentum", "model.clf_bias": True},
        {"model.clf_dtype": "bf16", "optim.clf_state": "adam", "model.clf_bias": True, **FROZEN},
        {"model.clf_dtype": "bf16", "optim.clf_state": "adagrad", "run.table_place": "disk", **ONE},
        {"run.table_place": "host", "encoder.kind": "both", "encoder.trainable_layers": -1},
        {"encoder.kind": "both", "encoder.frozen": True},
        {"encoder.kind": "both", "encoder.bag_words": 77},
        {"encoder.kind": "inception", "encoder.inception_tokens": 9},
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
    trainer.mine()
    trainer.train_round()
    params = Params.model_validate(trainer.settings.everything)
    found = measured(params, trainer.dataset, list(trainer.encoding.tokens.values()))

    rows = trainer.optimisers.row_states()
    tables = {f"{name}.weight" for name in rows}
    dense = [p for name, p in trainer.model.named_parameters() if name not in tables]
    adamw = trainer.optimisers.adamw.state
    moments = sum(
        adamw[p][key].nbytes for p in dense if p in adamw for key in ("exp_avg", "exp_avg_sq")
    )
    of_rows = {name: sum(x.nbytes for x in tensors.values()) for name, tensors in rows.items()}
    bag = sum(size for name, size in of_rows.items() if name.startswith("encoder."))
    real = {
        "encoder and heads": sum(p.nbytes for p in dense) + moments,
        "token table": bag,
        "classifier rows": sum(of_rows.values()) - bag,
    }
    assert found.state == real
    assert trainer.model.encoder.width == found.width
    # a checkpoint holds these tensors, AdamW's step counts and torch's random state
    newest = max((trainer.run_dir / "checkpoints").glob("step-*"))
    stored = sum(file.stat().st_size for file in newest.glob("*.safetensors"))
    assert sum(real.values()) < stored < sum(real.values()) + 40_000


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("distilbert-base-uncased", 66.4),
        ("sentence-transformers/msmarco-distilbert-base-v4", 66.4),
        ("bert-base-uncased", 108.9),
    ],
)
def test_parameters_of_the_known_encoders(name, millions):
    """As their model cards state them, without the pooling head."""
    config = encoder_config(name)
    with torch.device("meta"):
        encoder = AutoModel.from_config(config, **transformer_options(config))
    assert round(sum(p.numel() for p in encoder.parameters()) / 1e6, 1) == millions
    with pytest.raises(ConfigError, match="more trainable layers"):
        TransformerEncoder(encoder, "mean", 13)


def test_encoders_by_folder(tmp_path, tiny_bert):
    assert encoder_config(str(tiny_bert)).num_hidden_layers == 3
    with pytest.raises(ArtifactError):
        encoder_config(str(tmp_path))


def test_ranks_share_the_classifier_alone(data, tiny_params):
    alone, three = (measured(tiny_params(**{"run.devices": n}), *data).state for n in (1, 3))
    # the largest part: 134 of 400 labels
    assert three.pop("classifier rows") == 134 * 16 * 12
    assert alone.pop("classifier rows") == 400 * 16 * 12
    assert alone == three


def test_ranks_share_all_labels_but_not_a_pool(data, tiny_params):
    def found(ranks, **overrides):
        found = measured(tiny_params(**{"run.devices": ranks} | overrides), *data)
        return found.step["heads and losses"]

    wide = {"pool.clf_labels": "all", "model.heads": "clf", "pool.eta": 0}
    assert found(3, **wide) < 0.6 * found(1, **wide)
    triplets = wide | {"loss.clf": "triplet", "loss.clf_bce": 0.0}
    assert found(3, **triplets) > 0.6 * found(1, **triplets)


# -- a step: an upper estimate
# -----------------------------------------------------------------------------------------

PEAKS = {
    "bag": {},
    "bag, dual encoder": {"model.heads": "de"},
    "bag, filled": {"pool.eta": 0, "pool.beta": 1, "pool.fill": True, "pool.size": 0},
    "bag, all labels": {"pool.clf_labels": "all", "model.heads": "clf", "pool.eta": 0},
    "inception": {"encoder.kind": "inception"},
    "frozen": FROZEN,
    "both": {"encoder.kind": "both", "encoder.trainable_layers": -1},
    "bert": ALL,
    "bert, recomputed": {**ALL, "run.recompute": True},
    "bert, one layer": ONE,
    "distilbert, half": {**ALL, "distilbert": True, "optim.precision": "bf16"},
    "distilbert, packed": {
        **ALL,
        "distilbert": True,
        "optim.precision": "bf16",
        "optim.clf_state": "sgd",
        "packed": True,
    },
    "bert, packed, cached": {
        "optim.precision": "bf16",
        "optim.encode_chunk": 64,
        "packed": True,
        **ALL,
    },
    "residual": {"encoder.residual": True, "encoder.dropout": 0.1},
    "half rows, adagrad": {"model.clf_dtype": "bf16", "optim.clf_state": "adagrad"},
    "all labels' texts": {"model.heads": "de", "pool.de_labels": "all"},
    "all labels' texts, bert": {"model.heads": "de", "pool.de_labels": "all", **ALL},
    "bert, cached": {"pool.de_labels": "all", "optim.encode_chunk": 64, **ALL},
    "bert, cached, recomputed": {"optim.encode_chunk": 64, "run.recompute": True, **ALL},
    "bag, cached": {"pool.de_labels": "all", "optim.encode_chunk": 64},
    "bce over all labels": {
        "model.heads": "clf",
        "pool.clf_labels": "all",
        "loss.clf": "bce",
        "loss.clf_bce": 0.0,
    },
    "label tree": {
        "model.heads": "clf",
        "model.levels": [9, 1],
        "pool.shortlist": 20,
        "pool.size": 300,
    },
    "residual rows": {"model.heads": "clf", "model.clf_residual": True},
    "soft top-k": {
        "model.heads": "de",
        "loss.de": "softtopk",
        "loss.de_forward": 1.0,
        "pool.de_labels": "all",
    },
    "hinge": {
        "model.heads": "clf",
        "loss.clf": "hinge",
        "loss.clf_bce": 0.0,
        "pool.clf_labels": "all",
    },
    "frozen bag": {"encoder.frozen": True, "model.heads": "clf", "pool.clf_labels": "all"},
    "frozen both, dropout": {
        "encoder.kind": "both",
        "encoder.frozen": True,
        "encoder.dropout": 0.2,
    },
    "a bag of the start": {"encoder.kind": "both", "encoder.bag_head": 4, "encoder.dropout": 0.2},
    "triplet": {"model.heads": "de", "loss.de": "triplet"},
    "hardest": {"model.heads": "de", "loss.de": "triplet", "loss.triplet_negatives": "hardest"},
}

SLOW_PEAKS = {
    "bert",
    "bert, one layer",
    "all labels' texts",
    "bert, cached",
    "residual",
    "hinge",
    "triplet",
    "hardest",
    "bag, dual encoder",
    "bag, filled",
    "residual rows",
    "frozen bag",
}


class KeptByAttention(torch.autograd.Function):
    """Attention that keeps what a GPU's kernel keeps, and returns zeros."""

    @staticmethod
    def forward(ctx, query, key, value, bounds, most):
        out = torch.zeros_like(query)
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        return (*(torch.zeros_like(tensor) for tensor in ctx.saved_tensors[:3]), None, None)


def pack(trainer, monkeypatch):
    """Let the transformer read packed texts, as on a GPU."""
    monkeypatch.setattr(packed, "varlen", KeptByAttention.apply)
    transformers.AttentionInterface.register(packed.ATTENTION, packed.attend)
    trainer.model.encoder.transformer.transformer.set_attn_implementation(packed.ATTENTION)
    trainer.batches.build = replace(trainer.batches.build, packs=True)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_PEAKS else name for name in PEAKS],
)
def test_the_peak_of_training_steps(
    name, data, tiny_params, tiny_distilbert, tmp_path, monkeypatch
):
    """All tensors of two steps on a processor: estimated at most 5% too low, and at most three
    times too high.
    """
    monkeypatch.setattr(trainer_module, "LOG_EVERY", 1)
    overrides = {
        "pool.batch_size": 300,
        "optim.epochs": 1,
        "pool.refresh": 1,
        "run.checkpoint_minutes": 0.0,
    }
    overrides |= PEAKS[name]
    packs = overrides.pop("packed", False)
    if overrides.pop("distilbert", False):
        overrides["encoder.name"] = str(tiny_distilbert)
    params, (dataset, tokens) = tiny_params(**overrides), data
    trainer = trainer_module.Trainer(
        params.training,
        trainer_module.TrainingData(dataset, *tokens),
        tmp_path / "run",
        tmp_path / "cache",
    )
    trainer.mine()
    trainer.made = trainer_module.Refresh.load(trainer.refresher.folder(0), 0)
    trainer.model.train()
    if packs:
        pack(trainer, monkeypatch)
    batches = sorted(trainer.made.batches(trainer.rows, params.pool.batch_size, 0, 0), key=len)[-2:]
    live = LiveBytes()
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
            trainer.at.step += 1
            del batch

    found = measured(params, dataset, tokens, gpu=packs)
    assert np.diff(trainer.made.offsets).max() <= found.num_queries
    assert max(pools) <= found.num_labels
    planned = sum(found.state.values()) + sum(found.step.values())
    assert 0.95 * live.peak <= planned <= 3 * live.peak


def test_attention_of_long_texts(tiny_params, tiny_bert, tmp_path):
    """It grows with the square of their length, unless it is fused."""
    config = read_json(tiny_bert / "config.json") | {"max_position_embeddings": 8192}
    shutil.copytree(tiny_bert, tmp_path / "bert")
    (tmp_path / "bert" / "config.json").write_text(json.dumps(config))
    overrides = {"encoder.name": str(tmp_path / "bert"), "encoder.kind": "transformer"}
    overrides |= {"encoder.trainable_layers": -1, "tokens.max_length": 8192, "pool.batch_size": 2}
    sizes = Sizes.given(20, 20, 8192)
    scores = 4 * 2 * 8192**2  # float32, two heads
    for gpu in (False, True):
        found = measure(tiny_params(**overrides), sizes, gpu=gpu, half=False)
        texts = found.num_queries + found.num_labels
        assert (found.step["transformer"] > 3 * texts * scores) != gpu, "three layers"
    plan = plan_memory(tiny_params(**overrides), sizes)
    assert by_name(plan.amounts)["attention of long texts"] == 2 * scores
    short = plan_memory(tiny_params(**overrides), Sizes.given(20, 20, 512))
    assert "attention of long texts" not in by_name(short.amounts)


def test_a_frozen_transformer_keeps_nothing(data, tiny_params):
    transformer = measured(tiny_params(**FROZEN), *data).step["transformer"]
    assert transformer == 0


def test_logits_of_all_labels_are_not_counted_if_they_are_not_held(tiny_params):
    sizes = Sizes.given(1_000_000, 100_000, 8)
    of_all = {
        "model.heads": "clf",
        "pool.clf_labels": "all",
        "pool.batch_size": 512,
        "loss.clf_bce": 0.0,
    }
    bce, softmax = (
        measure(tiny_params(**of_all, **{"loss.clf": loss}), sizes, gpu=True, half=False)
        for loss in ("bce", "ds")
    )
    assert bce.step["heads and losses"] < 0.03 * softmax.step["heads and losses"]
    assert bce.num_labels == softmax.num_labels == 1_000_000


def test_a_step_over_all_labels_grows_by_the_label(tiny_params, monkeypatch):
    """What a probe of fewer labels says of all of them is what a probe of all says."""
    params = tiny_params(**{"pool.de_labels": "all", "pool.clf_labels": "all"})
    sizes = Sizes.given(3000, 1000, 8)
    whole = measure(params, sizes, gpu=False, half=False)
    monkeypatch.setattr(memory_probe, "MOST_LABELS", 1000)
    of_few = measure(params, sizes, gpu=False, half=False)
    assert of_few.state == whole.state and of_few.num_labels == whole.num_labels
    for part, size in whole.step.items():
        assert of_few.step[part] == pytest.approx(size, rel=0.02)


def test_chunks_and_recomputing_hold_less_of_a_transformer(data, tiny_params):
    every = {"pool.de_labels": "all", **ALL}
    whole, chunked, recomputed = (
        measured(tiny_params(**every | more), *data).step["transformer"]
        for more in ({}, {"optim.encode_chunk": 50}, {"run.recompute": True})
    )
    assert chunked < recomputed < whole


def test_sizes_follow_what_the_heads_see(data, tiny_params):
    num_labels = data[0].num_labels

    def found(**overrides):
        return measured(tiny_params(**overrides), *data)

    plain = found()
    assert plain.num_labels < num_labels
    assert found(**{"pool.clf_labels": "all"}).num_labels == num_labels
    alone = found(**{"model.heads": "clf"}).step
    assert alone["heads and losses"] < plain.step["heads and losses"]  # no label texts
    texts = found(**{"model.heads": "clf", "model.clf_residual": True}).step
    assert alone["heads and losses"] < texts["heads and losses"]


def test_hard_negatives_and_rows(data, tiny_params):
    """A shortlist where there are hard negatives; labels as queries where their texts are."""
    sizes = Sizes.given(400, 1080, 8)

    def shortlist(**overrides):
        plan = plan_memory(tiny_params(**overrides), sizes, {"device": GIB})
        return by_name(plan.amounts).get("hard negatives", 0)

    plain = shortlist()
    pool = tiny_params().pool
    assert plain == 4 * 1080 * pool.eta * pool.refresh
    assert not shortlist(**{"pool.de_labels": "all", "model.heads": "de"})
    listed = {"model.heads": "clf", "model.levels": [9, 3], "pool.shortlist": 20}
    assert shortlist(**listed) == 4 * 1080 * 60
    half = tiny_params(**{"pool.gandalf": True, "label_graph.share": 0.5})
    assert num_rows(half, sizes) == 1080 + 200
    simcse = tiny_params(**{"model.heads": "de", "pool.eta": 0, "pool.simcse": True})
    assert num_rows(simcse, sizes) == 1080 + 400


def test_an_approximate_search_of_hard_negatives_has_an_index(data, tiny_params):
    """As `mining.uses_faiss` decides."""

    def indexed(labels, **overrides):
        sizes = Sizes.given(labels, 1080, 8)
        return by_name(plan_memory(tiny_params(**overrides), sizes).amounts).get(
            "faiss index of mining", 0
        )

    dim = tiny_params().model.dim
    assert indexed(100_001) == 100_001 * (4 * dim + dim // 2 + 8)
    assert indexed(400, **{"pool.mining": "faiss"}) == 400 * (4 * dim + dim // 2 + 8)
    assert not indexed(50_000)
    assert not indexed(100_001, **{"pool.mining": "exact"})
    assert not indexed(100_001, **{"pool.eta": 0})


def test_large_vectors_of_a_refresh_are_in_files_on_a_cpu(data, tiny_params, monkeypatch):
    """Here those of the labels; the index of mining then stores two bytes a dimension."""
    dim = tiny_params().model.dim
    labels = 100_001
    monkeypatch.setattr("unidec.training.encoding.MOST_IN_MEMORY", 4 * dim * 100_000)
    amounts = plan_memory(tiny_params(), Sizes.given(labels, 1080, 8)).amounts
    vectors = {one.place: one.num_bytes for one in amounts if one.name == "query and label vectors"}
    assert vectors["disk"] == 2 * dim * labels
    assert vectors["host"] < 4 * dim * labels + 4 * 2 * 65_536 * 512
    assert by_name(amounts)["faiss index of mining"] == labels * (2 * dim + dim // 2 + 8)


def test_what_is_held_while_the_index_is_built(tiny_params, monkeypatch):
    labels, queries = 3_000, 1_080
    sizes = Sizes.given(labels, queries, 8)

    def held(**overrides):
        return by_name(plan_memory(tiny_params(**overrides), sizes).held("host", "index"))

    dim = tiny_params().model.dim
    names = 32 + 8 * 8
    for factory, each in (("Flat", 8 * dim), ("HNSW8", 8 * dim), ("auto", dim // 2)):
        found = held(**{"index.factory": factory})
        assert found["label names and index"] == 2 * labels * (names + each)
        assert "words of texts" not in found
    assert held(**WORDS)["words of texts"] == 90 * 8 * (labels + queries)
    in_memory = held()["label vectors"]
    monkeypatch.setattr("unidec.training.encoding.MOST_IN_MEMORY", 0)
    assert in_memory - held()["label vectors"] == 4 * labels * 2 * dim


@pytest.mark.parametrize(
    ("overrides", "is_cached"),
    [
        ({"encoder.kind": "bag"}, False),
        ({"encoder.kind": "bag", "encoder.frozen": True}, True),
        ({"encoder.kind": "both", "encoder.trainable_layers": 0}, True),
        ({"encoder.kind": "transformer", "encoder.trainable_layers": 1}, False),
    ],
)
def test_outputs_are_cached_of_what_is_not_trained(tiny_params, overrides, is_cached):
    plan = plan_memory(tiny_params(**overrides), Sizes.given(400, 1080, 8))
    assert ("cached outputs of what is frozen" in by_name(plan.amounts)) == is_cached


def test_a_transformer_that_is_all_that_trains(tiny_params):
    """As NGAME's first stage: without a projection no other weight has a gradient."""
    settings = {
        "encoder.kind": "transformer",
        "encoder.trainable_layers": -1,
        "model.heads": "de",
        "model.projection": False,
        "model.dim": 32,
        "index.space": "de",
    }
    plan = plan_memory(tiny_params(**settings), Sizes.given(400, 1080, 8))
    assert by_name(plan.amounts)["transformer"] > 0


def test_degenerate_sizes(tiny_params):
    params = tiny_params(**{"pool.batch_size": 512})
    for labels, queries, tokens in (
        (1, 1, 1),
        (1, 5000, 512),
        (10**9, 1, 32),
    ):
        plan = plan_memory(params, Sizes.given(labels, queries, tokens), {"device": GIB})
        assert all(amount.num_bytes >= 0 for amount in plan.amounts)
        assert plan.state_bytes > 0


def test_places(tiny_params, data):
    """Without a GPU nothing is on a device; a table moves with its optimiser state."""

    def planned(free, **overrides):
        return plan_memory(tiny_params(**overrides), Sizes.given(400, 1080, 8), free)

    here = planned({})
    there = planned({"device": GIB})
    assert here.peak("device")[1] == 0
    assert there.peak("device")[1] > 0
    assert here.state_bytes == there.state_bytes
    for place in ("host", "disk"):
        moved = planned({"device": GIB}, **{"run.table_place": place})
        assert next(i.place for i in moved.amounts if i.name == "classifier rows") == place
        assert moved.peak("device")[1] < there.peak("device")[1]


def test_places_and_phases_of_a_plan():
    amounts = (
        Amount("a", "device", 100),
        Amount("b", "device", 50, "step"),
        Amount("c", "device", 70, "refresh"),
        Amount("d", "disk", 7),
    )

    def with_free(**free):
        return Plan(amounts, "cuda", "", free)

    found = with_free()
    assert found.peak("device") == ("refresh", 170)
    assert found.needed("device")["step"] == 150
    assert found.peak("host")[1] == 0
    assert found.peak("disk")[1] == 7
    exact = int(170 / (1 - MARGIN)) + 1
    expected = {"device": 170 / (1 - MARGIN) - (exact - 2)}
    assert with_free(device=exact - 2, disk=1000).shortages == expected
    assert not with_free(device=exact, disk=1000).shortages
    assert not with_free(device=None).shortages


def test_amounts_in_words():
    assert gib(0) == "0.00 MiB"
    assert gib(1 << 30) == "1.00 GiB"
    assert gib(5 << 20) == "5.00 MiB"


# -- on a working folder, and by hand
# ----------------------------------------------------------------------------------


@pytest.fixture
def ingested(in_work):
    if not paths.DATASET.is_dir():
        data_stages.ingest(in_work.params())
    if not paths.TOKENS.is_dir():
        data_stages.tokens(in_work.params())
    params = functools.partial(in_work.params, **{"run.check_memory": True})
    return SimpleNamespace(folder=in_work.folder, params=params)


@pytest.fixture
def run_cli(monkeypatch, capsys):
    """`run_cli("plan", ...)` -> (exit code, output, errors)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["unidec", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture
def papers(tmp_path, monkeypatch):
    """A folder with the papers' setting, and no data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("recipe: unidec-gpu-paper\nmodel: {dim: 256}\n")


def test_the_training_here_fits(ingested):
    params = ingested.params()
    check_fits(params)
    planned = plan_memory(params)
    assert not planned.short
    assert planned.device == "cpu"
    assert planned.lines()[-1].startswith("fits")
    sizes = stored_sizes(params)
    assert sizes.num_queries == 2500
    assert sizes.num_train == 1900
    assert sizes.num_labels == 4497


def test_a_label_graph_that_training_does_not_use_is_not_read(ingested, tmp_path, monkeypatch):
    params = ingested.params()
    num_pairs = stored_sizes(params).num_pairs
    monkeypatch.setitem(paths.RELATIVE, "LABEL_GRAPH", tmp_path)
    assert stored_sizes(params).num_pairs == num_pairs == paths.open_dataset().relevance.nnz


@pytest.mark.parametrize("place", ["host", "disk"])
def test_what_does_not_fit_is_refused_with_what_would(ingested, place):
    params = ingested.params(**{"pool.batch_size": 2048})
    # the index is made later, on another machine if need be
    needed = plan_memory(params, training_only=True).peak(place)[1]
    enough = int(needed / 0.95) + (64 << 20)
    check_fits(params, {place: enough})
    with pytest.raises(ConfigError) as error:
        check_fits(params, {place: needed - (64 << 20)})
    message = str(error.value)
    other = {"host": "disk", "disk": "memory"}[place]
    lacking = {"host": "too little host memory", "disk": "too little disk space"}[place]
    assert all(word in message for word in (lacking, "got:", "expected:", "fix:", "unidec plan"))
    assert (
        other not in message.splitlines()[0]
        and f"iB more {lacking.removeprefix('too little ')}" in message
    )
    assert "--" not in message  # `unidec.fit` raises it too
    check_fits(with_settings(params, {"run.check_memory": False}), {"host": 1})


def test_advice_of_the_error_makes_it_fit(ingested):
    """A GPU by its size alone: the error names a setting, and with it the check passes."""
    params = ingested.params(**{"pool.batch_size": 2048, **ALL})
    needed = plan_memory(params, free={"device": 1}).peak("device")[1]
    with pytest.raises(ConfigError, match=r"run\.recompute: true"):
        check_fits(params, {"device": needed})
    check_fits(with_settings(params, {"run.recompute": True}), {"device": needed})


def test_nothing_ingested(tmp_path, monkeypatch, in_work):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError):
        plan_memory(in_work.params(**{"encoder.name": str(in_work.folder / "bert")}))


def test_by_hand(run_cli, papers):
    """The papers' 1.3M setting needs no data and no encoder here; what is too large ends with exit
    code 1.
    """
    code, out, _ = run_cli("plan", *BY_HAND, "--device-memory", "44.7GiB")
    assert (
        code == 0
        and out.splitlines()[-1] == "fits"
        and "classifier rows" in out
        and "GPU memory: " in out
    )
    code, out, _ = run_cli("plan", *BY_HAND, "--device-memory", "16GiB")
    lines = out.splitlines()
    assert code == 1 and lines[-2].startswith("does not fit: GPU memory")
    assert lines[-1] == "fix: --set run.recompute=true"
    code, out, _ = run_cli("plan", *BY_HAND, "--device-memory", "16GiB", "--json")
    result = json.loads(out)
    assert code == 1
    assert result["advice"] == {"run.recompute": True}
    assert not result["fits"]
    assert 4 < result["state_bytes"] / GIB < 6
    assert result["peaks"]["device"][0] == "step"
    places = {item["place"] for item in result["estimate"]["amounts"]}
    assert places == {"device", "host", "disk"}


def test_mistakes_by_hand(run_cli, papers):
    code, _, errors = run_cli("plan", "--labels", "5")
    assert code == 2 and "--queries" in errors
    for text in ("much", "GiB", "16XB", "16 gigs"):
        code, _, errors = run_cli("plan", *BY_HAND, "--device-memory", text)
        assert code == 2 and "not a size of memory" in errors and "16GiB" in errors


# -- advice
# --------------------------------------------------------------------------------------------------

PAPER = Sizes.given(1_300_000, 2_248_619, 32)


def paper_params(**overrides):
    """LF-AmazonTitles-1.3M as the papers train it."""
    values = {
        "encoder.name": "distilbert-base-uncased",
        **ALL,
        "model.dim": 256,
        "pool.batch_size": 1098,
        "pool.size": 3000,
    }
    return with_settings(Params(), values | overrides)


def plan_of(params, sizes=PAPER, free=None):
    return plan_memory(params, sizes, free or {"device": 10_000 * GIB}, training_only=True)


def roomy(device_gib):
    return {
        "device": int(device_gib * GIB),
        "host": 10_000 * GIB,
        "disk": 10_000 * GIB,
    }


def test_the_papers_setting():
    """1,098 queries, 3,000 labels; the state is some 5 GiB, the step fits the 48 GB card of the
    papers.
    """
    found = plan_of(paper_params(), free=roomy(44.7))
    assert found.step == "1,098 queries, 3,000 labels, bf16"
    assert 4 * GIB < found.state_bytes < 6 * GIB
    assert not found.shortages
    assert plan_of(paper_params(), free=roomy(24)).shortages


def test_adapters_of_a_decoder_of_600_million_parameters_fit_24_gigabytes(tmp_path):
    """Qwen3-Embedding-0.6B, texts of 64 tokens, by adapters; all of its weights do not fit."""
    config = transformers.Qwen3Config(
        vocab_size=151_669,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
    )
    config.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    overrides = {
        "encoder.name": str(tmp_path),
        "encoder.lora": {"rank": 16},
        "model.dim": 1024,
        "pool.batch_size": 256,
        "pool.size": 1024,
        "optim.encode_chunk": 64,
    }
    sizes = Sizes.given(131_073, 294_805, 64)
    found = plan_of(paper_params(**overrides), sizes, roomy(24))
    assert not found.shortages
    state = by_name(found.amounts)["encoder and heads"]
    assert 4 * 596e6 < state < 4.3 * 596e6, "moments of the adapters and heads alone"
    whole = plan_of(paper_params(**overrides | {"encoder.lora": {}}), sizes)
    state = by_name(whole.amounts)["encoder and heads"]
    assert state > 3 * 4 * 596e6


@pytest.mark.parametrize(
    ("recipe", "tokens"),
    [
        ("unidec-gpu-paper", 32),
        ("unidec-gpu-long", 128),
    ],
)
def test_the_shipped_recipes_fit_the_papers_card(recipe, tokens):
    """LF-Amazon(Titles)-131K: the recipe sets run.recompute where it is needed."""
    params = load_params(None, {"recipe": recipe})
    found = plan_of(params, Sizes.given(131_073, 294_805, tokens), roomy(44.7))
    assert not found.shortages


@pytest.mark.parametrize(
    "device", [8, *(pytest.param(gib, marks=pytest.mark.slow) for gib in (0.1, 3, 5, 12, 16))]
)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(PAPER, id="1.3M"),
        pytest.param(Sizes.given(20_000_000, 100_000, 16), id="20M", marks=pytest.mark.slow),
    ],
)
def test_taking_the_advice_makes_it_fit(device, sizes):
    """The mildest single setting that is enough, else several."""
    free = roomy(device)
    params = paper_params(**{"pool.eta": 0, "pool.batches": "random"})

    def fits(settings):
        changed = with_settings(params, settings)
        return changed is not None and not plan_of(changed, sizes, free).shortages

    advised = plan_of(params, sizes, free).advice or {}
    assert bool(advised) == (device >= 3 and not fits({}))
    assert not advised or fits(advised)
    single = next((remedy for remedy in REMEDIES if fits(remedy)), advised)
    assert advised == single or fits({})
    if device == 12 and sizes is PAPER:
        assert advised == {"run.recompute": True}


def test_450_million_labels_on_one_card():
    sizes = Sizes.given(450_000_000, 1_000_000, 12)
    common = {
        "model.heads": "clf",
        "model.dim": 64,
        "pool.eta": 0,
        "pool.batches": "random",
        "index.space": "clf",
        "pool.batch_size": 2048,
        "model.clf_init": "normal",
    }
    card = {"device": int(141e9)}
    for state, gigabytes in (("adagrad", 59.4), ("sgd", 57.6)):
        found = plan_of(
            paper_params(**common, **{"model.clf_dtype": "bf16", "optim.clf_state": state}),
            sizes,
            card,
        )
        assert by_name(found.amounts)["classifier rows"] == pytest.approx(
            gigabytes * 1e9, rel=0.001
        )
        assert not found.shortages
    adam = paper_params(**common)
    found = plan_of(adam, sizes, card)
    assert found.shortages and found.advice is not None
    assert not plan_of(with_settings(adam, found.advice), sizes, card).shortages


def test_every_remedy_is_a_valid_setting_that_shrinks_something():
    params = paper_params(
        **{"pool.clf_labels": "all", "pool.de_labels": "all", "tokens.max_length": 128},
        **WORDS,
    )
    sizes = Sizes.given(1_300_000, 2_248_619, 128)
    free = roomy(10_000)
    before = plan_memory(params, sizes, free)
    for remedy in REMEDIES:
        changed = with_settings(params, remedy)
        if remedy.keys() == {"run.table_place"}:  # all labels train only in a table on the device
            assert changed is None
            continue
        assert changed is not None and changed != params, remedy
        after = plan_memory(changed, sizes, free)
        assert (
            after.needed("device")["step"] < before.needed("device")["step"]
            or after.state_bytes < before.state_bytes
            or "words of texts" not in by_name(after.amounts)
        )
