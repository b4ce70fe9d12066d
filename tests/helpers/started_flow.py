"""A flow as `python -m flows.train` runs it, in its own process, with its temporary server; its
stages replaced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from helpers.processes import processes_with

from unidec.tracking.store import prepare_store

PROGRAM = """
import ctypes, signal, sys, time
from pathlib import Path
from unidec import pipeline
from unidec.tracking.run import Tracker

WORK = {work!r}

class Run:
    folder, lines, epoch, epochs, num_rounds, round_number = "runs/abc", [], 0, 2, 2, 1
    finished = False
    cluster = mine = validate = export = lambda self: {{}}

    def train_round(self):
        Path("training").touch()
        exec(WORK)
        self.finished = True
        return {{}}

def start_run(params):
    Tracker().start("runs/abc", {{"seed": params.seed}})
    return Run()

pipeline.start_run = start_run
# as in a terminal; background jobs ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["-m", "--steps", "train"]
from flows.command import main
sys.exit(main("train"))
"""


class StartedFlow:
    """The process and what it prints. `work`: Python code in place of a round of training."""

    def __init__(self, folder: Path, home: Path, work: str) -> None:
        self.folder = folder
        self.home = home
        (folder / "params.yaml").write_text("seed: 0\n")
        prepare_store(f"sqlite:///{folder}/mlflow/mlflow.db")  # a copy: see tests/conftest.py
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PREFECT_", "MLFLOW_"))
        }
        environment = own | {
            "PREFECT_HOME": str(home),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(work=work)],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def until_it_trains(self, seconds: float = 280) -> None:
        end = time.monotonic() + seconds
        while not (self.folder / "training").exists():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < end, self.log
            time.sleep(0.1)

    def server(self) -> psutil.Process:
        """The temporary server of Prefect."""
        children = psutil.Process(self.process.pid).children()
        (found,) = [child for child in children if "flows.server" in child.cmdline()]
        return found

    def left(self) -> list[int]:
        """Its processes (Linux)."""
        return processes_with("PREFECT_HOME", self.home)

    def end(self) -> None:
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
