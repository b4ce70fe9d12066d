"""Fault 12: SIGKILL of the worker, alone and with all it runs: Crashed, resumed, nothing removed by
hand.
"""

from __future__ import annotations

import re
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.operations, pytest.mark.timeout(1200)]
TRAIN = "unidec/train"


def rounds(operated, run: str) -> list[int]:
    """The rounds of training that a run began."""
    found = [re.fullmatch(r"train round (\d+) of \d+", name) for name in operated.server.tasks(run)]
    return sorted(int(match.group(1)) for match in found if match)


def test_a_killed_worker_leaves_a_crashed_run_and_the_next_run_resumes(operated):
    operated.ready()
    versions = len(operated.project.registry().search_model_versions("name='unidec'"))
    # a training long enough to be met in the middle
    operated.change(warm={"epochs": 12}, optim={"epochs": 12})
    try:
        first = operated.server.run(TRAIN)
        operated.until_task(first, "train round 2 of 12")
        operated.server.kill_workers(flows=False)  # the flow's own process gets no signal
        ended = operated.server.ended(first, 60)
        assert ended["state_type"] == "CRASHED", ended["state"]
        operated.nothing_runs()

        operated.server.start_worker()
        second = operated.server.run(TRAIN)
        operated.until_task(second, "train round 5 of 12")
        assert rounds(operated, second)[0] in (2, 3, 4), "it resumes from the newest checkpoint"
        operated.server.stop()  # the machine goes down
        operated.nothing_runs()

        operated.server.start()
        assert operated.server.flow_run(second)["state_type"] == "RUNNING", (
            "nobody was left to say so"
        )
        said = operated.project.run(
            sys.executable, "-m", "flows.reconcile", environment=operated.server.environment
        ).stdout
        assert "Crashed" in said
        assert operated.server.flow_run(second)["state_type"] == "CRASHED"
        operated.server.start_worker()
        third = operated.server.run(TRAIN)
        operated.server.completed(third, 600)
        assert rounds(operated, third)[0] in (5, 6), "it resumes from the newest checkpoint"
        operated.nothing_runs()
    finally:
        operated.change()
    assert not operated.project.stale().keys() & {
        "ingest",
        "validate",
        "tokens",
        "propensity",
        "label_graph",
    }
    runs = operated.project.registry().search_runs(["1"])
    assert not [run.info.run_id for run in runs if run.info.status == "RUNNING"]
    made = [
        run
        for run in runs
        if run.data.params.get("warm.epochs", run.data.params.get("optim.epochs")) == "12"
    ]
    assert len(made) == 1, "three lives, one run"
    assert made[0].info.status == "FINISHED", "three lives, one run"
    assert len(operated.project.registry().search_model_versions("name='unidec'")) == versions + 1
