"""The flow's logic, with stages and DVC replaced; the last tests run it through Prefect itself."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest

from flows import command
from flows.ending import Ending
from unidec.config import Params, load_params
from unidec.errors import ConfigError, DataError, Refused, TrainingError
from unidec.evaluation.significance import Check
from unidec.pipeline import plain, runs
from unidec.pipeline.data_stages import Fetched
from unidec.pipeline.drift_check import DataChange
from unidec.pipeline.evaluation import Evaluation
from unidec.pipeline.gating import Verdict
from unidec.pipeline.registration import Registration
from unidec.pipeline.start import ChosenStart
from unidec.tracking.promotion import Promotion
from unidec.training.fit import RoundReport

EPOCHS = 5
A_ROUND = 2
ROUND = ["cluster", "mine", "train_round", "validate_round"]
ROUNDS = ["start_run", *ROUND * 3, "export"]
FINISH = ["index", "evaluate"]


@pytest.fixture(scope="module")
def flow_module():
    from flows import train as module

    return module


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """An empty project folder to stand in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    given = f"optim: {{epochs: {EPOCHS}}}\npool: {{refresh: {A_ROUND}}}\nindex: {{factory: Flat}}\n"
    Path("params.yaml").write_text(given)
    Path("dvc.yaml").write_text(
        "stages:\n  train: {cmd: x, deps: [data]}\n  index: {cmd: x}\n  evaluate: {cmd: x}\n"
    )
    return tmp_path


class Stages(types.SimpleNamespace):
    """Every stage notes its name; training counts epochs, and remembers them in the run's folder as
    checkpoints do.
    """

    def __init__(self) -> None:
        super().__init__(calls=[], fail={}, plain=plain)
        self.passed = True
        for name in ("ingest", "validate", "tokens", "propensity", "label_graph", "index"):
            setattr(self, name, lambda *_args, name=name: self.called(name))

    def called(self, name: str) -> dict:
        self.calls.append(name)
        if name in self.fail:
            raise self.fail[name]
        return {}

    def start_run(self, params: Params) -> FakeRun:
        self.called("start_run")
        return FakeRun(self, params)

    def evaluate(self, _params: Params) -> Evaluation:
        self.called("evaluate")
        return Evaluation({"P@1": 45.0}, {}, "", [], "outputs/report.html")

    def register(self, _params: Params) -> Registration:
        self.called("register")
        return Registration("unidec", 3, "challenger", None)

    def import_training(self) -> None: ...

    def inputs(self, _params: Params) -> None: ...

    def check_before_work(self, _params: Params, _steps: list[str]) -> None: ...

    def fetch(self, _params: Params) -> Fetched:
        self.called("fetch")
        return Fetched(True, "export", "0", "3 files are new")

    def data_change(self, _params: Params) -> DataChange:
        self.called("data_change")
        accepted = {"model": "unidec", "version": "2", "dataset_sha256": "0"}
        return DataChange(accepted, "", [], ["fewer queries"], "data/change/index.html")

    def choose_start(self, _params: Params, kind: str | None) -> ChosenStart:
        self.called(f"choose_start {kind}")
        Path("data").mkdir(exist_ok=True)
        Path("data/start.json").write_text('{"kind": "warm", "version": "2"}')
        return ChosenStart(kind="warm", version="2", reason="from version 2")

    def needs_gate(self, _params: Params, _version: str) -> bool:
        return False

    def gate(self, _params: Params, version: str) -> Verdict:
        self.called(f"gate {version}")
        words = "nDCG@5 is 0.4 ahead" if self.passed else "2.1 behind"
        reasons = [
            Check("nDCG@5", self.passed, 0.4, 0.0, words),
            Check("size", True, None, None, "3 MB"),
        ]
        figures = {"challenger": {"nDCG@5": 40.1}}
        return Verdict(
            self.passed, False, "unidec", reasons, version, "2", figures, "outputs/gate.html", None
        )

    def promote(self, _params: Params, version: str, **_options: object) -> Promotion:
        self.called(f"promote {version}")
        return Promotion(model="unidec", version=version, previous="2")


