"""Equal tuning: trials of each cell, what is chosen of them, and what a comparison makes of that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from unidec.comparison.results import write_chosen
from unidec.comparison.workspace import Comparison, load_comparison, select
from unidec.config import load_params
from unidec.data.storage import write_json
from unidec.errors import ConfigError, UnidecError

Write = Callable[[str], Path]
HEAD = "name: t\nseeds: [4, 5]\ndata:\n  d: {path: raw}\n  part: {path: raw, train: 50, set: {optim.epochs: 2}}\n"
TUNING = "tuning: {data: part, file: chosen.yaml, trials: [{}, {lr: 2}]}\n"
CELLS = (
    "cells:\n"
    "  first: {recipe: ngame, set: {pool.beta: 2}, trials: [{loss.margin: 0.5}]}\n"
    "  second: {recipe: ngame-classifier, after: first, trials: [{lr: 3, pool.eta: 1}]}\n"
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


def ended(comparison: Comparison, figures: dict[str, float | None]) -> dict[str, str]:
    """Each trial's result as its process would leave it; None: it failed. Outcomes by step."""
    outcomes = dict.fromkeys(comparison.steps, "")
    for key in comparison.jobs:
        step, value = comparison.steps[key], figures.get(key, 10.0)
        if value is None:
            outcomes[key] = "failed: not finite"
            continue
        step.folder.mkdir(parents=True, exist_ok=True)
        curve = [{"validation": {"nDCG@5": 99.0}}, {"validation": {"nDCG@5": value}}]
        write_json(step.folder / "result.json", {"code": step.spec["code"], "curve": curve})
        if step.spec["keep"]:
            (step.folder / "outputs/model").mkdir(parents=True, exist_ok=True)
            (step.folder / "outputs/model/manifest.json").write_text("{}")
    return outcomes


def test_every_recipe_cell_has_its_trials_on_the_tuning_data(write: Write) -> None:
    path = write(HEAD + TUNING + CELLS)
    comparison = load_comparison(path, tune=True)
    assert list(comparison.jobs) == [
        "part/first/4", "part/first, lr=2/4", "part/first, loss.margin=0.5/4",
        "part/second/4", "part/second, lr=2/4", "part/second, lr=3, pool.eta=1/4",
        "part/third/4", "part/third, lr=2/4", "part/third, lr=3, pool.eta=1/4",
    ]  # fmt: skip
    jobs = comparison.jobs
    assert {job.kind for job in jobs.values()} == {"trial"} and jobs["part/first/4"].params.optim.epochs == 2
    # a second stage starts from the first one as it is, which is kept for that
    assert {job.needs for job in jobs.values() if job.cell != "first"} == {"part/first/4"}
    assert [key for key in jobs if comparison.steps[key].spec["keep"]] == ["part/first/4"]
    assert len({comparison.steps[key].folder for key in jobs}) == len(jobs)
    of_recipe = load_params(write("recipe: ngame-classifier\n", "params.yaml")).optim
    tripled = jobs["part/third, lr=3, pool.eta=1/4"].params
    for name in ("lr_encoder", "lr_bag", "lr_heads", "lr_clf"):
        assert getattr(tripled.optim, name) == pytest.approx(3 * getattr(of_recipe, name))
    assert (tripled.pool.eta, tripled.model.dropout) == (1, 0.2)
    assert [s.name for s in select(comparison, ["second"])[1:]] == ["part/first/4", *list(jobs)[3:6]]
    given = load_comparison(path, {"optim.lr_bag": 0.5, "pool.eta": 0}, tune=True).jobs[
        "part/third, lr=3, pool.eta=1/4"
    ]
    assert (given.params.optim.lr_bag, given.params.pool.eta) == (0.5, 0)  # --set is over everything
    assert given.params.optim.lr_clf == pytest.approx(3 * of_recipe.lr_clf)


