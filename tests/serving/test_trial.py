"""A bundle is tried in a process of its own: what it says; what becomes of one that crashes, hangs or fills memory."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unidec.data.storage import folder_sha256, write_manifest
from unidec.errors import ArtifactError
from unidec.retrieval.bundle_folder import KIND, VERSION
from unidec.retrieval.probe import num_different
from unidec.sections import Serve
from unidec.serving import trial as module
from unidec.serving.room import folder_bytes
from unidec.serving.service import Engine
from unidec.serving.trial import Trials, ask, known_texts, unfit


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, helper: Callable[[str], Any]) -> Path:
    return helper("served_bundle").make_served_bundle(tmp_path_factory.mktemp("served"), num_labels=40)


def test_a_good_one_answers_there_as_here(bundle):
    trial = Trials().run(bundle, Serve())
    assert trial.sha256 == folder_sha256(bundle) and trial.seconds > 0 and 10 < trial.megabytes < 4000
    engine = Engine.load(bundle, Serve())
    assert trial.texts == known_texts(engine.bundle) and len(trial.texts) == module.NUM_TITLES + 2
    assert num_different(trial, *ask(engine, trial.texts)) == 0
    assert trial.labels[0][0] == "L0", "a title finds its own label"


def test_a_damaged_one_fails_with_its_reason(bundle, tmp_path):
    broken = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    np.save(broken / "vectors" / "de.npy", np.full((40, 16), np.nan, dtype=np.float32))
    write_manifest(broken, KIND, VERSION, {})
    with pytest.raises(ArtifactError, match=r"(?s)cannot serve it.*de\.npy"):
        Trials().run(broken, Serve())


def child_of(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """In place of the real child: `program`, which has read its job."""
    real = module.start_child
    words = ("timeit", "-n1", "-r1", f"import os, sys, time; sys.stdin.read(); {program}")
    monkeypatch.setattr(module, "start_child", lambda name, **variables: real(*words, **variables))


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("os.abort()", "exit code -6"),
        ("os._exit(3)", "exit code 3"),
        ("os._exit(0)", "exit code 0"),
        ("print('not JSON'); os._exit(0)", "exit code 0"),
        ("print('[1, 2]'); os._exit(0)", "exit code 0"),
    ],
)
def test_a_child_that_dies_is_a_refusal(tmp_path, monkeypatch, program, why):
    child_of(monkeypatch, program)
    with pytest.raises(ArtifactError, match=why):
        Trials().run(tmp_path, Serve())


def test_a_child_that_hangs_is_killed(tmp_path, monkeypatch):
    child_of(monkeypatch, "time.sleep(60)")
    monkeypatch.setattr(module, "SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(ArtifactError, match="does not get it to answer"):
        Trials().run(tmp_path, Serve())
    assert time.monotonic() - began < 10


def test_close_ends_a_trial(tmp_path, monkeypatch):
    child_of(monkeypatch, "time.sleep(60)")
    trials = Trials()
    timer = threading.Timer(0.3, trials.close)
    timer.start()
    with pytest.raises(ArtifactError):
        trials.run(tmp_path, Serve())
    timer.join()


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA bounds anonymous memory on Linux alone")
def test_memory_is_bounded():
    """Of a hundred megabytes more, fifty are had and five hundred are not."""
    program = (
        "from unidec.serving.trial import bound_memory; bound_memory(100 << 20); a = bytearray(50 << 20);"
        "print('had'); bytearray(500 << 20); print('all')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "had\n" and "MemoryError" in done.stderr


@pytest.mark.parametrize(
    ("labels", "scores", "why"),
    [
        (["a", "b"], [2.0, 1.0], ""),
        (["a", "b"], [1.0, 1.0], ""),
        ([], [], "no labels"),
        (["a", "a"], [2.0, 1.0], "twice"),
        (["a", "b"], [math.nan, 1.0], "no number"),
        (["a", "b"], [1.0, -math.inf], "no number"),
        (["a", "b"], [1.0, 2.0], "order"),
    ],
)
def test_answers_that_cannot_be(labels, scores, why):
    assert why in unfit(labels, scores) and bool(why) == bool(unfit(labels, scores))
    engine: Any = SimpleNamespace(
        answer=lambda requests: [SimpleNamespace(labels=labels, scores=scores)], bundle=SimpleNamespace(path="here")
    )
    if why:
        with pytest.raises(ArtifactError, match="cannot be"):
            ask(engine, ["a text"])
    else:
        assert ask(engine, ["a text"]) == ([labels], [scores])


def test_the_bound_is_twice_the_files(bundle, monkeypatch):
    jobs = []
    monkeypatch.setattr(module, "_Said", lambda child, job: jobs.append(job) or SimpleNamespace(wait=lambda s: False))
    child_of(monkeypatch, "pass")
    with pytest.raises(ArtifactError):
        Trials().run(bundle, Serve())
    assert f'"max_bytes": {2 * folder_bytes(bundle) + module.SPACE_BYTES}'.encode() in jobs[0]


def test_what_libraries_only_reserve_is_no_part_of_the_bound(helper, tmp_path, monkeypatch):
    """Arrow's pool, thread stacks and heaps: more than a gigabyte of addresses; the bundle itself takes some 40 MB."""
    many = helper("served_bundle").make_served_bundle(tmp_path, num_labels=60_000)
    monkeypatch.setattr(module, "SPACE_BYTES", 256 << 20)
    found = Trials().run(many, Serve())
    assert len(found.labels) == len(found.texts) > 2
