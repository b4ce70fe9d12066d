"""Fault 5: SIGTERM, Ctrl-C and a cancelled flow run; real processes, real training, real signals.

Each leaves a checkpoint within 30 s, no process after 10 s and an MLflow run that ended as KILLED,
and says how to go on; the same command then ends with the bits of a training that nobody stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from helpers.prefect_server import PrefectServer
from helpers.processes import processes_with
from helpers.raw_files import write_raw
from helpers.tiny_data import make_raw
from helpers.tiny_training import tiny_params
from helpers.tiny_transformer import write_transformer

from unidec import pipeline
from unidec.config import load_params, to_yaml
from unidec.data.storage import read_manifest
from unidec.tracking.store import prepare_store

ROOT = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "unidec.cli", "train"]
FLOW = [sys.executable, "-m", "flows.train", "--steps", "train"]
EPOCHS = 24
A_ROUND = 12
STEPS_AN_EPOCH = 16
TIMES = ("seconds", "_per_s", "memory")

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of 384 steps of some milliseconds, its data stages done, its tracking
    store made.
    """
    folder = tmp_path_factory.mktemp("stopped") / "project"
    (folder / "raw").mkdir(parents=True)
    raw = make_raw(160, 16, 60)
    write_raw(raw, folder / "raw", "xmc-json")
    texts = [
        text for table in (*raw.queries.values(), raw.labels) for text in table["title"].to_pylist()
    ]
    write_transformer(folder / "bert", texts)
    params = tiny_params(
        Path("bert"),
        **{
            "data.path": "raw",
            "data.validation_share": 0.1,
            "optim.epochs": EPOCHS,
            "pool.refresh": A_ROUND,
            "run.checkpoint_steps": 50,
            "tracking.experiment": "stopped",
            "tracking.model_name": "stopped",
        },
    )
    (folder / "params.yaml").write_text(to_yaml(params))
    with chdir(folder):
        for name in ("ingest", "tokens", "propensity"):
            getattr(pipeline, name)(load_params())
        prepare_store(f"sqlite:///{folder}/mlflow/mlflow.db")
    return folder


class Project:
    """A copy of the project; every process started here carries its folder in the environment."""

    def __init__(self, prepared: Path, folder: Path) -> None:
        shutil.copytree(prepared, folder)
        self.folder = folder
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PREFECT_", "MLFLOW_"))
        }
        self.environment = own | {
            "PREFECT_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
            "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
        }

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_as_in_a_terminal,
            )

    def train(self, command: list[str]) -> str:
        """To the end; what was said."""
        before = len(self.log)
        process = self.start(command)
        assert process.wait(900) == 0, self.log
        return self.log[before:]

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def run(self) -> Path | None:
        return next((self.folder / "runs").glob("????????????????"), None)

    def checkpoints(self) -> list[Path]:
        return sorted(self.run.glob("checkpoints/step-*")) if self.run else []

    def until_a_checkpoint(self, process: subprocess.Popen[bytes] | None = None) -> None:
        self.until(self.checkpoints, "checkpoint", process)

    def until(
        self, true: Callable[[], Any], what: str, process: Any = None, seconds: float = 500
    ) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"no {what}: {self.log}"
            assert process is None or process.poll() is None, self.log
            time.sleep(0.02)

    def processes(self) -> list[int]:
        return processes_with("PREFECT_HOME", self.folder / "home")

    def tracked(self) -> tuple[str, dict[str, Any]]:
        """Status of the only MLflow run, and the steps of its loss."""
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{self.folder}/mlflow/mlflow.db")
        experiment = client.get_experiment_by_name("stopped")
        (run,) = client.search_runs([experiment.experiment_id])
        return run.info.status, [
            point.step for point in client.get_metric_history(run.info.run_id, "training/loss")
        ]

    def outcome(self) -> dict[str, Any]:
        """All that a training leaves, but for times: hashes of the model, records of steps and
        rounds.
        """
        model = self.folder / "outputs" / "model"
        files = read_manifest(model, "model", 1)["files"]
        records = {
            name: [
                _without_times(json.loads(line))
                for line in (model / f"{name}.jsonl").read_text().splitlines()
            ]
            for name in ("history", "rounds")
        }
        return {
            name: entry["sha256"] for name, entry in files.items() if not name.endswith(".jsonl")
        } | records


def _as_in_a_terminal() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it


def _without_times(record: dict[str, Any]) -> dict[str, Any]:
    kept = {
        name: value
        for name, value in record.items()
        if not name.endswith(TIMES) and "_per_" not in name
    }
    return {
        name: _without_times(value) if isinstance(value, dict) else value
        for name, value in kept.items()
    }


