"""Every shipped recipe: a complete head, the settings of the spec's tables, training with and
without Gandalf.
"""

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import golden
from torch.utils._python_dispatch import _disable_current_modes

from unidec.config import load_params, parse_overrides, recipe_names, to_yaml
from unidec.data.json_file import read_json_lines
from unidec.data.tokens import encode_texts
from unidec.model import soft_topk
from unidec.model.first_rows import start_table
from unidec.model.pool import num_clusters
from unidec.model.unidec import UniDEC
from unidec.training.round_refresh import Refresh
from unidec.training.sampler import queries_a_batch
from unidec.training.trainer import Trainer, TrainingData

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "unidec" / "recipes"
FIELDS = ["Recipe", "Paper", "Reproduces", "Follows", "Differs", "Expected", "Time"]

# the systems' table of the spec, and its table of settings, as parameters
UNIDEC = {
    "model.heads": "both",
    "loss.reduction": "psl",
    "pool.batches": "clustered",
    "loss.balance": 0.5,
    "loss.de_forward": 0.5,
    "loss.clf_forward": 0.5,
    "pool.beta": 3,
    "pool.eta": 6,
    "model.temperature": 1 / 18,
    "index.space": "both",
}
ENCODER_ALONE = {
    "model.heads": "de",
    "loss.reduction": "psl",
    "pool.batches": "clustered",
    "loss.de_forward": 0.5,
    "model.temperature": 1 / 18,
    "index.space": "de",
}
ONE_POSITIVE = {
    "model.heads": "de",
    "loss.reduction": "pol",
    "pool.beta": 1,
    "loss.de_forward": 1.0,
    "index.space": "de",
}
PAPER = {
    "encoder.trainable_layers": -1,
    "optim.lr_encoder": 1e-4,
    "optim.lr_heads": 2e-4,
    "optim.lr_clf": 1e-3,
    "optim.warmup_epochs": 3,
    "optim.weight_decay": 0.05,
    "pool.refresh": 5,
    "pool.start_epoch": 5,
    "optim.clip_norm": 0.0,
    "model.clf_dropout": 0.1,
    "model.dim": 384,
}
OVA = {"model.heads": "clf", "loss.clf": "bce", "loss.clf_bce": 0.0, "index.space": "clf"}
DECAF = OVA | {
    "encoder.kind": "bag",
    "encoder.residual": True,
    "model.clf_residual": True,
    "model.clf_gates": True,
    # the papers: BCE
    "model.clf_bias": True,
    "pool.clf_labels": "pool",
    "loss.clf": "ds",
}
SPEC = {
    "unidec": {"model.heads": "both", "loss.reduction": "psl", "loss.de": "ds", "loss.clf": "ds"},
    "unidec-long": {
        "model.heads": "both",
        "loss.reduction": "psl",
        "loss.de": "ds",
        "loss.clf": "ds",
        "tokens.text": "title+content",
    },
    "unidec-taught": {
        "model.heads": "both",
        "loss.reduction": "psl",
        "loss.de": "ds",
        "loss.clf": "ds",
        "teacher.weight": 1.0,
        "teacher.bundle": "",
    },
    "unidec-matryoshka": {
        "model.heads": "both",
        "loss.reduction": "psl",
        "loss.de": "ds",
        "loss.clf": "ds",
        "loss.widths": [64, 128, 256],
        "model.dim": 512,
        "index.width": 0,
    },
    "unidec-v2": UNIDEC
    | {"loss.de": "ds", "loss.clf": "ds", "loss.clf_bce": 0.0, "pool.size": 3000},
    "unidec-v2-bce": UNIDEC
    | {"loss.de": "ds", "loss.clf": "ds", "loss.clf_bce": 1.0, "pool.size": 3000},
    "unidec-v1": UNIDEC
    | {"loss.de": "supcon", "loss.clf": "supcon", "loss.clf_bce": 0.0, "pool.size": 1500},
    "unidec-gpu": {
        "model.heads": "both",
        "loss.reduction": "psl",
        "loss.de": "ds",
        "loss.clf": "ds",
        "encoder.kind": "both",
        "encoder.trainable_layers": -1,
        "index.fusion": True,
    },
    "unidec-gpu-paper": UNIDEC
    | PAPER
    | {"loss.de": "ds", "loss.clf": "ds", "loss.clf_bce": 1.0, "tokens.max_length": 32},
    "unidec-gpu-long": UNIDEC
    | PAPER
    | {
        "loss.de": "ds",
        "loss.clf": "ds",
        "run.recompute": True,
        "tokens.max_length": 128,
        "tokens.text": "title+content",
    },
    "mixup": UNIDEC
    | {"loss.de": "ds", "loss.clf": "ds", "loss.clf_bce": 0.0, "loss.mixup": "queries"},
    "label-mixup": UNIDEC
    | {"loss.de": "ds", "loss.clf": "ds", "loss.clf_bce": 0.0, "loss.mixup": "labels"},
    "decaf": DECAF,
    "eclare": DECAF | {"model.clf_graph": True, "label_graph.kind": "random-walk"},
    "astec-surrogate": OVA
    | {
        "encoder.kind": "bag",
        "encoder.residual": False,
        "model.surrogate": 2,
        "loss.clf": "ds",
        "model.clf_init": "xavier",
        "model.clf_bias": True,
        "pool.clf_labels": "all",
    },
    "astec": OVA
    | {
        "encoder.kind": "bag",
        "encoder.residual": True,
        "model.clf_init": "xavier",
        "model.clf_bias": True,
        "pool.clf_labels": "pool",
        "pool.eta": 6,
        "loss.clf": "ds",
    },
    "graphsage": OVA
    | {
        "loss.clf": "ds",
        "encoder.kind": "bag",
        "model.clf_residual": True,
        "model.clf_queries": 3,
        "optim.lr_clf": 0.0,
        "pool.batches": "random",
    },
    "inceptionxml": OVA
    | {
        "loss.clf": "ds",
        "encoder.kind": "inception",
        "pool.clf_labels": "all",
        "pool.batches": "random",
        "model.clf_init": "xavier",
    },  # the paper: BCE
    "inceptionxml-lf": DECAF
    | {
        "encoder.kind": "inception",
        "encoder.residual": False,
        "model.clf_graph": True,
        "label_graph.kind": "random-walk",
    },
    "cascadexml": OVA
    | {
        "model.levels": [32, 4],
        "pool.shortlist": 64,
        "pool.refresh": 1,
        "loss.clf": "ds",
        "model.clf_init": "xavier",
        "model.clf_bias": True,
        "pool.clf_labels": "pool",
    },
    "depsl": ENCODER_ALONE | {"loss.de": "ds", "model.temperature": 0.02},  # the paper: 1 / 18
    "depsl-words": ENCODER_ALONE
    | {
        "loss.de": "ds",
        "model.temperature": 0.02,
        "model.query_head": True,
        "teacher.words": True,
        "teacher.weight": 0.5,
        "optim.epochs": 20,
    },
    "depsl-gpu-query2bid": ENCODER_ALONE
    | {
        "loss.de": "ds",
        "loss.de_forward": 1.0,
        "encoder.trainable_layers": -1,
        "model.dim": 64,
        "tokens.max_length": 12,
        "pool.start_epoch": 5,
        "optim.clip_norm": 0.0,
    },
    "supconde": ENCODER_ALONE | {"loss.de": "supcon"},
    "dpr": ONE_POSITIVE
    | {"loss.de": "infonce", "pool.batches": "random", "pool.eta": 0, "pool.size": 0},
    "simcse": ONE_POSITIVE
    | {
        "loss.de": "infonce",
        "pool.batches": "random",
        "pool.simcse": True,
        "model.temperature": 0.05,
    },
    "ance": ONE_POSITIVE | {"loss.de": "infonce", "pool.batches": "random", "pool.eta": 4},
    "ngame": ONE_POSITIVE
    | {
        "loss.de": "triplet",
        "loss.margin": 0.3,
        "loss.triplet_negatives": "softmax",
        "loss.triplet_top": 10,
        "pool.batches": "clustered",
        "pool.cluster_start": 1,
        "pool.eta": 0,
    },
    "dexa": ONE_POSITIVE
    | {
        "loss.de": "triplet",
        "loss.margin": 0.3,
        "pool.batches": "clustered",
        "pool.cluster_start": 1,
        "pool.eta": 0,
        "model.auxiliary": 2,
    },
    "ngame-classifier": OVA
    | {
        "loss.clf": "triplet",
        "loss.margin": 0.2,
        "loss.triplet_negatives": "softmax",
        "loss.triplet_top": 3,
        "encoder.frozen": True,
        "model.clf_init": "label_embedding",
        "pool.clf_labels": "pool",
        "pool.batches": "clustered",
        "pool.eta": 6,
    },
    "siamesexml": {
        "model.heads": "both",
        "encoder.kind": "bag",
        "model.clf_residual": True,
        "model.clf_bias": False,
        "loss.de": "triplet",
        "loss.triplet_negatives": "hardest",
        "loss.clf": "triplet",
        "pool.batches": "clustered",
        "pool.clf_labels": "pool",
    },
    "dexml": ONE_POSITIVE
    | {"loss.de": "ds", "pool.batches": "random", "model.temperature": 0.05, "pool.eta": 4},
    "dexml-all": {
        "model.heads": "de",
        "loss.reduction": "pal-n",
        "loss.de": "ds",
        "pool.de_labels": "all",
        "model.temperature": 0.05,
        "pool.batches": "random",
        "loss.de_forward": 1.0,
    },
    "dexml-topk": {
        "model.heads": "de",
        "loss.de": "softtopk",
        "loss.topk": 5,
        "pool.de_labels": "all",
        "model.temperature": 0.05,
        "pool.batches": "random",
    },
    "renee": OVA
    | {
        "pool.clf_labels": "all",
        "pool.batches": "random",
        "model.clf_init": "normal",
        "pool.gandalf": True,
        "label_graph.kind": "self",
    },
}
OTHER_ENCODER = {
    "siamesexml",
    "decaf",
    "eclare",
    "astec-surrogate",
    "astec",
    "unidec-long",
    "ngame-classifier",
    "unidec-gpu",
    "unidec-gpu-paper",
    "unidec-gpu-long",
    "depsl-gpu-query2bid",
    "inceptionxml",
    "inceptionxml-lf",
    "graphsage",
}
SAME_ENCODER = sorted(set(SPEC) - OTHER_ENCODER)


