"""Operations from end to end, on a real Prefect server and worker with DVC, git and MLflow: `make
test-operations`.

A team's year in a quarter of an hour: a first model by schedule, a day without news, new data, bad
data, a way back, new labels, queries that drift. The tests tell one story, in this order."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime, timedelta

import pytest
from helpers.team_project import shuffled_labels

pytestmark = [pytest.mark.operations, pytest.mark.timeout(900)]
TRAIN = "unidec/train"
REFRESH = "unidec-refresh/refresh"
MONITOR = "unidec-monitor/monitor"


def reasons(world, version: str) -> str:
    return world.project.version(version).tags.get("gate.reasons", "")


def soon(world):
    """Runs of the training that begin within half an hour; `prefect deploy` leaves the nightly ones
    scheduled.
    """
    end = datetime.now(UTC) + timedelta(minutes=30)
    return [
        run
        for run in world.server.runs(TRAIN)
        if datetime.fromisoformat(run["expected_start_time"]) < end
    ]


def test_a_scheduled_run_makes_the_first_champion(world):
    world.up()
    assert not soon(world), "the nightly schedule alone"
    world.schedule_once()
    run = world.server.wait(lambda: soon(world), "scheduled run", 60)[0]
    assert run["auto_scheduled"]
    world.server.completed(run["id"], 600)

    assert world.project.aliases() == {"challenger": "1", "champion": "1"}
    tags = world.project.version("1").tags
    assert (
        tags["start.kind"] == "cold"
        and tags["gate.passed"] == "true"
        and tags["git.dirty"] == "false"
    )
    assert tags["prefect.flow_run_id"] == run["id"]
    assert world.project.start() == {"kind": "cold"}
    assert not world.project.stale(), "dvc.lock is what was made"
    # published: a commit with a tag, nothing left over, all objects in the remote
    assert world.project.git("status", "--porcelain") == ""
    assert world.project.git("tag", "--points-at", "HEAD")
    assert "in sync" in world.project.dvc("status", "--cloud")
    (event,) = world.server.events("unidec.promoted")
    assert event["payload"]["version"] in (1, "1")


def test_unchanged_data_is_skipped_with_the_reason(world):
    world.ready()
    before = world.project.aliases()
    commit = world.project.git("rev-parse", "HEAD")
    run = world.server.run(TRAIN)
    state = world.server.completed(run, 600)["state"]
    assert state["name"] == "Skipped" and "nothing" in state["message"], state
    assert not [task for task in world.server.tasks(run) if task.startswith("train round")]
    assert world.project.aliases() == before and world.project.git("rev-parse", "HEAD") == commit
    assert world.project.git("status", "--porcelain") == ""
    # kept in batches
    event = world.server.wait(lambda: world.server.events("unidec.skipped"), "event", 30)[0]
    assert event["payload"]["reason"] in state["message"]


def test_changed_data_trains_from_the_champion_and_the_better_model_is_promoted(world):
    world.ready()
    parent = world.project.aliases()["champion"]
    world.first_answers = world.answers("champion")
    world.project.export(world.second)
    run = world.server.run(TRAIN)
    world.server.completed(run, 600)

    aliases = world.project.aliases()
    tags = world.project.version(aliases["challenger"]).tags
    assert (
        aliases["champion"] == aliases["challenger"] != parent and aliases["previous"] == parent
    ), tags
    assert tags["start.kind"] == "warm" and tags["start.version"] == parent
    assert tags["start.bundle.sha256"] == world.project.version(parent).tags["bundle.sha256"]
    assert world.project.start()["version"] == parent
    assert world.server.tasks(run).get("train round 4 of 4") == "COMPLETED", (
        "warm.epochs, not optim.epochs"
    )
    assert tags["gate.champion"] == parent and "nDCG@5" in reasons(world, aliases["champion"])
    assert world.project.git("status", "--porcelain") == "" and not world.project.stale()
    assert world.answers("champion") != world.first_answers


def test_a_worse_challenger_is_refused_with_the_reasons(world):
    world.ready()
    before = world.project.aliases()
    world.project.export(shuffled_labels(world.second))
    run = world.server.run(TRAIN)
    state = world.server.completed(run, 600)["state"]
    assert state["name"] == "Refused" and "nDCG@5" in state["message"], state

    aliases = world.project.aliases()
    assert (
        aliases["champion"] == before["champion"] and aliases["challenger"] not in before.values()
    )
    tags = world.project.version(aliases["challenger"]).tags
    assert tags["gate.passed"] == "false" and "nDCG@5" in tags["gate.failed"]
    assert "FAIL nDCG@5" in tags["gate.reasons"]
    shown = json.dumps(world.server.artifacts(run))
    assert "nDCG@5" in shown and "REFUSED" in shown
    event = world.server.wait(lambda: world.server.events("unidec.refused"), "event", 30)[0]
    assert "nDCG@5" in json.dumps(event["payload"])
    # nobody gets it through by hand without saying so
    done = world.project.unidec("models", "promote", aliases["challenger"], check=False)
    assert done.returncode == 6 and world.project.aliases() == aliases


def test_rollback_within_seconds_gives_the_former_answers_byte_for_byte(world):
    before = world.project.aliases()
    begun = time.monotonic()
    world.project.unidec("models", "rollback", "--reason", "the test says so")
    seconds = time.monotonic() - begun
    assert seconds < 10 or os.getloadavg()[0] > 2 * (os.cpu_count() or 1), (
        "of a machine that is not overloaded"
    )
    after = world.project.aliases()
    assert (after["champion"], after["previous"]) == (before["previous"], before["champion"])
    assert world.answers("champion") == world.first_answers
    # what was left is not promoted again unless forced
    done = world.project.unidec("models", "promote", before["champion"], check=False)
    assert done.returncode == 6 and "rolled back" in done.stdout + done.stderr
    world.project.unidec(
        "models", "promote", before["champion"], "--force", "--reason", "it was the test"
    )
    assert world.project.aliases()["champion"] == before["champion"]


def test_a_refresh_adds_labels_without_training(world):
    world.ready()
    before = world.project.aliases()
    world.project.export(world.third)
    run = world.server.run(REFRESH)
    world.server.completed(run, 600)
    aliases = world.project.aliases()
    tags = world.project.version(aliases["champion"]).tags
    assert aliases["champion"] not in before.values(), tags
    assert tags["start.kind"] == "refresh" and tags["start.version"] == before["champion"]
    assert not [task for task in world.server.tasks(run) if task.startswith("train round")]
    answers = world.answers("champion", 200).decode()
    assert any(f",{uid}," in answers for uid in world.fresh), "a new label is found by its text"
    assert world.server.completed(world.server.run(REFRESH), 300)["state"]["name"] == "Skipped"


def test_queries_that_drift_set_off_a_training_and_others_do_not(world):
    world.ready()
    texts = world.third.queries["train"]["title"].to_pylist()
    usual = world.folder / "usual.jsonl"
    odd = world.folder / "odd.jsonl"
    usual.write_text("".join(json.dumps({"query": text}) + "\n" for text in texts[::2]))
    odd.write_text(
        "".join(
            json.dumps({"query": f"{text[::-1]} zq{row} {row * row}"}) + "\n"
            for row, text in enumerate(texts[::2])
        )
    )
    known = {run["id"] for run in world.server.runs(TRAIN)}
    quiet = world.server.run(MONITOR, queries=str(usual))
    world.server.completed(quiet, 300)
    assert (
        not world.server.events("unidec.drift")
        and {run["id"] for run in world.server.runs(TRAIN)} == known
    )

    run = world.server.run(MONITOR, queries=str(odd))
    world.server.completed(run, 300)
    event = world.server.wait(
        lambda: world.server.events("unidec.drift"), "event unidec.drift", 60
    )[0]
    assert event["resource"]["prefect.resource.id"] == "unidec.model.unidec"

    def set_off() -> list[str]:
        return [one["id"] for one in world.server.runs(TRAIN) if one["id"] not in known]

    (training,) = world.server.wait(set_off, "training that the automation asked for", 120)
    world.server.completed(training, 600)
