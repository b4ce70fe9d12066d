"""Several ranks train as one does: gradients of a step; losses and weights over 20 steps, with
refreshes in between; resumed by any number.
"""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest
from helpers import rank_processes

from unidec.config import LabelGraph
from unidec.data.label_graph import build_label_graph
from unidec.training.distributed import ALONE

pytestmark = pytest.mark.timeout(600)
STEPS = 20  # 4 an epoch; a refresh before steps 0, 8 and 16

CASES = {
    "unidec": {"pool.batch_size": 11, "pool.size": 31, "optim.clip_norm": 0.5},
    "all labels, bias, temperatures": {
        "pool.clf_labels": "all",
        "model.clf_bias": True,
        "model.learn_temperature": True,
        "loss.de": "supcon",
        "loss.clf": "supcon",
        "model.clf_init": "normal",
    },
    "depsl": {
        "model.heads": "de",
        "pool.eta": 0,
        "pool.beta": 1,
        "pool.fill": True,
        "pool.size": 15,
        "pool.batches": "random",
        "pool.batch_size": 10,
        "model.auxiliary": 3,
    },
    "classifier": {"model.heads": "clf", "model.clf_bias": True, "model.clf_init": "xavier"},
    "frozen beside": {
        "encoder.kind": "both",
        "loss.reduction": "pol",
        "optim.clf_state": "adagrad",
    },
    "one layer": {
        "encoder.kind": "transformer",
        "encoder.trainable_layers": 1,
        "model.learn_temperature": True,
    },
    "all layers": {"encoder.kind": "both", "encoder.trainable_layers": -1, "pool.size": 17},
    "every label for both heads, weighted": {
        "pool.de_labels": "all",
        "pool.clf_labels": "all",
        "loss.clf": "bce",
        "loss.clf_bce": 0.0,
        "pool.beta": 1,
        "model.clf_bias": True,
        "model.learn_temperature": True,
        "loss.reduction": "pol",
        "loss.weights": "propensity",
    },
    "gandalf": {"pool.gandalf": True, "pool.batch_size": 22},
    "frozen, growing clusters, tail": {
        "encoder.kind": "both",
        "encoder.frozen": True,
        "pool.cluster_start": 2,
        "pool.positives": "tail",
    },
}
CASES |= {
    "all layers, in chunks": CASES["all layers"] | {"optim.encode_chunk": 7},
    "every label, in chunks": {
        "encoder.kind": "transformer",
        "encoder.trainable_layers": 2,
        "pool.de_labels": "all",
        "pool.clf_labels": "all",
        "optim.encode_chunk": 5,
        "run.recompute": True,
        "loss.de": "softtopk",
        "loss.de_forward": 1.0,
        "loss.clf": "hinge",
        "loss.bce_normalise": "entries",
    },
}
TRANSFORMER = {"encoder.kind": "transformer", "encoder.trainable_layers": 1}
# of one step; with one query and its two labels four ranks have fewer texts than ranks
STEPS_OF_ONE = {
    "layers": TRANSFORMER | {"queries": 9, "model.learn_temperature": True},
    "layers, in chunks": TRANSFORMER
    | {"queries": 9, "optim.encode_chunk": 2, "model.learn_temperature": True},
    "residual, one query": TRANSFORMER
    | {"queries": 1, "encoder.trainable_layers": -1, "encoder.residual": True},
    "one query, in chunks": {
        "queries": 1,
        "encoder.kind": "both",
        "encoder.trainable_layers": -1,
        "optim.encode_chunk": 1,
        "run.recompute": True,
    },
    "inception": {"queries": 9, "encoder.kind": "inception"},
    "bag, one query, in chunks": {"queries": 1, "optim.encode_chunk": 1, "encoder.bag_words": 16},
    "every label, in chunks": CASES["every label, in chunks"] | {"queries": 9},
    "every label, temperatures": CASES["every label for both heads, weighted"] | {"queries": 5},
}
COMMON = {"optim.epochs": 5, "optim.lr_clf": 3e-3, "optim.lr_bag": 3e-3, "optim.lr_heads": 3e-3}


@pytest.fixture(scope="module")
def place(tiny_dataset, tiny_tokens, tiny_bert, tmp_path_factory):
    """Everything a rank needs, in one folder; the transformer without dropout."""
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copytree(tiny_dataset.path, folder / "dataset")
    for name, cache in tiny_tokens.items():
        shutil.copytree(cache.path, folder / name)
    shutil.copytree(tiny_bert, folder / "bert")
    config = json.loads((folder / "bert" / "config.json").read_text())
    (folder / "bert" / "config.json").write_text(
        json.dumps({k: 0.0 if "dropout" in k else v for k, v in config.items()})
    )
    build_label_graph(tiny_dataset, LabelGraph(), folder / "graph")
    return folder


def worst_differences(found, alone):
    """The largest difference of each figure and weight; a key's bias has no gradient but rounding,
    which Adam enlarges (softmax does not see what is added to all scores of a query).
    """
    assert found.keys() == alone.keys()
    worst = {}
    for key, expected in alone.items():
        if key.endswith(("pool_size", "step")):
            assert np.array_equal(found[key], expected), key
        elif not key.endswith(("begins at", "attention.self.key.bias")):
            worst[key] = float(
                np.abs(found[key] - expected).max() / max(1.0, np.abs(expected).max())
            )
    return worst


