"""Each defect is made for real, found, repaired where that is safe, and gone afterwards."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from unidec import cli
from unidec.data.storage import write_folder
from unidec.model import frozen
from unidec.pipeline import doctor, teaching
from unidec.pipeline.doctor import Finding
from unidec.pipeline.lock import one_at_a_time
from unidec.tracking.run import Tracker
from unidec.tracking.store import open_client, prepare_store
from unidec.training.checkpoint import Checkpoint, CheckpointWriter


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, with no store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    return child.pid


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def repaired(code: int) -> None:
    """The one finding has this weight, is left alone, is repaired when asked, and is not found
    again.
    """
    finding = only(doctor.examine())
    assert doctor.exit_code([finding]) == code
    assert finding.fixable
    assert finding.done is None
    assert only(doctor.examine()).where == finding.where  # looking changed nothing
    fixed = only(doctor.examine(fix=True))
    assert fixed.done and doctor.exit_code([fixed]) == 0
    assert doctor.examine() == []


def reported(code: int, words: str, where: str, **options: bool) -> Finding:
    """The one finding says this, and is left as it is."""
    finding = only(doctor.examine(fix=True, **options))
    assert doctor.exit_code([finding]) == code
    assert finding.done is None
    assert not finding.fixable
    assert words in finding.what
    assert finding.where.endswith(where)
    assert finding.fix
    return finding


def test_nothing_is_wrong_with_nothing() -> None:
    assert doctor.examine(deep=True, fix=True) == []
    assert doctor.exit_code([]) == 0


# -- half-written
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "folder", ["data/tokens", "outputs", "runs/abc/checkpoints", "runs/own/x/data"]
)
def test_what_a_killed_writer_left(place: Path, dead_pid: int, folder: str) -> None:
    root = place / folder
    root.mkdir(parents=True)
    host = socket.gethostname()
    left = root / f".queries.{host}.{dead_pid}.0123abcd.tmp"
    left.mkdir()
    (left / "ids.npy").write_bytes(b"12345")
    mine = root / f".labels.{host}.{os.getppid()}.0123abcd.tmp"  # at work
    mine.write_bytes(b"")
    repaired(1)
    assert mine.exists() and not left.exists()


def test_a_kill_inside_write_folder_is_found(place: Path) -> None:
    code = (
        "import os, signal\nfrom unidec.data.storage import write_folder\n"
        "with write_folder('data/dataset', 'dataset', 1) as out:\n"
        "    (out.path / 'x').write_bytes(b'1')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    returncode = subprocess.run([sys.executable, "-c", code], timeout=60).returncode
    assert returncode == -9
    repaired(1)


def test_what_ranks_left_is_removed_unless_a_training_is_at_work(place: Path) -> None:
    left = place / "runs" / "abc" / "checkpoints" / ".step-0000000010.ranks.tmp"
    left.mkdir(parents=True)
    with one_at_a_time(place / "runs"):
        assert doctor.examine(fix=True) == [] and left.exists()
    repaired(1)


# -- artifacts
# --------------------------------------------------------------------------------------------------


def artifact(path: str, kind: str) -> Path:
    with write_folder(path, kind, 1) as out:
        np.save(out.path / "ids.npy", np.arange(100))
    return Path(path)


def test_a_damaged_artifact() -> None:
    path = artifact("outputs/model", "model")
    assert doctor.examine(deep=True) == []
    with open(path / "ids.npy", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\7")
    assert doctor.examine() == []  # the size is right: only --deep reads it
    reported(4, "damaged", "outputs/model/ids.npy", deep=True)
    os.truncate(path / "ids.npy", 10)
    assert "dvc checkout outputs/model" in reported(4, "got: 10 bytes", "outputs/model/ids.npy").fix


@pytest.mark.parametrize("folder", ["", "runs/own/trial/"])
@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"kind": 3}'])
def test_a_folder_without_its_manifest(content: bytes | None, folder: str) -> None:
    path = artifact(f"{folder}data/cache/vectors-1", "encoder-cache")
    (path / "manifest.json").unlink()
    if content is not None:
        (path / "manifest.json").write_bytes(content)
    assert "computed again" in reported(4, "manifest", "vectors-1/manifest.json").fix


@pytest.mark.parametrize(
    ("name", "kind"),
    [("vectors", frozen.KIND), ("teacher", teaching.KIND), ("words", teaching.WORDS_KIND)],
)
def test_each_kind_of_cache(name: str, kind: str) -> None:
    path = artifact(f"data/cache/{name}-0123456789abcdef", kind)
    path.with_name(f"{path.name}.shards").mkdir()  # the next run resumes with them
    assert doctor.examine() == []
    os.truncate(path / "ids.npy", 10)
    assert "computed again" in reported(4, "got: 10 bytes", f"{path}/ids.npy").fix


# -- runs
# --------------------------------------------------------------------------------------------------


def checkpoints(run: str, *steps: int, epoch: int = 0, refresh: str | None = None) -> list[Path]:
    found = []
    for step in steps:
        writer = CheckpointWriter(Path("runs") / run)
        state = {
            "epoch": epoch,
            "epoch_step": step,
            "step": step,
            "seconds": 0.0,
            "refresh": refresh,
            "identity": {},
            "notes": {},
        }
        found.append(writer.save(Checkpoint(state, {"model.x": torch.ones(4)}, {})))
    return found


def test_a_damaged_checkpoint_beside_a_whole_one_and_alone() -> None:
    first, second = checkpoints("abc", 10, 20)
    assert doctor.examine(deep=True) == []
    os.truncate(second / "dense.safetensors", 5)
    assert "newest intact one is used" in reported(1, "a damaged checkpoint", second.name).fix
    os.truncate(first / "dense.safetensors", 5)
    both = doctor.examine(fix=True)
    expected = [("broken", False)] * 2
    assert [(f.severity, f.fixable) for f in both] == expected
    assert doctor.exit_code(both) == 4


# -- tracking
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def uri(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = prepare_store(f"sqlite:///{place}/mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


def status(uri: str, run_id: str | None) -> str:
    return open_client(uri).get_run(str(run_id)).info.status


def test_a_run_whose_process_was_killed(uri: str, warm_python: list[str]) -> None:
    code = (
        "import os, signal\nfrom pathlib import Path\nfrom unidec.tracking.run import Tracker\n"
        "Tracker('doctor').start(Path('runs/a'), {'seed': 0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    returncode = subprocess.run([*warm_python, "-c", code], timeout=120).returncode
    assert returncode == -9
    run_id = json.loads(Path("runs/a/tracking.json").read_text())["run_id"]
    at_work = Tracker("doctor")
    at_work.start(Path("runs/b"), {})
    assert run_id in only(doctor.examine()).what
    assert status(uri, run_id) == "RUNNING"
    repaired(1)
    assert status(uri, run_id) == "KILLED"
    assert status(uri, at_work.run_id) == "RUNNING"


def test_figures_that_wait_are_sent_unless_a_training_is_at_work(uri: str) -> None:
    tracker = Tracker("doctor")
    tracker.start(Path("runs/a"), {})
    tracker.log(7, {"loss": 0.5})
    assert doctor.examine() == []
    tracker.finish()
    tracker.log(8, {"loss": 0.4})
    repaired(1)
    steps = [p.step for p in open_client(uri).get_metric_history(str(tracker.run_id), "loss")]
    assert steps == [
        7,
        8,
    ]
    assert status(uri, tracker.run_id) == "FINISHED"


def test_a_damaged_note_of_the_run(uri: str) -> None:
    Tracker("doctor").start(Path("runs/a"), {})
    Path("runs/a/tracking.json").write_text("{")
    reported(1, "a damaged record", "tracking.json")


def test_the_command(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["unidec", "runs", "doctor"])

    def run(code: int) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == code
        return capsys.readouterr().out

    assert run(0) == "healthy\n"
    (path,) = checkpoints("abc", 10)
    os.truncate(path / "dense.safetensors", 5)
    assert "a damaged checkpoint" in run(4)