class FakeRun:
    """In place of `unidec.pipeline.training.Run`: counts epochs, kept in the run's folder as
    checkpoints do.
    """

    def __init__(self, stages: Stages, params: Params) -> None:
        self.stages = stages
        self.lines = []
        self.folder = Path("runs/abc").resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.epochs = params.optim.epochs
        self.a_round = params.pool.refresh
        self.num_rounds = -(-self.epochs // self.a_round)

    @property
    def epoch(self) -> int:
        return int((self.folder / "epoch").read_text()) if (self.folder / "epoch").exists() else 0

    @property
    def finished(self) -> bool:
        return self.epoch >= self.epochs

    @property
    def round_number(self) -> int:
        return self.epoch // self.a_round + 1

    def cluster(self) -> dict:
        return self.stages.called("cluster") | {
            "cluster_seconds": 0.5,
            "clusters": 8,
            "cluster_cosine": 0.71,
        }

    def mine(self) -> dict:
        return self.stages.called("mine") | {
            "mine_negative_score": 0.31,
            "mine_positives_found": 0.93,
        }

    def train_round(self) -> RoundReport:
        self.stages.called("train_round")
        (self.folder / "epoch").write_text(str(min(self.epoch + self.a_round, self.epochs)))
        return RoundReport(self.epoch)

    def validate(self) -> RoundReport:
        self.stages.called("validate_round")
        return RoundReport(self.epoch, validation={"P@1": 1.0})

    def export(self) -> dict:
        return self.stages.called("export")


@pytest.fixture
def stages(place, flow_module, monkeypatch) -> Stages:
    stand_in = Stages()
    from flows import decide, reproduce

    for module in (flow_module, decide, reproduce):
        monkeypatch.setattr(module, "pipeline", stand_in)
    return stand_in


@pytest.fixture
def run(flow_module, stages, monkeypatch):
    """The flow's body, its tasks plain calls; DVC's calls are noted among the stages', `run.stale`
    is what DVC reports.

    `run.events` are the events that would go to Prefect.
    """

    def start(**arguments):
        return flow_module.train.fn(**arguments)

    start.stale = ["train", "index", "evaluate"]
    start.events = []
    start.data_changed = True
    dvc = flow_module.reproduce
    monkeypatch.setattr(dvc, "make_data", lambda names: stages.called("dvc " + " ".join(names)))
    monkeypatch.setattr(
        dvc, "stale", lambda data_stages=(): (bool(data_stages) and start.data_changed, start.stale)
    )
    monkeypatch.setattr(dvc, "commit", lambda made: stages.called("commit " + " ".join(made)))
    monkeypatch.setattr(
        flow_module.publish, "emit", lambda _name, event, told: start.events.append((event, told))
    )
    return start


PREPARED = ["dvc ingest validate tokens propensity label_graph"]


WHOLE = [
    *PREPARED,
    "data_change",
    "choose_start None",
    *ROUNDS,
    *FINISH,
    "commit train index evaluate",
    "register",
]


def test_everything_in_order(run, stages):
    done = run()
    assert stages.calls == [*WHOLE, "gate 3", "promote 3"]
    assert done["epoch"] == EPOCHS
    assert done["version"] == 3
    assert done["metrics"] == {"P@1": 45.0}
    assert (
        done["start"]["version"] == "2"
        and done["promoted"]["previous"] == "2"
        and "refused" not in done
    )
    ((event, told),) = run.events
    assert event == "promoted" and told == {
        "version": "3",
        "previous": "2",
        "metrics": {"nDCG@5": 40.1},
    }


def test_a_remote_that_refuses_is_noticed_before_the_training(
    run, stages, flow_module, place, monkeypatch
):
    def refuse(*_):
        raise ConfigError("dvc push failed", where="dvc", got="403 Forbidden")

    monkeypatch.setattr(flow_module.reproduce, "dvc", refuse)
    with Path("params.yaml").open("a") as file:
        file.write("retrain: {push: true}\n")
    with pytest.raises(ConfigError, match="403 Forbidden") as refused:
        run()
    assert refused.value.where == "retrain.push"
    assert stages.calls == PREPARED


def test_a_worse_challenger_is_refused(run, stages):
    stages.passed = False
    done = run()
    assert stages.calls == [*WHOLE, "gate 3"]
    assert done["refused"] == "nDCG@5: 2.1 behind" and "promoted" not in done
    ((event, told),) = run.events
    assert (
        event == "refused"
        and (told["version"], told["champion"]) == ("3", "2")
        and len(told["reasons"]) == 2
    )


def test_the_registry_may_refuse_what_the_gate_passed(run, stages, flow_module):
    stages.fail["promote 3"] = Refused("the champion is another one meanwhile")
    assert "another one meanwhile" in run()["refused"]
    assert [event for event, _ in run.events] == ["refused"]
    stages.fail["promote 3"] = ConnectionError("the registry is away")
    with pytest.raises(ConnectionError):
        run(force=True)


def test_what_is_asked_for(run, stages, place):
    run(start="cold", promote=False)
    assert "choose_start cold" in stages.calls
    assert stages.calls[-1] == "gate 3"
    assert run.events == []
    stages.calls.clear()
    (place / "params.yaml").write_text(
        (place / "params.yaml").read_text() + "retrain: {promote: false}\n"
    )
    run()
    assert stages.calls[-1] == "gate 3"
    run(promote=True)
    assert stages.calls[-1] == "promote 3"


def test_nothing_changed(run, stages):
    run.stale = []
    assert "nothing that the model depends on changed" in run()["skipped"]
    assert stages.calls == [*PREPARED, "register"]
    assert [event for event, _ in run.events] == ["skipped"]
    stages.calls.clear()
    assert "skipped" not in run(force=True)
    assert "train_round" in stages.calls and "commit train index evaluate" in stages.calls


def test_where_no_data_stage_changed_none_is_reproduced(run, stages):
    run.stale = []
    run.data_changed = False
    assert "skipped" in run()
    assert stages.calls == ["register"]
    run.stale = ["evaluate"]
    run()
    assert stages.calls[1] == "evaluate"


def test_what_was_killed_before_the_gate_is_judged_by_the_next_run(run, stages):
    run.stale = []
    stages.needs_gate = lambda _params, version: version == "3"
    done = run()
    assert stages.calls == [*PREPARED, "register", "gate 3", "promote 3"]
    assert "skipped" in done and done["promoted"]["version"] == "3"


def test_only_what_changed(run, stages):
    run.stale = ["evaluate"]
    run()
    assert stages.calls == [
        *PREPARED,
        "evaluate",
        "commit evaluate",
        "register",
        "gate 3",
        "promote 3",
    ]


def test_new_data_is_fetched_first(run, stages, place):
    text = (place / "params.yaml").read_text() + "source: {kind: folder, path: export}\n"
    (place / "params.yaml").write_text(text)
    run()
    assert stages.calls[:2] == ["fetch", *PREPARED]
    stages.calls.clear()
    stages.fail["fetch"] = DataError("no such folder", where="export")
    with pytest.raises(DataError, match="export"):
        run()
    assert stages.calls == ["fetch"]


def test_data_that_changed_too_much_stops(run, stages):
    stages.fail["data_change"] = DataError(
        "half of the queries are gone", where="data/change/index.html"
    )
    with pytest.raises(DataError, match="half of the queries"):
        run()
    assert stages.calls == [*PREPARED, "data_change"]


def test_the_gate_stops_everything(run, stages):
    stages.fail[PREPARED[0]] = DataError("three labels without text", where="data/dataset")
    with pytest.raises(DataError, match="three labels"):
        run()
    assert stages.calls == PREPARED


@pytest.mark.parametrize("epoch", [2, EPOCHS])
def test_resumes_after_the_last_checkpoint(run, stages, place, epoch):
    (place / "runs/abc").mkdir(parents=True)
    (place / "runs/abc/epoch").write_text(str(epoch))
    run(steps="train")
    rounds = -(-(EPOCHS - epoch) // A_ROUND)
    assert stages.calls == ["start_run", *ROUND * rounds, "export"]


def test_steps_make_no_call_of_dvc_and_are_not_judged(run, stages, flow_module):
    run(steps="evaluate, index")
    assert stages.calls == FINISH
    stages.calls.clear()
    run(steps="validate")
    assert stages.calls == ["validate"]
    stages.calls.clear()
    run(steps=",".join(flow_module.STEPS))
    assert stages.calls == [
        "ingest",
        "validate",
        "tokens",
        "propensity",
        "label_graph",
        *ROUNDS,
        *FINISH,
        "register",
    ]
    with pytest.raises(ConfigError, match="no such step"):
        run(steps="train,trian")


def test_other_parameters_have_a_folder_of_their_own(run, stages, place, flow_module, monkeypatch):
    seen = {}

    def ingest(params):
        seen.update(
            here=Path.cwd(),
            data=params.data.path,
            epochs=params.optim.epochs,
        )
        seen["uri"] = flow_module.tracking_uri()
        return stages.called("ingest")

    stages.ingest = ingest
    run(overrides={"optim.epochs": 2})
    assert stages.calls[0] == "ingest" and not [
        call for call in stages.calls if call.startswith(("dvc", "commit"))
    ]
    assert stages.calls.count("train_round") == 1
    assert seen["here"].parent == place / "runs" / "own"
    assert seen["epochs"] == 2
    assert seen["data"] == str(place / "data/raw/lf-debian")
    assert seen["uri"] == f"sqlite:///{place}/mlflow/mlflow.db"
    assert Path.cwd() == place
    assert not (place / "outputs").exists()
    first = seen["here"]
    run(overrides={"optim.epochs": 3}, steps="ingest")
    assert seen["here"] != first


def test_a_trial_registers_only_when_asked(run, stages, place):
    (place / "other.yaml").write_text((place / "params.yaml").read_text())
    done = run(overrides={"optim.epochs": 2})
    assert "register" not in stages.calls
    assert "register" not in done["steps"]
    assert "version" not in done
    stages.calls.clear()
    run(params_file="other.yaml")
    assert "register" not in stages.calls
    assert run(overrides={"optim.epochs": 2}, register_trial=True)["version"] == 3
    assert stages.calls[-1] == "register" and not [
        call for call in stages.calls if call.startswith(("gate", "promote"))
    ]


def test_a_run_that_the_gate_leaves_without_a_champion(run, stages, flow_module, capsys):
    stages.passed = False
    assert "no_champion" not in run()
    gate = stages.gate
    stages.gate = lambda *given: replace(gate(*given), champion=None)
    missing = run()["no_champion"]
    assert missing["version"] == "3" and "2.1 behind" in missing["reason"]
    assert missing["command"].endswith("bin/unidec models promote 3 --force")
    loads = Check("loads", False, None, None, "damaged")
    stages.gate = lambda *given: replace(gate(*given), champion=None, reasons=[loads])
    assert run()["no_champion"]["command"] == "make train ARGS=--force"
    result = {"refused": "x", "no_champion": missing}
    assert command.guarded(lambda: result, Ending(str)) == 6
    last = capsys.readouterr().err.splitlines()[-1]
    assert "no champion" in last
    assert "2.1 behind" in last
    assert last.endswith(missing["command"])


def test_inputs_edited_meanwhile_are_not_recorded(run, stages, place):
    (place / "data").mkdir()
    (place / "data/part").write_text("1")

    def index(_params):
        (place / "data/part").write_text("2")
        return stages.called("index")

    stages.index = index
    with pytest.raises(ConfigError, match="edited while the model was trained"):
        run()
    assert (
        not [call for call in stages.calls if call.startswith("commit")]
        and "register" not in stages.calls
    )


@pytest.fixture
def prepare(run, flow_module, monkeypatch):
    """What happens before the flow run that `make train` begins; `prepare.servers` are those that
    it started.
    """
    Path(".dvc").mkdir()
    # there is no git repository
    Path(".dvc/config.local").write_text("[core]\n    no_scm = true\n")
    monkeypatch.setattr(flow_module, "import_mlflow", lambda: None)
    monkeypatch.setattr(flow_module, "prepare_store", lambda: None)
    monkeypatch.setattr(flow_module, "check_store", lambda: None)

    def start(**given):
        plain = {
            "steps": "all",
            "params_file": "params.yaml",
            "overrides": None,
            "force": False,
            "promote": None,
        }
        return flow_module.prepare(plain | {"register_trial": False, "runner": None} | given)

    start.servers = []
    monkeypatch.setattr(flow_module.server, "is_needed", lambda: True)
    monkeypatch.setattr(flow_module.server, "start", lambda: start.servers.append(1))
    return start


def test_nothing_to_do_needs_no_flow_run_and_no_server(run, prepare, stages):
    run.stale = []
    run.data_changed = False
    done = prepare()
    assert "nothing that the model" in done["skipped"] and done["version"] == 3
    assert stages.calls == ["register"] and not prepare.servers
    stages.needs_gate = lambda *_: True  # of a run that was killed before the gate
    assert prepare()["promoted"]["version"] == "3"
    assert prepare(force=True) is None
    assert len(prepare.servers) == 1


def test_where_a_server_shows_the_run_or_data_is_fetched_the_flow_does_it_all(
    run, prepare, stages, flow_module, place
):
    flow_module.server.is_needed = lambda: False
    assert prepare() is None
    flow_module.server.is_needed = lambda: True
    assert prepare(overrides={"optim.epochs": 2}) is None
    assert prepare(steps="index") is None
    text = (place / "params.yaml").read_text() + "source: {kind: folder, path: export}\n"
    (place / "params.yaml").write_text(text)
    assert prepare() is None and stages.calls == []


def test_two_at_once(run, flow_module, place):
    with (
        flow_module.one_at_a_time(),
        pytest.raises(TrainingError, match="another training is under way"),
    ):
        run()
    run()  # free again


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TrainingError("loss is nan"), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
    ],
)
def test_the_mlflow_run_ends_as_training_did(run, stages, flow_module, monkeypatch, error, status):
    ended = []

    class Ends:
        status = url = None

        def __init__(self, run_dir):
            self.finish = lambda how: ended.append((Path(run_dir).name, how))

    monkeypatch.setattr(runs.Tracker, "resume", Ends)
    stages.fail["train_round"] = error
    with pytest.raises(type(error)):
        run(steps="train")
    assert ended == [("abc", status)]
    stages.fail.clear()
    run(steps="train")
    assert ended[1:] == [("abc", "FINISHED")]


