"""Search space files: valid entries become the values a trial may draw; all errors are reported at
once, with lines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unidec.comparison.tuning_space import distributions, holds, read_space
from unidec.config import Params, load_params
from unidec.errors import ConfigError

optuna = pytest.importorskip("optuna").distributions
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    monkeypatch.chdir(tmp_path)
    return load_params(None, {"recipe": "unidec"})


def read(text: str, params: Params) -> dict[str, Any]:
    Path("space.yaml").write_text(text)
    return read_space("space.yaml", params)


def problems(text: str, params: Params) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, params)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_ranges_and_choices(params: Params) -> None:
    text = (
        "optim.lr_bag: {low: 1e-4, high: 1e-2, log: true}\nmodel.dropout: {low: 0, high: 0.5}\n"
        "pool.eta: {low: 0, high: 4}\nloss.de: [ds, supcon]\npool.gandalf: [true, false]\n"
    )
    assert distributions(read(text, params)) == {
        "optim.lr_bag": optuna.FloatDistribution(1e-4, 1e-2, log=True),
        "model.dropout": optuna.FloatDistribution(0, 0.5),
        "pool.eta": optuna.IntDistribution(0, 4),
        "loss.de": optuna.CategoricalDistribution(["ds", "supcon"]),
        "pool.gandalf": optuna.CategoricalDistribution([True, False]),
    }


def test_the_shipped_file_holds_the_default_recipe() -> None:
    params = load_params(ROOT / "params.yaml")
    space = read_space(ROOT / "comparison" / "tune.yaml", params)
    assert space
    for key, ranged in space.items():
        section, _, name = key.partition(".")
        assert holds(ranged, getattr(getattr(params, section), name)), key


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("optim.lr_bagg: {low: 0.1, high: 0.2}", ["unknown key", "nearest: optim.lr_bag"]),
        ("optim: {lr_bag: {low: 0.1, high: 0.2}}", ["key paths, not sections"]),
        ("optim.lr_bag: 0.1", ["expected: {low: 0.001"]),
        ("optim.lr_bag: {low: 0.1}", ["expected: {low: 0.001"]),
        ("optim.lr_bag: {low: 0.1, high: 0.2, step: 0.1}", ["expected: {low: 0.001"]),
        ("optim.lr_bag: {low: 0.2, high: 0.1}", ["cannot be tuned like this", "low <= high"]),
        ("model.dropout: {low: 0, high: 0.1, log: true}", ["low > 0"]),
        ("optim.lr_bag: {low: 0.1, high: 0.2, log: 10}", ["log: true or false"]),
        ("optim.lr_bag: {low: 0.1, high: .inf}", ["wrong value", "finite"]),
        ("optim.lr_bag: {low: .nan, high: 0.1}", ["wrong value", "finite"]),
        ("optim.lr_bag: {low: -0.1, high: 0.1}", ["wrong value", "got: -0.1"]),
        ("optim.lr_bag: {low: a, high: b}", ["wrong value", "valid number"]),
        ("pool.eta: {low: 0.5, high: 4}", ["wrong value", "valid integer"]),
        ("pool.eta: {low: false, high: true}", ["wrong value", "valid integer"]),
        ("model.dropout: {low: 0.5, high: 1.5}", ["wrong value", "got: 1.5"]),
        ("loss.de: {low: 1, high: 2}", ["wrong value", "got: 1"]),
        ("loss.de: [ds, softmax]", ["wrong value", "got: 'softmax'"]),
        ("loss.de: []", ["cannot be tuned like this", "choices"]),
        ("loss.de: [[ds], supcon]", ["wrong value"]),
        ("index.knn_weight: {low: 0.1, high: 1.0}", ["a key of encoder, "]),
        ("encoder.name: [a, b]", ["a key of encoder, "]),
        ("data.validation_share: [0.1, 0.2]", ["a key of encoder, "]),
        # a conflict with others
        ("loss.balance: {low: 0.5, high: 1}", ["one head gets no loss but is searched"]),
    ],
)
def test_a_wrong_line(line: str, told: list[str], params: Params) -> None:
    text = problems(f"# a comment\n{line}\n", params)
    assert all(words in text for words in told), text
    assert "space.yaml" in text and "(line 2)" in text and "1 problem" in text


def test_all_that_is_wrong_is_told_together(params: Params) -> None:
    text = problems(
        "optim.lr_bagg: [1, 2]\npool.eta: {low: 4, high: 1}\npool.beta: [1, 2]\nloss.de: [x, y]\n",
        params,
    )
    assert "3 problems" in text
    assert all(f"(line {line})" in text for line in (1, 2, 4))


def test_no_file_and_nothing_in_it(params: Params) -> None:
    with pytest.raises(ConfigError, match="no such search space file"):
        read_space("nowhere.yaml", params)
    for text in ("", "# nothing yet\n"):
        assert "nothing to tune" in problems(text, params)
    assert "space.yaml:3" in problems("pool.eta: [1, 2]\npool.beta: [1, 2\n", params)