@pytest.fixture
def project(prepared: Path, tmp_path: Path) -> Iterator[Project]:
    project = Project(prepared, tmp_path / "project")
    yield project
    for pid in project.processes():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def never_stopped(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    project = Project(prepared, tmp_path_factory.mktemp("never") / "project")
    printed = project.train(CLI)
    assert "begins" in printed and project.tracked() == (
        "FINISHED",
        list(range(0, EPOCHS * STEPS_AN_EPOCH, 10)),
    )
    return project.outcome()


def check_stopped(project: Project, sent: float) -> int:
    """The checkpoint is of after the signal and inside a round; gives its step."""
    newest = project.checkpoints()[-1]
    state = json.loads((newest / "state.json").read_text())
    assert newest.stat().st_mtime >= sent - 1
    assert state["step"] % (STEPS_AN_EPOCH * A_ROUND)
    project.until(lambda: not project.processes(), "end of all processes", seconds=10)
    status, steps = project.tracked()
    # nothing lost, nothing doubled
    assert status == "KILLED"
    assert steps == list(range(0, state["step"], 10))
    return state["step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        pytest.param(CLI, signal.SIGTERM, 143, id="cli terminated"),
        pytest.param(CLI, signal.SIGINT, 130, id="cli ctrl-c"),
        pytest.param(FLOW, signal.SIGTERM, 143, id="flow terminated"),
        pytest.param(FLOW, signal.SIGINT, 130, id="flow ctrl-c"),
    ],
)
def test_stopped_and_gone_on_with(
    project: Project,
    never_stopped: dict[str, Any],
    command: list[str],
    number: signal.Signals,
    code: int,
) -> None:
    process = project.start(command)
    project.until_a_checkpoint(process)
    sent = time.time()
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    assert process.wait(30) == code, project.log
    assert "from the last checkpoint" in project.log and "Traceback" not in project.log
    step = check_stopped(project, sent)
    printed = project.train(command)
    assert f"(step {step})" in printed
    assert "refresh" not in printed.split("resumes")[0]
    assert project.outcome() == never_stopped
    expected = ("FINISHED", list(range(0, EPOCHS * STEPS_AN_EPOCH, 10)))
    assert project.tracked() == expected


SLOW_TO_SAVE = """
import sys, time
from unidec.training.checkpoint import CheckpointWriter

save = CheckpointWriter.save
def slowly(self, checkpoint):
    open("saving", "w").close()
    time.sleep(120)
    return save(self, checkpoint)
CheckpointWriter.save = slowly
# one long round: the only save is the one that the first signal asks for
one_save = ("run.checkpoint_steps=0", "optim.epochs=2000", "pool.refresh=2000")
sys.argv = ["unidec", "train", *(word for key in one_save for word in ("--set", key))]
from unidec.cli import main
main()
"""


def test_a_second_ctrl_c_leaves_at_once(project: Project) -> None:
    process = project.start([sys.executable, "-c", SLOW_TO_SAVE])
    project.until(
        lambda: (
            "epochs 1 to" in project.log
            or (project.run and (project.run / "history.jsonl").exists())
        ),
        "training",
        process,
    )
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    project.until((project.folder / "saving").exists, "beginning of a save", process)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(10) == 130, project.log
    project.until(lambda: not project.processes(), "end of all processes", seconds=5)
    assert project.tracked()[0] == "KILLED"
    assert project.checkpoints() == []
    assert "Traceback" not in project.log


def sigterm_waits(process: int) -> bool:
    """Whether a stopped process has a SIGTERM that it could not take yet (Linux)."""
    status = dict(
        line.split(":\t") for line in Path(f"/proc/{process}/status").read_text().splitlines()
    )
    return bool(int(status["ShdPnd"], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
def test_a_cancelled_flow_run(
    project: Project, never_stopped: dict[str, Any], tmp_path: Path
) -> None:
    """Cancelled on a real server: its worker sends SIGTERM to the flow's process."""
    home = tmp_path / "server-home"
    home.mkdir()
    for name in ("flows", "prefect.yaml"):
        (project.folder / name).symlink_to(ROOT / name)
    quiet = {"PYTHONPATH": str(ROOT), "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false"}
    with PrefectServer(project.folder, home, **quiet) as server:
        server.start()
        server.command("work-pool", "create", "local", "--type", "process")
        server.command("--no-prompt", "deploy", "--name", "train")
        server.start_worker()
        server.wait(lambda: server.ask("work_pools/local/workers/filter", {}), "worker", 120)
        before = set(server.left())
        server.command("deployment", "run", "unidec/train", "--param", "steps=train")
        server.wait(project.checkpoints, "checkpoint", 180)
        # others are scheduled
        (run,) = (r for r in server.ask("flow_runs/filter", {}) if r["state_type"] == "RUNNING")
        # training would be over before the worker sends its signal: it waits until then
        processes = set(server.left()) - before
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        server.command("flow-run", "cancel", run["id"])
        server.wait(
            lambda: any(sigterm_waits(process) for process in processes), "SIGTERM", 60, every=0.1
        )
        sent = time.time()
        for process in processes:
            os.kill(process, signal.SIGCONT)
        ended = server.wait(
            lambda: [
                r for r in server.ask("flow_runs/filter", {}) if r["state_type"] == "CANCELLED"
            ],
            "cancelled run",
            60,
        )
        assert ended
        project.until(
            lambda: not set(server.left()) - before, "end of the flow's processes", seconds=10
        )
        step = check_stopped(project, sent)
    assert f"(step {step})" in project.train(CLI)
    assert project.outcome() == never_stopped