def parsed(name, **overrides):
    return load_params(ROOT / "params.yaml", {"recipe": name} | overrides)


def value(params, key):
    section, name = key.split(".")
    return getattr(getattr(params, section), name)


def head(name):
    """The fields of a recipe's head, in order."""
    fields = []
    for line in (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("#   "):
            fields[-1] = (fields[-1][0], f"{fields[-1][1]} {line[4:]}")
        else:
            key, colon, text = line[2:].partition(": ")
            assert colon, line
            fields.append((key, text))
    return fields


def test_the_specs_systems_are_all_there():
    assert sorted(SPEC) == recipe_names()


@pytest.mark.parametrize("name", recipe_names())
def test_the_head_says_what_is_reproduced_and_what_to_expect(name):
    fields = head(name)
    assert [key for key, _ in fields] == FIELDS
    assert all(len(text) > 5 and text.endswith(".") for _, text in fields), fields
    # what it refers to exists
    text = " ".join(text for _, text in fields)
    for page in re.findall(r"docs/\S+?\.md", text):
        assert (ROOT / page).is_file(), page
    settings = [
        f"{key}={given}" for key, given in re.findall(r"\b([a-z]+\.[a-z_]+): ([\w.]*\w)", text)
    ]
    parsed(name, **parse_overrides(settings))


@pytest.mark.parametrize("name", recipe_names())
def test_settings_are_those_of_the_specs_tables(name):
    params = parsed(name)
    assert {key: value(params, key) for key in SPEC[name]} == SPEC[name]


@pytest.mark.parametrize(
    ("name", "num_rows", "published"),
    [
        ("unidec-gpu-paper", 294_805, 1152),
        ("unidec-gpu-paper", 2_248_619, 1098),
        ("unidec-gpu-long", 294_805, 576),
        ("unidec-gpu-long", 693_082, 677),
    ],
)
def test_batches_have_the_published_size(name, num_rows, published):
    """Training queries of AmazonTitles-131K, 1.3M, Amazon-131K, WikiSeeAlso-320K, with nothing held
    out.
    """
    size = queries_a_batch(parsed(name).pool, num_rows)
    assert size == published
    assert (
        num_clusters(num_rows, size)
        == num_rows // size + (num_rows % size > 0)
        == 2 ** round(np.log2(num_rows / size))
    )


@pytest.mark.parametrize("name", ["unidec-gpu-paper", "unidec-gpu-long"])
def test_the_classifier_of_an_unfrozen_transformer_starts_unsaturated(
    name, every_step_is_logged, tiny_bert, tmp_path
):
    """Its first loss is that of a guess, log(pool): vectors of a bare transformer are several units
    long.
    """
    num_labels = 131_072
    pool = 300
    params = golden.small(name, tiny_bert, tmp_path)
    torch.manual_seed(0)
    model = UniDEC.create(
        params.encoder, params.model, num_labels, tiny_bert, 100, params.model_dump()
    ).eval()
    texts = encode_texts([f"river engine w{i}" for i in range(pool)], tiny_bert, 16)
    x_BW = torch.from_numpy(model.encode("queries", texts))
    assert x_BW.norm(dim=1).mean() > 4
    start_table(model, lambda rows: x_BW[rows % pool])
    logit_BS = model.clf(x_BW).detach() @ model.table.weight[:pool].T / params.model.temperature
    loss = torch.nn.functional.cross_entropy(logit_BS, torch.arange(pool))
    assert float(loss) == pytest.approx(np.log(pool), rel=0.1)


@pytest.mark.parametrize("name", recipe_names())
def test_no_step_waits_for_the_device(
    name, benchmark_module, tiny_dataset, tiny_tokens, tiny_bert, tmp_path, monkeypatch
):
    """Between two logging steps: every operator of a step under a mode that refuses those which
    would wait, with the attention that a GPU has.
    """
    monkeypatch.setattr(
        "unidec.model.encoder.transformer_options", lambda _: {"attn_implementation": "sdpa"}
    )
    no_waiting = benchmark_module("no_waiting").NoWaiting
    params = golden.small(name, tiny_bert, tmp_path)
    graph = golden.label_graph(params, tiny_dataset) if params.reads_label_graph else None
    data = TrainingData(tiny_dataset, *tiny_tokens.values(), graph)
    trainer = Trainer(params.training, data, tmp_path / "run", tmp_path / "cache")
    trainer.checks.each_step = False  # as on a GPU
    trainer.mine()
    trainer.made = Refresh.load(trainer.refresher.folder(0), 0)
    # on a CPU it ends early, which waits; tests/model/test_losses.py has it on "meta"
    if params.loss.de == "softtopk":
        solved = soft_topk.thresholds

        def thresholds(*given):
            with _disable_current_modes():
                return solved(*given)

        monkeypatch.setattr(soft_topk, "thresholds", thresholds)
    trainer.model.train()
    batches = trainer.made.batches(trainer.rows, trainer.batch_size, 0, 0)
    for step in range(3):
        batch = trainer.prepare(batches[step], step)
        with no_waiting() if step else contextlib.nullcontext():
            logs = trainer.train_step(batch)
        assert (logs is None) == (step > 0)
        trainer.at.step += 1
    trainer.check_finite()


def test_recipes_at_cpu_scale_share_encoder_width_and_epochs():
    """What a comparison holds equal is equal as shipped."""
    ours = {name: parsed(name) for name in SAME_ENCODER}
    encoders = [params.encoder for params in ours.values()]
    assert all(encoder == encoders[0] for encoder in encoders)
    for key in (
        "model.dim",
        "optim.epochs",
        "optim.lr_bag",
        "optim.lr_heads",
        "pool.batch_size",
        "tokens.max_length",
    ):
        # a start, and one that no comparison has
        others = {"simcse", "depsl-words"}
        assert (
            len({value(params, key) for name, params in ours.items() if name not in others}) == 1
        ), key


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_overridden_key_by_key_and_written_out_as_it_is(name, tmp_path):
    recipe = parsed(name)
    changed = parsed(name, **{"optim.epochs": 7, "pool.beta": 5})
    assert (changed.optim.epochs, changed.pool.beta) == (7, 5)
    assert changed.encoder == recipe.encoder and changed.loss == recipe.loss
    written = tmp_path / "all.yaml"
    written.write_text(to_yaml(recipe), encoding="utf-8")
    assert load_params(written).model_copy(update={"recipe": name}) == recipe


@pytest.mark.parametrize(
    "gandalf", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "gandalf"]
)
@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_trains(
    name, gandalf, every_step_is_logged, tiny_dataset, tiny_tokens, tiny_bert, tmp_path
):
    """An epoch: finite losses, weights that move, vectors for the index; with Gandalf label texts
    among the queries.
    """
    if gandalf and name == "simcse":
        pytest.skip("label texts are queries already, each with itself as its label")
    if gandalf and parsed(name).teacher.words:
        pytest.skip("the teacher ranks labels for training queries only")
    params = golden.small(
        name,
        tiny_bert,
        tmp_path,
        **{
            "pool.gandalf": gandalf,
            "optim.epochs": 1,
            "pool.refresh": 1,
            "optim.warmup_epochs": 0.0,
        },
    )
    graph = golden.label_graph(params, tiny_dataset) if params.reads_label_graph else None
    trainer = Trainer(
        params.training,
        TrainingData(tiny_dataset, *tiny_tokens.values(), graph),
        tmp_path / "run",
        tmp_path / "cache",
    )
    before = {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    trainer.mine()
    trainer.train_round()
    assert trainer.finished
    lines = read_json_lines(tmp_path / "run" / "history.jsonl")
    assert len(lines) == trainer.steps_per_epoch >= 4
    assert all(np.isfinite(line["loss"]) and 0 < line["grad_norm"] < np.inf for line in lines)
    num_train = len(tiny_dataset.rows("train"))
    assert len(trainer.rows) == num_train + (
        tiny_dataset.num_labels if gandalf or params.pool.simcse else 0
    )

    moved = {
        key for key, tensor in trainer.model.state_dict().items() if not tensor.equal(before[key])
    }
    heads = {
        "both": {"head_de", "head_clf", "table"},
        "de": {"head_de"},
        "clf": {"head_clf", "table"},
    }
    for kind in ("both", "clf"):
        parts = {
            "bias": "clf_bias",
            "gates": "clf_gates",
            "related_gate": "clf_graph" if params.model.clf_graph else "clf_queries",
        }
        heads[kind] |= {part for part, key in parts.items() if getattr(params.model, key)}
        heads[kind] -= {"table"} if params.optim.lr_clf == 0 else set()
        heads[kind] |= {"tree"} if params.model.levels else set()
    heads["de"] |= {"auxiliary"} if params.model.auxiliary else set()
    heads["de"] |= {"head_query"} if params.model.query_head else set()
    expected = heads[params.model.heads] | (set() if params.encoder.frozen else {"encoder"})
    assert {key.split(".")[0] for key in moved} - {"log_scale"} == expected

    de, clf = trainer.model.encode_queries(
        trainer.encoding.tokens["queries"], np.arange(5), trainer.encoding.build
    )
    table = trainer.classifier()[0]
    for vectors, there in (
        (de, "de"),
        (clf, "clf"),
        (table, "clf"),
    ):
        assert (vectors is not None) == (params.model.heads in ("both", there))
        assert vectors is None or np.isfinite(vectors).all()


@pytest.mark.parametrize("name", ["unidec-v2-bce", "ngame", "dexml-topk", "renee"])
def test_the_options_for_the_tail_change_what_a_recipe_learns(
    name, every_step_is_logged, tiny_dataset, tiny_tokens, tiny_bert, tmp_path
):
    def losses(run, **options):
        params = golden.small(
            name,
            tiny_bert,
            tmp_path,
            **{"optim.epochs": 1, "pool.refresh": 1, "pool.beta": 1, "optim.warmup_epochs": 0.0}
            | options,
        )
        graph = golden.label_graph(params, tiny_dataset) if params.reads_label_graph else None
        trainer = Trainer(
            params.training,
            TrainingData(tiny_dataset, *tiny_tokens.values(), graph),
            tmp_path / run,
            tmp_path / "cache",
        )
        trainer.mine()
        trainer.train_round()
        return [line["loss"] for line in read_json_lines(tmp_path / run / "history.jsonl")]

    plain = losses("plain")
    weighted = losses("weighted", **{"loss.weights": "propensity"})
    assert np.isfinite(weighted).all()
    assert not np.allclose(weighted, plain)
    drawn = losses("drawn", **{"pool.positives": "tail"})
    # a loss over all labels and all positives has nothing to draw
    assert np.isfinite(drawn).all()
    assert np.allclose(drawn, plain) == (name in ("dexml-topk", "renee"))


@pytest.mark.parametrize(
    "name", sorted({"unidec-v2", "ngame", "dexml-topk", "renee", "siamesexml", "ngame-classifier"})
)
def test_a_recipe_learns_its_training_queries(
    name, every_step_is_logged, tiny_dataset, tiny_tokens, tiny_bert, tmp_path
):
    """Ten epochs with higher rates, no dropout: the first label is right more often than before."""
    params = golden.small(
        name,
        tiny_bert,
        tmp_path,
        **{
            "optim.epochs": 10,
            "pool.refresh": 5,
            "optim.lr_bag": 1e-2,
            "optim.lr_heads": 1e-2,
            "optim.lr_clf": 3e-2,
            "model.dropout": 0.0,
            "encoder.dropout": 0.0,
            "encoder.bag_dropout": 0.0,
        },
    )
    graph = golden.label_graph(params, tiny_dataset) if params.reads_label_graph else None
    trainer = Trainer(
        params.training,
        TrainingData(tiny_dataset, *tiny_tokens.values(), graph),
        tmp_path / "run",
        tmp_path / "cache",
    )
    rows = tiny_dataset.rows("train")
    relevance = tiny_dataset.relevance.toarray()[rows] > 0

    def precision():
        model = trainer.model
        tokens = trainer.encoding.tokens
        de, clf = model.encode_queries(tokens["queries"], rows, trainer.encoding.build)
        score = 0.0
        if de is not None:
            score = score + de @ model.encode_labels(tokens["labels"], trainer.encoding.build).T
        if clf is not None:
            score = score + clf @ model.classifier_table()[0].T
        return relevance[np.arange(len(rows)), score.argmax(1)].mean()

    before = precision()
    while not trainer.finished:
        trainer.mine()
        trainer.train_round()
    assert precision() > max(0.5, before), (before, precision())
