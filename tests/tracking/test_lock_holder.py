"""Which process held a run: this one, one that is gone, one whose number was given again, one
elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unidec.tracking.process_alive import is_alive, this_process
from unidec.tracking.run import has_died


@pytest.fixture(scope="module")
def gone() -> dict:
    """A process that described itself and ended."""
    code = (
        "import json; from unidec.tracking.process_alive import this_process; "
        "print(json.dumps(this_process()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def test_who_is_alive(gone: dict) -> None:
    me = this_process()
    assert me["pid"] == os.getpid()
    assert is_alive(me) is True
    assert is_alive(gone) is False
    assert is_alive(me | {"started": me["started"] - 3600}) is False  # the number was given again
    assert is_alive(me | {"host": "another"}) is None
    for nothing in (None, {}, {"host": me["host"]}, me | {"pid": "x"}):
        assert is_alive(nothing) is None


def test_a_process_that_waits_to_be_reaped_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()  # its end; nobody has asked for its exit code yet
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(this_process() | {"pid": child.pid, "started": time.time()}) is False
    child.wait()
    child.stdout.close()


def test_runs_whose_process_died(gone: dict, tmp_path: Path) -> None:
    states = {
        "killed": {"status": None, "holder": gone},
        "at-work": {"status": None, "holder": this_process()},
        "ended": {"status": "KILLED", "holder": gone},
        "elsewhere": {"status": None, "holder": gone | {"host": "another"}},
        "of-an-older-version": {"status": None},
    }
    for name, state in states.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tracking.json").write_text(json.dumps(state))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tracking.json").write_text("{")
    (tmp_path / "empty").mkdir()
    assert [path.name for path in sorted(tmp_path.iterdir()) if has_died(path)] == ["killed"]
