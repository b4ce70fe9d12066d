"""The work pools' templates in mlflow/pools/, created on a real Prefect server, and the job that
comes of each.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import compose
from prefect.testing.cli import CycloptsCliRunner, CycloptsResult

ROOT = Path(__file__).resolve().parents[2]
POOLS = {path.stem: path for path in sorted((ROOT / "mlflow" / "pools").glob("*.json"))}
CREATE = {
    "docker": ["work-pool", "create", "containers"],
    "kubernetes": ["work-pool", "create", "cluster"],
}
CHOSEN = {
    "docker": {"checkout": "/home-of/unidec"},
    "kubernetes": {"claim": "checkout-gpu", "gpus": 2},
}


def create(kind: str, template: Path) -> CycloptsResult:
    """`prefect work-pool create`, in this process: another one takes five seconds to start."""
    words = [*CREATE[kind], "--type", kind, "--base-job-template", str(template), "--overwrite"]
    return CycloptsCliRunner().invoke(words)


def job(template: dict[str, Any], values: dict[str, Any]) -> Any:
    """The job that a worker makes of a template and a deployment's `job_variables`; blocks are not
    looked up.
    """
    from prefect.workers.base import BaseJobConfiguration

    class Configuration(BaseJobConfiguration):
        model_config = BaseJobConfiguration.model_config | {"extra": "allow"}

    text = json.dumps(template).replace("{{ prefect.blocks.secret.s3 }}", "of the block")
    return asyncio.run(Configuration.from_template_and_values(json.loads(text), values))


def test_there_is_a_template_for_each() -> None:
    assert set(POOLS) == set(CHOSEN)


@pytest.mark.parametrize("kind", CHOSEN)
@pytest.mark.usefixtures("prefect_server")
def test_the_server_takes_the_template_and_refuses_one_with_an_unknown_variable(
    kind: str, tmp_path: Path
) -> None:
    done = create(kind, POOLS[kind])
    assert done.exit_code == 0, done.output
    template = json.loads(POOLS[kind].read_text())
    template["job_configuration"]["labels"] = "{{ of_nobody }}"
    (tmp_path / "wrong.json").write_text(json.dumps(template))
    refused = create(kind, tmp_path / "wrong.json")
    assert refused.exit_code and "of_nobody" in refused.output


@pytest.mark.parametrize("kind", CHOSEN)
@pytest.mark.usefixtures("prefect_server")
def test_a_deployment_of_prefect_yaml_becomes_a_job(kind: str) -> None:
    import jsonschema

    template = json.loads(POOLS[kind].read_text())
    work = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]["work"][
        "job_variables"
    ]
    values = {**work, **CHOSEN[kind]}
    jsonschema.validate(values, template["variables"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(work, template["variables"])  # where the checkout is has no default
    made = job(template, values)
    assert made.env["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
    assert made.env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"  # of prefect.yaml
    assert made.env["AWS_SECRET_ACCESS_KEY"] == "of the block"
    if kind == "docker":
        assert made.volumes == ["/home-of/unidec:/srv/unidec"] and made.networks == [
            "unidec_default"
        ]
        return
    pod = made.job_manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    # Prefect's worker adds the rest of `made.env`
    assert container["env"].items() <= made.env.items()
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "checkout-gpu"}
    assert (
        container["securityContext"]["runAsNonRoot"]
        and made.job_manifest["spec"]["backoffLimit"] == 0
    )


@pytest.mark.parametrize("kind", CHOSEN)
def test_settings_of_a_pool_are_those_of_the_compose_files_worker(kind: str) -> None:
    services = compose.compose()["services"]
    environment = services["worker"]["environment"]
    job = json.loads(POOLS[kind].read_text())
    own = job["variables"]["properties"]["env"]["default"]
    assert {
        name: value for name, value in own.items() if not value.startswith("{{")
    }.items() <= environment.items()
    default = job["variables"]["properties"]["image"]["default"]
    assert default == services["worker"]["image"]
