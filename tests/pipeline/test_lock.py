"""What a training reads is not replaced while it runs (fault 29): with a real process that holds
the lock.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.raw_files import write_raw
from helpers.tiny_training import tiny_params

from unidec import pipeline
from unidec.config import Params
from unidec.data.raw import RawData
from unidec.errors import TrainingError
from unidec.pipeline import lock

pytestmark = pytest.mark.timeout(240)
HOLD = (
    "import sys; from unidec.pipeline.lock import one_at_a_time\n"
    "with one_at_a_time():\n"
    "    print('held', flush=True); sys.stdin.read()"
)
REPLACING = ("ingest", "tokens", "propensity", "label_graph", "choose_start")


@pytest.fixture
def place(tmp_path: Path, tiny_raw: RawData, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    write_raw(tiny_raw, tmp_path / "raw", "xmc-json")
    return tmp_path


@pytest.fixture
def params(tiny_bert: Path) -> Params:
    return tiny_params(tiny_bert, **{"data.path": "raw", "retrain.start": "cold"})


@pytest.fixture
def holder(place: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_stage_that_replaces_data_is_refused_under_a_training(
    holder: subprocess.Popen[str], params: Params, place: Path
) -> None:
    for name in REPLACING:
        with pytest.raises(TrainingError, match=rf"under way(.|\n)*process {holder.pid}: .*python"):
            getattr(pipeline, name)(params)
    assert lock.is_held() and not (place / "data").exists()
    holder.kill()  # nothing has to be removed
    holder.wait()
    assert not lock.is_held()
    pipeline.ingest(params)
    assert (place / "data" / "dataset" / "manifest.json").is_file()
    assert lock.HELD not in os.environ


def test_the_command_names_the_process(
    holder: subprocess.Popen[str], params: Params, place: Path
) -> None:
    (place / "params.json").write_text(params.model_dump_json())
    done = subprocess.run(
        [sys.executable, "-m", "unidec.cli", "data", "ingest", "--params", "params.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == TrainingError.exit_code
    assert f"process {holder.pid}" in done.stderr
    assert "Traceback" not in done.stderr and not (place / "data").exists()


def test_the_holder_prepares_its_own_data_here_and_in_processes_that_it_starts(
    params: Params, place: Path
) -> None:
    enter = "from unidec.pipeline.lock import replaces_inputs\nwith replaces_inputs(): print('in')"
    with lock.one_at_a_time():
        pipeline.ingest(params)
        inside = dict(os.environ)
        assert (
            subprocess.run(
                [sys.executable, "-c", enter], capture_output=True, text=True, check=True
            ).stdout
            == "in\n"
        )
    # a process that outlives the holder has no right to the lock
    inside[lock.HELD] = inside[lock.HELD].replace(f'"pid": {os.getpid()}', '"pid": 999999999')
    with lock.one_at_a_time():
        done = subprocess.run(
            [sys.executable, "-c", enter], capture_output=True, text=True, check=False, env=inside
        )
    assert done.returncode and "under way" in done.stderr


def test_a_training_is_refused_while_data_is_replaced(place: Path) -> None:
    with (
        lock.replaces_inputs(),
        pytest.raises(TrainingError, match="replaces its data"),
        lock.one_at_a_time(),
    ):
        raise AssertionError("both at once")
