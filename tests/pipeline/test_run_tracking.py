"""What the tracking server receives: few keys, the same for every run."""

from __future__ import annotations

from unidec.config import Params, Warm, flatten
from unidec.evaluation.metrics import evaluate
from unidec.pipeline.evaluation import figures_table, split_figures
from unidec.pipeline.training import step_figures
from unidec.pipeline.training_record import model_params

FLAT = flatten(Params())


def measured() -> dict[str, float]:
    """Every metric of three queries."""
    import numpy as np
    from scipy.sparse import csr_matrix

    truth = csr_matrix(np.eye(3, 200, dtype=np.float32))
    return evaluate(np.tile(np.arange(100), (3, 1)), truth, np.ones(200), np.arange(200) % 3)


def test_parameters_are_those_that_decide_the_model():
    cold = model_params(FLAT, False)
    warm = model_params(FLAT, True)
    sections = {key.partition(".")[0] for key in cold}
    assert {
        "optim",
        "pool",
        "loss",
        "encoder",
        "model",
        "data",
        "tokens",
        "index",
        "seed",
        "recipe",
    } <= sections
    assert not sections & {"run", "source", "retrain", "gate", "drift", "serve", "tracking", "warm"}
    assert warm.keys() - cold.keys() == {f"warm.{key}" for key in Warm.model_fields}
    assert all(FLAT[key] == value for key, value in warm.items())
    assert "data.path" not in warm


def test_figures_of_steps_have_a_place():
    assert step_figures({"step": 7, "loss": 0.5, "lr_clf": 1e-3}) == {
        "training/loss": 0.5,
        "training/lr_clf": 1e-3,
    }


def test_few_figures_of_the_test_split():
    metrics = measured()
    assert len(metrics) > 80
    result = {
        "test": metrics,
        "de": metrics,
        "clf": metrics,
        "index": {"recall@10": 100.0},
    }
    figures = split_figures(result)
    assert (
        len(figures) <= 30
        and figures["test/P@1"] == metrics["P@1"]
        and figures["index/recall@10"] == 100.0
    )
    assert {
        "test/tail/R@10",
        "test/nDCG@5",
        "test/PSP@5",
        "de/nDCG@5",
        "clf/R@100",
    } <= figures.keys()
    assert {name.rpartition("/")[0] for name in figures} == {
        "test",
        "test/tail",
        "test/torso",
        "test/head",
        "de",
        "clf",
        "index",
    }


def test_a_group_without_labels_and_a_head_that_is_not_there_are_left_out():
    figures = split_figures({"test": {"P@1": 1.0, "num_queries": 3.0}, "index": {}})
    assert figures == {"test/P@1": 1.0}


def test_a_description_begins_with_what_people_compare():
    lines = figures_table(
        {"P@1": 50.83, "P@5": 1.0, "PSP@5": 32.8, "training/minutes": 7.44}
    ).splitlines()
    assert lines == ["| P@1 | PSP@5 | minutes |", "| --- | --- | --- |", "| 50.8 | 32.8 | 7.4 |"]