def test_command_line(place, stages, flow_module, stand_in, monkeypatch, capsys):
    calls = stand_in(flow_module, "train", {"version": 1})
    monkeypatch.setattr(flow_module, "prepare_store", lambda: None)
    monkeypatch.setattr(flow_module.server, "is_needed", lambda: False)
    Path(".dvc").mkdir()
    # there is no git repository
    Path(".dvc/config.local").write_text("[core]\n    no_scm = true\n")
    words = ["--json", "--set", "pool.beta=2", "--steps", "train", "--force", "--start", "cold"]
    assert command.main("train", words) == 0
    told = {
        "force": True,
        "start": "cold",
        "promote": None,
        "steps": "train",
        "register_trial": False,
        "runner": None,
    }
    assert calls == [{**told, "overrides": {"pool.beta": 2}, "params_file": "params.yaml"}]
    assert json.loads(capsys.readouterr().out) == {"version": 1}
    assert command.main("train", ["--set", "pool.bta=2"]) == 2
    assert "pool.beta" in capsys.readouterr().err
    assert len(calls) == 1
    assert command.main("train", ["--json", "--set", "pool.beta=2", "--register"]) == 0
    assert calls[1]["register_trial"]
    stand_in(flow_module, "train", DataError("no such file", where="data/raw", fix="put it there"))
    assert command.main("train", []) == 3
    assert capsys.readouterr().err == "data/raw: no such file\n  fix: put it there\n"
    with pytest.raises(SystemExit):
        command.main("train", ["--help"])
    assert "examples:" in capsys.readouterr().out


