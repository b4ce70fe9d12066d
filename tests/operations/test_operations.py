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


def reasons(operated, version: str) -> str:
    return operated.project.version(version).tags.get("gate.reasons", "")


def soon(operated):
    """Runs of the training that begin within half an hour; `prefect deploy` leaves the nightly ones
    scheduled.
    """
    end = datetime.now(UTC) + timedelta(minutes=30)
    return [
        run
        for run in operated.server.runs(TRAIN)
        if datetime.fromisoformat(run["expected_start_time"]) < end
    ]


def test_a_scheduled_run_makes_the_first_champion(operated):
    operated.up()
    assert not soon(operated), "the nightly schedule alone"
    operated.schedule_once()
    run = operated.server.wait(lambda: soon(operated), "scheduled run", 60)[0]
    assert run["auto_scheduled"]
    operated.server.completed(run["id"], 600)

    assert operated.project.aliases() == {"challenger": "1", "champion": "1"}
    tags = operated.project.version("1").tags
    assert (
        tags["start.kind"] == "cold"
        and tags["gate.passed"] == "true"
        and tags["git.dirty"] == "false"
    )
    assert tags["prefect.flow_run_id"] == run["id"]
    assert operated.project.start() == {"kind": "cold"}
    assert not operated.project.stale(), "dvc.lock is what was made"
    # published: a commit with a tag, nothing left over, all objects in the remote
    assert operated.project.git("status", "--porcelain") == ""
    assert operated.project.git("tag", "--points-at", "HEAD")
    assert "in sync" in operated.project.dvc("status", "--cloud")
    (event,) = operated.server.events("unidec.promoted")
    assert event["payload"]["version"] in (1, "1")


def test_unchanged_data_is_skipped_with_the_reason(operated):
    operated.ready()
    before = operated.project.aliases()
    commit = operated.project.git("rev-parse", "HEAD")
    run = operated.server.run(TRAIN)
    state = operated.server.completed(run, 600)["state"]
    assert state["name"] == "Skipped", state
    assert "nothing" in state["message"], state
    assert not [task for task in operated.server.tasks(run) if task.startswith("train round")]
    assert operated.project.aliases() == before
    assert operated.project.git("rev-parse", "HEAD") == commit
    assert operated.project.git("status", "--porcelain") == ""
    # kept in batches
    event = operated.server.wait(lambda: operated.server.events("unidec.skipped"), "event", 30)[0]
    assert event["payload"]["reason"] in state["message"]


def test_changed_data_trains_from_the_champion_and_the_better_model_is_promoted(operated):
    operated.ready()
    parent = operated.project.aliases()["champion"]
    operated.first_answers = operated.answers("champion")
    operated.project.export(operated.second)
    run = operated.server.run(TRAIN)
    operated.server.completed(run, 600)

    aliases = operated.project.aliases()
    tags = operated.project.version(aliases["challenger"]).tags
    assert aliases["champion"] == aliases["challenger"] != parent, tags
    assert aliases["previous"] == parent, tags
    assert tags["start.kind"] == "warm" and tags["start.version"] == parent
    expected = operated.project.version(parent).tags["bundle.sha256"]
    assert tags["start.bundle.sha256"] == expected
    assert operated.project.start()["version"] == parent
    assert operated.server.tasks(run).get("train round 4 of 4") == "COMPLETED", (
        "warm.epochs, not optim.epochs"
    )
    assert tags["gate.champion"] == parent
    assert "nDCG@5" in reasons(operated, aliases["champion"])
    assert operated.project.git("status", "--porcelain") == ""
    assert not operated.project.stale()
    assert operated.answers("champion") != operated.first_answers


