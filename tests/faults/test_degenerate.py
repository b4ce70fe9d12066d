"""Fault 17, training: degenerate data trains to finite losses and defined metrics, or says what is
wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from unidec.config import Params
from unidec.data.dataset import XMCDataset, write_dataset
from unidec.data.propensity import build_propensity, load_propensity
from unidec.data.raw import RawData, text_table
from unidec.data.tokens import TokenCache, build_token_cache
from unidec.errors import DataError
from unidec.evaluation.metrics import evaluate
from unidec.model.search import exact_search
from unidec.training import trainer as trainer_module
from unidec.training.trainer import Trainer, TrainingData

Train = Callable[..., tuple[Trainer, list[dict[str, Any]]]]


@pytest.fixture
def train(
    tiny_bert: Path,
    tiny_params: Callable[..., Params],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Train:
    """Trains raw data to the end; gives the trainer and the line of each step, all figures of which
    are finite.
    """
    monkeypatch.setattr(trainer_module, "LOG_EVERY", 1)

    def train(raw: RawData, *, validation_share: float = 0.0, **overrides: Any) -> Any:
        dataset = write_dataset(tmp_path / "dataset", raw, validation_share=validation_share)
        tokens = []
        for name, size in (
            ("queries", dataset.num_queries),
            ("labels", dataset.num_labels),
        ):
            out = tmp_path / name
            tokens.append(
                TokenCache.open(
                    build_token_cache(dataset.text_batches(name), tiny_bert, 16, out, size)
                )
            )
        params = tiny_params(**({"optim.epochs": 2, "pool.refresh": 1} | overrides))
        while True:
            trainer = Trainer(
                params.training,
                TrainingData(dataset, tokens[0], tokens[1]),
                tmp_path / "run",
                tmp_path / "cache",
            )
            if trainer.finished:
                break
            trainer.mine()
            trainer.train_round()
        lines = [
            json.loads(line)
            for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()
        ]
        assert len(lines) == trainer.at.step > 0
        assert all(math.isfinite(value) for line in lines for value in line.values())
        assert all(
            np.isfinite(value.numpy()).all() for value in trainer.model.state_dict().values()
        )
        return trainer, lines

    return train


def metrics_of(trainer: Trainer, tmp_path: Path) -> dict[str, float]:
    """Every metric of the test split by the dual encoder."""
    dataset: XMCDataset = trainer.dataset
    build_propensity(dataset, 0.55, 1.5, tmp_path / "propensity")
    propensity = load_propensity(tmp_path / "propensity")
    rows = dataset.rows("test")
    query, _ = trainer.model.encode_queries(trainer.encoding.tokens["queries"], rows)
    label = trainer.model.encode_labels(trainer.encoding.tokens["labels"])
    assert query is not None and label is not None
    found = exact_search(
        query, label, min(100, dataset.num_labels), exclude=dataset.filter_pairs[rows]
    )[1]
    return evaluate(found, dataset.relevance[rows], propensity.inverse_L, propensity.group_L)


def with_train(raw: RawData, relevance: np.ndarray) -> RawData:
    """The same texts with other training pairs."""
    return replace(
        raw, relevance={**raw.relevance, "train": csr_matrix(relevance.astype(np.float32))}
    )


SYSTEMS = [
    {},
    {"model.heads": "de"},
    {"model.heads": "clf", "pool.eta": 0},
    {"pool.clf_labels": "all"},
    {"pool.batches": "random", "loss.reduction": "pol"},
    {"loss.de": "triplet", "loss.clf": "bce", "loss.clf_bce": 0.0, "loss.bce_normalise": "entries"},
]


@pytest.mark.parametrize("system", SYSTEMS, ids=str)
def test_queries_without_positives_and_labels_without_points(
    tiny_raw: RawData, train: Train, system: dict
) -> None:
    """Every third query has no positive: whole batches of 4 may have none; most labels are never
    trained.
    """
    relevance = tiny_raw.relevance["train"].toarray()
    relevance[::3] = 0
    relevance[:, 10:] = 0
    _, lines = train(with_train(tiny_raw, relevance), **{"pool.batch_size": 4, **system})
    assert max(line["loss"] for line in lines) > 0


def test_a_batch_without_any_positive_costs_nothing(tiny_raw: RawData, train: Train) -> None:
    relevance = np.zeros(tiny_raw.relevance["train"].shape)
    relevance[0, 0] = 1
    _, lines = train(with_train(tiny_raw, relevance), **{"pool.batch_size": 4, "pool.eta": 0})
    losses = [line["loss"] for line in lines]
    assert losses.count(0.0) == len(losses) - 2  # one batch an epoch has the pair
    grad_norms = [line["grad_norm"] for line in lines if line["loss"] == 0]
    assert grad_norms == [0.0] * (len(losses) - 2)


@pytest.mark.parametrize("system", SYSTEMS, ids=str)
def test_one_label(
    raw_factory: Callable[..., RawData], train: Train, tmp_path: Path, system: dict
) -> None:
    """L = 1: nothing to tell apart, so a softmax costs nothing; no negative is mined."""
    trainer, lines = train(raw_factory(24, 6, 1, filters=False), **system)
    assert {line["pool_size"] for line in lines} == {1}
    if trainer.settings.loss.de == "ds" and trainer.settings.model.heads == "de":
        assert {line["loss_de"] for line in lines} == {0.0}
    if trainer.settings.model.heads != "clf":
        metrics = metrics_of(trainer, tmp_path)
        assert metrics["P@1"] == pytest.approx(100 * 5 / 6)  # one test query has no positive
        # places that no label can fill are misses
        expected = metrics["P@1"] / 5
        assert metrics["P@5"] == pytest.approx(expected)


@pytest.mark.parametrize("batches", ["clustered", "random"])
def test_a_batch_larger_than_the_data(tiny_raw: RawData, train: Train, batches: str) -> None:
    trainer, lines = train(tiny_raw, **{"pool.batch_size": 1000, "pool.batches": batches})
    assert trainer.steps_per_epoch == 1 and len(lines) == 2
    assert lines[1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("batches", ["clustered", "random"])
def test_one_query_a_batch_and_empty_clusters(raw_factory: Any, train: Train, batches: str) -> None:
    """21 queries in 32 clusters of one: eleven are empty, and are no steps."""
    trainer, lines = train(raw_factory(21, 4, 9), **{"pool.batch_size": 1, "pool.batches": batches})
    assert len(lines) == 2 * 21
    assert trainer.optimisers.total >= 2 * 21


def test_one_training_query(raw_factory: Callable[..., RawData], train: Train) -> None:
    _, lines = train(raw_factory(1, 3, 5))
    assert len(lines) == 2


@pytest.mark.parametrize("eta", [0, 2])
def test_a_pool_smaller_than_the_positives(tiny_raw: RawData, train: Train, eta: int) -> None:
    """12 queries with up to 8 positives each and room for 12 labels: some queries drop out, none
    breaks the loss.
    """
    _, lines = train(tiny_raw, **{"pool.beta": 8, "pool.size": 12, "pool.eta": eta})
    assert {line["pool_size"] for line in lines} == {12}
    loss = lines[-1]["loss"]
    assert loss < lines[0]["loss"]


def test_every_label_is_a_positive_or_filtered(
    raw_factory: Callable[..., RawData], train: Train
) -> None:
    """No negative anywhere: nothing can be mined, every softmax is over one label."""
    raw = raw_factory(20, 4, 6, filters=False)
    positive = np.zeros((20, 6), dtype=bool)
    positive[:, :4] = True
    raw = replace(
        with_train(raw, positive), filter_pairs={**raw.filter_pairs, "train": csr_matrix(~positive)}
    )
    _, lines = train(raw, **{"loss.clf_bce": 0.0, "loss.de_forward": 1.0, "loss.clf_forward": 1.0})
    assert {line["loss"] for line in lines} == {0.0}


@pytest.mark.parametrize("kind", ["bag", "transformer", "both"])
def test_empty_and_equal_texts(tiny_raw: RawData, train: Train, kind: str) -> None:
    """All queries the same, labels without text: clusters of equal points, ties everywhere."""
    table = tiny_raw.queries["train"]
    labels = tiny_raw.labels
    raw = replace(
        tiny_raw,
        queries={
            **tiny_raw.queries,
            "train": text_table(table["uid"].to_pylist(), ["river"] * table.num_rows),
        },
        labels=text_table(labels["uid"].to_pylist(), [""] * labels.num_rows),
    )
    layers = 1 if kind == "transformer" else 0
    _, lines = train(
        raw,
        **{"encoder.kind": kind, "encoder.trainable_layers": layers, "encoder.bag_dropout": 0.0},
    )
    assert lines[0]["pool_size"] > 1


def test_no_test_query_and_no_validation_query(
    raw_factory: Callable[..., RawData], train: Train
) -> None:
    trainer, _ = train(raw_factory(20, 0, 8))
    de, clf = trainer.model.encode_queries(
        trainer.encoding.tokens["queries"], trainer.dataset.rows("test")
    )
    assert de is not None
    assert clf is not None
    assert de.shape == clf.shape == (0, 16)


def test_nothing_to_train_on_is_one_error(
    raw_factory: Callable[..., RawData], train: Train
) -> None:
    with pytest.raises(DataError, match="no training query has a positive"):
        train(raw_factory(0, 5, 8))
    with pytest.raises(DataError, match="20 training queries"):
        train(with_train(raw_factory(20, 5, 8), np.zeros((20, 8))))


def test_metrics_are_defined_where_truth_is_missing(
    tiny_raw: RawData, train: Train, tmp_path: Path
) -> None:
    trainer, _ = train(tiny_raw)
    metrics = metrics_of(trainer, tmp_path)
    assert metrics["num_queries"] == 12
    assert all(
        value is not None and math.isfinite(value)
        for name, value in metrics.items()
        if "/" not in name
    )