# -- DVC's command line
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def dvc_project(place, monkeypatch):
    """A project of three stages that copy one file, with DVC for real."""
    from flows import reproduce

    python = shlex.quote(sys.executable)

    def copy(source, target):
        return f"{python} -c \"import shutil; shutil.copy('{source}', '{target}')\""

    links = {
        "train": ("params.yaml", "model"),
        "index": ("model", "bundle"),
        "evaluate": ("bundle", "metrics"),
    }
    stages = {
        name: {"cmd": copy(*link), "deps": [link[0]], "outs": [link[1]]}
        for name, link in links.items()
    }
    stages["index"]["params"] = ["index.factory"]
    stages["inputs"] = {"cmd": "true"}
    stages["validate"] = {"cmd": f"{python} -c \"import sys; print('bad row 7'); sys.exit(3)\""}
    printed = """
a.csv: columns that are not used: date
ingest: num_labels = 7
validate: warnings.1 = texts: empty
error: b.csv: no text
  fix: add it
"""
    Path("printed.txt").write_text(printed)
    stages["told"] = {"cmd": "cat printed.txt; exit 3"}
    Path("dvc.yaml").write_text(json.dumps({"stages": stages}))
    assert reproduce.run(["init", "--no-scm", "-q"])[0] == 0
    return reproduce


