"""A team's servers by the commands of mlflow/compose.yaml: train, promote, serve, pull elsewhere;
two workers.

PostgreSQL and SeaweedFS are real; images, Docker and Kubernetes are not used.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import team_project, team_servers
from helpers.postgres_server import binaries

pytestmark = [pytest.mark.operations, pytest.mark.timeout(2400)]
TRAIN = "unidec/train"
REFRESH = "unidec-refresh/refresh"


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    for package in ("psycopg2", "boto3", "dvc_s3"):
        pytest.importorskip(package, reason="pip install -e '.[postgres,s3]'")
    if binaries() is None or team_servers.missing():
        pytest.skip(f"PostgreSQL or {', '.join(team_servers.missing())} is not installed")
    found = team_servers.TeamServers(tmp_path_factory.mktemp("team"))
    try:
        found.project.export(team_project.fewer_queries(team_project.small_data(), 600))
        words = ["remote", "add", "--default", "team", "s3://dvc/unidec"]
        found.project.dvc(*words)
        found.project.commit("DVC's remote")
        found.up()
        yield found
    finally:
        found.stop()


def run(team: Any, folder: Path, *words: str) -> str:
    """A command of a person in a checkout."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=team.client(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


def ask(address: str, key: str | None = None) -> Any:
    head = {
        "Content-Type": "application/json",
        **({"Authorization": f"Bearer {key}"} if key else {}),
    }
    body = json.dumps({"queries": ["perl module for time zones"], "k": 5}).encode()
    with urllib.request.urlopen(urllib.request.Request(address, body, head), timeout=60) as answer:
        return json.load(answer)["predictions"][0]["labels"]


def test_a_team_trains_promotes_serves_and_pulls(team: Any) -> None:
    team.once("deploy")
    names = [pool["name"] for pool in team.server.ask("work_pools/filter", {})]
    assert names == ["local"]
    team.start("worker")
    team.server.completed(team.server.run(TRAIN), 1200)

    registry = team.registry()
    expected = {
        "challenger": "1",
        "champion": "1",
    }
    assert {
        k: str(v) for k, v in registry.get_registered_model("unidec").aliases.items()
    } == expected
    # files are in S3, behind MLflow's server; DVC's objects in the other bucket
    listed = {name: bucket(team, name) for name in ("mlflow", "dvc")}
    assert any(key.endswith("labels.arrow") or "bundle" in key for key in listed["mlflow"]), listed[
        "mlflow"
    ][:20]
    assert any(key.startswith("unidec/files/md5/") for key in listed["dvc"])
    assert team.project.git("status", "--porcelain") == ""
    assert team.project.git("tag", "--points-at", "HEAD")

    # served, with its key
    team.start("serve", f"http://127.0.0.1:{team.port['serve']}/readyz")
    address = f"http://127.0.0.1:{team.port['serve']}/predict"
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(address)
    assert refused.value.code == 401
    refused.value.close()
    served = ask(address, "the key")

    # a second checkout: git has dvc.lock, DVC's remote the files; the same model, byte for byte
    second = team.folder / "second"
    subprocess.run(
        ["git", "clone", "-q", str(team.project.root), str(second)], check=True, env=team.client()
    )
    run(team, second, "dvc", "pull", "-q", "train", "index", "evaluate")
    manifest = Path("outputs/bundle/manifest.json")
    assert (second / manifest).read_bytes() == (team.project.root / manifest).read_bytes()
    words = ["predict", "perl module for time zones", "-k", "5", "--json"]
    answers = [
        run(team, second, "unidec.cli", *words, *more)
        for more in ((), ("--bundle", "models:/unidec@champion"))
    ]
    for answer in answers:
        assert [label["uid"] for label in served] == [
            json.loads(row)["label"] for row in answer.splitlines()
        ]


def bucket(team: Any, name: str) -> list[str]:
    code = (
        "import boto3; print(*[o['Key'] for p in "
        f"boto3.client('s3').get_paginator('list_objects_v2').paginate(Bucket={name!r}) for o in "
        "p.get('Contents', [])], sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=team.client(),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.split()


def test_training_in_another_pool_and_checkout_while_the_first_refreshes(team: Any) -> None:
    second = team.folder / "second"
    run(team, second, "prefect", "work-pool", "create", "gpu", "--type", "process")
    run(team, second, "prefect", "--no-prompt", "deploy", "--name", "train", "--pool", "gpu")
    for words in (["user.name", "tests"], ["user.email", "tests@example.invalid"]):
        subprocess.run(["git", "-C", str(second), "config", *words], check=True)
    team.start("worker", checkout=second, WORKER_POOL="gpu")
    first_head = team.project.git("rev-parse", "HEAD")
    train = team.server.run(TRAIN, force=True)
    refresh = team.server.run(REFRESH)
    ended = [team.server.completed(one, 1200) for one in (train, refresh)]
    assert [one["work_pool_name"] for one in ended] == ["gpu", "local"]
    assert str(team.registry().get_registered_model("unidec").aliases["challenger"]) == "2"

    # the checkout that trains commits; the other follows it, and DVC finds nothing stale there
    assert (
        team.project.git("rev-parse", "HEAD") == first_head
        and team.project.git("status", "--porcelain") == ""
    )
    team.project.git("pull", "-q", "--ff-only", str(second), "main")
    run(team, team.project.root, "dvc", "pull", "-q")
    manifest = Path("outputs/bundle/manifest.json")
    assert (second / manifest).read_bytes() == (team.project.root / manifest).read_bytes()
    assert not team.project.stale()
