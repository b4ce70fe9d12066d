"""Promotion and rollback: what is refused, and that both aliases move as one step whatever is
killed.
"""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pytest
from helpers import stored_versions
from helpers.mlflow_server import MlflowServer

from unidec.errors import ArtifactError, ConfigError, Refused
from unidec.tracking import promotion
from unidec.tracking.promotion import (
    CHAMPION,
    PENDING_TAG,
    PREVIOUS,
    Promotion,
    aliases,
    promote,
    recover,
    rollback,
)
from unidec.tracking.store import open_client


@pytest.fixture(autouse=True)
def _default_store(memory_registry, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", memory_registry)


@pytest.fixture(scope="module")
def client(memory_registry):
    return open_client(memory_registry)


@pytest.fixture
def stored(client, tmp_path, request):
    """`stored("a", **tags)`: a version of a model of this test's own; `stored.name`,
    `stored.passed`.
    """

    def make(what: str, **tags: str) -> str:
        return stored_versions.store_version(client, make.name, tmp_path / what, what, **tags)

    make.name = request.node.name
    make.passed = stored_versions.passed
    make.folder = tmp_path
    return make


def tags_of(client, name: str, version: str) -> dict[str, str]:
    return client.get_model_version(name, version).tags


def three_champions(stored, memory_registry) -> list[str]:
    """Versions a, b, c, promoted one after the other."""
    versions: list[str] = []
    for what in "abc":
        versions.append(stored(what, **stored.passed(versions[-1] if versions else None)))
        promote(stored.name, versions[-1])
    return versions


def test_the_first_has_no_previous_and_each_next_one_leaves_it(stored, client, memory_registry):
    a = stored("a", **stored.passed())
    done = promote(stored.name, a, reason="the first")
    assert asdict(done) == {
        "model": stored.name,
        "version": a,
        "previous": None,
        "dirty": False,
        "forced": False,
        "changed": True,
    }
    assert aliases(client, stored.name) == {CHAMPION: a}
    b = stored("b", **stored.passed(a))
    client.set_registered_model_alias(stored.name, "challenger", b)
    assert promote(stored.name).previous == a
    expected = {CHAMPION: b, PREVIOUS: a, "challenger": b}
    assert aliases(client, stored.name) == expected
    again = promote(stored.name, b)
    assert again.previous == a and not again.changed
    kept = tags_of(client, stored.name, a)
    assert kept["promoted.reason"] == "the first" and kept["promoted.by"]
    assert (
        abs((datetime.now(UTC) - datetime.fromisoformat(kept["promoted.at"])).total_seconds()) < 600
    )
    assert kept["promoted.dirty"] == kept["promoted.forced"] == "false"
    assert PENDING_TAG not in tags_of(client, stored.name, b)


def test_what_speaks_against_it_is_listed_at_once_and_force_says_so(
    stored, client, memory_registry
):
    a = stored("a", **stored.passed())
    promote(stored.name, a)
    bad = {
        "gate.passed": "false",
        "gate.failed": "nDCG@5, code",
        "gate.champion": "99",
        "git.dirty": "true",
    }
    b = stored(
        "b",
        **bad,
        **{"rolled_back.at": "2026-01-01", "rolled_back.by": "ann", "rolled_back.reason": "slow"},
    )
    with pytest.raises(Refused) as caught:
        promote(stored.name, b)
    for words in (
        "nDCG@5, code",
        "compared it with version 99",
        "--force",
        "rolled back at 2026-01-01 by ann: slow",
    ):
        assert words in str(caught.value)
    assert aliases(client, stored.name) == {CHAMPION: a}
    done = promote(stored.name, b, force=True, reason="we need it")
    assert done.forced and done.dirty
    kept = tags_of(client, stored.name, b)
    assert (
        kept["promoted.forced"] == kept["promoted.dirty"] == "true"
        and kept["promoted.reason"] == "we need it"
    )
    assert not [key for key in kept if key.startswith("rolled_back")]


@pytest.mark.parametrize(
    "tags", [{}, {"gate.passed": "false"}, {"gate.passed": "true", "gate.champion": "3"}]
)
def test_not_judged_not_passed_or_judged_against_another(stored, client, memory_registry, tags):
    version = stored("a", **tags)
    with pytest.raises(Refused):
        promote(stored.name, version)
    assert aliases(client, stored.name) == {}


def test_a_dirty_tree_only_when_told(stored, client, memory_registry):
    dirty = {
        "gate.passed": "false",
        "gate.failed": "code",
        "gate.champion": "",
        "git.dirty": "true",
    }
    a = stored("a", **dirty)
    with pytest.raises(
        Refused,
        match=rf"pass the gate: code\n.*commit the changes.*unidec models promote {a} --force",
    ):
        promote(stored.name, a)
    done = promote(stored.name, a, force=True)
    assert done.dirty and done.forced
    assert tags_of(client, stored.name, a)["promoted.dirty"] == "true"


def test_a_damaged_bundle_never_becomes_champion(stored, client, memory_registry):
    a, b = (stored(what, **stored.passed()) for what in "ab")
    (stored.folder / "a" / "artifacts" / "bundle" / "labels.json").write_text('["A"]')
    with pytest.raises(ArtifactError, match="damaged"):
        promote(stored.name, a, force=True)
    client.set_model_version_tag(stored.name, b, "bundle.sha256", "0" * 64)
    with pytest.raises(ArtifactError, match="another bundle"):
        promote(stored.name, b, force=True)
    assert aliases(client, stored.name) == {}


def test_no_such_version_names_those_there_are(stored, memory_registry):
    stored("a")
    for which in ("7", "challenger", "nonsense"):
        with pytest.raises(ConfigError, match="expected: one of 1"):
            promote(stored.name, which)
    with pytest.raises(ConfigError, match="unidec models register"):
        promote("no-such-model")


def test_rollback_swaps_and_what_was_left_stays_out(stored, client, memory_registry):
    _, b, c = three_champions(stored, memory_registry)
    assert rollback(stored.name, reason="answers are odd") == Promotion(
        model=stored.name, version=b, previous=c
    )
    assert aliases(client, stored.name) == {CHAMPION: b, PREVIOUS: c}
    left = tags_of(client, stored.name, c)
    back = tags_of(client, stored.name, b)
    assert left["rolled_back.reason"] == "answers are odd" and left["rolled_back.by"]
    assert back["promoted.reason"] == f"rollback from version {c}: answers are odd"
    client.set_model_version_tag(stored.name, c, "gate.champion", b)
    with pytest.raises(Refused, match="rolled back"):
        promote(stored.name, c)
    rollback(stored.name)  # and back again
    assert aliases(client, stored.name) == {CHAMPION: c, PREVIOUS: b}
    assert "rolled_back.at" not in tags_of(client, stored.name, c)
    assert "rolled_back.at" in tags_of(client, stored.name, b)


def test_nothing_to_go_back_to(stored, client, memory_registry):
    with pytest.raises(Refused, match="no earlier champion"):
        rollback("no-such-model")
    a = stored("a", **stored.passed())
    promote(stored.name, a)
    with pytest.raises(Refused, match="no earlier champion"):
        rollback(stored.name)
    client.set_registered_model_alias(stored.name, PREVIOUS, a)
    with pytest.raises(Refused, match="no earlier champion"):
        rollback(stored.name)


def test_a_damaged_previous_leaves_the_champion(stored, client, memory_registry):
    a, b = (three_champions(stored, memory_registry))[1:]
    (stored.folder / "b" / "artifacts" / "bundle" / "labels.json").unlink()
    with pytest.raises(ArtifactError):
        rollback(stored.name)
    assert aliases(client, stored.name) == {CHAMPION: b, PREVIOUS: a}


# -- cut short
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def children(warm_python):
    """A process whose forked children are killed: imports are paid for once."""
    words = [*warm_python, str(Path(__file__).parent / "killed_child.py")]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def cut_short(children, stored, memory_registry):
    """`cut_short(what, n)`: a real process that is killed before its n-th write."""

    def run(what: str, writes: int) -> None:
        job = {"call": "rollback"} if what == "rollback" else {"call": "promote", "version": what}
        children.stdin.write(
            json.dumps(job | {"name": stored.name, "uri": memory_registry, "writes": writes}) + "\n"
        )
        children.stdin.flush()
        children.stdout.readline()
        assert children.stdout.readline() == f"gone {-signal.SIGKILL}\n"

    return run


@pytest.mark.parametrize("writes", [0, 1, 2, 3, 5])
def test_killed_between_two_writes(cut_short, stored, client, memory_registry, writes):
    """0: the pending tag; 1: champion; 2: previous; from 3 on tags and the pending tag's end."""
    a, b, c = three_champions(stored, memory_registry)
    d = stored("d", **stored.passed(c))
    cut_short(d, writes)
    half = aliases(client, stored.name)
    assert half[CHAMPION] == (d if writes >= 2 else c)  # at every moment one that was verified
    assert recover(client, stored.name) is (writes >= 2)
    if writes < 2:
        assert aliases(client, stored.name) == {CHAMPION: c, PREVIOUS: b}  # as if nothing had been
    else:
        assert aliases(client, stored.name) == {CHAMPION: d, PREVIOUS: c}
        assert {"promoted.at", "promoted.forced"} <= tags_of(client, stored.name, d).keys()
    assert recover(client, stored.name) is False
    assert promote(stored.name, d).changed == (writes < 2)
    assert aliases(client, stored.name) == {CHAMPION: d, PREVIOUS: c}
    assert (
        PENDING_TAG not in tags_of(client, stored.name, d)
        and a not in aliases(client, stored.name).values()
    )


def test_a_rollback_killed_half_way_is_undone_or_completed_by_the_next(
    cut_short, stored, client, memory_registry
):
    _, b, c = three_champions(stored, memory_registry)
    cut_short("rollback", 1)
    assert aliases(client, stored.name) == {CHAMPION: c, PREVIOUS: b}  # nothing moved
    cut_short("rollback", 2)
    # half: champion moved, previous not
    assert aliases(client, stored.name) == {CHAMPION: b, PREVIOUS: b}
    assert rollback(stored.name) == Promotion(model=stored.name, version=b, previous=c)
    assert aliases(client, stored.name) == {CHAMPION: b, PREVIOUS: c}
    assert "rolled_back.at" in tags_of(client, stored.name, c)


def test_aliases_that_somebody_moved_by_hand_are_left_alone(
    cut_short, stored, client, memory_registry
):
    a, b, c = three_champions(stored, memory_registry)
    d = stored("d", **stored.passed(c))
    cut_short(d, 2)
    client.set_registered_model_alias(stored.name, CHAMPION, a)
    assert recover(client, stored.name) is False
    assert aliases(client, stored.name) == {CHAMPION: a, PREVIOUS: b}


# two processes that are forked with everything imported; prints {version: what it was refused for}
CONCURRENT_PROMOTIONS = """
import json, sys
from multiprocessing import get_context
import mlflow.store.model_registry.sqlalchemy_store
from unidec.errors import Refused
from unidec.tracking.promotion import promote

def attempt(version):
    try:
        promote(sys.argv[1], version)
    except Refused as error:
        return str(error)

with get_context("fork").Pool(2) as pool:
    print(json.dumps(dict(zip(sys.argv[2:], pool.map(attempt, sys.argv[2:], chunksize=1)))))
"""


def test_two_at_once_both_finish_one_after_the_other(stored, client, memory_registry, warm_python):
    a = stored("a", **stored.passed())
    promote(stored.name, a)
    challengers = [stored(what, **stored.passed(a)) for what in "bc"]
    words = [*warm_python, "-c", CONCURRENT_PROMOTIONS, stored.name, *challengers]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    won, lost = sorted(json.loads(done.stdout).items(), key=lambda item: item[1] is not None)
    assert won[1] is None
    assert aliases(client, stored.name) == {CHAMPION: won[0], PREVIOUS: a}
    assert f"compared it with version {a}, but there is now version {won[0]}" in lost[1]


def test_the_lock_is_released_after_a_refusal(stored, memory_registry, monkeypatch):
    monkeypatch.setattr(promotion, "LOCK_SECONDS", 0.1)
    a = stored("a", **stored.passed())
    with promotion._one_at_a_time(stored.name), pytest.raises(Refused, match="under way"):
        promote(stored.name, a)
    assert promote(stored.name, a).changed


@pytest.mark.slow
def test_all_of_it_over_http(children, tmp_path, monkeypatch):
    """A real server: promoted, killed half-way, mended, rolled back; a server that is away is no
    promotion.
    """
    name = "served"
    with MlflowServer(tmp_path).running() as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
        monkeypatch.chdir(tmp_path)
        client = open_client(server.uri)
        numbers = []
        for what in "abc":
            tags = stored_versions.passed(numbers[-1] if numbers else None)
            numbers.append(
                stored_versions.upload_version(client, name, tmp_path / what, what, **tags)
            )
            if what != "c":
                promote(name, numbers[-1])
        a, b, c = numbers
        job = {
            "call": "promote",
            "version": c,
            "name": name,
            "uri": server.uri,
            "writes": 2,
        }
        children.stdin.write(json.dumps(job) + "\n")
        children.stdin.flush()
        children.stdout.readline()
        assert children.stdout.readline() == f"gone {-signal.SIGKILL}\n"
        assert aliases(client, name) == {CHAMPION: c, PREVIOUS: a}
        assert promote(name, c).previous == b
        assert rollback(name).version == b
        assert aliases(client, name) == {CHAMPION: b, PREVIOUS: c}
        (stored,) = [
            f for f in (tmp_path / "artifacts").rglob("labels.json") if f.read_text() == '["c"]'
        ]
        stored.write_text('["C"]')
        with pytest.raises(ArtifactError, match="damaged"):
            rollback(name)
        assert aliases(client, name) == {CHAMPION: b, PREVIOUS: c}