def test_dvc_says_what_is_stale_and_records_what_was_made(dvc_project, place):
    assert dvc_project.stale()[1] == ["train", "index", "evaluate"]
    for name in ("model", "bundle", "metrics"):
        (place / name).write_text((place / "params.yaml").read_text())
    digest = dvc_project.inputs_state()
    dvc_project.commit(["train", "index", "evaluate"])
    assert dvc_project.stale()[1] == []
    assert dvc_project.inputs_state() == digest
    (place / "bundle").write_text("other")
    assert dvc_project.stale()[1] == ["index", "evaluate"]
    dvc_project.commit(["index", "evaluate"])
    # a file that is read, and a parameter of another stage
    (place / "params.yaml").write_text("index: {factory: HNSW32}\n")
    assert dvc_project.stale()[1][0] == "train"
    assert dvc_project.inputs_state() != digest
    dvc_project.commit(["train"])
    assert dvc_project.stale()[1] == ["index", "evaluate"]  # the parameter alone


def test_one_call_of_dvc_reports_data_and_model(dvc_project, place, monkeypatch):
    run = dvc_project.run
    calls = []
    monkeypatch.setattr(dvc_project, "run", lambda words, *_: (calls.append(words), (0, "{}"))[1])
    assert dvc_project.stale(("validate",)) == (True, []), "no data set yet"
    assert not calls, "no data set yet"
    (place / "data/dataset").mkdir(parents=True)
    monkeypatch.setattr(dvc_project, "run", run)
    assert dvc_project.stale(("validate",))[0]
    monkeypatch.setattr(dvc_project, "run", lambda words, *_: (calls.append(words), (0, "{}"))[1])
    assert dvc_project.stale(("validate",)) == (False, [])
    assert calls == [["status", "--json", "validate", "train", "index", "evaluate"]]
    monkeypatch.setattr(dvc_project, "run", lambda words, *_: (255, "ERROR: no such stage"))
    assert dvc_project.stale(("validate",)) == (True, [])  # `dvc repro` reports the error


