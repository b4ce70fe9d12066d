"""prefect.yaml, flows/automations.yaml and the commands on the pages against the flows that they
name; no server.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml
from helpers.shown_commands import Shown, shown_commands

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENTS = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
AUTOMATIONS = yaml.safe_load((ROOT / "flows" / "automations.yaml").read_text(encoding="utf-8"))[
    "automations"
]
SHOWN = [
    shown
    for shown in shown_commands("python")
    if shown.words[1] == "-m" and shown.words[2].startswith("flows.")
]


def flow_of(deployment: dict):
    path, name = deployment["entrypoint"].split(":")
    return getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=[one["name"] for one in DEPLOYMENTS])
def test_a_deployment_names_a_flow_and_parameters_that_exist(deployment):
    flow = flow_of(deployment)
    assert flow.name == deployment["flow_name"]
    required = flow.parameters.required or []
    assert set(deployment["parameters"]) <= set(flow.parameters.properties)
    if deployment.get("schedules"):  # a schedule cannot fill in a parameter
        assert set(required) <= set(deployment["parameters"])
    for name, described in flow.parameters.properties.items():
        assert described.get("description"), f"{flow.name}: {name}"


def test_a_redeploy_leaves_schedules_as_they_are_and_nothing_runs_twice_at_once():
    scheduled = [one for one in DEPLOYMENTS if one.get("schedules")]
    assert {one["name"] for one in scheduled} == {"train", "refresh", "monitor"}
    for one in scheduled:
        assert all(schedule["slug"] and "active" not in schedule for schedule in one["schedules"])
        assert one["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}


def test_drift_starts_a_retraining():
    import flows  # noqa: F401  quiets Prefect before it is imported

    from prefect.events import DeploymentEventTrigger  # isort: skip

    (train,) = [one for one in DEPLOYMENTS if one["name"] == "train"]
    (spec,) = train["triggers"]
    trigger = DeploymentEventTrigger.model_validate(spec)
    assert trigger.enabled and trigger.expect == {"unidec.drift"}
    assert trigger.match.root == {"prefect.resource.id": "unidec.model.*"}
    said = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "flows").glob("*.py")}
    assert (
        'publish.emit(params.tracking.model_name, "drift"' in said["monitor.py"]
        and 'f"unidec.{event}"' in said["publish.py"]
    )


def test_silent_runs_are_found_by_the_automation():
    import flows  # noqa: F401

    from prefect.events.schemas.automations import AutomationCore  # isort: skip

    (spec,) = AUTOMATIONS
    automation = AutomationCore.model_validate(spec)
    named = set(spec["trigger"]["match_related"]["prefect.resource.name"])
    assert named == {one["flow_name"] for one in DEPLOYMENTS}
    # every way in which a run ends ends the watch, also those that have a name of ours
    ours = set(
        re.findall(
            r'\("skipped", "refused"\)',
            (ROOT / "flows" / "lifecycle.py").read_text(encoding="utf-8"),
        )
    )
    assert (
        ours
        and {"prefect.flow-run.Skipped", "prefect.flow-run.Refused"} <= automation.trigger.expect
    )
    for one in DEPLOYMENTS:
        beats = int(one["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
        assert 3 * beats < automation.trigger.within.total_seconds(), (
            "a few lost signs are no death"
        )


@pytest.mark.parametrize(
    "shown", SHOWN, ids=lambda shown: f"{shown.place} {' '.join(shown.words[2:5])}"
)
def test_a_flow_takes_the_words_that_are_shown(shown: Shown) -> None:
    from flows.command import _parser

    name = shown.words[2].removeprefix("flows.")
    _parser(importlib.import_module(f"flows.{name}"), name).parse_args(shown.words[3:])
