"""What the report of a run is told: pools drawn again, the data set's card, names of what was measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.label_graph import soft_targets
from unidec.data.propensity import build_propensity
from unidec.metric_names import GROUPS
from unidec.pipeline import paths
from unidec.pipeline import report as stage


@pytest.mark.parametrize("gandalf", [False, True])
def test_pools_are_drawn_as_the_last_round_drew_them(
    open_trainer: Callable[..., Any], tiny_params: Callable[..., Params], monkeypatch: pytest.MonkeyPatch, gandalf: bool
) -> None:
    trainer, params = open_trainer(**{"pool.gandalf": gandalf}), tiny_params(**{"pool.gandalf": gandalf})
    trainer.refresh()
    trainer.train_round()
    dataset, bundle = trainer.dataset, SimpleNamespace(model=trainer.model)
    graph = soft_targets(dataset.relevance[dataset.rows("train")], 0.1)
    monkeypatch.setattr(stage.paths, "open_label_graph", lambda params: graph if gandalf else None)
    study = stage._pools(params, bundle, dataset, trainer.run_dir)
    pool = params.pool
    assert (study["beta"], study["eta"], study["size"]) == (pool.beta, pool.eta, pool.size)
    own = [row for row in study["grid"] if (row["beta"], row["eta"]) == (pool.beta, pool.eta)]
    assert sum(study["histogram"]) == round(study["queries"] * study["batches"]) and len(own) == 1
    # the trainer's own batches of that epoch, their pools counted one by one
    batches = trainer.batches
    refresh = stage.Refresh.load(trainer.run_dir / "refresh" / "epoch-00000", 0)
    drawn = refresh.batches(batches.rows, pool.batch_size, params.seed, 0)
    chosen = np.unique(np.linspace(0, len(drawn) - 1, min(12, len(drawn))).round().astype(int))
    pools = [batches.sampler.batch(drawn[i], epoch=0, step=int(i), shortlist_NH=refresh.negatives) for i in chosen]
    queries = sum(len(batch.rows_B) for batch in pools)
    assert own[0]["positives"] == pytest.approx(sum(len(batch.positive_row_P) for batch in pools) / queries)
    assert own[0]["pool_size"] == pytest.approx(np.mean([len(batch.pool_S) for batch in pools]))


def test_without_pools_or_without_their_clusters_nothing_is_drawn(
    open_trainer: Callable[..., Any], tiny_params: Callable[..., Params], tmp_path: Path
) -> None:
    all_labels = {"model.heads": "clf", "pool.clf_labels": "all"}
    whole = open_trainer("whole", **all_labels)
    whole.refresh()
    assert (
        stage._pools(tiny_params(**all_labels), SimpleNamespace(model=whole.model), whole.dataset, whole.run_dir) == {}
    )
    other, params = open_trainer("other"), tiny_params()
    assert stage._pools(params, SimpleNamespace(model=other.model), other.dataset, tmp_path / "gone") == {}
    damaged = other.run_dir / "refresh" / "epoch-00000"
    damaged.mkdir(parents=True)
    assert stage._pools(params, SimpleNamespace(model=other.model), other.dataset, other.run_dir) == {}


def test_the_card_against_loops(
    tiny_dataset: XMCDataset, tiny_params: Callable[..., Params], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths.PROPENSITY.parent.mkdir()
    shutil.copytree(tiny_dataset.path, paths.DATASET)
    build_propensity(tiny_dataset, 0.55, 1.5, paths.PROPENSITY)
    card, distributions = stage._card(tiny_params(), tiny_dataset)
    counts = [0] * tiny_dataset.num_labels
    for row in (*tiny_dataset.rows("train"), *tiny_dataset.rows("validation")):
        for label in tiny_dataset.relevance[row].indices:
            counts[label] += 1
    train = [tiny_dataset.relevance[row].nnz for row in tiny_dataset.rows("train")]
    assert card["labels"] == len(counts) and card["train queries"] == len(train)
    assert card["training queries a label, mean"] == round(sum(counts) / len(counts), 2)
    assert card["labels a training query, mean"] == round(sum(train) / len(train), 2)
    assert card["labels without a training query"] == counts.count(0)
    expected = [sum(c < 10 for c in counts), sum(10 <= c <= 100 for c in counts), sum(c > 100 for c in counts)]
    assert [card[f"{group} labels"] for group in GROUPS] == expected
    assert [sum(shown["bars"].values()) for shown in distributions] == [len(counts), len(train)]
    json.dumps(card)


@pytest.mark.parametrize(
    ("heads", "parts", "names"),
    [
        ("both", ("de", "clf"), ["both", "de", "clf"]),
        ("both", ("de", "clf", "heads", "knn"), ["both heads and votes", "both", "de", "clf", "knn"]),
        ("de", (), ["de"]),
        ("clf", ("heads", "knn"), ["classifier and votes", "clf", "knn"]),
    ],
)
def test_what_is_served_is_first_and_named(heads: str, parts: tuple[str, ...], names: list[str]) -> None:
    result = {"test": {"P@1": 9.0}, **{name: {"P@1": float(i)} for i, name in enumerate(parts)}}
    shown = stage._metrics(result, heads)
    assert list(shown) == names and shown[names[0]]["P@1"] == 9.0
    if "heads" in parts:
        assert shown[heads] == result["heads"]
