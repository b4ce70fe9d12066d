"""Equal tuning: the search of each cell, what is chosen of its trials, and what a comparison makes
of that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from unidec.comparison.chosen import write_chosen
from unidec.comparison.tuning_space import applied
from unidec.comparison.workspace import load_comparison, matching, select
from unidec.config import load_params
from unidec.errors import ConfigError

Write = Callable[[str], Path]
HEAD = (
    "name: t\nseeds: [4, 5]\ndata:\n  d: {path: raw}\n  part: {path: raw, train: 50, set: "
    "{optim.epochs: 2}}\n"
)
TUNING = "tuning: {data: part, file: chosen.yaml, trials: 3, ranges: {lr: {low: 0.5, high: 4}}}\n"
CELLS = (
    "cells:\n"
    "  first: {recipe: ngame, set: {pool.beta: 2}, ranges: {loss.margin: [0.3, 0.5]}}\n"
    "  second: {recipe: ngame-classifier, after: first, ranges: {pool.eta: {low: 1, high: 9}}}\n"
    "  third: {like: second, set: {model.dropout: 0.2}}\n"
    "  votes: {model_of: second, set: {index.knn_weight: 0.5}}\n"
    "  kNN: {peer: knn}\n"
)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    (tmp_path / "raw").mkdir()
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "c.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return Path(name)

    return write


def test_every_recipe_cell_is_searched_from_itself_on_the_tuning_data(write: Write) -> None:
    path = write(HEAD + TUNING + CELLS)
    comparison = load_comparison(path, tune=True)
    jobs = comparison.jobs
    assert list(jobs) == ["part/first/4", "part/second/4", "part/third/4"]
    assert {job.kind for job in jobs.values()} == {"trial"}
    assert jobs["part/first/4"].params.optim.epochs == 2
    expected = {"lr": {"low": 0.5, "high": 4}, "loss.margin": [0.3, 0.5]}
    assert jobs["part/first/4"].ranges == expected
    assert jobs["part/third/4"].ranges == jobs["part/second/4"].ranges
    # a second stage starts from the first one as it is, which is kept for that
    needs = {job.needs for job in jobs.values() if job.cell != "first"}
    assert needs == {"part/first/4"}
    assert [key for key in jobs if comparison.steps[key].spec["keep"]] == ["part/first/4"]
    assert len({comparison.steps[key].folder for key in jobs}) == len(jobs)
    assert [s.name for s in select(comparison, ["second"])[1:]] == ["part/first/4", "part/second/4"]
    assert matching(comparison, ["second"]) == {"part/second/4"}
    assert matching(comparison, []) == set(jobs)


def test_what_a_trial_changes(write: Write) -> None:
    path = write(HEAD + TUNING + CELLS)
    comparison = load_comparison(path, tune=True)
    of_recipe = load_params(write("recipe: ngame-classifier\n", "params.yaml")).optim
    tripled = applied(comparison.jobs["part/third/4"].params, {"lr": 3, "pool.eta": 1})
    for name in ("lr_encoder", "lr_bag", "lr_heads", "lr_clf"):
        expected = 3 * getattr(of_recipe, name)
        assert getattr(tripled.optim, name) == pytest.approx(expected)
    assert (tripled.pool.eta, tripled.model.dropout) == (1, 0.2)
    overrides = {"optim.lr_bag": 0.5, "pool.eta": 2}
    given = load_comparison(path, overrides, tune=True)
    tried = applied(given.jobs["part/third/4"].params, {"lr": 3, "pool.eta": 1}, given.overrides)
    assert (tried.optim.lr_bag, tried.pool.eta) == (0.5, 2)  # --set is over everything
    assert tried.optim.lr_clf == pytest.approx(3 * of_recipe.lr_clf)


def test_the_best_trial_is_chosen_and_applied(write: Write) -> None:
    path = write(HEAD + TUNING + CELLS)
    with pytest.raises(ConfigError, match=r"not been tuned[\s\S]*unidec compare c\.yaml --tune"):
        load_comparison(path)
    file = load_comparison(path, tune=True).file
    trials = {
        "first": [({}, 10.0), ({"loss.margin": 0.5}, 11.0), ({"lr": 2}, None)],
        "second": [({}, 10.0), ({"lr": 2}, 12.4), ({"lr": 3, "pool.eta": 1}, 12.5004)],
        "third": [({}, 10.0), ({"lr": 2}, 10.001), ({"lr": 3}, 1.0)],
    }
    assert write_chosen(path, file, trials) == Path("chosen.yaml")
    written = yaml.safe_load(Path("chosen.yaml").read_text())
    assert {cell: entry["set"] for cell, entry in written.items()} == {
        "first": {"loss.margin": 0.5},
        "second": {"lr": 3, "pool.eta": 1},
        "third": {"lr": 2},
    }
    expected = {"as it is": 10.0, "loss.margin=0.5": 11.0, "lr=2": None}
    assert written["first"]["trials"] == expected
    assert written["second"]["trials"] == {"as it is": 10.0, "lr=2": 12.4, "lr=3, pool.eta=1": 12.5}
    plain = load_comparison(path)
    assert not any(job.data == "part" for job in plain.jobs.values())
    second, third, votes = (plain.jobs[f"d/{cell}/5"] for cell in ("second", "third", "votes"))
    assert second.params.pool.eta == 1
    assert third.params.pool.eta == 6
    assert second.params.optim.lr_clf == pytest.approx(
        3 * 3e-3
    ) and third.params.optim.lr_clf == pytest.approx(6e-3)
    assert second.settings == {"after": "first", "tuned": "lr=3, pool.eta=1"}
    # the same model's
    assert votes.params.optim == second.params.optim
    assert votes.params.pool == second.params.pool
    assert (
        plain.jobs["d/first/4"].params.pool.beta == 2
        and plain.jobs["d/first/4"].params.loss.margin == 0.5
    )
    assert load_comparison(path, {"pool.eta": 3}).jobs["d/second/4"].params.pool.eta == 3


def test_a_part_is_tuned_and_the_rest_stays(write: Write) -> None:
    path = write(HEAD + TUNING + CELLS)
    file = load_comparison(path, tune=True).file
    write_chosen(path, file, {"third": [({}, 10.0), ({"lr": 2}, 11.0)], "first": [({}, 1.0)]})
    with pytest.raises(ConfigError, match=r"chosen\.yaml: second[\s\S]*--tune --only \"second\""):
        load_comparison(path)
    write_chosen(path, file, {"second": [({}, 10.0), ({"lr": 3}, 20.0)]})
    written = yaml.safe_load(Path("chosen.yaml").read_text())
    sets = [written[cell]["set"] for cell in ("first", "second", "third")]
    assert sets == [
        {},
        {"lr": 3},
        {"lr": 2},
    ]
    load_comparison(path)
    write(HEAD + TUNING.replace("high: 4", "high: 2.5") + CELLS)  # narrower than what was chosen
    with pytest.raises(ConfigError, match=r"not tuned with these ranges[\s\S]*2\.5"):
        load_comparison(path)


@pytest.mark.parametrize(
    ("tuning", "cells", "words"),
    [
        (
            TUNING,
            CELLS.replace("[0.3, 0.5]", "[0.4, 0.5]"),
            "cells.first.ranges.loss.margin.*excludes the untuned value of first",
        ),
        (
            TUNING.replace("low: 0.5", "low: 2"),
            CELLS,
            "tuning.ranges.lr.*excludes the untuned value of first",
        ),
        (TUNING.replace("low: 0.5", "low: 0"), CELLS, r"lr.*cannot be tuned[\s\S]*lr multiplies"),
        (TUNING, CELLS.replace("loss.margin", "loss.marign"), r"loss\.marign.*unknown key"),
        (TUNING, CELLS.replace("loss.margin", "index.factory"), r"index\.factory"),
        (
            TUNING,
            CELLS.replace("low: 1, high: 9", "low: 9, high: 1"),
            r"pool\.eta.*cannot be tuned like this",
        ),
        (TUNING.replace("part", "prat"), CELLS, r"tuning\.data.*no such data set"),
        (TUNING.replace("trials: 3", "trials: 0"), CELLS, r"tuning\.trials"),
        (TUNING.replace("file:", "fiel:"), CELLS, r"tuning\.fiel.*unknown key"),
        ("", CELLS, "cells.first.ranges.*this cell is not tuned"),
        (
            TUNING,
            CELLS.replace("{peer: knn}", "{peer: knn, ranges: {lr: [1, 3]}}"),
            "cells.kNN.ranges.*is not tuned",
        ),
    ],
)
def test_wrong_ranges_are_refused(write: Write, tuning: str, cells: str, words: str) -> None:
    path = write(HEAD + tuning + cells)
    for tune in (True, False) if tuning else (False,):
        with pytest.raises(ConfigError, match=words):
            load_comparison(path, tune=tune)


def test_nothing_to_tune(write: Write) -> None:
    with pytest.raises(ConfigError, match="nothing to tune"):
        load_comparison(write(HEAD + "cells:\n  a: {recipe: depsl}\n"), tune=True)
