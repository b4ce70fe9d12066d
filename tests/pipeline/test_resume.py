"""Which run resumes, where, and what is refused: on tiny data, with cuts at the places between two
files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.raw_files import write_raw
from helpers.tiny_data import tiny_transformer
from helpers.tiny_training import tiny_params

from unidec import pipeline
from unidec.config import Params
from unidec.data.json_file import read_json_lines
from unidec.data.raw import RawData
from unidec.data.storage import read_manifest
from unidec.errors import ConfigError, Stopped, TrainingError
from unidec.model.unidec import UniDEC
from unidec.pipeline import paths, runs, training
from unidec.pipeline.lock import one_at_a_time
from unidec.pipeline.ranking import Ranking, validation_metrics
from unidec.tracking.run import Tracker
from unidec.tracking.store import open_client, prepare_store
from unidec.training.fit import fit
from unidec.training.trainer import Trainer

pytestmark = pytest.mark.timeout(240)
ROUND = 2
EPOCHS = 4
TIMES = ("seconds", "_per_s", "memory")


@pytest.fixture(scope="module")
def made(tiny_raw: RawData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw files, a transformer and the store of a tiny project."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "raw").mkdir()
    write_raw(tiny_raw, folder / "raw", "xmc-json")
    tiny_transformer("bert", tiny_raw, folder / "bert")
    prepare_store(f"sqlite:///{folder}/mlflow.db")
    return folder


@pytest.fixture
def work(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A project whose data stages are done; `params(**overrides)` of a training of some dozen
    steps.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    (tmp_path / "mlflow.db").write_bytes((made / "mlflow.db").read_bytes())
    for name in ("raw", "bert"):
        (tmp_path / name).symlink_to(made / name)

    def params(**overrides: Any) -> Params:
        values = {
            "data.path": "raw",
            "data.validation_share": 0.2,
            "optim.epochs": EPOCHS,
            "pool.refresh": ROUND,
            "run.checkpoint_steps": 3,
            "run.check_memory": False,
        }
        return tiny_params(Path("bert"), **(values | overrides))

    for name in ("ingest", "tokens", "propensity"):
        getattr(pipeline, name)(params())
    return SimpleNamespace(params=params, folder=tmp_path)


def train(params: Params, **options: Any) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    return training.train(params, say=said.append, **options), said


def cut(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: int = 0) -> None:
    """The process is killed at the call after so many: nothing that stands behind it runs."""
    real = getattr(owner, name)
    calls = []

    def function(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > after:
            raise SystemExit("killed")
        return real(*args, **options)

    monkeypatch.setattr(owner, name, function)


def cut_training(
    monkeypatch: pytest.MonkeyPatch, params: Params, owner: Any, name: str, after: int = 0
) -> None:
    with monkeypatch.context() as patch:
        cut(patch, owner, name, after)
        with pytest.raises(SystemExit):
            train(params)


def plain(record: dict[str, Any]) -> dict[str, Any]:
    kept = {
        k: v
        for k, v in record.items()
        if not k.endswith(TIMES) and "_per_" not in k and "after_restart" not in k
    }
    return {k: plain(v) if isinstance(v, dict) else v for k, v in kept.items()}


def outcome() -> dict[str, Any]:
    """What training left, but for times."""
    files = read_manifest(paths.MODEL, "model", 1)["files"]
    tensors = {
        name: entry["sha256"] for name, entry in files.items() if not name.endswith(".jsonl")
    }
    lines = {
        n: [plain(r) for r in read_json_lines(paths.MODEL / f"{n}.jsonl")]
        for n in ("history", "rounds")
    }
    return tensors | lines


@pytest.fixture
def uncut(work: SimpleNamespace) -> dict[str, Any]:
    """What a training ends with that nobody cut; it is gone again."""
    import shutil

    train(work.params())
    found = outcome()
    shutil.rmtree(paths.RUNS)
    return found


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        pytest.param(Trainer, "train_step", 5, id="in a round", marks=pytest.mark.slow),
        pytest.param(Trainer, "train_step", 14, id="in a later round"),
        pytest.param(Trainer, "mine", 1, id="before a refresh", marks=pytest.mark.slow),
        pytest.param(
            training,
            "write_json",
            1,
            id="after a refresh, before its report",
            marks=pytest.mark.slow,
        ),
        pytest.param(training, "validation_metrics", 0, id="after a round, before it is measured"),
        pytest.param(
            training, "validation_metrics", 1, id="after the last round", marks=pytest.mark.slow
        ),
        pytest.param(training, "write_folder", 0, id="in the export", marks=pytest.mark.slow),
    ],
)
def test_killed_between_any_two_files(
    work: SimpleNamespace,
    uncut: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    after: int,
) -> None:
    cut_training(monkeypatch, work.params(), owner, name, after)
    result, said = train(work.params())
    assert result.finished
    assert any("resumes" in line or "is trained" in line for line in said)
    found = outcome()
    if name == "write_json":  # the report of a refresh is the one thing that is not made again
        for part in (found, uncut):
            part["rounds"] = [
                line | {"refresh": line["refresh"]["epoch"]} for line in part["rounds"]
            ]
    assert found == uncut
    client = open_client(f"sqlite:///{work.folder}/mlflow.db")
    run_id = Tracker.resume(result.run_dir).run_id
    steps = [point.step for point in client.get_metric_history(run_id, "training/loss")]
    assert steps == [line["step"] for line in uncut["history"]]  # nothing lost, nothing doubled
    assert len(client.get_metric_history(run_id, "validation/P_at_1")) == EPOCHS // ROUND
    assert client.get_run(run_id).info.status == "FINISHED"


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (Trainer, "train_step", 14),
        (training, "validation_metrics", 1),
        (training, "validation_metrics", 2),
        (training, "write_folder", 0),
    ],
)
def test_with_patience_it_ends_early_wherever_it_is_killed(
    work: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: int
) -> None:
    """Validation does not rise after the second round: the third one is the last."""
    given = {"optim.patience": 1, "optim.epochs": 40, "optim.warmup_epochs": 0.5}
    real = training.validation_metrics
    measured = {2: 30.0, 4: 20.0, 6: 10.0}

    def falls(ranking: Any, params: Params) -> dict[str, float]:
        return real(ranking, params) | {"nDCG@5": measured[epoch[0]]}

    epoch = [0]
    validate = training.Run.validate
    monkeypatch.setattr(training, "validation_metrics", falls)
    monkeypatch.setattr(
        training.Run, "validate", lambda run: (epoch.__setitem__(0, run.epoch), validate(run))[1]
    )
    uncut, _ = train(work.params(**given))
    found = outcome()
    assert (uncut.epoch, uncut.finished) == (6, True)
    assert runs.list_runs()[0].state == "finished"
    lines = read_json_lines(paths.MODEL / "rounds.jsonl")
    assert [line["finished"] for line in lines] == [False, False, True]
    trained = [
        line["work_seconds"] - sum(r["refresh"]["work_seconds"] for r in lines[: i + 1])
        for i, line in enumerate(lines)
    ]
    assert 0 < trained[0] < trained[1] < trained[2]
    assert all(line["refresh"]["work_seconds"] > 0 for line in lines)
    shutil.rmtree(paths.RUNS)
    cut_training(monkeypatch, work.params(**given), owner, name, after)
    result, said = train(work.params(**given))
    assert (result.epoch, result.finished) == (6, True)
    assert outcome() == found
    assert any("of at most 40" in line or "is trained: 6 epochs" in line for line in said)


def test_inside_a_round_the_refresh_does_nothing(
    work: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = work.params()
    cut_training(monkeypatch, params, Trainer, "train_step", 5)
    begun = pipeline.start_run(params)
    assert (begun.epoch, begun.step) == (0, 3)
    assert begun.epoch_step == 3
    cut(monkeypatch, Trainer, "mine")
    cut(monkeypatch, Trainer, "cluster")
    assert begun.cluster() == {}
    report = begun.mine()
    # the report of the refresh that was made
    assert report["epoch"] == 0 and report["mine_queries"] > 0
    assert begun.train_round().epoch == ROUND


def test_the_model_of_one_process_is_that_of_a_process_for_each_stage(
    work: SimpleNamespace, uncut: dict[str, Any]
) -> None:
    def alone(_name: str, _number: int, work: Callable[[], dict]) -> dict:
        report = work()
        run.close()  # as in another process: the next phase opens the newest checkpoint
        return report

    run = pipeline.start_run(work.params())
    fit(run, alone)
    run.export()
    assert outcome() == uncut


def test_clusters_and_negatives_in_two_stages_make_the_same_model(
    work: SimpleNamespace, uncut: dict[str, Any]
) -> None:
    run = pipeline.start_run(work.params())
    while not run.finished:
        clustered = run.cluster()
        assert 0 < clustered["cluster_cosine"] <= 1 and "mine_queries" not in clustered
        if run.epoch:  # killed between the two, in a later round
            run.close()
        mined = run.mine()
        assert mined["clusters"] == clustered["clusters"] and "mine_negative_score" in mined
        run.train_round()
        run.validate()
    run.export()
    assert outcome() == uncut


# -- which run resumes
# ---------------------------------------------------------------------------------------------


def test_other_parameters_are_refused_with_every_key_and_accepted_by_name(
    work: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_training(monkeypatch, work.params(), Trainer, "train_step", 5)
    (run,) = runs.run_folders()
    other = work.params(**{"optim.lr_heads": 0.005, "loss.balance": 0.25})
    with pytest.raises(ConfigError) as refused:
        train(other, resume="")
    assert refused.value.exit_code == 2
    for words in (
        "loss.balance: 0.5 when the run began, 0.25 now",
        "optim.lr_heads: 0.01 when the run began, 0.005 now",
        "--accept loss.balance",
        "--accept optim.lr_heads",
    ):
        assert words in str(refused.value)
    with pytest.raises(ConfigError, match=r"loss\.balance") as refused:
        train(other, resume=run.name[:4], accept=["optim.lr_heads"])
    assert "optim.lr_heads" not in str(refused.value)
    accept = ["optim.lr_heads", "loss.balance"]
    result, said = train(other, resume=run.name, accept=accept)
    assert (
        result.run_dir == str(run)
        and result.epoch == EPOCHS
        and sum("accepted: " in line for line in said) == 2
    )
    tags = (
        open_client(f"sqlite:///{work.folder}/mlflow.db")
        .get_run(Tracker.resume(run).run_id)
        .data.tags
    )
    assert "loss.balance: 0.5 when the run began" in tags["accepted"]
    assert "is trained" in train(other, resume=run.name)[1][-1]  # accepted once is enough
    with pytest.raises(ConfigError, match=r"0\.25 when the run began, 0\.5 now"):
        train(work.params())  # the folder of these parameters is not theirs any more


def test_data_and_tokenizer_and_code_are_refused(
    work: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_training(monkeypatch, work.params(), Trainer, "train_step", 5)
    pipeline.ingest(work.params(**{"data.split_seed": 7}))
    with pytest.raises(ConfigError, match=r"\n.*data: .*when the run began"):
        train(work.params(), resume="")
    pipeline.ingest(work.params())
    with monkeypatch.context() as patch:
        patch.setattr("unidec.training.identity.code_sha256", lambda *results: "0" * 64)
        with pytest.raises(ConfigError, match="--accept code"):
            train(work.params(), resume="")
        assert train(work.params(), resume="", accept=["code"])[0].finished


@pytest.mark.parametrize("sample", [0, 1_000_000])
def test_without_a_validation_split_a_sample_of_training_queries_draws_the_curves(
    work: SimpleNamespace, sample: int
) -> None:
    given = {
        "data.validation_share": 0.0,
        "index.clf_weight": 1.0,
        "data.validation_sample": sample,
    }
    params = work.params(**given)
    for name in ("ingest", "tokens", "propensity"):
        getattr(pipeline, name)(params)
    train(params)
    [*_, last] = read_json_lines(paths.MODEL / "rounds.jsonl")
    dataset = paths.open_dataset()
    assert not len(dataset.rows("validation"))
    ranking = Ranking.of_model(UniDEC.load(paths.MODEL), dataset, "train", params.optim.precision)
    expected = {} if sample == 0 else validation_metrics(ranking, params)
    assert last["validation"] == pytest.approx(expected)
    assert bool(expected) == bool(sample)


def test_runs_by_name(work: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match="no unfinished run"):
        runs.choose_run("")
    for name in ("ab12", "ab34"):
        (paths.RUNS / name / "checkpoints").mkdir(parents=True)
    assert runs.choose_run("ab1") == paths.RUNS / "ab12"
    for wrong, words in (("ab", "several runs"), ("zz", "no such run")):
        with pytest.raises(ConfigError, match=words):
            runs.choose_run(wrong)


def test_a_run_whose_process_is_gone_is_closed_by_the_next_start(
    work: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = pipeline.start_run(work.params())
    state = json.loads((begun.folder / "tracking.json").read_text())
    dead = state | {"holder": state["holder"] | {"started": 1.0}}
    (begun.folder / "tracking.json").write_text(json.dumps(dead))
    other = pipeline.start_run(work.params(seed=5))
    client = open_client(f"sqlite:///{work.folder}/mlflow.db")
    assert any("ended as KILLED" in line for line in other.lines)
    assert client.get_run(state["run_id"]).info.status == "KILLED"
    assert client.get_run(Tracker.resume(other.folder).run_id).info.status == "RUNNING"


# -- lists and ends
# ------------------------------------------------------------------------------------------------


def test_the_list_of_runs(work: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs.list_runs() == []
    assert runs.rows_of([]) == []
    cut_training(monkeypatch, work.params(), Trainer, "train_step", 5)
    result, _ = train(work.params(seed=5))
    running = pipeline.start_run(work.params(seed=6))
    infos = {info.name: info for info in runs.list_runs()}
    finished = infos.pop(Path(result.run_dir).name)
    assert (finished.state, finished.epoch, finished.epochs, finished.unfinished) == (
        "finished",
        EPOCHS,
        EPOCHS,
        False,
    )
    assert finished.checkpoint_age is not None and finished.checkpoint_age < 600
    assert finished.mlflow_run == Tracker.resume(result.run_dir).run_id
    at_work = infos.pop(running.folder.name)
    assert (at_work.state, at_work.checkpoint) == ("running", None)
    (cut_off,) = infos.values()
    assert (cut_off.state, cut_off.step, cut_off.unfinished) == ("stopped", 3, True)
    rows = runs.rows_of([finished, at_work, cut_off])
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert rows[1]["checkpoint"] == "none yet"
    json.dumps([vars(info) for info in runs.list_runs()])
    trial = Path("runs/own/0123456789ab/runs")
    trial.mkdir(parents=True)
    running.folder.rename(trial / running.folder.name)
    (listed,) = [info for info in runs.list_runs() if info.trial]
    assert listed.name == at_work.name
    assert listed.trial == "0123456789ab"
    assert listed.state == "running"
    assert runs.rows_of([listed])[0]["run"] == f"{at_work.name} (trial 0123456789ab)"
    with pytest.raises(ConfigError):
        runs.choose_run(at_work.name)  # a trial is resumed by its own command


def test_a_training_ends_as_what_happened(
    work: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import signal

    client = open_client(f"sqlite:///{work.folder}/mlflow.db")

    def terminate(_trainer: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def fail(_trainer: Trainer) -> None:
        raise TrainingError("a loss is not finite")

    before = signal.getsignal(signal.SIGTERM)
    for function, error, status in (
        (terminate, Stopped, "KILLED"),
        (fail, TrainingError, "FAILED"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "mine", function)
            with pytest.raises(error) as raised:
                train(work.params())
        (run,) = runs.run_folders()
        assert client.get_run(Tracker.resume(run).run_id).info.status == status
        assert signal.getsignal(signal.SIGTERM) is before
        if error is Stopped:
            assert raised.value.exit_code == 143
    assert runs.run_info(run).state == "failed"
    with one_at_a_time(), pytest.raises(TrainingError, match="another training"):
        train(work.params())


def test_the_export_of_a_finished_run_needs_no_room_for_a_training(
    work: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:

    def no_room(_params: Params) -> None:
        raise ConfigError("the training does not fit: too little host memory")

    train(work.params())
    whole = read_manifest(paths.MODEL, "model", 1)
    shutil.rmtree(paths.MODEL)
    monkeypatch.setattr(training, "check_fits", no_room)
    train(work.params())
    assert read_manifest(paths.MODEL, "model", 1) == whole
    with pytest.raises(ConfigError, match="does not fit"):
        train(work.params(seed=4))
