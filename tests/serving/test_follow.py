"""Following an alias: what is loaded, refused and swapped, with a registry, probes and engines of
the tests' own.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers.served_bundle import make_served_bundle

from unidec.bundle.bundle_folder import KIND, VERSION
from unidec.bundle.probe import NUM_TITLES, Probe, known_texts
from unidec.config import Serve
from unidec.data.storage import write_manifest
from unidec.errors import ArtifactError, ConfigError
from unidec.serving import follow
from unidec.serving.engine import Engine as RealEngine
from unidec.serving.engine import Identity, Service
from unidec.serving.follow import Follower, RegistryAway
from unidec.serving.prometheus import follow_metrics
from unidec.tracking.fetch import COPIES, note_known

ALIAS = "models:/m@champion"


class Engine:
    """An engine whose answers are one label: its version."""

    def __init__(self, folder: Path, identity: Identity | None) -> None:
        about = json.loads((folder / "about.json").read_text())
        self.identity = identity or Identity(about["sha256"])
        self.version_that_answers = about["says"]
        self.score = about.get("score", 1.0)
        self.warmed = 0
        titles = pa.array(["one title", "another"])
        self.bundle = SimpleNamespace(
            path=folder, sha256=about["sha256"], num_labels=2, titles=titles
        )

    def answer(self, requests: list[Any]) -> list[Any]:
        return [
            SimpleNamespace(labels=[self.version_that_answers], scores=[self.score])
            for _ in requests
        ]

    def warm(self, batch: int | None = None) -> None:
        self.warmed += 1


class Shelf:
    """A registry in a folder; `alias` is what it names, an error is raised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.alias: str | Exception = ConfigError("not in the registry: no such alias")
        self.kept: dict[str, Identity] = {}
        self.about: dict[str, dict[str, Any]] = {}
        self.fetched: list[str] = []
        self.looks = 0
        self.fetching = lambda found: None

    def add(self, version: str, **about: Any) -> None:
        found = self.kept[version] = Identity(version * 16, "m", version, "champion", "d" * 64)
        self.about[version] = {"sha256": found.sha256, "says": version} | about

    def find(self) -> Identity:
        self.looks += 1
        if isinstance(self.alias, Exception):
            raise self.alias
        return self.kept[self.alias]

    def fetch(self, found: Identity) -> Path:
        self.fetching(found)
        self.fetched.append(found.version or "")
        folder = self.folder / found.sha256
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "about.json").write_text(json.dumps(self.about[found.version or ""]))
        return folder


