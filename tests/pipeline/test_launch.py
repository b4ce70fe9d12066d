"""What the launcher makes of what its ranks leave behind; real processes are in
tests/faults/test_rank_dies.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from unidec.config import Params
from unidec.data.storage import write_json
from unidec.errors import ArtifactError, ConfigError, DataError, TrainingError, UnidecError
from unidec.pipeline import launch
from unidec.pipeline.parent_watch import LAUNCHER
from unidec.training.distributed import LostRank


def fail_rank(folder, monkeypatch, rank, error):
    """What a worker makes of an error; returns its exit code."""

    def work(_ranks, _job):
        raise error

    write_json(folder / "job.json", {"params": {"device": "cpu"}})
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(launch, "watch", lambda *pids: None)
    monkeypatch.setattr(launch, "silence", lambda: None)
    return launch.worker(folder, work)


@pytest.mark.parametrize(
    "kind", [ConfigError, DataError, ArtifactError, TrainingError, UnidecError]
)
def test_an_error_keeps_its_words_and_its_exit_code(tmp_path, monkeypatch, kind):
    error = kind("no space", where="a/b", got=3, expected=4, fix="buy a disk")
    assert fail_rank(tmp_path, monkeypatch, 1, error) == 0  # torchrun does not retry it
    with pytest.raises(UnidecError) as again:
        launch._result(tmp_path, 0)
    assert str(again.value) == str(error)
    assert again.value.exit_code == error.exit_code


def test_the_error_with_a_cause_is_raised_not_its_consequences(tmp_path, monkeypatch):
    assert fail_rank(tmp_path, monkeypatch, 1, ArtifactError("no space left")) == 0
    assert fail_rank(tmp_path, monkeypatch, 0, LostRank("gone")) == 0
    with pytest.raises(UnidecError, match="no space left"):
        launch._result(tmp_path, 0)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "SIGKILL"),
        (1, "exit code 1"),
        (-15, "SIGTERM"),
    ],
)
def test_a_rank_that_died(tmp_path, monkeypatch, code, words):
    assert fail_rank(tmp_path, monkeypatch, 0, LostRank("gone")) == 1
    with pytest.raises(TrainingError, match=words):
        launch._result(tmp_path, code)


def test_the_first_ranks_result(tmp_path):
    write_json(tmp_path / "rank-0.json", {"report": {"epoch": 3}})
    assert launch._result(tmp_path, 0) == {"epoch": 3}
    with pytest.raises(TrainingError, match="died"):  # written, but then a rank died
        launch._result(tmp_path, 1)


def test_one_process_needs_no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with launch.torchrun_ranks(Params(), lambda ranks, job: {}) as (leads, launcher):
        assert leads and launcher is None


def test_a_worker_whose_launcher_is_gone_leaves(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    program = (
        "import sys, time; from unidec.pipeline.parent_watch import watch; "
        "watch(); print(1, flush=True); time.sleep(600)"
    )
    env = os.environ | {LAUNCHER: str(parent.pid)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=env, stdout=subprocess.PIPE
    ) as worker:
        try:
            assert worker.stdout.readline() == b"1\n"
            time.sleep(1.5)
            assert worker.poll() is None
            parent.kill()  # and not waited for: it is there still, as a zombie
            assert worker.wait(20) == -15
        finally:
            parent.kill()
            parent.wait()
            worker.kill()
