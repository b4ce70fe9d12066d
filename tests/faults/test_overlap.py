"""Fault 13: two retrainings overlap, on the server and beside it: the second is cancelled, dvc.lock
is consistent.
"""

from __future__ import annotations

import sys

import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.operations, pytest.mark.timeout(900)]
TRAIN = "unidec/train"


def test_a_run_that_overlaps_is_refused(operated):
    operated.ready()
    before = len(operated.project.registry().search_model_versions("name='unidec'"))
    first = operated.server.run(TRAIN, force=True)
    operated.until_task(first, "fetch")
    second = operated.server.run(TRAIN, force=True)
    ended = operated.server.ended(second, 60)
    assert ended["state_type"] == "CANCELLED", ended["state"]
    assert "concurrency limit" in ended["state"]["message"], ended["state"]
    # past the server: the project's own lock
    done = operated.project.run(sys.executable, "-m", "flows.train", "--force", check=False)
    assert done.returncode != 0, done.stdout + done.stderr
    assert "under way" in done.stdout + done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert operated.server.flow_run(first)["state_type"] == "RUNNING", "it continues undisturbed"
    operated.server.completed(first, 600)

    lock = yaml.safe_load((operated.project.root / "dvc.lock").read_text())
    stages = set(lock["stages"])
    assert stages == set(yaml.safe_load((operated.project.root / "dvc.yaml").read_text())["stages"])
    assert not operated.project.stale()
    assert len(operated.project.registry().search_model_versions("name='unidec'")) <= before + 1
    operated.nothing_runs()
