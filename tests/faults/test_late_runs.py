"""Fault 14: the server was down for ten schedules: at most one run catches up."""

from __future__ import annotations

import time

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.operations, pytest.mark.timeout(900)]
TRAIN = "unidec/train"
TIMES = 10
EVERY = 2


def test_ten_late_runs_collapse_to_one(operated):
    operated.ready()
    known = {run["id"] for run in operated.server.runs(TRAIN)}
    operated.server.kill_workers()
    operated.schedule_once(seconds=20, count=TIMES, every=EVERY)

    def made() -> list[dict]:
        return [run for run in operated.server.runs(TRAIN) if run["id"] not in known]

    operated.server.wait(lambda: len(made()) == TIMES, f"{TIMES} scheduled runs", 60)
    operated.server.kill_server()
    time.sleep(20 + TIMES * EVERY)
    operated.up()

    def over() -> list[dict] | None:
        runs = made()
        return (
            runs
            if all(
                run["state_type"] in ("COMPLETED", "CANCELLED", "FAILED", "CRASHED") for run in runs
            )
            else None
        )

    runs = operated.server.wait(over, "end of the late runs", 400)
    states = sorted(run["state_type"] for run in runs)
    expected = ["CANCELLED"] * (TIMES - 1) + ["COMPLETED"]
    assert states == expected, [run["state"] for run in runs]
    for run in runs:
        if run["state_type"] == "CANCELLED":
            assert run["state"]["message"], "it says why"
            assert not operated.server.tasks(run["id"])
