"""Ctrl-C and SIGTERM in the middle of a round: a quick end, no process left, the MLflow
run KILLED.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# a round that lasts for ever, in place of the library's
PROGRAM = """
import signal, sys, time
from unidec.tracking.run import Tracker

class Run:
    folder = "runs/abc"
    lines = []
    epoch = 0
    epochs = 2
    num_rounds = 2
    round_number = 1
    finished = False
    cluster = mine = lambda self: {}

    def train_round(self):
        open("training", "w").close()
        time.sleep(600)

def start_run(params):
    Tracker().start("runs/abc", {"seed": params.seed})
    return Run()

from unidec import pipeline
pipeline.start_run = start_run
# as in a terminal; background jobs ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)
from flows.command import main
sys.exit(main("train", ["--steps", "train"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "everyone", "code"),
    [
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, True, 143),
        (signal.SIGTERM, False, 143),
    ],
    ids=["ctrl-c", "terminated with its children", "terminated alone"],
)
def test_interrupted_in_a_round(tmp_path, prefect_home, number, everyone, code):
    (tmp_path / "params.yaml").write_text("seed: 0\n")
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "MLFLOW_"))
    }
    environment = own | {
        "PREFECT_HOME": str(prefect_home),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + 400
        while not (tmp_path / "training").exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.2)
        (os.killpg if everyone else os.kill)(process.pid, number)
        assert process.wait(30) == code, (tmp_path / "log").read_text()
        said = (tmp_path / "log").read_text()
        assert "run again to resume from the last checkpoint" in said and "Traceback" not in said
        status = json.loads((tmp_path / "runs/abc/tracking.json").read_text())["status"]
        assert status == "KILLED"
        end = time.monotonic() + 10
        while left := processes_with(f"PREFECT_HOME={tmp_path / 'home'}"):
            assert time.monotonic() < end, left
            time.sleep(0.2)
    finally:
        for pid in processes_with(f"PREFECT_HOME={tmp_path / 'home'}"):
            os.kill(pid, signal.SIGKILL)


def processes_with(setting: str) -> list[int]:
    """Processes that have this in their environment (Linux)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if setting.encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:  # gone, or not ours
            continue
    return found