def test_the_best_trial_is_chosen_and_applied(write: Write) -> None:
    path = write(HEAD + TUNING + CELLS)
    with pytest.raises(ConfigError, match=r"not been tuned[\s\S]*unidec compare c\.yaml --tune"):
        load_comparison(path)
    trials = load_comparison(path, tune=True)
    outcomes = ended(trials, {
        "part/first, loss.margin=0.5/4": 11.0, "part/second, lr=3, pool.eta=1/4": 12.5, "part/second, lr=2/4": 12.4,
        "part/third, lr=2/4": 10.001,
    })  # fmt: skip
    assert write_chosen(trials, list(trials.steps.values()), outcomes) == Path("chosen.yaml")
    written = yaml.safe_load(Path("chosen.yaml").read_text())
    assert {cell: entry["set"] for cell, entry in written.items()} == {
        "first": {"loss.margin": 0.5}, "second": {"lr": 3, "pool.eta": 1}, "third": {"lr": 2}
    }  # fmt: skip
    assert written["second"]["trials"] == {"as it is": 10.0, "lr=2": 12.4, "lr=3, pool.eta=1": 12.5}
    plain = load_comparison(path)
    assert not any(job.data == "part" for job in plain.jobs.values())
    second, third, votes = (plain.jobs[f"d/{cell}/5"] for cell in ("second", "third", "votes"))
    assert (second.params.pool.eta, third.params.pool.eta) == (1, 6)
    assert second.params.optim.lr_clf == pytest.approx(3 * 3e-3) and third.params.optim.lr_clf == pytest.approx(6e-3)
    assert second.settings == {"after": "first", "tuned": "lr=3, pool.eta=1"}
    assert votes.params.optim == second.params.optim and votes.params.pool == second.params.pool  # the same model's
    assert plain.jobs["d/first/4"].params.pool.beta == 2 and plain.jobs["d/first/4"].params.loss.margin == 0.5
    assert load_comparison(path, {"pool.eta": 3}).jobs["d/second/4"].params.pool.eta == 3


def test_trials_that_fail_are_named_and_not_chosen(write: Write) -> None:
    path = write(HEAD + TUNING + CELLS)
    trials = load_comparison(path, tune=True)
    failed = {f"part/first{words}/4": None for words in ("", ", lr=2", ", loss.margin=0.5")}
    outcomes = ended(trials, failed | {"part/second, lr=2/4": None, "part/second/4": float("nan")})
    words = r"4 of \d+ steps have no result[\s\S]*part/first, lr=2/4: failed: not finite"
    with pytest.raises(UnidecError, match=words):
        write_chosen(trials, list(trials.steps.values()), outcomes)
    written = yaml.safe_load(Path("chosen.yaml").read_text())
    assert list(written) == ["second", "third"]
    assert written["second"] == {
        "set": {"lr": 3, "pool.eta": 1}, "trials": {"as it is": None, "lr=2": None, "lr=3, pool.eta=1": 10.0}
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"chosen\.yaml: first[\s\S]*--tune --only \"first\""):
        load_comparison(path)


def test_a_part_is_tuned_and_the_rest_stays(write: Write) -> None:
    path = write(HEAD + TUNING + CELLS)
    trials = load_comparison(path, tune=True)
    everything = list(trials.steps.values())
    write_chosen(trials, everything, ended(trials, {"part/third, lr=2/4": 11.0}))
    outcomes = ended(trials, {"part/third, lr=2/4": 1.0, "part/second, lr=2/4": 20.0})
    write_chosen(trials, select(trials, ["second"]), outcomes)  # with it the first one's start, one of its trials
    written = yaml.safe_load(Path("chosen.yaml").read_text())
    assert [written[cell]["set"] for cell in ("first", "second", "third")] == [{}, {"lr": 2}, {"lr": 2}]
    # other trials than those that were tried
    write(HEAD + TUNING.replace("lr: 2", "lr: 4") + CELLS)
    with pytest.raises(ConfigError, match=r"not tuned with these trials[\s\S]*lr=4"):
        load_comparison(path)


@pytest.mark.parametrize(
    ("tuning", "cells", "words"),
    [
        (TUNING, CELLS.replace(", trials: [{loss.margin: 0.5}]", ""), "cells.first.trials.*fewer trials"),
        (TUNING, CELLS.replace("loss.margin: 0.5", "lr: 2"), "cells.first.trials.*duplicate trials"),
        (TUNING, CELLS.replace("loss.margin: 0.5", "lr: 0"), "cells.first.trials.*lr multiplies"),
        (TUNING, CELLS.replace("loss.margin", "loss.marign"), r"loss\.marign.*unknown key"),
        (TUNING.replace("part", "prat"), CELLS, r"tuning\.data.*no such data set"),
        (TUNING.replace("{}, ", ""), CELLS, r"tuning\.trials.*as it is"),
        (TUNING.replace("file:", "fiel:"), CELLS, r"tuning\.fiel.*unknown key"),
        ("", CELLS, "cells.first.trials.*this cell is not tuned"),
        (TUNING, CELLS.replace("{peer: knn}", "{peer: knn, trials: [{lr: 3}]}"), "cells.kNN.trials.*is not tuned"),
    ],
)  # fmt: skip
def test_wrong_trials_are_refused(write: Write, tuning: str, cells: str, words: str) -> None:
    path = write(HEAD + tuning + cells)
    for tune in (True, False) if tuning else (False,):
        with pytest.raises(ConfigError, match=words):
            load_comparison(path, tune=tune)


def test_nothing_to_tune(write: Write) -> None:
    with pytest.raises(ConfigError, match="nothing to tune"):
        load_comparison(write(HEAD + "cells:\n  a: {recipe: depsl}\n"), tune=True)
