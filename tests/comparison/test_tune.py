"""A search: its trials, what survives a stop, its files and its refusals; trainings are replaced
but for two tests.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from helpers.raw_files import write_raw
from helpers.tiny_data import make_raw

from unidec.comparison import cell, trials, tune
from unidec.comparison.workspace import Step, load_comparison
from unidec.config import Params, load_params, to_yaml
from unidec.data.dataset import XMCDataset, write_dataset
from unidec.data.raw import RawData
from unidec.data.storage import write_json
from unidec.errors import ArtifactError, ConfigError, Stopped, TrainingError
from unidec.tracking.run import Tracker
from unidec.tracking.store import prepare_store

pytest.importorskip("optuna")
SPACE = (
    "optim.lr_bag: {low: 0.001, high: 0.1, log: true}\nmodel.dropout: {low: 0.0, high: 0.5}\n"
    "pool.beta: [1, 2, 3]\n"
)
EPOCHS = 4  # two rounds
start_tracking = Tracker.start


def quality(params: Params, epoch: int) -> float:
    """The metric of a training that is not done: best at dropout 0.2 and beta 3, better with each
    epoch.
    """
    return 50.0 - 40 * abs(params.model.dropout - 0.2) + params.pool.beta + epoch


class Trainings:
    """Replaces `run_step`: writes what the child process would write.

    Attributes:
        trained: settings of each training that was started. tags: of the MLflow run of each step.
        stop_at: number of the training at which SIGTERM comes, or `stops` is set, after a round.
        fails: whether a training fails.
    """

    def __init__(self, dataset: XMCDataset) -> None:
        self.dataset = dataset
        self.trained: list[tuple[float, float, int]] = []
        self.tags: list[dict[str, str]] = []
        self.stop_at = 0
        self.stops: threading.Event | None = None
        self.fails: Callable[[Params], bool] = lambda params: False

    def __call__(
        self,
        step: Step,
        environment: dict[str, str],
        stopping: threading.Event,
        is_enough: Callable[[], bool],
    ) -> bool:
        self.tags.append(json.loads(environment["UNIDEC_RUN_TAGS"]))
        step.folder.mkdir(parents=True, exist_ok=True)
        result = {
            "name": step.name,
            "code": step.spec["code"],
            "curve": [],
        }
        if step.spec["kind"] == "data":
            (step.folder / "data").mkdir()
            (step.folder / "data" / "dataset").symlink_to(self.dataset.path)
            write_json(step.folder / "result.json", result)
            return False
        params = Params.model_validate(step.spec["params"])
        self.trained.append((params.optim.lr_bag, params.model.dropout, params.pool.beta))
        if self.fails(params):
            raise TrainingError("the loss is not finite", where=step.name)
        run_dir = step.folder / "runs" / "one"
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        lines = []
        for epoch in range(2, EPOCHS + 1, 2):
            line = {
                "epoch": epoch,
                "round": epoch // 2,
                "finished": epoch == EPOCHS,
                "seconds": 1.5,
                "refresh": {},
                "validation": {"nDCG@5": quality(params, epoch)},
            }
            lines.append(json.dumps(line) + "\n")
            (run_dir / "rounds.jsonl").write_text("".join(lines))
            if len(self.trained) == self.stop_at:
                if self.stops is None:
                    os.kill(os.getpid(), signal.SIGTERM)
                else:
                    self.stops.set()
                assert stopping.is_set()
                raise TrainingError("stopped", where=step.name)
            if is_enough():
                return True
        if step.spec["keep"]:
            (step.folder / "outputs" / "model").mkdir(parents=True)
            write_json(step.folder / "outputs" / "model" / "manifest.json", {})
        write_json(step.folder / "result.json", result)
        return False


@pytest.fixture
def params(
    tiny_params: Callable[..., Params], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Params:
    """Parameters of a project with raw data and space.yaml, the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr(Tracker, "start", lambda *given: None)  # a second or two a test
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "queries.csv").write_text("id,text\n")
    (tmp_path / "space.yaml").write_text(SPACE)
    return tiny_params(**{"data.path": "raw", "optim.epochs": EPOCHS})


@pytest.fixture
def trainings(
    params: Params, tiny_dataset: XMCDataset, monkeypatch: pytest.MonkeyPatch
) -> Trainings:
    """In place of child processes."""
    fake = Trainings(tiny_dataset)
    monkeypatch.setattr(trials, "run_step", fake)
    return fake