def gradients_alone(place):
    """Of the steps of `STEPS_OF_ONE`; in chunks or not, they are the same."""
    alone = rank_processes.step_gradients(ALONE, place, STEPS_OF_ONE)
    assert sum(": rows of table" in key for key in alone) == len(STEPS_OF_ONE)
    for key, value in alone.items():
        if key.startswith("layers: "):
            np.testing.assert_allclose(
                alone[key.replace("layers", "layers, in chunks", 1)], value, atol=1e-5
            )
    return alone


@pytest.mark.slow
def test_gradients_of_a_step_on_four_ranks(place, warm_python):
    alone = gradients_alone(place)
    for values in rank_processes.run(warm_python, 4, "step_gradients", place, cases=STEPS_OF_ONE):
        worst = worst_differences(values, alone)
        assert {key: value for key, value in worst.items() if not value <= 1e-5} == {}


@pytest.mark.cuda
def test_two_processes_on_one_card_are_one(place):
    """gloo over CUDA tensors."""
    on_card = {"device": "cuda", "optim.precision": "fp32"}
    cases = {name: case | on_card for name, case in STEPS_OF_ONE.items()}
    (alone,) = rank_processes.run([sys.executable], 1, "step_gradients", place, cases=cases)
    for values in rank_processes.run(
        [sys.executable], 2, "step_gradients", place, one_card=True, cases=cases
    ):
        worst = worst_differences(values, alone)
        assert {key: value for key, value in worst.items() if not value <= 1e-4} == {}


@pytest.mark.parametrize(
    "names",
    [
        ["unidec", "all labels, bias, temperatures", "one layer"],
        pytest.param(
            ["depsl", "classifier", "frozen beside", "all layers", "gandalf"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["frozen, growing clusters, tail", "every label for both heads, weighted"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["all layers, in chunks", "every label, in chunks"], marks=pytest.mark.slow),
    ],
    ids=["three", "five more", "two more", "in chunks"],
)
def test_two_ranks_train_as_one(place, warm_python, names):
    cases = {name: COMMON | CASES[name] for name in names}
    alone = rank_processes.train(
        ALONE, place, {name: dict(case) for name, case in cases.items()}, STEPS
    )
    calls = {"train": {"cases": cases, "steps": STEPS}}
    if "unidec" in names:  # in the same processes
        calls["step_gradients"] = {"cases": STEPS_OF_ONE}
        alone |= gradients_alone(place)
    for values in rank_processes.run(warm_python, 2, "several", place, calls=calls):
        worst = worst_differences(values, alone)
        assert {key: value for key, value in worst.items() if not value <= 1e-5} == {}
        assert sum(key.endswith(": loss") for key in worst) == len(names)
    if "frozen beside" in names:
        ours, theirs = (
            sorted((place / f"cache-{world}").glob("vectors-*/values.npy")) for world in (2, 1)
        )
        assert [file.read_bytes() for file in ours] == [file.read_bytes() for file in theirs] != []


@pytest.mark.slow
def test_resumed_by_another_number_of_ranks(place, warm_python):
    """In the middle of a round: two ranks stop, one and three go on; one stops, two go on."""
    row_state = {"optim.clf_state": "adagrad", "model.clf_dtype": "fp32"}
    cases = {
        "labels": COMMON | CASES["all labels, bias, temperatures"] | row_state,
        "layers": COMMON | CASES["one layer"] | {"optim.encode_chunk": 7},
    }

    def cut_off(by):
        return {
            name: case | {"until": 11, "run": f"{name} by {by}"} for name, case in cases.items()
        }

    alone = rank_processes.train(
        ALONE, place, {name: dict(case) for name, case in cases.items()}, STEPS
    )
    rank_processes.run(warm_python, 2, "train", place, cases=cut_off("two"), steps=STEPS)
    rank_processes.train(ALONE, place, cut_off("one"), STEPS)
    for world, before in (
        (1, "two"),
        (3, "two"),
        (2, "one"),
    ):
        resumed = {
            name: case | {"run": f"{name} by {before}, then {world}"}
            for name, case in cases.items()
        }
        for name, case in resumed.items():
            shutil.copytree(place / f"{name} by {before}", place / case["run"])
        results = (
            rank_processes.run(warm_python, world, "train", place, cases=resumed, steps=STEPS)
            if world > 1
            else [rank_processes.train(ALONE, place, resumed, STEPS)]
        )
        for values in results:
            assert [values[f"{name}: begins at"] for name in cases] == [11, 11]
            worst = worst_differences(values, alone)
            assert {key: value for key, value in worst.items() if not value <= 1e-5} == {}, (
                world,
                before,
            )


@pytest.mark.slow
def test_with_dropout_the_same_ranks_resume_to_the_same_bits(place, warm_python):
    """Of three ranks: the sum of two numbers has no order."""
    case = COMMON | {"model.dropout": 0.2, "encoder.bag_dropout": 0.3, "encoder.dropout": 0.1}
    case |= {"encoder.kind": "both", "encoder.trainable_layers": -1}
    cases = {"whole": case, "begun": case | {"until": 11, "run": "dropped out"}}
    whole = rank_processes.run(warm_python, 3, "train", place, cases=cases, steps=STEPS)
    resumed = rank_processes.run(
        warm_python, 3, "train", place, cases={"whole": case | {"run": "dropped out"}}, steps=STEPS
    )
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours.pop("whole: begins at") == 11
        assert [
            key for key, values in ours.items() if not np.array_equal(values, theirs[key])
        ] == []
    assert not np.array_equal(whole[0]["whole: loss"], whole[0]["begun: loss"])
