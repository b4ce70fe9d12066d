"""Prefect's temporary server is killed while a flow works, as a system that is out of memory does
it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.started_flow import StartedFlow


@pytest.fixture
def start(tmp_path: Path, prefect_home: Path) -> Iterator[Callable[[str], Any]]:
    started: list[Any] = []

    def start(work: str) -> Any:
        started.append(StartedFlow(tmp_path, prefect_home, work))
        started[-1].until_it_trains()
        return started[-1]

    yield start
    for flow in started:
        flow.end()


def test_a_killed_server_ends_the_run_with_the_command_that_resumes(start) -> None:
    flow = start("time.sleep(600)")
    flow.server().kill()
    killed = time.monotonic()
    assert flow.process.wait(30) == 5, flow.log
    assert time.monotonic() - killed < 30
    assert "temporary server ended" in flow.log and "run again to resume" in flow.log
    assert "Traceback" not in flow.log and "Crash detected" not in flow.log
    status = json.loads((flow.folder / "runs/abc/tracking.json").read_text())["status"]
    assert status == "KILLED"
    assert not flow.left()


@pytest.mark.slow
def test_finished_work_is_not_reported_as_failed(start) -> None:
    """The work catches what ends it, as a stage in its last instant does."""
    flow = start("""
try:
    time.sleep(600)
except BaseException:
    pass
""")
    flow.server().kill()
    assert flow.process.wait(30) == 0, flow.log
    assert (
        "done: train" in flow.log
        and "Prefect has no record" in flow.log
        and "Traceback" not in flow.log
    )


@pytest.mark.slow
def test_work_that_cannot_be_interrupted_is_not_waited_for(start) -> None:
    # as compiled code does
    flow = start("for _ in range(9): ctypes.CDLL(None).sleep(600)")
    flow.server().kill()
    assert flow.process.wait(30) == 5, flow.log
    assert "run again to resume" in flow.log and "Traceback" not in flow.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_one_line(start, number: signal.Signals) -> None:
    flow = start("time.sleep(600)")
    os.killpg(flow.process.pid, number)
    sent = time.monotonic()
    assert flow.process.wait(30) == 128 + number, flow.log
    assert time.monotonic() - sent < 3
    said = [line for line in flow.log.splitlines() if "| INFO" not in line]
    assert len(said) == 1, flow.log
    assert "run again to resume" in said[0], flow.log
