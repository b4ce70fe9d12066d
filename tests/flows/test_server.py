"""A real Prefect server and worker on this machine: a run asked for by hand, one that comes too
early, one by schedule.

With wrong versions beside Prefect (see the pins in pyproject.toml) schedules silently never fire;
only this shows it. The whole of operations on real servers: tests/operations."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from helpers.prefect_server import PrefectServer

REPOSITORY = Path(__file__).resolve().parents[2]
JOB = {"steps": "ingest"}  # the real flow, its first step only, on three labels
INTERVAL = 10  # seconds between scheduled runs

TABLES = {
    "queries.csv": "id,text,split\n"
    + "".join(f"q{i},text {i},{'train' if i < 18 else 'test'}\n" for i in range(24)),
    "labels.csv": "id,text\na,first label\nb,second label\nc,third label\n",
    "pairs.csv": "query_id,label_id\n" + "".join(f"q{i},{'abc'[i % 3]}\n" for i in range(24)),
}


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of what a deployment needs: the flow, prefect.yaml, a tiny data set."""
    shutil.copytree(
        REPOSITORY / "flows",
        tmp_path / "project" / "flows",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    described = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text(encoding="utf-8"))
    (deployment,) = [one for one in described["deployments"] if one["name"] == "train"]
    schedules = deployment["schedules"]
    assert schedules == [{"slug": "nightly", "cron": "0 3 * * *", "timezone": "UTC"}]
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    deployment["parameters"] = JOB
    (tmp_path / "project" / "prefect.yaml").write_text(yaml.safe_dump(described))
    (tmp_path / "project" / "raw").mkdir()
    for name, text in TABLES.items():
        (tmp_path / "project" / "raw" / name).write_text(text)
    (tmp_path / "project" / "params.yaml").write_text("data: {path: raw, format: tables}\n")
    return tmp_path / "project"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_manual_and_a_scheduled_run_complete_and_one_that_overlaps_is_cancelled(
    project, tmp_path
):
    with PrefectServer(project, tmp_path / "home") as server:
        server.start()
        server.deploy()
        assert all(one["active"] for one in server.deployment("unidec/train")["schedules"])
        server.command("--no-prompt", "deployment", "schedule", "pause", "--all")
        first = server.run("unidec/train")
        second = server.run("unidec/train")
        server.start_worker()
        ended = [server.ended(run, 120) for run in (first, second)]
        state_types = sorted(run["state_type"] for run in ended)
        assert state_types == ["CANCELLED", "COMPLETED"], ended
        for run in ended:
            assert not run["auto_scheduled"]
            assert run["parameters"]["steps"] == JOB["steps"]
        assert (project / "data/dataset/manifest.json").is_file()

        # only now: while a run is at work the deployment cancels any other
        (schedule,) = server.deployment("unidec/train")["schedules"]
        assert not schedule["active"]
        server.command("deployment", "schedule", "resume", "unidec/train", schedule["id"])
        described = (project / "prefect.yaml").read_text()
        (project / "prefect.yaml").write_text(
            described.replace("cron: 0 3 * * *", f"interval: {INTERVAL}")
        )
        server.deploy()
        (again,) = server.deployment("unidec/train")["schedules"]
        assert again["active"] and again["id"] == schedule["id"], (
            "deploying again leaves a resumed schedule active"
        )

        def by_schedule() -> list[dict]:
            runs = [run for run in server.runs("unidec/train") if run["auto_scheduled"]]
            failed = [run["state"] for run in runs if run["state_type"] in ("FAILED", "CRASHED")]
            assert not failed, f"{failed[0]}\n{server.all_logs()}"
            return [run for run in runs if run["state_type"] == "COMPLETED"]

        run = server.wait(by_schedule, "completed run by schedule", 150)[0]
        assert run["parameters"]["steps"] == JOB["steps"]
        assert not server.errors(), server.all_logs()
    assert server.left() == {}
