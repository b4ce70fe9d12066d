"""Lineage as the registry's tags have it: chains, gaps in them, and data to models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from unidec.cli import app
from unidec.errors import ConfigError
from unidec.pipeline import plain
from unidec.tracking.lineage import Version, as_lines, lineage, models_of_data
from unidec.tracking.store import open_client

RAW = ["a1" * 16 + ".dir", "b2" * 16 + ".dir"]
BUNDLES = [f"{number:x}" * 64 for number in range(1, 7)]


def start(kind: str, version: int) -> dict[str, str]:
    return {
        "start.kind": kind,
        "start.version": str(version),
        "start.bundle.sha256": BUNDLES[version - 1],
    }


# 1 <- 2 <- 3 (labels of 2); 4 from nothing; 5 from a version that is deleted
MADE: list[dict[str, str]] = [
    {
        "start.kind": "cold",
        "dvc.data/raw": RAW[0],
        "dvc.data/dataset": "c3" * 16 + ".dir",
        "git.dirty": "true",
    },
    {
        **start("warm", 1),
        "dvc.data/raw": RAW[1],
        "dataset.sha256": "d4" * 32,
        "gate.passed": "true",
        "gate.champion": "1",
    },
    {**start("refresh", 2), "dataset.sha256": "e5" * 32},
    {
        "start.kind": "cold",
        "dvc.data/raw": RAW[1],
        "dvc.differs": "outputs/bundle, data/dataset",
        "dvc.lock.sha256": RAW[1],
    },
    start("warm", 6),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[MlflowClient, str]:
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    client = open_client(uri)
    client.create_registered_model("tiny")
    run = client.create_run(client.create_experiment("x"), run_name="first").info
    for number, tags in enumerate(MADE):
        all_tags = {"bundle.sha256": BUNDLES[number], "mlflow.source.git.commit": "f" * 40, **tags}
        client.create_model_version(
            "tiny", "file:///nowhere", run.run_id if number == 0 else None, all_tags
        )
    client.set_registered_model_alias("tiny", "champion", "3")
    return client, uri


@pytest.fixture(autouse=True)
def _default_store(store: tuple[MlflowClient, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store[1])


def ask(store: tuple[MlflowClient, str], source: Any) -> list[Version]:
    return lineage(source, model_name="tiny")


def test_back_to_the_model_that_started_from_nothing(store: tuple[MlflowClient, str]) -> None:
    found = ask(store, "models:/tiny@champion")
    third, second, first = found
    assert [item.version for item in found] == ["3", "2", "1"]
    assert first.start == {"kind": "cold"}
    assert (third.aliases, second.aliases) == (["champion"], [])
    assert third.start == {
        "kind": "refresh",
        "version": "2",
        "bundle.sha256": BUNDLES[1],
    }
    assert second.gate == {"passed": "true", "champion": "1"}
    assert second.dataset["sha256"] == "d4" * 32
    assert first.code == {
        "commit": "f" * 40,
        "dirty": True,
        "lock_commit": None,
    }
    assert first.artifacts == {"data/dataset": MADE[0]["dvc.data/dataset"], "data/raw": RAW[0]}
    assert first.run and third.run is None
    lines = as_lines(found)
    assert lines[0].startswith("tiny version 3 (champion)")
    assert [line.strip() for line in lines if "└─" in line] == [
        "└─ same model with other labels:",
        "└─ started from",
    ]
    assert any("uncommitted changes" in line for line in lines)
    assert any("passed against version 1" in line for line in lines)


def test_every_address_of_a_model(store: tuple[MlflowClient, str], tmp_path: Path) -> None:
    one = ask(store, "models:/tiny/2")
    assert one == ask(store, f"bundle:{BUNDLES[1][:6]}") == ask(store, f"bundle:{BUNDLES[1]}")
    assert ask(store, "models:/tiny/4")[0].differs == ["outputs/bundle", "data/dataset"]
    for source, words in (
        ("models:/tiny/9", "no such"),
        ("models:/tiny@nobody", "no such"),
        ("models:/other/1", "no such"),
        ("bundle:123456", "no version of"),
        ("bundle:xyz", "not a hash"),
        ("tiny", "not an address"),
        ("", "not an"),
    ):
        with pytest.raises(ConfigError, match=words):
            ask(store, source)


def test_a_parent_that_is_gone_is_said_to_be(store: tuple[MlflowClient, str]) -> None:
    fifth = ask(store, "models:/tiny/5")
    assert [item.version for item in fifth] == ["5"]
    assert fifth[0].start["bundle.sha256"] == BUNDLES[5]
    assert (
        as_lines(fifth)[-1].strip() == "version 6 (bundle 666666666666): deleted from the registry"
    )


def test_versions_that_name_each_other_end(store: tuple[MlflowClient, str]) -> None:
    client, _ = store
    client.create_registered_model("round")
    for own, other in ((0, 1), (1, 0)):
        tags = {
            "bundle.sha256": BUNDLES[own],
            "start.bundle.sha256": BUNDLES[other],
            "start.version": str(other + 1),
        }
        client.create_model_version("round", "file:///nowhere", None, tags)
    found = lineage("models:/round/1", model_name="round")
    assert [item.version for item in found] == ["1", "2"]
    assert found[1].start["version"] == "1"


def test_the_models_that_data_went_into(store: tuple[MlflowClient, str]) -> None:
    def ask_data(prefix: str) -> list[tuple[str, list[str], str | None]]:
        return [
            (one.version, one.what, one.through)
            for one in models_of_data(prefix, model_name="tiny")
        ]

    assert ask_data(RAW[0]) == [
        ("3", [], "2"),
        ("2", [], "1"),
        ("1", ["data/raw"], None),
    ]
    # a hash of the lock file is none of data; what a version started from counts too
    assert ask_data(RAW[1][:8]) == [
        ("4", ["data/raw"], None),
        ("3", [], "2"),
        ("2", ["data/raw"], None),
    ]
    assert ask_data("e5e5e5") == [("3", ["dataset.sha256"], None)]
    assert ask_data("999999") == []
    for wrong in ("a1a1", "A1A1A1A1", "../x", ""):
        with pytest.raises(ConfigError, match="not a hash"):
            ask_data(wrong)


def test_a_hash_that_two_bundles_begin_with(store: tuple[MlflowClient, str]) -> None:
    client, _ = store
    client.create_registered_model("alike")
    for end in "12":
        client.create_model_version(
            "alike", "file:///nowhere", None, {"bundle.sha256": "a" * 63 + end}
        )
    with pytest.raises(ConfigError, match="several versions"):
        lineage("bundle:aaaaaa", model_name="alike")
    assert lineage("bundle:" + "a" * 63 + "2", model_name="alike")[0].version == "2"


def test_the_command(store: tuple[MlflowClient, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store[1])
    params = str(Path(__file__).resolve().parents[2] / "params.yaml")

    def say(*words: str) -> str:
        given = [
            "models",
            "lineage",
            *words,
            "--params",
            params,
            "--set",
            "tracking.model_name=tiny",
        ]
        return CliRunner().invoke(app, given, catch_exceptions=False).stdout

    assert say().startswith("tiny version 3 (champion)")
    second, first = map(plain, ask(store, "models:/tiny/2"))
    assert json.loads(say("models:/tiny/2", "--json")) == second | {
        "parent": first | {"parent": None}
    }
    gone = {"version": "6", "bundle_sha256": BUNDLES[5], "missing": True}
    assert json.loads(say("models:/tiny/5", "--json"))["parent"] == gone
    assert say("--data", RAW[0][:9]).splitlines()[1:] == [
        "3\tchampion\t\t2",
        "2\t\t\t1",
        "1\t\tdata/raw\t",
    ]
    assert say("--data", "999999") == "no version of tiny was made from it\n"
    with pytest.raises(ConfigError, match="either a model or --data"):
        say("models:/tiny/2", "--data", "999999")
