"""Fault 2: SIGKILL at every point inside a checkpoint save: the one before it loads, with no manual
step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("saving_child.py")
# what the newest is before and after the save: none before the first, two before the third, the
# same step once more
SCENARIOS = {
    "first": {"None", "5"},
    "third": {"10", "15"},
    "again": {"10"},
}


def run(python: list[str], folder: Path, every: int, *scenarios: str) -> list[dict]:
    command = [*python, str(CHILD), str(folder), str(every), *scenarios]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_killed_at_some_points(memory_folder: Path, warm_python: list[str]) -> None:
    every = random.randrange(19, 26)
    print(f"every {every}. point")
    for found, (name, used) in zip(
        run(warm_python, memory_folder, every, *SCENARIOS), SCENARIOS.items(), strict=True
    ):
        assert found["used"].keys() <= used, name
        assert found["points"] > 150, name


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_point(memory_folder: Path, warm_python: list[str], scenario: str) -> None:
    (found,) = run(warm_python, memory_folder, 1, scenario)
    assert found["points"] > 150
    assert found["used"].keys() == SCENARIOS[scenario]


BIG = """
import os, sys, torch
from pathlib import Path
from unidec.training.checkpoint import Checkpoint, CheckpointWriter, RowPart
writer = CheckpointWriter(Path(sys.argv[1]))
print(os.getpid(), flush=True)
for step in range(1, 10_000):
    print(step, flush=True)
    table = {name: torch.full((20_000, 64), float(step)) for name in ("weight", "first", "second")}
    state = {"epoch": 1, "step": step}
    tables = {"table": RowPart(0, 20_000, table)}
    writer.save(Checkpoint(state, {"one": torch.tensor(step)}, tables))
"""


def test_killed_from_outside_at_random_moments(memory_folder: Path, warm_python: list[str]) -> None:
    """One process after the other saves 15 MB as fast as it can, and is killed at a moment of
    nobody's choosing.
    """
    from unidec.training.checkpoint import load_checkpoint

    newest = 0
    for _ in range(2):
        with subprocess.Popen(
            [*warm_python, "-c", BIG, str(memory_folder)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            pid = int(child.stdout.readline())
            for line in child.stdout:
                if int(line) == 4:  # the third is being written, or the fourth
                    break
            time.sleep(random.random() / 20)
            os.kill(pid, signal.SIGKILL)
        loaded, refused = load_checkpoint(memory_folder)
        assert loaded is not None and refused == []
        newest = int(loaded.state["step"])
        assert newest >= 2
        assert all(
            (x == newest).all()
            for x in (*loaded.rows["table"].tensors.values(), loaded.dense["one"])
        )
