"""Fault 11: SIGKILL during registration or upload: the alias has not moved; run again, there is
exactly one version, the alias names it, and what the registry holds has the hash of the bundle.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers.gated_registry import make_bundle
from helpers.working_folder import at

from unidec.data.storage import folder_sha256
from unidec.tracking.fetch import fetch_bundle
from unidec.tracking.registry import HASH_TAG
from unidec.tracking.store import open_client

CHILD = Path(__file__).parents[1] / "tracking" / "killed_child.py"


@pytest.fixture(scope="module")
def bundle_of(tmp_path_factory):
    """`bundle_of(3)`: a real one, another for each number."""
    folder = tmp_path_factory.mktemp("bundles")

    def bundle_of(number: int) -> Path:
        place = make_bundle(folder, str(number), wrong=(0, number + 1))
        return place / "artifacts" / "bundle"

    return bundle_of


@pytest.fixture(scope="module")
def children(warm_python):
    """A process whose children are forked with everything imported."""
    with subprocess.Popen(
        [*warm_python, str(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def register(children, memory_registry, request):
    """`register(bundle, writes=n)` or `register(bundle, after=seconds)`: a life that may be killed;
    its exit code.
    """

    def run(bundle: Path, *, after: float | None = None, **job: int) -> int:
        words = {
            "call": "register",
            "bundle": str(bundle),
            "name": request.node.name,
            "uri": memory_registry,
        } | job
        children.stdin.write(json.dumps(words) + "\n")
        children.stdin.flush()
        pid = int(children.stdout.readline().split()[1])
        if after is not None:
            time.sleep(after)
            with contextlib.suppress(ProcessLookupError):  # it was faster
                os.kill(pid, signal.SIGKILL)
        return int(children.stdout.readline().split()[1])

    return run


def versions_of(client, name: str, bundle: Path) -> list[str]:
    found = client.search_model_versions(f"name = '{name}'")
    return [
        str(version.version) for version in found if version.tags[HASH_TAG] == folder_sha256(bundle)
    ]


def alias_of(client, name: str) -> str | None:
    if not client.search_registered_models(f"name = '{name}'"):
        return None
    version = client.get_registered_model(name).aliases.get("challenger")
    return None if version is None else str(version)


def check_whole(client, name: str, bundle: Path, uri: str, folder: Path) -> None:
    """One version of it, the alias names it, and what is stored is it."""
    (version,) = versions_of(client, name, bundle)
    assert alias_of(client, name) == version
    stored = at(folder, fetch_bundle, f"models:/{name}@challenger", uri)
    assert folder_sha256(folder / stored) == folder_sha256(bundle)


def test_killed_before_each_write(register, bundle_of, memory_registry, tmp_path, request):
    """The model's entry, the version, the alias: these are the writes to the registry."""
    client = open_client(memory_registry)
    name = request.node.name
    bundle = bundle_of(0)
    for writes in range(3):
        assert register(bundle, writes=writes) == -signal.SIGKILL
        assert alias_of(client, name) is None
        assert len(versions_of(client, name, bundle)) == (writes == 2)
    assert register(bundle) == 0
    check_whole(client, name, bundle, memory_registry, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_random_moments_while_another_is_challenger(
    register, bundle_of, memory_registry, tmp_path, request
):
    client = open_client(memory_registry)
    name = request.node.name
    first = bundle_of(0)
    began = time.monotonic()
    assert register(first) == 0
    life = time.monotonic() - began
    moments = random.Random(0)
    killed = 0
    for number in range(1, 9):
        bundle = bundle_of(number)
        held = alias_of(client, name)
        killed += register(bundle, after=moments.uniform(0, 0.9 * life)) == -signal.SIGKILL
        alias = alias_of(client, name)
        versions = versions_of(client, name, bundle)
        assert alias == held or [alias] == versions  # never on something that was not verified
        assert len(versions) <= 1
        began = time.monotonic()
        assert register(bundle) == 0
        life = min(life, time.monotonic() - began)  # the first one had more to set up
        check_whole(client, name, bundle, memory_registry, tmp_path)
    assert killed >= 3
    assert len(versions_of(client, name, first)) == 1
