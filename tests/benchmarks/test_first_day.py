"""The program that measures the first day; and, on its data, which processes an unchanged `make
train` starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# `python -m flows.train` that prints the commands it started
AUDITED = """
import json, sys
started = []
def note(name, told):
    if name == "subprocess.Popen":
        started.append([str(word) for word in told[1]])

sys.addaudithook(note)
from flows.command import main
code = main("train", [])
print(json.dumps(started))
sys.exit(code)
"""


@pytest.fixture
def first_day(benchmark_module):
    return benchmark_module("first_day")


def test_data_of_the_size_that_is_named(first_day, tmp_path):
    first_day.write_data(tmp_path / "mine")
    rows = {
        name: (tmp_path / "mine" / f"{name}.csv").read_text().count("\n") - 1
        for name in ("queries", "labels")
    }
    assert rows == {"queries": first_day.NUM_QUERIES, "labels": first_day.NUM_LABELS}


def test_a_table_of_seconds(first_day, tmp_path):
    found = first_day.timed([sys.executable, "-c", "pass"], tmp_path, dict(os.environ), turns=2)
    assert found["processor_s"] > 0
    assert 0 < found["wall_s"] < 60
    with pytest.raises(SystemExit, match="ended with 3"):
        first_day.timed([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, dict(os.environ))
    table = first_day.show({"a": {"make train": {"wall_s": 50.0, "processor_s": 61.3}}})
    assert table.splitlines()[-1] == "| `make train` | 50.0 s (61.3) | 60 s |"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_an_unchanged_run_starts_no_server_and_calls_dvc_once(first_day, tmp_path):
    project = tmp_path / "project"
    first_day.clone(project)
    (project / ".venv").symlink_to(Path(sys.prefix))
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "MLFLOW_"))
    }
    env = own | {"PYTHONPATH": str(project)}

    def run() -> list[list[str]]:
        words = [sys.executable, "-c", AUDITED]
        done = subprocess.run(
            words, cwd=project, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    first = run()
    assert sum("flows.server" in words for words in first) == 1
    again = run()
    assert not any("flows.server" in words for words in again)
    assert [words[3:5] for words in again if "dvc" in words] == [["status", "--json"]]
    assert len(again) <= 8, again  # beside the two: git, for what decides the model, and `uname`