def test_a_worse_challenger_is_refused_with_the_reasons(operated):
    operated.ready()
    before = operated.project.aliases()
    operated.project.export(shuffled_labels(operated.second))
    run = operated.server.run(TRAIN)
    state = operated.server.completed(run, 600)["state"]
    assert state["name"] == "Refused", state
    assert "nDCG@5" in state["message"], state

    aliases = operated.project.aliases()
    assert aliases["champion"] == before["champion"]
    assert aliases["challenger"] not in before.values()
    tags = operated.project.version(aliases["challenger"]).tags
    assert tags["gate.passed"] == "false" and "nDCG@5" in tags["gate.failed"]
    assert "FAIL nDCG@5" in tags["gate.reasons"]
    shown = json.dumps(operated.server.artifacts(run))
    assert "nDCG@5" in shown and "REFUSED" in shown
    event = operated.server.wait(lambda: operated.server.events("unidec.refused"), "event", 30)[0]
    assert "nDCG@5" in json.dumps(event["payload"])
    # nobody gets it through by hand without saying so
    done = operated.project.unidec("models", "promote", aliases["challenger"], check=False)
    assert done.returncode == 6 and operated.project.aliases() == aliases


def test_rollback_within_seconds_gives_the_former_answers_byte_for_byte(operated):
    before = operated.project.aliases()
    begun = time.monotonic()
    operated.project.unidec("models", "rollback", "--reason", "the test says so")
    seconds = time.monotonic() - begun
    assert seconds < 10 or os.getloadavg()[0] > 2 * (os.cpu_count() or 1), (
        "of a machine that is not overloaded"
    )
    after = operated.project.aliases()
    assert after["champion"] == before["previous"]
    assert after["previous"] == before["champion"]
    assert operated.answers("champion") == operated.first_answers
    # what was left is not promoted again unless forced
    done = operated.project.unidec("models", "promote", before["champion"], check=False)
    assert done.returncode == 6
    assert "rolled back" in done.stdout + done.stderr
    operated.project.unidec(
        "models", "promote", before["champion"], "--force", "--reason", "it was the test"
    )
    assert operated.project.aliases()["champion"] == before["champion"]


def test_a_refresh_adds_labels_without_training(operated):
    operated.ready()
    before = operated.project.aliases()
    operated.project.export(operated.third)
    run = operated.server.run(REFRESH)
    operated.server.completed(run, 600)
    aliases = operated.project.aliases()
    tags = operated.project.version(aliases["champion"]).tags
    assert aliases["champion"] not in before.values(), tags
    assert tags["start.kind"] == "refresh"
    assert tags["start.version"] == before["champion"]
    assert not [task for task in operated.server.tasks(run) if task.startswith("train round")]
    answers = operated.answers("champion", 200).decode()
    assert any(f",{uid}," in answers for uid in operated.fresh), "a new label is found by its text"
    name = operated.server.completed(operated.server.run(REFRESH), 300)["state"]["name"]
    assert name == "Skipped"


def test_queries_that_drift_set_off_a_training_and_others_do_not(operated):
    operated.ready()
    # not those of the training, which vote for themselves and score higher
    texts = operated.third.queries["test"]["title"].to_pylist()
    usual = operated.folder / "usual.jsonl"
    odd = operated.folder / "odd.jsonl"
    usual.write_text("".join(json.dumps({"query": text}) + "\n" for text in texts))
    odd.write_text(
        "".join(
            json.dumps({"query": f"{text[::-1]} zq{row} {row * row}"}) + "\n"
            for row, text in enumerate(texts)
        )
    )
    known = {run["id"] for run in operated.server.runs(TRAIN)}
    quiet = operated.server.run(MONITOR, queries=str(usual))
    operated.server.completed(quiet, 300)
    assert not operated.server.events("unidec.drift")
    assert {run["id"] for run in operated.server.runs(TRAIN)} == known

    run = operated.server.run(MONITOR, queries=str(odd))
    operated.server.completed(run, 300)
    event = operated.server.wait(
        lambda: operated.server.events("unidec.drift"), "event unidec.drift", 60
    )[0]
    assert event["resource"]["prefect.resource.id"] == "unidec.model.unidec"

    def set_off() -> list[str]:
        return [one["id"] for one in operated.server.runs(TRAIN) if one["id"] not in known]

    (training,) = operated.server.wait(set_off, "training that the automation asked for", 120)
    operated.server.completed(training, 600)