class Probes:
    """Probes that answer as the engine will, or raise `error`."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.runs = 0

    def __call__(self, folder: Path, settings: Serve) -> Probe:
        self.runs += 1
        if self.error is not None:
            raise self.error
        about = json.loads((folder / "about.json").read_text())
        return Probe(about["sha256"], *[0.1] * 7)


class FollowingService:
    """A service, its follower, and what the follower sees."""

    def __init__(self, **settings: Any) -> None:
        self.shelf = Shelf(COPIES)
        self.probes = Probes()
        self.settings = Serve(**({"follow_seconds": 0.02, "timeout_seconds": 0.2} | settings))
        self.loaded: list[weakref.ref[Engine]] = []
        self.followers: list[Follower] = []
        self.begin()

    def begin(self, source: str = ALIAS) -> None:
        self.service = Service(self.settings)
        self.follower = Follower(
            self.service,
            source,
            self.settings,
            probe=self.probes,
            load=self.load,
            registry=self.shelf if source.startswith("models:") else None,
        )
        self.followers.append(self.follower)

    def load(self, folder: Path, settings: Serve, identity: Identity | None) -> Engine:
        engine = Engine(folder, identity)
        self.loaded.append(weakref.ref(engine))
        return engine

    def start(self, version: str = "1") -> None:
        self.shelf.alias = version
        self.follower.start()
        self.follower.first.result(60)

    def version_that_answers(self) -> str:
        assert self.service.current is not None
        return self.service.current.answer([None])[0].labels[0]

    def until(self, true: Callable[[], Any], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.follower.state()
            time.sleep(0.005)

    def looks(self, more: int = 3) -> None:
        """So many more looks that were seen to."""
        aim = self.shelf.looks + more
        self.until(lambda: self.shelf.looks >= aim)


@pytest.fixture(autouse=True)
def _working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def following() -> Iterator[FollowingService]:
    following = FollowingService()
    for version in "123":
        following.shelf.add(version)
    yield following
    for follower in following.followers:
        follower.stop()


def test_the_first_one_serves_warm_and_without_a_probe(following):
    following.start()
    engine = following.service.current
    assert (
        following.version_that_answers() == "1"
        and engine.warmed == 1
        and following.probes.runs == 0
    )
    assert engine.identity == Identity("1" * 16, "m", "1", "champion", "d" * 64)
    assert following.follower.first.result() == engine.identity
    assert following.service.previous is None


def test_the_alias_moves_and_moves_back(following):
    following.start()
    first = following.service.current
    following.shelf.alias = "2"
    following.until(lambda: following.version_that_answers() == "2")
    assert following.service.current.warmed == 1
    assert following.probes.runs == 1
    following.until(lambda: following.follower.state()["swaps"] == 1)
    following.shelf.alias = "1"
    following.until(lambda: following.version_that_answers() == "1")
    assert following.service.current is first, "the very one from memory"
    following.until(lambda: following.follower.state()["swaps"] == 2)
    assert following.shelf.fetched == ["1", "2"]
    assert len(following.loaded) == 2
    state = following.follower.state()
    assert state["wanted"] == {"version": "1", "sha256": "1" * 16}
    assert state["refused"] is None
    json.dumps(state)


def test_without_a_previous_one_the_way_back_is_a_load():
    following = FollowingService(keep_previous=False)
    following.shelf.add("1"), following.shelf.add("2")
    following.start()
    for version in "212":
        following.shelf.alias = version
        following.until(lambda version=version: following.version_that_answers() == version)
        assert following.service.previous is None
    following.follower.stop()
    assert len(following.loaded) == 4


def test_a_version_that_fails_its_probe_is_refused_once(following, caplog, monkeypatch):
    following.start()
    following.probes.error = ArtifactError("a fresh process cannot serve it", where="here")
    with caplog.at_level(logging.WARNING, logger="unidec"):
        following.shelf.alias = "2"
        following.until(lambda: following.follower.state()["refused"])
        following.looks(5)
        assert following.probes.runs == 1, "not tried again at each look"
    assert following.follower.state()["refusals"] == 1
    refused = following.follower.state()["refused"]
    assert following.version_that_answers() == "1", "it was never loaded here"
    assert len(following.loaded) == 1, "it was never loaded here"
    assert (
        refused["version"] == "2"
        and refused["sha256"] == "2" * 16
        and "cannot serve" in refused["why"]
    )
    assert (
        sum("version 2 is refused, still serving version 1" in text for text in caplog.messages)
        == 1
    )
    following.probes.error = None
    monkeypatch.setattr(follow, "RETRY_SECONDS", 0)
    following.until(lambda: following.version_that_answers() == "2")
    following.until(lambda: following.follower.state()["refused"] is None)


def test_a_refused_version_is_tried_again_later(following, monkeypatch):
    monkeypatch.setattr(follow, "RETRY_SECONDS", 0.3)
    following.start()
    following.probes.error = ArtifactError("no memory at the moment")
    following.shelf.alias = "2"
    following.until(lambda: following.follower.state()["refused"])
    following.probes.error = None
    following.until(lambda: following.version_that_answers() == "2")
    assert following.probes.runs == 2


def test_the_alias_moves_back_from_a_refused_one(following):
    following.start()
    following.probes.error = ArtifactError("no")
    following.shelf.alias = "2"
    following.until(lambda: following.follower.state()["refused"])
    following.shelf.alias = "1"
    following.until(lambda: following.follower.state()["refused"] is None)
    assert following.version_that_answers() == "1"


@pytest.mark.parametrize(
    "error", [ValueError("of a library"), MemoryError(), RuntimeError("torch")], ids=repr
)
def test_whatever_loading_raises_the_old_one_serves(following, error, monkeypatch):
    following.start()

    def fails(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(following.follower, "_load", fails)
    following.shelf.alias = "2"
    following.until(lambda: following.follower.state()["refused"])
    assert following.version_that_answers() == "1"
    assert type(error).__name__ in following.follower.state()["refused"]["why"]
    monkeypatch.setattr(following.follower, "_load", following.load)
    following.shelf.alias = "3"
    following.until(lambda: following.version_that_answers() == "3")


def test_a_version_without_a_hash_is_refused(following):
    following.start()
    following.shelf.kept["5"] = Identity("", "m", "5")
    following.shelf.alias = "5"
    following.until(lambda: following.follower.state()["refused"])
    assert "without its bundle's hash" in following.follower.state()["refused"][
        "why"
    ] and following.shelf.fetched == ["1"]


def test_a_registry_that_is_away(following, caplog):
    following.start()
    with caplog.at_level(logging.INFO, logger="unidec"):
        following.shelf.alias = RegistryAway(
            "the registry does not answer", got="a refused connection"
        )
        following.looks(4)
        state = following.follower.state()
        assert (
            state["registry"] == "away"
            and "does not answer" in state["problem"]
            and following.version_that_answers() == "1"
        )
        following.shelf.alias = "2"
        following.until(lambda: following.version_that_answers() == "2")
    assert (
        following.follower.state()["registry"] == "up"
        and following.follower.state()["problem"] is None
    )
    assert sum("does not answer" in text for text in caplog.messages) == 1, (
        "said once, not at each look"
    )
    assert sum("answers again" in text for text in caplog.messages) == 1


def test_a_registry_that_goes_away_while_it_is_fetched_from_refuses_nothing(following):
    following.start()

    def lost(found: Identity) -> None:
        following.shelf.fetching = lambda found: None
        raise RegistryAway("gone")

    following.shelf.fetching = lost
    following.shelf.alias = "2"
    following.until(lambda: following.version_that_answers() == "2")
    assert following.follower.state()["refusals"] == 0


def test_an_alias_that_is_taken_away(following):
    following.start()
    following.shelf.alias = ConfigError("not in the registry: no such alias")
    following.until(lambda: following.follower.state()["problem"])
    assert (
        following.version_that_answers() == "1"
        and "still serving version 1" in following.follower.state()["problem"]
    )
    following.shelf.alias = "2"
    following.until(lambda: following.version_that_answers() == "2")
    following.until(lambda: following.follower.state()["problem"] is None)


def test_an_alias_that_moves_on_while_a_version_is_fetched(following):
    following.start()

    def moves(found: Identity) -> None:
        if found.version == "2":
            following.shelf.alias = "3"

    following.shelf.fetching = moves
    seen = set()
    following.shelf.alias = "2"
    following.until(
        lambda: (
            seen.add(following.version_that_answers()) or following.version_that_answers() == "3"
        )
    )
    assert seen == {"1", "3"}, "what was withdrawn meanwhile never serves"
    assert following.shelf.fetched == ["1", "2", "3"]


def test_what_is_dropped_is_freed_in_memory_and_on_disk(following):
    following.start()
    for version in "23":
        following.shelf.alias = version
        following.until(lambda version=version: following.version_that_answers() == version)
    following.until(lambda: following.loaded[0]() is None)
    assert (
        following.loaded[1]() is following.service.previous
        and following.loaded[2]() is following.service.current
    )
    following.until(lambda: not (following.shelf.folder / ("1" * 16)).exists())
    assert (following.shelf.folder / ("2" * 16)).exists()
    assert (following.shelf.folder / ("3" * 16)).exists()


def test_the_copy_of_a_refused_version_does_not_stay(following):
    following.start()
    following.probes.error = ArtifactError("no")
    following.shelf.alias = "2"
    following.until(lambda: following.follower.state()["refused"])
    following.until(lambda: not (following.shelf.folder / ("2" * 16)).exists())
    assert (following.shelf.folder / ("1" * 16)).exists()


def test_a_copy_that_was_there_before_is_left(following):
    (following.shelf.folder / ("1" * 16)).mkdir(parents=True)
    following.start()
    for version in "23":
        following.shelf.alias = version
        following.until(lambda version=version: following.version_that_answers() == version)
    following.until(lambda: following.loaded[0]() is None)
    assert (following.shelf.folder / ("1" * 16)).exists()


def test_a_request_keeps_what_it_began_with(following):
    following.start()
    mine = following.service.current
    for version in "23":
        following.shelf.alias = version
        following.until(lambda version=version: following.version_that_answers() == version)
    assert mine.answer([None])[0].labels == ["1"]
    assert following.loaded[0]() is mine


def test_too_little_memory_costs_the_previous_one_first_and_then_refuses(following, monkeypatch):
    free = [1 << 40]
    monkeypatch.setattr(follow, "available_host", lambda: free[0])
    following.start()
    following.shelf.alias = "2"
    following.until(lambda: following.version_that_answers() == "2")
    following.until(lambda: following.service.previous is not None)
    free[0] = 0
    following.shelf.alias = "3"
    following.until(lambda: following.follower.state()["refused"])
    assert (
        following.version_that_answers() == "2"
        and "too little memory" in following.follower.state()["refused"]["why"]
    )
    assert following.service.previous is None
    free[0] = 1 << 40
    monkeypatch.setattr(follow, "RETRY_SECONDS", 0)
    following.until(lambda: following.version_that_answers() == "3")


def test_at_the_start_an_unknown_alias_is_an_error(following):
    following.follower.start()
    with pytest.raises(ConfigError, match="not in the registry"):
        following.follower.first.result(60)
    assert following.service.current is None


def test_at_the_start_a_registry_that_is_away_is_an_error_the_first_time(following):
    following.shelf.alias = RegistryAway("gone")
    following.follower.start()
    with pytest.raises(RegistryAway):
        following.follower.first.result(60)


def short(following: FollowingService, version: str) -> None:
    """Copies are named by the first 16 characters of the hash; here the hash is no longer."""
    assert (following.shelf.folder / following.shelf.kept[version].sha256[:16]).is_dir()


def test_a_start_while_the_registry_is_away_serves_what_served_last(following):
    following.start()
    following.shelf.alias = "2"
    following.until(lambda: following.version_that_answers() == "2")
    short(following, "2")
    following.until(lambda: following.follower.state()["swaps"] == 1)
    following.follower.stop()
    following.begin()
    following.shelf.alias = RegistryAway("gone")
    following.follower.start()
    assert (
        following.follower.first.result(60).version == "2"
        and following.version_that_answers() == "2"
    )
    assert following.follower.state()["registry"] == "away"
    following.shelf.alias = "3"
    following.until(lambda: following.version_that_answers() == "3")


def test_a_start_takes_the_copy_of_what_served_last(following):
    following.start()
    following.follower.stop()
    following.begin()
    following.start("1")
    assert following.version_that_answers() == "1" and following.probes.runs == 0


def test_a_start_with_another_champion_never_serves_the_last_one(following):
    following.start()
    following.follower.stop()
    following.begin()
    following.start("2")
    assert (
        following.version_that_answers() == "2"
        and following.service.previous is None
        and following.probes.runs == 1
    )


def test_a_start_with_a_champion_that_is_refused_serves_what_served_last(following):
    following.start()
    following.follower.stop()
    following.begin()
    following.probes.error = ArtifactError("a fresh process cannot serve it")
    following.start("2")
    assert (
        following.version_that_answers() == "1"
        and following.follower.state()["refused"]["version"] == "2"
    )


@pytest.mark.parametrize(
    "note", ["", "[]", "{}", '{"version": 1}', '{"sha256": "../..", "version": "1"}']
)
def test_a_note_that_is_damaged_is_no_hindrance(following, note):
    note_known(following.follower._uri, following.follower.source, {})
    [file] = COPIES.glob(".served-*.json")
    file.write_text(note)
    following.start()
    assert following.version_that_answers() == "1"


def test_a_folder_is_loaded_once(tmp_path):
    following = FollowingService()
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "about.json").write_text(json.dumps({"sha256": "a", "says": "a"}))
    following.begin(str(folder))
    following.follower.start()
    assert following.follower.first.result(60).version is None
    (folder / "about.json").write_text(json.dumps({"sha256": "b", "says": "b"}))
    time.sleep(0.1)
    assert (
        following.version_that_answers() == "a"
        and following.follower.state()["registry"] == "not asked"
    )
    following.follower.stop()


@pytest.mark.parametrize(
    ("source", "seconds"),
    [
        ("models:/m/1", 0.02),
        (ALIAS, 0.0),
    ],
    ids=["version", "never"],
)
def test_a_number_and_an_alias_not_to_be_followed_are_looked_up_once(source, seconds):
    following = FollowingService(follow_seconds=seconds)
    following.shelf.add("1")
    following.begin(source)
    following.start()
    time.sleep(0.1)
    assert following.shelf.looks == 1
    following.follower.stop()


def test_stop_is_quick_and_leaves_no_thread(following):
    following.start()
    began = time.monotonic()
    following.follower.stop()
    assert time.monotonic() - began < 1
    assert not following.follower._thread.is_alive()


def test_an_address_that_is_none_is_refused_at_once():
    with pytest.raises(ConfigError, match="not an address"):
        Follower(Service(Serve()), "models:/x", Serve())


def test_a_probe_answers_known_texts(tmp_path):
    """A real one: what libraries only reserve (Arrow's pool, thread stacks) is more than its bound,
    and not counted.
    """
    folder = make_served_bundle(tmp_path, num_labels=400)
    probe = follow.probe_as_served(folder, Serve())
    bundle = RealEngine.load(folder, Serve()).bundle
    assert probe.sha256 == bundle.sha256 and 0 < probe.p95_ms < 10_000
    texts = known_texts(bundle)
    assert texts[0] == bundle.titles[0].as_py()
    assert len(texts) == NUM_TITLES + 2


def test_a_damaged_bundle_fails_its_probe_with_the_reason(tmp_path):
    folder = make_served_bundle(tmp_path, num_labels=40)
    np.save(folder / "vectors" / "de.npy", np.full((40, 16), np.nan, dtype=np.float32))
    write_manifest(folder, KIND, VERSION, {})
    with pytest.raises(ArtifactError, match=r"(?s)cannot serve it.*de\.npy"):
        follow.probe_as_served(folder, Serve())


@pytest.mark.parametrize(
    ("registry", "up"),
    [
        ("up", 1),
        ("away", 0),
        ("not asked", 0),
    ],
)
def test_metrics(registry, up):
    state = Follower(Service(Serve()), ALIAS, Serve()).state()
    found = {
        family.name: family.samples[0].value
        for family in follow_metrics(state | {"registry": registry})
    }
    assert found == {
        "unidec_follow_swaps": 0,
        "unidec_follow_refusals": 0,
        "unidec_follow_registry_up": up,
        "unidec_follow_refused": 0,
    }
    happened = {"refused": {"version": "7"}, "looked_seconds_ago": 0.4, "swaps": 3}
    later = {family.name: family.samples[0].value for family in follow_metrics(state | happened)}
    assert [
        later[f"unidec_follow_{name}"] for name in ("swaps", "refused", "look_age_seconds")
    ] == [3, 1, 0.4]
