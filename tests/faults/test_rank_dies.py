"""Fault 9: one of two torchrun ranks is killed. The job ends, nothing is left, and any number of
ranks resumes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from unidec.config import Params

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc"),
]


class Work:
    """A folder with data and parameters in which `unidec train` runs; each process in it carries
    the folder's name.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        own = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("MLFLOW_", "PREFECT_", "RANK", "WORLD_"))
        }
        self.env = own | {
            "UNIDEC_TEST": str(folder),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONUNBUFFERED": "1",
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.log = folder / "log"

    def begin(self, *command: str) -> subprocess.Popen:
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self.folder,
                env=self.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def train(self, devices: int, restarts: int = 0, *other: str) -> subprocess.Popen:
        settings = f"run.devices={devices}", f"run.restarts={restarts}", *other
        return self.begin(
            "unidec.cli", "train", *(word for value in settings for word in ("--set", value))
        )

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self, rank: int | None = None) -> list[int]:
        """Those that this test started and that are still there, or the one that is this rank."""
        wanted = {f"UNIDEC_TEST={self.folder}".encode()} | (
            {f"RANK={rank}".encode()} if rank is not None else set()
        )
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted <= set(entry.read_bytes().split(b"\0")):
                    found.append(int(entry.parent.name))
        return found

    def checkpoint(self) -> str:
        """The newest checkpoint's name; all ranks are done with it."""
        return max(
            (path.read_text() for path in self.folder.glob("runs/*/checkpoints/latest")), default=""
        )

    def wait_for_checkpoint(self, process: subprocess.Popen, after: str = "") -> str:
        end = time.monotonic() + 300
        while not self.checkpoint() > after:
            assert process.poll() is None, self.log_text()
            assert time.monotonic() < end, self.log_text()
            time.sleep(0.05)
        return self.checkpoint()

    def kill_rank(self, rank: int) -> float:
        [pid] = self.processes(rank)
        os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    def model(self) -> dict[str, np.ndarray]:
        return load_file(self.folder / "outputs" / "model" / "model.safetensors")

    def nothing_left(self, seconds: float = 10) -> None:
        end = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < end, left
            time.sleep(0.1)


@pytest.fixture(scope="module")
def prepared(tiny_dataset, tiny_tokens, tiny_bert, tiny_params, tmp_path_factory) -> Path:
    """Data and parameters, and the model of one process that nobody stops."""
    folder = tmp_path_factory.mktemp("prepared")
    shutil.copytree(tiny_dataset.path, folder / "data" / "dataset")
    for name, cache in tiny_tokens.items():
        shutil.copytree(cache.path, folder / "data" / "tokens" / name)
    shutil.copytree(tiny_bert, folder / "bert")
    params: Params = tiny_params(
        **{
            "encoder.name": "bert",
            "model.dropout": 0.0,
            "optim.epochs": 25,
            "pool.refresh": 25,
            "optim.lr_clf": 1e-3,
            "optim.lr_bag": 1e-3,
            "optim.lr_heads": 1e-3,
            "run.checkpoint_steps": 5,
            "run.check_memory": False,
        }
    )
    (folder / "params.yaml").write_text(json.dumps(params.model_dump()))
    work = Work(folder)
    assert work.begin("unidec.cli", "data", "propensity").wait(120) == 0, work.log_text()
    assert work.train(1).wait(400) == 0, work.log_text()
    return folder


@pytest.fixture
def work(prepared, tmp_path):
    """A copy without the finished run; whatever a test leaves behind is killed."""
    for name in ("data", "bert", "params.yaml", "mlflow.db"):
        source = prepared / name
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, tmp_path / name)
    work = Work(tmp_path)
    yield work
    for pid in work.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def assert_same_model(work: Work, prepared: Path) -> None:
    ours = work.model()
    theirs = Work(prepared).model()
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        # 100 steps of rounding
        np.testing.assert_allclose(ours[name], values, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("then", [1, 3])
def test_one_of_two_ranks_is_killed(work, prepared, then):
    process = work.train(2)
    before = work.wait_for_checkpoint(process)
    begin = work.kill_rank(1)
    assert process.wait(60) == 5, work.log_text()
    seconds = time.monotonic() - begin
    print(f"ended after {seconds:.1f} s")
    assert seconds < 60
    assert "a process of the training died" in work.log_text() and "SIGKILL" in work.log_text(), (
        work.log_text()
    )
    work.nothing_left()

    again = work.train(then)
    assert again.wait(600) == 0, work.log_text()
    steps = [
        int(number)
        for number in re.findall(r"resumes after epoch .*\(step (\d+)\)", work.log_text())
    ]
    assert len(steps) == 1, work.log_text()
    assert steps[0] >= int(before.removeprefix("step-")), work.log_text()
    assert_same_model(work, prepared)


def test_killed_while_a_transformer_trains(work):
    """Its gradients are on their way during the backward pass: torch's error there is that of a
    lost rank.
    """
    process = work.train(
        2, 0, "encoder.kind=both", "encoder.trainable_layers=-1", "optim.encode_chunk=5"
    )
    work.wait_for_checkpoint(process)
    work.kill_rank(1)
    assert process.wait(60) == 5, work.log_text()
    assert "another process of this training has died" in work.log_text(), work.log_text()
    assert "RuntimeError" not in work.log_text(), work.log_text()
    work.nothing_left()


def test_torchrun_by_hand_starts_them_again(work, prepared):
    """`torchrun -m unidec.cli train` with elastic restarts: it resumes by itself and ends."""
    process = work.begin(
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--monitor-interval",
        "0.5",
        "-m",
        "unidec.cli",
        "train",
    )
    work.wait_for_checkpoint(process)
    work.kill_rank(1)
    assert process.wait(600) == 0, work.log_text()
    assert_same_model(work, prepared)
    work.nothing_left()


def test_restarts_are_a_parameter(work, prepared):
    process = work.train(2, restarts=1)
    work.wait_for_checkpoint(process)
    work.kill_rank(1)
    assert process.wait(600) == 0, work.log_text()
    assert_same_model(work, prepared)
    work.nothing_left()


def test_terminated_it_saves_and_leaves_nothing(work):
    process = work.train(2)
    before = work.wait_for_checkpoint(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143, work.log_text()
    work.nothing_left()
    assert work.checkpoint() >= before
    status = json.loads(next(work.folder.glob("runs/*/tracking.json")).read_text())["status"]
    assert status == "KILLED"


def test_killed_with_its_launcher(work):
    """SIGKILL to whoever started the ranks: they notice, save and leave."""
    process = work.train(2)
    work.wait_for_checkpoint(process)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    work.nothing_left(40)


def test_a_rank_that_hangs_ends_the_job(work):
    process = work.train(2)
    work.wait_for_checkpoint(process)
    [pid] = work.processes(1)
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    assert process.wait(75) == 5, work.log_text()
    print(f"ended after {time.monotonic() - begin:.1f} s")
    assert time.monotonic() - begin < 60
    work.nothing_left()
