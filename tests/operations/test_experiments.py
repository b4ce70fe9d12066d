"""DVC experiments in temporary copies of a checkout, with real trainings: their runs are in the
checkout's store.
"""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path

import pytest
from helpers import team_project
from helpers.raw_files import write_raw


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_queue_of_two_trains_into_the_checkouts_store(tmp_path):
    # DVC's queue starts its worker as `dvc`
    project = team_project.TeamProject(
        tmp_path, {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    )
    write_raw(team_project.small_data(), project.root / "data" / "raw" / "small", "tables")
    project.params(
        data={"path": "data/raw/small"},
        source={"kind": "none", "path": ""},
        retrain={"push": False, "commit": "none"},
        optim={"lr_clf": None},
    )
    project.commit("data")
    project.dvc("exp", "run", "--queue", "--set-param", "optim.lr_clf=0.001,0.002")
    # its output ends with the last task
    project.run(sys.executable, "-m", "dvc", "queue", "start", seconds=850)
    for _ in range(60):
        rows = project.dvc("queue", "status").splitlines()[1:]
        if not any("Running" in row or "Queued" in row for row in rows):
            break
        time.sleep(0.5)
    assert sum("Success" in row for row in rows) == 2, rows

    client = project.registry()
    runs = client.search_runs([client.get_experiment_by_name("unidec").experiment_id])
    found = {run.data.tags["dvc_experiment"]: run for run in runs}
    shown = csv.DictReader(project.dvc("exp", "show", "--csv").splitlines())
    values = {row["Experiment"]: row["optim.lr_clf"] for row in shown if row["Experiment"]}
    assert {name: run.data.params["optim.lr_clf"] for name, run in found.items()} == values
    assert sorted(values.values()) == ["0.001", "0.002"]
    for name, run in found.items():
        assert run.info.status == "FINISHED"
        assert run.info.run_name.endswith(name)
        assert "test/P_at_1" in run.data.metrics
