"""Tables for dvc plots, seconds of rounds and their parts."""

from __future__ import annotations

import csv

import pytest

from unidec.evaluation.plot_tables import plots_csv, round_parts, validation_records

METRICS = {
    "P@1": 45.125,
    "P@5": 21.0,
    "R@100": 71.0,
    "tail/R@10": 1.5,
    "torso/R@10": 2.5,
    "head/R@10": 3.5,
}
HISTORY = [
    {
        "step": s,
        "loss": 5 / s,
        "lr_heads": 1e-4,
    }
    for s in range(1, 30)
]
REFRESH = {"refresh_seconds": 9.0, "cluster_seconds": 2.0, "mine_seconds": 3.0}
ROUNDS = [
    {
        "round": r,
        "epoch": 5 * r,
        "seconds": 60.0,
        "refresh": REFRESH,
        "train_seconds": 50.0,
        "validation": {"P@1": 30.0 + r},
    }
    for r in (1, 2, 3)
]


def test_parts_of_a_round():
    parts = {
        "cluster": [2.0] * 3,
        "mine": [3.0] * 3,
        "train": [50.0] * 3,
    }
    assert round_parts(ROUNDS) == parts
    assert list(round_parts(ROUNDS)) == list(parts)
    expected = {
        "refresh": [2.0],
        "train": [5.0],
    }
    assert round_parts([{"refresh": {"refresh_seconds": 2.0}, "train_seconds": 5.0}]) == expected
    # sums over rounds, and what runs beside the training, are no parts of a round; validation is
    # none of its refresh
    whole = {
        "train_seconds": 5.0,
        "trained_seconds": 50.0,
        "checkpoint_seconds": 3.0,
        "validation_seconds": 1.5,
        "refresh": {"mine_seconds": 2.0, "refresh_seconds": 2.0},
    }
    assert round_parts([whole]) == {
        "mine": [2.0],
        "train": [5.0],
        "validation": [1.5],
    }
    assert round_parts([{"round": 1}]) == {}


def test_wall_time_is_training_and_refreshes_summed_up():
    found = validation_records([*ROUNDS, {"train_seconds": 1.0}, {"validation": {"P@1": 1.0}}])
    seconds = [row["seconds"] for row in found]
    assert seconds == [59.0, 118.0, 177.0, 178.0]
    assert [row["minutes"] for row in found] == pytest.approx(
        [row["seconds"] / 60 for row in found]
    )


def test_tables_for_dvc_plots(tmp_path):
    files = plots_csv(
        HISTORY, ROUNDS, METRICS | {"P@3": float("nan"), "R@1": 9.87654321}, tmp_path / "plots"
    )
    tables = {
        path.name: list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        for path in files
    }
    assert set(tables) == {"training.csv", "validation.csv", "at_k.csv", "groups.csv"}
    assert len(tables["training.csv"]) == len(HISTORY)
    assert float(tables["training.csv"][3]["loss"]) == pytest.approx(HISTORY[3]["loss"], rel=1e-5)
    assert "loss_clf" not in tables["training.csv"][0]
    assert "lr_heads" in tables["training.csv"][0]
    epochs = [row["epoch"] for row in tables["validation.csv"]]
    assert epochs == ["5", "10", "15"]
    assert [float(row["seconds"]) for row in tables["validation.csv"]] == [59, 118, 177]
    assert [float(row["P_at_1"]) for row in tables["validation.csv"]] == [31, 32, 33]
    at_k = tables["at_k.csv"]
    assert [row["k"] for row in at_k] == ["1", "3", "5"]
    assert at_k[1]["precision"] == ""
    assert float(at_k[0]["recall"]) == pytest.approx(9.87654, abs=1e-5)
    expected = [
        ("tail", "1.5"),
        ("torso", "2.5"),
        ("head", "3.5"),
    ]
    assert [(row["group"], row["R_at_10"]) for row in tables["groups.csv"]] == expected
    for path in plots_csv([], [], {}, tmp_path / "empty"):
        assert len(path.read_text().splitlines()) == 1
