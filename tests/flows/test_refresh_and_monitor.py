"""The flows around training: refreshed labels and windows of live queries; stages are replaced."""

from __future__ import annotations

import json
import os
import types
from dataclasses import replace
from pathlib import Path

import pytest

from flows.command import main
from unidec.errors import DataError
from unidec.evaluation.significance import Check
from unidec.pipeline import plain
from unidec.pipeline.drift_check import WindowDrift
from unidec.pipeline.gating import Verdict
from unidec.pipeline.label_stages import ChangedLabels
from unidec.pipeline.registration import Registration
from unidec.tracking.promotion import Promotion


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text("seed: 0\n")
    return tmp_path


@pytest.fixture
def stand_ins(place, monkeypatch):
    """`calls`: what the stages were asked; `stages`: they, to be changed; `events`."""
    from flows import decide, monitor, publish, refresh, reproduce

    calls: list[str] = []

    def stage(name, answer):
        return lambda _params, *words, **_options: (
            calls.append(" ".join([name, *map(str, words)])) or answer
        )

    reason = Check("nDCG@5", True, 0.1, -0.5, "nDCG@5 is 0.1 ahead")
    verdict = Verdict(True, False, "unidec", [reason], "8", "7", {}, "p", None)
    labels = ChangedLabels(
        changed=True,
        bundle="outputs/refreshed",
        added=2,
        removed=1,
        kept=40,
        reason="2 labels are new",
    )
    finding = {"name": "length", "drifted": True, "words": "queries are shorter"}
    quiet = {"name": "tokens", "drifted": False, "words": "tokens are as they were"}
    model = {"source": "models:/unidec@champion", "bundle_sha256": "0"}
    window = WindowDrift(
        True,
        [finding, quiet],
        True,
        "",
        "runs/index.html",
        "drift.json",
        queries=500,
        metrics=None,
        model=model,
        run_url=None,
    )
    stages = types.SimpleNamespace(
        plain=plain,
        refresh_labels=stage("refresh_labels", labels),
        register=stage("register", Registration("unidec", 8, "challenger", None)),
        gate=stage("gate", verdict),
        promote=stage("promote", Promotion(model="unidec", version="8", previous="7")),
        monitor=stage("monitor", window),
    )
    for module in (decide, monitor, refresh):
        monkeypatch.setattr(module, "pipeline", stages)
    monkeypatch.setattr(reproduce, "stale", lambda *stages: (bool(stages), []))
    monkeypatch.setattr(
        reproduce, "make_data", lambda names: calls.append("dvc " + " ".join(names)) or {}
    )
    events: list[tuple] = []
    monkeypatch.setattr(publish, "emit", lambda _name, event, given: events.append((event, given)))
    return types.SimpleNamespace(
        calls=calls,
        stages=stages,
        stage=stage,
        events=events,
        refresh=refresh,
        monitor=monitor,
        window=window,
    )


def test_refreshed_labels_are_judged_and_promoted(stand_ins):
    done = stand_ins.refresh.refresh.fn()
    assert stand_ins.calls == [
        "dvc ingest validate propensity",
        "refresh_labels",
        "register outputs/refreshed",
        "gate 8",
        "promote 8",
    ]
    assert done["added"] == 2
    assert done["promoted"]["previous"] == "7"
    assert [event for event, _ in stand_ins.events] == ["promoted"]


def test_labels_that_are_the_same_are_skipped(stand_ins):
    stand_ins.stages.refresh_labels = stand_ins.stage(
        "refresh_labels", ChangedLabels(changed=False, bundle=None, reason="it has these labels")
    )
    assert stand_ins.refresh.refresh.fn()["skipped"] == "it has these labels"
    assert stand_ins.calls == ["dvc ingest validate propensity", "refresh_labels"]
    assert stand_ins.events == [("skipped", {"reason": "it has these labels"})]


def test_drift_is_published(stand_ins, place):
    (place / "live.jsonl").write_text('{"query": "a"}\n')
    assert stand_ins.monitor.monitor.fn("live.jsonl")["drifted"]
    ((event, given),) = stand_ins.events
    assert (
        event == "drift"
        and given["findings"] == ["queries are shorter"]
        and given["queries"] == 500
    )
    stand_ins.events.clear()
    stand_ins.stages.monitor = stand_ins.stage("monitor", replace(stand_ins.window, drifted=False))
    stand_ins.monitor.monitor.fn("live.jsonl")
    assert stand_ins.events == []


def test_of_several_windows_the_newest_is_looked_at(stand_ins, place):
    for age, name in enumerate(("new", "old", "older")):
        (place / f"{name}.jsonl").write_text("{}")
        os.utime(place / f"{name}.jsonl", (1_000_000 - age, 1_000_000 - age))
    stand_ins.monitor.monitor.fn(str(place / "*.jsonl"))
    assert stand_ins.calls == [f"monitor {place / 'new.jsonl'}"]
    with pytest.raises(DataError, match="no such file"):
        stand_ins.monitor.monitor.fn("nowhere/*.jsonl")


def test_command_lines(stand_ins, place, stand_in, capsys):
    skipped = {"skipped": "version 7 has these labels"}
    refreshed = stand_in(stand_ins.refresh, "refresh", skipped)
    monitored = stand_in(stand_ins.monitor, "monitor", plain(stand_ins.window))
    assert (
        main("refresh", ["--no-promote"]) == 0
        and main("monitor", ["a.csv", "--column", "text"]) == 0
    )
    assert capsys.readouterr().out.splitlines() == [
        "labels: no change, version 7 has these labels",
        "500 queries: drifted",
        "  queries are shorter",
        "report: runs/index.html",
    ]
    assert main("refresh", ["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == skipped
    assert main("monitor", ["a.csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == plain(stand_ins.window)
    assert refreshed[0] == {"promote": False}
    assert monitored[0] == {"queries": "a.csv", "column": "text", "bundle": None}