def test_a_stage_that_fails_in_dvc_is_the_error_it_was(dvc_project, caplog, monkeypatch):
    monkeypatch.setattr(dvc_project.pipeline, "import_training", lambda: None)
    caplog.set_level("INFO", "unidec.flows")
    with pytest.raises(DataError, match="bad row 7"):
        dvc_project.make_data(["validate"])
    assert any("bad row 7" in line for line in caplog.messages)
    with pytest.raises(ConfigError, match="no-such-stage"):
        dvc_project.make_data(["no-such-stage"])


def test_what_a_stage_prints_is_told_and_its_error_is_alone(dvc_project, monkeypatch):
    monkeypatch.setattr(dvc_project.pipeline, "import_training", lambda: None)
    told = []
    monkeypatch.setattr(dvc_project.lifecycle, "say", told.append)
    with pytest.raises(DataError) as caught:
        dvc_project.make_data(["told"])
    assert str(caught.value) == "b.csv: no text\n  fix: add it"
    assert told == [
        "a.csv: columns that are not used: date",
        "ingest: num_labels = 7",
        "validate: warnings.1 = texts: empty",
    ]


# -- through Prefect
# --------------------------------------------------------------------------------------------------


def test_a_run_shows_tasks_and_results(prefect_server, stages, flow_module, place):
    from prefect.client.orchestration import get_client

    state = flow_module.train(steps=",".join(flow_module.STEPS), return_state=True)
    assert state.is_completed()
    wanted = {"validate", "cluster 1 of 3", "mine 3 of 3", "train round 3 of 3", "register"}
    names = set()
    with get_client(sync_client=True) as client:
        for _ in range(100):  # the server learns of task runs a little later
            names = {run.name for run in client.read_task_runs()}
            if wanted <= names:
                break
            time.sleep(0.2)
        shown = {(artifact.description, str(artifact.data)) for artifact in client.read_artifacts()}
        of_tasks = {
            artifact.key for artifact in client.read_artifacts() if artifact.task_run_id is not None
        }
    assert wanted <= names
    assert {"cluster 3 of 3", "mine 1 of 3", "validate 2 of 3", "register"} <= {
        description for description, _ in shown
    }
    assert {"cluster", "mine", "train", "evaluate"} <= of_tasks  # rounds of one task share a key
    for figure, value in (("cluster_cosine", "0.71"), ("mine_positives_found", "0.93")):
        assert any(figure in data and value in data for _, data in shown)