def table(folder: str = "runs/tune/space") -> list[list[str]]:
    """Cells of trials.md, without the line of dashes."""
    lines = (Path(folder) / "trials.md").read_text().splitlines()
    rows = [[entry.strip() for entry in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def test_a_search_finds_the_better_parameters_also_after_a_stop(
    params: Params, trainings: Trainings
) -> None:
    """SIGTERM in the twelfth training, which Optuna's model of the earlier ones drew; then more
    trials are asked for: it is the search that was never stopped.
    """
    found = tune.tune(params, "space.yaml", 13, folder="whole")
    whole = trainings.trained
    trainings.trained = []
    tried = [quality_of(params, settings) for settings in whole]
    assert len(tried) == 13 and whole[0] == (0.01, 0.1, 2)  # first the parameters as they are
    assert found.metric == pytest.approx(max(tried))
    assert found.metric > tried[0]
    assert tuple(found.settings.values()) == whole[found.trial]
    assert found.trials == 13
    head, *rows = table("whole")
    assert head == [
        "trial",
        "state",
        "nDCG@5",
        "seconds",
        "optim.lr_bag",
        "model.dropout",
        "pool.beta",
    ]
    expected = [str(number) for number in range(13)]
    assert [row[0] for row in rows] == expected
    assert rows[found.trial][1] == "trained"
    assert float(rows[found.trial][2]) == pytest.approx(found.metric, abs=0.01)
    # the median rule begins after five trainings, and never ends the best one
    pruned = [row for row in rows if row[1] == "pruned after round 1"]
    assert pruned
    assert all(int(row[0]) >= 5 and row[3] == "2" for row in pruned)
    assert {row[1] for row in rows} == {"trained", "pruned after round 1"}
    # theirs are of no more use
    assert len(list(Path("whole").rglob("checkpoints"))) == 13 - len(pruned)

    trainings.stop_at = 12
    with pytest.raises(Stopped, match="re-run the command to resume") as stopped:
        tune.tune(params, "space.yaml", 12)
    assert stopped.value.exit_code == 143
    assert len(table()) == 1 + 11  # the one in progress does not count
    trainings.stop_at = 0
    tune.tune(params, "space.yaml", 12)
    assert trainings.trained == [*whole[:12], whole[11]]  # it alone is begun again, in its folder
    tune.tune(params, "space.yaml", 12)
    assert len(trainings.trained) == 13  # all are there: none is trained
    tune.tune(params, "space.yaml", 13)
    assert trainings.trained[13:] == whole[12:]
    assert table() == table("whole")


def quality_of(params: Params, settings: tuple[float, float, int]) -> float:
    changed = params.model_dump()
    changed["model"]["dropout"], changed["pool"]["beta"] = settings[1:]
    return quality(Params.model_validate(changed), EPOCHS)


def test_best_yaml_is_a_parameter_file_written_once_a_trial(
    params: Params, trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    write = trials.Search.write_best
    monkeypatch.setattr(
        trials.Search,
        "write_best",
        lambda search, asked: written.append(write(search, asked)) or written[-1],
    )
    found = tune.tune(params, "space.yaml", 3)
    assert len(written) == 3
    assert found == written[-1]
    # nothing is left to try
    assert tune.tune(params, "space.yaml", 3) == found
    assert len(written) == 4
    best = load_params(found.best)
    expected = params.model_dump(exclude={"recipe"})
    for key, value in found.settings.items():
        section, _, name = key.partition(".")
        expected[section][name] = value
    # so the experiment too is the project's own
    assert best.model_dump(exclude={"recipe"}) == expected
    head = Path(found.best).read_text().splitlines()[:3]
    assert "nDCG@5" in head[0] and head[1] == f"# unidec train --params {found.best}"
    assert all(f"--set {key}=" in head[2] for key in found.settings)


def test_another_seed_draws_other_trials(params: Params, trainings: Trainings) -> None:
    tune.tune(params, "space.yaml", 2, folder="one")
    tune.tune(params.model_copy(update={"seed": params.seed + 1}), "space.yaml", 2, folder="two")
    first = trainings.trained[:2]
    second = trainings.trained[2:]
    assert first[0] == second[0]
    assert not set(first[1:]) & set(second[1:])


def test_a_trial_that_fails_is_noted_and_the_first_one_ends_the_search(
    params: Params, trainings: Trainings
) -> None:
    trainings.fails = lambda tried: tried.pool.beta == 3
    found = tune.tune(params, "space.yaml", 6)
    rows = table()[1:]
    failed = [row for row in rows if row[-1] == "3"]
    assert failed
    assert all("failed: " in row[1] and "not finite" in row[1] and not row[2] for row in failed)
    assert found.settings["pool.beta"] != 3
    trainings.fails = lambda tried: True
    with pytest.raises(TrainingError, match="not finite"):
        tune.tune(params, "space.yaml", 3, folder="hopeless")
    trainings.fails = lambda tried: False  # the cause is fixed: the first trial runs again
    assert tune.tune(params, "space.yaml", 1, folder="hopeless").trial == 0
    outside = params.model_copy(update={"pool": params.pool.model_copy(update={"beta": 5})})
    trainings.fails = lambda tried: True
    with pytest.raises(TrainingError, match="no trial has finished"):
        tune.tune(outside, "space.yaml", 3, folder="all")


def test_settings_in_conflict_are_a_failed_trial(params: Params, trainings: Trainings) -> None:
    Path("space.yaml").write_text("loss.topk: [5, 50]\npool.size: [0, 40]\n")
    loss = params.loss.model_copy(update={"clf": "softtopk", "clf_forward": 1.0, "clf_bce": 0.0})
    tune.tune(params.model_copy(update={"loss": loss}), "space.yaml", 8)
    failed = [row for row in table()[1:] if row[1].startswith("failed")]
    assert failed
    assert all(row[4:] == ["50", "40"] for row in failed)


def test_each_trial_is_a_run_below_the_searchs(
    params: Params, trainings: Trainings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_store(f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr(Tracker, "start", start_tracking)
    found = tune.tune(params, "space.yaml", 2)
    from mlflow import MlflowClient

    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("unidec-tune")
    assert experiment is not None
    (parent,) = client.search_runs([experiment.experiment_id])
    assert parent.info.status == "FINISHED"
    assert "(1, 2, 3)" in parent.data.params["pool.beta"]
    assert parent.data.metrics["best/nDCG_at_5"] == pytest.approx(found.metric)
    paths = {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert paths == {
        "best.yaml",
        "trials.md",
    }
    assert [tags["mlflow.runName"] for tags in trainings.tags] == [
        "space data",
        "space trial 0",
        "space trial 1",
    ]
    assert all(tags["mlflow.parentRunId"] == parent.info.run_id for tags in trainings.tags)


def test_the_search_of_a_comparisons_cell(params: Params, trainings: Trainings) -> None:
    """Its event stops it, the next call resumes it, and each trial records what it changed."""
    text = (
        "name: t\ndata: {d: {path: raw}}\ncommon: {optim.epochs: 4, model.dropout: 0.1, "
        "pool.beta: 2}\n"
        "tuning: {data: d, file: chosen.yaml, trials: 4, ranges: {pool.beta: [1, 2, 3]}}\n"
        "cells:\n  a: {recipe: ngame}\n  b: {recipe: ngame-classifier, after: a, ranges: "
        "{lr: {low: 1, high: 2}}}\n"
    )
    Path("c.yaml").write_text(text)
    comparison = load_comparison("c.yaml", tune=True)
    subject = tune.subject_of(comparison, "d/b/0", {"SHARED": "1"})
    # the first is that of `a`, which `b` starts from
    trainings.stop_at = 3
    trainings.stops = threading.Event()
    with pytest.raises(TrainingError, match="stopped"):
        tune.tune_cell(subject, 4, trainings.stops)
    assert len(table("runs/compare/t/tuning/b")) == 1 + 1
    trainings.stop_at = 0
    found = tune.tune_cell(subject, 4, threading.Event())
    assert trainings.trained[2] == trainings.trained[3]
    assert len(trainings.trained) == 1 + 4 + 1
    assert found[0] == ({}, pytest.approx(quality(subject.job.params, EPOCHS)))
    assert len(found) == 4
    assert all(changed.keys() <= {"pool.beta", "lr"} for changed, _ in found)
    assert {tags["comparison"] for tags in trainings.tags} == {"t"}
    again = tune.tune_cell(subject, 4, threading.Event())
    assert again == found and len(trainings.trained) == 6


# -- refusals
# --------------------------------------------------------------------------------------------------


def test_a_folder_of_another_search(params: Params, trainings: Trainings) -> None:
    tune.tune(params, "space.yaml", 1, folder="taken")
    other = params.model_copy(update={"pool": params.pool.model_copy(update={"eta": 1})})
    with pytest.raises(ConfigError, match="got: other parameters"):
        tune.tune(other, "space.yaml", 1, folder="taken")
    with pytest.raises(ConfigError, match="got: other metric"):
        tune.tune(params, "space.yaml", 1, "P@1", folder="taken")
    Path("space.yaml").write_text("pool.beta: [1, 2]\n")
    with pytest.raises(ConfigError, match="folder of another search") as error:
        tune.tune(params, "space.yaml", 1, folder="taken")
    assert "ranges" in str(error.value)
    assert "--out" in str(error.value)
    assert len(trainings.trained) == 1


def test_folders_that_cannot_be_used(params: Params, trainings: Trainings) -> None:
    Path("full").mkdir()
    (Path("full") / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not the folder of a search"):
        tune.tune(params, "space.yaml", 1, folder="full")
    Path("damaged").mkdir()
    (Path("damaged") / "study.db").write_bytes(b"no database" * 100)
    with pytest.raises(ArtifactError, match="cannot be read"):
        tune.tune(params, "space.yaml", 1, folder="damaged")
    with warnings.catch_warnings():  # Optuna leaves its connection open, which Python 3.13 reports
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    with (
        one_at_a_time_elsewhere("held"),
        pytest.raises(TrainingError, match="under way in this folder"),
    ):
        tune.tune(params, "space.yaml", 1, folder="held")
    assert not trainings.trained


@contextlib.contextmanager
def one_at_a_time_elsewhere(folder: str) -> Iterator[None]:
    """Another process holds the folder."""
    code = (
        "import sys, time, pathlib; from unidec.pipeline.lock import one_at_a_time\n"
        "with one_at_a_time(pathlib.Path(sys.argv[1])): print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        try:
            yield
        finally:
            holder.kill()


def test_no_metric_no_validation_split_no_optuna(
    params: Params,
    trainings: Trainings,
    tiny_raw: RawData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"--metric nDCG@5"):
        tune.tune(params, "space.yaml", 1, "ndcg@5")
    trainings.dataset = write_dataset(tmp_path / "whole", tiny_raw, validation_share=0.0)
    with pytest.raises(ConfigError, match="no validation split") as error:
        tune.tune(params, "space.yaml", 1)
    assert "data.validation_share" in str(error.value) and not trainings.trained
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="Optuna is not installed") as missing:
        tune.tune(params, "space.yaml", 1, folder="fresh")
    assert "make setup" in str(missing.value)


# -- real trainings
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def project(params: Params) -> Params:
    """With raw data; all trainings real."""
    (Path("raw") / "queries.csv").unlink()
    write_raw(make_raw(num_train=96, num_test=40), Path("raw"), "xmc-json")
    Path("params.yaml").write_text(to_yaml(params))
    return load_params(
        "params.yaml", {"data.validation_share": 0.1, "optim.epochs": 2, "pool.refresh": 1}
    )


def test_real_trainings(project: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: three trials, whose metric is that of their rounds; nothing of the test
    split is measured.
    """

    def run_here(step: Step, *_: object) -> bool:
        step.folder.mkdir(parents=True, exist_ok=True)
        write_json(step.folder / "cell.json", dict(step.spec))
        try:
            assert cell.main(str(step.folder)) == 0, step.failure()
        finally:
            os.chdir(tmp_path)
        return False

    monkeypatch.setattr(trials, "run_step", run_here)
    found = tune.tune(project, "space.yaml", 3, "R@10", tmp_path / "search")
    results = [
        json.loads(file.read_text())
        for file in (tmp_path / "search").glob("cells/raw/trial/*/result.json")
    ]
    assert len(results) == 3
    assert max(one["curve"][-1]["validation"]["R@10"] for one in results) == found.metric
    assert all(
        "metrics" not in one and [line["epoch"] for line in one["curve"]] == [1, 2]
        for one in results
    )
    assert not list((tmp_path / "search").rglob("metrics.json"))
    assert not list((tmp_path / "search").rglob("checkpoints"))
    # one, and links to it
    assert len(list((tmp_path / "search").rglob("dataset/manifest.json"))) == 1 + 3


@pytest.mark.slow
def test_the_command_killed_and_started_again(project: Params) -> None:
    """Child processes; the search is killed, then stopped in order, and ends with every
    trial once.
    """
    command = [
        sys.executable,
        "-m",
        "unidec.cli",
        "tune",
        "space.yaml",
        "--trials",
        "3",
        "--metric",
        "R@10",
        "--set",
        "data.validation_share=0.1",
        "--set",
        "optim.epochs=20",
        "--set",
        "pool.refresh=1",
    ]
    trial = "runs/tune/space/cells/raw/trial"
    for number, (how, code) in enumerate(
        [
            (signal.SIGKILL, -9),
            (signal.SIGTERM, 143),
        ],
        1,
    ):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        end = time.monotonic() + 200
        while len(list(Path().glob(f"{trial}/*/runs/*/rounds.jsonl"))) < number:
            assert time.monotonic() < end, process.communicate()
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(how)
        _, printed = process.communicate(timeout=120)
        assert process.returncode == code, printed
        assert "Traceback" not in printed
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    logs = [log.read_text() for log in Path().glob(f"{trial}/*/log.txt")]
    assert len(logs) == 3
    assert sum("resumes after epoch" in log for log in logs) >= 1
    assert [row[1] for row in table()[1:]] == ["trained"] * 3
    for file in Path().glob(f"{trial}/*/runs/*/rounds.jsonl"):
        epochs = [json.loads(line)["epoch"] for line in file.read_text().splitlines()]
        assert epochs == list(range(1, 21))
    best = yaml.safe_load(Path("runs/tune/space/best.yaml").read_text())
    assert best["optim"]["epochs"] == 20
