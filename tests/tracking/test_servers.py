"""mlflow/compose.yaml and whatever else starts a server: bound to this machine, quiet, without a
secret.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers.compose import FILE, compose

ROOT = Path(__file__).resolve().parents[2]
QUIET = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DVC_NO_ANALYTICS": "1",
    "ORT_DISABLE_TELEMETRY": "1",
}


@pytest.fixture(scope="module")
def file():
    return compose()


@pytest.fixture(scope="module")
def services(file):
    return file["services"]


def test_the_services_of_a_team(services):
    assert list(services) == [
        "postgres",
        "s3",
        "buckets",
        "mlflow",
        "prefect",
        "deploy",
        "worker",
        "serve",
        "proxy",
    ]


def test_the_model_is_served_with_a_key_and_only_when_asked_for(services):
    serve = services["serve"]
    expected = {
        "serve": ["serve"],
        "proxy": ["proxy"],
    }
    assert {
        name: services[name]["profiles"] for name in services if "profiles" in services[name]
    } == expected
    assert (
        "secrets/serve" in serve["command"][-1]
        and "models:/unidec@champion --host 0.0.0.0 --port 8080" in serve["command"][-1]
    )
    text = (ROOT / "mlflow" / "Dockerfile").read_text()
    assert "/srv/unidec/runs && chown" in text and serve["volumes"] == [
        "bundles:/srv/unidec/runs"
    ], "its user writes there"
    assert serve["build"]["target"] == "serve", "nothing runs as root"
    assert text.rstrip().count("USER unidec") == 3, "nothing runs as root"
    assert serve["healthcheck"]["test"][-1] in text


@pytest.mark.parametrize(
    ("settings", "is_deployed", "paused"),
    [
        ({}, False, True),
        ({"SCHEDULES": "active"}, False, False),
        ({}, True, False),
    ],
)
def test_schedules_are_paused_at_the_first_deployment_alone(
    tmp_path, settings, is_deployed, paused
):
    """Each `up` deploys again: a schedule that somebody resumed stays active."""
    listed = "nightly" if is_deployed else "none"
    (tmp_path / "prefect").write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n[ "$3" = ls ] && echo {listed}; exit 0\n'
    )
    (tmp_path / "prefect").chmod(0o755)
    command = compose(settings)["services"]["deploy"]["command"]
    subprocess.run(
        command,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        check=True,
        timeout=60,
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "--no-prompt deploy --all" in calls
    assert ("--no-prompt deployment schedule pause --all" in calls) == paused


def test_every_port_is_bound_to_this_machine(services):
    ports = [port for service in services.values() for port in service.get("ports", [])]
    inner = (8333, 5000, 4200, 8080, 443, 80)
    expected = [f"127.0.0.1:{port}:{port}" for port in inner]
    assert ports == expected


def test_settings_have_defaults_and_the_example_names_them_all(services):
    text = FILE.read_text()
    used = set(re.findall(r"\$\{(\w+):-", text))
    assert set(re.findall(r"\$\{(\w+)", text)) == used
    example = dict(
        re.findall(r"^(\w+)=(.*)$", (ROOT / "mlflow" / "env.example").read_text(), re.MULTILINE)
    )
    assert set(example) == used - {"HF_HUB_OFFLINE"}
    moved = compose({"MLFLOW_PORT": "5050", "MLFLOW_MORE_HOSTS": ",mlflow.example.com"})["services"]
    assert moved["mlflow"]["ports"] == ["127.0.0.1:5050:5000"]
    assert moved["worker"]["environment"]["UNIDEC_MLFLOW_UI"] == "http://127.0.0.1:5050"
    assert moved["mlflow"]["environment"]["MLFLOW_SERVER_ALLOWED_HOSTS"].endswith(
        ",127.0.0.1:*,mlflow.example.com"
    )


@pytest.mark.parametrize("name", ["buckets", "mlflow", "prefect", "deploy", "worker", "serve"])
def test_telemetry_is_off_in_every_container(services, name):
    environment = services[name]["environment"]
    assert {key: environment.get(key) for key in QUIET} == QUIET


def test_no_secret_stands_anywhere(file, services):
    for name, service in services.items():
        for key, value in service.get("environment", {}).items():
            assert not re.search("PASSWORD|SECRET", key) or key.endswith("_FILE"), (name, key)
            assert not re.search(r"://[^/@]*:[^/@]*@", value), f"{name}: {key} holds a password"
    files = {entry["file"] for entry in file["secrets"].values()}
    assert files == {f"secrets/{name}" for name in file["secrets"]}
    assert {name for service in services.values() for name in service.get("secrets", [])} == set(
        file["secrets"]
    )
    done = subprocess.run(
        ["git", "check-ignore", "mlflow/secrets/postgres", "mlflow/.env"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode != 128:  # not a git checkout
        assert done.stdout.split() == ["mlflow/secrets/postgres", "mlflow/.env"]
    assert (ROOT / ".dockerignore").read_text().split("\n")[1] == "*"


def test_services_wait_for_what_they_need_and_are_looked_after(file, services):
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services)
        for need, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in services[need], (
                name,
                need,
            )
        assert name in ("deploy", "buckets") or (
            "healthcheck" in service and service["restart"] == "unless-stopped"
        )
    mounts = [
        entry.split(":")[0] for service in services.values() for entry in service.get("volumes", [])
    ]
    assert {mount for mount in mounts if not mount.startswith(".")} == set(file["volumes"])
    assert all((ROOT / "mlflow" / mount).exists() for mount in mounts if mount.startswith("."))


def test_one_image_of_servers_with_the_pinned_versions(services):
    text = (ROOT / "mlflow" / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS ([\w-]+)$", text, re.MULTILINE))
    built = {service["build"]["target"] for service in services.values() if "build" in service}
    assert built == {"servers", "worker", "serve"} <= targets
    assert text.count("pip install") - 1 == text.count("-c constraints.txt") == 3, (
        "all but uv itself"
    )
    assert services["prefect"]["image"] == services["mlflow"]["image"]
    assert '-c "import torch, unidec.serving.app' in text, "the build notices what torch lacks"


def test_whatever_starts_a_server_is_quiet_and_stays_on_this_machine():
    make = (ROOT / "Makefile").read_text()
    ui = (ROOT / "bin" / "ui").read_text()
    for key, value in QUIET.items():
        assert re.search(rf"^export {key} := {value}$", make, re.MULTILINE), key
    assert "--host 127.0.0.1" in ui and "0.0.0.0" not in make + ui
    server = dict(
        re.findall(r"^(\w+)=(.*)$", (ROOT / "mlflow" / "server.env").read_text(), re.MULTILINE)
    )
    assert server["MLFLOW_HOST"] == "127.0.0.1" and server["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert "analytics_enabled = false" in (ROOT / "prefect.toml").read_text()
    import os

    import flows  # noqa: F401  sets them for whoever starts a flow without make

    assert (
        os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
        and os.environ["DO_NOT_TRACK"] == "true"
    )
    if (ROOT / ".dvc" / "config").is_file():
        assert "analytics = false" in (ROOT / ".dvc" / "config").read_text()


def test_commands_of_the_pages_name_what_is_there():
    pages = [ROOT / "docs" / "servers.md", ROOT / "mlflow" / "README.md"]
    for page in pages:
        text = page.read_text()
        for name in re.findall(r"(?:mlflow|docs|flows|bin)/[\w./-]+\.\w+", text):
            if not name.endswith((".db", ".env")) or (ROOT / name).suffix == ".md":
                assert (ROOT / name).exists() or "secrets" in name, f"{page.name}: {name}"
    assert yaml.safe_load((ROOT / "mlflow" / "compose.yaml").read_text())["name"] == "unidec"
