"""Fault 12: SIGKILL of the worker, alone and with all it runs: Crashed, resumed, nothing removed by
hand.
"""

from __future__ import annotations

import re
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.operations, pytest.mark.timeout(1200)]
TRAIN = "unidec/train"


def rounds(world, run: str) -> list[int]:
    """The rounds of training that a run began."""
    found = [re.fullmatch(r"train round (\d+) of \d+", name) for name in world.server.tasks(run)]
    return sorted(int(match.group(1)) for match in found if match)


def test_a_killed_worker_leaves_a_crashed_run_and_the_next_run_resumes(world):
    world.ready()
    versions = len(world.project.registry().search_model_versions("name='unidec'"))
    # a training long enough to be met in the middle
    world.change(warm={"epochs": 12}, optim={"epochs": 12})
    try:
        first = world.server.run(TRAIN)
        world.until_task(first, "train round 2 of 12")
        world.server.kill_workers(flows=False)  # the flow's own process is told by nobody
        ended = world.server.ended(first, 60)
        assert ended["state_type"] == "CRASHED", ended["state"]
        world.nothing_runs()

        world.server.start_worker()
        second = world.server.run(TRAIN)
        world.until_task(second, "train round 5 of 12")
        assert rounds(world, second)[0] in (2, 3, 4), "it goes on from the newest checkpoint"
        world.server.stop()  # the machine goes down
        world.nothing_runs()

        world.server.start()
        assert world.server.flow_run(second)["state_type"] == "RUNNING", "nobody was left to say so"
        said = world.project.run(
            sys.executable, "-m", "flows.reconcile", environment=world.server.environment
        ).stdout
        assert "Crashed" in said and world.server.flow_run(second)["state_type"] == "CRASHED"
        world.server.start_worker()
        third = world.server.run(TRAIN)
        world.server.completed(third, 600)
        assert rounds(world, third)[0] in (5, 6), "it goes on from the newest checkpoint"
        world.nothing_runs()
    finally:
        world.change()
    assert not world.project.stale().keys() & {
        "ingest",
        "validate",
        "tokens",
        "propensity",
        "label_graph",
    }
    runs = world.project.registry().search_runs(["1"])
    assert not [run.info.run_id for run in runs if run.info.status == "RUNNING"]
    made = [
        run
        for run in runs
        if run.data.params.get("warm.epochs", run.data.params.get("optim.epochs")) == "12"
    ]
    assert len(made) == 1 and made[0].info.status == "FINISHED", "three lives, one run"
    assert len(world.project.registry().search_model_versions("name='unidec'")) == versions + 1