def test_states_say_what_came_of_a_run(prefect_server, stages, flow_module, place, monkeypatch):
    from prefect.client.orchestration import get_client

    monkeypatch.setattr(flow_module.reproduce, "make_data", lambda *_: {})
    monkeypatch.setattr(flow_module.reproduce, "commit", lambda *_: None)
    monkeypatch.setattr(
        flow_module.reproduce, "stale", lambda *_: (True, ["train", "index", "evaluate"])
    )
    stages.passed = False
    state = flow_module.train(return_state=True)
    assert (state.type.value, state.name, state.message) == (
        "COMPLETED",
        "Refused",
        "nDCG@5: 2.1 behind",
    )
    monkeypatch.setattr(flow_module.reproduce, "stale", lambda *_: (True, []))
    state = flow_module.train(return_state=True)
    assert (state.type.value, state.name) == (
        "COMPLETED",
        "Skipped",
    ) and "nothing that the model" in state.message
    assert "skipped" in flow_module.train()  # who calls it gets what was done
    with get_client(sync_client=True) as client:
        results = [
            artifact.data for artifact in client.read_artifacts() if artifact.key == "result"
        ]
    assert any("- REFUSED: nDCG@5, 2.1 behind" in result for result in results)


def test_what_is_retried(prefect_server, stages, flow_module, place, monkeypatch, caplog):
    params = load_params("params.yaml")
    monkeypatch.setattr("flows.lifecycle.RETRY_SECONDS", [0, 0, 0])
    attempts = []

    def register(_params):
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionError("the registry is away")
        return Registration("unidec", 1, "challenger", None)

    stages.register = register
    assert flow_module.train(steps="register")["version"] == 1
    assert len(attempts) == 3
    attempts.clear()
    stages.fail["index"] = DataError("three labels without text", where="data/dataset")

    def never(_params):
        attempts.append(1)
        raise DataError("three labels without text", where="data/dataset")

    stages.register = never
    with caplog.at_level(logging.ERROR), pytest.raises(DataError, match="three labels"):
        flow_module.train(steps="register")
    assert len(attempts) == 1 and params.pool.refresh == A_ROUND
    assert "Traceback" not in caplog.text
